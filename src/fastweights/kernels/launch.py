"""The family's schedules: what each stage launches, and on which tensors.

The stages have the names that :mod:`fastweights.reference.chunkwise` and
:mod:`fastweights.reference.chunkwise_backward` give them. A kernel is given
its arguments by their names: tensors are those of :func:`rooms`, numbers the
call's lengths, the rest its constants (``settings.constants``).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch

from fastweights.kernels.compose import compose_kernel
from fastweights.kernels.intra import intra_fwd_kernel
from fastweights.kernels.intra_backward import (
    gate_bwd_kernel,
    intra_bwd_kernel,
    intra_bwd_strong_kernel,
)
from fastweights.kernels.plan import SCALE, Count, Launch, Room, Schedule
from fastweights.kernels.scan import scan_bwd_kernel, scan_fwd_kernel
from fastweights.kernels.settings import Kind, Meta, constants
from fastweights.kernels.tail import ROWS, clear_tail_kernel

Dtypes = tuple[torch.dtype | None, ...]
Rooms = dict[str, Room | None]
INPUTS = ("q", "k", "v", "g", "beta", "initial_state")  # have gradients
GIVEN = (*INPUTS, "cu_seqlens", "do", "dstate")  # the last two to a backward
# What travels together: a kernel takes each of these as one argument.
GROUPS = {
    "inputs": "q k g beta",
    "decayed": "q_in k_in k_out",
    "decays": "row_in row_out row_beta total G bound",
    "scores": "Aqk R",
    "states": "initial_state border_states maps",
    "outputs": "o state h errors",
    "incoming": "do dstate",
    "dstates": "dv dbeta dh dinitial_state border_grads",
    "values": "do x dv h dh",
    "gradients": "dq dk dg dkept dbeta",
    "call": "cu_seqlens scale T N L",
}
# Where a kind of call does not have the first, the second is in its place.
BARE = {"q_in": "q", "k_in": "k", "k_out": "k", "bound": "total"}
NUMBERS = {x: Count(x) for x in ("T", "N", "L")} | {"scale": SCALE}


def compiled_for(stage: str, kind: Kind) -> Meta:
    """What the stage's kernel is compiled for."""
    return constants(stage, kind)[0]


def writes_by_tiles(kind: Kind) -> bool:
    """Whether the scan back writes dbeta, a part for each value tile.

    In fp16, where too little of it is left in dv, of which intra_bwd_kernel
    finds it otherwise.
    """
    return kind.delta and kind.dtype == torch.float16


