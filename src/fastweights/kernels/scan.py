"""Across chunks in sequence: the state, the outputs, chunk after chunk."""

import triton
import triton.language as tl

from fastweights.kernels.tile import (
    causal,
    row_at,
    rows_at,
    running_gates,
    sequence_at,
    state_at,
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
    these multiply. h, unless None, takes the state that enters each chunk.
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
        if h is not None:
            o_h, m_h = state_at(i_c * HV + i_hv, i_v, K, V, BK, BV)
            tl.store(h + o_h, b_S, mask=m_h)

        p_k, m_k = rows_at(k_in, t, end, i_h, 0, H, K, BT, BK)
        p_v, m_v = rows_at(v, t, end, i_hv, i_v, HV, V, BT, BV)
        b_v = tl.load(p_v, mask=m_v, other=0.0)  # [BT, BV]
        if DG <= 1 or DELTA:
            b_k = tl.load(p_k, mask=m_k, other=0.0)  # [BT, BK]
        if DG == 1:
            p_g, m_t = row_at(g, t, end, i_hv, HV, BT)
            b_G = running_gates(tl.load(p_g, mask=m_t, other=0.0))  # [BT]
            b_total = tl.min(b_G, axis=0)  # gates are <= 0: the last one
            b_in = tl.exp2(b_G.to(tl.float32))[:, None]  # [BT, 1]
            b_out = tl.exp2((b_total - b_G).to(tl.float32))[:, None]

        b_h = b_S.to(b_v.dtype)  # [BK, BV]
        if DELTA:
            p_beta, m_t = row_at(beta, t, end, i_hv, HV, BT)
            p_P, m_P = rows_at(P, t, end, i_hv, 0, HV, BT, BT, BT)
            b_beta = tl.load(p_beta, mask=m_t, other=0.0).to(tl.float32)
            b_P = tl.load(p_P, mask=m_P, other=0.0)  # [BT, BT]
            b_e = tl.dot(b_k, b_h, input_precision=PRECISION)  # [BT, BV]
            if DG == 1:
                b_e *= b_in
            b_e = (b_beta[:, None] * (b_v - b_e)).to(b_v.dtype)
            b_new = tl.dot(b_P, b_e, input_precision=PRECISION)  # [BT, BV]
        else:
            b_new = b_v

        b_x = b_new.to(b_v.dtype)
        b_y = b_x
        if DG <= 1:
            b_kT = tl.trans(b_k)  # [BK, BT]
        else:
            o_k = tl.arange(0, BK)
            p_total = total + (i_c * HV + i_hv) * K + o_k
            b_total = tl.load(p_total, mask=o_k < K, other=0.0)  # [BK]
            b_S *= b_total[:, None]
            p_k, _ = rows_at(k_out, t, end, i_h, 0, H, K, BT, BK)
            b_kT = tl.trans(tl.load(p_k, mask=m_k, other=0.0))  # [BK, BT]
        if DG == 1:
            b_S *= tl.exp2(b_total.to(tl.float32))
            b_y = (b_new * b_out).to(b_v.dtype)
        b_S = tl.dot(b_kT, b_y, b_S, input_precision=PRECISION)  # [BK, BV]

        p_q, _ = rows_at(q_in, t, end, i_h, 0, H, K, BT, BK)
        b_q = tl.load(p_q, mask=m_k, other=0.0)  # [BT, BK]
        if DG <= 1:
            b_A = tl.dot(b_q, b_kT, input_precision=PRECISION)  # [BT, BT]
            if DG == 1:
                b_A = causal(b_A, b_G)
            else:
                o_c = tl.arange(0, BT)
                b_A = tl.where(o_c[:, None] >= o_c[None, :], b_A, 0.0)
            b_A = b_A.to(b_v.dtype)
        else:
            p_A, m_A = rows_at(Aqk, t, end, i_hv, 0, HV, BT, BT, BT)
            b_A = tl.load(p_A, mask=m_A, other=0.0)  # [BT, BT]
        b_o = tl.dot(b_q, b_h, input_precision=PRECISION)  # [BT, BV]
        if DG == 1:
            b_o *= b_in
        b_o = tl.dot(b_A, b_x, b_o, input_precision=PRECISION)  # [BT, BV]
        p_o, _ = rows_at(o, t, end, i_hv, i_v, HV, V, BT, BV)
        tl.store(p_o, scale * b_o, mask=m_v)
    tl.store(state + o_S, b_S, mask=m_S)
