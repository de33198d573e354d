"""Forward of :mod:`fastweights.kernels.convolution`: sums and outputs."""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.kernels.tile import (
    first_slot,
    mask_if,
    sequence_of,
    sequence_span,
    sigmoid,
)


@triton.jit
def stretch_of(i_c, cu_seqlens, N, T, BT: tl.constexpr):
    """Sequence, first and last token + 1 of it, and first token of slot i_c.

    The slots are those of :func:`tile.chunk_span`: of cu_seqlens that are no
    offsets a stretch may begin before its sequence, but not before token 0.
    """
    i_n = sequence_of(i_c, cu_seqlens, N, T, BT)
    start, end = sequence_span(i_n, cu_seqlens, T)
    t = start + (i_c - first_slot(i_n, cu_seqlens, T, BT)) * BT
    return i_n.to(tl.int64), start, end, t


@triton.jit
def block_of(i_d, H: tl.constexpr, K: tl.constexpr, BV: tl.constexpr):
    """Block i_d's first channel among all of x's, and among its result's.

    Blocks 0 to H - 1 are q's heads, as many after them k's, the rest v's.
    """
    if i_d < 2 * H:
        c, o_y = i_d * K, i_d % tl.maximum(H, 1) * K
    else:
        o_y = (i_d - 2 * H) * BV
        c = 2 * H * K + o_y
    return c, o_y


@triton.jit
def load_row(p_x, t, m_t, o_d, m_d, C: tl.constexpr):
    """Channels o_d of row t of x [rows, C]; 0 where not m_t and not m_d."""
    return tl.load(p_x + t * C + o_d, mask=mask_if(m_t, m_d), other=0.0)


@triton.jit
def load_rows(p_x, t, end, o_d, m_d, C: tl.constexpr):
    """Rows t to t + 3, those before ``end``: at once, and in x's dtype."""
    b_0 = load_row(p_x, t, t < end, o_d, m_d, C)
    b_1 = load_row(p_x, t + 1, t + 1 < end, o_d, m_d, C)
    b_2 = load_row(p_x, t + 2, t + 2 < end, o_d, m_d, C)
    b_3 = load_row(p_x, t + 3, t + 3 < end, o_d, m_d, C)
    return b_0, b_1, b_2, b_3


@triton.jit
def input_at(
    x,
    initial_state,
    i_n,
    t,
    start,
    end,
    o_d,
    m_d,
    C: tl.constexpr,
    W: tl.constexpr,
):
    """The input of token t, or of the W - 1 before ``start``; else 0. fp32."""
    m_t = (t >= start) & (t < end)
    b_x = load_row(x, t, m_t, o_d, m_d, C)
    if initial_state is not None:
        m_s = (t < start) & (t + W > start)
        i_s = (i_n + 1) * (W - 1) + t - start
        b_s = load_row(initial_state, i_s, m_s, o_d, m_d, C)
        b_x = tl.where(t < start, b_s, b_x)
    return b_x.to(tl.float32)


@triton.jit
def inputs_before(
    x,
    initial_state,
    i_n,
    t,
    start,
    end,
    o_d,
    m_d,
    C: tl.constexpr,
    W: tl.constexpr,
):
    """The inputs of tokens t - 3, t - 2 and t - 1."""
    b_1 = input_at(x, initial_state, i_n, t - 3, start, end, o_d, m_d, C, W)
    b_2 = input_at(x, initial_state, i_n, t - 2, start, end, o_d, m_d, C, W)
    b_3 = input_at(x, initial_state, i_n, t - 1, start, end, o_d, m_d, C, W)
    return b_1, b_2, b_3


@triton.jit
def load_filter(weight, bias, o_d, m_d, W: tl.constexpr):
    """The bias and four taps, oldest first: [BD] each, fp32.

    Of W taps these are the last. A channel's taps lie side by side and are
    loaded as they lie.
    """
    o_w = tl.arange(0, 4) - (4 - W)
    p_w = weight + o_d[:, None] * W + o_w[None, :]
    m_w = m_d[:, None] & (o_w >= 0)[None, :]
    b_w = tl.load(p_w, mask=m_w, other=0.0).to(tl.float32)  # [BD, 4]
    b_odd, b_even = tl.split(tl.reshape(b_w, [b_w.shape[0], 2, 2]))
    w_1, w_3 = tl.split(b_odd)
    w_2, w_4 = tl.split(b_even)
    if bias is None:
        w_0 = tl.zeros_like(w_4)
    else:
        w_0 = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    return w_0, w_1, w_2, w_3, w_4


