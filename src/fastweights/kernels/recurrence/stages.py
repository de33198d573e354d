"""The family's stages: the kernel that each launches, and on which tensors.

Those that a chunk has anyway are named as the functions of
:mod:`fastweights.reference.chunkwise` and its backward. A launch's arguments
stand in the order in which its kernel has them: tensors are those of
:func:`rooms`, numbers the call's lengths, META (``settings.constants``) last.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from types import SimpleNamespace
from typing import Any

import torch

from fastweights.kernels.recurrence.compose import compose_kernel
from fastweights.kernels.recurrence.intra import intra_fwd_kernel
from fastweights.kernels.recurrence.intra_backward import (
    gate_bwd_kernel,
    intra_bwd_kernel,
    intra_bwd_strong_kernel,
)
from fastweights.kernels.recurrence.scan import (
    scan_bwd_kernel,
    scan_fwd_kernel,
)
from fastweights.kernels.recurrence.schedule import (
    SCALE,
    Count,
    Launch,
    Room,
    Schedule,
)
from fastweights.kernels.recurrence.settings import Kind, Meta, constants
from fastweights.kernels.tail import ROWS, clear_tail_kernel

Dtypes = tuple[torch.dtype | None, ...]
INPUTS = ("q", "k", "v", "g", "beta", "initial_state")  # have gradients
GIVEN = (*INPUTS, "cu_seqlens", "do", "dstate")  # the last two to a backward
T, N, L = Count("T"), Count("N"), Count("L")


def meta_of(stage: str, kind: Kind) -> Meta:
    """What the stage's kernel is compiled for."""
    return constants(stage, kind)[0]


def sums_dbeta_by_tiles(kind: Kind) -> bool:
    """Whether the scan back writes dbeta, a part for each value tile.

    In fp16, where too little of it is left in dv, of which intra_bwd_kernel
    finds it otherwise.
    """
    return kind.delta and kind.dtype == torch.float16


def rooms(kind: Kind, dtypes: Dtypes) -> SimpleNamespace:
    """Every tensor of a forward and backward, as :class:`Room` has it.

    What they hold is in README.md; ``dtypes`` are those of the GIVEN tensors.
    None is what this kind of call does not have. row_beta is 0 past a
    sequence's end. For the backward of a gate per channel strong has a bit
    per key tile with a channel that decays too far (gates.is_weak). bound is
    the log2 of a bound on the map of a chunk's state, without a delta rule
    total. border_states pass the borders of segments, and maps are those of
    the segments before them: M, or the channels' decays. gate_bwd_kernel sums
    dg of parts and dkept.

    What travels together, so that a kernel has it as one argument: inputs,
    decayed, decays, and call, the call's numbers.
    """
    H, HV, K, V, C = kind.H, kind.HV, kind.K, kind.V, kind.chunk_size
    low, fp32, delta = kind.dtype, torch.float32, kind.delta
    head, channel = kind.gate == 1, kind.per_channel
    gated, gates = head or channel, (HV, K) if channel else (HV,)
    NK = meta_of("intra_backward", kind).NK
    of = dict.fromkeys(GIVEN) | dict(zip(GIVEN, dtypes, strict=False))

    def when(has: bool, dtype: torch.dtype) -> torch.dtype | None:
        return dtype if has else None

    layout: dict[str, tuple[str, tuple[int, ...], torch.dtype | None]] = {
        "q": ("tokens", (H, K), of["q"]),
        "k": ("tokens", (H, K), of["k"]),
        "v": ("tokens", (HV, V), of["v"]),
        "g": ("tokens", gates, of["g"]),
        "beta": ("tokens", (HV,), of["beta"]),
        "initial_state": ("N", (HV, K, V), of["initial_state"]),
        "cu_seqlens": ("N", (), of["cu_seqlens"]),  # and one more
        "do": ("tokens", (HV, V), of["do"]),
        "dstate": ("N", (HV, K, V), of["dstate"]),
        "q_in": ("tokens", (HV, K), when(channel, low)),
        "k_in": ("tokens", (HV, K), when(channel and delta, low)),
        "k_out": ("tokens", (HV, K), when(channel, low)),
        "row_in": ("slots", (HV, C), when(head, fp32)),
        "row_beta": ("slots", (HV, C), when(delta, fp32)),
        "total": ("slots", gates, when(gated, fp32)),
        "G": ("slots", (HV, C), when(head, torch.float64)),
        "row_out": ("slots", (HV, C), when(head, fp32)),
        "bound": ("slots", (HV,), when(head and delta, fp32)),
        "strong": ("slots", (HV,), when(channel, torch.int32)),
        "Aqk": ("tokens", (HV, C), when(channel, low)),
        "R": ("tokens", (HV, C), when(delta, low)),
        "border_states": ("borders", (HV, K, V), fp32),
        "maps": ("borders", (HV, K, K if delta else 1), fp32),
        "o": ("tokens", (HV, V), low),
        "state": ("N", (HV, K, V), fp32),
        "h": ("slots", (HV, K, V), low),
        "errors": ("tokens", (HV, V), when(delta, low)),
        "border_grads": ("borders", (HV, K, V), fp32),
        "dh": ("slots", (HV, K, V), low),
        "dkept": ("slots", (HV, NK), when(head, fp32)),
        "parts": ("slots", (HV, NK, 2, C), when(head, fp32)),
    }
    layout |= {f"d{name}": layout[name] for name in INPUTS}
    if sums_dbeta_by_tiles(kind):
        NV = meta_of("scan_backward", kind).NV
        layout["dbeta"] = ("tokens", (HV, NV), fp32)
    x = SimpleNamespace()
    for name, (size, row, dtype) in layout.items():
        room = None if dtype is None else Room(name, size, row, dtype)
        setattr(x, name, room)
    if not gated and not delta:
        x.maps = None  # all ones
    x.q_in, x.k_in, x.k_out = x.q_in or x.q, x.k_in or x.k, x.k_out or x.k
    x.bound = x.bound or x.total
    x.inputs = x.q, x.k, x.g, x.beta
    x.decayed = x.q_in, x.k_in, x.k_out
    x.decays = x.row_in, x.row_out, x.row_beta, x.total, x.G, x.bound
    x.call = x.cu_seqlens, SCALE, T, N, L
    return x


