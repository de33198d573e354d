"""MesaNet's equations by conjugate gradients: one program per chunk and head.

Every token t of a head has equations of its own,

    (H_t + Diag(ridge)) x_t = b_t,   H_t = e^{g_t} H_{t-1} + beta_t k_t k_t^T,

but within a chunk they share what they are made of: with H the matrix that
enters the chunk, D_ts = beta_s e^{G_t - G_s} for s <= t, G the running sum of
g, and a row of X per token, the products H_t x_t of a chunk are

    Diag(e^G) X H + ((X K^T) . D) K.

So one kernel finds the matrix that enters each chunk, as a scan does, and
another keeps it beside the chunk's keys on the multiprocessor for all steps
of the chunk's tokens. Of a step nothing goes to memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.kernels.gpu import dot_precision
from fastweights.kernels.tail import clear_tail
from fastweights.kernels.tile import (
    Tiles,
    chunk_span,
    dot,
    first_slot,
    load_numbers,
    load_rows,
    sequence_span,
    state_at,
    store_rows,
)

CHUNK = 64
# e^{-110} is 0 in fp32; sums of 64 such gates still have their bits.
LEAST_GATE = tl.constexpr(-110.0)
TINY = tl.constexpr(1e-37)


class MesaMeta(NamedTuple):
    """Constants of both kernels: their argument META."""

    H: int
    K: int
    BT: int
    BK: int
    BN: int  # columns of a matrix that one program of the states has
    BY_COLUMNS: bool  # whether a program of the solution has 8 warps
    PRECISION: str

    @property
    def TILES(self) -> Tiles:
        """The tiles of keys."""
        return Tiles(self.H, self.K, self.BT, self.BK)

    @property
    def COLUMNS(self) -> Tiles:
        """The tiles of keys along a matrix's columns."""
        return Tiles(self.H, self.K, self.BT, self.BN)


@triton.jit
def load_gates(g, beta, place, META: tl.constexpr):
    """The running sum of g [BT], and beta, 0 past the end."""
    b_g = tl.maximum(load_numbers(g, place, META.H, META.BT), LEAST_GATE)
    return tl.cumsum(b_g, axis=0), load_numbers(beta, place, META.H, META.BT)


@triton.jit(do_not_specialize=["T"])
def mesa_states_kernel(
    k, g, beta, initial_state, states, cu_seqlens, T, META: tl.constexpr
):
    """The matrices [K, K] that enter a sequence's chunks, BN columns of them.

    states: [slots, H, K, K], of which empty slots are not written.
    """
    H: tl.constexpr = META.H
    K: tl.constexpr = META.K
    BT: tl.constexpr = META.BT
    BK: tl.constexpr = META.BK
    BN: tl.constexpr = META.BN
    TILES: tl.constexpr = META.TILES
    COLUMNS: tl.constexpr = META.COLUMNS
    NN: tl.constexpr = (K + BN - 1) // BN
    i_nh, i_d = tl.program_id(0) // NN, tl.program_id(0) % NN
    i_n, i_h = i_nh // H, i_nh % H
    start, end = sequence_span(i_n, cu_seqlens, T)
    i_slot = first_slot(i_n, cu_seqlens, T, BT)
    o_S, m_S = state_at(i_nh, i_d, K, K, BK, BN)
    if initial_state is None:
        b_S = tl.zeros([BK, BN], dtype=tl.float32)
    else:
        b_S = tl.load(initial_state + o_S, mask=m_S, other=0.0)  # [BK, BN]
    for t in range(start, end, BT):
        o_S, m_S = state_at(i_slot * H + i_h, i_d, K, K, BK, BN)
        tl.store(states + o_S, b_S, mask=m_S)
        place = t, end, i_h
        b_G, b_beta = load_gates(g, beta, place, META)
        b_last = tl.min(b_G, axis=0)  # it never rises
        b_k = load_rows(k, place, 0, TILES)  # [BT, BK]
        b_n = load_rows(k, place, i_d, COLUMNS)  # [BT, BN]
        b_w = b_k * (tl.exp(b_last - b_G) * b_beta)[:, None]
        b_S *= tl.exp(b_last)
        b_S = tl.dot(tl.trans(b_w), b_n, b_S, input_precision=META.PRECISION)
        i_slot += 1


