"""Backward of :mod:`fastweights.kernels.convolution`: all gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.kernels.convolution_forward import (
    block_of,
    filtered,
    load_filter,
    load_row,
    stretch_of,
)
from fastweights.kernels.tile import add_pairs, mask_if, sigmoid


@triton.jit
def channels_inside(
    o_b, o_y, R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """Which of a block's channels there are: of D, and before the row's R.

    Known when a kernel is compiled where all blocks are whole: then rows
    need no mask per channel.
    """
    m_d = tl.full([BD], True, tl.int1)
    if D < BD or R % BD > 0:
        m_d = (o_b < D) & (o_y < R)
    return m_d


@triton.jit
def load_four(p_x, m_0, m_1, m_2, m_3, m_d, C: tl.constexpr):
    """Four rows from p_x [BD] on, C apart: at once, in x's dtype, or 0."""
    b_0 = tl.load(p_x, mask=mask_if(m_0, m_d), other=0.0)
    b_1 = tl.load(p_x + C, mask=mask_if(m_1, m_d), other=0.0)
    b_2 = tl.load(p_x + 2 * C, mask=mask_if(m_2, m_d), other=0.0)
    b_3 = tl.load(p_x + 3 * C, mask=mask_if(m_3, m_d), other=0.0)
    return b_0, b_1, b_2, b_3


@triton.jit
def first_rows(p_x, left, m_d, C: tl.constexpr):
    """The first ``left`` of four rows from p_x on, zeros for the others."""
    return load_four(p_x, left > 0, left > 1, left > 2, left > 3, m_d, C)


@triton.jit
def gradient_of_sum(b_z, b_dy, eps, SILU: tl.constexpr, NORM: tl.constexpr):
    """dz from z and the gradient of the output: 0 where that is 0."""
    b_y = b_z
    if SILU:
        b_s = sigmoid(b_z)
        b_y = b_z * b_s
    if NORM:
        # n = r y with r = (y . y + eps)^{-1/2}: dy = r dn - r^3 (y . dn) y
        b_yy, b_yd = tl.reduce((b_y * b_y, b_y * b_dy), 0, add_pairs)
        b_r = tl.rsqrt(b_yy + eps)
        b_dy = b_r * (b_dy - b_r * b_r * b_yd * b_y)
    if SILU:
        b_dy = b_dy * b_s * (1.0 + b_z * (1.0 - b_s))
    return b_dy


@triton.jit
def taken_up(b_g, d_4, d_5, d_6, d_7, b_4, b_5, b_6, b_7):
    """A tap's gradient and what four tokens add, a product at a time."""
    b_g += d_7 * b_7
    b_g += d_6 * b_6
    b_g += d_5 * b_5
    b_g += d_4 * b_4
    return b_g


@triton.jit
def from_last_inputs(
    b_dx, dstate, i_n, s, end, o_d, m_d, C: tl.constexpr, W: tl.constexpr
):
    """The gradient of input s, with what it has as one of the last inputs."""
    if dstate is not None:
        left = s - (end - (W - 1))  # its row of the last state
        m_s = (left >= 0) & (left < W - 1)
        i_s = i_n * (W - 1) + left
        b_dx += load_row(dstate, i_s, m_s, o_d, m_d, C).to(tl.float32)
    return b_dx


@triton.jit
def group_before(
    p_x,
    initial_state,
    i_n,
    left,
    t,
    start,
    o_d,
    m_d,
    C: tl.constexpr,
    W: tl.constexpr,
):
    """Four whole rows of x, ``left`` groups after the stretch's first token.

    One group before it (left = -1) stand the inputs of the stretch before,
    or the initial state; nobody asks for more.
    """
    m = (left >= 0) | ((left == -1) & (t > start))
    b_0, b_1, b_2, b_3 = load_four(p_x, m, m, m, m, m_d, C)
    if initial_state is not None:
        m = (left == -1) & (t == start)
        p_s = initial_state + (i_n * (W - 1) + W - 5) * C + o_d
        b_3 += tl.load(p_s + 3 * C, mask=mask_if(m, m_d), other=0.0)
        if W > 2:
            b_2 += tl.load(p_s + 2 * C, mask=mask_if(m, m_d), other=0.0)
        if W > 3:
            b_1 += tl.load(p_s + C, mask=mask_if(m, m_d), other=0.0)
    return b_0, b_1, b_2, b_3