def rooms(kind: Kind, dtypes: Dtypes) -> Rooms:
    """Every tensor of a forward and backward, as :class:`plan.Room` has it.

    What they hold is in README.md; ``dtypes`` are those of the GIVEN tensors.
    None is what this kind of call does not have. row_beta is 0 past a
    sequence's end. For the backward of a gate per channel strong has a bit
    per key tile with a channel that decays too far (gates.halves). bound is
    the log2 of a bound on the map of a chunk's state, without a delta rule
    total. border_states pass the borders of segments, and maps are those of
    the segments before them: M, or the channels' decays. gate_bwd_kernel sums
    dg of parts and dkept.
    """
    H, HV, K, V, C = kind.H, kind.HV, kind.K, kind.V, kind.chunk_size
    low, fp32, delta = kind.dtype, torch.float32, kind.delta
    head, channel = kind.gate == 1, kind.per_channel
    gated, gates = head or channel, (HV, K) if channel else (HV,)
    maps = (HV, K, K if delta else 1), (gated or delta) and fp32
    NK = compiled_for("intra_backward", kind).NK
    of = dict.fromkeys(GIVEN) | dict(zip(GIVEN, dtypes, strict=False))
    layout: dict[str, tuple[Any, ...]] = {
        "q": ("tokens", (H, K), of["q"]),
        "k": ("tokens", (H, K), of["k"]),
        "v": ("tokens", (HV, V), of["v"]),
        "g": ("tokens", gates, of["g"]),
        "beta": ("tokens", (HV,), of["beta"]),
        "initial_state": ("N", (HV, K, V), of["initial_state"]),
        "cu_seqlens": ("N", (), of["cu_seqlens"]),  # and one more
        "do": ("tokens", (HV, V), of["do"]),
        "dstate": ("N", (HV, K, V), of["dstate"]),
        "q_in": ("tokens", (HV, K), channel and low),
        "k_in": ("tokens", (HV, K), channel and delta and low),
        "k_out": ("tokens", (HV, K), channel and low),
        "row_in": ("slots", (HV, C), head and fp32),
        "row_beta": ("slots", (HV, C), delta and fp32),
        "total": ("slots", gates, gated and fp32),
        "G": ("slots", (HV, C), head and torch.float64),
        "row_out": ("slots", (HV, C), head and fp32),
        "bound": ("slots", (HV,), head and delta and fp32),
        "strong": ("slots", (HV,), channel and torch.int32),
        "Aqk": ("tokens", (HV, C), channel and low),
        "R": ("tokens", (HV, C), delta and low),
        "border_states": ("borders", (HV, K, V), fp32),
        "maps": ("borders", *maps),
        "o": ("tokens", (HV, V), low),
        "state": ("N", (HV, K, V), fp32),
        "h": ("slots", (HV, K, V), low),
        "errors": ("tokens", (HV, V), delta and low),
        "border_grads": ("borders", (HV, K, V), fp32),
        "dh": ("slots", (HV, K, V), low),
        "dkept": ("slots", (HV, NK), head and fp32),
        "parts": ("slots", (HV, NK, 2, C), head and fp32),
    }
    layout |= {f"d{name}": layout[name] for name in INPUTS}
    if writes_by_tiles(kind):
        NV = compiled_for("scan_backward", kind).NV
        layout["dbeta"] = ("tokens", (HV, NV), fp32)
    found: Rooms = {
        name: Room(name, *room) if room[-1] else None
        for name, room in layout.items()
    }
    for name, bare in BARE.items():
        found[name] = found[name] or found[bare]
    return found


def kept(kind: Kind, found: Rooms) -> list[Room]:
    """What the forward keeps for the backward.

    But not what a gate per channel makes of q and k, which is large, nor the
    rows beside it: the backward computes that again.
    """
    names = ["Aqk", "R", "border_states", "maps"]
    if not kind.per_channel:
        names += GROUPS["decays"].split()
    return list(dict.fromkeys(x for name in names if (x := found[name])))


class Trace:
    """A forward or backward, as its launches are written down.

    ``cut``: whether sequences may be cut into segments.
    """

    def __init__(self, kind: Kind, dtypes: Dtypes, cut: bool) -> None:
        self.kind, self.rooms = kind, rooms(kind, dtypes)
        self.launches: list[Launch] = []
        self.given = GIVEN[: len(dtypes)]
        self.kept = kept(kind, self.rooms)
        if not cut:
            self.rooms |= {"border_states": None, "border_grads": None}

    def run(
        self,
        stage: str,
        kernel: Any,
        programs: Count,
        without: str = "",
        **names: str,
    ) -> None:
        """Launch a stage's kernel, with arguments by their names.

        Those that ``without`` names are None; ``names`` says which have
        another name in :func:`rooms`.
        """
        meta, options = constants(stage, self.kind)
        known: dict[str, Any] = self.rooms | NUMBERS | {"META": meta}
        known["num_chunks"] = Count("slots", self.kind.H)  # of key heads
        known |= {name: self.rooms[other] for name, other in names.items()}
        known |= dict.fromkeys(without.split())

        def argument(name: str) -> Any:
            members = GROUPS.get(name, "").split()
            return tuple(map(argument, members)) if members else known[name]

        arguments = tuple(map(argument, kernel.arg_names))
        self.launches.append(Launch(kernel, programs, arguments, options))

    def run_values(
        self, stage: str, kernel: Any, of: str, without: str = "", **names: str
    ) -> None:
        """:meth:`run`, with a program for each value tile of a head."""
        NV = compiled_for(stage, self.kind).NV
        programs = Count(of, self.kind.HV * NV)
        self.run(stage, kernel, programs, without, **names)

    def clear(self, *results: str) -> None:
        """Zeros where a pack's results have tokens of no sequence."""
        offsets = self.rooms["cu_seqlens"]
        found = [self.rooms[name] for name in results]
        tensors = tuple(x for x in found if x and x.of == "tokens")
        if offsets is None:
            return
        widths = tuple(prod(x.row) for x in tensors)
        arguments = (tensors, offsets, NUMBERS["N"], NUMBERS["T"], widths)
        programs = Count("tokens", 1, ROWS.value)
        self.launches.append(
            Launch(clear_tail_kernel, programs, arguments, {"num_warps": 4})
        )

    def schedule(self, *results: str) -> Schedule:
        self.clear(*results)
        found = [x for name in results if (x := self.rooms[name])]
        return Schedule(self.launches, self.given, found, self.kept)