@triton.jit(do_not_specialize=["N", "T", "steps"])
def mesa_solve_kernel(
    equations, states, x, cu_seqlens, N, T, steps, META: tl.constexpr
):
    """x of one chunk and head, in ``steps`` steps from 0.

    The equations are b, k, g, beta and ridge.
    """
    b, k, g, beta, ridge = equations
    K: tl.constexpr = META.K
    BT: tl.constexpr = META.BT
    BK: tl.constexpr = META.BK
    BY_COLUMNS: tl.constexpr = META.BY_COLUMNS
    TILES: tl.constexpr = META.TILES
    PRECISION: tl.constexpr = META.PRECISION
    i_slot, i_h = tl.program_id(0) // META.H, tl.program_id(0) % META.H
    t, end = chunk_span(i_slot, cu_seqlens, N, T, BT)
    if t >= end:
        return
    o_S, m_S = state_at(tl.program_id(0), 0, K, K, BK, BK)
    b_S = tl.load(states + o_S, mask=m_S, other=0.0)  # [BK, BK]
    place = t, end, i_h
    b_k = load_rows(k, place, 0, TILES)  # [BT, BK]
    b_G, b_beta = load_gates(g, beta, place, META)
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    m_D = o_t[:, None] >= o_t[None, :]
    b_D = tl.exp(tl.where(m_D, b_G[:, None] - b_G[None, :], 0.0))
    b_D = tl.where(m_D, b_D * b_beta[None, :], 0.0)  # [BT, BT]
    b_G = tl.exp(b_G)[:, None]
    b_ridge = tl.load(ridge + i_h * K + o_k, mask=o_k < K, other=0.0)
    b_r = load_rows(b, place, 0, TILES)  # [BT, BK]
    b_p, b_x = b_r, tl.zeros([BT, BK], dtype=tl.float32)
    b_rr = tl.sum(b_r * b_r, axis=1)
    for _ in range(steps):
        b_A = (
            dot(b_p, tl.trans(b_k), None, PRECISION, BY_COLUMNS) * b_D
        )  # [BT, BT]
        b_Ap = dot(b_p, b_S, None, PRECISION, BY_COLUMNS) * b_G
        b_Ap = dot(b_A, b_k, b_Ap, PRECISION, BY_COLUMNS)  # [BT, BK]
        b_Ap += b_ridge[None, :] * b_p
        # Of rows that are solved quotients are 0 by 0, and count as 0.
        b_step = b_rr / tl.maximum(tl.sum(b_p * b_Ap, axis=1), TINY)
        b_x += b_step[:, None] * b_p
        b_r -= b_step[:, None] * b_Ap
        b_before = tl.maximum(b_rr, TINY)
        b_rr = tl.sum(b_r * b_r, axis=1)
        b_p = b_r + (b_rr / b_before)[:, None] * b_p
    store_rows(x, b_x, place, 0, TILES)


def meta_of(H: int, K: int, precision: str) -> MesaMeta:
    """Tiles, and warps by the size of the matrix that they share.

    Heads of 64 spill 88 bytes with 4 warps, and still two such programs on a
    multiprocessor take 3.8 ms where one of 8 warps takes 7.0.
    """
    BK = max(16, triton.next_power_of_2(K))
    return MesaMeta(H, K, CHUNK, BK, min(BK, 64), BK > 64, precision)


def solve(
    b: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    ridge: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    steps: int,
    dtype: torch.dtype,
) -> Tensor:
    """x [B, T, H, K].

    All contiguous and in fp32: b and k [B, T, H, K], g and beta [B, T, H],
    ridge [H, K], initial_state [N, H, K, K]. ``dtype`` is what k was in:
    products of half precision's ten bits do for it, where fp32 asks PyTorch.
    """
    B, T, H, K = b.shape
    if cu_seqlens is None:
        N, slots = B, B * triton.cdiv(T, CHUNK)
    else:
        N = len(cu_seqlens) - 1
        slots = triton.cdiv(T, CHUNK) + N
    x = torch.empty_like(b)
    states = b.new_empty(slots, H, K, K)
    meta = meta_of(H, K, dot_precision(dtype, K))
    equations = b, k, g, beta, ridge
    settings = {"num_warps": 4, "num_stages": 1}
    with torch.cuda.device_of(b):
        mesa_states_kernel[(N * H * triton.cdiv(K, meta.BN),)](
            k, g, beta, initial_state, states, cu_seqlens, T, meta, **settings
        )
        settings["num_warps"] = 8 if meta.BY_COLUMNS else 4
        mesa_solve_kernel[(slots * H,)](
            equations, states, x, cu_seqlens, N, T, steps, meta, **settings
        )
    clear_tail(cu_seqlens, x)
    return x
