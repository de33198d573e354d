"""Inside each chunk, all chunks at once: the gradients of its inputs."""

import triton
import triton.language as tl

from fastweights.kernels import tile
from fastweights.kernels.recurrence import gates


@triton.jit
def is_unfactorable(fold_levels, i_slot, i_h, META: tl.constexpr):
    """Whether a value head of key head i_h has an unfactorable chunk here."""
    NG: tl.constexpr = META.HV // META.QK_HEADS
    unfactorable = 0
    for i_g in tl.static_range(NG):
        i_sh = (i_slot.to(tl.int64) * META.QK_HEADS + i_h) * NG + i_g
        unfactorable |= tl.load(fold_levels + i_sh)
    return unfactorable != 0


@triton.jit
def sum_over_values(grad_inputs, place, i_sh, i_k, META: tl.constexpr):
    """The sums over values, before any decay, scale, beta and mask.

    Returns the scores' dAqk and -dAek, [BT, BT]; what passes through the
    states, [BT, BK], to q, to k as it is written and, negated, to e, the key
    that erases (k itself without META.HAS_ERASE_KEY); and a gate's dtotal,
    h . dh [BK], or for a gate per head its sum. -dAek and e's are 0 for the
    additive rule. h . dh is the diagonal of a product: a tile that a product
    and a sum read has one buffer, which Triton fills again before the product
    is done.
    """
    BT: tl.constexpr = META.BT
    BK: tl.constexpr = META.BK
    BV: tl.constexpr = META.BV
    VALUES: tl.constexpr = META.value_tiles
    PRECISION: tl.constexpr = META.PRECISION
    b_dAqk = tl.zeros([BT, BT], dtype=tl.float32)
    b_dAek = tl.zeros([BT, BT], dtype=tl.float32)
    b_dq_hv = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk_hv = tl.zeros([BT, BK], dtype=tl.float32)
    b_de = tl.zeros([BT, BK], dtype=tl.float32)
    b_hdh = tl.zeros([BK, BK], dtype=tl.float32)
    for i_v in range(META.NV):
        o_h, m_h = tile.tile_at(i_sh, i_k, 0, i_v, META.K, 1, META.V, BK, BV)
        b_h = tl.load(grad_inputs.h + o_h, mask=m_h, other=0.0)  # [BK, BV]
        b_dh = tl.load(grad_inputs.dh + o_h, mask=m_h, other=0.0)  # [BK, BV]
        b_u = tile.load_rows(grad_inputs.u, place, i_v, VALUES)  # [BT, BV]
        b_do = tile.load_rows(grad_inputs.do, place, i_v, VALUES)  # [BT, BV]
        b_uT, b_hT, b_dhT = tl.trans(b_u), tl.trans(b_h), tl.trans(b_dh)
        b_dAqk = tl.dot(b_do, b_uT, b_dAqk, input_precision=PRECISION)
        b_dq_hv = tl.dot(b_do, b_hT, b_dq_hv, input_precision=PRECISION)
        b_dk_hv = tl.dot(b_u, b_dhT, b_dk_hv, input_precision=PRECISION)
        if META.DELTA:
            b_dv = tile.load_rows(
                grad_inputs.dv, place, i_v, VALUES
            )  # [BT, BV]
            b_dAek = tl.dot(b_dv, b_uT, b_dAek, input_precision=PRECISION)
            b_de = tl.dot(b_dv, b_hT, b_de, input_precision=PRECISION)
        if META.GATED:
            b_hdh = tl.dot(b_h, b_dhT, b_hdh, input_precision=PRECISION)
    b_hdh = tl.where(tile.token_lag(BK) == 0, b_hdh, 0.0)
    if META.PER_HEAD:  # noqa: SIM108
        b_dtotal = tl.sum(b_hdh)
    else:
        b_dtotal = tl.sum(b_hdh, axis=1)  # [BK]
    return b_dAqk, b_dAek, b_dq_hv, b_dk_hv, b_de, b_dtotal


