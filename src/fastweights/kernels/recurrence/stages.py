"""The family's stages: the kernel that each launches, and on which tensors.

Those that a chunk has anyway are named as the functions of
:mod:`fastweights.reference.chunkwise` and its backward. A launch's arguments
stand in the order in which its kernel has them: tensors are those of
:class:`Rooms`, numbers the call's lengths, and META, of ``settings_of``, last.
"""

from __future__ import annotations

from collections import namedtuple
from functools import lru_cache
from math import prod
from typing import Any

import torch

from fastweights.kernels.recurrence.compose import (
    arrive_kernel,
    compose_kernel,
)
from fastweights.kernels.recurrence.intra import (
    intra_fwd_kernel,
    intra_strong_kernel,
)
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
from fastweights.kernels.recurrence.settings import Kind, Meta, settings_of
from fastweights.kernels.tail import ROWS, clear_tail_kernel

T, N, L = Count("T"), Count("N"), Count("L")

# A call's operands; and to a backward the gradients of its results.
Given = namedtuple(
    "Given",
    "q k v g beta erase initial_state cu_seqlens do dstate",
    defaults=(None, None),
)
# What travels together is one argument of a kernel. What a launch does not
# have, or is not to write, is None.
Inputs = namedtuple("Inputs", "q k g beta erase")
Decayed = namedtuple("Decayed", "q_in k_in k_out")
Decays = namedtuple("Decays", "row_in row_out row_beta total G bound")
Scores = namedtuple("Scores", "Aqk R", defaults=(None, None))
Call = namedtuple("Call", "cu_seqlens scale T N L")
# What enters a scan, and what it writes; and the same of a scan back.
States = namedtuple("States", "initial_state border_states maps")
Outputs = namedtuple(
    "Outputs", "o state h u", defaults=(None, None, None, None)
)
# What enters a call, passes the borders of its segments, and leaves it; the
# segments' maps, and the products of those.
Passing = namedtuple("Passing", "entering borders leaving maps through")
Incoming = namedtuple("Incoming", "do dstate")
ScanGrads = namedtuple("ScanGrads", "dv dbeta dh dinitial_state border_grads")
# What the scans leave to intra_backward, and what that writes.
Scanned = namedtuple("Scanned", "do u dv h dh")
IntraGrads = namedtuple("IntraGrads", "dq dk dg dtotal dbeta derase")


def meta_of(stage: str, kind: Kind) -> Meta:
    """What the stage's kernel is compiled for."""
    return settings_of(stage, kind)[0]


def sums_dbeta_by_tiles(kind: Kind) -> bool:
    """Whether the scan back writes dbeta, a part for each value tile.

    In fp16, where too little of it is left in dv, of which intra_bwd_kernel
    finds it otherwise.
    """
    return kind.delta and not kind.erase and kind.dtype == torch.float16


