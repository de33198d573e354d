"""Inside each chunk, all chunks at once: decays, scores, inverse."""

import triton
import triton.language as tl

from fastweights.kernels.tile import (
    LEAST,
    LOG2_E,
    add_pairs,
    chunk_span,
    clamped,
    decay_matrix,
    decays_of_pairs,
    first_level,
    is_near,
    load_row,
    load_rows,
    num_levels,
    rest_of_inverse,
    slot_row,
    split_gates,
    store_rows,
    summed_gates,
    time_order,
)


@triton.jit
def add_scores(
    b_Aqk,
    b_Akk,
    q,
    k,
    g,
    t,
    end,
    i_h,
    i_hv,
    i_k,
    folds,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the scores [BT, BT] of key tile i_k, however strong its gates are.

    In one product if the chunk ``folds`` at its middle, else level by level:
    see tile.decays_of_pairs.
    """
    dtype: tl.constexpr = k.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    LEVELS: tl.constexpr = num_levels(BT)
    b_g = load_rows(g, t, end, i_hv, i_k, HV, K, BT, BK)  # [BT, BK]
    b_high, b_low = split_gates(b_g)  # [BT, BK]
    if folds:
        b_r, b_c, _ = decays_of_pairs(b_high, b_low, LEVELS, LEVELS, EXACT)
        b_k = load_rows(k, t, end, i_h, i_k, H, K, BT, BK)  # [BT, BK]
        b_kT = tl.trans((b_k * b_c).to(dtype))  # [BK, BT]
        b_q = load_rows(q, t, end, i_h, i_k, H, K, BT, BK)  # [BT, BK]
        b_x = (b_q * b_r).to(dtype)  # [BT, BK]
        b_Aqk = tl.dot(b_x, b_kT, b_Aqk, input_precision=PRECISION)
        if DELTA:
            b_x = (b_k * b_r).to(dtype)  # [BT, BK]
            b_Akk = tl.dot(b_x, b_kT, b_Akk, input_precision=PRECISION)
    else:
        first = first_level(b_high, k)
        for level in range(first, LEVELS + 1):
            b_r, b_c, m_A = decays_of_pairs(b_high, b_low, level, first, EXACT)
            b_k = load_rows(k, t, end, i_h, i_k, H, K, BT, BK)  # [BT, BK]
            b_kT = tl.trans((b_k * b_c).to(dtype))  # [BK, BT]
            b_q = load_rows(q, t, end, i_h, i_k, H, K, BT, BK)  # [BT, BK]
            b_x = (b_q * b_r).to(dtype)  # [BT, BK]
            b_A = tl.dot(b_x, b_kT, input_precision=PRECISION)
            b_Aqk += tl.where(m_A, b_A, 0.0)  # [BT, BT]
            if DELTA:
                b_x = (b_k * b_r).to(dtype)  # [BT, BK]
                b_A = tl.dot(b_x, b_kT, input_precision=PRECISION)
                b_Akk += tl.where(m_A, b_A, 0.0)  # [BT, BT]
    return b_Aqk, b_Akk


@triton.jit(do_not_specialize=["N", "T"])
def intra_fwd_kernel(
    q,
    k,
    g,
    beta,
    Aqk,
    R,
    q_in,
    k_in,
    k_out,
    row_in,
    row_beta,
    total,
    G,
    row_undo,
    rounded,
    far,
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

    Delta rule: R, with which the inverse of I + Diag(beta) Akk is
    I + Diag(beta) R, and that of I + Akk Diag(beta) is I + R Diag(beta). A
    gate per head: its running sum G, in log2 units, the decays from a chunk's
    entrance, row_in = e^G, and back to it, row_undo. G is fp64: where chunks
    decay below LEAST it is differenced, and a weak gate after strong ones
    would drown in fp32. beta as a row in fp32, row_beta. The state's own
    decay, total = e^{G_C}. A gate per channel: Aqk, and what the state meets,
    q_in = e^G q, k_in = e^G k and k_out = e^{G_C - G} k. Where every channel
    of a key tile is_near, one product has the scores of all its pairs, which
    lead from j back to the entrance, then to i; add_scores has those of the
    other tiles. What is None is not computed: the backward has kept Aqk and
    R, and it alone needs rounded, G_C in log2 units of the gates as they are
    rounded in q_in, k_in and k_out, and far, whether a tile is not near.
    """
    i_c, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    t, end = chunk_span(i_c, cu_seqlens, N, T, BT)
    if t >= end:
        if far is not None:
            tl.store(far + tl.program_id(0), 0)
        return
    dtype: tl.constexpr = k.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    o_t = time_order(BT)
    if DELTA:
        b_beta = load_row(beta, t, end, i_hv, HV, BT).to(tl.float32)  # [BT]
        if DG != 1:  # else with the gate's rows
            tl.store(slot_row(row_beta, i_c, i_hv, HV, BT), b_beta)
    if DG == 1:
        b_g = load_row(g, t, end, i_hv, HV, BT)  # [BT]
    b_Aqk = tl.zeros([BT, BT], dtype=tl.float32)
    b_Akk = tl.zeros([BT, BT], dtype=tl.float32)
    m_first = (tl.arange(0, BT) < BT // 2)[:, None]  # half of the chunk
    strong, folds = 0, 0  # a bit per key tile
    NK: tl.constexpr = (K + BK - 1) // BK if DG > 1 or R is not None else 0
    for i_k in range(NK):
        b_k = load_rows(k, t, end, i_h, i_k, H, K, BT, BK)  # [BT, BK]
        if DG <= 1:
            b_kT = tl.trans(b_k)  # [BK, BT]
            b_Akk = tl.dot(b_k, b_kT, b_Akk, input_precision=PRECISION)
        else:
            b_q = load_rows(q, t, end, i_h, i_k, H, K, BT, BK)  # [BT, BK]
            b_g = load_rows(g, t, end, i_hv, i_k, HV, K, BT, BK)  # [BT, BK]
            b_high, b_low = split_gates(b_g)  # [BT, BK]
            b_x = b_g.to(tl.float32)
            if Aqk is not None:
                b_y = tl.where(m_first, b_x, 0.0)
            else:
                b_y = b_high.to(tl.float32)
            b_total, b_y = tl.reduce((b_x, b_y), 0, add_pairs)  # [BK]
            if Aqk is not None:
                b_total = clamped(b_total, -1e30)  # of -inf none is a part
                b_y = clamped(b_y, -1e30)
                b_y = tl.exp(tl.minimum(b_y, b_total - b_y))
                half_near = is_near(tl.min(b_y), k, DG)
            b_total = tl.exp(b_total)
            o_k = i_k * BK + tl.arange(0, BK)
            o_total = (i_c.to(tl.int64) * HV + i_hv) * K + o_k
            tl.store(total + o_total, b_total, mask=o_k < K)
            near = is_near(tl.min(b_total), k, DG)
            strong |= tl.where(near, 0, 1 << i_k)
            if Aqk is not None:
                folds |= tl.where(half_near, 1 << i_k, 0)
            if rounded is not None:
                if EXACT:
                    b_y += tl.sum(b_low.to(tl.float32), axis=0)
                tl.store(rounded + o_total, b_y, mask=o_k < K)
            # The exit first: ptxas then has registers for the products.
            b_G = summed_gates(o_t < 0, b_high, b_low, EXACT)  # G_C - G
            b_x = (b_k * tl.exp2(b_G)).to(dtype)  # [BT, BK]
            store_rows(k_out, b_x, t, end, i_hv, i_k, HV, K, BT, BK)
            b_G = summed_gates(o_t >= 0, b_high, b_low, EXACT)
            b_undo = tl.exp2(tl.where(near, -b_G, -1000.0))  # else 0
            b_kT = tl.trans((b_k * b_undo).to(dtype))  # [BK, BT]
            b_in = tl.exp2(b_G)
            b_x = (b_q * b_in).to(dtype)  # [BT, BK]
            store_rows(q_in, b_x, t, end, i_hv, i_k, HV, K, BT, BK)
            if Aqk is not None:
                b_Aqk = tl.dot(b_x, b_kT, b_Aqk, input_precision=PRECISION)
            b_x = (b_k * b_in).to(dtype)  # [BT, BK]
            if DELTA:
                store_rows(k_in, b_x, t, end, i_hv, i_k, HV, K, BT, BK)
            if R is not None:
                b_Akk = tl.dot(b_x, b_kT, b_Akk, input_precision=PRECISION)

    if far is not None:
        tl.store(far + tl.program_id(0), strong)
    if Aqk is not None:
        for i_k in range(NK):
            if (strong >> i_k) % 2 == 1:
                b_Aqk, b_Akk = add_scores(
                    b_Aqk, b_Akk, q, k, g, t, end, i_h, i_hv, i_k,
                    (folds >> i_k) % 2 == 1,
                    H, HV, K, BT, BK, DELTA, PRECISION,
                )  # fmt: skip
    if DG == 1:
        # After the products: before them, the barriers of the sums and the
        # stores would hold the loads of k back.
        if DELTA:
            tl.store(slot_row(row_beta, i_c, i_hv, HV, BT), b_beta)
        b_g = clamped(b_g.to(tl.float32), -20000.0)
        b_G = tl.cumsum(b_g.to(tl.float64) * LOG2_E, axis=0)
        b_in = tl.exp2(b_G.to(tl.float32))
        o_c = tl.arange(0, BT)
        b_total = tl.sum(tl.where(o_c == BT - 1, b_in, 0.0), axis=0)
        tl.store(slot_row(G, i_c, i_hv, HV, BT), b_G)
        b_undo = tl.where(b_total >= LEAST, 1.0 / b_in, 1.0)
        tl.store(slot_row(row_in, i_c, i_hv, HV, BT), b_in)
        tl.store(slot_row(row_undo, i_c, i_hv, HV, BT), b_undo)
        tl.store(total + (i_c.to(tl.int64) * HV + i_hv), b_total)
    if Aqk is not None:
        b_Aqk = tl.where(o_t >= 0, b_Aqk, 0.0)  # [BT, BT]
        store_rows(Aqk, b_Aqk, t, end, i_hv, 0, HV, BT, BT, BT)
    if R is not None:
        if DG == 1:
            tl.debug_barrier()  # all of G is there
            if b_total >= LEAST:
                b_Akk *= b_in[:, None] * b_undo[None, :]
            else:
                b_Akk *= decay_matrix(G, i_c, i_hv, HV, BT)
        store_inverse(R, b_Akk, b_beta, t, end, i_hv, HV, PRECISION)


@triton.jit
def store_inverse(
    R, b_Akk, b_beta, t, end, i_hv, HV: tl.constexpr, PRECISION: tl.constexpr
):
    """R of the lower triangle of b_Akk [BT, BT], with the diagonal |k|^2.

    Where every token's step beta |k|^2 is between 0 and 2, the inverse stays
    small, and fp16 has the range as well as the precision of tf32.
    """
    BT: tl.constexpr = b_Akk.shape[0]
    b_Akk = tl.where(time_order(BT) >= 0, b_Akk, 0.0)  # [BT, BT]
    if PRECISION == "tf32":
        largest = tl.max(tl.abs(b_Akk))
        steps = largest * tl.max(tl.where(b_beta >= 0.0, b_beta, 1e30))
        if (steps < 2.05) & (largest < 1e3):
            b_R = rest_of_inverse(b_Akk, b_beta, "fp16")
        else:
            b_R = rest_of_inverse(b_Akk, b_beta, "tf32")
    else:
        b_R = rest_of_inverse(b_Akk, b_beta, PRECISION)
    store_rows(R, b_R, t, end, i_hv, 0, HV, BT, BT, BT)