@triton.jit
def store_dbeta(dbeta, b_dAek, b_beta, place, i_k, META: tl.constexpr):
    """Store dbeta, from the diagonal of -dAek: sums of dv times the errors.

    dv has beta as a factor (the scan sees to it that it is not 0). Every key
    tile finds the same, and the first one stores it.
    """
    NUMBERS: tl.constexpr = META.number_tiles
    if i_k == 0:
        m_diag = tile.token_lag(META.BT) == 0
        b_diag = tl.where(m_diag, b_dAek, 0.0)  # [BT, BT]
        b_dbeta = tl.sum(b_diag, axis=1) / tile.away_from_zero(b_beta)  # [BT]
        tile.store_rows(dbeta, b_dbeta[:, None], place, 0, NUMBERS)


@triton.jit
def intra_bwd_kernel(
    g, qk, decays, fold_levels, grad_inputs, grads, call, META: tl.constexpr
):
    """One chunk and key tile of one key head: dq, dk, dg, dbeta, de.

    It reads the states that enter the chunks, h, and the gradients of those
    that leave them, dh. u is v, or for the delta rule the errors, of which
    beta u is written. The value heads of the key head are summed here, in
    fp32. Every key tile writes its part of the gradient of a gate per head,
    dg_parts [slots, HV, NK, 2, BT], and of total, dtotal [slots, HV, NK];
    gate_bwd_kernel adds them up.

    A gate's gradient is a sum over the pairs of tokens that it stands
    between. Rows gain from it what columns lose, and pairs on one side must
    cancel: b_pairs adds up both, from operands that are rounded alike.

    With a gate per channel q_in, e_in and k_out are seen from where half of
    the channel's decay is done (intra_fwd_kernel), and so are the gradients
    until the end. intra_bwd_unfactorable_kernel has the other chunks.
    """
    PRECISION: tl.constexpr = META.PRECISION
    GATED: tl.constexpr = META.GATED
    PER_HEAD: tl.constexpr = META.PER_HEAD
    PER_CHANNEL: tl.constexpr = META.PER_CHANNEL
    DELTA: tl.constexpr = META.DELTA
    HAS_ERASE_KEY: tl.constexpr = META.HAS_ERASE_KEY
    KEYS: tl.constexpr = META.key_tiles
    HV_KEYS: tl.constexpr = META.hv_key_tiles
    H: tl.constexpr = META.QK_HEADS
    HV: tl.constexpr = META.HV
    BT: tl.constexpr = META.BT
    BK: tl.constexpr = META.BK
    NK: tl.constexpr = META.NK
    QK_TILES: tl.constexpr = HV_KEYS if PER_CHANNEL else KEYS
    dtype: tl.constexpr = grad_inputs.do.dtype.element_ty
    IS_FP32: tl.constexpr = dtype == tl.float32
    IS_BF16: tl.constexpr = dtype == tl.bfloat16
    NG: tl.constexpr = HV // H
    i_slot, i_h = tl.program_id(0) // (NK * H), tl.program_id(0) // NK % H
    i_k = tl.program_id(0) % NK
    t, end = tile.chunk_span(i_slot, call.cu_seqlens, call.N, call.T, BT)
    if t >= end:
        return
    if PER_CHANNEL:
        if is_unfactorable(fold_levels, i_slot, i_h, META):
            return
    b_lag = tile.token_lag(BT)
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    for i_g in range(NG):
        i_hv = i_h * NG + i_g
        i_sh = i_slot.to(tl.int64) * HV + i_hv
        place = (t, end, i_hv)
        b_dAqk, b_dAek, b_dq_hv, b_dk_hv, b_de, b_dtotal = sum_over_values(
            grad_inputs, place, i_sh, i_k, META
        )

        # Through the scores: the diagonal, which no gate is in, by itself.
        b_weight = tl.full([BT], 1.0, dtype=tl.float32)  # of what is written
        if decays.row_beta is not None:
            b_weight = tl.load(tile.slot_row(decays.row_beta, i_sh, BT))
            if grads.dbeta is not None:
                store_dbeta(grads.dbeta, b_dAek, b_weight, place, i_k, META)
        if GATED:
            b_diag = tl.where(b_lag == 0, b_dAqk, 0.0)  # [BT, BT]
            b_diag = (call.scale * b_weight * tl.sum(b_diag, axis=1))[:, None]
        if PER_HEAD:
            b_row_in = tl.load(tile.slot_row(decays.row_in, i_sh, BT))  # [BT]
            b_row_out = tl.load(tile.slot_row(decays.row_out, i_sh, BT))
            b_total = tl.load(decays.total + i_sh)
            b_outer, b_inner = gates.split_decay(b_total, dtype)
            b_D = b_row_in[:, None] * (b_row_out * b_weight)[None, :]
            if gates.is_factorable(b_total, dtype) == 0:
                b_G = tl.load(tile.slot_row(decays.G, i_sh, BT))  # [BT]
                b_D = gates.decay_matrix(b_G)
                b_D *= b_weight[None, :]
            b_dAqk *= call.scale * b_D
            b_dAek *= -b_D
        else:
            b_dAqk *= call.scale * b_weight[None, :]
            if HAS_ERASE_KEY:  # not as Triton negates: ptxas waits for all
                b_dAek = tl.fma(b_dAek, -1.0, -0.0)
            else:
                b_dAek *= -b_weight[None, :]
        m_A = b_lag > 0 if GATED else b_lag >= 0
        b_dAqk = tl.where(m_A, b_dAqk, 0.0).to(dtype)  # [BT, BT]
        b_dAek = tl.where(b_lag > 0, b_dAek, 0.0).to(dtype)  # [BT, BT]

        # The states' decays, and who reads them: of a gate per channel, q and
        # k of the value head.
        place_of_qk = place if PER_CHANNEL else (t, end, i_h)
        b_write = b_weight[:, None]
        if PER_HEAD:
            b_decay = (b_outer * b_row_in)[:, None]  # [BT, 1]
            b_write *= (b_outer * b_row_out)[:, None]
            b_dtotal *= tl.exp2(b_total)
        elif PER_CHANNEL:
            o_k = i_k * BK + tl.arange(0, BK)
            p_total = decays.total + i_sh * META.K + o_k
            b_total = tl.load(p_total, mask=o_k < META.K, other=0.0)  # [BK]
            b_dtotal *= tl.exp2(b_total)
            b_decay = tl.exp2(0.5 * b_total)[None, :]
            b_dk_hv *= b_decay
        if decays.row_beta is not None or PER_HEAD:
            b_dk_hv *= b_write
        b_q = tile.load_rows(qk.q_in, place_of_qk, i_k, QK_TILES)  # [BT, BK]
        b_k = tile.load_rows(qk.k_out, place_of_qk, i_k, QK_TILES)  # [BT, BK]
        b_dq_hv *= (call.scale * b_decay) if GATED else call.scale
        # b_dq_hv last: Triton lays the sums over b_pairs out as what the last
        # product leads to, and b_dkT is transposed.
        b_qT = tl.trans(b_q)  # [BK, BT]
        b_dkT = tl.dot(b_qT, b_dAqk, input_precision=PRECISION)  # [BK, BT]
        if DELTA:
            b_e_in = b_k
            if PER_CHANNEL or HAS_ERASE_KEY:
                b_e_in = tile.load_rows(qk.e_in, place, i_k, HV_KEYS)
            b_e_inT = tl.trans(b_e_in)  # [BK, BT]
            b_dkT = tl.dot(b_e_inT, b_dAek, b_dkT, input_precision=PRECISION)
            b_de *= -b_decay if GATED else -1.0
            b_de = tl.dot(b_dAek, b_k, b_de, input_precision=PRECISION)
        b_dq_hv = tl.dot(b_dAqk, b_k, b_dq_hv, input_precision=PRECISION)
        if GATED:
            b_pairs = b_q * b_dq_hv  # [BT, BK]
            b_dq_hv += b_diag * b_k
        if DELTA and PER_CHANNEL:
            b_pairs += b_e_in * b_de
        b_dk_scores = tl.trans(b_dkT)  # [BT, BK]
        if DELTA and HAS_ERASE_KEY and PER_HEAD:
            b_pairs += b_e_in * b_de
        if PER_HEAD and DELTA and not HAS_ERASE_KEY:
            b_pairs += b_k * (b_de - b_dk_scores)
        elif GATED:
            b_pairs = tl.fma(-b_k.to(tl.float32), b_dk_scores, b_pairs)
        if GATED:
            b_w = b_k * b_dk_hv  # [BT, BK]
            b_dk_scores += b_diag * b_q

        if PER_HEAD:
            i_shk = i_sh * NK + i_k
            o_c = i_shk * 2 * BT + tl.arange(0, BT)
            b_sums = tl.reduce((b_pairs, b_w), 1, tile.add_pairs)
            tl.store(grads.dg_parts + o_c, b_sums[0])
            tl.store(grads.dg_parts + BT + o_c, b_sums[1])
            tl.store(grads.dtotal + i_shk, b_dtotal)
        elif PER_CHANNEL:
            b_dg = gates.sum_rows(b_lag <= 0, b_pairs, IS_BF16)  # [BT, BK]
            b_dg += gates.sum_rows(b_lag > 0, b_w, IS_BF16) + b_dtotal[None, :]
            tile.store_rows(grads.dg, b_dg, place, i_k, HV_KEYS)

            b_g = tile.load_rows(g, place, i_k, HV_KEYS)  # [BT, BK]
            b_high, b_low = gates.split_gates(b_g)  # [BT, BK]
            b_G = gates.sum_gates(b_lag < 0, b_high, b_low, IS_FP32)  # G_C - G
            # Loaded again, or it would take registers all the way here.
            b_total = tl.load(p_total, mask=o_k < META.K, other=0.0)  # [BK]
            b_G -= (0.5 * b_total)[None, :]  # G_p - G
            b_dq_hv *= tl.exp2(-b_G)
            b_de *= tl.exp2(-b_G)
            b_dk_hv *= tl.exp2(b_G)
            b_dk_scores *= tl.exp2(b_G)
        b_dq += b_dq_hv
        b_dk += b_dk_hv + b_dk_scores
        if HAS_ERASE_KEY:
            tile.store_rows(grads.de, b_de, place, i_k, HV_KEYS)
        elif DELTA:
            b_dk += b_de

    tile.store_rows(grads.dq, b_dq, (t, end, i_h), i_k, KEYS)
    tile.store_rows(grads.dk, b_dk, (t, end, i_h), i_k, KEYS)


