"""The family on the host: what each stage allocates and launches.

Most stages have the names that :mod:`fastweights.reference.chunkwise` and
:mod:`fastweights.reference.chunkwise_backward` give them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.call import Call
from fastweights.kernels.compose import compose_kernel
from fastweights.kernels.intra import intra_fwd_far_kernel, intra_fwd_kernel
from fastweights.kernels.intra_backward import (
    gate_bwd_kernel,
    intra_bwd_far_kernel,
    intra_bwd_kernel,
)
from fastweights.kernels.scan import scan_bwd_kernel, scan_fwd_kernel
from fastweights.kernels.settings import MARKS


class Chunked(NamedTuple):
    """What the states meet, in place of q, k and the gate.

    q_in, k_in, k_out are q, k, k, but for a gate a channel with their decays
    in them, [B, T, HV, K] (k_in is k for the additive rule). A number a row,
    [slots, HV, C]: of a gate a head G in fp64, row_in = e^G and row_undo =
    e^{-G}, or 1 where the chunk decays below LEAST; and row_beta, 0 past a
    sequence's end. total is the decay of a chunk, [slots, HV] or [slots, HV,
    K], and rounded, for the backward, its log2 from the gates as q_in, k_in
    and k_out have them. far marks the chunks in which a channel's decay fails
    is_near, [slots, HV].
    """

    q_in: Tensor
    k_in: Tensor
    k_out: Tensor
    row_in: Tensor | None = None
    row_beta: Tensor | None = None
    total: Tensor | None = None
    G: Tensor | None = None
    row_undo: Tensor | None = None
    rounded: Tensor | None = None
    far: Tensor | None = None

    @property
    def for_states(self) -> tuple[Tensor | None, ...]:
        """What the scans take."""
        return self[:7]

    @property
    def rows(self) -> tuple[Tensor | None, ...]:
        """What there is of beta and a gate a head."""
        return self[3:8]


def empty_chunked(x: Call, *, again: bool = False) -> Chunked:
    """Room for what :func:`intra` finds."""
    B, T, HV, K, C = len(x.q), x.T, x.HV, x.K, x.chunk_size
    chunked = Chunked(x.q, x.k, x.k)
    if x.gate_width == 0 and x.beta is None:
        return chunked
    new = functools.partial(x.q.new_empty, dtype=torch.float32)
    rows = (x.slots, HV, C)
    if x.gate_width == 1:
        chunked = chunked._replace(
            row_in=new(rows),
            total=new(x.slots, HV),
            G=new(rows, dtype=torch.float64),
            row_undo=new(rows),
        )
    elif x.gate_width > 1:
        q_in, k_out = (x.q.new_empty(B, T, HV, K) for _ in range(2))
        chunked = Chunked(
            q_in,
            x.k if x.beta is None else torch.empty_like(q_in),
            k_out,
            total=new(x.slots, HV, K),
            rounded=new(x.slots, HV, K) if again else None,
            far=new(x.slots, HV, dtype=torch.int32),
        )
    if x.beta is not None:
        chunked = chunked._replace(row_beta=new(rows))
    return chunked


def intra(
    x: Call, *, again: bool = False
) -> tuple[Chunked, Tensor | None, Tensor | None]:
    """Inside each chunk: :class:`Chunked`, Aqk and R [B, T, HV, C].

    Aqk is None but for a gate a channel, R but for the delta rule. Neither
    is computed ``again``, by a backward, which has kept them.
    """
    B, T, HV, C = len(x.q), x.T, x.HV, x.chunk_size
    chunked = empty_chunked(x, again=again)
    if x.gate_width == 0 and x.beta is None:
        return chunked, None, None
    Aqk, R = (
        x.q.new_empty(B, T, HV, C) if there and not again else None
        for there in (x.has_scores, x.beta is not None)
    )
    x.run(
        "intra",
        intra_fwd_kernel,
        x.slots * HV,
        x.q,
        x.k,
        x.g,
        x.beta,
        Aqk,
        R,
        *chunked,
        x.cu_seqlens,
        x.num_sequences,
        T,
    )
    if x.has_scores and not again:
        x.run(
            "intra_far",
            intra_fwd_far_kernel,
            -(-x.slots * HV // MARKS),
            x.q,
            x.k,
            x.g,
            chunked.row_beta,
            chunked.far,
            Aqk,
            R,
            x.cu_seqlens,
            x.slots * HV,
            x.num_sequences,
            T,
        )
    return chunked, Aqk, R


def _scan(
    stage: str,
    x: Call,
    chunked: Chunked,
    Aqk: Tensor | None,
    R: Tensor | None,
    exits: Tensor,
    maps: Tensor | None = None,
    **to: Tensor,
) -> None:
    """The forward scan, into those of its results that are asked for."""
    sizes = x.constants(stage)
    N, parts = x.num_sequences, x.segments
    tiles = -(-x.V // sizes["BV"])
    if not to:  # the maps
        parts = x.ranges
        tiles += -(-x.K // sizes["BV"]) if sizes["DELTA"] else 0
    results = (to.get(n) for n in ("state", "h", "errors"))
    x.run(
        stage,
        scan_fwd_kernel,
        parts * N * x.HV * tiles,
        *chunked.for_states,
        x.v,
        Aqk,
        R,
        to.get("o"),
        x.initial_state,
        *results,
        exits if x.segments > 1 else None,
        maps,
        x.cu_seqlens,
        x.scale,
        x.T,
        N,
        x.segments,
        x.ranges,
    )


def segment_rooms(x: Call) -> tuple[Tensor, Tensor]:
    """Room for what :func:`segments` finds; empty if there is one segment.

    The states that leave the P pieces of all segments but the last, [P, N HV,
    K, V]; and the maps of the pieces but the first, [P - 1, N HV, K, K] for
    the delta rule, else the decays, [P - 1, N HV, K, 1], if there are any.
    """
    S, rows, columns = x.segments, x.num_sequences * x.HV, x.K
    # As compose.piece_at counts them: the borders of ranges on top of those
    # of segments, unless they are the same.
    P = S - 1 + (x.ranges - 1) * torch.sym_min(S - 1 - x.ranges, 1)
    between = torch.sym_max(P - 1, 0)
    if x.beta is None:
        columns = 1
        between = between if x.gate_width else 0
    exits = x.new_states(P * x.num_sequences)
    maps = exits.new_empty(between, rows, x.K, columns)
    return exits.view(P, rows, x.K, x.V), maps


def compose(x: Call, stage: str, states: Tensor, maps: Tensor) -> None:
    """From each piece's own result the state that leaves it.

    Or, in "compose_backward", from each segment's the gradient of the state
    that enters it. In place; see compose_kernel.
    """
    if x.segments < 3:
        return
    tiles = -(-x.V // x.constants(stage)["BV"])
    programs = x.num_sequences * x.HV * tiles
    factors = maps if len(maps) else None
    x.run(
        stage,
        compose_kernel,
        programs,
        states,
        factors,
        x.cu_seqlens,
        x.segments,
        x.ranges,
        x.T,
        x.num_sequences,
    )


def segments(
    x: Call, chunked: Chunked, R: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A first pass over all segments but the last: see segment_rooms."""
    exits, maps = segment_rooms(x)
    if x.segments > 1:
        _scan("segments", x, chunked, None, R, exits, maps)
        compose(x, "compose", exits, maps)
    return exits, maps


