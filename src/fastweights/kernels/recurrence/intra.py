"""Inside each chunk, all chunks at once: decays, scores, inverse."""

import triton
import triton.language as tl

from fastweights.kernels import tile
from fastweights.kernels.recurrence import gates, inverse


@triton.jit
def add_scores(
    sums,
    keys,
    factors,
    m_A,
    dtype: tl.constexpr,
    META: tl.constexpr,
):
    """Add a tile's part of the scores in m_A: to b_Aqk, and to b_Aek.

    That is (q b_row) (k b_col)^T and (e b_row) (k b_col)^T, where keys are one
    tile of q, k and e, [BT, BK]; e is the key that erases, erase_key or k.
    Only the delta rule has Aek. Factors b_row and b_col are [BT, BK], the two
    sums [BT, BT].
    """
    PRECISION: tl.constexpr = META.PRECISION
    b_Aqk, b_Aek = sums
    b_q, b_k, b_e = keys
    b_row, b_col = factors
    b_kT = tl.trans((b_k * b_col).to(dtype))  # [BK, BT]
    b_qr = (b_q * b_row).to(dtype)  # [BT, BK]
    b_A = tl.dot(b_qr, b_kT, input_precision=PRECISION)
    b_Aqk += tl.where(m_A, b_A, 0.0)  # [BT, BT]
    if META.DELTA:
        b_er = (b_e * b_row).to(dtype)  # [BT, BK]
        b_A = tl.dot(b_er, b_kT, input_precision=PRECISION)
        b_Aek += tl.where(m_A, b_A, 0.0)  # [BT, BT]
    return b_Aqk, b_Aek


@triton.jit
def add_scores_by_level(
    sums, keys, b_high, b_low, fold_level, META: tl.constexpr
):
    """Add a tile's scores [BT, BT] at any gates, level by level.

    gates.folded_factors has the first pairs; then come those with a token in
    each half of a block of twice as many rows, and so on. They are seen from
    the border of the halves, where no factor is above 1.
    """
    b_k = keys[1]
    BT: tl.constexpr = META.BT
    dtype: tl.constexpr = b_k.dtype
    IS_FP32: tl.constexpr = dtype == tl.float32
    FOLDED_DTYPE: tl.constexpr = tl.float32 if dtype == tl.float16 else dtype
    b_row, b_col, m_A, first = gates.folded_factors(
        b_high, b_low, fold_level, dtype
    )
    sums = add_scores(sums, keys, (b_row, b_col), m_A, FOLDED_DTYPE, META)
    for level in range(first, gates.num_levels(BT) + 1):
        b_D, m_second = gates.to_middle(b_high, b_low, level, IS_FP32)
        b_d = tl.exp2(b_D)
        m_A = gates.pairs_across(level, BT)
        sums = add_scores(sums, keys, (b_d, b_d), m_A, dtype, META)
    return sums


@triton.jit
def invert_and_store(b_Aqk, b_Aek, b_beta, scores, place, META: tl.constexpr):
    """Store Aqk, and for the delta rule R, from scores that have their decays.

    Returns a bound on the tokens' steps beta |k|^2; 0 with a key that erases.
    """
    BT: tl.constexpr = META.BT
    SCORES: tl.constexpr = META.score_tiles
    PRECISION: tl.constexpr = META.PRECISION
    b_lag = tile.token_lag(BT)
    if scores.Aqk is not None:
        b_Aqk = tl.where(b_lag >= 0, b_Aqk, 0.0)  # [BT, BT]
        tile.store_rows(scores.Aqk, b_Aqk, place, 0, SCORES)
    step_bound = 0.0
    if scores.R is not None:
        b_Aek = tl.where(b_lag >= 0, b_Aek, 0.0)  # [BT, BT]
        if META.HAS_ERASE_KEY:
            b_R = inverse.checked_inverse(b_Aek, PRECISION)
        else:
            largest = tl.max(tl.abs(b_Aek))
            step_bound = largest * tl.max(
                tl.where(b_beta >= 0.0, b_beta, 1e30)
            )
            mild = (step_bound < 2.05) & (largest < 1e3)
            b_R = inverse.bounded_inverse(b_Aek, b_beta, mild, PRECISION)
        tile.store_rows(scores.R, b_R, place, 0, SCORES)
    return step_bound