@triton.jit
def gate_bwd_kernel(dg_parts, dtotal, dg, call, META: tl.constexpr):
    """One chunk of one value head: dg of a gate per head [T, HV].

    dg_t is the sum of pairs_i over i >= t, of w_j over j < t, and dtotal.
    dg_parts has pairs_i, what row i reads from earlier tokens less what its
    column gives to later ones, and w_j, what token j writes as it arrives at
    the exit. dtotal is what the entering state's decay gives.
    """
    NUMBERS: tl.constexpr = META.number_tiles
    BT: tl.constexpr = META.BT
    NK: tl.constexpr = META.NK
    i_slot, i_hv = tl.program_id(0) // META.HV, tl.program_id(0) % META.HV
    t, end = tile.chunk_span(i_slot, call.cu_seqlens, call.N, call.T, BT)
    if t >= end:
        return
    o_c = tl.arange(0, BT)
    b_pairs = tl.zeros([BT], dtype=tl.float32)
    b_before = tl.zeros([BT], dtype=tl.float32)
    b_dg = tl.zeros([BT], dtype=tl.float32)
    for i_k in tl.static_range(NK):
        i_shk = tl.program_id(0).to(tl.int64) * NK + i_k
        p_part = dg_parts + i_shk * 2 * BT + o_c
        b_pairs += tl.load(p_part)
        b_before += tl.load(p_part + BT - 1, mask=o_c > 0, other=0.0)
        b_dg += tl.load(dtotal + i_shk)
    b_dg += tl.cumsum(b_before, axis=0)
    b_dg += tl.cumsum(b_pairs, axis=0, reverse=True)
    tile.store_rows(dg, b_dg[:, None], (t, end, i_hv), 0, NUMBERS)


