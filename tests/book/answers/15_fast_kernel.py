"""Answers to chapter 15's exercises, and what their checks are to say."""


# %% ex-masked passes
@triton.jit
def square_norms_kernel(
    k, out, T, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr
):
    """Channel after channel."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    b_sum = tl.zeros([BT], dtype=tl.float32)
    for i in range(K):
        b_k = tl.load(k + o_t * K + i, mask=o_t < T, other=0.0)
        b_sum += b_k * b_k
    tl.store(out + o_t, b_sum, mask=o_t < T)


# %% ex-masked not yet: written behind the last token
@triton.jit
def square_norms_kernel(
    k, out, T, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr
):
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_k = (o_t < T)[:, None] & (o_k < K)[None, :]
    b_k = tl.load(k + o_t[:, None] * K + o_k[None, :], mask=m_k, other=0.0)
    tl.store(out + o_t, tl.sum(b_k * b_k, axis=1))


# %% ex-masked not yet: was used
@triton.jit
def square_norms_kernel(
    k, out, T, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr
):
    """The next token's channels are added; NaN for the last one."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_k = (o_t < T)[:, None]
    b_k = tl.load(k + o_t[:, None] * K + o_k[None, :], mask=m_k, other=0.0)
    tl.store(out + o_t, tl.sum(b_k * b_k, axis=1), mask=o_t < T)


# %% ex-overlaps passes
@triton.jit
def overlaps_kernel(k, beta, out, T, K: tl.constexpr, BT: tl.constexpr):
    """The strengths multiply the keys."""
    i_t = tl.program_id(0)
    o_c = tl.arange(0, BT)
    o_t = (i_t * BT + o_c)[:, None]
    b_k = tl.load(k + o_t * K + tl.arange(0, K), mask=o_t < T, other=0.0)
    b_b = tl.load(beta + o_t, mask=o_t < T, other=0.0)
    b_M = tl.dot(b_b * b_k, tl.trans(b_k))
    b_M = tl.where(o_c[:, None] > o_c[None, :], b_M, 0.0)
    tl.store(out + (i_t * BT + o_c[:, None]) * BT + o_c[None, :], b_M)


# %% ex-overlaps not yet: above it are to be zero
@triton.jit
def overlaps_kernel(k, beta, out, T, K: tl.constexpr, BT: tl.constexpr):
    i_t = tl.program_id(0)
    o_c = tl.arange(0, BT)
    o_t = (i_t * BT + o_c)[:, None]
    b_k = tl.load(k + o_t * K + tl.arange(0, K), mask=o_t < T, other=0.0)
    b_b = tl.load(beta + o_t, mask=o_t < T, other=0.0)
    b_M = tl.dot(b_b * b_k, tl.trans(b_k))
    b_M = tl.where(o_c[:, None] >= o_c[None, :], b_M, 0.0)
    tl.store(out + (i_t * BT + o_c[:, None]) * BT + o_c[None, :], b_M)


# %% ex-overlaps not yet: relative error
@triton.jit
def overlaps_kernel(k, beta, out, T, K: tl.constexpr, BT: tl.constexpr):
    """The strengths multiply columns."""
    i_t = tl.program_id(0)
    o_c = tl.arange(0, BT)
    o_t = (i_t * BT + o_c)[:, None]
    b_k = tl.load(k + o_t * K + tl.arange(0, K), mask=o_t < T, other=0.0)
    b_b = tl.load(beta + o_t, mask=o_t < T, other=0.0)
    b_M = tl.dot(b_k, tl.trans(b_b * b_k))
    b_M = tl.where(o_c[:, None] > o_c[None, :], b_M, 0.0)
    tl.store(out + (i_t * BT + o_c[:, None]) * BT + o_c[None, :], b_M)


# %% ex-upward passes
@triton.jit
def upward_kernel(M, D, out, V: tl.constexpr, BT: tl.constexpr):
    """Each row, once known, is taken from those above it."""
    i_t = tl.program_id(0)
    o_c, o_v = tl.arange(0, BT), tl.arange(0, V)
    o_D = (i_t * BT + o_c[:, None]) * V + o_v[None, :]
    b_Y = tl.load(D + o_D)
    for j in range(BT):
        i = BT - 1 - j
        b_m = tl.load(M + (i_t * BT + i) * BT + o_c)
        b_y = tl.sum(tl.where(o_c[:, None] == i, b_Y, 0.0), axis=0)
        b_Y -= b_m[:, None] * b_y[None, :]
    tl.store(out + o_D, b_Y)


