"""The short convolution, its activation and the norm of q and k: one pass.

A program walks along a stretch of BT tokens of one sequence with one block of
channels: a head of q or k, so that its norm is a sum over the row, or up to
BV of the others. It holds the last three inputs in registers and reads four
rows at a time, those of the next four tokens while it computes these, so that
memory has something to do. A row is read once, and three rows twice: the
three before the stretch, and in the backward the three behind it.

Bytes per channel and token in half precision: 4 forward (x, y), 6 backward
(x, dy, dx). The backward computes the sums again and keeps nothing; its
shares of the weights' gradient are 16 bytes per channel and stretch, written
once and read once.

Filters shorter than four have no oldest taps: W is known when a kernel is
compiled, and what they would multiply is not computed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.kernels.tile import (
    add_pairs,
    first_slot,
    sequence_of,
    sequence_span,
    sigmoid,
)

FP32 = torch.float32
LONG = 256  # tokens in a stretch of the backward, where there are many


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
    return tl.load(
        p_x + t * C + o_d, mask=tl.where(m_t, m_d, False), other=0.0
    )


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
    tl.store(p_y + t * R + o_y, b_z, mask=tl.where(t < end, m_d, False))


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
        tl.store(p_s, b_x, mask=tl.where(is_last, m_d, False))


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
def store_gradient(
    dx,
    dinitial,
    dstate,
    i_n,
    start,
    t,
    stop,
    end,
    s,
    d_1,
    d_2,
    d_3,
    d_4,
    w_1,
    w_2,
    w_3,
    w_4,
    o_d,
    m_d,
    C: tl.constexpr,
    W: tl.constexpr,
):
    """That of the input W - 1 before token s, which s is the last to read.

    d_4 is the gradient of s's sum, d_1 to d_3 those before it. The stretch
    has the inputs t to stop; the first one of a sequence also its state's.
    """
    s = s - (W - 1)
    if W == 4:
        b_dx = w_4 * d_1 + w_3 * d_2 + w_2 * d_3 + w_1 * d_4
    elif W == 3:
        b_dx = w_4 * d_2 + w_3 * d_3 + w_2 * d_4
    else:
        b_dx = w_4 * d_3 + w_3 * d_4
    if dstate is not None:
        left = s - (end - (W - 1))  # its row of the last state
        m_s = (left >= 0) & (left < W - 1)
        i_s = i_n * (W - 1) + left
        b_dx += load_row(dstate, i_s, m_s, o_d, m_d, C).to(tl.float32)
    m_s = tl.where((s >= t) & (s < stop), m_d, False)
    tl.store(dx + s * C + o_d, b_dx, mask=m_s)
    if dinitial is not None:
        m_s = tl.where((s < t) & (t == start), m_d, False)
        i_s = (i_n + 1) * (W - 1) + s - start
        tl.store(dinitial + i_s * C + o_d, b_dx, mask=m_s)


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
    """The gradients of a stretch, in the order of its tokens.

    Token s is the last to read the input W - 1 before it, whose gradient is
    then complete. So the walk goes W - 1 tokens past the stretch, and leaves
    what the inputs before it have to the stretch there.
    """
    o_b = tl.arange(0, BD)
    o_d, o_y = c + o_b, o_y + o_b
    m_d = (o_b < D) & (o_d < C)
    w_0, w_1, w_2, w_3, w_4 = load_filter(weight, bias, o_d, m_d, W)
    b_1, b_2, b_3 = inputs_before(
        x, initial_state, i_n, t, start, end, o_d, m_d, C, W
    )
    d_1, d_2, d_3 = tl.zeros_like(w_0), tl.zeros_like(w_0), tl.zeros_like(w_0)
    g_0, g_1, g_2 = tl.zeros_like(w_0), tl.zeros_like(w_0), tl.zeros_like(w_0)
    g_3, g_4 = tl.zeros_like(w_0), tl.zeros_like(w_0)
    stop = tl.minimum(t + BT, end)
    past = tl.minimum(stop + W - 1, end)
    n_0, n_1, n_2, n_3 = load_rows(x, t, past, o_d, m_d, C)
    a_0, a_1, a_2, a_3 = load_rows(dy, t, past, o_y, m_d, R)
    for i in range(0, (stop - t).to(tl.int32) + W - 1, 4):
        s = t + i
        b_4, b_5 = n_0.to(tl.float32), n_1.to(tl.float32)
        b_6, b_7 = n_2.to(tl.float32), n_3.to(tl.float32)
        d_4, d_5 = a_0.to(tl.float32), a_1.to(tl.float32)
        d_6, d_7 = a_2.to(tl.float32), a_3.to(tl.float32)
        n_0, n_1, n_2, n_3 = load_rows(x, s + 4, past, o_d, m_d, C)
        a_0, a_1, a_2, a_3 = load_rows(dy, s + 4, past, o_y, m_d, R)

        b_z = filtered(b_1, b_2, b_3, b_4, w_0, w_1, w_2, w_3, w_4, W)
        d_4 = gradient_of_sum(b_z, d_4, eps, SILU, NORM)
        b_z = filtered(b_2, b_3, b_4, b_5, w_0, w_1, w_2, w_3, w_4, W)
        d_5 = gradient_of_sum(b_z, d_5, eps, SILU, NORM)
        b_z = filtered(b_3, b_4, b_5, b_6, w_0, w_1, w_2, w_3, w_4, W)
        d_6 = gradient_of_sum(b_z, d_6, eps, SILU, NORM)
        b_z = filtered(b_4, b_5, b_6, b_7, w_0, w_1, w_2, w_3, w_4, W)
        d_7 = gradient_of_sum(b_z, d_7, eps, SILU, NORM)

        # The filter's gradient, of this stretch's own tokens.
        e_4 = tl.where(s < stop, d_4, 0.0)
        e_5 = tl.where(s + 1 < stop, d_5, 0.0)
        e_6 = tl.where(s + 2 < stop, d_6, 0.0)
        e_7 = tl.where(s + 3 < stop, d_7, 0.0)
        g_4 += e_4 * b_4 + e_5 * b_5 + e_6 * b_6 + e_7 * b_7
        g_3 += e_4 * b_3 + e_5 * b_4 + e_6 * b_5 + e_7 * b_6
        if W > 2:
            g_2 += e_4 * b_2 + e_5 * b_3 + e_6 * b_4 + e_7 * b_5
        if W > 3:
            g_1 += e_4 * b_1 + e_5 * b_2 + e_6 * b_3 + e_7 * b_4
        if bias is not None:
            g_0 += e_4 + e_5 + e_6 + e_7

        store_gradient(
            *(dx, dinitial, dstate, i_n, start, t, stop, end, s),
            *(d_1, d_2, d_3, d_4, w_1, w_2, w_3, w_4, o_d, m_d, C, W),
        )
        store_gradient(
            *(dx, dinitial, dstate, i_n, start, t, stop, end, s + 1),
            *(d_2, d_3, d_4, d_5, w_1, w_2, w_3, w_4, o_d, m_d, C, W),
        )
        store_gradient(
            *(dx, dinitial, dstate, i_n, start, t, stop, end, s + 2),
            *(d_3, d_4, d_5, d_6, w_1, w_2, w_3, w_4, o_d, m_d, C, W),
        )
        store_gradient(
            *(dx, dinitial, dstate, i_n, start, t, stop, end, s + 3),
            *(d_4, d_5, d_6, d_7, w_1, w_2, w_3, w_4, o_d, m_d, C, W),
        )
        b_1, b_2, b_3 = b_5, b_6, b_7
        d_1, d_2, d_3 = d_5, d_6, d_7

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


def options(C: int, H: int, K: int, rows: int, back: bool) -> dict[str, int]:
    """Launch settings: a warp for up to 128 channels, four per thread.

    A long stretch has fewer shares of the filter's gradient, a short one
    more programs: the backward takes long ones where there are many tokens.
    """
    BK = triton.next_power_of_2(max(K, 1))
    BV = min(max(128, BK), triton.next_power_of_2(C - 2 * H * K))
    BT = LONG if back and rows >= 16 * LONG else 64
    warps = max(BK, BV, 128) // 128
    sizes = {"BT": BT, "BK": BK, "BV": BV}
    return sizes | {"num_warps": warps, "num_stages": 1}


def launch(
    kernel: Any,
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    heads: tuple[int, int, int, int],
    eps: float | None,
    silu: bool,
    settings: dict[str, int],
    *arguments: Any,
) -> None:
    """One program per stretch of tokens and block of channels."""
    B, T, C = x.shape
    H, K, *_ = heads
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    constants = {"C": C, "H": H, "K": K, "W": weight.shape[1]}
    constants |= {"SILU": silu, "NORM": eps is not None} | settings
    blocks = 2 * H + triton.cdiv(C - 2 * H * K, settings["BV"])
    programs = blocks * slots(x, cu_seqlens, settings["BT"])
    with torch.cuda.device_of(x):
        kernel[(programs,)](*arguments, eps or 0.0, T, N, **constants)


def slots(x: Tensor, cu_seqlens: Tensor | None, BT: int) -> int:
    """Stretches of BT tokens there can be: see ``tile.first_slot``."""
    B, T, _ = x.shape
    if cu_seqlens is None:
        return B * triton.cdiv(T, BT)
    return triton.cdiv(T, BT) + len(cu_seqlens) - 1


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    heads: tuple[int, int, int, int],
    eps: float | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and last inputs, as :mod:`fastweights.reference.convolution`.

    The tensors are contiguous, and there is a token.
    """
    (B, T, C), W = x.shape, weight.shape[1]
    H, K, HV, V = heads
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    state = x.new_empty(N, W - 1, C)
    if H:
        q, k = x.new_empty(B, T, H, K), x.new_empty(B, T, H, K)
        v = x.new_empty(B, T, HV, V)
    else:
        q, k, v = x.new_empty(0), x.new_empty(0), torch.empty_like(x)
    settings = options(C, H, K, B * T, back=False)
    launch(
        *(convolution_fwd_kernel, x, weight, cu_seqlens, heads, eps, silu),
        *(settings, x, weight, bias, initial_state, cu_seqlens),
        *(q, k, v, state),
    )
    return q, k, v, state


def backward(
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor,
    dstate: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    heads: tuple[int, int, int, int],
    eps: float | None,
    silu: bool,
) -> list[Tensor | None]:
    """Gradients of x, weight, bias and initial_state, None without them.

    Those of weight and bias are in fp32. The tensors are contiguous.
    """
    (B, T, C), W = x.shape, weight.shape[1]
    H, K, *_ = heads
    settings = options(C, H, K, B * T, back=True)
    taps = W if bias is None else W + 1
    number = slots(x, cu_seqlens, settings["BT"])
    share = x.new_empty(number, taps, C, dtype=FP32)
    dx = torch.empty_like(x)
    dinitial = None
    if initial_state is not None:
        dinitial = torch.empty_like(initial_state)
    launch(
        *(convolution_bwd_kernel, x, weight, cu_seqlens, heads, eps, silu),
        *(settings, x, weight, bias, initial_state, cu_seqlens),
        *(dq, dk, dv, dstate, dx, share, dinitial),
    )
    total = share.sum(0)  # [W or W + 1, C]
    dbias = None if bias is None else total[W].clone()
    return [dx, total[:W].mT, dbias, dinitial]