def kept_rooms(kind: Kind, x: SimpleNamespace) -> list[Room]:
    """What the forward keeps for the backward, of the tensors x.

    But not what a gate per channel makes of q and k, which is large, nor the
    rows beside it: the backward computes that again.
    """
    found = [x.Aqk, x.R, x.border_states, x.maps]
    if not kind.per_channel:
        found += x.decays
    return list(dict.fromkeys(room for room in found if room))


class ScheduleBuilder:
    """A forward or backward, as its launches are written down."""

    def __init__(self, kind: Kind, dtypes: Dtypes) -> None:
        self.kind, self.rooms = kind, rooms(kind, dtypes)
        self.given = GIVEN[: len(dtypes)]
        self.launches: list[Launch] = []

    def add(
        self, stage: str, kernel: Any, programs: Count, *groups: Any
    ) -> None:
        """A stage's kernel and what it is given before call and META."""
        meta, options = constants(stage, self.kind)
        arguments = (*groups, self.rooms.call, meta)
        self.launches.append(Launch(kernel, programs, arguments, options))

    def add_tiles(
        self, stage: str, kernel: Any, of: str, *groups: Any
    ) -> None:
        """:meth:`add`, with a program for each value tile of a head."""
        NV = meta_of(stage, self.kind).NV
        self.add(stage, kernel, Count(of, self.kind.HV * NV), *groups)

    def schedule(self, *results: Room | None) -> Schedule:
        """And zeros where a pack's results have tokens of no sequence."""
        made = [room for room in results if room]
        offsets = self.rooms.cu_seqlens
        if offsets:
            tensors = tuple(room for room in made if room.length == "tokens")
            widths = tuple(prod(room.row) for room in tensors)
            arguments = (tensors, offsets, N, T, widths)
            programs = Count("tokens", 1, ROWS.value)
            clear = (clear_tail_kernel, programs, arguments, {"num_warps": 4})
            self.launches.append(Launch(*clear))
        saved = kept_rooms(self.kind, self.rooms)
        return Schedule(self.launches, self.given, made, saved)