def scan(
    x: Call,
    chunked: Chunked,
    Aqk: Tensor | None,
    R: Tensor | None,
    exits: Tensor,
) -> tuple[Tensor, Tensor]:
    """Across chunks: outputs [B, T, HV, V], final states [N, HV, K, V]."""
    o, state = torch.empty_like(x.v), x.new_states(x.num_sequences)
    _scan("scan", x, chunked, Aqk, R, exits, o=o, state=state)
    return o, state


def chunk_states(
    x: Call, chunked: Chunked, R: Tensor | None, exits: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The scan again: h, the state that enters each chunk, and the errors.

    Of the delta rule, [B, T, HV, V]: beta times that is what it writes.
    """
    kept = {"h": x.new_states(x.slots, x.v.dtype)}
    if x.beta is not None:
        kept["errors"] = torch.empty_like(x.v)
    _scan("chunk_states", x, chunked, None, R, exits, **kept)
    return kept["h"], kept.get("errors")


def scan_backward(
    x: Call,
    chunked: Chunked,
    Aqk: Tensor | None,
    R: Tensor | None,
    errors: Tensor | None,
    do: Tensor,
    dstate: Tensor | None,
    maps: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """From the last chunk to the first: dv, dbeta, dh and dinitial_state.

    dh is the gradient of the state that leaves each chunk. dbeta, in fp16,
    is what each value tile adds to it, [B, T, HV, tiles] in fp32; else None.
    """
    sizes = x.constants("scan_backward")
    N, S = x.num_sequences, x.segments
    tiles = -(-x.V // sizes["BV"])
    dinitial = None
    if x.initial_state is not None:
        dinitial = torch.empty_like(x.initial_state)

    if x.v.dtype != torch.float16:
        errors = None  # intra_backward finds dbeta

    def launch(S: int, errors: Tensor | None, *results: Tensor | None) -> None:
        x.run(
            "scan_backward",
            scan_bwd_kernel,
            S * N * x.HV * tiles,
            *chunked.for_states,
            Aqk,
            R,
            errors,
            do,
            dstate,
            *results,
            x.cu_seqlens,
            x.scale,
            x.T,
            N,
            x.segments,
            x.ranges,
        )

    entrances = None
    if S > 1:
        entrances = x.new_states(S * N)
        launch(S - 1, None, None, None, None, None, entrances)
        compose(x, "compose_backward", entrances, maps)
    dv, dh = torch.empty_like(x.v), x.new_states(x.slots, do.dtype)
    dbeta = None
    if errors is not None and x.beta is not None:
        dbeta = errors.new_empty(*x.beta.shape, tiles, dtype=torch.float32)
    launch(S, errors, dv, dbeta, dh, dinitial, entrances)
    return dv, dbeta, dh, dinitial


def intra_backward(
    x: Call,
    chunked: Chunked,
    do: Tensor,
    errors: Tensor | None,
    dv: Tensor,
    h: Tensor,
    dh: Tensor,
    dbeta: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Inside each chunk: dq, dk, dg and, unless it is there, dbeta."""
    C, NK = x.chunk_size, -(-x.K // x.constants("intra_backward")["BK"])
    dq, dk = torch.empty_like(x.q), torch.empty_like(x.k)
    dg = None if x.g is None else torch.empty_like(x.g)
    parts, dkept = dg, None
    if dg is not None and x.gate_width == 1:
        dkept = x.q.new_empty(x.slots, x.HV, NK, dtype=torch.float32)
        parts = dkept.new_empty(x.slots, x.HV, NK, 2, C)
    found = None
    if dbeta is None and x.beta is not None:
        found = dbeta = torch.empty_like(x.beta)
    written = x.v if errors is None else errors
    inputs = (x.g, do, written, dv, h, dh, dq, dk)
    rest = (x.cu_seqlens, x.scale)
    sequences = (x.num_sequences, x.T)
    x.run(
        "intra_backward",
        intra_bwd_kernel,
        x.slots * x.H * NK,
        *chunked[:-1],
        *inputs,
        parts,
        dkept,
        found,
        *rest,
        *sequences,
    )
    if x.gate_width == 1:
        x.run(
            "gate_backward",
            gate_bwd_kernel,
            x.slots * x.HV,
            parts,
            dkept,
            dg,
            x.cu_seqlens,
            *sequences,
        )
    if x.gate_width > 1:
        marks = x.slots * x.H
        x.run(
            "intra_backward_far",
            intra_bwd_far_kernel,
            -(-marks // MARKS),
            x.q,
            x.k,
            chunked.row_beta,
            chunked.total,
            chunked.far,
            *inputs,
            dg,
            found,
            *rest,
            marks,
            *sequences,
        )
    return dq, dk, dg, dbeta


def empty_kept(x: Call) -> list[Tensor]:
    """Room for the tensors of :func:`kept`."""
    Aqk, R = (
        x.q.new_empty(*x.v.shape[:3], x.chunk_size) if there else None
        for there in (x.has_scores, x.beta is not None)
    )
    return kept(x, empty_chunked(x), Aqk, R, *segment_rooms(x))


def kept(
    x: Call,
    chunked: Chunked,
    Aqk: Tensor | None,
    R: Tensor | None,
    exits: Tensor,
    maps: Tensor,
) -> list[Tensor]:
    """What the backward is handed, those of it that there are.

    Aqk and R; the rows of beta and of a gate a head, 20 bytes a token and
    head. What a gate a channel makes of q and k is large, and found again.
    Of the segments the exits and maps, which are empty if there is one.
    """
    rows = () if x.has_scores else chunked.rows
    return [t for t in (Aqk, R, *rows, exits, maps) if t is not None]


def found_again(
    x: Call, saved: list[Tensor]
) -> tuple[Chunked, Tensor | None, Tensor | None, Tensor, Tensor]:
    """The arguments of :func:`kept`, from its result."""
    *others, exits, maps = saved
    rest = iter(others)

    def take(*there: bool) -> list[Tensor | None]:
        return [next(rest) if it else None for it in there]

    gate, delta = x.gate_width == 1, x.beta is not None
    Aqk, R = take(x.has_scores, delta)
    if x.has_scores:
        chunked, _, _ = intra(x, again=True)
    else:
        rows = take(gate, delta, gate, gate, gate)
        chunked = Chunked(x.q, x.k, x.k, *rows)
    return chunked, Aqk, R, exits, maps


def forward(x: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs, final states, and what is :func:`kept`."""
    chunked, Aqk, R = intra(x)
    exits, maps = segments(x, chunked, R)
    o, state = scan(x, chunked, Aqk, R, exits)
    return o, state, kept(x, chunked, Aqk, R, exits, maps)


def backward(x: Call) -> list[Tensor]:
    """Gradients of q, k, v and of g, beta, initial_state where given.

    That of beta in fp16 as :func:`scan_backward` leaves it.
    """
    do, dstate, *saved = x.others
    chunked, Aqk, R, exits, maps = found_again(x, saved)
    h, errors = chunk_states(x, chunked, R, exits)
    dv, dbeta, dh, dinitial = scan_backward(
        x, chunked, Aqk, R, errors, do, dstate, maps
    )
    dq, dk, dg, dbeta = intra_backward(
        x, chunked, do, errors, dv, h, dh, dbeta
    )
    found = (dq, dk, dv, dg, dbeta, dinitial)
    return [dx for dx in found if dx is not None]
