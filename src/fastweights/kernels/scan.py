"""Across chunks in sequence: the state forward in time, its gradient back."""

import triton
import triton.language as tl

from fastweights.kernels.tile import (
    causal,
    gates_at,
    load_row,
    load_rows,
    sequence_at,
    state_at,
    store_rows,
)


@triton.jit(do_not_specialize=["T"])
def scan_fwd_kernel(
    q_in,
    k_in,
    k_out,
    v,
    g,
    beta,
    Aqk,
    P,
    total,
    o,
    initial_state,
    state,
    h,
    v_new,
    cu_seqlens,
    scale,
    T,
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
):
    """One value tile of one head of one sequence, its state in registers.

    q_in, k_in, k_out [T, H, K] are intra's for a gate a channel; else they
    are q, k, k, and the decays of a gate a head act on the rows of what
    these multiply. With o the outputs and the final state; without, for the
    backward, h and v_new: the state that enters each chunk, and what the
    delta rule writes.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_nh, i_v = tl.program_id(0) // NV, tl.program_id(0) % NV
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    start = sequence_at(i_n, cu_seqlens, T)
    end = sequence_at(i_n + 1, cu_seqlens, T)

    o_S, m_S = state_at(i_nh, i_v, K, V, BK, BV)
    if initial_state is None:
        b_S = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        b_S = tl.load(initial_state + o_S, mask=m_S, other=0.0)  # [BK, BV]

    for i_t in range(tl.cdiv(end - start, BT).to(tl.int32)):
        t = start + i_t * BT
        i_c = start // BT + i_n + i_t
        b_S_in = b_S.to(v.dtype.element_ty)  # [BK, BV]
        if h is not None:
            o_h, m_h = state_at(i_c * HV + i_hv, i_v, K, V, BK, BV)
            tl.store(h + o_h, b_S_in, mask=m_h)

        b_v = load_rows(v, t, end, i_hv, i_v, HV, V, BT, BV)  # [BT, BV]
        if DG <= 1 or DELTA:
            b_k = load_rows(k_in, t, end, i_h, 0, H, K, BT, BK)  # [BT, BK]
        if DG == 1:
            b_G, b_in, b_out, b_total = gates_at(g, t, end, i_hv, HV, BT)
        else:
            b_G = None

        if DELTA:
            b_beta = load_row(beta, t, end, i_hv, HV, BT).to(tl.float32)
            b_P = load_rows(P, t, end, i_hv, 0, HV, BT, BT, BT)  # [BT, BT]
            b_e = tl.dot(b_k, b_S_in, input_precision=PRECISION)  # [BT, BV]
            if DG == 1:
                b_e *= b_in
            b_e = (b_beta[:, None] * (b_v - b_e)).to(b_v.dtype)
            b_new = tl.dot(b_P, b_e, input_precision=PRECISION)  # [BT, BV]
        else:
            b_new = b_v
        b_x = b_new.to(b_v.dtype)
        if v_new is not None:
            store_rows(v_new, b_x, t, end, i_hv, i_v, HV, V, BT, BV)

        b_y = b_x
        if DG <= 1:
            b_kT = tl.trans(b_k)  # [BK, BT]
        else:
            o_k = tl.arange(0, BK)
            p_total = total + (i_c * HV + i_hv) * K + o_k
            b_total = tl.load(p_total, mask=o_k < K, other=0.0)  # [BK]
            b_S *= b_total[:, None]
            b_k = load_rows(k_out, t, end, i_h, 0, H, K, BT, BK)  # [BT, BK]
            b_kT = tl.trans(b_k)  # [BK, BT]
        if DG == 1:
            b_S *= b_total
            b_y = (b_new * b_out).to(b_v.dtype)
        b_S = tl.dot(b_kT, b_y, b_S, input_precision=PRECISION)  # [BK, BV]

        if o is not None:
            b_q = load_rows(q_in, t, end, i_h, 0, H, K, BT, BK)  # [BT, BK]
            if DG <= 1:
                b_A = tl.dot(b_q, b_kT, input_precision=PRECISION)
                b_A = causal(b_A, b_G).to(b_v.dtype)  # [BT, BT]
            else:
                b_A = load_rows(Aqk, t, end, i_hv, 0, HV, BT, BT, BT)
            b_o = tl.dot(b_q, b_S_in, input_precision=PRECISION)  # [BT, BV]
            if DG == 1:
                b_o *= b_in
            b_o = tl.dot(b_A, b_x, b_o, input_precision=PRECISION)
            store_rows(o, scale * b_o, t, end, i_hv, i_v, HV, V, BT, BV)
    if state is not None:
        tl.store(state + o_S, b_S, mask=m_S)


@triton.jit(do_not_specialize=["T"])
def scan_bwd_kernel(
    q_in,
    k_in,
    k_out,
    g,
    beta,
    Aqk,
    P,
    total,
    do,
    dstate,
    y,
    dh,
    dinitial_state,
    cu_seqlens,
    scale,
    T,
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
):
    """From the last chunk to the first, the state's gradient in registers.

    y = P^T dv_new, dv_new itself for the additive rule; dh, the gradient of
    the state that leaves each chunk; and that of the initial state.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_nh, i_v = tl.program_id(0) // NV, tl.program_id(0) % NV
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    start = sequence_at(i_n, cu_seqlens, T)
    end = sequence_at(i_n + 1, cu_seqlens, T)

    o_S, m_S = state_at(i_nh, i_v, K, V, BK, BV)
    if dstate is None:
        b_dS = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        b_dS = tl.load(dstate + o_S, mask=m_S, other=0.0)  # [BK, BV]

    NT = tl.cdiv(end - start, BT).to(tl.int32)
    for i in range(NT):
        i_t = NT - 1 - i
        t = start + i_t * BT
        i_c = start // BT + i_n + i_t
        b_dS_out = b_dS.to(do.dtype.element_ty)  # [BK, BV]
        o_h, m_h = state_at(i_c * HV + i_hv, i_v, K, V, BK, BV)
        tl.store(dh + o_h, b_dS_out, mask=m_h)

        b_k = load_rows(k_out, t, end, i_h, 0, H, K, BT, BK)  # [BT, BK]
        b_q = load_rows(q_in, t, end, i_h, 0, H, K, BT, BK)  # [BT, BK]
        b_do = load_rows(do, t, end, i_hv, i_v, HV, V, BT, BV)  # [BT, BV]
        b_do = scale * b_do.to(tl.float32)
        b_x = b_do.to(do.dtype.element_ty)

        b_y = tl.dot(b_k, b_dS_out, input_precision=PRECISION)  # [BT, BV]
        if DG == 1:
            b_G, b_in, b_out, b_total = gates_at(g, t, end, i_hv, HV, BT)
            b_y *= b_out
        else:
            b_G = None
        if DG <= 1:
            b_A = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
            b_A = causal(b_A, b_G, TRANSPOSED=True).to(b_x.dtype)  # [BT, BT]
        else:
            b_A = load_rows(Aqk, t, end, i_hv, 0, HV, BT, BT, BT)
            b_A = tl.trans(b_A)  # [BT, BT]
        b_y = tl.dot(b_A, b_x, b_y, input_precision=PRECISION)  # dv_new
        if DELTA:
            b_P = load_rows(P, t, end, i_hv, 0, HV, BT, BT, BT)  # [BT, BT]
            b_PT, b_y = tl.trans(b_P), b_y.to(b_x.dtype)
            b_y = tl.dot(b_PT, b_y, input_precision=PRECISION)  # [BT, BV]
        store_rows(y, b_y, t, end, i_hv, i_v, HV, V, BT, BV)

        if DG == 1:
            b_dS *= b_total
            b_x = (b_do * b_in).to(b_x.dtype)  # [BT, BV]
        elif DG > 1:
            o_k = tl.arange(0, BK)
            p_total = total + (i_c * HV + i_hv) * K + o_k
            b_total = tl.load(p_total, mask=o_k < K, other=0.0)  # [BK]
            b_dS *= b_total[:, None]
        b_qT = tl.trans(b_q)  # [BK, BT]
        b_dS = tl.dot(b_qT, b_x, b_dS, input_precision=PRECISION)
        if DELTA:
            b_beta = load_row(beta, t, end, i_hv, HV, BT).to(tl.float32)
            b_y *= -b_beta[:, None]
            if DG == 1:
                b_y *= b_in
            if DG > 1:
                b_k = load_rows(k_in, t, end, i_h, 0, H, K, BT, BK)  # [BT, BK]
            b_kT = tl.trans(b_k)  # [BK, BT]
            b_y = b_y.to(b_x.dtype)
            b_dS = tl.dot(b_kT, b_y, b_dS, input_precision=PRECISION)
    if dinitial_state is not None:
        tl.store(dinitial_state + o_S, b_dS, mask=m_S)
