"""The family's stages: the kernel that each launches, and on which tensors.

Stages that the reference has too are named as its functions, in
:mod:`fastweights.reference.chunkwise` and its backward. A launch's arguments
stand in the order in which its kernel has them: tensors are those of
:class:`TensorSpecs`, numbers the call's lengths; META, of ``settings_of``, is
last.
"""

from __future__ import annotations

from collections import namedtuple
from functools import lru_cache
from math import prod
from typing import Any

import torch

from fastweights.kernels.recurrence.compose import (
    add_arriving_kernel,
    compose_kernel,
)
from fastweights.kernels.recurrence.intra import (
    intra_fwd_kernel,
    intra_unfactorable_kernel,
)
from fastweights.kernels.recurrence.intra_backward import (
    gate_bwd_kernel,
    intra_bwd_kernel,
    intra_bwd_unfactorable_kernel,
)
from fastweights.kernels.recurrence.scan import (
    scan_bwd_kernel,
    scan_fwd_kernel,
)
from fastweights.kernels.recurrence.schedule import (
    SCALE,
    Launch,
    RuntimeNumber,
    Schedule,
    TensorSpec,
)
from fastweights.kernels.recurrence.settings import (
    CallKind,
    RecurrenceMeta,
    settings_of,
)
from fastweights.kernels.recurrence.state_passing import ComposeStates
from fastweights.kernels.tail import ROWS, clear_tail_kernel

T, N, L = RuntimeNumber("T"), RuntimeNumber("N"), RuntimeNumber("L")

# A call's tensors: its operands, and for a backward its outputs' gradients.
CallTensors = namedtuple(
    "CallTensors",
    "q k v g beta erase_key initial_state cu_seqlens do dstate",
    defaults=(None, None),
)
# Each group that travels together is one argument of a kernel. What a launch
# does not have, or is not to write, is None. Operands inside of chunks, where
# e is erase_key:
IntraInputs = namedtuple("IntraInputs", "q k g beta e")
# Queries and keys as a scan reads them: decayed where channels have gates.
ScanQK = namedtuple("ScanQK", "q_in e_in k_out")
# How each chunk decays: README.md has the shapes.
Decays = namedtuple("Decays", "row_in row_out row_beta total G map_bound")
# Products of a chunk's tokens, and the delta rule's inverse.
Scores = namedtuple("Scores", "Aqk R", defaults=(None, None))
# The offsets and numbers of a call, which every kernel takes.
Call = namedtuple("Call", "cu_seqlens scale T N L")
# What enters a scan, and what it writes.
ScanStates = namedtuple("ScanStates", "initial_state border_states maps")
ScanOutputs = namedtuple(
    "ScanOutputs", "o state h u", defaults=(None, None, None, None)
)
# What enters a scan back, and what it writes.
OutputGrads = namedtuple("OutputGrads", "do dstate")
ScanGrads = namedtuple(
    "ScanGrads",
    "dv dbeta dh dinitial_state border_grads",
    defaults=(None, None, None, None, None),
)
# What the scans leave to intra_backward, and what that writes.
IntraGradInputs = namedtuple("IntraGradInputs", "do u dv h dh")
IntraGrads = namedtuple("IntraGrads", "dq dk dg dg_parts dtotal dbeta de")


def meta_of(stage: str, kind: CallKind) -> RecurrenceMeta:
    """META of the stage's kernel."""
    return settings_of(stage, kind)[0]


def sums_dbeta_by_tiles(kind: CallKind) -> bool:
    """Whether the scan back writes dbeta, a part for each value tile.

    It does in fp16, where dv has too few of its bits. Elsewhere
    intra_bwd_kernel finds it from dv.
    """
    return (
        kind.delta and not kind.has_erase_key and kind.dtype == torch.float16
    )


