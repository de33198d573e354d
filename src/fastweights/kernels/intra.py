"""Inside each chunk, all chunks at once: scores, inverse, gradients."""

import triton
import triton.language as tl

from fastweights.kernels.tile import (
    bounded_levels,
    causal,
    chunk_span,
    decays_of_pairs,
    gates_at,
    load_row,
    load_rows,
    split_gates,
    store_rows,
    summed_gates,
    tile_at,
    time_order,
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
    factor a row, which the scan applies itself. Without Aqk and P, which
    the backward has kept, only the rest is computed.
    """
    i_c, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    t, end = chunk_span(i_c, cu_seqlens, N, T, BT)
    if t >= end:
        return
    LEVELS: tl.constexpr = 4 + (BT >= 32) + (BT >= 64)
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    BOUND: tl.constexpr = 6 if k.dtype.element_ty == tl.float16 else 60
    o_t = time_order(BT)
    b_Aqk = tl.zeros([BT, BT], dtype=tl.float32)
    b_Akk = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range((K + BK - 1) // BK):
        b_k = load_rows(k, t, end, i_h, i_k, H, K, BT, BK)  # [BT, BK]
        if DG <= 1:
            b_kT = tl.trans(b_k)  # [BK, BT]
            b_Akk = tl.dot(b_k, b_kT, b_Akk, input_precision=PRECISION)
        else:
            b_q = load_rows(q, t, end, i_h, i_k, H, K, BT, BK)  # [BT, BK]
            b_g = load_rows(g, t, end, i_hv, i_k, HV, K, BT, BK)  # [BT, BK]
            b_high, b_low = split_gates(b_g)  # [BT, BK]
            if Aqk is not None:
                first = bounded_levels(b_high, LEVELS, BOUND)
                for level in range(first, LEVELS + 1):
                    b_row, b_col, m_A = decays_of_pairs(
                        b_high, b_low, level, first, EXACT
                    )  # [BT, BK], [BT, BK], [BT, BT]
                    b_kT = tl.trans((b_k * b_col).to(b_k.dtype))  # [BK, BT]
                    b_x = (b_q * b_row).to(b_q.dtype)  # [BT, BK]
                    b_A = tl.dot(b_x, b_kT, input_precision=PRECISION)
                    b_Aqk += tl.where(m_A, b_A, 0.0)  # [BT, BT]
                    if DELTA:
                        b_x = (b_k * b_row).to(b_k.dtype)  # [BT, BK]
                        b_A = tl.dot(b_x, b_kT, input_precision=PRECISION)
                        b_Akk += tl.where(m_A, b_A, 0.0)  # [BT, BT]

            b_G = summed_gates(o_t >= 0, b_high, b_low, EXACT)  # G
            b_d = tl.exp2(b_G)  # [BT, BK]
            store_rows(q_in, b_q * b_d, t, end, i_hv, i_k, HV, K, BT, BK)
            if DELTA:
                store_rows(k_in, b_k * b_d, t, end, i_hv, i_k, HV, K, BT, BK)
            b_G = summed_gates(o_t < 0, b_high, b_low, EXACT)  # G_C - G
            b_d = tl.exp2(b_G)  # [BT, BK]
            store_rows(k_out, b_k * b_d, t, end, i_hv, i_k, HV, K, BT, BK)
            b_sum = tl.sum(b_g.to(tl.float32), axis=0)  # [BK]
            o_k = i_k * BK + tl.arange(0, BK)
            p_x = total + (i_c.to(tl.int64) * HV + i_hv) * K + o_k
            tl.store(p_x, tl.exp(b_sum), mask=o_k < K)

    if Aqk is not None:
        b_Aqk = tl.where(o_t >= 0, b_Aqk, 0.0)  # [BT, BT]
        store_rows(Aqk, b_Aqk, t, end, i_hv, 0, HV, BT, BT, BT)
    if P is not None:
        if DG == 1:
            b_G, _, _, _ = gates_at(g, t, end, i_hv, HV, BT)
            b_Akk = causal(b_Akk, b_G)  # [BT, BT]
        b_beta = load_row(beta, t, end, i_hv, HV, BT).to(tl.float32)  # [BT]
        b_M = tl.where(o_t > 0, b_beta[:, None] * b_Akk, 0.0)  # [BT, BT]
        b_P = unit_lower_inverse(b_M, PRECISION)  # [BT, BT]
        store_rows(P, b_P, t, end, i_hv, 0, HV, BT, BT, BT)


@triton.jit(do_not_specialize=["N", "T"])
def intra_bwd_kernel(
    q,
    k,
    v,
    g,
    beta,
    do,
    v_new,
    y,
    h,
    dh,
    dq,
    dk,
    dv,
    dg,
    dbeta,
    cu_seqlens,
    scale,
    N,
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
    """One chunk and key tile of one key head: the gradients of its inputs.

    From the states that enter the chunks, h, and the gradients of those
    that leave them, dh. The value heads of the key head are summed here, in
    fp32. dg of a gate a head and dbeta are sums over key channels, of which
    every key tile writes its part. With one key tile dv may be y.

    A gate's gradient is a sum over the pairs of tokens that it stands
    between. Rows gain from it what columns lose, and pairs on one side must
    cancel: x adds up both, from operands that are rounded alike.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    LEVELS: tl.constexpr = 4 + (BT >= 32) + (BT >= 64)
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    BOUND: tl.constexpr = 6 if k.dtype.element_ty == tl.float16 else 60
    i_c, i_h = tl.program_id(0) // (NK * H), tl.program_id(0) // NK % H
    i_k = tl.program_id(0) % NK
    t, end = chunk_span(i_c, cu_seqlens, N, T, BT)
    if t >= end:
        return
    end_v = tl.where(i_k == 0, end, t)  # one key tile reads v, writes dv
    dtype = k.dtype.element_ty
    o_t = time_order(BT)
    b_k = load_rows(k, t, end, i_h, i_k, H, K, BT, BK)  # [BT, BK]
    b_q = load_rows(q, t, end, i_h, i_k, H, K, BT, BK)  # [BT, BK]
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    for i_g in range(HV // H):
        i_hv = i_h * (HV // H) + i_g
        b_row = tl.zeros([BT, BK], dtype=tl.float32)  # to q
        b_col = tl.zeros([BT, BK], dtype=tl.float32)  # to k, as it is read
        b_dA = tl.zeros([BT, BT], dtype=tl.float32)
        b_dAT = tl.zeros([BT, BT], dtype=tl.float32)
        b_kept = tl.zeros([BK], dtype=tl.float32)  # to the state's decay
        if DELTA:
            b_beta = load_row(beta, t, end, i_hv, HV, BT).to(tl.float32)
            b_beta = b_beta[:, None]  # [BT, 1]
            b_bk = (-b_beta * b_k).to(dtype)  # [BT, BK]
            b_err = tl.zeros([BT, BK], dtype=tl.float32)  # to k, as it reads
            b_dM = tl.zeros([BT, BT], dtype=tl.float32)
            b_dMT = tl.zeros([BT, BT], dtype=tl.float32)
            b_dbeta = tl.zeros([BT], dtype=tl.float32)

        # What reaches the scores, where M is Diag(beta) Akk. Their
        # transposes are products of their own.
        for i_v in range((V + BV - 1) // BV):
            b_x = load_rows(v_new, t, end, i_hv, i_v, HV, V, BT, BV)
            b_do = load_rows(do, t, end, i_hv, i_v, HV, V, BT, BV)  # [BT, BV]
            b_xT, b_doT = tl.trans(b_x), tl.trans(b_do)  # [BV, BT]
            b_dA = tl.dot(b_do, b_xT, b_dA, input_precision=PRECISION)
            b_dAT = tl.dot(b_x, b_doT, b_dAT, input_precision=PRECISION)
            if DELTA:
                b_y = load_rows(y, t, end, i_hv, i_v, HV, V, BT, BV)
                b_yT = tl.trans(b_y)  # [BV, BT]
                b_dM = tl.dot(b_y, b_xT, b_dM, input_precision=PRECISION)
                b_dMT = tl.dot(b_x, b_yT, b_dMT, input_precision=PRECISION)

        b_G = None
        if DG == 1:
            b_G, b_in, b_out, b_total = gates_at(g, t, end, i_hv, HV, BT)
        b_dA = causal(scale * b_dA, b_G)
        b_own = tl.sum(tl.where(o_t == 0, b_dA, 0.0), axis=1)[:, None]
        b_dA = tl.where(o_t > 0, b_dA, 0.0).to(dtype)  # [BT, BT]
        b_dAT = causal(scale * b_dAT, b_G, TRANSPOSED=True)
        b_dAT = tl.where(o_t < 0, b_dAT, 0.0).to(dtype)  # [BT, BT]
        if DELTA:
            b_dM = causal(b_dM, b_G)
            b_dM = tl.where(o_t > 0, b_dM, 0.0).to(dtype)  # [BT, BT]
            b_dMT = causal(b_dMT, b_G, TRANSPOSED=True)
            b_dMT = tl.where(o_t < 0, b_dMT, 0.0).to(dtype)  # [BT, BT]

        # Through the states. No loads ahead: what a product and a sum read
        # has one buffer, which Triton would fill before the product is done.
        for i_v in tl.range((V + BV - 1) // BV, num_stages=1):
            i_s = i_c * HV + i_hv
            o_h, m_h = tile_at(i_s, i_k, 0, i_v, K, 1, V, BK, BV)
            b_h = tl.load(h + o_h, mask=m_h, other=0.0)  # [BK, BV]
            b_dh = tl.load(dh + o_h, mask=m_h, other=0.0)  # [BK, BV]
            b_x = load_rows(v_new, t, end, i_hv, i_v, HV, V, BT, BV)
            b_do = load_rows(do, t, end, i_hv, i_v, HV, V, BT, BV)  # [BT, BV]
            b_hT, b_dhT = tl.trans(b_h), tl.trans(b_dh)  # [BV, BK]
            b_row = tl.dot(b_do, b_hT, b_row, input_precision=PRECISION)
            b_col = tl.dot(b_x, b_dhT, b_col, input_precision=PRECISION)
            if DG > 0:
                b_kept += tl.sum(b_h.to(tl.float32) * b_dh, axis=1)
            if DELTA:
                b_y = load_rows(y, t, end, i_hv, i_v, HV, V, BT, BV)
                b_err = tl.dot(b_y, b_hT, b_err, input_precision=PRECISION)
                b_v = load_rows(v, t, end_v, i_hv, i_v, HV, V, BT, BV)
                b_dbeta += tl.sum(b_y.to(tl.float32) * b_v, axis=1)
                b_dv = b_beta * b_y  # [BT, BV]
                store_rows(dv, b_dv, t, end_v, i_hv, i_v, HV, V, BT, BV)
        b_row *= scale
        if DG > 1:
            b_g = load_rows(g, t, end, i_hv, i_k, HV, K, BT, BK)  # [BT, BK]
            b_high, b_low = split_gates(b_g)  # [BT, BK]
            b_in = tl.exp2(summed_gates(o_t >= 0, b_high, b_low, EXACT))
            b_out = tl.exp2(summed_gates(o_t < 0, b_high, b_low, EXACT))
            b_total = tl.exp(tl.sum(b_g.to(tl.float32), axis=0))  # [BK]
        if DG > 0:
            b_row *= b_in
            b_col *= b_out
            b_w = b_k * b_col  # [BT, BK]
            if DELTA:
                b_err *= b_in

        # Through the scores, without their diagonal, which no gate is in.
        if DG <= 1:
            b_c = tl.dot(b_dAT, b_q, input_precision=PRECISION)  # [BT, BK]
            b_row = tl.dot(b_dA, b_k, b_row, input_precision=PRECISION)
            if DELTA:
                b_c = tl.dot(b_dMT, b_bk, b_c, input_precision=PRECISION)
                b_err = tl.dot(b_dM, b_k, b_err, input_precision=PRECISION)
            if DG == 1:
                b_x = b_q * b_row - b_k * b_c  # [BT, BK]
                if DELTA:
                    b_x += b_bk * b_err
            b_col += b_c
        else:
            b_x = b_q * b_row
            if DELTA:
                b_x += b_bk * b_err
            first = bounded_levels(b_high, LEVELS, BOUND)
            for level in range(first, LEVELS + 1):
                b_i, b_j, m_A = decays_of_pairs(
                    b_high, b_low, level, first, EXACT
                )
                b_qi = (b_q * b_i).to(dtype)  # [BT, BK]
                b_kj = (b_k * b_j).to(dtype)  # [BT, BK]
                b_A = tl.where(m_A, b_dA, 0.0).to(dtype)
                b_r = tl.dot(b_A, b_kj, input_precision=PRECISION)
                b_A = tl.where(m_A, b_dAT, 0.0).to(dtype)
                b_c = tl.dot(b_A, b_qi, input_precision=PRECISION)
                b_row += b_i * b_r
                b_x += b_qi * b_r
                if DELTA:
                    b_bki = (b_bk * b_i).to(dtype)  # [BT, BK]
                    b_A = tl.where(m_A, b_dM, 0.0).to(dtype)
                    b_r = tl.dot(b_A, b_kj, input_precision=PRECISION)
                    b_A = tl.where(m_A, b_dMT, 0.0).to(dtype)
                    b_c = tl.dot(b_A, b_bki, b_c, input_precision=PRECISION)
                    b_err += b_i * b_r
                    b_x += b_bki * b_r
                b_col += b_j * b_c
                b_x -= b_kj * b_c

        b_dq += b_row + b_own * b_k
        b_dk += b_col + b_own * b_q
        if DELTA:
            b_dk -= b_beta * b_err
            b_dbeta -= tl.sum(b_k * b_err, axis=1)
            b_dbeta = b_dbeta[:, None]  # [BT, 1]
            store_rows(dbeta, b_dbeta, t, end, i_hv, i_k, HV, NK, BT, 1)
        if DG == 1:
            b_x, b_w = tl.sum(b_x, axis=1), tl.sum(b_w, axis=1)  # [BT]
            b_dg = tl.where(o_t <= 0, b_x[None, :], b_w[None, :])  # [BT, BT]
            b_dg = tl.sum(b_dg, axis=1) + b_total * tl.sum(b_kept, axis=0)
            store_rows(dg, b_dg[:, None], t, end, i_hv, i_k, HV, NK, BT, 1)
        elif DG > 1:
            b_from = (o_t <= 0).to(tl.float32)  # [BT, BT]
            b_dg = tl.dot(b_from, b_x, input_precision="tf32x3")  # [BT, BK]
            b_dg = tl.dot(1.0 - b_from, b_w, b_dg, input_precision="tf32x3")
            b_dg += (b_total * b_kept)[None, :]
            store_rows(dg, b_dg, t, end, i_hv, i_k, HV, K, BT, BK)

    store_rows(dq, b_dq, t, end, i_h, i_k, H, K, BT, BK)
    store_rows(dk, b_dk, t, end, i_h, i_k, H, K, BT, BK)
