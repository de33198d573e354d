"""One call of the family's kernels: its sizes, and its launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastweights.kernels.plan import Launch, with_scratch
from fastweights.kernels.settings import (
    constants,
    maps_at_once,
    num_ranges,
    num_segments,
    properties,
    scan_values,
)

INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")


def aligned(x: Tensor | None) -> Tensor | None:
    """``x``, or a copy, contiguous and at an address divisible by 16.

    As Triton's wide loads and tensor descriptors need it, and all that
    PyTorch allocates is; a slice of a tensor may be neither.
    """
    if x is None:
        return None
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@dataclass
class Call:
    """One call's inputs, :func:`aligned`, and what follows from their shapes.

    Every chunk of every sequence has a slot (``tile.first_slot``). A call
    ``on`` a device has tensors without data: it is traced.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    chunk_size: int
    others: tuple[Any, ...] = ()  # of a backward: do, dstate, what is kept
    on: torch.device | None = None
    traced: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.on is None:
            for name in INPUTS:
                setattr(self, name, aligned(getattr(self, name)))
            self.others = tuple(aligned(x) for x in self.others)
        self.device = self.on or self.q.device
        B, self.T, self.H, self.K = self.q.shape
        self.HV, self.V = self.v.shape[2:]
        N, self.slots = B, B * -(-self.T // self.chunk_size)
        if self.cu_seqlens is not None:
            N = self.cu_seqlens.shape[0] - 1
            self.slots = -(-B * self.T // self.chunk_size) + N
        self.num_sequences = N
        self.gate_width = 0
        if self.g is not None:
            self.gate_width = self.K if self.g.dim() == 4 else 1
        chunks = B * self.T // (N * self.chunk_size)
        BV = scan_values(self.q.dtype, properties(self.device).shared)
        programs = N * self.HV * -(-self.V // BV)
        self.segments = num_segments(programs, chunks, self.device)
        self.ranges = torch.sym_max(self.segments - 1, 1)
        if self.beta is not None:
            at_once = maps_at_once(
                int(self.K),
                int(self.V),
                self.q.dtype,
                int(self.gate_width),
                self.chunk_size,
                self.device,
            )
            maps = N * self.HV * -(-self.K // BV)
            most = num_ranges(programs, maps, at_once)
            self.ranges = torch.sym_min(self.ranges, most)

    @property
    def has_scores(self) -> bool:
        """Whether there is an Aqk: else the scans multiply it out again."""
        return self.gate_width > 1

    def constants(self, stage: str) -> dict[str, Any]:
        return constants(
            stage,
            self.H,
            self.HV,
            self.K,
            self.V,
            self.q.dtype,
            self.gate_width,
            self.beta is not None,
            self.chunk_size,
            self.device,
        )

    def run(
        self, stage: str, kernel: Any, programs: int, *arguments: Any
    ) -> None:
        """Launch the kernel with the stage's constants, or trace that."""
        constants = self.constants(stage)
        if self.on is not None:
            launch = Launch(kernel, programs, arguments, constants)
            self.traced.append(launch)
        elif constants.get("TMA"):
            with_scratch(kernel[(programs,)], *arguments, **constants)
        else:
            kernel[(programs,)](*arguments, **constants)

    def new_states(
        self, number: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        shape = (number, self.HV, self.K, self.V)
        return self.q.new_empty(shape, dtype=dtype)