class TensorSpecs:
    """The :class:`TensorSpec` of every tensor of a forward and backward.

    What they hold is in README.md. ``dtypes`` are those of the call's tensors.
    A tensor that this kind of call does not have is None. Beyond README:

    row_beta       0 past a sequence's end
    fold_levels    with a gate per channel: 0, or gates.fold_level_of a chunk
                   with a channel whose decay is not gates.is_factorable
    map_bound      without a delta rule the map is the decay: total
    border_states  the states that pass the borders of segments
    maps           those of the segments before them: M, or channels' decays
    dg_parts       what gate_bwd_kernel sums to dg, with dtotal

    inputs, qk, decays and call are groups.
    """

    def __init__(self, kind: CallKind, dtypes: CallTensors) -> None:
        H, HV, K, V, C = kind.H, kind.HV, kind.K, kind.V, kind.chunk_size
        dtype, fp32, delta = kind.dtype, torch.float32, kind.delta
        per_head, per_channel = kind.per_head, kind.per_channel
        gate_row = (HV, K) if per_channel else (HV,)
        NK = meta_of("intra_backward", kind).NK
        dtype_of = dtypes._asdict()

        def spec(
            name: str,
            length: str,
            row: tuple[int, ...],
            dtype: torch.dtype | None,
            exists: bool = True,
        ) -> TensorSpec | None:
            if not exists or dtype is None:
                return None
            return TensorSpec(name, length, row, dtype)

        def with_gradient(
            name: str, length: str, row: tuple[int, ...]
        ) -> tuple[TensorSpec | None, TensorSpec | None]:
            x, dx = (
                spec(n, length, row, dtype_of[name])
                for n in (name, f"d{name}")
            )
            return x, dx

        state_row, score_row = (HV, K, V), (HV, C)
        self.q, self.dq = with_gradient("q", "tokens", (H, K))
        self.k, self.dk = with_gradient("k", "tokens", (H, K))
        self.v, self.dv = with_gradient("v", "tokens", (HV, V))
        self.g, self.dg = with_gradient("g", "tokens", gate_row)
        self.beta, self.dbeta = with_gradient("beta", "tokens", (HV,))
        if sums_dbeta_by_tiles(kind):
            NV = meta_of("scan_backward", kind).NV
            self.dbeta = spec("dbeta", "tokens", (HV, NV), fp32)
        self.erase_key, self.derase_key = with_gradient(
            "erase_key", "tokens", (HV, K)
        )
        self.initial_state, self.dinitial_state = with_gradient(
            "initial_state", "N", state_row
        )
        # Offsets are one more than sequences.
        self.cu_seqlens = spec("cu_seqlens", "N", (), dtype_of["cu_seqlens"])
        self.do = spec("do", "tokens", (HV, V), dtype_of["do"])
        self.dstate = spec("dstate", "N", state_row, dtype_of["dstate"])

        q_in = spec("q_in", "tokens", (HV, K), dtype, per_channel)
        e_in = spec("e_in", "tokens", (HV, K), dtype, per_channel and delta)
        k_out = spec("k_out", "tokens", (HV, K), dtype, per_channel)
        row_in = spec("row_in", "slots", score_row, fp32, per_head)
        has_beta = delta and not kind.has_erase_key
        row_beta = spec("row_beta", "slots", score_row, fp32, has_beta)
        gated = per_head or per_channel
        total = spec("total", "slots", gate_row, fp32, gated)
        G = spec("G", "slots", score_row, torch.float64, per_head)
        row_out = spec("row_out", "slots", score_row, fp32, per_head)
        map_bound = spec("map_bound", "slots", (HV,), fp32, per_head and delta)
        self.inputs = IntraInputs(
            self.q, self.k, self.g, self.beta, self.erase_key
        )
        e_in = e_in or self.erase_key or self.k
        self.qk = ScanQK(q_in or self.q, e_in, k_out or self.k)
        rows = row_in, row_out, row_beta
        self.decays = Decays(*rows, total, G, map_bound or total)
        self.call = Call(self.cu_seqlens, SCALE, T, N, L)

        self.fold_levels = spec(
            "fold_levels", "slots", (HV,), torch.int32, per_channel
        )
        self.Aqk = spec("Aqk", "tokens", score_row, dtype, per_channel)
        self.R = spec("R", "tokens", score_row, dtype, delta)
        self.border_states = spec("border_states", "borders", state_row, fp32)
        map_row = (HV, K, K if delta else 1)
        has_map = gated or delta  # else a map is all ones: there is none
        self.maps = spec("maps", "borders", map_row, fp32, has_map)
        has_products = has_map and kind.on_ranks
        self.products = spec(
            "products", "borders", map_row, fp32, has_products
        )
        self.o = spec("o", "tokens", (HV, V), dtype)
        self.state = spec("state", "N", state_row, fp32)
        self.h = spec("h", "slots", state_row, dtype)
        self.u = spec("u", "tokens", (HV, V), dtype, delta)
        self.border_grads = spec("border_grads", "borders", state_row, fp32)
        self.dh = spec("dh", "slots", state_row, dtype)
        self.dtotal = spec("dtotal", "slots", (HV, NK), fp32, per_head)
        self.dg_parts = spec(
            "dg_parts", "slots", (HV, NK, 2, C), fp32, per_head
        )

        # What the forward saves for the backward: but not what a gate per
        # channel makes of q and k, which is large, nor the rows beside it,
        # which the backward computes again.
        saved = [self.Aqk, self.R, self.fold_levels]
        saved += self.border_states, self.maps
        saved += () if per_channel else self.decays
        self.saved = list(dict.fromkeys(x for x in saved if x))


