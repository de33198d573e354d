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
    summed_rows,
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
    G,
    row_in,
    row_out,
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

    Delta rule: P = (I + Diag(beta) Akk)^{-1}. A gate: Aqk, and what the
    state meets. A gate a channel: q_in = e^G q and k_in = e^G k at the
    chunk's entrance, k_out = e^{G_C - G} k at its exit. A gate a head: these
    factors themselves, one a row, row_in and row_out, and G. And the state's
    own decay, total = e^{G_C}. What is None is not computed: Aqk and P are not
    where the backward has kept them.
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
            if P is not None:
                b_Akk = tl.dot(b_k, b_kT, b_Akk, input_precision=PRECISION)
            if Aqk is not None:
                b_q = load_rows(q, t, end, i_h, i_k, H, K, BT, BK)  # [BT, BK]
                b_Aqk = tl.dot(b_q, b_kT, b_Aqk, input_precision=PRECISION)
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

    b_G = None
    if DG == 1:
        b_G, b_in, b_out, b_total = gates_at(g, t, end, i_hv, HV, BT)
        store_rows(G, b_G[:, None], t, end, i_hv, 0, HV, 1, BT, 1)
        store_rows(row_in, b_in, t, end, i_hv, 0, HV, 1, BT, 1)
        store_rows(row_out, b_out, t, end, i_hv, 0, HV, 1, BT, 1)
        tl.store(total + (i_c.to(tl.int64) * HV + i_hv), b_total)
    if Aqk is not None:
        b_Aqk = causal(b_Aqk, b_G)  # [BT, BT]
        store_rows(Aqk, b_Aqk, t, end, i_hv, 0, HV, BT, BT, BT)
    if P is not None:
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
    G,
    row_in,
    row_out,
    total,
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
        if DELTA:
            b_err = tl.zeros([BT, BK], dtype=tl.float32)  # to k, as it reads
            b_dM = tl.zeros([BT, BT], dtype=tl.float32)

        # What reaches the scores, where M is Diag(beta) Akk, and what passes
        # through the states.
        for i_v in range((V + BV - 1) // BV):
            o_h, m_h = tile_at(i_c * HV + i_hv, i_k, 0, i_v, K, 1, V, BK, BV)
            b_h = tl.load(h + o_h, mask=m_h, other=0.0)  # [BK, BV]
            b_dh = tl.load(dh + o_h, mask=m_h, other=0.0)  # [BK, BV]
            b_x = load_rows(v_new, t, end, i_hv, i_v, HV, V, BT, BV)
            b_do = load_rows(do, t, end, i_hv, i_v, HV, V, BT, BV)  # [BT, BV]
            b_xT, b_hT, b_dhT = tl.trans(b_x), tl.trans(b_h), tl.trans(b_dh)
            b_dA = tl.dot(b_do, b_xT, b_dA, input_precision=PRECISION)
            b_row = tl.dot(b_do, b_hT, b_row, input_precision=PRECISION)
            b_col = tl.dot(b_x, b_dhT, b_col, input_precision=PRECISION)
            if DELTA:
                b_y = load_rows(y, t, end, i_hv, i_v, HV, V, BT, BV)
                b_dM = tl.dot(b_y, b_xT, b_dM, input_precision=PRECISION)
                b_err = tl.dot(b_y, b_hT, b_err, input_precision=PRECISION)

        # What no product reads is loaded for itself: a tile that both read
        # would have one buffer, which Triton fills again too early.
        NG: tl.constexpr = BK if DG > 1 else 1
        b_kept = tl.zeros([NG], dtype=tl.float32)  # to the state's decay
        if DELTA:
            b_beta = load_row(beta, t, end, i_hv, HV, BT).to(tl.float32)
            b_beta = b_beta[:, None]  # [BT, 1]
            b_bk = (-b_beta * b_k).to(dtype)  # [BT, BK]
            b_dbeta = tl.zeros([BT], dtype=tl.float32)
        for i_v in range((V + BV - 1) // BV):
            if DG > 0:
                o_h, m_h = tile_at(
                    i_c * HV + i_hv, i_k, 0, i_v, K, 1, V, BK, BV
                )
                b_h = tl.load(h + o_h, mask=m_h, other=0.0)  # [BK, BV]
                b_dh = tl.load(dh + o_h, mask=m_h, other=0.0)  # [BK, BV]
                b_hdh = b_h.to(tl.float32) * b_dh  # [BK, BV]
                b_kept += tl.sum(tl.reshape(b_hdh, [NG, BK * BV // NG]), axis=1)
            if DELTA:
                b_y = load_rows(y, t, end_v, i_hv, i_v, HV, V, BT, BV)
                b_v = load_rows(v, t, end_v, i_hv, i_v, HV, V, BT, BV)
                b_dbeta += tl.sum(b_y.to(tl.float32) * b_v, axis=1)
                b_dv = b_beta * b_y  # [BT, BV]
                store_rows(dv, b_dv, t, end_v, i_hv, i_v, HV, V, BT, BV)

        b_G = None
        if DG == 1:
            b_G = load_row(G, t, end, i_hv, HV, BT)  # [BT]
            b_in = load_row(row_in, t, end, i_hv, HV, BT)[:, None]
            b_out = load_row(row_out, t, end, i_hv, HV, BT)[:, None]
            b_total = tl.load(total + (i_c.to(tl.int64) * HV + i_hv))
        b_dA = causal(scale * b_dA, b_G)
        b_own = tl.sum(tl.where(o_t == 0, b_dA, 0.0), axis=1)[:, None]
        b_dA = tl.where(o_t > 0, b_dA, 0.0).to(dtype)  # [BT, BT]
        if DELTA:
            b_dM = causal(b_dM, b_G)
            b_dM = tl.where(o_t > 0, b_dM, 0.0).to(dtype)  # [BT, BT]
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
            b_row = tl.dot(b_dA, b_k, b_row, input_precision=PRECISION)
            b_qT = tl.trans(b_q)  # [BK, BT]
            b_c = tl.dot(b_qT, b_dA, input_precision=PRECISION)  # [BK, BT]
            if DELTA:
                b_err = tl.dot(b_dM, b_k, b_err, input_precision=PRECISION)
                b_bkT = tl.trans(b_bk)  # [BK, BT]
                b_c = tl.dot(b_bkT, b_dM, b_c, input_precision=PRECISION)
            b_c = tl.trans(b_c)  # [BT, BK]
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
                b_qiT = tl.trans(b_qi)  # [BK, BT]
                b_c = tl.dot(b_qiT, b_A, input_precision=PRECISION)
                b_row += b_i * b_r
                b_x += b_qi * b_r
                if DELTA:
                    b_bki = (b_bk * b_i).to(dtype)  # [BT, BK]
                    b_A = tl.where(m_A, b_dM, 0.0).to(dtype)
                    b_r = tl.dot(b_A, b_kj, input_precision=PRECISION)
                    b_bkiT = tl.trans(b_bki)  # [BK, BT]
                    b_c = tl.dot(b_bkiT, b_A, b_c, input_precision=PRECISION)
                    b_err += b_i * b_r
                    b_x += b_bki * b_r
                b_c = tl.trans(b_c)  # [BT, BK]
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
            HALVES: tl.constexpr = dtype == tl.bfloat16
            b_dg = summed_rows(o_t <= 0, b_x, HALVES)  # [BT, BK]
            b_dg += summed_rows(o_t > 0, b_w, HALVES)
            b_dg += (b_total * b_kept)[None, :]
            store_rows(dg, b_dg, t, end, i_hv, i_k, HV, K, BT, BK)

    store_rows(dq, b_dq, t, end, i_h, i_k, H, K, BT, BK)
    store_rows(dk, b_dk, t, end, i_h, i_k, H, K, BT, BK)
