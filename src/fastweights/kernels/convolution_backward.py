"""Backward of :mod:`fastweights.kernels.convolution`: all gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.kernels.convolution_forward import (
    apply_filter,
    block_of,
    load_filter,
    load_input,
    to_fp32,
    tokens_of_slot,
)
from fastweights.kernels.tile import add_pairs, mask_if, sigmoid


@triton.jit
def load_four(p_x, masks, m_d, C: tl.constexpr):
    """Four rows from p_x [BD] on, C apart: at once, in x's dtype, or 0."""
    return [
        tl.load(p_x + j * C, mask=mask_if(masks[j], m_d), other=0.0)
        for j in (0, 1, 2, 3)
    ]


@triton.jit
def load_first_rows(p_x, left, m_d, C: tl.constexpr):
    """The first ``left`` of four rows from p_x on, zeros for the others."""
    return load_four(p_x, [left > j for j in (0, 1, 2, 3)], m_d, C)


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
def gradients_of_sums(rows, dys, b_bias, taps, eps, BLOCK: tl.constexpr):
    """The gradients of the sums of the tokens of dys, the last found first.

    rows begin three tokens before them.
    """
    found = []
    for j in tl.static_range(len(dys) - 1, -1, -1):
        b_z = apply_filter(b_bias, taps, rows[j : j + 4], BLOCK.W)
        b_dz = gradient_of_sum(b_z, dys[j], eps, BLOCK.SILU, BLOCK.NORM)
        found += [b_dz]
    return found[::-1]


@triton.jit
def add_taps_grad(dtaps, dzs, rows, W: tl.constexpr):
    """The taps' gradients and what four tokens add, a product at a time.

    The newest tap first; rows begin four tokens before those of dzs.
    """
    found = []
    for j in tl.static_range(W):
        b_g = dtaps[j]
        for i in tl.static_range(3, -1, -1):
            b_g += dzs[i] * rows[4 - j + i]
        found += [b_g]
    return found


@triton.jit
def gradient_of_input(
    dzs, taps, s, dstate, chunk, channels, BLOCK: tl.constexpr
):
    """The gradient of input s, from the sums' of its token and three more.

    The filter turned round, and what s has as one of the last inputs.
    """
    i_n, _, end, _ = chunk
    W: tl.constexpr = BLOCK.W
    b_dx = apply_filter(tl.zeros_like(taps[0]), taps, dzs[::-1], W)
    if dstate is not None:
        left = s - (end - (W - 1))  # its row of the last state
        m_s = (left >= 0) & (left < W - 1)
        i_s = i_n * (W - 1) + left
        b_dx += load_input(dstate, i_s, m_s, channels, BLOCK.C).to(tl.float32)
    return b_dx


@triton.jit
def load_group_before(
    p_x, initial_state, left, chunk, channels, BLOCK: tl.constexpr
):
    """Four whole rows of x, ``left`` groups after the chunk's first token.

    One group before it (left = -1) stand the inputs of the chunk before,
    or the initial state; nobody asks for more.
    """
    i_n, start, _, t = chunk
    o_d, m_d = channels
    C: tl.constexpr = BLOCK.C
    W: tl.constexpr = BLOCK.W
    m = (left >= 0) | ((left == -1) & (t > start))
    rows = load_four(p_x, [m, m, m, m], m_d, C)
    if initial_state is not None:
        m = (left == -1) & (t == start)
        p_s = initial_state + (i_n * (W - 1) + W - 5) * C + o_d
        b_0, b_1, b_2, b_3 = rows
        b_3 += tl.load(p_s + 3 * C, mask=mask_if(m, m_d), other=0.0)
        if W > 2:
            b_2 += tl.load(p_s + 2 * C, mask=mask_if(m, m_d), other=0.0)
        if W > 3:
            b_1 += tl.load(p_s + C, mask=mask_if(m, m_d), other=0.0)
        rows = [b_0, b_1, b_2, b_3]
    return rows