class Rooms:
    """Every tensor of a forward and backward is a :class:`Room` here.

    What they hold is in README.md. ``dtypes`` are those of the given tensors.
    A tensor that this kind of call does not have is None. Beyond README:

    row_beta       0 past a sequence's end
    strong         marks the chunks in which a channel decays too far
                   (gates.is_weak), with a gate per channel
    bound          total, without a delta rule
    border_states  the states that pass the borders of segments
    maps           those of the segments before them: M, or channels' decays
    parts, dtotal  what gate_bwd_kernel sums to dg

    inputs, decayed, decays and call are groups.
    """

    def __init__(self, kind: Kind, dtypes: Given) -> None:
        H, HV, K, V, C = kind.H, kind.HV, kind.K, kind.V, kind.chunk_size
        low, fp32, delta = kind.dtype, torch.float32, kind.delta
        head, channel = kind.per_head, kind.per_channel
        gated, gates = head or channel, (HV, K) if channel else (HV,)
        NK = meta_of("intra_backward", kind).NK
        given = dtypes._asdict()

        def room(
            name: str,
            length: str,
            row: tuple[int, ...],
            dtype: torch.dtype | None,
            has: bool = True,
        ) -> Room | None:
            return Room(name, length, row, dtype) if has and dtype else None

        def with_gradient(
            name: str, length: str, row: tuple[int, ...]
        ) -> tuple[Room | None, Room | None]:
            x, dx = (
                room(n, length, row, given[name]) for n in (name, f"d{name}")
            )
            return x, dx

        states, scores = (HV, K, V), (HV, C)
        self.q, self.dq = with_gradient("q", "tokens", (H, K))
        self.k, self.dk = with_gradient("k", "tokens", (H, K))
        self.v, self.dv = with_gradient("v", "tokens", (HV, V))
        self.g, self.dg = with_gradient("g", "tokens", gates)
        self.beta, self.dbeta = with_gradient("beta", "tokens", (HV,))
        if sums_dbeta_by_tiles(kind):
            NV = meta_of("scan_backward", kind).NV
            self.dbeta = room("dbeta", "tokens", (HV, NV), fp32)
        self.erase, self.derase = with_gradient("erase", "tokens", (HV, K))
        first = with_gradient("initial_state", "N", states)
        self.initial_state, self.dinitial_state = first
        # Of offsets one more.
        self.cu_seqlens = room("cu_seqlens", "N", (), given["cu_seqlens"])
        self.do = room("do", "tokens", (HV, V), given["do"])
        self.dstate = room("dstate", "N", states, given["dstate"])

        q_in = room("q_in", "tokens", (HV, K), low, channel)
        k_in = room("k_in", "tokens", (HV, K), low, channel and delta)
        k_out = room("k_out", "tokens", (HV, K), low, channel)
        row_in = room("row_in", "slots", scores, fp32, head)
        strengths = delta and not kind.erase
        row_beta = room("row_beta", "slots", scores, fp32, strengths)
        total = room("total", "slots", gates, fp32, gated)
        G = room("G", "slots", scores, torch.float64, head)
        row_out = room("row_out", "slots", scores, fp32, head)
        bound = room("bound", "slots", (HV,), fp32, head and delta)
        self.inputs = Inputs(self.q, self.k, self.g, self.beta, self.erase)
        reads = k_in or self.erase or self.k
        self.decayed = Decayed(q_in or self.q, reads, k_out or self.k)
        bound = bound or total
        self.decays = Decays(row_in, row_out, row_beta, total, G, bound)
        self.call = Call(self.cu_seqlens, SCALE, T, N, L)

        self.strong = room("strong", "slots", (HV,), torch.int32, channel)
        self.Aqk = room("Aqk", "tokens", scores, low, channel)
        self.R = room("R", "tokens", scores, low, delta)
        self.border_states = room("border_states", "borders", states, fp32)
        own = (HV, K, K if delta else 1)  # without decay, all ones: none
        self.maps = room("maps", "borders", own, fp32, gated or delta)
        through = kind.ranks and (gated or delta)
        self.through = room("through", "borders", own, fp32, through)
        self.o = room("o", "tokens", (HV, V), low)
        self.state = room("state", "N", states, fp32)
        self.h = room("h", "slots", states, low)
        self.u = room("u", "tokens", (HV, V), low, delta)
        self.border_grads = room("border_grads", "borders", states, fp32)
        self.dh = room("dh", "slots", states, low)
        self.dtotal = room("dtotal", "slots", (HV, NK), fp32, head)
        self.parts = room("parts", "slots", (HV, NK, 2, C), fp32, head)

        # What the forward saves for the backward: but not what a gate per
        # channel makes of q and k, which is large, nor the rows beside it,
        # which the backward computes again.
        saved = [self.Aqk, self.R, self.border_states, self.maps]
        saved += () if channel else self.decays
        self.saved = list(dict.fromkeys(x for x in saved if x))


class ScheduleBuilder:
    """A forward or backward, as its launches are written down."""

    def __init__(self, kind: Kind, dtypes: Given) -> None:
        self.kind, self.rooms = kind, Rooms(kind, dtypes)
        self.launches: list[Launch] = []

    def add(
        self, stage: str, kernel: Any, programs: Count, *groups: Any
    ) -> None:
        """A stage's kernel and what it is given before call and META."""
        meta, options = settings_of(stage, self.kind)
        arguments = (*groups, self.rooms.call, meta)
        self.launches.append(Launch(kernel, programs, arguments, options))

    def add_tiles(
        self, stage: str, kernel: Any, of: str, *groups: Any
    ) -> None:
        """:meth:`add`, with a program for each value tile of a head."""
        NV = meta_of(stage, self.kind).NV
        self.add(stage, kernel, Count(of, self.kind.HV * NV), *groups)

    def add_compose(self, stage: str, passing: Passing) -> None:
        """compose_kernel; of ranks with programs of maps."""
        kind = self.kind
        meta = meta_of(stage, kind)
        programs = meta.NV + (meta.NM if kind.ranks and kind.delta else 0)
        each = Count("borders", kind.HV * programs)
        self.add(stage, compose_kernel, each, passing)

    def add_arrive(self, stage: str, passing: Passing) -> None:
        """arrive_kernel, which needs none of the maps themselves."""
        states = passing._replace(maps=None)
        self.add_tiles(stage, arrive_kernel, "borders", states)

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
        exchange = None
        if self.kind.ranks:
            kernels = [launch.kernel for launch in self.launches]
            ends = compose_kernel, arrive_kernel
            exchange = slice(*map(kernels.index, ends))
        saved = self.rooms.saved
        return Schedule(self.launches, Given._fields, made, saved, exchange)