@triton.jit
def intra_fwd_kernel(
    inputs, qk, decays, scores, fold_levels, call, META: tl.constexpr
):
    """One chunk of one value head.

    Delta rule: R, with which the inverse of I + Diag(beta) Aek is
    I + Diag(beta) R, and that of I + Aek Diag(beta) is I + R Diag(beta); and
    beta as a row in fp32, row_beta. Aek and e_in are of the key e that erases:
    k, or ``erase_key`` [T, HV, K], with which beta is 1.

    Gates are running sums G, in log2 units, and total is a chunk's, G_C. The
    chunk is seen from the point p where half of its decay is done, G_p =
    G_C / 2. A gate per head: G and, per row, the decays from p on, row_in =
    2^{G - G_p}, and to p, row_out = 2^{G_p - G}; both may be large. A decay
    that is not gates.is_factorable has 2^G and 2^{G_C - G} in their place, and
    its scores take differences of G: in fp64, since in fp32 a weak gate after
    strong ones would drown.

    A gate per channel: Aqk, and what the state meets, q_in = 2^{G - G_p} q,
    e_in = 2^{G - G_p} e and k_out = 2^{G_p - G} k. Their products are the
    scores. A channel whose decay is not factorable has 2^G and 2^{G_C - G}
    there; its chunk has a gates.fold_level_of in fold_levels, and leaves its
    scores to intra_unfactorable_kernel. The backward runs the kernel AGAIN,
    without scores and fold_levels, which the forward has saved.
    """
    dtype: tl.constexpr = inputs.k.dtype.element_ty
    IS_FP32: tl.constexpr = dtype == tl.float32
    PRECISION: tl.constexpr = META.PRECISION
    PER_HEAD: tl.constexpr = META.PER_HEAD
    PER_CHANNEL: tl.constexpr = META.PER_CHANNEL
    DELTA: tl.constexpr = META.DELTA
    HAS_ERASE_KEY: tl.constexpr = META.HAS_ERASE_KEY
    AGAIN: tl.constexpr = PER_CHANNEL and scores.Aqk is None
    KEYS: tl.constexpr = META.key_tiles
    HV_KEYS: tl.constexpr = META.hv_key_tiles
    HV: tl.constexpr = META.HV
    K: tl.constexpr = META.K
    BT: tl.constexpr = META.BT
    i_slot, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    i_sh = i_slot.to(tl.int64) * HV + i_hv
    t, end = tile.chunk_span(i_slot, call.cu_seqlens, call.N, call.T, BT)
    if t >= end:
        if PER_CHANNEL and not AGAIN:
            tl.store(fold_levels + i_sh, 0)
        return
    place = t, end, i_hv
    place_of_key = t, end, i_hv // (HV // META.QK_HEADS)
    b_lag = tile.token_lag(BT)
    b_beta = None
    if inputs.beta is not None:
        b_beta = tile.load_numbers(inputs.beta, place, HV, BT)  # [BT]
        b_beta = b_beta.to(tl.float32)
        if not PER_HEAD:  # else with the gate's rows
            tl.store(tile.slot_row(decays.row_beta, i_sh, BT), b_beta)
    if PER_HEAD:
        b_g = tile.load_numbers(inputs.g, place, HV, BT)  # [BT]
    b_Aqk = tl.zeros([BT, BT], dtype=tl.float32)
    b_Aek = tl.zeros([BT, BT], dtype=tl.float32)
    if HAS_ERASE_KEY and PER_HEAD:
        b_ee = tl.zeros([BT], dtype=tl.float32)
        b_kk = tl.zeros([BT], dtype=tl.float32)
    unfactorable, fold_level = False, 1 + gates.num_levels(BT)
    NK: tl.constexpr = META.NK if PER_CHANNEL or DELTA else 0
    for i_k in range(NK):
        b_k = tile.load_rows(inputs.k, place_of_key, i_k, KEYS)  # [BT, BK]
        if HAS_ERASE_KEY:
            b_e = tile.load_rows(inputs.e, place, i_k, HV_KEYS)
            if PER_HEAD:
                b_ee += tl.sum(b_e.to(tl.float32) * b_e, axis=1)
                b_kk += tl.sum(b_k.to(tl.float32) * b_k, axis=1)
        else:
            b_e = b_k
        if not PER_CHANNEL:
            b_kT = tl.trans(b_k)  # [BK, BT]
            b_Aek = tl.dot(b_e, b_kT, b_Aek, input_precision=PRECISION)
        else:
            b_q = tile.load_rows(inputs.q, place_of_key, i_k, KEYS)
            b_g = tile.load_rows(inputs.g, place, i_k, HV_KEYS)  # [BT, BK]
            b_high, b_low = gates.split_gates(b_g)  # [BT, BK]
            b_total = gates.chunk_total(b_high, b_low, IS_FP32)  # [BK]
            o_k = i_k * META.BK + tl.arange(0, META.BK)
            tl.store(decays.total + i_sh * K + o_k, b_total, mask=o_k < K)
            if not AGAIN:
                b_least = tl.min(b_total)
                unfactorable |= gates.is_factorable(b_least, dtype) == 0
                level = gates.fold_level_of(b_high, b_least, dtype)
                fold_level = tl.minimum(fold_level, level)
            m_factorable = gates.is_factorable(b_total, dtype)  # [BK]
            b_outer = tl.where(m_factorable, 0.5 * b_total, 0.0)[None, :]
            b_G = gates.sum_gates(b_lag < 0, b_high, b_low, IS_FP32)  # G_C - G
            b_k_out = (b_k * tl.exp2(b_G - b_outer)).to(dtype)  # [BT, BK]
            tile.store_rows(qk.k_out, b_k_out, place, i_k, HV_KEYS)
            b_G = gates.sum_gates(b_lag >= 0, b_high, b_low, IS_FP32)
            b_row = tl.exp2(b_G - b_outer)
            b_q_in = (b_q * b_row).to(dtype)  # [BT, BK]
            tile.store_rows(qk.q_in, b_q_in, place, i_k, HV_KEYS)
            b_kT = tl.trans(b_k_out)  # [BK, BT]
            if not AGAIN:
                b_Aqk = tl.dot(b_q_in, b_kT, b_Aqk, input_precision=PRECISION)
            if DELTA:
                b_e_in = (b_e * b_row).to(dtype)  # [BT, BK]
                tile.store_rows(qk.e_in, b_e_in, place, i_k, HV_KEYS)
                if not AGAIN:
                    b_Aek = tl.dot(
                        b_e_in, b_kT, b_Aek, input_precision=PRECISION
                    )

    if PER_CHANNEL and not AGAIN:
        tl.store(fold_levels + i_sh, tl.where(unfactorable, fold_level, 0))
        if unfactorable:
            return
    if PER_HEAD:
        # After the products: before them, the barriers of the sums and the
        # stores would hold the loads of k back.
        if inputs.beta is not None:
            tl.store(tile.slot_row(decays.row_beta, i_sh, BT), b_beta)
        b_g = gates.clamp_below(b_g.to(tl.float32), -20000.0)
        b_G = tl.cumsum(b_g.to(tl.float64) * tile.LOG2_E, axis=0)
        tl.store(tile.slot_row(decays.G, i_sh, BT), b_G)
        b_total = tl.sum(
            tl.where(tl.arange(0, BT) == BT - 1, b_G, 0.0), axis=0
        )
        factorable = gates.is_factorable(b_total, dtype)
        b_row_in = b_G - tl.where(factorable, 0.5 * b_total, 0.0)
        b_row_out = tl.where(factorable, 0.5, 1.0) * b_total - b_G
        b_row_in, b_row_out = (
            tl.exp2(b_row_in.to(tl.float32)),
            tl.exp2(b_row_out.to(tl.float32)),
        )
        tl.store(tile.slot_row(decays.row_in, i_sh, BT), b_row_in)
        tl.store(tile.slot_row(decays.row_out, i_sh, BT), b_row_out)
        b_total = b_total.to(tl.float32)
        tl.store(decays.total + i_sh, b_total)
        if DELTA:
            tl.debug_barrier()  # all of G is there
            if factorable:
                b_Aek *= b_row_in[:, None] * b_row_out[None, :]
            else:
                b_G = tl.load(tile.slot_row(decays.G, i_sh, BT))  # [BT]
                b_Aek *= gates.decay_matrix(b_G)
    step_bound = invert_and_store(b_Aqk, b_Aek, b_beta, scores, place, META)
    if PER_HEAD and DELTA:
        if HAS_ERASE_KEY:
            # Of each I - k e^T the largest singular value, at least 1.
            b_ek = tl.sum(tl.where(b_lag == 0, b_Aek, 0.0), axis=1)  # [BT]
            b_ee *= b_kk  # |e|^2 |k|^2
            b_most = tl.sqrt(tl.maximum(4.0 - 4.0 * b_ek + b_ee, 0.0))
            b_most = tl.maximum(0.5 * (tl.sqrt(b_ee) + b_most), 1.0)
            b_total += tl.sum(tl.log2(b_most))
        else:  # a map grows with steps over 2
            b_total += BT * tl.log2(tl.maximum(step_bound - 1.0, 1.0))
        tl.store(decays.map_bound + i_sh, b_total)


