"""Across chunks in sequence: the state forward in time, its gradient back.

A sequence may be cut into segments that run side by side. Each maps the state
S that enters it to M S + B, so a first pass, which writes nothing per token,
finds B (start from zero) and M (start from the identity, write no values);
``compose.py`` makes of the maps the states between the segments; the second
pass starts each segment from the state that enters it. Where gates forget, B
depends on a segment's last chunks only, and M is nothing.
"""

from collections import namedtuple

import triton
import triton.language as tl

from fastweights.kernels import tile
from fastweights.kernels.recurrence import gates
from fastweights.kernels.recurrence.segments import (
    border_of,
    border_state_at,
    chunks_in_reach,
    is_whole,
    segment_at,
    segment_before,
)

# Which program it is: of segment or border i_x, and forward whether of M.
Program = namedtuple("Program", "i_x i_hv i_v is_M")
# A program's chunks, from_chunk up to stop_chunk, of a segment that begins
# with first_chunk, in sequence i_n, which has tokens start to end and whose
# first chunk has first_slot. Of a segment that is_composed compose_kernel
# finds the state that leaves it. A MAP's program feeds_compose if
# compose_kernel is given what it finds.
Chunks = namedtuple(
    "Chunks",
    "i_n start end first_slot first_chunk from_chunk stop_chunk is_composed "
    "feeds_compose reaches_all",
)
ChunksBack = namedtuple(
    "ChunksBack",
    "i_n i_nh start end first_slot first_chunk stop_chunk is_composed "
    "feeds_compose from_end",
)


@triton.jit
def unit_columns(i_j, BK: tl.constexpr, BV: tl.constexpr):
    """Tile i_j [BK, BV] of the identity's columns; 0 if i_j < 0."""
    o_k, o_j = tl.arange(0, BK)[:, None], i_j * BV + tl.arange(0, BV)[None, :]
    return tl.where(o_k == o_j, 1.0, 0.0)


@triton.jit
def channel_decays(decays, i_sh, dtype: tl.constexpr, META: tl.constexpr):
    """The parts [BK, 1] of each channel's decay, in slot and head i_sh.

    As gates.split_decay finds them, for products in ``dtype``.
    """
    o_k = tl.arange(0, META.BK)
    p_total = decays.total + i_sh * META.K + o_k
    b_total = tl.load(p_total, mask=o_k < META.K, other=0.0)[:, None]
    return gates.split_decay(b_total, dtype)


@triton.jit
def head_decays(decays, i_sh, dtype: tl.constexpr, META: tl.constexpr):
    """The parts of a head's decay, two numbers; row_in and row_out [BT, 1].

    The last result is whether the decay is factorable: then the chunk is seen
    from half of it.
    """
    b_total = tl.load(decays.total + i_sh)
    b_outer, b_inner = gates.split_decay(b_total, dtype)
    b_row_in = tl.load(tile.slot_row(decays.row_in, i_sh, META.BT))[:, None]
    b_row_out = tl.load(tile.slot_row(decays.row_out, i_sh, META.BT))[:, None]
    return (
        b_outer,
        b_inner,
        b_row_in,
        b_row_out,
        gates.is_factorable(b_total, dtype),
    )


@triton.jit
def chunks_of(
    program,
    initial_state,
    map_bound,
    call,
    MAP: tl.constexpr,
    META: tl.constexpr,
):
    """Find a program's Chunks: its sequence, its tokens, and its chunks.

    They are those of segment i_x, or with MAP of the one before border i_x. A
    whole segment that a state enters is_composed, and its MAP feeds_compose.
    So does a first segment's B, which enters the next. With a gate per head a
    map has only the chunks that matter at the end, unless it reaches_all.
    """
    BT: tl.constexpr = META.BT
    i_x, i_hv, _, is_M = program
    reaches_all = True
    if MAP:
        i_n, start, end, first_chunk = segment_before(i_x, call, META)
    else:
        i_n, start, end, first_chunk = segment_at(i_x, call, BT)
    NT = tl.cdiv(end - start, BT).to(tl.int32)
    stop_chunk = tl.minimum(first_chunk + call.L, NT)
    enters = first_chunk > 0
    if initial_state is not None:
        enters = first_chunk >= 0
    passes_on = enters
    if MAP:
        passes_on |= (stop_chunk < NT) & (is_M == 0)
    whole = is_whole(start, end, first_chunk, call, META)
    is_composed, feeds_compose = enters & whole, passes_on & whole
    if MAP:
        stop_chunk = tl.where(feeds_compose, stop_chunk, first_chunk)
    from_chunk = first_chunk
    first_slot = tile.first_slot(i_n, call.cu_seqlens, call.T, BT)
    if MAP and META.PER_HEAD:
        reach_args = first_slot + first_chunk, i_hv, first_chunk, stop_chunk
        reached = chunks_in_reach(map_bound, *reach_args, False, META)
        reaches_all = reached == stop_chunk - first_chunk
        if is_M & (reaches_all == 0):
            reached = 0
        from_chunk = stop_chunk - reached
    segment = i_n, start, end, first_slot, first_chunk, from_chunk, stop_chunk
    return Chunks(*segment, is_composed, feeds_compose, reaches_all)