@triton.jit
def walk_back(
    x,
    weight,
    bias,
    initial_state,
    dy,
    dstate,
    dx,
    share,
    dinitial,
    eps,
    i_c,
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
    """The gradients of a stretch, from its last four tokens to its first.

    That of an input is the filter, turned round, over the sums' gradients of
    its token and of the W - 1 after it. So the walk begins with the tokens
    behind the stretch, whose inputs are the next stretch's. d_4 to d_7
    belong to the sums of the four rows at hand, d_8 to d_10 to those behind
    them; b_4 to b_7 are their inputs, b_0 to b_3 those before them.
    """
    o_b = tl.arange(0, BD)
    o_d, o_y = c + o_b, o_y + o_b
    m_d = channels_inside(o_b, o_y, R, D, BD)
    w_0, w_1, w_2, w_3, w_4 = load_filter(weight, bias, o_d, m_d, W)
    zero = tl.zeros_like(w_0)
    g_0, g_1, g_2, g_3, g_4 = zero, zero, zero, zero, zero

    length = tl.minimum(end - t, BT).to(tl.int32)
    groups = tl.maximum(length + 3, 0) // 4
    s = t + 4 * groups  # the first token behind the groups
    left = tl.minimum(end - s, 4).to(tl.int32)
    p_x, p_y, p_dx = x + s * C + o_d, dy + s * R + o_y, dx + s * C + o_d
    n_0, n_1, n_2, _ = first_rows(p_x, left, m_d, C)
    a_0, a_1, a_2, _ = first_rows(p_y, left, m_d, R)
    b_8, b_9 = n_0.to(tl.float32), n_1.to(tl.float32)
    b_10, d_8 = n_2.to(tl.float32), a_0.to(tl.float32)
    d_9, d_10 = a_1.to(tl.float32), a_2.to(tl.float32)
    left = length - 4 * groups + 4  # rows of the last group
    left = tl.where(groups > 0, left, 0)
    n_4, n_5, n_6, n_7 = first_rows(p_x - 4 * C, left, m_d, C)
    a_0, a_1, a_2, a_3 = first_rows(p_y - 4 * R, left, m_d, R)
    p_x, p_y, p_dx = p_x - 8 * C, p_y - 4 * R, p_dx - 4 * C
    n_0, n_1, n_2, n_3 = group_before(
        p_x, initial_state, i_n, groups - 2, t, start, o_d, m_d, C, W
    )
    b_4, b_5 = n_4.to(tl.float32), n_5.to(tl.float32)
    b_6, b_7 = n_6.to(tl.float32), n_7.to(tl.float32)
    b_z = filtered(b_5, b_6, b_7, b_8, w_0, w_1, w_2, w_3, w_4, W)
    d_8 = gradient_of_sum(b_z, d_8, eps, SILU, NORM)
    b_z = filtered(b_6, b_7, b_8, b_9, w_0, w_1, w_2, w_3, w_4, W)
    d_9 = gradient_of_sum(b_z, d_9, eps, SILU, NORM)
    b_z = filtered(b_7, b_8, b_9, b_10, w_0, w_1, w_2, w_3, w_4, W)
    d_10 = gradient_of_sum(b_z, d_10, eps, SILU, NORM)

    for i in range(groups - 1, -1, -1):
        b_0, b_1 = n_0.to(tl.float32), n_1.to(tl.float32)
        b_2, b_3 = n_2.to(tl.float32), n_3.to(tl.float32)
        d_4, d_5 = a_0.to(tl.float32), a_1.to(tl.float32)
        d_6, d_7 = a_2.to(tl.float32), a_3.to(tl.float32)
        p_x -= 4 * C
        n_0, n_1, n_2, n_3 = group_before(
            p_x, initial_state, i_n, i - 2, t, start, o_d, m_d, C, W
        )
        p_y -= 4 * R
        m = i > 0
        a_0, a_1, a_2, a_3 = load_four(p_y, m, m, m, m, m_d, R)

        b_z = filtered(b_4, b_5, b_6, b_7, w_0, w_1, w_2, w_3, w_4, W)
        d_7 = gradient_of_sum(b_z, d_7, eps, SILU, NORM)
        b_z = filtered(b_3, b_4, b_5, b_6, w_0, w_1, w_2, w_3, w_4, W)
        d_6 = gradient_of_sum(b_z, d_6, eps, SILU, NORM)
        b_z = filtered(b_2, b_3, b_4, b_5, w_0, w_1, w_2, w_3, w_4, W)
        d_5 = gradient_of_sum(b_z, d_5, eps, SILU, NORM)
        b_z = filtered(b_1, b_2, b_3, b_4, w_0, w_1, w_2, w_3, w_4, W)
        d_4 = gradient_of_sum(b_z, d_4, eps, SILU, NORM)

        g_4 = taken_up(g_4, d_4, d_5, d_6, d_7, b_4, b_5, b_6, b_7)
        g_3 = taken_up(g_3, d_4, d_5, d_6, d_7, b_3, b_4, b_5, b_6)
        if W > 2:
            g_2 = taken_up(g_2, d_4, d_5, d_6, d_7, b_2, b_3, b_4, b_5)
        if W > 3:
            g_1 = taken_up(g_1, d_4, d_5, d_6, d_7, b_1, b_2, b_3, b_4)
        if bias is not None:
            g_0 += d_4 + d_5 + d_6 + d_7

        s = t + 4 * i
        b_dx = filtered(d_10, d_9, d_8, d_7, zero, w_1, w_2, w_3, w_4, W)
        b_dx = from_last_inputs(b_dx, dstate, i_n, s + 3, end, o_d, m_d, C, W)
        tl.store(p_dx + 3 * C, b_dx, mask=mask_if(left > 3, m_d))
        b_dx = filtered(d_9, d_8, d_7, d_6, zero, w_1, w_2, w_3, w_4, W)
        b_dx = from_last_inputs(b_dx, dstate, i_n, s + 2, end, o_d, m_d, C, W)
        tl.store(p_dx + 2 * C, b_dx, mask=mask_if(left > 2, m_d))
        b_dx = filtered(d_8, d_7, d_6, d_5, zero, w_1, w_2, w_3, w_4, W)
        b_dx = from_last_inputs(b_dx, dstate, i_n, s + 1, end, o_d, m_d, C, W)
        tl.store(p_dx + C, b_dx, mask=mask_if(left > 1, m_d))
        b_dx = filtered(d_7, d_6, d_5, d_4, zero, w_1, w_2, w_3, w_4, W)
        b_dx = from_last_inputs(b_dx, dstate, i_n, s, end, o_d, m_d, C, W)
        tl.store(p_dx, b_dx, mask=m_d)
        p_dx -= 4 * C
        left += 4
        b_4, b_5, b_6, b_7 = b_0, b_1, b_2, b_3
        d_8, d_9, d_10 = d_4, d_5, d_6

    if dinitial is not None:
        m_s = mask_if(t == start, m_d)
        p_s = dinitial + (i_n + 1) * (W - 1) * C + o_d
        b_dx = filtered(d_10, d_9, d_8, zero, zero, w_1, w_2, w_3, w_4, W)
        b_dx = from_last_inputs(
            b_dx, dstate, i_n, start - 1, end, o_d, m_d, C, W
        )
        tl.store(p_s - C, b_dx, mask=m_s)
        if W > 2:
            b_dx = filtered(d_9, d_8, zero, zero, zero, w_1, w_2, w_3, w_4, W)
            b_dx = from_last_inputs(
                b_dx, dstate, i_n, start - 2, end, o_d, m_d, C, W
            )
            tl.store(p_s - 2 * C, b_dx, mask=m_s)
        if W > 3:
            b_dx = from_last_inputs(
                w_1 * d_8, dstate, i_n, start - 3, end, o_d, m_d, C, W
            )
            tl.store(p_s - 3 * C, b_dx, mask=m_s)

    TAPS: tl.constexpr = W if bias is None else W + 1
    p_g = share + i_c.to(tl.int64) * (TAPS * C) + o_d
    if W > 3:
        tl.store(p_g + (W - 4) * C, g_1, mask=m_d)
    if W > 2:
        tl.store(p_g + (W - 3) * C, g_2, mask=m_d)
    tl.store(p_g + (W - 2) * C, g_3, mask=m_d)
    tl.store(p_g + (W - 1) * C, g_4, mask=m_d)
    if bias is not None:
        tl.store(p_g + W * C, g_0, mask=m_d)


@triton.jit(do_not_specialize=["T", "N"])
def convolution_bwd_kernel(
    x,
    weight,
    bias,
    initial_state,
    cu_seqlens,
    dq,
    dk,
    dv,
    dstate,
    dx,
    share,
    dinitial,
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
    """The gradients of one stretch of one block of channels.

    share [slots, W, C], or W + 1 with a bias, fp32, is what the stretch has
    of the taps' gradients: torch adds them up.
    """
    CV: tl.constexpr = C - 2 * H * K
    NB: tl.constexpr = 2 * H + (CV + BV - 1) // BV
    i_c, i_d = tl.program_id(0) // NB, tl.program_id(0) % NB
    i_n, start, end, t = stretch_of(i_c, cu_seqlens, N, T, BT)
    c, o_y = block_of(i_d, H, K, BV)
    if i_d < 2 * H:
        dy = dq
        if i_d >= H:
            dy = dk
        walk_back(
            *(x, weight, bias, initial_state, dy, dstate, dx, share),
            *(dinitial, eps, i_c, i_n, start, end, t, c, o_y),
            *(C, H * K, W, SILU, NORM, BT, K, BK),
        )
    else:
        walk_back(
            *(x, weight, bias, initial_state, dv, dstate, dx, share),
            *(dinitial, eps, i_c, i_n, start, end, t, c, o_y),
            *(C, CV, W, SILU, False, BT, BV, BV),
        )