@triton.jit
def filtered(b_1, b_2, b_3, b_4, w_0, w_1, w_2, w_3, w_4, W: tl.constexpr):
    """The sum of the last four inputs, each with its tap, and the bias."""
    b_z = w_0 + w_4 * b_4 + w_3 * b_3
    if W > 2:
        b_z += w_2 * b_2
    if W > 3:
        b_z += w_1 * b_1
    return b_z


@triton.jit
def store_output(
    p_y,
    t,
    end,
    b_z,
    eps,
    o_y,
    m_d,
    R: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
):
    """Row t of y [rows, R], from the sums."""
    if SILU:
        b_z = b_z * sigmoid(b_z)
    if NORM:
        b_z *= tl.rsqrt(tl.sum(b_z * b_z, axis=0) + eps)
    tl.store(p_y + t * R + o_y, b_z, mask=mask_if(t < end, m_d))


@triton.jit
def walk(
    x,
    weight,
    bias,
    initial_state,
    y,
    state,
    eps,
    i_n,
    start,
    end,
    t,
    c,
    o_y,
    C: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
    BT: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """The outputs of a stretch: of channels c to c + BD, before c + D.

    And the sequence's last W - 1 inputs, if they are the last of this
    stretch.
    """
    o_b = tl.arange(0, BD)
    o_d, o_y = c + o_b, o_y + o_b
    m_d = (o_b < D) & (o_d < C)
    w_0, w_1, w_2, w_3, w_4 = load_filter(weight, bias, o_d, m_d, W)
    b_1, b_2, b_3 = inputs_before(
        x, initial_state, i_n, t, start, end, o_d, m_d, C, W
    )
    stop = tl.minimum(t + BT, end)
    n_0, n_1, n_2, n_3 = load_rows(x, t, stop, o_d, m_d, C)
    for i in range(0, (stop - t).to(tl.int32), 4):
        s = t + i
        b_4, b_5 = n_0.to(tl.float32), n_1.to(tl.float32)
        b_6, b_7 = n_2.to(tl.float32), n_3.to(tl.float32)
        n_0, n_1, n_2, n_3 = load_rows(x, s + 4, stop, o_d, m_d, C)
        b_z = filtered(b_1, b_2, b_3, b_4, w_0, w_1, w_2, w_3, w_4, W)
        store_output(y, s, stop, b_z, eps, o_y, m_d, R, SILU, NORM)
        b_z = filtered(b_2, b_3, b_4, b_5, w_0, w_1, w_2, w_3, w_4, W)
        store_output(y, s + 1, stop, b_z, eps, o_y, m_d, R, SILU, NORM)
        b_z = filtered(b_3, b_4, b_5, b_6, w_0, w_1, w_2, w_3, w_4, W)
        store_output(y, s + 2, stop, b_z, eps, o_y, m_d, R, SILU, NORM)
        b_z = filtered(b_4, b_5, b_6, b_7, w_0, w_1, w_2, w_3, w_4, W)
        store_output(y, s + 3, stop, b_z, eps, o_y, m_d, R, SILU, NORM)
        b_1, b_2, b_3 = b_5, b_6, b_7
    # Of an empty sequence the only stretch is the last one, too.
    is_last = (t + BT >= end) & ((t < end) | (t == start))
    for i in tl.static_range(W - 1):
        s = end - (W - 1) + i
        b_x = input_at(x, initial_state, i_n, s, start, end, o_d, m_d, C, W)
        p_s = state + (i_n * (W - 1) + i) * C + o_d
        tl.store(p_s, b_x, mask=mask_if(is_last, m_d))


@triton.jit(do_not_specialize=["T", "N"])
def convolution_fwd_kernel(
    x,
    weight,
    bias,
    initial_state,
    cu_seqlens,
    q,
    k,
    v,
    state,
    eps,
    T,
    N,
    C: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One stretch of one block of channels."""
    CV: tl.constexpr = C - 2 * H * K
    NB: tl.constexpr = 2 * H + (CV + BV - 1) // BV
    i_c, i_d = tl.program_id(0) // NB, tl.program_id(0) % NB
    i_n, start, end, t = stretch_of(i_c, cu_seqlens, N, T, BT)
    c, o_y = block_of(i_d, H, K, BV)
    if i_d < 2 * H:
        y = q
        if i_d >= H:
            y = k
        walk(
            *(x, weight, bias, initial_state, y, state, eps),
            *(i_n, start, end, t, c, o_y),
            *(C, H * K, W, SILU, NORM, BT, K, BK),
        )
    else:
        walk(
            *(x, weight, bias, initial_state, v, state, eps),
            *(i_n, start, end, t, c, o_y),
            *(C, CV, W, SILU, False, BT, BV, BV),
        )
