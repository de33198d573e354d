"""Segments of sequences, and between them each state from the one before.

A sequence is cut into segments of L chunks, the last of which may be shorter.
They lie in slots as chunks do (tile.first_slot). A border lies at the end of
every segment but a sequence's last, and has the state that passes it and the
map of the segment before it. Among packed sequences two such segments, of L
chunks each, never start within the same L chunks of the pack, counted from
its first token: that is what numbers the borders.
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
def border_of(i_n, start, first, cu_seqlens, T, L, BT: tl.constexpr):
    """The border at the end of the segment that starts with chunk first."""
    if cu_seqlens is None:
        borders = tl.cdiv(tl.cdiv(T, BT), L) - 1  # of each sequence
        return i_n * borders + first // L
    else:
        return ((start + first * BT) // (L * BT)).to(tl.int32)


@triton.jit
def segment_before(i_b, cu_seqlens, N, T, L, BT: tl.constexpr):
    """The segment before border i_b, as segment_at has it; if there is one.

    Of packed sequences that with the last of the border's tokens, if it is
    not its sequence's last.
    """
    if cu_seqlens is None:
        borders = tl.cdiv(tl.cdiv(T, BT), L) - 1
        i_n, first = i_b // borders, i_b % borders * L
        start, end = tile.sequence_span(i_n, cu_seqlens, T)
    else:
        i_n = tile.sequence_of(i_b, cu_seqlens, N, T, L * BT, True)
        start, end = tile.sequence_span(i_n, cu_seqlens, T)
        last = (i_b + 1).to(tl.int64) * (L * BT) - 1
        first = (tl.maximum(last - start, 0) // (L * BT) * L).to(tl.int32)
        if last < start:
            end = start
    is_border = start + (first + L).to(tl.int64) * BT < end
    return i_n, start, end, first, is_border


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
def compose_kernel(borders, maps, call, META: tl.constexpr):
    """Each state goes on from the one before it: one value tile of a head.

    In place, fp32. borders [borders, HV, K, V] has what leaves a segment that
    zero enters, but of a sequence's first what leaves it indeed. maps
    [borders, HV, K, K] are those of the segments before them; [borders, HV,
    K], the diagonal, for the additive rule; or None, all ones. BACK: borders
    has what the segment after a border adds to the gradient of the state that
    passes it, then that gradient. A program starts at the border after a
    sequence's second segment, and there is none after the last.
    """
    cu_seqlens, scale, T, N, L = call
    HV: tl.constexpr = META.HV
    K: tl.constexpr = META.K
    BT: tl.constexpr = META.BT
    BJ: tl.constexpr = META.BJ
    BK: tl.constexpr = META.BK
    BV: tl.constexpr = META.BV
    BACK: tl.constexpr = META.BACK
    NV: tl.constexpr = META.NV
    NJ: tl.constexpr = META.NJ
    i_v, i_b = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_hv, i_b = i_b % HV, i_b // HV
    i_n, start, end, first, is_border = segment_before(
        i_b, cu_seqlens, N, T, L, BT
    )
    o_k = tl.arange(0, BK)
    segments = tl.cdiv(tl.cdiv(end - start, BT), L).to(tl.int32)
    if (is_border == 0) | (first != L):
        segments = 0
    for i in range(1, segments - 1):
        i_s = segments - 1 - i if BACK else i
        i_M = border_of(i_n, start, i_s * L, cu_seqlens, T, L, BT)
        i_to = border_of(i_n, start, i_s * L - L, cu_seqlens, T, L, BT)
        i_from = i_M
        if not BACK:
            i_to, i_from = i_M, i_to
        i_M, i_to = i_M * HV + i_hv, i_to * HV + i_hv
        i_from = i_from * HV + i_hv
        if META.DELTA:
            b_on = tl.zeros([BK, BV], dtype=tl.float32)
            for i_j in tl.static_range(NJ):
                o_from, m_from = tile.tile_at(
                    i_from, i_j, 0, i_v, K, 1, META.V, BJ, BV
                )
                b_from = tl.load(borders + o_from, mask=m_from, other=0.0)
                if BACK:
                    o_M, m_M = tile.tile_at(i_M, i_j, 0, 0, K, 1, K, BJ, BK)
                else:
                    o_M, m_M = tile.tile_at(i_M, 0, 0, i_j, K, 1, K, BK, BJ)
                b_M = tl.load(maps + o_M, mask=m_M, other=0.0)
                if i_j == NJ - 1:  # with the last loads, not before them
                    b_S = tile.load_state(borders, i_to, i_v, True, META)
                if BACK:
                    b_M = tl.trans(b_M)  # [BK, BJ]
                b_on = tl.dot(b_M, b_from, b_on, input_precision="tf32x3")
            b_S += b_on
        else:
            b_S = tile.load_state(borders, i_to, i_v, True, META)  # [BK, BV]
            b_from = tile.load_state(borders, i_from, i_v, True, META)
            if maps is not None:
                p_M = maps + i_M.to(tl.int64) * K + o_k
                b_from *= tl.load(p_M, mask=o_k < K, other=0.0)[:, None]
            b_S += b_from
        tile.store_state(borders, b_S, i_to, i_v, True, META)
        tl.debug_barrier()  # before other threads load what was stored
