"""Inside each chunk, all chunks at once: scores, inverse, gradients."""

import triton
import triton.language as tl

from fastweights.kernels.tile import (
    LOG2_E,
    chunk_span,
    decay_matrix,
    decay_to_exit,
    decays_of_pairs,
    load_row,
    load_rows,
    nonzero,
    rest_of_inverse,
    slot_row,
    split_gates,
    store_rows,
    summed_gates,
    summed_rows,
    tile_at,
    time_order,
)


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
    row_undo,
    row_beta,
    total,
    G,
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
    gate a head: its running sum G, in log2 units, and the decays from the
    chunk's entrance, row_in = e^G. G is fp64: a weak gate after strong ones
    would drown in fp32, since G is differenced. The state's own decay, total
    = e^{G_C}. A gate a channel: Aqk, and what the state meets, q_in = e^G q,
    k_in = e^G k and k_out = e^{G_C - G} k, all pairs at once, from j back to
    the entrance, then to i; in chunks that decay too far for that
    intra_fwd_far_kernel writes Aqk, R and k_out again. What is None is not
    computed: Aqk and R are not where the backward has kept them.
    """
    i_c, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    t, end = chunk_span(i_c, cu_seqlens, N, T, BT)
    if t >= end:
        return
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    o_t = time_order(BT)
    if DELTA:
        b_beta = load_row(beta, t, end, i_hv, HV, BT).to(tl.float32)  # [BT]
        tl.store(slot_row(row_beta, i_c, i_hv, HV, BT)[0], b_beta)
    if DG == 1:
        b_g = load_row(g, t, end, i_hv, HV, BT)  # [BT]
        b_G = tl.cumsum(b_g.to(tl.float64) * LOG2_E, axis=0)
        b_in = tl.exp2(b_G.to(tl.float32))
        b_total = tl.min(b_in, axis=0)  # gates are <= 0: the last one
        p_G = slot_row(G, i_c, i_hv, HV, BT)[0]
        tl.store(p_G, b_G)
        b_undo = tl.where(b_total >= 2.0**-100, 1.0 / b_in, 1.0)
        tl.store(slot_row(row_in, i_c, i_hv, HV, BT)[0], b_in)
        tl.store(slot_row(row_undo, i_c, i_hv, HV, BT)[0], b_undo)
        tl.store(total + (i_c.to(tl.int64) * HV + i_hv), b_total)
    if DG <= 1 and R is None:
        return
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
            b_G = summed_gates(o_t >= 0, b_high, b_low, EXACT)  # [BT, BK]
            b_in = tl.exp2(b_G)
            b_qi, b_ki = (b_q * b_in).to(b_q.dtype), (b_k * b_in).to(b_k.dtype)
            store_rows(q_in, b_qi, t, end, i_hv, i_k, HV, K, BT, BK)
            if DELTA:
                store_rows(k_in, b_ki, t, end, i_hv, i_k, HV, K, BT, BK)
            b_total = tl.exp(tl.sum(b_g.to(tl.float32), axis=0))  # [BK]
            o_k = i_k * BK + tl.arange(0, BK)
            p_x = total + (i_c.to(tl.int64) * HV + i_hv) * K + o_k
            tl.store(p_x, b_total, mask=o_k < K)
            b_d = tl.exp2(-b_G)
            b_kT = tl.trans((b_k * b_d).to(b_k.dtype))  # [BK, BT]
            b_d *= b_total[None, :]
            if Aqk is not None:
                b_Aqk = tl.dot(b_qi, b_kT, b_Aqk, input_precision=PRECISION)
            if R is not None:
                b_Akk = tl.dot(b_ki, b_kT, b_Akk, input_precision=PRECISION)
            store_rows(k_out, b_k * b_d, t, end, i_hv, i_k, HV, K, BT, BK)

    if Aqk is not None:
        b_Aqk = tl.where(o_t >= 0, b_Aqk, 0.0)  # [BT, BT]
        store_rows(Aqk, b_Aqk, t, end, i_hv, 0, HV, BT, BT, BT)
    if R is not None:
        if DG == 1:
            tl.debug_barrier()  # all of G is there
            if b_total >= 2.0**-100:
                b_Akk *= b_in[:, None] * b_undo[None, :]
            else:
                b_Akk *= decay_matrix(p_G)
        store_inverse(R, b_Akk, b_beta, t, end, i_hv, HV, PRECISION)


@triton.jit
def store_inverse(
    R, b_Akk, b_beta, t, end, i_hv, HV: tl.constexpr, PRECISION: tl.constexpr
):
    """R of the lower triangle of b_Akk [BT, BT], with the diagonal |k|^2.

    Where every token's step beta |k|^2 is at most 2, the inverse stays small,
    and fp16 has the range as well as the precision of tf32.
    """
    BT: tl.constexpr = b_Akk.shape[0]
    b_Akk = tl.where(time_order(BT) >= 0, b_Akk, 0.0)  # [BT, BT]
    if PRECISION == "tf32":
        largest = tl.max(tl.abs(b_Akk))
        steps = largest * tl.max(tl.abs(b_beta))
        if (steps < 2.1) & (largest < 1e3):
            b_R = rest_of_inverse(b_Akk, b_beta, "fp16")
        else:
            b_R = rest_of_inverse(b_Akk, b_beta, "tf32")
    else:
        b_R = rest_of_inverse(b_Akk, b_beta, PRECISION)
    store_rows(R, b_R, t, end, i_hv, 0, HV, BT, BT, BT)


@triton.jit
def near(
    total,
    i_c,
    i_h,
    i_k,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BOUND: tl.constexpr,
):
    """Whether no channel of the key tile decays by 2^-BOUND in the chunk.

    For all value heads of key head i_h.
    """
    least = 1.0
    o_k = i_k * BK + tl.arange(0, BK)
    for i_g in range(HV // H):
        i_ch = i_c.to(tl.int64) * HV + i_h * (HV // H) + i_g
        b_total = tl.load(total + i_ch * K + o_k, mask=o_k < K, other=1.0)
        least = tl.minimum(least, tl.min(b_total))
    return least >= 2.0**-BOUND


@triton.jit(do_not_specialize=["programs", "N", "T"])
def intra_fwd_far_kernel(
    q,
    k,
    g,
    row_beta,
    total,
    Aqk,
    R,
    k_out,
    cu_seqlens,
    programs,
    N,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """intra_fwd_kernel for a gate a channel, in chunks of unbounded decay.

    There e^{-G} is out of range. Factors lead from both sides to a border
    between two tokens, level by level (tile.decays_of_pairs). A few programs
    look at all the chunks.
    """
    LEVELS: tl.constexpr = 4 + (BT >= 32) + (BT >= 64)
    NK: tl.constexpr = (K + BK - 1) // BK
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    BOUND: tl.constexpr = 8 if k.dtype.element_ty == tl.float16 else 100
    o_t = time_order(BT)
    for i in range(tl.program_id(0), programs, tl.num_programs(0)):
        i_x = tl.cast(i, tl.int32)
        i_c, i_hv = i_x // HV, i_x % HV
        i_h = i_hv // (HV // H)
        t, end = chunk_span(i_c, cu_seqlens, N, T, BT)
        bounded = t >= end
        if t < end:
            bounded = near(total, i_c, i_hv, 0, HV, HV, K, NK * BK, BOUND)
        if bounded == 0:
            b_Aqk = tl.zeros([BT, BT], dtype=tl.float32)
            b_Akk = tl.zeros([BT, BT], dtype=tl.float32)
            for i_k in range(NK):
                b_k = load_rows(k, t, end, i_h, i_k, H, K, BT, BK)
                b_q = load_rows(q, t, end, i_h, i_k, H, K, BT, BK)
                b_g = load_rows(g, t, end, i_hv, i_k, HV, K, BT, BK)
                b_high, b_low = split_gates(b_g)  # [BT, BK]
                b_G = summed_gates(o_t < 0, b_high, b_low, EXACT)
                b_ko = b_k * tl.exp2(b_G)  # [BT, BK]
                store_rows(k_out, b_ko, t, end, i_hv, i_k, HV, K, BT, BK)
                if Aqk is not None:
                    for level in range(LEVELS + 1):
                        b_c, m_A = decays_of_pairs(
                            b_high, b_low, level, EXACT
                        )  # [BT, BK], [BT, BT]
                        b_kc = (b_k * b_c).to(b_k.dtype)  # [BT, BK]
                        b_kT = tl.trans(b_kc)  # [BK, BT]
                        b_x = (b_q * b_c).to(b_q.dtype)  # [BT, BK]
                        b_A = tl.dot(b_x, b_kT, input_precision=PRECISION)
                        b_Aqk += tl.where(m_A, b_A, 0.0)  # [BT, BT]
                        if DELTA:
                            b_A = tl.dot(b_kc, b_kT, input_precision=PRECISION)
                            b_Akk += tl.where(m_A, b_A, 0.0)  # [BT, BT]
            if Aqk is not None:
                b_Aqk = tl.where(o_t >= 0, b_Aqk, 0.0)  # [BT, BT]
                store_rows(Aqk, b_Aqk, t, end, i_hv, 0, HV, BT, BT, BT)
                if DELTA:
                    p_beta = slot_row(row_beta, i_c, i_hv, HV, BT)[0]
                    b_beta = tl.load(p_beta)  # [BT]
                    store_inverse(
                        R, b_Akk, b_beta, t, end, i_hv, HV, PRECISION
                    )


@triton.jit
def products_bwd(
    do,
    x,
    dv,
    h,
    dh,
    scale,
    t,
    end,
    i_ch,
    i_hv,
    i_k,
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
    """The sums over values, before any decay, beta and mask.

    Of the scores: dAqk, and -dAkk, [BT, BT]. Through the states, [BT, BK]:
    to q, to k as it is written, and, negated, to k as it reads. -dAkk and
    the last are 0 for the additive rule. And for a gate h . dh, of the
    gradient of the state's decay, [BK], or for a gate a head its sum: the
    diagonal of a product, since a tile that a product and a sum read has one
    buffer, which Triton fills again before the product is done.
    """
    b_dA = tl.zeros([BT, BT], dtype=tl.float32)
    b_dE = tl.zeros([BT, BT], dtype=tl.float32)
    b_row = tl.zeros([BT, BK], dtype=tl.float32)
    b_col = tl.zeros([BT, BK], dtype=tl.float32)
    b_err = tl.zeros([BT, BK], dtype=tl.float32)
    b_hdh = tl.zeros([BK, BK], dtype=tl.float32)
    for i_v in range((V + BV - 1) // BV):
        o_h, m_h = tile_at(i_ch, i_k, 0, i_v, K, 1, V, BK, BV)
        b_h = tl.load(h + o_h, mask=m_h, other=0.0)  # [BK, BV]
        b_dh = tl.load(dh + o_h, mask=m_h, other=0.0)  # [BK, BV]
        b_x = load_rows(x, t, end, i_hv, i_v, HV, V, BT, BV)  # [BT, BV]
        b_do = load_rows(do, t, end, i_hv, i_v, HV, V, BT, BV)  # [BT, BV]
        b_xT, b_hT, b_dhT = tl.trans(b_x), tl.trans(b_h), tl.trans(b_dh)
        b_dA = tl.dot(b_do, b_xT, b_dA, input_precision=PRECISION)
        b_row = tl.dot(b_do, b_hT, b_row, input_precision=PRECISION)
        b_col = tl.dot(b_x, b_dhT, b_col, input_precision=PRECISION)
        if DELTA:
            b_dv = load_rows(dv, t, end, i_hv, i_v, HV, V, BT, BV)
            b_dE = tl.dot(b_dv, b_xT, b_dE, input_precision=PRECISION)
            b_err = tl.dot(b_dv, b_hT, b_err, input_precision=PRECISION)
        if DG > 0:
            b_hdh = tl.dot(b_h, b_dhT, b_hdh, input_precision=PRECISION)
    b_hdh = tl.where(time_order(BK) == 0, b_hdh, 0.0)
    if DG == 1:  # noqa: SIM108
        b_kept = tl.sum(b_hdh)
    else:
        b_kept = tl.sum(b_hdh, axis=1)  # [BK]
    return scale * b_dA, b_dE, scale * b_row, b_col, b_err, b_kept


@triton.jit
def store_dbeta(dbeta, b_dE, b_beta, t, end, i_hv, i_k, HV: tl.constexpr):
    """From the diagonal of -dAkk, the sum over values of dv and the errors.

    dv has beta as a factor (the scan takes care that it is not 0). Every key
    tile finds the same.
    """
    BT: tl.constexpr = b_dE.shape[0]
    b_own = tl.where(time_order(BT) == 0, b_dE, 0.0)  # [BT, BT]
    b_dbeta = tl.sum(b_own, axis=1) / nonzero(b_beta)  # [BT]
    if i_k == 0:
        store_rows(dbeta, b_dbeta[:, None], t, end, i_hv, 0, HV, 1, BT, 1)


@triton.jit(do_not_specialize=["N", "T"])
def intra_bwd_kernel(
    q_in,
    k_in,
    k_out,
    row_in,
    row_undo,
    row_beta,
    total,
    G,
    g,
    do,
    x,
    dv,
    h,
    dh,
    dq,
    dk,
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
    """One chunk and key tile of one key head: gradients of q, k, g and beta.

    From the states that enter the chunks, h, and the gradients of those
    that leave them, dh. x is v, or for the delta rule the errors, of which
    beta x is written. The value heads of the key head are summed here, in
    fp32. dg of a gate a head is a sum over key channels, of which every key
    tile writes its part.

    A gate's gradient is a sum over the pairs of tokens that it stands
    between. Rows gain from it what columns lose, and pairs on one side must
    cancel: b_pairs adds up both, from operands that are rounded alike.

    With a gate a channel, e^G q and e^{G_C - G} k as the states meet them
    also meet each other, with a factor e^{G_C} of the channel too much,
    which is divided out. That takes a chunk whose decay is bounded;
    intra_bwd_far_kernel has the others.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    EXACT: tl.constexpr = do.dtype.element_ty == tl.float32
    HALVES: tl.constexpr = do.dtype.element_ty == tl.bfloat16
    BOUND: tl.constexpr = 8 if do.dtype.element_ty == tl.float16 else 100
    NG: tl.constexpr = HV // H
    i_c, i_h = tl.program_id(0) // (NK * H), tl.program_id(0) // NK % H
    i_k = tl.program_id(0) % NK
    t, end = chunk_span(i_c, cu_seqlens, N, T, BT)
    if t >= end:
        return
    if DG > 1:  # noqa: SIM102  (the kernel has one or the other)
        if not near(total, i_c, i_h, i_k, H, HV, K, BK, BOUND):
            return
    dtype = do.dtype.element_ty
    o_t = time_order(BT)
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    for i_g in range(NG):
        i_hv = i_h * NG + i_g
        i_ch = i_c.to(tl.int64) * HV + i_hv
        b_dA, b_dE, b_row, b_col, b_err, b_kept = products_bwd(
            do, x, dv, h, dh, scale, t, end, i_ch, i_hv, i_k,
            HV, K, V, BT, BK, BV, DG, DELTA, PRECISION,
        )  # fmt: skip

        # Through the scores: the diagonal, which no gate is in, by itself.
        if DELTA:
            b_beta = tl.load(slot_row(row_beta, i_c, i_hv, HV, BT)[0])  # [BT]
            if dbeta is not None:
                store_dbeta(dbeta, b_dE, b_beta, t, end, i_hv, i_k, HV)
        if DG > 0:
            b_own = tl.where(o_t == 0, b_dA, 0.0)  # [BT, BT]
            b_own = tl.sum(b_own, axis=1)  # [BT]
            if DELTA:
                b_own *= b_beta
            b_own = b_own[:, None]
        if DG == 1:
            b_in = tl.load(slot_row(row_in, i_c, i_hv, HV, BT)[0])  # [BT]
            b_undo = tl.load(slot_row(row_undo, i_c, i_hv, HV, BT)[0])  # [BT]
            if DELTA:
                b_undo *= b_beta
            b_total = tl.load(total + i_ch)
            p_G, p_last = slot_row(G, i_c, i_hv, HV, BT)
            b_D = b_in[:, None] * b_undo[None, :]  # [BT, BT]
            if b_total < 2.0**-100:
                b_D = decay_matrix(p_G) * b_undo[None, :]
            b_dA *= b_D
            b_dE *= -b_D
        elif DELTA:
            b_dA *= b_beta[None, :]
            b_dE *= -b_beta[None, :]
        m_A = o_t > 0 if DG > 0 else o_t >= 0
        b_dA = tl.where(m_A, b_dA, 0.0).to(dtype)  # [BT, BT]
        b_dE = tl.where(o_t > 0, b_dE, 0.0).to(dtype)  # [BT, BT]

        # The states' decays, and who reads them: of a gate a channel, q and
        # k of the value head.
        i_x, HX = i_h, H
        if DG == 1:
            b_decay = b_in[:, None]  # [BT, 1]
            b_col *= decay_to_exit(b_decay, b_total, p_G, p_last)
            b_kept = b_kept * b_total
        elif DG > 1:
            i_x, HX = i_hv, HV
            o_k = i_k * BK + tl.arange(0, BK)
            p_total = total + i_ch * K + o_k
            b_total = tl.load(p_total, mask=o_k < K, other=1.0)  # [BK]
            b_decay = b_total[None, :]
            b_undo = 1.0 / b_decay  # [1, BK]
            b_kept *= b_total
        b_q = load_rows(q_in, t, end, i_x, i_k, HX, K, BT, BK)  # [BT, BK]
        b_k = load_rows(k_out, t, end, i_x, i_k, HX, K, BT, BK)  # [BT, BK]
        if DG > 0:
            b_row *= b_decay
        b_row = tl.dot(b_dA, b_k, b_row, input_precision=PRECISION)
        b_qT = tl.trans(b_q)  # [BK, BT]
        b_c = tl.dot(b_qT, b_dA, input_precision=PRECISION)  # [BK, BT]
        if DG > 0:
            b_pairs = b_q * b_row  # [BT, BK]
        if DELTA:
            b_kr = b_k
            if DG > 1:
                b_kr = load_rows(k_in, t, end, i_x, i_k, HX, K, BT, BK)
            b_err = -b_err
            if DG > 0:
                b_err *= b_decay
            b_err = tl.dot(b_dE, b_k, b_err, input_precision=PRECISION)
            b_krT = tl.trans(b_kr)  # [BK, BT]
            b_c = tl.dot(b_krT, b_dE, b_c, input_precision=PRECISION)
            if DG > 1:
                b_pairs += b_kr * b_err
            b_col *= b_beta[:, None]
        b_c = tl.trans(b_c)  # [BT, BK]
        if DG == 1 and DELTA:
            b_pairs += b_k * (b_err - b_c)
        elif DG > 0:
            b_pairs -= b_k * b_c
        if DG > 0:
            b_w = b_k * b_col  # [BT, BK]

        if DG == 1:
            b_p, b_w = tl.sum(b_pairs, axis=1), tl.sum(b_w, axis=1)  # [BT]
            b_dg = tl.where(o_t <= 0, b_p[None, :], b_w[None, :])  # [BT, BT]
            b_dg = (tl.sum(b_dg, axis=1) + b_kept)[:, None]  # [BT, 1]
            store_rows(dg, b_dg, t, end, i_hv, i_k, HV, NK, BT, 1)
        elif DG > 1:
            b_dg = summed_rows(o_t <= 0, b_pairs * b_undo, HALVES)  # [BT, BK]
            b_dg += summed_rows(o_t > 0, b_w, HALVES) + b_kept[None, :]
            store_rows(dg, b_dg, t, end, i_hv, i_k, HV, K, BT, BK)

        if DG > 0:
            b_row += b_own * b_k
            b_c += b_own * b_q
        if DG > 1:
            b_g = load_rows(g, t, end, i_hv, i_k, HV, K, BT, BK)  # [BT, BK]
            b_high, b_low = split_gates(b_g)  # [BT, BK]
            b_G = summed_gates(o_t < 0, b_high, b_low, EXACT)  # G_C - G
            b_row *= tl.exp2(-b_G)
            b_err *= tl.exp2(-b_G)
            b_col *= tl.exp2(b_G)
            b_c *= b_undo * tl.exp2(b_G)
        b_dq += b_row
        b_dk += b_col + b_c
        if DELTA:
            b_dk += b_err

    store_rows(dq, b_dq, t, end, i_h, i_k, H, K, BT, BK)
    store_rows(dk, b_dk, t, end, i_h, i_k, H, K, BT, BK)


