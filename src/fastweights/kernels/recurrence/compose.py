"""Between segments: each state from the one before, through the maps.

Whatever state enters a whole segment (``segments.py``), also as a call's
initial state, the one that leaves it is composed, also as a call's final
state. So a sequence may be cut into calls at its borders, and the bits stay.
Only what nothing enters is left as the scan leaves it: composed, it would be
the same.
"""

import triton
import triton.language as tl

from fastweights.kernels import tile
from fastweights.kernels.recurrence.segments import (
    border_of,
    border_state_at,
    is_whole,
    segment_before,
)


@triton.jit
def apply_map(
    maps,
    i_M,
    states,
    i_from,
    i_v,
    p_to,
    i_to,
    V: tl.constexpr,
    BACK: tl.constexpr,
    META: tl.constexpr,
):
    """M S, or M^T S with BACK: value tile i_v of S [K, V], state i_from.

    If there is a p_to, the product is added to what state i_to has.
    """
    K: tl.constexpr = META.K
    BJ: tl.constexpr = META.BJ
    BK: tl.constexpr = META.BK
    BV: tl.constexpr = META.BV
    NJ: tl.constexpr = META.NJ
    b_on = tl.zeros([BK, BV], dtype=tl.float32)
    b_to = tl.zeros([BK, BV], dtype=tl.float32)
    for i_j in tl.static_range(NJ):
        o_from, m_from = tile.tile_at(i_from, i_j, 0, i_v, K, 1, V, BJ, BV)
        b_from = tl.load(states + o_from, mask=m_from, other=0.0)
        if BACK:
            o_M, m_M = tile.tile_at(i_M, i_j, 0, 0, K, 1, K, BJ, BK)
        else:
            o_M, m_M = tile.tile_at(i_M, 0, 0, i_j, K, 1, K, BK, BJ)
        b_M = tl.load(maps + o_M, mask=m_M, other=0.0)
        if p_to is not None and i_j == NJ - 1:  # with the last loads
            b_to = tile.load_state(p_to, i_to, i_v, True, META)
        if BACK:
            b_M = tl.trans(b_M)  # [BK, BJ]
        b_on = tl.dot(b_M, b_from, b_on, input_precision="tf32x3")
    return b_to + b_on


@triton.jit
def compose_state(
    maps,
    i_M,
    p_from,
    i_from,
    i_v,
    p_to,
    i_to,
    BACK: tl.constexpr,
    META: tl.constexpr,
):
    """Add the state at p_from, through the map, to that at p_to."""
    state_args = maps, i_M, p_from, i_from, i_v, p_to, i_to
    b_S = apply_map(*state_args, META.V, BACK, META)
    tile.store_state(p_to, b_S, i_to, i_v, True, META)


@triton.jit
def compose_map(maps, products, i_M, i_P, is_first, i_j, META: tl.constexpr):
    """Column tile i_j of map i_M times the product of maps at i_P."""
    K: tl.constexpr = META.K
    BK: tl.constexpr = META.BK
    BV: tl.constexpr = META.BV
    BACK: tl.constexpr = META.BACK
    o_S, m_S = tile.state_at(i_M, i_j, K, K, BK, BV)
    if is_first:
        o_M = o_S
        if BACK:
            o_j = i_j * BV + tl.arange(0, BV)[None, :]
            o_M = (i_M.to(tl.int64) * K + o_j) * K + tl.arange(0, BK)[:, None]
        b_S = tl.load(maps + o_M, mask=m_S, other=0.0)
    else:
        map_args = maps, i_M, products, i_P, i_j, None, 0
        b_S = apply_map(*map_args, K, BACK, META)
    tl.store(products + o_S, b_S, mask=m_S)