class ScheduleBuilder:
    """A forward or backward, as its launches are written down."""

    def __init__(self, kind: CallKind, dtypes: CallTensors) -> None:
        self.kind, self.specs = kind, TensorSpecs(kind, dtypes)
        self.launches: list[Launch] = []
        self.compose_place = 0  # of compose_kernel, among the launches
        self.exchange_span: tuple[int, int] | None = None

    def add(
        self, stage: str, kernel: Any, programs: RuntimeNumber, *groups: Any
    ) -> None:
        """Add a stage's kernel, and its arguments before call and META."""
        meta, options = settings_of(stage, self.kind)
        arguments = (*groups, self.specs.call, meta)
        self.launches.append(Launch(kernel, programs, arguments, options))

    def add_tiles(
        self, stage: str, kernel: Any, length: str, *groups: Any
    ) -> None:
        """Add a stage, with a program for each value tile of a head."""
        NV = meta_of(stage, self.kind).NV
        programs = RuntimeNumber(length, self.kind.HV * NV)
        self.add(stage, kernel, programs, *groups)

    def add_compose(self, stage: str, compose_states: ComposeStates) -> None:
        """Add compose_kernel; on ranks maps have programs, too."""
        kind = self.kind
        meta = meta_of(stage, kind)
        tiles = meta.NV + (meta.NM if kind.on_ranks and kind.delta else 0)
        programs = RuntimeNumber("borders", kind.HV * tiles)
        self.compose_place = len(self.launches)
        self.add(stage, compose_kernel, programs, compose_states)

    def add_arriving(self, stage: str, compose_states: ComposeStates) -> None:
        """Add add_arriving_kernel, which needs none of the maps themselves."""
        states = compose_states._replace(maps=None)
        self.exchange_span = self.compose_place, len(self.launches)
        self.add_tiles(stage, add_arriving_kernel, "borders", states)

    def schedule(self, *results: TensorSpec | None) -> Schedule:
        """Make the schedule; a pack's results are 0 in no sequence."""
        written = [x for x in results if x]
        offsets = self.specs.cu_seqlens
        if offsets:
            tensors = tuple(x for x in written if x.length == "tokens")
            widths = tuple(prod(x.row) for x in tensors)
            arguments = (tensors, offsets, N, T, widths)
            programs = RuntimeNumber("tokens", 1, ROWS.value)
            clear = (clear_tail_kernel, programs, arguments, {"num_warps": 4})
            self.launches.append(Launch(*clear))
        names, saved = CallTensors._fields, self.specs.saved
        return Schedule(
            self.launches, names, written, saved, self.exchange_span
        )


@lru_cache(maxsize=4096)
def forward_schedule(
    kind: CallKind, dtypes: CallTensors, segmented: bool
) -> Schedule:
    """Schedule a forward: outputs, final states, and what is saved.

    ``segmented``: whether sequences may be cut into segments.
    """
    builder = ScheduleBuilder(kind, dtypes)
    x, HV = builder.specs, kind.HV
    groups: tuple[Any, ...]
    scores = Scores(x.Aqk, x.R)
    if kind.gate_width or kind.delta:
        groups = x.inputs, x.qk, x.decays, scores, x.fold_levels
        programs = RuntimeNumber("slots", HV)
        builder.add("intra", intra_fwd_kernel, programs, *groups)
        if kind.per_channel:
            stage = "intra_unfactorable"
            groups = x.inputs, x.decays, scores, x.fold_levels
            builder.add(stage, intra_unfactorable_kernel, programs, *groups)
    if segmented:
        meta = meta_of("segment_maps", kind)
        tiles = meta.NV + (meta.NM if kind.delta else 0)
        states = ScanStates(x.initial_state, x.border_states, x.maps)
        outputs = ScanOutputs(state=x.state)
        groups = x.qk, x.v, x.decays, Scores(R=x.R), states, outputs
        programs = RuntimeNumber("borders", HV * tiles)
        builder.add("segment_maps", scan_fwd_kernel, programs, *groups)
        ends = x.initial_state, x.border_states, x.state
        compose_states = ComposeStates(*ends, x.maps, x.products)
        builder.add_compose("compose", compose_states)
        if kind.on_ranks:
            builder.add_arriving("add_arriving", compose_states)
    border_states = x.border_states if segmented else None
    states = ScanStates(x.initial_state, border_states, None)
    outputs = ScanOutputs(o=x.o, state=x.state)
    groups = x.qk, x.v, x.decays, scores, states, outputs
    builder.add_tiles("scan", scan_fwd_kernel, "segments", *groups)
    return builder.schedule(x.o, x.state)