@triton.jit
def load_entering_state(
    states, chunks, program, call, MAP: tl.constexpr, META: tl.constexpr
):
    """The state [BK, BV] with which a program's first chunk begins.

    It is the sequence's own, or for a later segment the composed one. A map's
    B begins with zeros and its M with unit vectors, or with zeros where it
    does not reach all of its chunks.
    """
    BK: tl.constexpr = META.BK
    BV: tl.constexpr = META.BV
    _, i_hv, i_v, is_M = program
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if MAP:
        if META.DELTA:
            if is_M:  # and no values
                i_j = tl.where(chunks.reaches_all, i_v - META.NV, -1)  # else 0
                b_S = unit_columns(i_j, BK, BV)
    elif states.initial_state is not None:
        i_nh = chunks.i_n * META.HV + i_hv
        is_first = chunks.first_chunk == 0
        b_S = tile.load_state(states.initial_state, i_nh, i_v, is_first, META)
    if states.border_states is not None and not MAP:
        NT = tl.cdiv(chunks.end - chunks.start, META.BT).to(tl.int32)
        before = chunks.first_chunk - call.L
        i_b = border_of(chunks.i_n, chunks.start, before, call, META)
        has_before = (chunks.first_chunk > 0) & (chunks.first_chunk < NT)
        i_b = tl.where(has_before, i_b, 0) * META.HV + i_hv
        b_S += tile.load_state(
            states.border_states, i_b, i_v, has_before, META
        )
    return b_S


@triton.jit
def store_leaving_state(
    states,
    state,
    b_S,
    b_decay,
    chunks,
    program,
    MAP: tl.constexpr,
    META: tl.constexpr,
):
    """Store the state with which a program's last chunk ends, if asked for.

    With MAP B goes to border_states, or to state at a sequence's end, and M
    or the channels' decay to maps. Without it the final state is stored, if
    it is not composed.
    """
    K: tl.constexpr = META.K
    HV: tl.constexpr = META.HV
    i_x, i_hv, i_v, is_M = program
    NT = tl.cdiv(chunks.end - chunks.start, META.BT).to(tl.int32)
    if MAP:
        i_b = i_x * HV + i_hv
        is_last = chunks.stop_chunk == NT
        p_S, i_s = border_state_at(
            state, states.border_states, is_last, chunks.i_n, i_x, i_hv, HV
        )
        has_state = chunks.feeds_compose & (is_M == 0)
        tile.store_state(p_S, b_S, i_s, i_v, has_state, META)
        if META.DELTA:
            # A program of B stores no rows.
            row = i_b.to(tl.int64) * K
            place = (row, row + tl.where(chunks.feeds_compose & is_M, K, 0), 0)
            MAPS: tl.constexpr = META.map_tiles
            tile.store_rows(states.maps, b_S, place, i_v - META.NV, MAPS)
        elif META.GATED:
            o_k = tl.arange(0, META.BK)[:, None]
            if META.PER_HEAD:
                b_decay = tl.where(chunks.reaches_all, b_decay, 0.0)
            m_k = tile.mask_if(chunks.feeds_compose & (i_v == 0), o_k < K)
            p_decay = states.maps + i_b.to(tl.int64) * K + o_k
            tl.store(p_decay, b_decay, mask=m_k)
    elif state is not None:
        # An empty sequence has one segment, of no chunks.
        is_last = chunks.stop_chunk == NT
        is_last &= (chunks.first_chunk < NT) | (chunks.first_chunk == 0)
        i_nh = chunks.i_n * HV + i_hv
        own = is_last & (chunks.is_composed == 0)
        tile.store_state(state, b_S, i_nh, i_v, own, META)


