"""Segments of sequences, and between them each state from the one before.

A sequence is cut into segments of L chunks, from its own first token on; what
is left over at its end is its tail. They lie in slots as chunks do
(tile.first_slot). A border lies at the end of every whole segment, and has the
state that passes it and the segment's map. Among packed sequences two whole
segments never start within the same L chunks of the pack, counted from its
first token: that is what numbers the borders.

Whatever state enters a whole segment, also as a call's initial state, the one
that leaves it is composed, also as a call's final state. So a sequence may be
cut into calls at its borders, and the bits stay. Only what nothing enters is
left as the scan leaves it: composed, it would be the same.

META.RANKS: the tokens are those of one of the ranks of a group, and a sequence
may go on at the next one. Then a segment is whole that goes up to the last
token here, however short it is, and there is a border after it. A pack has one
border more, at its first token, for the gradient of what enters a sequence
without any whole segment.
"""

import triton
import triton.language as tl

from fastweights.kernels import tile

FORGOTTEN = tl.constexpr(-100.0)  # log2 of what counts as nothing


@triton.jit
def segment_at(i_s, cu_seqlens, N, T, L, BT: tl.constexpr):
    """Sequence, first token, end and first chunk of what slot i_s holds.

    The first chunk of an empty slot is past the end.
    """
    i_n = tile.sequence_of(i_s, cu_seqlens, N, T, L * BT)
    start, end = tile.sequence_span(i_n, cu_seqlens, T)
    i_first = tile.first_slot(i_n, cu_seqlens, T, L * BT)
    return i_n, start, end, ((i_s - i_first) * L).to(tl.int32)


@triton.jit
def borders_of(T, L, META: tl.constexpr):
    """How many borders a sequence of a batch has."""
    borders = T // (L * META.BT)
    if META.RANKS:
        borders = tl.cdiv(T, L * META.BT)
    return borders