# %% ex-upward not yet: relative error
@triton.jit
def upward_kernel(M, D, out, V: tl.constexpr, BT: tl.constexpr):
    """From the first row: I + M, not its transpose."""
    i_t = tl.program_id(0)
    o_c, o_v = tl.arange(0, BT), tl.arange(0, V)
    o_D = (i_t * BT + o_c[:, None]) * V + o_v[None, :]
    b_Y = tl.load(D + o_D)
    for i in range(1, BT):
        b_m = tl.load(M + (i_t * BT + i) * BT + o_c)
        b_row = tl.sum(b_m[:, None] * b_Y, axis=0)
        b_Y = tl.where(o_c[:, None] == i, b_Y - b_row[None, :], b_Y)
    tl.store(out + o_D, b_Y)


# %% ex-upward not yet: without tl.dot
@triton.jit
def upward_kernel(M, D, out, V: tl.constexpr, BT: tl.constexpr):
    """Y = D - M^T Y, again and again."""
    i_t = tl.program_id(0)
    o_c, o_v = tl.arange(0, BT), tl.arange(0, V)
    b_Mt = tl.load(M + (i_t * BT + o_c[None, :]) * BT + o_c[:, None])
    o_D = (i_t * BT + o_c[:, None]) * V + o_v[None, :]
    b_D = tl.load(D + o_D)
    b_Y = b_D
    for _ in range(BT):
        b_Y = b_D - tl.dot(b_Mt, b_Y)
    tl.store(out + o_D, b_Y)


# %% ex-strip passes
@triton.jit
def strip_kernel(
    k,
    v,
    out,
    T,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """From the last chunk on: a sum has no order."""
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)[None, :]
    o_k = tl.arange(0, K)
    b_S = tl.zeros([K, BV], dtype=tl.float32)
    for i in range(tl.cdiv(T, BT)):
        o_t = (tl.cdiv(T, BT) - 1 - i) * BT + tl.arange(0, BT)
        p_k = k + o_t[None, :] * K + o_k[:, None]
        b_k = tl.load(p_k, mask=o_t[None, :] < T, other=0.0)
        p_v = v + o_t[:, None] * V + o_v
        b_v = tl.load(p_v, mask=o_t[:, None] < T, other=0.0)
        b_S += tl.dot(b_k, b_v)
    tl.store(out + o_k[:, None] * V + o_v, b_S)