@triton.jit
def chunk_bwd(
    inputs,
    output_grads,
    grads,
    eps,
    i_slot,
    chunk,
    c,
    o_y,
    BLOCK: tl.constexpr,
):
    """The gradients of a chunk, from its last four tokens to its first.

    That of an input is the filter, turned round, over the sums' gradients of
    its token and of the W - 1 after it. So the walk begins with the tokens
    behind the chunk, whose inputs are the next chunk's. rows, dys and
    dzs, the sums' gradients, are those of the four tokens at hand.
    """
    x, weight, bias, initial_state = inputs
    dy, dstate = output_grads
    dx, share, dinitial = grads
    i_n, start, end, t = chunk
    C: tl.constexpr = BLOCK.C
    R: tl.constexpr = BLOCK.R
    W: tl.constexpr = BLOCK.W
    o_b = tl.arange(0, BLOCK.BD)
    o_d, o_y = c + o_b, o_y + o_b
    m_d = tl.full(o_b.shape, True, tl.int1)
    if BLOCK.D < BLOCK.BD or R % BLOCK.BD > 0:  # else all blocks are whole
        m_d = (o_b < BLOCK.D) & (o_y < R)
    channels = o_d, m_d
    b_bias, taps = load_filter(weight, bias, o_d, m_d, W)
    zero = tl.zeros_like(b_bias)
    dbias, dtaps = zero, [zero, zero, zero, zero][:W]

    length = tl.minimum(end - t, BLOCK.BT).to(tl.int32)
    groups = tl.maximum(length + 3, 0) // 4
    s = t + 4 * groups  # the first token behind the groups
    left = tl.minimum(end - s, 4).to(tl.int32)
    p_x, p_y, p_dx = x + s * C + o_d, dy + s * R + o_y, dx + s * C + o_d
    rows_behind = load_first_rows(p_x, left, m_d, C)[:3]
    dys_behind = load_first_rows(p_y, left, m_d, R)[:3]
    left = length - 4 * groups + 4  # rows of the last group
    left = tl.where(groups > 0, left, 0)
    rows = load_first_rows(p_x - 4 * C, left, m_d, C)
    dys_before = load_first_rows(p_y - 4 * R, left, m_d, R)
    p_x, p_y, p_dx = p_x - 8 * C, p_y - 4 * R, p_dx - 4 * C
    before = load_group_before(
        p_x, initial_state, groups - 2, chunk, channels, BLOCK
    )
    rows_behind, dys_behind = to_fp32(rows_behind), to_fp32(dys_behind)
    rows = to_fp32(rows)
    behind = gradients_of_sums(
        rows[1:] + rows_behind, dys_behind, b_bias, taps, eps, BLOCK
    )

    for i in range(groups - 1, -1, -1):
        rows = to_fp32(before) + rows
        dys = to_fp32(dys_before)
        p_x -= 4 * C
        before = load_group_before(
            p_x, initial_state, i - 2, chunk, channels, BLOCK
        )
        p_y -= 4 * R
        m = i > 0
        dys_before = load_four(p_y, [m, m, m, m], m_d, R)

        dzs = gradients_of_sums(rows[1:], dys, b_bias, taps, eps, BLOCK)
        dtaps = add_taps_grad(dtaps, dzs, rows, W)
        if bias is not None:
            dbias += dzs[0] + dzs[1] + dzs[2] + dzs[3]

        dzs += behind
        for j in tl.static_range(3, -1, -1):
            s = t + 4 * i + j
            b_dx = gradient_of_input(
                dzs[j : j + 4], taps, s, dstate, chunk, channels, BLOCK
            )
            m_dx = m_d
            if j > 0:
                m_dx = mask_if(left > j, m_d)
            tl.store(p_dx + j * C, b_dx, mask=m_dx)
        p_dx -= 4 * C
        left += 4
        rows, behind = rows[:4], dzs[:3]

    if dinitial is not None:
        dzs = [zero, zero, zero]
        dzs += behind
        p_s = dinitial + (i_n + 1) * (W - 1) * C + o_d
        for j in tl.static_range(1, W):
            s = start - j
            b_dx = gradient_of_input(
                dzs[3 - j : 7 - j], taps, s, dstate, chunk, channels, BLOCK
            )
            tl.store(p_s - j * C, b_dx, mask=mask_if(t == start, m_d))

    TAPS: tl.constexpr = W if bias is None else W + 1
    p_g = share + i_slot.to(tl.int64) * (TAPS * C) + o_d
    for j in tl.static_range(W):
        tl.store(p_g + j * C, dtaps[W - 1 - j], mask=m_d)
    if bias is not None:
        tl.store(p_g + W * C, dbias, mask=m_d)


@triton.jit(do_not_specialize=["T", "N"])
def convolution_bwd_kernel(
    inputs, cu_seqlens, output_grads, grads, eps, T, N, META: tl.constexpr
):
    """The gradients of one chunk of one block of channels.

    ``grads`` are dx, share and dinitial. share [slots, W, C], or W + 1 with a
    bias, in fp32, has each chunk's part of the taps' gradients: torch adds
    them up.
    """
    dq, dk, dv, dstate = output_grads
    HEAD: tl.constexpr = META.HEAD
    REST: tl.constexpr = META.REST
    i_slot, i_d = tl.program_id(0) // META.NB, tl.program_id(0) % META.NB
    chunk = tokens_of_slot(i_slot, cu_seqlens, N, T, META.BT)
    c, o_y = block_of(i_d, META.H, META.K, META.BV)
    if i_d < 2 * META.H:
        dy = dq
        if i_d >= META.H:
            dy = dk
        chunk_bwd(
            inputs, (dy, dstate), grads, eps, i_slot, chunk, c, o_y, HEAD
        )
    else:
        chunk_bwd(
            inputs, (dv, dstate), grads, eps, i_slot, chunk, c, o_y, REST
        )
