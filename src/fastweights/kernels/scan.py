"""Across chunks in sequence: the state forward in time, its gradient back.

A sequence may be cut into segments that run side by side. Each maps the state
S that enters it to M S + B, so a first pass, which writes nothing a token,
finds B (start from zero) and M (start from the identity, write no values);
``compose.py`` has the cuts, and makes of the maps the states between the
segments; the second pass starts each segment from the state that enters it.
"""

import triton
import triton.language as tl

from fastweights.kernels.compose import cuts, piece_at
from fastweights.kernels.tile import (
    chunks_of,
    decay_matrix,
    decay_to_exit,
    first_slot,
    is_near,
    load_chunk,
    mask_if,
    nonzero,
    slot_row,
    state_at,
    store_rows,
    time_order,
    unchained,
)


@triton.jit
def unit_columns(i_j, BK: tl.constexpr, BV: tl.constexpr):
    """Tile i_j [BK, BV] of the identity's columns; 0 if i_j < 0."""
    o_k, o_j = tl.arange(0, BK)[:, None], i_j * BV + tl.arange(0, BV)[None, :]
    return tl.where(o_k == o_j, 1.0, 0.0)


@triton.jit
def total_decay(
    total, i_ch, K: tl.constexpr, BK: tl.constexpr, DG: tl.constexpr
):
    """e^{G_C} of a chunk and head: a number, or [BK, 1], one per channel."""
    if DG == 1:
        return tl.load(total + i_ch)
    else:
        o_k = tl.arange(0, BK)
        p_total = total + i_ch * K + o_k
        return tl.load(p_total, mask=o_k < K, other=0.0)[:, None]