@lru_cache(maxsize=4096)
def forward_schedule(kind: Kind, dtypes: Dtypes, segmented: bool) -> Schedule:
    """Outputs, final states, and what is :func:`kept_rooms`.

    ``segmented``: whether sequences may be cut into segments.
    """
    steps = ScheduleBuilder(kind, dtypes)
    x, HV = steps.rooms, kind.HV
    groups: tuple[Any, ...]
    scores, nothing = (x.Aqk, x.R), (None, None, None, None)
    if kind.gate or kind.delta:
        groups = x.inputs, x.decayed, x.decays, scores, None
        steps.add("intra", intra_fwd_kernel, Count("slots", HV), *groups)
    if segmented:
        meta = meta_of("segment_maps", kind)
        programs = meta.NV + (meta.NM if kind.delta else 0)
        states = x.initial_state, x.border_states, x.maps
        groups = x.decayed, x.v, x.decays, (None, x.R), states, nothing
        each = Count("borders", HV * programs)
        steps.add("segment_maps", scan_fwd_kernel, each, *groups)
        groups = x.border_states, x.maps
        steps.add_tiles("compose", compose_kernel, "borders", *groups)
    states = x.initial_state, x.border_states if segmented else None, None
    outputs = x.o, x.state, None, None
    groups = x.decayed, x.v, x.decays, scores, states, outputs
    steps.add_tiles("scan", scan_fwd_kernel, "segments", *groups)
    return steps.schedule(x.o, x.state)


@lru_cache(maxsize=4096)
def backward_schedule(kind: Kind, dtypes: Dtypes, segmented: bool) -> Schedule:
    """Gradients of the inputs that there are but cu_seqlens, in their order.

    That of beta in fp16 as what each value tile adds to it.
    """
    steps = ScheduleBuilder(kind, dtypes)
    x, H, HV = steps.rooms, kind.H, kind.HV
    groups: tuple[Any, ...]
    dstates: tuple[Any, ...]
    scores, incoming = (x.Aqk, x.R), (x.do, x.dstate)
    if kind.per_channel:
        groups = x.inputs, x.decayed, x.decays, (None, None), x.strong
        steps.add("intra", intra_fwd_kernel, Count("slots", HV), *groups)
    states = x.initial_state, x.border_states if segmented else None, None
    outputs = None, None, x.h, x.errors
    groups = x.decayed, x.v, x.decays, (None, x.R), states, outputs
    steps.add_tiles("chunk_states", scan_fwd_kernel, "segments", *groups)
    if segmented:
        dstates = None, None, None, None, x.border_grads
        groups = x.decayed, x.decays, scores, None, incoming, dstates
        steps.add_tiles(
            "segment_maps_backward", scan_bwd_kernel, "borders", *groups
        )
        groups = x.border_grads, x.maps
        steps.add_tiles("compose_backward", compose_kernel, "borders", *groups)
    errors, of_tiles, of_rows = None, None, x.dbeta
    if sums_dbeta_by_tiles(kind):
        errors, of_tiles, of_rows = x.errors, x.dbeta, None
    border_grads = x.border_grads if segmented else None
    dstates = x.dv, of_tiles, x.dh, x.dinitial_state, border_grads
    groups = x.decayed, x.decays, scores, errors, incoming, dstates
    steps.add_tiles("scan_backward", scan_bwd_kernel, "segments", *groups)

    operands = x.do, x.errors if kind.delta else x.v, x.dv, x.h, x.dh
    dg = x.parts if kind.gate == 1 else x.dg
    gradients = x.dq, x.dk, dg, x.dkept, of_rows
    each = Count("slots", H * meta_of("intra_backward", kind).NK)
    groups = x.g, x.decayed, x.decays, operands, gradients
    steps.add("intra_backward", intra_bwd_kernel, each, *groups)
    if kind.gate == 1:
        groups = x.parts, x.dkept, x.dg
        each = Count("slots", HV)
        steps.add("gate_backward", gate_bwd_kernel, each, *groups)
    if kind.per_channel:
        stage, num_chunks = "intra_backward_strong", Count("slots", H)
        each = Count("slots", H, meta_of(stage, kind).LOOK)
        groups = x.inputs, x.decays, x.strong, operands, gradients, num_chunks
        steps.add(stage, intra_bwd_strong_kernel, each, *groups)
    return steps.schedule(x.dq, x.dk, x.dv, x.dg, x.dbeta, x.dinitial_state)