@triton.jit
def border_of(i_n, start, first, cu_seqlens, T, L, META: tl.constexpr):
    """The border at the end of the segment that starts with chunk first."""
    if cu_seqlens is None:
        return i_n * borders_of(T, L, META) + first // L
    else:
        return ((start + first * META.BT) // (L * META.BT)).to(tl.int32)


@triton.jit
def segment_before(i_b, cu_seqlens, N, T, L, META: tl.constexpr):
    """The segment before border i_b, as segment_at has it, if it is whole.

    Of packed sequences that with the last of the border's tokens.
    """
    BT: tl.constexpr = META.BT
    if cu_seqlens is None:
        borders = borders_of(T, L, META)
        i_n, first = i_b // borders, i_b % borders * L
        start, end = tile.sequence_span(i_n, cu_seqlens, T)
    elif META.RANKS:
        is_edge = i_b == borders_of(T, L, META)
        end = tl.minimum((i_b + 1).to(tl.int64) * (L * BT), T)
        last = tl.where(is_edge, 0, end - 1)
        i_n = tile.sequence_of(last, cu_seqlens, N, T, 1, True)
        start, end = tile.sequence_span(i_n, cu_seqlens, T)
        first = (tl.maximum(last - start, 0) // (L * BT) * L).to(tl.int32)
        if is_edge:
            first = -L
        elif border_of(i_n, start, first, cu_seqlens, T, L, META) != i_b:
            end = start
    else:
        i_n = tile.sequence_of(i_b, cu_seqlens, N, T, L * BT, True)
        start, end = tile.sequence_span(i_n, cu_seqlens, T)
        last = (i_b + 1).to(tl.int64) * (L * BT) - 1
        first = (tl.maximum(last - start, 0) // (L * BT) * L).to(tl.int32)
        if last < start:
            end = start
    return i_n, start, end, first


@triton.jit
def is_whole(start, end, first, cu_seqlens, T, L, META: tl.constexpr):
    """Whether the segment that starts with chunk first has all L chunks."""
    whole = start + (first + L).to(tl.int64) * META.BT <= end
    if META.RANKS:
        here = start + first.to(tl.int64) * META.BT < end
        if cu_seqlens is not None:
            here &= end == T
        whole = (whole | here) & (first >= 0)
    return whole


@triton.jit
def chunks_in_reach(bounds, i_c, i_hv, first, last, BACK: tl.constexpr, META):
    """How many of the chunks first to last matter at the end of them.

    Or with BACK at their beginning. What is farther away is FORGOTTEN: so
    says the log2 of the bound on each chunk's map, bounds [slots, HV], of
    which i_c is the slot of chunk first. Only LOOK chunks are looked at; if
    all of them matter, so do the others.
    """
    LOOK: tl.constexpr = 64
    o_c = tl.arange(0, LOOK)
    i_t = first + o_c if BACK else last - 1 - o_c
    m_t = (i_t >= first) & (i_t < last)
    p_bound = bounds + (i_c + i_t - first) * META.HV + i_hv
    b_bound = tl.load(p_bound, mask=m_t, other=0.0)  # [LOOK]
    b_way = tl.cumsum(b_bound, axis=0) - b_bound  # on the way to the end
    # NaN is not forgotten.
    reached = tl.sum(tl.where(m_t & ((b_way < FORGOTTEN) == 0), 1, 0), axis=0)
    if reached == LOOK:
        reached = last - first
    return reached


@triton.jit
def state_passing(edge, borders, at_edge, i_n, i_b, i_hv, HV: tl.constexpr):
    """Where the state lies that passes border i_b, or sequence i_n's edge."""
    if edge is None:
        p_S, i_s = borders, i_b * HV + i_hv
    else:
        p_S = tl.where(at_edge, edge, borders)
        i_s = tl.where(at_edge, i_n, i_b) * HV + i_hv
    return p_S, i_s


@triton.jit
def times_map(
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

    If there is a p_to, added to what state i_to has.
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
    """The state at p_from, through the map, is added to that at p_to."""
    of_state = maps, i_M, p_from, i_from, i_v, p_to, i_to
    b_S = times_map(*of_state, META.V, BACK, META)
    tile.store_state(p_to, b_S, i_to, i_v, True, META)


@triton.jit
def compose_map(maps, through, i_M, i_way, is_first, i_j, META: tl.constexpr):
    """Column tile i_j of map i_M on top of what is through at i_way."""
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
        way = maps, i_M, through, i_way, i_j, None, 0
        b_S = times_map(*way, K, BACK, META)
    tl.store(through + o_S, b_S, mask=m_S)


@triton.jit
def compose_kernel(
    entering, borders, leaving, maps, through, call, META: tl.constexpr
):
    """Each state goes on from the one before it: one value tile of a head.

    In place, fp32. borders [borders, HV, K, V] has what leaves a segment that
    zero enters. maps [borders, HV, K, K] are those of the segments before
    them; [borders, HV, K], the diagonal, for the additive rule; or None, all
    ones. BACK: borders has what the segment after a border adds to the
    gradient of the state that passes it, then that gradient. At a sequence's
    edges stand the states [N, HV, K, V] that enter a call and those that leave
    it; where an end is no border, neither is its edge. A program starts at the
    border of a sequence's first segment. Of a rank, through gets the products
    of maps, from the first that is composed up to each, for arrive_kernel:
    programs of their own compose the columns of the identity, too.
    """
    cu_seqlens, scale, T, N, L = call
    HV: tl.constexpr = META.HV
    K: tl.constexpr = META.K
    BT: tl.constexpr = META.BT
    BK: tl.constexpr = META.BK
    BACK: tl.constexpr = META.BACK
    NV: tl.constexpr = META.NV
    NM: tl.constexpr = META.NM if META.RANKS and META.DELTA else 0
    i_v, i_b = tl.program_id(0) % (NV + NM), tl.program_id(0) // (NV + NM)
    i_hv, i_b = i_b % HV, i_b // HV
    i_n, start, end, first = segment_before(i_b, cu_seqlens, N, T, L, META)
    o_k = tl.arange(0, BK)
    segments = ((end - start) // (L * BT)).to(tl.int32)
    has_tail = start + segments.to(tl.int64) * (L * BT) < end
    if META.RANKS:
        tail = segments * L
        goes_on = is_whole(start, end, tail, cu_seqlens, T, L, META)
        segments += goes_on.to(tl.int32)
        has_tail &= goes_on == 0
    if first != 0:
        segments = 0
    begin, stop = 0, segments
    if entering is None:
        begin = tl.where(has_tail, 0, 1) if BACK else 1
    if leaving is None:
        stop -= 1
    i_way = i_b
    b_through = tl.full([BK], 1.0, dtype=tl.float32)
    for i in range(begin, stop):
        i_s = segments - 1 - i if BACK else i
        i_M = border_of(i_n, start, i_s * L, cu_seqlens, T, L, META)
        i_to = border_of(i_n, start, i_s * L - L, cu_seqlens, T, L, META)
        i_from, from_edge, to_edge = i_M, i == 0, i == segments - 1
        if BACK:
            from_edge &= has_tail == 0
        else:
            i_to, i_from = i_M, i_to
            to_edge &= has_tail == 0
        p_from, i_from = state_passing(
            entering, borders, from_edge, i_n, i_from, i_hv, HV
        )
        p_to, i_to = state_passing(
            leaving, borders, to_edge, i_n, i_to, i_hv, HV
        )
        i_M = i_M * HV + i_hv
        if META.DELTA:
            of_state = maps, i_M, p_from, i_from, i_v, p_to, i_to
            if NM > 0:
                if i_v < NV:
                    compose_state(*of_state, BACK, META)
                else:
                    way = maps, through, i_M, i_way, i == 0, i_v - NV
                    compose_map(*way, META)
            else:
                compose_state(*of_state, BACK, META)
        else:
            b_S = tile.load_state(p_to, i_to, i_v, True, META)  # [BK, BV]
            b_from = tile.load_state(p_from, i_from, i_v, True, META)
            if maps is not None:
                o_M = i_M.to(tl.int64) * K + o_k
                b_M = tl.load(maps + o_M, mask=o_k < K, other=0.0)
                b_from *= b_M[:, None]
                if through is not None:
                    b_through *= b_M
                    m_k = tile.mask_if(i_v == 0, o_k < K)
                    tl.store(through + o_M, b_through, mask=m_k)
            b_S += b_from
            tile.store_state(p_to, b_S, i_to, i_v, True, META)
        i_way = i_M
        tl.debug_barrier()  # before other threads load what was stored


@triton.jit
def arrive_kernel(
    arriving, borders, leaving, through, call, META: tl.constexpr
):
    """Add to all composed states what becomes there of one from a rank.

    arriving [N, HV, K, V] enters with what compose_kernel had as entering;
    each state has a program per value tile. The rest is compose_kernel's.
    """
    cu_seqlens, scale, T, N, L = call
    HV: tl.constexpr = META.HV
    K: tl.constexpr = META.K
    BT: tl.constexpr = META.BT
    NV: tl.constexpr = META.NV
    i_v, i_M = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_hv, i_b = i_M % HV, i_M // HV
    i_n, start, end, first = segment_before(i_b, cu_seqlens, N, T, L, META)
    if is_whole(start, end, first, cu_seqlens, T, L, META):
        i_to = i_b
        if META.BACK:
            to_edge = first == 0
            i_to = border_of(i_n, start, first - L, cu_seqlens, T, L, META)
        else:
            to_edge = start + (first + L).to(tl.int64) * BT >= end
        p_to, i_to = state_passing(
            leaving, borders, to_edge, i_n, i_to, i_hv, HV
        )
        i_n = i_n * HV + i_hv
        if META.DELTA:
            of_state = through, i_M, arriving, i_n, i_v, p_to, i_to
            compose_state(*of_state, False, META)
        else:
            b_S = tile.load_state(arriving, i_n, i_v, True, META)
            if through is not None:
                o_k = tl.arange(0, META.BK)
                p_M = through + i_M.to(tl.int64) * K + o_k
                b_S *= tl.load(p_M, mask=o_k < K, other=0.0)[:, None]
            b_S += tile.load_state(p_to, i_to, i_v, True, META)
            tile.store_state(p_to, b_S, i_to, i_v, True, META)