@triton.jit
def scan_fwd_kernel(
    qk, v, decays, scores, states, outputs, call, META: tl.constexpr
):
    """One value tile of one head of one segment, its state in registers.

    q_in, e_in, k_out [T, HV, K] are those of intra for a gate per channel.
    Else they are q, e, k, where e is k [T, H, K] or erase_key [T, HV, K], and
    the decays of a gate per head act on the rows of what these multiply. The
    delta rule writes beta times its errors u, by which the values exceed what
    e finds in the state: u = (I + Aek Diag(beta))^{-1} r, where r is that for
    the state S at the chunk's entrance. With erase_key beta is 1.

    With o the kernel writes the outputs and the final state; with h, for the
    backward, the state that enters each chunk, and the errors. With neither
    it writes the map of the segment before a border: B to border_states
    [borders, HV, K, V], or to state if the sequence ends there, and M to
    maps. M is K x K for the delta rule, whose tiles are programs of their
    own, and the decay of K channels for a gate and the additive rule. A first
    segment that no state enters needs no M. Where the kernel writes no map,
    border_states is the composed state that passes each border.
    """
    dtype: tl.constexpr = v.dtype.element_ty
    GATED: tl.constexpr = META.GATED
    PER_HEAD: tl.constexpr = META.PER_HEAD
    PER_CHANNEL: tl.constexpr = META.PER_CHANNEL
    DELTA: tl.constexpr = META.DELTA
    HAS_ERASE_KEY: tl.constexpr = META.HAS_ERASE_KEY
    PRECISION: tl.constexpr = META.PRECISION
    KEYS: tl.constexpr = META.key_tiles
    ERASE_KEYS: tl.constexpr = META.erase_key_tiles
    VALUES: tl.constexpr = META.value_tiles
    SCORES: tl.constexpr = META.score_tiles
    HV: tl.constexpr = META.HV
    BT: tl.constexpr = META.BT
    BK: tl.constexpr = META.BK
    BV: tl.constexpr = META.BV
    NV: tl.constexpr = META.NV
    WRITES_O: tl.constexpr = outputs.o is not None
    KEEPS: tl.constexpr = outputs.h is not None
    MAP: tl.constexpr = not WRITES_O and not KEEPS
    BY_COLUMNS: tl.constexpr = BK * BV > 128 * 64  # 8 warps
    NM: tl.constexpr = META.NM if MAP and DELTA else 0
    i_v, i_x = tl.program_id(0) % (NV + NM), tl.program_id(0) // (NV + NM)
    i_hv, i_x = i_x % HV, i_x // HV
    i_qk = i_hv // (HV // META.QK_HEADS)
    i_erase = i_hv if HAS_ERASE_KEY else i_qk
    is_M = i_v >= NV  # a program of M
    program = Program(i_x, i_hv, i_v, is_M)
    chunks = chunks_of(
        program, states.initial_state, decays.map_bound, call, MAP, META
    )
    b_S = load_entering_state(states, chunks, program, call, MAP, META)
    b_decay = tl.full([BK, 1], 1.0, dtype=tl.float32)  # of a map's channels

    span = (chunks.start, chunks.end)
    t_v = tile.sequence_tiles(v, span, VALUES)
    if not PER_CHANNEL or DELTA:
        t_e_in = tile.sequence_tiles(qk.e_in, span, ERASE_KEYS)
    if PER_CHANNEL or HAS_ERASE_KEY:
        t_k_out = tile.sequence_tiles(qk.k_out, span, KEYS)
    if DELTA:
        t_R = tile.sequence_tiles(scores.R, span, SCORES)
    if WRITES_O:
        t_q_in = tile.sequence_tiles(qk.q_in, span, KEYS)
        if PER_CHANNEL:
            t_Aqk = tile.sequence_tiles(scores.Aqk, span, SCORES)
    # What a stage runs for each chunk, beside the errors (DELTA) and S':
    #   scan, WRITES_O: q S (before the errors, but for PER_CHANNEL) and o
    #   chunk_states, KEEPS: S goes to h (first of all for PER_CHANNEL), and
    #     the errors to u
    #   segment_maps, MAP: DELTA has programs of M beside those of B, in which
    #     v is 0; else M is b_decay, where there is a gate
    for i_t in range(chunks.from_chunk, chunks.stop_chunk):
        c = i_t * BT
        place = (chunks.start + c, chunks.end, i_hv)
        c_v = c
        if MAP:  # programs of M read v past the end: zeros
            c_v = tl.where(is_M, (chunks.end - chunks.start).to(tl.int32), c)
        i_sh = (chunks.first_slot + i_t) * HV + i_hv
        if PER_CHANNEL:
            if KEEPS:
                b_S_in = b_S.to(dtype)
                tile.store_state(outputs.h, b_S_in, i_sh, i_v, True, META)
            b_outer, b_inner = channel_decays(decays, i_sh, dtype, META)
            b_S *= b_outer  # to where half of each channel has decayed
        elif PER_HEAD and DELTA:
            b_outer, b_inner, b_row_in, b_row_out, factorable = head_decays(
                decays, i_sh, dtype, META
            )
        if WRITES_O and PER_HEAD and not DELTA:
            b_G = tl.load(tile.slot_row(decays.G, i_sh, BT))  # [BT]
        b_S_in = b_S.to(dtype)  # [BK, BV]
        b_v = tile.load_chunk(t_v, span, c_v, i_hv, i_v, VALUES)
        if not PER_CHANNEL or DELTA:
            b_e = tile.load_chunk(t_e_in, span, c, i_erase, 0, ERASE_KEYS)

        if WRITES_O and not PER_CHANNEL:
            # Before the errors, to free S_in's room.
            b_q = tile.load_chunk(t_q_in, span, c, i_qk, 0, KEYS)
            b_o = tl.dot(b_q, b_S_in, input_precision=PRECISION)  # q S

        if PER_HEAD and not DELTA:  # here its rows cost no registers
            b_outer, b_inner, b_row_in, b_row_out, factorable = head_decays(
                decays, i_sh, dtype, META
            )
        b_v_new = b_v  # [BT, BV]
        if decays.row_beta is not None:
            b_beta = tl.load(tile.slot_row(decays.row_beta, i_sh, BT))[:, None]
        if DELTA:
            b_R = tile.load_chunk(t_R, span, c, i_hv, 0, SCORES)
            b_eS = tile.dot(b_e, b_S_in, None, PRECISION, BY_COLUMNS)
        if KEEPS and not PER_CHANNEL:  # while that product runs
            tile.store_state(outputs.h, b_S_in, i_sh, i_v, True, META)
        if DELTA:
            if PER_HEAD:
                b_eS *= b_outer * b_row_in
            b_r = b_v - b_eS  # [BT, BV]
            b_step = (b_r if HAS_ERASE_KEY else b_beta * b_r).to(dtype)
            b_u = tile.dot(
                b_R, b_step, b_r, PRECISION, BY_COLUMNS
            )  # r + R beta r
            if KEEPS:
                tile.store_rows(outputs.u, b_u, place, i_v, VALUES)
            b_v_new = b_u if HAS_ERASE_KEY else b_u * b_beta

        if PER_HEAD:
            b_S *= b_outer * b_inner
        elif PER_CHANNEL:
            b_S *= b_inner
        if GATED and MAP and not DELTA:
            b_decay *= b_outer * b_inner * b_outer
        b_v_out = b_v_new
        if PER_HEAD:
            b_v_out *= b_row_out
        b_v_out = b_v_out.to(dtype)  # [BT, BV], from where the chunk is seen
        b_v_A = b_v_out  # what Aqk multiplies
        if PER_CHANNEL or HAS_ERASE_KEY:
            b_k = tile.load_chunk(t_k_out, span, c, i_qk, 0, KEYS)
        else:
            b_k = b_e
        b_kT = tl.trans(b_k)  # [BK, BT]
        # S' = decay S + k^T v_new [BK, BV]
        b_S = tl.dot(b_kT, b_v_out, b_S, input_precision=PRECISION)

        if WRITES_O:
            if not PER_CHANNEL:
                b_A = tile.dot(b_q, b_kT, None, PRECISION, BY_COLUMNS)
            else:
                b_A = tile.load_chunk(t_Aqk, span, c, i_hv, 0, SCORES)
                b_q = tile.load_chunk(t_q_in, span, c, i_qk, 0, KEYS)
                b_o = tl.dot(b_q, b_S_in, input_precision=PRECISION)  # q S
            b_scale = call.scale
            if PER_HEAD:
                b_o *= tl.where(factorable, b_outer, b_row_in)
                b_scale = call.scale * tl.where(factorable, b_row_in, 1.0)
                if factorable == 0:
                    if DELTA:  # no registers are left to load it ahead
                        b_G = tl.load(tile.slot_row(decays.G, i_sh, BT))
                    b_A *= gates.decay_matrix(b_G)
                    b_v_A = b_v_new.to(dtype)
            if not PER_CHANNEL:
                b_A = tl.where(tile.token_lag(BT) >= 0, b_A, 0.0)
                b_A = b_A.to(dtype)
            b_o = tile.by_columns(b_o, BY_COLUMNS)
            # o = scale (q S + Aqk v_new) [BT, BV]
            b_o = b_scale * tl.dot(b_A, b_v_A, b_o, input_precision=PRECISION)
            tile.store_rows(outputs.o, b_o, place, i_v, VALUES)
        if GATED:  # from where the chunk is seen to its exit
            b_S *= b_outer

    store_leaving_state(
        states, outputs.state, b_S, b_decay, chunks, program, MAP, META
    )