@triton.jit
def add_grads(
    sums, dscores, keys, factors, m_A, dtype: tl.constexpr, META: tl.constexpr
):
    """Add to sums what passes through the scores in m_A, with their factors.

    The sums are b_dq_hv of dq; b_dk_hv of dk; b_de of de, whose part
    without it is b_dk_hv's; and b_pairs of the gates between two tokens: what
    rows gain less what columns lose, from equally rounded operands. keys are
    q, k and e, factors those of the scores' rows and columns.
    """
    b_dq_hv, b_dk_hv, b_de, b_pairs = sums
    b_dAqk, b_dAek = dscores
    b_row, b_col = factors
    PRECISION: tl.constexpr = META.PRECISION
    b_q, b_k, b_e = keys
    b_kc = (b_k * b_col).to(dtype)  # [BT, BK]
    b_qr = (b_q * b_row).to(dtype)  # [BT, BK]
    b_A = tl.where(m_A, b_dAqk, 0.0).to(dtype)
    b_dqr = tile.dot(b_A, b_kc, None, PRECISION, True)  # [BT, BK]
    b_dq_hv += b_row * b_dqr
    b_pairs += b_qr * b_dqr
    b_qT = tl.trans(b_qr)  # [BK, BT]
    b_dkc = tile.dot(b_qT, b_A, None, PRECISION, True)  # [BK, BT]
    if META.DELTA:
        b_er = (b_e * b_row).to(dtype)  # [BT, BK]
        b_A = tl.where(m_A, b_dAek, 0.0).to(dtype)
        b_der = tile.dot(b_A, b_kc, None, PRECISION, True)  # [BT, BK]
        if META.HAS_ERASE_KEY:
            b_de += b_row * b_der
        else:
            b_dk_hv += b_row * b_der
        b_pairs += b_er * b_der
        b_eT = tl.trans(b_er)  # [BK, BT]
        b_dkc = tl.dot(b_eT, b_A, b_dkc, input_precision=PRECISION)
    b_dkc = tl.trans(tile.by_columns(b_dkc, True))  # [BT, BK]
    b_dk_hv += b_col * b_dkc
    b_pairs -= b_kc * b_dkc
    return b_dq_hv, b_dk_hv, b_de, b_pairs