@lru_cache(maxsize=4096)
def forward_schedule(kind: Kind, dtypes: Given, segmented: bool) -> Schedule:
    """Outputs, final states, and what is saved.

    ``segmented``: whether sequences may be cut into segments.
    """
    builder = ScheduleBuilder(kind, dtypes)
    x, HV = builder.rooms, kind.HV
    groups: tuple[Any, ...]
    scores = Scores(x.Aqk, x.R)
    if kind.gate_width or kind.delta:
        groups = x.inputs, x.decayed, x.decays, scores, x.strong
        each = Count("slots", HV)
        builder.add("intra", intra_fwd_kernel, each, *groups)
        if kind.per_channel:
            builder.add("intra_strong", intra_strong_kernel, each, *groups)
    if segmented:
        meta = meta_of("segment_maps", kind)
        programs = meta.NV + (meta.NM if kind.delta else 0)
        states = States(x.initial_state, x.border_states, x.maps)
        outputs = Outputs(state=x.state)
        groups = x.decayed, x.v, x.decays, Scores(R=x.R), states, outputs
        each = Count("borders", HV * programs)
        builder.add("segment_maps", scan_fwd_kernel, each, *groups)
        ends = x.initial_state, x.border_states, x.state
        passing = Passing(*ends, x.maps, x.through)
        builder.add_compose("compose", passing)
        if kind.ranks:
            builder.add_arrive("arrive", passing)
    border_states = x.border_states if segmented else None
    states = States(x.initial_state, border_states, None)
    outputs = Outputs(o=x.o, state=x.state)
    groups = x.decayed, x.v, x.decays, scores, states, outputs
    builder.add_tiles("scan", scan_fwd_kernel, "segments", *groups)
    return builder.schedule(x.o, x.state)


@lru_cache(maxsize=4096)
def backward_schedule(kind: Kind, dtypes: Given, segmented: bool) -> Schedule:
    """Gradients of the inputs that there are but cu_seqlens, in their order.

    That of beta in fp16 as what each value tile adds to it.
    """
    builder = ScheduleBuilder(kind, dtypes)
    x, H, HV = builder.rooms, kind.H, kind.HV
    groups: tuple[Any, ...]
    grads: tuple[Any, ...]
    scores, incoming = Scores(x.Aqk, x.R), Incoming(x.do, x.dstate)
    if kind.per_channel:
        groups = x.inputs, x.decayed, x.decays, Scores(), x.strong
        each = Count("slots", HV)
        builder.add("intra_again", intra_strong_kernel, each, *groups)
    if segmented:
        stage = "segment_maps_backward"
        grads = ScanGrads(None, None, None, x.dinitial_state, x.border_grads)
        groups = x.decayed, x.decays, scores, None, incoming, grads
        each = Count("borders", 2 * HV * meta_of(stage, kind).NV)
        builder.add(stage, scan_bwd_kernel, each, *groups)
        ends = x.dstate, x.border_grads, x.dinitial_state
        passing = Passing(*ends, x.maps, x.through)
        builder.add_compose("compose_backward", passing)
    # Needs nothing of other ranks, and runs while they are asked.
    border_states = x.border_states if segmented else None
    states = States(x.initial_state, border_states, None)
    outputs = Outputs(h=x.h, u=x.u)
    groups = x.decayed, x.v, x.decays, Scores(R=x.R), states, outputs
    builder.add_tiles("chunk_states", scan_fwd_kernel, "segments", *groups)
    if kind.ranks:
        builder.add_arrive("arrive_backward", passing)
    u, of_tiles, of_rows = None, None, x.dbeta
    if sums_dbeta_by_tiles(kind):
        u, of_tiles, of_rows = x.u, x.dbeta, None
    border_grads = x.border_grads if segmented else None
    dfirst = x.dinitial_state
    grads = ScanGrads(x.dv, of_tiles, x.dh, dfirst, border_grads)
    groups = x.decayed, x.decays, scores, u, incoming, grads
    builder.add_tiles("scan_backward", scan_bwd_kernel, "segments", *groups)

    u = x.u if kind.delta else x.v
    scanned = Scanned(x.do, u, x.dv, x.h, x.dh)
    dg = x.parts if kind.per_head else x.dg
    grads = IntraGrads(x.dq, x.dk, dg, x.dtotal, of_rows, x.derase)
    each = Count("slots", H * meta_of("intra_backward", kind).NK)
    groups = x.g, x.decayed, x.decays, x.strong, scanned, grads
    builder.add("intra_backward", intra_bwd_kernel, each, *groups)
    if kind.per_head:
        groups = x.parts, x.dtotal, x.dg
        each = Count("slots", HV)
        builder.add("gate_backward", gate_bwd_kernel, each, *groups)
    if kind.per_channel:
        groups = x.inputs, x.decays, x.strong, scanned, grads
        stage = "intra_backward_strong"
        builder.add(stage, intra_bwd_strong_kernel, each, *groups)
    firsts = x.dq, x.dk, x.dv, x.dg, x.dbeta, x.derase
    return builder.schedule(*firsts, x.dinitial_state)
