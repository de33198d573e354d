"""How sequences are cut, and between segments each state from the one before.

The states at the segments' borders need each segment's map from the state
that enters it to the one that leaves, which the delta rule's first pass finds
in fewer and longer ranges than there are segments, where not all of them
would run at once. A range's programs start anew at each segment's border. So
what they leave are pieces: the chunks between two borders of either kind.
"""

import triton
import triton.language as tl

from fastweights.kernels import tile


@triton.jit
def cuts(i_n, NS, NR, cu_seqlens, T, BT: tl.constexpr):
    """How sequence i_n is cut into NS segments, and into NR ranges.

    Its first token and its end; in chunks how many there are, and how many a
    segment and a range have. Segments at the end may have fewer, or none. The
    ranges are those of all segments but the last, and no shorter than these.
    """
    start, end = tile.sequence_span(i_n, cu_seqlens, T)
    NT = tl.cdiv(end - start, BT).to(tl.int32)
    size = tl.maximum(tl.cdiv(NT, NS), 1)
    return start, end, NT, size, tl.cdiv((NS - 1) * size, NR)


@triton.jit
def piece_at(i_t, size, span):
    """The piece in which chunk i_t is, of segments of size, ranges of span.

    Counted from 0; where both kinds of border meet one number is left out,
    unless they always do.
    """
    return i_t // size + tl.where(span == size, 0, i_t // span)


@triton.jit
def compose_kernel(borders, maps, call, META: tl.constexpr):
    """Each state goes on from the one before it: one value tile of a head.

    In place, fp32. borders [pieces, N, HV, K, V] has what leaves a piece that
    zero enters, but in the first range what leaves it indeed. maps [pieces -
    1, N, HV, K, K] are those of all pieces but the first; [pieces - 1, N, HV,
    K], the diagonal, for the additive rule; or None, all ones. BACK, from the
    last, borders [NS, N, HV, K, V]: in row s - 1 what segment s adds to the
    gradient of the state that enters it, then that gradient. The last row is
    for that of a segment's second piece.
    """
    cu_seqlens, scale, T, N, NS, NR = call
    BACK: tl.constexpr = META.BACK
    HV: tl.constexpr = META.HV
    K: tl.constexpr = META.K
    BJ: tl.constexpr = META.BJ
    BK: tl.constexpr = META.BK
    BV: tl.constexpr = META.BV
    NV: tl.constexpr = META.NV
    NJ: tl.constexpr = META.NJ
    i_nh, i_v = tl.program_id(0) // NV, tl.program_id(0) % NV
    rows = N * HV
    o_k = tl.arange(0, BK)
    _, _, NT, size, span = cuts(i_nh // HV, NS, NR, cu_seqlens, T, META.BT)
    for i in range(2 * (NS - 2)):
        # A segment has two pieces at most, the first of which may be empty.
        i_s = NS - 2 - i // 2 if BACK else 1 + i // 2
        second = i % 2 == (0 if BACK else 1)
        first, last = i_s * size, tl.minimum((i_s + 1) * size, NT)
        border = tl.maximum(first, (last - 1) // span * span)
        c = tl.where(second, border, first)
        stop = tl.where(second, last, border)
        # Known already: forward the first range; back a segment that ends
        # with its sequence.
        known = last == NT if BACK else c < span
        if (c < stop) & (known == 0):
            to = piece_at(c, size, span)
            i_M = (to - 1) * rows + i_nh
            if BACK:
                start_of_segment = c == first
                to = tl.where(start_of_segment, i_s - 1, NS - 1)
                i_from = tl.where(stop == last, i_s, NS - 1) * rows + i_nh
            else:
                i_from = piece_at(c - 1, size, span) * rows + i_nh
            i_to = to * rows + i_nh
            own = start_of_segment if BACK else True
            if META.DELTA:
                b_on = tl.zeros([BK, BV], dtype=tl.float32)
                for i_j in tl.static_range(NJ):
                    o_x, m_x = tile.tile_at(
                        i_from, i_j, 0, i_v, K, 1, META.V, BJ, BV
                    )
                    b_x = tl.load(borders + o_x, mask=m_x, other=0.0)
                    if BACK:
                        o_M, m_M = tile.tile_at(
                            i_M, i_j, 0, 0, K, 1, K, BJ, BK
                        )
                    else:
                        o_M, m_M = tile.tile_at(
                            i_M, 0, 0, i_j, K, 1, K, BK, BJ
                        )
                    b_M = tl.load(maps + o_M, mask=m_M, other=0.0)
                    if i_j == NJ - 1:  # with the last loads, not before them
                        b_S = tile.load_state(borders, i_to, i_v, own, META)
                    if BACK:
                        b_M = tl.trans(b_M)  # [BK, BJ]
                    b_on = tl.dot(b_M, b_x, b_on, input_precision="tf32x3")
                b_S += b_on
            else:
                b_S = tile.load_state(
                    borders, i_to, i_v, own, META
                )  # [BK, BV]
                b_x = tile.load_state(borders, i_from, i_v, True, META)
                if maps is not None:
                    p_M = maps + i_M.to(tl.int64) * K + o_k
                    b_x *= tl.load(p_M, mask=o_k < K, other=0.0)[:, None]
                b_S += b_x
            tile.store_state(borders, b_S, i_to, i_v, True, META)
            tl.debug_barrier()  # before other threads load what was stored
