"""Between segments: each state from the one before it, forward or back."""

import triton
import triton.language as tl

from fastweights.kernels.tile import state_at, tile_at


@triton.jit(do_not_specialize=["NS", "N"])
def compose_kernel(
    states,
    maps,
    NS,
    N,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BJ: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    BACK: tl.constexpr,
):
    """Each state goes on from the one before it: one value tile of a head.

    states [NS - 1, N, HV, K, V], in place: states[s] += maps[s - 1]
    states[s - 1]; or BACK, from the last, states[s] += maps[s]^T
    states[s + 1]. maps [NS - 2, N, HV, K, K]; [NS - 2, N, HV, K], the
    diagonal, for the additive rule; or None, all ones. fp32.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_nh, i_v = tl.program_id(0) // NV, tl.program_id(0) % NV
    rows = N * HV
    o_k = tl.arange(0, BK)
    for i in range(NS - 2):
        i_M = (NS - 3 - i if BACK else i) * rows + i_nh
        i_to, i_from = i_M + rows, i_M
        if BACK:
            i_to, i_from = i_M, i_M + rows
        o_S, m_S = state_at(i_to, i_v, K, V, BK, BV)
        b_S = tl.load(states + o_S, mask=m_S, other=0.0)  # [BK, BV]
        if DELTA:
            for i_j in range((K + BJ - 1) // BJ):
                o_x, m_x = tile_at(i_from, i_j, 0, i_v, K, 1, V, BJ, BV)
                b_x = tl.load(states + o_x, mask=m_x, other=0.0)  # [BJ, BV]
                if BACK:
                    o_M, m_M = tile_at(i_M, i_j, 0, 0, K, 1, K, BJ, BK)
                else:
                    o_M, m_M = tile_at(i_M, 0, 0, i_j, K, 1, K, BK, BJ)
                b_M = tl.load(maps + o_M, mask=m_M, other=0.0)
                if BACK:
                    b_M = tl.trans(b_M)  # [BK, BJ]
                b_S = tl.dot(b_M, b_x, b_S, input_precision="tf32x3")
        else:
            o_x, m_x = state_at(i_from, i_v, K, V, BK, BV)
            b_x = tl.load(states + o_x, mask=m_x, other=0.0)  # [BK, BV]
            if maps is not None:
                p_M = maps + i_M.to(tl.int64) * K + o_k
                b_x *= tl.load(p_M, mask=o_k < K, other=0.0)[:, None]
            b_S += b_x
        tl.store(states + o_S, b_S, mask=m_S)
        tl.debug_barrier()  # before other threads load what was stored
