"""Forward of :mod:`fastweights.kernels.convolution`: sums and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
def tokens_of_slot(i_slot, cu_seqlens, N, T, BT: tl.constexpr):
    """Sequence, first and last token + 1 of it, first token of slot i_slot.

    The slots are those of :func:`tile.chunk_span`: of cu_seqlens that are no
    offsets a chunk may begin before its sequence, but not before token 0.
    """
    i_n = sequence_of(i_slot, cu_seqlens, N, T, BT)
    start, end = sequence_span(i_n, cu_seqlens, T)
    t = start + (i_slot - first_slot(i_n, cu_seqlens, T, BT)) * BT
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


@dataclass(frozen=True)
class Block:
    """Constants of a walk along a block of channels."""

    C: int  # channels of x
    R: int  # channels of the result
    W: int  # taps
    SILU: bool
    NORM: bool
    BT: int  # tokens in a chunk
    D: int  # channels of the block
    BD: int  # D, up to a power of two


class ConvolutionMeta(NamedTuple):
    """Constants of a kernel: its argument META."""

    C: int  # channels of x
    H: int
    K: int
    W: int  # taps
    SILU: bool
    NORM: bool  # whether q and k are brought to unit length
    BT: int
    BK: int
    BV: int

    @property
    def NB(self) -> int:
        """Blocks: heads of q and k, and BV of the other channels each."""
        return 2 * self.H + triton.cdiv(self.REST.R, self.BV)

    @property
    def HEAD(self) -> Block:
        """A head of q or k."""
        R, D, BD = self.H * self.K, self.K, self.BK
        return Block(self.C, R, self.W, self.SILU, self.NORM, self.BT, D, BD)

    @property
    def REST(self) -> Block:
        """A block of v."""
        R, D = self.C - 2 * self.H * self.K, self.BV
        return Block(self.C, R, self.W, self.SILU, False, self.BT, D, D)


@triton.jit
def load_input(p_x, t, m_t, channels, C: tl.constexpr):
    """Row t of x [rows, C], of channels (o_d, m_d), if m_t; else 0."""
    o_d, m_d = channels
    return tl.load(p_x + t * C + o_d, mask=mask_if(m_t, m_d), other=0.0)


@triton.jit
def load_inputs(p_x, t, end, channels, C: tl.constexpr):
    """Rows t to t + 3, those before ``end``: at once, and in x's dtype."""
    return [
        load_input(p_x, t + j, t + j < end, channels, C) for j in (0, 1, 2, 3)
    ]


@triton.jit
def to_fp32(rows):
    """The rows, each in fp32."""
    return [b_x.to(tl.float32) for b_x in rows]


@triton.jit
def input_at(x, initial_state, t, chunk, channels, BLOCK: tl.constexpr):
    """The input of token t, or of the W - 1 before ``start``; else 0. fp32."""
    i_n, start, end, _ = chunk
    m_t = (t >= start) & (t < end)
    b_x = load_input(x, t, m_t, channels, BLOCK.C)
    if initial_state is not None:
        m_s = (t < start) & (t + BLOCK.W > start)
        i_s = (i_n + 1) * (BLOCK.W - 1) + t - start
        b_s = load_input(initial_state, i_s, m_s, channels, BLOCK.C)
        b_x = tl.where(t < start, b_s, b_x)
    return b_x.to(tl.float32)


@triton.jit
def load_filter(weight, bias, o_d, m_d, W: tl.constexpr):
    """The bias and four taps, oldest first: [BD] each, fp32.

    W taps are the last W of the four. A channel's taps lie side by side and
    are loaded as they lie.
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
    return w_0, [w_1, w_2, w_3, w_4]


@triton.jit
def apply_filter(b_bias, taps, rows, W: tl.constexpr):
    """The bias, and of four inputs the last W, each times its tap."""
    b_z = b_bias
    for j in tl.static_range(3, 3 - W, -1):
        b_z += taps[j] * rows[j]
    return b_z


@triton.jit
def store_output(p_y, t, end, b_z, eps, outputs, BLOCK: tl.constexpr):
    """Row t of y [rows, R], channels ``outputs``, from the sums."""
    o_y, m_d = outputs
    if BLOCK.SILU:
        b_z = b_z * sigmoid(b_z)
    if BLOCK.NORM:
        b_z *= tl.rsqrt(tl.sum(b_z * b_z, axis=0) + eps)
    tl.store(p_y + t * BLOCK.R + o_y, b_z, mask=mask_if(t < end, m_d))


@triton.jit
def chunk_fwd(inputs, y, state, eps, chunk, c, o_y, BLOCK: tl.constexpr):
    """The outputs of a chunk: of channels c to c + BD, before c + D.

    And the sequence's last W - 1 inputs, if they are the last of this
    chunk.
    """
    x, weight, bias, initial_state = inputs
    i_n, start, end, t = chunk
    C: tl.constexpr = BLOCK.C
    W: tl.constexpr = BLOCK.W
    o_b = tl.arange(0, BLOCK.BD)
    o_d, o_y = c + o_b, o_y + o_b
    m_d = (o_b < BLOCK.D) & (o_d < C)
    channels, outputs = (o_d, m_d), (o_y, m_d)
    b_bias, taps = load_filter(weight, bias, o_d, m_d, W)
    before = [
        input_at(x, initial_state, t - j, chunk, channels, BLOCK)
        for j in (3, 2, 1)
    ]
    stop = tl.minimum(t + BLOCK.BT, end)
    ahead = load_inputs(x, t, stop, channels, C)
    for i in range(0, (stop - t).to(tl.int32), 4):
        s = t + i
        rows = before + to_fp32(ahead)
        ahead = load_inputs(x, s + 4, stop, channels, C)
        for j in tl.static_range(4):
            b_z = apply_filter(b_bias, taps, rows[j : j + 4], W)
            store_output(y, s + j, stop, b_z, eps, outputs, BLOCK)
        before = rows[4:]
    # Of an empty sequence the only chunk is the last one, too.
    is_last = (t + BLOCK.BT >= end) & ((t < end) | (t == start))
    for i in tl.static_range(W - 1):
        s = end - (W - 1) + i
        b_x = input_at(x, initial_state, s, chunk, channels, BLOCK)
        p_s = state + (i_n * (W - 1) + i) * C + o_d
        tl.store(p_s, b_x, mask=mask_if(is_last, m_d))


@triton.jit(do_not_specialize=["T", "N"])
def convolution_fwd_kernel(
    inputs, cu_seqlens, outputs, state, eps, T, N, META: tl.constexpr
):
    """One chunk of one block of channels."""
    q, k, v = outputs
    HEAD: tl.constexpr = META.HEAD
    REST: tl.constexpr = META.REST
    i_slot, i_d = tl.program_id(0) // META.NB, tl.program_id(0) % META.NB
    chunk = tokens_of_slot(i_slot, cu_seqlens, N, T, META.BT)
    c, o_y = block_of(i_d, META.H, META.K, META.BV)
    if i_d < 2 * META.H:
        y = q
        if i_d >= META.H:
            y = k
        chunk_fwd(inputs, y, state, eps, chunk, c, o_y, HEAD)
    else:
        chunk_fwd(inputs, v, state, eps, chunk, c, o_y, REST)