@triton.jit
def chunks_back_of(
    program,
    dinitial_state,
    map_bound,
    call,
    MAP: tl.constexpr,
    META: tl.constexpr,
):
    """Find a program's ChunksBack: as :func:`chunks_of`, from the last on.

    A program from_end begins with the final state's gradient. With MAP border
    i_x // 2 has two programs: the segment before it, and the rest after it.
    """
    BT: tl.constexpr = META.BT
    i_x, i_hv, _, _ = program
    if MAP:
        i_n, start, end, first_chunk = segment_before(i_x // 2, call, META)
        feeds_compose = is_whole(start, end, first_chunk, call, META)
        is_rest = i_x % 2 == 1
        if META.RANKS:
            feeds_compose |= is_rest & (first_chunk < 0)
        first_chunk = tl.where(is_rest, first_chunk + call.L, first_chunk)
    else:
        i_n, start, end, first_chunk = segment_at(i_x, call, BT)
        feeds_compose = False
    NT = tl.cdiv(end - start, BT).to(tl.int32)
    stop_chunk = tl.minimum(first_chunk + call.L, NT)
    i_nh = i_n * META.HV + i_hv
    first_slot = tile.first_slot(i_n, call.cu_seqlens, call.T, BT)
    from_end = (stop_chunk == NT) & ((first_chunk < NT) | (first_chunk == 0))
    is_composed = is_whole(start, end, first_chunk, call, META)
    if MAP:
        from_end &= is_composed == 0
        feeds_compose &= from_end == is_rest
        if dinitial_state is None:
            feeds_compose &= first_chunk > 0
        stop_chunk = tl.where(feeds_compose, stop_chunk, first_chunk)
    if MAP and META.PER_HEAD:
        reach_args = first_slot + first_chunk, i_hv, first_chunk, stop_chunk
        reached = chunks_in_reach(map_bound, *reach_args, True, META)
        from_end &= reached == stop_chunk - first_chunk
        stop_chunk = first_chunk + reached
    segment = i_n, i_nh, start, end, first_slot, first_chunk, stop_chunk
    return ChunksBack(*segment, is_composed, feeds_compose, from_end)


@triton.jit
def load_entering_grad(
    dstate, grads, chunks, program, call, MAP: tl.constexpr, META: tl.constexpr
):
    """The gradient [BK, BV] with which a program's last chunk begins."""
    BK: tl.constexpr = META.BK
    BV: tl.constexpr = META.BV
    _, i_hv, i_v, _ = program
    if dstate is None:
        b_dS = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        b_dS = tile.load_state(dstate, chunks.i_nh, i_v, chunks.from_end, META)
    if grads.border_grads is not None and not MAP:
        NT = tl.cdiv(chunks.end - chunks.start, META.BT).to(tl.int32)
        i_b = border_of(
            chunks.i_n, chunks.start, chunks.first_chunk, call, META
        )
        has_after = chunks.stop_chunk < NT
        i_b = tl.where(has_after, i_b, 0) * META.HV + i_hv
        b_dS += tile.load_state(grads.border_grads, i_b, i_v, has_after, META)
    return b_dS


@triton.jit
def store_leaving_grad(
    grads, b_dS, chunks, program, call, MAP: tl.constexpr, META: tl.constexpr
):
    """Store the gradient with which a program's first chunk ends, if asked."""
    HV: tl.constexpr = META.HV
    _, i_hv, i_v, _ = program
    i_n, dfirst, is_first = (
        chunks.i_n,
        grads.dinitial_state,
        chunks.first_chunk == 0,
    )
    if MAP:
        before = chunks.first_chunk - call.L
        i_b = border_of(i_n, chunks.start, before, call, META)
        p_dS, i_s = border_state_at(
            dfirst, grads.border_grads, is_first, i_n, i_b, i_hv, HV
        )
        tile.store_state(p_dS, b_dS, i_s, i_v, chunks.feeds_compose, META)
    elif dfirst is not None:
        own = is_first & (chunks.is_composed == 0)
        tile.store_state(dfirst, b_dS, chunks.i_nh, i_v, own, META)


@triton.jit
def scan_bwd_kernel(
    qk, decays, scores, u, output_grads, grads, call, META: tl.constexpr
):
    """Carry the state's gradient from the last chunk to the first.

    It finds dv; dh, the gradient of the state that leaves each chunk; and
    that of the initial state. With y the gradient of what the delta rule
    writes, beta times the errors u, dv is beta y, and dbeta the sum over
    values of u y. intra_bwd_kernel divides dbeta out of dv, in which beta is
    therefore kept away_from_zero. In fp16 dv would lose too much, and every
    value tile writes its part of dbeta here. With w what y would be without
    the later tokens' errors, y = (I + R^T Diag(beta)) w.

    Without dh it finds only what a segment adds to the gradient of the state
    that enters it, and each border has two programs: the segment before it,
    and the rest that may come after it. Their results go to border_grads
    [borders, HV, K, V], or for a sequence's first segment to dinitial_state.
    With dh border_grads has the composed gradients.
    """
    dtype: tl.constexpr = output_grads.do.dtype.element_ty
    GATED: tl.constexpr = META.GATED
    PER_HEAD: tl.constexpr = META.PER_HEAD
    PER_CHANNEL: tl.constexpr = META.PER_CHANNEL
    DELTA: tl.constexpr = META.DELTA
    HAS_ERASE_KEY: tl.constexpr = META.HAS_ERASE_KEY
    PRECISION: tl.constexpr = META.PRECISION
    KEYS: tl.constexpr = META.key_tiles
    ERASE_KEYS: tl.constexpr = META.erase_key_tiles
    VALUES: tl.constexpr = META.value_tiles
    SCORES: tl.constexpr = META.score_tiles
    HV: tl.constexpr = META.HV
    BT: tl.constexpr = META.BT
    BK: tl.constexpr = META.BK
    BV: tl.constexpr = META.BV
    PARTS: tl.constexpr = META.part_tiles
    NV: tl.constexpr = META.NV
    MAP: tl.constexpr = grads.dh is None
    SUMS_DBETA: tl.constexpr = u is not None
    BY_COLUMNS: tl.constexpr = BK * BV > 128 * 64  # 8 warps
    i_v, i_x = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_hv, i_x = i_x % HV, i_x // HV
    i_qk = i_hv // (HV // META.QK_HEADS)
    i_erase = i_hv if HAS_ERASE_KEY else i_qk
    program = Program(i_x, i_hv, i_v, None)
    chunks = chunks_back_of(
        program, grads.dinitial_state, decays.map_bound, call, MAP, META
    )
    b_dS = load_entering_grad(
        output_grads.dstate, grads, chunks, program, call, MAP, META
    )

    span = (chunks.start, chunks.end)
    t_k_out = tile.sequence_tiles(qk.k_out, span, KEYS)
    t_q_in = tile.sequence_tiles(qk.q_in, span, KEYS)
    t_do = tile.sequence_tiles(output_grads.do, span, VALUES)
    if PER_CHANNEL:
        t_Aqk = tile.sequence_tiles(scores.Aqk, span, SCORES)
    if DELTA and (PER_CHANNEL or HAS_ERASE_KEY):
        t_e_in = tile.sequence_tiles(qk.e_in, span, ERASE_KEYS)
    if DELTA:
        t_R = tile.sequence_tiles(scores.R, span, SCORES)
    if SUMS_DBETA:
        t_u = tile.sequence_tiles(u, span, VALUES)
    for i in range(chunks.stop_chunk - chunks.first_chunk):
        i_t = chunks.stop_chunk - 1 - i
        c = i_t * BT
        place = (chunks.start + c, chunks.end, i_hv)
        i_sh = (chunks.first_slot + i_t) * HV + i_hv
        b_dS_out = b_dS.to(dtype)  # [BK, BV]
        if not MAP:
            tile.store_state(grads.dh, b_dS_out, i_sh, i_v, True, META)
        if PER_CHANNEL:  # back to where half of each channel has decayed
            b_outer, b_inner = channel_decays(decays, i_sh, dtype, META)
            b_dS *= b_outer
            b_dS_out = b_dS.to(dtype)
        elif PER_HEAD:
            b_outer, b_inner, b_row_in, b_row_out, factorable = head_decays(
                decays, i_sh, dtype, META
            )

        if PER_HEAD:
            b_G = tl.load(tile.slot_row(decays.G, i_sh, BT))  # [BT]
        b_k = tile.load_chunk(t_k_out, span, c, i_qk, 0, KEYS)
        b_q = tile.load_chunk(t_q_in, span, c, i_qk, 0, KEYS)
        b_do = tile.load_chunk(t_do, span, c, i_hv, i_v, VALUES)
        if SUMS_DBETA:
            b_u = tile.load_chunk(t_u, span, c, i_hv, i_v, VALUES)
        b_do = call.scale * b_do.to(tl.float32)

        b_do_in = b_do
        if PER_HEAD:
            b_do_in *= b_row_in
        b_do_in = b_do_in.to(dtype)  # [BT, BV]
        b_w = tile.dot(b_k, b_dS_out, None, PRECISION, BY_COLUMNS)  # [BT, BV]
        if not PER_CHANNEL:
            b_A = tile.dot(b_k, tl.trans(b_q), None, PRECISION, BY_COLUMNS)
        else:
            b_A = tile.load_chunk(t_Aqk, span, c, i_hv, 0, SCORES)
            b_A = tl.trans(b_A)  # [BT, BT]
        b_do_A = b_do_in
        if PER_HEAD:
            b_w *= tl.where(factorable, b_outer, b_row_out)
            if factorable == 0:
                b_A *= gates.decay_matrix(b_G, TRANSPOSED=True)
                b_do_A = b_do.to(dtype)
        if not PER_CHANNEL:
            b_A = tl.where(tile.token_lag(BT) <= 0, b_A, 0.0)
            b_A = b_A.to(dtype)
        b_w = tile.dot(b_A, b_do_A, b_w, PRECISION, BY_COLUMNS)  # [BT, BV]
        if PER_HEAD:
            b_w *= tl.where(factorable, b_row_out, 1.0)
        b_dv = b_w  # [BT, BV]
        if decays.row_beta is not None:
            b_beta = tl.load(tile.slot_row(decays.row_beta, i_sh, BT))[:, None]
        if DELTA:
            b_R = tile.load_chunk(t_R, span, c, i_hv, 0, SCORES)
            b_step = (b_w if HAS_ERASE_KEY else b_beta * b_w).to(dtype)
            b_y = tile.dot(tl.trans(b_R), b_step, b_w, PRECISION, BY_COLUMNS)
            if SUMS_DBETA:
                b_dbeta = tl.sum(b_u * b_y, axis=1)[:, None]  # [BT, 1]
                tile.store_rows(grads.dbeta, b_dbeta, place, i_v, PARTS)
            b_dv = b_y if HAS_ERASE_KEY else b_y * tile.away_from_zero(b_beta)
        if not MAP:
            tile.store_rows(grads.dv, b_dv, place, i_v, VALUES)

        if PER_HEAD:
            b_dS *= b_outer * b_inner
        elif PER_CHANNEL:
            b_dS *= b_inner
        b_qT = tl.trans(b_q)  # [BK, BT]
        b_dS = tl.dot(b_qT, b_do_in, b_dS, input_precision=PRECISION)
        if DELTA:
            b_deS = -b_dv
            if PER_HEAD:
                b_deS *= b_row_in
            b_e = b_k
            if PER_CHANNEL or HAS_ERASE_KEY:
                b_e = tile.load_chunk(t_e_in, span, c, i_erase, 0, ERASE_KEYS)
            b_eT = tl.trans(b_e)  # [BK, BT]
            b_deS = b_deS.to(dtype)
            b_dS = tl.dot(b_eT, b_deS, b_dS, input_precision=PRECISION)
        if GATED:
            b_dS *= b_outer

    store_leaving_grad(grads, b_dS, chunks, program, call, MAP, META)