@triton.jit
def compose_kernel(states, call, META: tl.constexpr):
    """Carry each state on from the one before: one value tile of a head.

    In place, in fp32. borders [borders, HV, K, V] has what leaves the segment
    before each border if zeros enter it, and gets the state that passes there.
    BACK: it has what the segment after a border adds to the gradient of that
    state, and gets that gradient. maps has the map of the segment before each
    border, [borders, HV, K, K]; for the additive rule its diagonal,
    [borders, HV, K]; None stands for ones. At a sequence's edges are the
    states [N, HV, K, V] that enter a call and those that leave it; an end that
    is no border takes no part. A program starts at the border of a sequence's
    first segment. On ranks products gets the product of the maps that are
    composed, up to each border, for add_arriving_kernel; its columns have
    programs of their own.
    """
    HV: tl.constexpr = META.HV
    K: tl.constexpr = META.K
    BT: tl.constexpr = META.BT
    BK: tl.constexpr = META.BK
    BACK: tl.constexpr = META.BACK
    NV: tl.constexpr = META.NV
    NM: tl.constexpr = META.NM if META.RANKS and META.DELTA else 0
    entering, borders, leaving, maps, products = states
    i_v, i_b = tl.program_id(0) % (NV + NM), tl.program_id(0) // (NV + NM)
    i_hv, i_b = i_b % HV, i_b // HV
    i_n, start, end, first_chunk = segment_before(i_b, call, META)
    o_k = tl.arange(0, BK)
    segments = ((end - start) // (call.L * BT)).to(tl.int32)
    has_rest = start + segments.to(tl.int64) * (call.L * BT) < end
    if META.RANKS:
        rest = segments * call.L
        goes_on = is_whole(start, end, rest, call, META)
        segments += goes_on.to(tl.int32)
        has_rest &= goes_on == 0
    if first_chunk != 0:
        segments = 0
    begin, stop = 0, segments
    if entering is None:
        begin = tl.where(has_rest, 0, 1) if BACK else 1
    if leaving is None:
        stop -= 1
    i_P = i_b
    b_P = tl.full([BK], 1.0, dtype=tl.float32)
    for i in range(begin, stop):
        i_s = segments - 1 - i if BACK else i
        i_M = border_of(i_n, start, i_s * call.L, call, META)
        i_to = border_of(i_n, start, i_s * call.L - call.L, call, META)
        i_from, from_edge, to_edge = i_M, i == 0, i == segments - 1
        if BACK:
            from_edge &= has_rest == 0
        else:
            i_to, i_from = i_M, i_to
            to_edge &= has_rest == 0
        p_from, i_from = border_state_at(
            entering, borders, from_edge, i_n, i_from, i_hv, HV
        )
        p_to, i_to = border_state_at(
            leaving, borders, to_edge, i_n, i_to, i_hv, HV
        )
        i_M = i_M * HV + i_hv
        if META.DELTA:
            state_args = maps, i_M, p_from, i_from, i_v, p_to, i_to
            if NM > 0:
                if i_v < NV:
                    compose_state(*state_args, BACK, META)
                else:
                    map_args = maps, products, i_M, i_P, i == 0, i_v - NV
                    compose_map(*map_args, META)
            else:
                compose_state(*state_args, BACK, META)
        else:
            b_S = tile.load_state(p_to, i_to, i_v, True, META)  # [BK, BV]
            b_from = tile.load_state(p_from, i_from, i_v, True, META)
            if maps is not None:
                o_M = i_M.to(tl.int64) * K + o_k
                b_M = tl.load(maps + o_M, mask=o_k < K, other=0.0)
                b_from *= b_M[:, None]
                if products is not None:
                    b_P *= b_M
                    m_k = tile.mask_if(i_v == 0, o_k < K)
                    tl.store(products + o_M, b_P, mask=m_k)
            b_S += b_from
            tile.store_state(p_to, b_S, i_to, i_v, True, META)
        i_P = i_M
        tl.debug_barrier()  # before other threads load what was stored


@triton.jit
def add_arriving_kernel(states, call, META: tl.constexpr):
    """Add a state from the rank before to every state composed without it.

    That of a border gains P S, where S is the state that has arrived, in the
    place of ``entering``, and P the product of the maps up to that border,
    which compose_kernel has left in products. BACK: S is a gradient, from the
    rank after. Each composed state has a program per value tile.
    """
    HV: tl.constexpr = META.HV
    K: tl.constexpr = META.K
    BT: tl.constexpr = META.BT
    NV: tl.constexpr = META.NV
    arriving, borders, leaving, _, products = states
    i_v, i_M = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_hv, i_b = i_M % HV, i_M // HV
    i_n, start, end, first_chunk = segment_before(i_b, call, META)
    if is_whole(start, end, first_chunk, call, META):
        i_to = i_b
        if META.BACK:
            to_edge = first_chunk == 0
            i_to = border_of(i_n, start, first_chunk - call.L, call, META)
        else:
            to_edge = start + (first_chunk + call.L).to(tl.int64) * BT >= end
        p_to, i_to = border_state_at(
            leaving, borders, to_edge, i_n, i_to, i_hv, HV
        )
        i_n = i_n * HV + i_hv
        if META.DELTA:
            state_args = products, i_M, arriving, i_n, i_v, p_to, i_to
            compose_state(*state_args, False, META)
        else:
            b_S = tile.load_state(arriving, i_n, i_v, True, META)
            if products is not None:
                o_k = tl.arange(0, META.BK)
                p_M = products + i_M.to(tl.int64) * K + o_k
                b_S *= tl.load(p_M, mask=o_k < K, other=0.0)[:, None]
            b_S += tile.load_state(p_to, i_to, i_v, True, META)
            tile.store_state(p_to, b_S, i_to, i_v, True, META)
