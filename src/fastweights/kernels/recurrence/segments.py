"""Segments of sequences, and the borders between them: where they lie.

A sequence is cut into segments of L chunks, from its own first token on; what
is left over at its end is its rest. They lie in slots as chunks do
(tile.first_slot). A border lies at the end of every whole segment, and has the
state that passes it and the segment's map. Among packed sequences two whole
segments never start within the same L chunks of the pack, counted from its
first token: that is what numbers the borders.

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
def segment_at(i_s, call, BT: tl.constexpr):
    """Sequence, first token, end and first chunk of what slot i_s holds.

    The first chunk of an empty slot is past the end.
    """
    BL = call.L * BT
    i_n = tile.sequence_of(i_s, call.cu_seqlens, call.N, call.T, BL)
    start, end = tile.sequence_span(i_n, call.cu_seqlens, call.T)
    first = tile.first_slot(i_n, call.cu_seqlens, call.T, BL)
    return i_n, start, end, ((i_s - first) * call.L).to(tl.int32)


@triton.jit
def num_borders(call, META: tl.constexpr):
    """The number of borders that a sequence of a batch has."""
    borders = call.T // (call.L * META.BT)
    if META.RANKS:
        borders = tl.cdiv(call.T, call.L * META.BT)
    return borders


@triton.jit
def border_of(i_n, start, first_chunk, call, META: tl.constexpr):
    """The border at the end of the segment that starts with first_chunk."""
    if call.cu_seqlens is None:
        return i_n * num_borders(call, META) + first_chunk // call.L
    else:
        return ((start + first_chunk * META.BT) // (call.L * META.BT)).to(
            tl.int32
        )


@triton.jit
def segment_before(i_b, call, META: tl.constexpr):
    """The segment before border i_b, as segment_at has it, if it is whole.

    Among packed sequences it is the one with the last of the border's tokens.
    """
    BL = call.L * META.BT
    if call.cu_seqlens is None:
        borders = num_borders(call, META)
        i_n, first_chunk = i_b // borders, i_b % borders * call.L
        start, end = tile.sequence_span(i_n, call.cu_seqlens, call.T)
    elif META.RANKS:
        is_edge = i_b == num_borders(call, META)
        end = tl.minimum((i_b + 1).to(tl.int64) * BL, call.T)
        last = tl.where(is_edge, 0, end - 1)
        i_n = tile.sequence_of(last, call.cu_seqlens, call.N, call.T, 1, True)
        start, end = tile.sequence_span(i_n, call.cu_seqlens, call.T)
        first_chunk = (tl.maximum(last - start, 0) // BL * call.L).to(tl.int32)
        if is_edge:
            first_chunk = -call.L
        elif border_of(i_n, start, first_chunk, call, META) != i_b:
            end = start
    else:
        i_n = tile.sequence_of(i_b, call.cu_seqlens, call.N, call.T, BL, True)
        start, end = tile.sequence_span(i_n, call.cu_seqlens, call.T)
        last = (i_b + 1).to(tl.int64) * BL - 1
        first_chunk = (tl.maximum(last - start, 0) // BL * call.L).to(tl.int32)
        if last < start:
            end = start
    return i_n, start, end, first_chunk


@triton.jit
def is_whole(start, end, first_chunk, call, META: tl.constexpr):
    """Whether the segment that starts with first_chunk has all L chunks."""
    whole = start + (first_chunk + call.L).to(tl.int64) * META.BT <= end
    if META.RANKS:
        here = start + first_chunk.to(tl.int64) * META.BT < end
        if call.cu_seqlens is not None:
            here &= end == call.T
        whole = (whole | here) & (first_chunk >= 0)
    return whole


@triton.jit
def chunks_in_reach(
    bounds, i_slot, i_hv, first_chunk, stop_chunk, BACK: tl.constexpr, META
):
    """The number of chunks up to stop_chunk that matter at their end.

    With BACK, at their beginning. What is farther away is FORGOTTEN: so says
    the log2 of the bound on each chunk's map, bounds [slots, HV], in which
    first_chunk has slot i_slot. Only LOOK chunks are looked at; if all of them
    matter, so do the others.
    """
    LOOK: tl.constexpr = 64
    o_c = tl.arange(0, LOOK)
    i_t = first_chunk + o_c if BACK else stop_chunk - 1 - o_c
    m_t = (i_t >= first_chunk) & (i_t < stop_chunk)
    p_bound = bounds + (i_slot + i_t - first_chunk) * META.HV + i_hv
    b_bound = tl.load(p_bound, mask=m_t, other=0.0)  # [LOOK]
    b_way = tl.cumsum(b_bound, axis=0) - b_bound  # on the way to the end
    # NaN is not forgotten.
    reached = tl.sum(tl.where(m_t & ((b_way < FORGOTTEN) == 0), 1, 0), axis=0)
    if reached == LOOK:
        reached = stop_chunk - first_chunk
    return reached


@triton.jit
def border_state_at(edge, borders, at_edge, i_n, i_b, i_hv, HV: tl.constexpr):
    """Find the state that passes border i_b, or sequence i_n's edge."""
    if edge is None:
        p_S, i_s = borders, i_b * HV + i_hv
    else:
        p_S = tl.where(at_edge, edge, borders)
        i_s = tl.where(at_edge, i_n, i_b) * HV + i_hv
    return p_S, i_s
