"""Inside each chunk, all chunks at once: scores and the rule's inverse."""

import triton
import triton.language as tl

from fastweights.kernels.tile import (
    causal,
    chunk_span,
    decays,
    decays_to_join,
    joins,
    row_at,
    rows_at,
    running_gates,
    split_gates,
    unit_lower_inverse,
)


@triton.jit(do_not_specialize=["N", "T"])
def intra_fwd_kernel(
    q,
    k,
    g,
    beta,
    Aqk,
    P,
    q_in,
    k_in,
    k_out,
    total,
    cu_seqlens,
    N,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    DG: tl.constexpr,
    DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One chunk of one value head.

    Delta rule: P = (I + Diag(beta) Akk)^{-1}. A gate a channel: Aqk, and
    the chunk's q and k as the state meets them, q_in = e^G q and
    k_in = e^G k at the entrance, k_out = e^{G_C - G} k at the exit, with
    the state's own decay, total = e^{G_C}. A gate a head, or none, is one
    factor a row, which the scan applies itself.
    """
    i_c, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    t, end = chunk_span(i_c, cu_seqlens, N, T, BT)
    if t >= end:
        return
    LEVELS: tl.constexpr = 4 + (BT >= 32) + (BT >= 64)
    o_c = tl.arange(0, BT)
    b_own = tl.zeros([BT], dtype=tl.float32)
    b_Aqk = tl.zeros([BT, BT], dtype=tl.float32)
    b_Akk = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range((K + BK - 1) // BK):
        p_k, m_k = rows_at(k, t, end, i_h, i_k, H, K, BT, BK)
        b_k = tl.load(p_k, mask=m_k, other=0.0)  # [BT, BK]
        if DG <= 1:
            b_kT = tl.trans(b_k)  # [BK, BT]
            b_Akk = tl.dot(b_k, b_kT, b_Akk, input_precision=PRECISION)
        else:
            p_q, _ = rows_at(q, t, end, i_h, i_k, H, K, BT, BK)
            p_g, _ = rows_at(g, t, end, i_hv, i_k, HV, K, BT, BK)
            b_q = tl.load(p_q, mask=m_k, other=0.0)  # [BT, BK]
            b_g = tl.load(p_g, mask=m_k, other=0.0)  # [BT, BK]
            b_high, b_low = split_gates(b_g)  # [BT, BK]
            b_own += tl.sum(b_q.to(tl.float32) * b_k, axis=1)  # [BT]
            for level in range(LEVELS):
                b_d = decays_to_join(b_high, b_low, level)  # [BT, BK]
                m_A = joins(level, BT)  # [BT, BT]
                b_qd = (b_q * b_d).to(b_q.dtype)  # [BT, BK]
                b_kd = (b_k * b_d).to(b_k.dtype)  # [BT, BK]
                b_kT = tl.trans(b_kd)  # [BK, BT]
                b_A = tl.dot(b_qd, b_kT, input_precision=PRECISION)
                b_Aqk += tl.where(m_A, b_A, 0.0)  # [BT, BT]
                if DELTA:
                    b_A = tl.dot(b_kd, b_kT, input_precision=PRECISION)
                    b_Akk += tl.where(m_A, b_A, 0.0)  # [BT, BT]

            m_c = o_c[:, None] >= o_c[None, :]
            b_d = decays(m_c, b_high, b_low)  # [BT, BK]: e^G
            p_x, _ = rows_at(q_in, t, end, i_hv, i_k, HV, K, BT, BK)
            tl.store(p_x, b_q * b_d, mask=m_k)
            if DELTA:
                p_x, _ = rows_at(k_in, t, end, i_hv, i_k, HV, K, BT, BK)
                tl.store(p_x, b_k * b_d, mask=m_k)
            m_c = o_c[:, None] < o_c[None, :]
            b_d = decays(m_c, b_high, b_low)  # [BT, BK]: e^{G_C - G}
            p_x, _ = rows_at(k_out, t, end, i_hv, i_k, HV, K, BT, BK)
            tl.store(p_x, b_k * b_d, mask=m_k)
            b_sum = tl.sum(b_g.to(tl.float32), axis=0)  # [BK]
            o_k = i_k * BK + tl.arange(0, BK)
            p_x = total + (i_c.to(tl.int64) * HV + i_hv) * K + o_k
            tl.store(p_x, tl.exp(b_sum), mask=o_k < K)

    if DG > 1:
        m_A = o_c[:, None] == o_c[None, :]
        b_Aqk += tl.where(m_A, b_own[:, None], 0.0)  # [BT, BT]
        p_A, m_A = rows_at(Aqk, t, end, i_hv, 0, HV, BT, BT, BT)
        tl.store(p_A, b_Aqk, mask=m_A)
    if DG == 1:
        p_g, m_t = row_at(g, t, end, i_hv, HV, BT)
        b_G = running_gates(tl.load(p_g, mask=m_t, other=0.0))  # [BT]
        b_Akk = causal(b_Akk, b_G)  # [BT, BT]
    if DELTA:
        p_beta, m_t = row_at(beta, t, end, i_hv, HV, BT)
        b_beta = tl.load(p_beta, mask=m_t, other=0.0).to(tl.float32)  # [BT]
        m_A = o_c[:, None] > o_c[None, :]
        b_M = tl.where(m_A, b_beta[:, None] * b_Akk, 0.0)  # [BT, BT]
        b_P = unit_lower_inverse(b_M, PRECISION)  # [BT, BT]
        p_P, m_P = rows_at(P, t, end, i_hv, 0, HV, BT, BT, BT)
        tl.store(p_P, b_P, mask=m_P)