@triton.jit(do_not_specialize=["T", "N", "NS", "NR"])
def scan_fwd_kernel(
    q_in,
    k_in,
    k_out,
    row_in,
    row_beta,
    total,
    G,
    v,
    Aqk,
    R,
    o,
    initial_state,
    state,
    h,
    errors,
    exits,
    maps,
    cu_seqlens,
    scale,
    T,
    N,
    NS,
    NR,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DG: tl.constexpr,
    DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """One value tile of one head of one segment, its state in registers.

    q_in, k_in, k_out [T, H, K] are intra's for a gate per channel; else they
    are q, k, k, and the decays of a gate per head act on the rows of what
    these multiply. The delta rule writes beta times its errors, what the
    values are more than what the keys find: (I + Akk Diag(beta))^{-1} r,
    where r is that for the state S at the chunk's entrance. With o the
    outputs and the final state; with h, for the backward, the state that
    enters each chunk, and the errors. With neither, of a range instead of a
    segment, the maps of its pieces: B to exits [piece, sequence, HV, K, V],
    and M to maps: K x K for the delta rule, whose tiles are programs of their
    own, and the decay of K channels for a gate and the additive rule. The
    first range knows its state, which it leaves in exits, and starts M where
    the first segment ends. Otherwise exits is the state that leaves each
    piece, composed.
    """
    MAP: tl.constexpr = o is None and h is None
    WIDE: tl.constexpr = BK * BV > 128 * 64  # 8 warps
    NV: tl.constexpr = (V + BV - 1) // BV
    NM: tl.constexpr = (K + BV - 1) // BV if MAP and DELTA else 0
    i_v, i_x = tl.program_id(0) % (NV + NM), tl.program_id(0) // (NV + NM)
    i_hv, i_x = i_x % HV, i_x // HV
    i_n, i_s = i_x % N, i_x // N
    i_h = i_hv // (HV // H)
    i_nh = i_n * HV + i_hv
    start, end, NT, size, span = cuts(i_n, NS, NR, cu_seqlens, T, BT)
    length = span if MAP else size
    if MAP:  # not of the last segment
        NT = tl.minimum((NS - 1) * size, NT)
    first = tl.minimum(i_s * length, NT)
    last = tl.minimum(first + length, NT)

    o_S, m_S = state_at(i_nh, i_v, K, V, BK, BV)
    o_k = tl.arange(0, BK)[:, None]
    if initial_state is None:
        b_S = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        m_first = mask_if(first == 0, m_S)
        b_S = tl.load(initial_state + o_S, mask=m_first, other=0.0)
    if MAP:
        b_decay = tl.full([BK, 1], 1.0, dtype=tl.float32)
        if DELTA:  # of M: its unit vectors, and no values
            known = (i_s == 0) & (i_v < NV)
            if i_v >= NV:
                first = tl.maximum(first, tl.minimum(size, last))
                b_S += unit_columns(i_v - NV, BK, BV)
    elif exits is not None:
        i_p = piece_at(tl.maximum(first - 1, 0), size, span)
        o_S, m_S = state_at(i_p * N * HV + i_nh, i_v, K, V, BK, BV)
        b_S += tl.load(exits + o_S, mask=mask_if(first > 0, m_S), other=0.0)

    d_v = chunks_of(v, start, end, HV, V, BT, BV, TMA)
    if DG <= 1 or DELTA:
        d_k_in = chunks_of(k_in, start, end, H, K, BT, BK, TMA)
    if DG > 1:
        d_k_out = chunks_of(k_out, start, end, H, K, BT, BK, TMA)
    if DELTA:
        d_R = chunks_of(R, start, end, HV, BT, BT, BT, TMA)
    if o is not None:
        d_q_in = chunks_of(q_in, start, end, H, K, BT, BK, TMA)
        if DG > 1:
            d_Aqk = chunks_of(Aqk, start, end, HV, BT, BT, BT, TMA)
    pieces = 1
    if MAP and DELTA:
        pieces = tl.cdiv(last, size) - first // size
        pieces = tl.where(first < last, pieces, 0)
    for _ in range(pieces):
        stop = last
        if MAP and DELTA:
            stop = tl.minimum((first // size + 1) * size, last)
        for i_t in range(first, stop):
            c = i_t * BT
            t = start + c
            c_v = c
            if MAP:  # programs of M read v past the end: zeros
                c_v = tl.where(i_v < NV, c, (end - start).to(tl.int32))
            i_c = first_slot(i_n, cu_seqlens, T, BT) + i_t
            b_S_in = b_S.to(v.dtype.element_ty)  # [BK, BV]
            b_v = load_chunk(
                d_v, start, c_v, end, i_hv, i_v, HV, V, BT, BV, TMA
            )
            if DG <= 1 or DELTA:
                b_k = load_chunk(
                    d_k_in, start, c, end, i_h, 0, H, K, BT, BK, TMA
                )
            if DG == 1:
                b_in = tl.load(slot_row(row_in, i_c, i_hv, HV, BT))[:, None]
            if DG > 0:
                b_total = total_decay(total, i_c * HV + i_hv, K, BK, DG)
            if DG == 1:
                b_out = decay_to_exit(b_in, b_total, G, i_c, i_hv, HV, BT)

            if o is not None and DG <= 1:
                # Before the errors, to free S_in's room.
                b_q = load_chunk(
                    d_q_in, start, c, end, i_h, 0, H, K, BT, BK, TMA
                )
                b_o = tl.dot(b_q, b_S_in, input_precision=PRECISION)

            b_e = b_v  # [BT, BV]
            if DELTA:
                p_beta = slot_row(row_beta, i_c, i_hv, HV, BT)
                b_beta = tl.load(p_beta)[:, None]
                b_R = load_chunk(
                    d_R, start, c, end, i_hv, 0, HV, BT, BT, BT, TMA
                )
                b_e = tl.dot(b_k, b_S_in, input_precision=PRECISION)
                b_e = unchained(b_e, WIDE)
            if h is not None:  # while that product runs
                o_h, m_h = state_at(i_c * HV + i_hv, i_v, K, V, BK, BV)
                tl.store(h + o_h, b_S_in, mask=m_h)
            if DELTA:
                if DG == 1:
                    b_e *= b_in
                b_e = b_v - b_e
                b_r = (b_beta * b_e).to(b_v.dtype)  # [BT, BV]
                b_e = tl.dot(b_R, b_r, b_e, input_precision=PRECISION)
                b_e = unchained(b_e, WIDE)
                if errors is not None:
                    store_rows(errors, b_e, t, end, i_hv, i_v, HV, V, BT, BV)
                b_e *= b_beta

            if DG > 0:
                b_S *= b_total
                if MAP and not DELTA:
                    b_decay *= b_total
            b_x = b_e
            if DG == 1:
                b_x *= b_out
            b_x = b_x.to(b_v.dtype)  # [BT, BV], as it arrives at the exit
            if DG > 1:
                b_k = load_chunk(
                    d_k_out, start, c, end, i_h, 0, H, K, BT, BK, TMA
                )
            b_kT = tl.trans(b_k)  # [BK, BT]
            b_S = tl.dot(b_kT, b_x, b_S, input_precision=PRECISION)  # [BK, BV]

            if o is not None:
                if DG <= 1:
                    b_A = tl.dot(b_q, b_kT, input_precision=PRECISION)
                    b_A = unchained(b_A, WIDE)
                else:
                    b_A = load_chunk(
                        d_Aqk, start, c, end, i_hv, 0, HV, BT, BT, BT, TMA
                    )
                    b_q = load_chunk(
                        d_q_in, start, c, end, i_h, 0, H, K, BT, BK, TMA
                    )
                    b_o = tl.dot(b_q, b_S_in, input_precision=PRECISION)
                b_read = scale
                if DG == 1:
                    # From the exit back to the token that reads.
                    near = is_near(b_total, v, DG)
                    b_o *= tl.where(near, b_total, b_in)
                    b_read = scale * tl.where(near, b_in / b_total, 1.0)
                    if near == 0:
                        b_A *= decay_matrix(G, i_c, i_hv, HV, BT)
                        b_x = b_e.to(b_v.dtype)
                if DG <= 1:
                    b_A = tl.where(time_order(BT) >= 0, b_A, 0.0).to(b_v.dtype)
                b_o = unchained(b_o, WIDE)
                b_o = b_read * tl.dot(b_A, b_x, b_o, input_precision=PRECISION)
                store_rows(o, b_o, t, end, i_hv, i_v, HV, V, BT, BV)
        if MAP and DELTA:
            i_p, i_j = piece_at(first, size, span), i_v - NV
            if i_j < 0:
                row = (i_p * N * HV + i_nh).to(tl.int64) * K
                store_rows(exits, b_S, row, row + K, 0, i_v, 1, V, BK, BV)
            else:  # the first piece's map is not needed
                row = ((i_p - 1) * N * HV + i_nh).to(tl.int64) * K
                store_rows(maps, b_S, row, row + K, 0, i_j, 1, K, BK, BV)
            if known == 0:
                b_S = unit_columns(i_j, BK, BV)
            first = stop

    if state is not None:
        o_S, m_S = state_at(i_nh, i_v, K, V, BK, BV)
        tl.store(state + o_S, b_S, mask=mask_if(i_s == NS - 1, m_S))
    if MAP and not DELTA:
        i_nh += i_s * N * HV
        o_S, m_S = state_at(i_nh, i_v, K, V, BK, BV)
        tl.store(exits + o_S, b_S, mask=m_S)
        if DG > 0:
            i_nh -= N * HV  # the first segment's map is not needed
            m_k = mask_if((i_v == 0) & (i_s > 0), o_k < K)
            tl.store(maps + i_nh.to(tl.int64) * K + o_k, b_decay, mask=m_k)


@triton.jit(do_not_specialize=["T", "N", "NS", "NR"])
def scan_bwd_kernel(
    q_in,
    k_in,
    k_out,
    row_in,
    row_beta,
    total,
    G,
    Aqk,
    R,
    errors,
    do,
    dstate,
    dv,
    dbeta,
    dh,
    dinitial_state,
    entrances,
    cu_seqlens,
    scale,
    T,
    N,
    NS,
    NR,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DG: tl.constexpr,
    DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """From the last chunk to the first, the state's gradient in registers.

    dv; dh, the gradient of the state that leaves each chunk; and that of the
    initial state. With y the gradient of what the delta rule writes, beta
    times the errors, dv is beta y, and dbeta the sum over values of errors y.
    intra_bwd divides it out of dv, which therefore has nonzero(beta); in fp16
    dv would lose too much, and every value tile writes its part here. With w
    what y would be without the later tokens' errors, y = (I + R^T Diag(beta))
    w. If dh is None, only what the segment adds to the gradient of the state
    that enters it, to entrances [segment - 1, sequence, HV, K, V], of all
    segments but the first; otherwise entrances is that gradient, composed.
    """
    MAP: tl.constexpr = dh is None
    WIDE: tl.constexpr = BK * BV > 128 * 64  # 8 warps
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_x = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_hv, i_x = i_x % HV, i_x // HV
    i_n, i_s = i_x % N, i_x // N
    if MAP:
        i_s += 1
    i_h = i_hv // (HV // H)
    i_nh = i_n * HV + i_hv
    start, end, NT, size, _ = cuts(i_n, NS, NR, cu_seqlens, T, BT)
    first = tl.minimum(i_s * size, NT)
    last = tl.minimum(first + size, NT)

    o_S, m_S = state_at(i_nh, i_v, K, V, BK, BV)
    if dstate is None:
        b_dS = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        b_dS = tl.load(dstate + o_S, mask=mask_if(last == NT, m_S), other=0.0)
    if entrances is not None and not MAP:
        o_S, m_S = state_at(i_s * N * HV + i_nh, i_v, K, V, BK, BV)
        m_inner = mask_if(last < NT, m_S)
        b_dS += tl.load(entrances + o_S, mask=m_inner, other=0.0)

    d_k_out = chunks_of(k_out, start, end, H, K, BT, BK, TMA)
    d_q_in = chunks_of(q_in, start, end, H, K, BT, BK, TMA)
    d_do = chunks_of(do, start, end, HV, V, BT, BV, TMA)
    if DG > 1:
        d_Aqk = chunks_of(Aqk, start, end, HV, BT, BT, BT, TMA)
        if DELTA:
            d_k_in = chunks_of(k_in, start, end, H, K, BT, BK, TMA)
    if DELTA:
        d_R = chunks_of(R, start, end, HV, BT, BT, BT, TMA)
    if errors is not None:
        d_errors = chunks_of(errors, start, end, HV, V, BT, BV, TMA)
    for i in range(last - first):
        i_t = last - 1 - i
        c = i_t * BT
        t = start + c
        i_c = first_slot(i_n, cu_seqlens, T, BT) + i_t
        b_dS_out = b_dS.to(do.dtype.element_ty)  # [BK, BV]
        if dh is not None:
            o_h, m_h = state_at(i_c * HV + i_hv, i_v, K, V, BK, BV)
            tl.store(dh + o_h, b_dS_out, mask=m_h)

        b_k = load_chunk(d_k_out, start, c, end, i_h, 0, H, K, BT, BK, TMA)
        b_q = load_chunk(d_q_in, start, c, end, i_h, 0, H, K, BT, BK, TMA)
        b_do = load_chunk(d_do, start, c, end, i_hv, i_v, HV, V, BT, BV, TMA)
        if errors is not None:
            b_e = load_chunk(
                d_errors, start, c, end, i_hv, i_v, HV, V, BT, BV, TMA
            )
        b_do = scale * b_do.to(tl.float32)
        if DG == 1:
            b_in = tl.load(slot_row(row_in, i_c, i_hv, HV, BT))[:, None]
        if DG > 0:
            b_total = total_decay(total, i_c * HV + i_hv, K, BK, DG)
        if DG == 1:
            b_out = decay_to_exit(b_in, b_total, G, i_c, i_hv, HV, BT)

        b_x = b_do
        if DG == 1:
            b_x *= b_in
        b_x = b_x.to(do.dtype.element_ty)  # [BT, BV], as at the entrance
        b_y = tl.dot(b_k, b_dS_out, input_precision=PRECISION)  # [BT, BV]
        b_y = unchained(b_y, WIDE)
        if DG <= 1:
            b_A = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
            b_A = unchained(b_A, WIDE)
        else:
            b_A = load_chunk(
                d_Aqk, start, c, end, i_hv, 0, HV, BT, BT, BT, TMA
            )
            b_A = tl.trans(b_A)  # [BT, BT]
        b_read = b_x
        if DG == 1:
            # From the entrance on to the token that writes.
            near = is_near(b_total, do, DG)
            b_y *= tl.where(near, b_total, b_out)
            if near == 0:
                b_A *= decay_matrix(G, i_c, i_hv, HV, BT, TRANSPOSED=True)
                b_read = b_do.to(do.dtype.element_ty)
        if DG <= 1:
            b_A = tl.where(time_order(BT) <= 0, b_A, 0.0).to(b_x.dtype)
        b_y = tl.dot(b_A, b_read, b_y, input_precision=PRECISION)  # [BT, BV]
        b_y = unchained(b_y, WIDE)
        if DG == 1:
            b_y *= tl.where(near, 1.0 / b_in, 1.0)
        if DELTA:
            b_beta = tl.load(slot_row(row_beta, i_c, i_hv, HV, BT))[:, None]
            b_R = load_chunk(d_R, start, c, end, i_hv, 0, HV, BT, BT, BT, TMA)
            b_w = (b_beta * b_y).to(b_x.dtype)  # [BT, BV]
            b_y = tl.dot(tl.trans(b_R), b_w, b_y, input_precision=PRECISION)
            b_y = unchained(b_y, WIDE)
            if errors is not None:
                b_dbeta = tl.sum(b_e * b_y, axis=1)[:, None]  # [BT, 1]
                store_rows(dbeta, b_dbeta, t, end, i_hv, i_v, HV, NV, BT, 1)
            b_y *= nonzero(b_beta)
        if dv is not None:
            store_rows(dv, b_y, t, end, i_hv, i_v, HV, V, BT, BV)

        if DG > 0:
            b_dS *= b_total
        b_qT = tl.trans(b_q)  # [BK, BT]
        b_dS = tl.dot(b_qT, b_x, b_dS, input_precision=PRECISION)
        if DELTA:
            b_y = -b_y
            if DG == 1:
                b_y *= b_in
            if DG > 1:
                b_k = load_chunk(
                    d_k_in, start, c, end, i_h, 0, H, K, BT, BK, TMA
                )  # [BT, BK]
            b_kT = tl.trans(b_k)  # [BK, BT]
            b_y = b_y.to(b_x.dtype)
            b_dS = tl.dot(b_kT, b_y, b_dS, input_precision=PRECISION)

    if MAP:
        o_S, m_S = state_at((i_s - 1) * N * HV + i_nh, i_v, K, V, BK, BV)
        tl.store(entrances + o_S, b_dS, mask=m_S)
    elif dinitial_state is not None:
        o_S, m_S = state_at(i_nh, i_v, K, V, BK, BV)
        tl.store(dinitial_state + o_S, b_dS, mask=mask_if(i_s == 0, m_S))