@triton.jit
def intra_unfactorable_kernel(
    inputs, decays, scores, fold_levels, call, META: tl.constexpr
):
    """The scores and R of a chunk for which fold_levels has no 0."""
    KEYS: tl.constexpr = META.key_tiles
    HV_KEYS: tl.constexpr = META.hv_key_tiles
    HV: tl.constexpr = META.HV
    BT: tl.constexpr = META.BT
    i_slot, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    i_sh = i_slot.to(tl.int64) * HV + i_hv
    fold_level = tl.load(fold_levels + i_sh)
    if fold_level == 0:
        return
    t, end = tile.chunk_span(i_slot, call.cu_seqlens, call.N, call.T, BT)
    place = t, end, i_hv
    place_of_key = t, end, i_hv // (HV // META.QK_HEADS)
    b_beta = None
    if decays.row_beta is not None:
        b_beta = tl.load(tile.slot_row(decays.row_beta, i_sh, BT))  # [BT]
    zeros = tl.zeros([BT, BT], dtype=tl.float32)
    sums = zeros, zeros
    for i_k in range(META.NK):
        b_g = tile.load_rows(inputs.g, place, i_k, HV_KEYS)  # [BT, BK]
        b_q = tile.load_rows(inputs.q, place_of_key, i_k, KEYS)  # [BT, BK]
        b_k = tile.load_rows(inputs.k, place_of_key, i_k, KEYS)  # [BT, BK]
        b_e = b_k
        if META.HAS_ERASE_KEY:
            b_e = tile.load_rows(inputs.e, place, i_k, HV_KEYS)  # [BT, BK]
        b_high, b_low = gates.split_gates(b_g)  # [BT, BK]
        keys = b_q, b_k, b_e
        sums = add_scores_by_level(sums, keys, b_high, b_low, fold_level, META)
    b_Aqk, b_Aek = sums
    invert_and_store(b_Aqk, b_Aek, b_beta, scores, place, META)