@lru_cache(maxsize=4096)
def backward_schedule(
    kind: CallKind, dtypes: CallTensors, segmented: bool
) -> Schedule:
    """Schedule a backward: the gradients of all inputs but cu_seqlens.

    In fp16 that of beta is in parts, one of each value tile.
    """
    builder = ScheduleBuilder(kind, dtypes)
    x, H, HV = builder.specs, kind.H, kind.HV
    groups: tuple[Any, ...]
    scores, output_grads = Scores(x.Aqk, x.R), OutputGrads(x.do, x.dstate)
    if kind.per_channel:
        groups = x.inputs, x.qk, x.decays, Scores(), None
        programs = RuntimeNumber("slots", HV)
        stage = "intra_again"
        builder.add(stage, intra_fwd_kernel, programs, *groups)
    if segmented:
        stage = "segment_maps_backward"
        border_grads = ScanGrads(
            dinitial_state=x.dinitial_state, border_grads=x.border_grads
        )
        groups = x.qk, x.decays, scores, None, output_grads, border_grads
        programs = RuntimeNumber("borders", 2 * HV * meta_of(stage, kind).NV)
        builder.add(stage, scan_bwd_kernel, programs, *groups)
        ends = x.dstate, x.border_grads, x.dinitial_state
        compose_states = ComposeStates(*ends, x.maps, x.products)
        builder.add_compose("compose_backward", compose_states)
    # Needs nothing of other ranks, and runs while they are asked.
    border_states = x.border_states if segmented else None
    states = ScanStates(x.initial_state, border_states, None)
    outputs = ScanOutputs(h=x.h, u=x.u)
    groups = x.qk, x.v, x.decays, Scores(R=x.R), states, outputs
    builder.add_tiles("chunk_states", scan_fwd_kernel, "segments", *groups)
    if kind.on_ranks:
        builder.add_arriving("add_arriving_backward", compose_states)
    by_tiles = sums_dbeta_by_tiles(kind)
    scan_grads = ScanGrads(
        dv=x.dv,
        dbeta=x.dbeta if by_tiles else None,
        dh=x.dh,
        dinitial_state=x.dinitial_state,
        border_grads=x.border_grads if segmented else None,
    )
    u = x.u if by_tiles else None
    groups = x.qk, x.decays, scores, u, output_grads, scan_grads
    builder.add_tiles("scan_backward", scan_bwd_kernel, "segments", *groups)

    written = x.u if kind.delta else x.v
    grad_inputs = IntraGradInputs(x.do, written, x.dv, x.h, x.dh)
    intra_grads = IntraGrads(
        dq=x.dq,
        dk=x.dk,
        dg=None if kind.per_head else x.dg,
        dg_parts=x.dg_parts,
        dtotal=x.dtotal,
        dbeta=None if by_tiles else x.dbeta,
        de=x.derase_key,
    )
    programs = RuntimeNumber("slots", H * meta_of("intra_backward", kind).NK)
    groups = x.g, x.qk, x.decays, x.fold_levels, grad_inputs, intra_grads
    builder.add("intra_backward", intra_bwd_kernel, programs, *groups)
    if kind.per_head:
        groups = x.dg_parts, x.dtotal, x.dg
        programs = RuntimeNumber("slots", HV)
        builder.add("gate_backward", gate_bwd_kernel, programs, *groups)
    if kind.per_channel:
        groups = x.inputs, x.decays, x.fold_levels, grad_inputs, intra_grads
        stage = "intra_backward_unfactorable"
        builder.add(stage, intra_bwd_unfactorable_kernel, programs, *groups)
    operands = x.dq, x.dk, x.dv, x.dg, x.dbeta, x.derase_key
    return builder.schedule(*operands, x.dinitial_state)