# %% ex-strip not yet: without its program the last strip was written
@triton.jit
def strip_kernel(
    k,
    v,
    out,
    T,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """Every program finds all strips."""
    o_k = tl.arange(0, K)
    for i_v in range(V // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_S = tl.zeros([K, BV], dtype=tl.float32)
        for i_t in range(tl.cdiv(T, BT)):
            o_t = (i_t * BT + tl.arange(0, BT))[:, None]
            b_k = tl.load(k + o_t * K + o_k, mask=o_t < T, other=0.0)
            b_v = tl.load(v + o_t * V + o_v, mask=o_t < T, other=0.0)
            b_S = tl.dot(tl.trans(b_k), b_v, b_S)
        tl.store(out + o_k[:, None] * V + o_v, b_S)


# %% ex-strip not yet: relative error
@triton.jit
def strip_kernel(
    k,
    v,
    out,
    T,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """The last chunk alone."""
    o_k = tl.arange(0, K)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    b_S = tl.zeros([K, BV], dtype=tl.float32)
    for i_t in range(tl.cdiv(T, BT)):
        o_t = (i_t * BT + tl.arange(0, BT))[:, None]
        b_k = tl.load(k + o_t * K + o_k, mask=o_t < T, other=0.0)
        b_v = tl.load(v + o_t * V + o_v, mask=o_t < T, other=0.0)
        b_S = tl.dot(tl.trans(b_k), b_v)
    tl.store(out + o_k[:, None] * V + o_v, b_S)


# %% ex-reverse passes
@triton.jit
def reverse_kernel(
    q,
    k,
    beta,
    P,
    do,
    dv,
    T,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
):
    """Backwards, with transposed loads."""
    o_c, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, V)
    b_dS = tl.zeros([K, V], dtype=tl.float32)
    first = (tl.cdiv(T, BT) - 1) * BT
    while first >= 0:
        o_t = first + o_c
        m_t, m_r = (o_t < T)[:, None], (o_t < T)[None, :]
        p_q = q + o_t[None, :] * K + o_k[:, None]
        b_qT = tl.load(p_q, mask=m_r, other=0.0)
        b_k = tl.load(k + o_t[:, None] * K + o_k, mask=m_t, other=0.0)
        p_P = P + o_t[None, :] * BT + o_c[:, None]
        b_PT = tl.load(p_P, mask=m_r, other=0.0)
        b_do = tl.load(do + o_t[:, None] * V + o_v, mask=m_t, other=0.0)
        b_b = tl.load(beta + o_t, mask=o_t < T, other=0.0)[:, None]
        b_A = tl.where(o_c[:, None] > o_c[None, :], 0.0, tl.dot(b_k, b_qT))
        b_y = tl.dot(b_k, b_dS, tl.dot(b_A, b_do))
        b_y = b_b * tl.dot(b_PT, b_y)
        tl.store(dv + o_t[:, None] * V + o_v, b_y, mask=m_t)
        b_dS += tl.dot(b_qT, b_do)
        b_dS -= tl.dot(tl.trans(b_k), b_y)
        first -= BT


# %% ex-reverse not yet: relative error
@triton.jit
def reverse_kernel(
    q,
    k,
    beta,
    P,
    do,
    dv,
    T,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
):
    """As linear attention: dS without what the keys erased."""
    o_c, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, V)
    b_dS = tl.zeros([K, V], dtype=tl.float32)
    NT = tl.cdiv(T, BT)
    for i in range(NT):
        o_t = (NT - 1 - i) * BT + o_c[:, None]
        m_t = o_t < T
        b_q = tl.load(q + o_t * K + o_k, mask=m_t, other=0.0)
        b_k = tl.load(k + o_t * K + o_k, mask=m_t, other=0.0)
        b_P = tl.load(P + o_t * BT + o_c, mask=m_t, other=0.0)
        b_do = tl.load(do + o_t * V + o_v, mask=m_t, other=0.0)
        b_b = tl.load(beta + o_t, mask=m_t, other=0.0)
        b_A = tl.dot(b_k, tl.trans(b_q))
        b_A = tl.where(o_c[:, None] <= o_c[None, :], b_A, 0.0)
        b_y = tl.dot(b_A, b_do) + tl.dot(b_k, b_dS)
        b_y = b_b * tl.dot(tl.trans(b_P), b_y)
        tl.store(dv + o_t * V + o_v, b_y, mask=m_t)
        b_dS += tl.dot(tl.trans(b_q), b_do)


# %% ex-reverse not yet: was used
@triton.jit
def reverse_kernel(
    q,
    k,
    beta,
    P,
    do,
    dv,
    T,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
):
    """P without a mask."""
    o_c, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, V)
    b_dS = tl.zeros([K, V], dtype=tl.float32)
    NT = tl.cdiv(T, BT)
    for i in range(NT):
        o_t = (NT - 1 - i) * BT + o_c[:, None]
        m_t = o_t < T
        b_q = tl.load(q + o_t * K + o_k, mask=m_t, other=0.0)
        b_k = tl.load(k + o_t * K + o_k, mask=m_t, other=0.0)
        b_P = tl.load(P + o_t * BT + o_c)
        b_do = tl.load(do + o_t * V + o_v, mask=m_t, other=0.0)
        b_b = tl.load(beta + o_t, mask=m_t, other=0.0)
        b_A = tl.dot(b_k, tl.trans(b_q))
        b_A = tl.where(o_c[:, None] <= o_c[None, :], b_A, 0.0)
        b_y = tl.dot(b_A, b_do) + tl.dot(b_k, b_dS)
        b_y = b_b * tl.dot(tl.trans(b_P), b_y)
        tl.store(dv + o_t * V + o_v, b_y, mask=m_t)
        b_dS += tl.dot(tl.trans(b_q), b_do) - tl.dot(tl.trans(b_k), b_y)