@lru_cache(maxsize=4096)
def forward(kind: Kind, dtypes: Dtypes, cut: bool) -> Schedule:
    """Outputs, final states, and what is :func:`kept`."""
    x, HV = Trace(kind, dtypes, cut), kind.HV
    if kind.gate or kind.delta:
        x.run("intra", intra_fwd_kernel, Count("slots", HV), "strong")
    if cut:
        sizes = compiled_for("segments", kind)
        each = sizes.NV + (sizes.NM if kind.delta else 0)
        programs = Count("borders", HV * each)
        x.run("segments", scan_fwd_kernel, programs, "o state h errors Aqk")
        names = {"borders": "border_states"}
        x.run_values("compose", compose_kernel, "borders", **names)
    x.run_values("scan", scan_fwd_kernel, "segments", "h errors maps")
    return x.schedule("o", "state")


@lru_cache(maxsize=4096)
def backward(kind: Kind, dtypes: Dtypes, cut: bool) -> Schedule:
    """Gradients of the inputs that there are but cu_seqlens, in their order.

    That of beta in fp16 as what each value tile adds to it.
    """
    x, HV = Trace(kind, dtypes, cut), kind.HV
    by_tiles = writes_by_tiles(kind)
    if kind.per_channel:
        x.run("intra", intra_fwd_kernel, Count("slots", HV), "Aqk R")
    without = "o state maps Aqk"
    x.run_values("chunk_states", scan_fwd_kernel, "segments", without)
    if cut:
        without = "errors dv dbeta dh dinitial_state"
        x.run_values("scan_backward", scan_bwd_kernel, "borders", without)
        names = {"borders": "border_grads"}
        x.run_values("compose_backward", compose_kernel, "borders", **names)
    without = "" if by_tiles else "errors dbeta"
    x.run_values("scan_backward", scan_bwd_kernel, "segments", without)
    without = "dbeta" if by_tiles else ""
    names = {"x": "errors" if kind.delta else "v"}
    if kind.gate == 1:
        names["dg"] = "parts"
    NK = compiled_for("intra_backward", kind).NK
    programs = Count("slots", kind.H * NK)
    x.run("intra_backward", intra_bwd_kernel, programs, without, **names)
    if kind.gate == 1:
        x.run("gate_backward", gate_bwd_kernel, Count("slots", HV))
    if kind.per_channel:
        stage = "intra_backward_strong"
        LOOK = compiled_for(stage, kind).LOOK
        programs = Count("slots", kind.H, LOOK)
        x.run(stage, intra_bwd_strong_kernel, programs, without, **names)
    return x.schedule(*[f"d{name}" for name in INPUTS])