@triton.jit(do_not_specialize=["programs", "N", "T"])
def intra_bwd_far_kernel(
    q,
    k,
    row_beta,
    total,
    g,
    do,
    x,
    dv,
    h,
    dh,
    dq,
    dk,
    dg,
    dbeta,
    cu_seqlens,
    scale,
    programs,
    N,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """intra_bwd_kernel for a gate a channel, and the chunks it leaves out.

    Without a bound on the decays: their factors lead from both sides to a
    border between two tokens, level by level (tile.decays_of_pairs).
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    LEVELS: tl.constexpr = 4 + (BT >= 32) + (BT >= 64)
    EXACT: tl.constexpr = do.dtype.element_ty == tl.float32
    HALVES: tl.constexpr = do.dtype.element_ty == tl.bfloat16
    BOUND: tl.constexpr = 8 if do.dtype.element_ty == tl.float16 else 100
    NG: tl.constexpr = HV // H
    dtype = do.dtype.element_ty
    o_t = time_order(BT)
    for i in range(tl.program_id(0), programs, tl.num_programs(0)):
        i_x = tl.cast(i, tl.int32)
        i_c, i_h, i_k = i_x // (NK * H), i_x // NK % H, i_x % NK
        t, end = chunk_span(i_c, cu_seqlens, N, T, BT)
        bounded = t >= end
        if t < end:
            bounded = near(total, i_c, i_h, i_k, H, HV, K, BK, BOUND)
        if bounded == 0:
            b_k = load_rows(k, t, end, i_h, i_k, H, K, BT, BK)  # [BT, BK]
            b_q = load_rows(q, t, end, i_h, i_k, H, K, BT, BK)  # [BT, BK]
            b_dq = tl.zeros([BT, BK], dtype=tl.float32)
            b_dk = tl.zeros([BT, BK], dtype=tl.float32)
            for i_g in range(NG):
                i_hv = i_h * NG + i_g
                i_ch = i_c.to(tl.int64) * HV + i_hv
                b_dA, b_dE, b_row, b_col, b_err, b_kept = products_bwd(
                    do, x, dv, h, dh, scale, t, end, i_ch, i_hv, i_k,
                    HV, K, V, BT, BK, BV, K, DELTA, PRECISION,
                )  # fmt: skip
                if DELTA:
                    b_beta = tl.load(
                        slot_row(row_beta, i_c, i_hv, HV, BT)[0]
                    )  # [BT]
                    if dbeta is not None:
                        store_dbeta(dbeta, b_dE, b_beta, t, end, i_hv, i_k, HV)
                    b_dA *= b_beta[None, :]
                    b_dE *= -b_beta[None, :]
                    b_col *= b_beta[:, None]
                b_g = load_rows(
                    g, t, end, i_hv, i_k, HV, K, BT, BK
                )  # [BT, BK]
                b_high, b_low = split_gates(b_g)  # [BT, BK]
                b_in = tl.exp2(summed_gates(o_t >= 0, b_high, b_low, EXACT))
                b_row *= b_in
                b_err *= -b_in
                b_col *= tl.exp2(summed_gates(o_t < 0, b_high, b_low, EXACT))
                b_w = b_k * b_col  # [BT, BK]

                # Through the scores: the diagonal, which no gate is in, by itself.
                b_own = tl.sum(tl.where(o_t == 0, b_dA, 0.0), axis=1)[:, None]
                b_dA = tl.where(o_t > 0, b_dA, 0.0).to(dtype)  # [BT, BT]
                b_dE = tl.where(o_t > 0, b_dE, 0.0).to(dtype)  # [BT, BT]
                b_pairs = b_q * b_row + b_k * b_err
                for level in range(1, LEVELS + 1):
                    b_d, m_A = decays_of_pairs(b_high, b_low, level, EXACT)
                    b_qd, b_kd = (b_q * b_d).to(dtype), (b_k * b_d).to(dtype)
                    b_A = tl.where(m_A, b_dA, 0.0)
                    b_r = tl.dot(b_A, b_kd, input_precision=PRECISION)
                    b_qT = tl.trans(b_qd)  # [BK, BT]
                    b_c = tl.dot(b_qT, b_A, input_precision=PRECISION)
                    b_row += b_d * b_r
                    b_pairs += b_qd * b_r
                    if DELTA:
                        b_A = tl.where(m_A, b_dE, 0.0)
                        b_r = tl.dot(b_A, b_kd, input_precision=PRECISION)
                        b_kT = tl.trans(b_kd)  # [BK, BT]
                        b_c = tl.dot(b_kT, b_A, b_c, input_precision=PRECISION)
                        b_err += b_d * b_r
                        b_pairs += b_kd * b_r
                    b_c = tl.trans(b_c)  # [BT, BK]
                    b_col += b_d * b_c
                    b_pairs -= b_kd * b_c

                b_dq += b_row + b_own * b_k
                b_dk += b_col + b_err + b_own * b_q
                b_dg = summed_rows(o_t <= 0, b_pairs, HALVES)  # [BT, BK]
                b_dg += summed_rows(o_t > 0, b_w, HALVES)
                b_dg += (
                    tl.exp(tl.sum(b_g.to(tl.float32), axis=0))
                    * b_kept[None, :]
                )
                store_rows(dg, b_dg, t, end, i_hv, i_k, HV, K, BT, BK)

            store_rows(dq, b_dq, t, end, i_h, i_k, H, K, BT, BK)
            store_rows(dk, b_dk, t, end, i_h, i_k, H, K, BT, BK)
