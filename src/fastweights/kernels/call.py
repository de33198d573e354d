"""One call of the family's kernels: its sizes, and its launches."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fastweights.kernels import dot_precision
from fastweights.kernels.settings import (
    constants,
    maps_at_once,
    num_ranges,
    num_segments,
    properties,
    scan_values,
)
from fastweights.kernels.tile import INTERPRETED

INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")


class Kind:
    """What calls share that differ only in B, T and where their data lie."""

    def __init__(self) -> None:
        # by stage; and by stage and its arguments' types, a compiled kernel,
        # the values of its constants, and whether it makes descriptors
        self.constants: dict[str, dict[str, Any]] = {}
        self.kernels: dict[tuple, tuple[Any, list[Any], bool]] = {}
        # what was compiled together: how many segments (3: three or more),
        # and whether the backward too
        self.compiled: set[tuple[int, bool]] = set()


_kinds: dict[tuple, Kind] = {}


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Bytes on the GPU, until what runs on the current stream is done."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def launched(
    launch: Callable[..., Any], tma: bool, *arguments: Any, **constants: Any
) -> Any:
    """Run ``launch``. A kernel that makes descriptors takes scratch memory.

    Triton's allocator for that is a context variable: ours is set in a copy
    of the context, so that the caller's stays.
    """
    if not tma:
        return launch(*arguments, **constants)
    context = copy_context()
    context.run(triton.set_allocator, _allocate)
    return context.run(launch, *arguments, **constants)


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

    Every chunk of every sequence has a slot (``tile.first_slot``). A dry call
    compiles its kernels and runs none.
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
    on: torch.device | None = None  # of a call whose tensors have no data
    dry: bool = False
    kind: Kind | None = None

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
        BV = scan_values(self.q.dtype, properties(self.device)[0])
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

    def classify(self) -> Kind:
        """Find its kind: what the compiled kernels depend on, but B and T.

        Of T only whether it is an integer of 64 bits for Triton.
        """
        tensors = [getattr(self, name) for name in INPUTS]
        tensors += self.others
        types = [None if x is None else x.dtype for x in tensors]
        sizes = (self.H, self.HV, self.K, self.V, self.chunk_size)
        precision = dot_precision(self.q.dtype, self.K)
        wide = self.T >= 2**31
        key = (*types, *sizes, self.gate_width, precision, wide, self.device)
        self.kind = _kinds.setdefault(key, Kind())
        return self.kind

    def constants(self, stage: str) -> dict[str, Any]:
        kind = self.kind or self.classify()
        found = kind.constants.get(stage)
        if found is None:
            found = kind.constants[stage] = constants(
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
        return found

    def run(
        self, stage: str, kernel: Any, programs: int, *arguments: Any
    ) -> None:
        """Launch the kernel with the stage's constants.

        Triton takes 15 us of the host's time to find the compiled kernel by
        the arguments' dtypes, and which are None, aligned or integers of 64
        bits; no kernel here depends on its integers' values. The call's kind,
        and the types of the arguments, say the same.
        """
        if self.dry:
            constants = self.constants(stage)
            kernel.warmup(*arguments, grid=(programs,), **constants)
            return
        kind = self.kind or self.classify()
        key = (stage, *map(type, arguments))
        found = kind.kernels.get(key)
        if found is not None:
            compiled, values, tma = found
            launched(compiled[programs, 1, 1], tma, *arguments, *values)
            return
        constants = self.constants(stage)
        tma = constants.get("TMA", False)
        launch = kernel[(programs,)]
        compiled = launched(launch, tma, *arguments, **constants)
        if isinstance(compiled, triton.FutureKernel):  # another thread's
            compiled = compiled.result()
        if not INTERPRETED:
            names = kernel.arg_names[len(arguments) :]
            values = [constants[name] for name in names]
            kind.kernels[key] = compiled, values, tma

    def new_states(
        self, number: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        shape = (number, self.HV, self.K, self.V)
        return self.q.new_empty(shape, dtype=dtype)