@triton.jit
def intra_bwd_unfactorable_kernel(
    inputs, decays, fold_levels, grad_inputs, grads, call, META: tl.constexpr
):
    """intra_bwd_kernel for a gate per channel, on unfactorable chunks.

    The scores' gradients pass level by level, as the scores did
    (intra.add_scores_by_level). It has 8 warps: whatever leads to a product is
    by_columns, or it would be computed twice.
    """
    DELTA: tl.constexpr = META.DELTA
    HAS_ERASE_KEY: tl.constexpr = META.HAS_ERASE_KEY
    KEYS: tl.constexpr = META.key_tiles
    HV_KEYS: tl.constexpr = META.hv_key_tiles
    H: tl.constexpr = META.QK_HEADS
    HV: tl.constexpr = META.HV
    BT: tl.constexpr = META.BT
    BK: tl.constexpr = META.BK
    NK: tl.constexpr = META.NK
    dtype: tl.constexpr = grad_inputs.do.dtype.element_ty
    IS_FP32: tl.constexpr = dtype == tl.float32
    IS_BF16: tl.constexpr = dtype == tl.bfloat16
    NG: tl.constexpr = HV // H
    LEVELS: tl.constexpr = gates.num_levels(BT)
    FOLDED_DTYPE: tl.constexpr = tl.float32 if dtype == tl.float16 else dtype
    i_slot, i_h = tl.program_id(0) // (NK * H), tl.program_id(0) // NK % H
    i_k = tl.program_id(0) % NK
    if is_unfactorable(fold_levels, i_slot, i_h, META) == 0:
        return
    t, end = tile.chunk_span(i_slot, call.cu_seqlens, call.N, call.T, BT)
    b_lag = tile.token_lag(BT)
    place_of_key = (t, end, i_h)
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    for i_g in range(NG):
        i_hv = i_h * NG + i_g
        i_sh = i_slot.to(tl.int64) * HV + i_hv
        place = (t, end, i_hv)
        # All loads first: none goes ahead of a barrier by itself.
        b_g = tile.load_rows(inputs.g, place, i_k, HV_KEYS)  # [BT, BK]
        b_k = tile.load_rows(inputs.k, place_of_key, i_k, KEYS)  # [BT, BK]
        b_q = tile.load_rows(inputs.q, place_of_key, i_k, KEYS)  # [BT, BK]
        b_e = b_k
        if HAS_ERASE_KEY:
            b_e = tile.load_rows(inputs.e, place, i_k, HV_KEYS)  # [BT, BK]
        o_k = i_k * BK + tl.arange(0, BK)
        p_total = decays.total + i_sh * META.K + o_k
        b_total = tl.load(p_total, mask=o_k < META.K, other=0.0)  # [BK]
        fold_level = tl.maximum(tl.load(fold_levels + i_sh), 1)
        if decays.row_beta is not None:
            b_beta = tl.load(tile.slot_row(decays.row_beta, i_sh, BT))  # [BT]
        b_dAqk, b_dAek, b_dq_hv, b_dk_hv, b_de, b_dtotal = sum_over_values(
            grad_inputs, place, i_sh, i_k, META
        )
        b_dAqk = tile.by_columns(b_dAqk, True)
        b_dAek = tile.by_columns(b_dAek, True)
        b_dq_hv = tile.by_columns(b_dq_hv, True)
        b_dk_hv = tile.by_columns(b_dk_hv, True)
        b_de = tile.by_columns(b_de, True)
        if HAS_ERASE_KEY:
            b_dAek = tl.fma(b_dAek, -1.0, -0.0)  # see intra_bwd_kernel
        elif DELTA:
            if grads.dbeta is not None:
                store_dbeta(grads.dbeta, b_dAek, b_beta, place, i_k, META)
            b_dAqk *= b_beta[None, :]
            b_dAek *= -b_beta[None, :]
            b_dk_hv *= b_beta[:, None]
        b_high, b_low = gates.split_gates(b_g)  # [BT, BK]
        b_G = gates.sum_gates(b_lag >= 0, b_high, b_low, IS_FP32, True)
        b_in = tl.exp2(b_G)
        b_dAqk *= call.scale
        b_dq_hv *= call.scale * b_in
        b_de *= -b_in
        b_G = gates.sum_gates(b_lag < 0, b_high, b_low, IS_FP32, True)
        b_dk_hv *= tl.exp2(b_G)
        b_w = b_k * b_dk_hv  # [BT, BK]
        b_pairs = b_q * b_dq_hv + b_e * b_de
        b_dg = gates.sum_rows(b_lag > 0, b_w, IS_BF16, True)
        b_dg += (tl.exp2(b_total) * b_dtotal)[None, :]

        # Through the scores, the diagonal by itself.
        b_diag = tl.sum(tl.where(b_lag == 0, b_dAqk, 0.0), axis=1)[:, None]
        b_dq_hv += b_diag * b_k
        b_dk_hv += b_diag * b_q
        if not HAS_ERASE_KEY:
            b_dk_hv += b_de
        b_dAqk = tl.where(b_lag > 0, b_dAqk, 0.0).to(dtype)  # [BT, BT]
        b_dAek = tl.where(b_lag > 0, b_dAek, 0.0).to(dtype)  # [BT, BT]
        b_row, b_col, m_A, first = gates.folded_factors(
            b_high, b_low, fold_level, dtype, True
        )
        sums, dscores = (b_dq_hv, b_dk_hv, b_de, b_pairs), (b_dAqk, b_dAek)
        keys = b_q, b_k, b_e
        factors = b_row, b_col
        sums = add_grads(sums, dscores, keys, factors, m_A, FOLDED_DTYPE, META)
        for level in range(first, LEVELS + 1):
            b_D, m_second = gates.to_middle(
                b_high, b_low, level, IS_FP32, True
            )
            b_d = tl.exp2(b_D)
            m_A = gates.pairs_across(level, BT)
            sums = add_grads(sums, dscores, keys, (b_d, b_d), m_A, dtype, META)
        b_dq_hv, b_dk_hv, b_de, b_pairs = sums

        b_dq += b_dq_hv
        b_dk += b_dk_hv
        if HAS_ERASE_KEY:
            tile.store_rows(grads.de, b_de, place, i_k, HV_KEYS)
        b_dg += gates.sum_rows(b_lag <= 0, b_pairs, IS_BF16, True)
        tile.store_rows(grads.dg, b_dg, place, i_k, HV_KEYS)

    tile.store_rows(grads.dq, b_dq, place_of_key, i_k, KEYS)
    tile.store_rows(grads.dk, b_dk, place_of_key, i_k, KEYS)
