"""Softmax attention that never writes its T x T scores to memory.

A program owns one tile of tokens and meets the others tile by tile. Forward:
queries meet keys, and what they gathered so far is scaled down whenever a
larger score turns up (Dao et al. 2022, algorithm 1). Backward: scores are
computed again, and one number per query, the log-sum-exp of its scores, makes
them weights (Dao 2023, algorithm 2). This is FlashAttention to be read;
``torch.nn.functional.scaled_dot_product_attention`` is the one to use.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastweights.kernels import check_attention, dot_precision
from fastweights.kernels.tile import (
    LOG2_E,
    load_row,
    load_rows,
    row_at,
    store_rows,
    tile_sizes,
    tiles,
)


@triton.jit
def own_tile(T, H: tl.constexpr, BT: tl.constexpr):
    """The tile and head a program owns, and its sequence's first token."""
    NT = tl.cdiv(T, BT)
    i_bh, i_t = tl.program_id(0) // NT, tl.program_id(0) % NT
    return i_t, i_bh % H, (i_bh // H).to(tl.int64) * T


@triton.jit
def key_tiles(
    i_t, T, DIAGONAL: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr
):
    """From and to which tile of BS keys the queries of tile i_t go.

    Before the diagonal they meet every key, and need no mask; on it, some.
    """
    i_diagonal = i_t * BT // BS
    if DIAGONAL:
        return i_diagonal, tl.cdiv(tl.minimum(i_t * BT + BT, T), BS)
    else:
        return 0, i_diagonal


@triton.jit
def scores(b_x, b_y, scale, m_s, PRECISION: tl.constexpr):
    """scale x y^T in log2 units [rows of x, rows of y]; -inf off the mask."""
    b_s = tl.dot(b_x, tl.trans(b_y), input_precision=PRECISION)
    b_s *= scale * LOG2_E
    return b_s if m_s is None else tl.where(m_s, b_s, -float("inf"))


@triton.jit
def weights(
    b_x, b_y, b_dx, b_dy, b_lse, b_delta, scale, m_s, PRECISION: tl.constexpr
):
    """The weights p of a tile, and the scores' gradient p (dp - delta).

    x, y, dx, dy are q, k, do, v: one row per query. Or they are k, q, v, do:
    one column per query, so that no product is transposed in registers. b_lse
    and b_delta, one number per query, come as a column or as a row.
    """
    b_p = tl.exp2(scores(b_x, b_y, scale, m_s, PRECISION) - b_lse)
    b_dp = tl.broadcast_to(-b_delta, b_p.shape)  # frees delta's registers
    b_dp = tl.dot(b_dx, tl.trans(b_dy), b_dp, input_precision=PRECISION)
    return b_p, b_p * b_dp


@triton.jit(do_not_specialize=["T"])
def flash_fwd_kernel(
    q,
    k,
    v,
    o,
    lse,
    scale,
    T,
    HQ: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs of BT queries of one head.

    And lse [B, T, HQ], fp32: log2 of the sum of their exp2(scores).
    """
    i_t, i_hq, t_0 = own_tile(T, HQ, BT)
    i_t = tl.cdiv(T, BT) - 1 - i_t  # those with most keys start first
    i_h = i_hq // (HQ // H)
    t, end = t_0 + i_t * BT, t_0 + T
    b_q = load_rows(q, (t, end, i_hq), 0, tiles(HQ, K, BT, BK))  # [BT, BK]

    b_max = tl.full([BT], -float("inf"), dtype=tl.float32)
    b_sum = tl.zeros([BT], dtype=tl.float32)
    b_o = tl.zeros([BT, BV], dtype=tl.float32)
    o_t, o_s = i_t * BT + tl.arange(0, BT), tl.arange(0, BS)
    for DIAGONAL in tl.static_range(2):
        i_from, i_to = key_tiles(i_t, T, DIAGONAL, BT, BS)
        for i_s in range(i_from, i_to):
            s = t_0 + i_s * BS
            b_k = load_rows(
                k, (s, end, i_h), 0, tiles(H, K, BS, BK)
            )  # [BS, BK]
            b_v = load_rows(
                v, (s, end, i_h), 0, tiles(H, V, BS, BV)
            )  # [BS, BV]
            m_s = o_t[:, None] >= i_s * BS + o_s[None, :] if DIAGONAL else None
            b_s = scores(b_q, b_k, scale, m_s, PRECISION)  # [BT, BS]
            b_new = tl.maximum(b_max, tl.max(b_s, axis=1))  # [BT]
            b_fade = tl.exp2(b_max - b_new)  # [BT]
            b_p = tl.exp2(b_s - b_new[:, None])  # [BT, BS]
            b_sum = b_fade * b_sum + tl.sum(b_p, axis=1)  # [BT]
            b_o *= b_fade[:, None]
            b_p = b_p.to(b_v.dtype)
            b_o = tl.dot(b_p, b_v, b_o, input_precision=PRECISION)  # [BT, BV]
            b_max = b_new
    p_lse, m_t = row_at(lse, (t, end, i_hq), HQ, BT)
    b_o /= b_sum[:, None]
    store_rows(o, b_o, (t, end, i_hq), 0, tiles(HQ, V, BT, BV))
    tl.store(p_lse, b_max + tl.log2(b_sum), mask=m_t)


@triton.jit(do_not_specialize=["T"])
def flash_bwd_dq_kernel(
    q,
    k,
    v,
    o,
    lse,
    do,
    delta,
    dq,
    scale,
    T,
    HQ: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq of BT queries of one head, and delta = o . do [B, T, HQ], fp32."""
    i_t, i_hq, t_0 = own_tile(T, HQ, BT)
    i_t = tl.cdiv(T, BT) - 1 - i_t
    i_h = i_hq // (HQ // H)
    t, end = t_0 + i_t * BT, t_0 + T
    b_q = load_rows(q, (t, end, i_hq), 0, tiles(HQ, K, BT, BK))  # [BT, BK]
    b_do = load_rows(do, (t, end, i_hq), 0, tiles(HQ, V, BT, BV))  # [BT, BV]
    b_o = load_rows(o, (t, end, i_hq), 0, tiles(HQ, V, BT, BV))  # [BT, BV]
    b_lse = load_row(lse, (t, end, i_hq), HQ, BT)[:, None]  # [BT, 1]
    b_delta = tl.sum(b_o.to(tl.float32) * b_do, axis=1)  # [BT]
    p_delta, m_t = row_at(delta, (t, end, i_hq), HQ, BT)
    tl.store(p_delta, b_delta, mask=m_t)
    b_delta = b_delta[:, None]  # [BT, 1]

    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    o_t, o_s = i_t * BT + tl.arange(0, BT), tl.arange(0, BS)
    for DIAGONAL in tl.static_range(2):
        i_from, i_to = key_tiles(i_t, T, DIAGONAL, BT, BS)
        for i_s in range(i_from, i_to):
            s = t_0 + i_s * BS
            b_k = load_rows(
                k, (s, end, i_h), 0, tiles(H, K, BS, BK)
            )  # [BS, BK]
            b_v = load_rows(
                v, (s, end, i_h), 0, tiles(H, V, BS, BV)
            )  # [BS, BV]
            m_s = o_t[:, None] >= i_s * BS + o_s[None, :] if DIAGONAL else None
            _, b_ds = weights(
                b_q, b_k, b_do, b_v, b_lse, b_delta, scale, m_s, PRECISION
            )  # [BT, BS]
            b_ds = b_ds.to(b_k.dtype)
            b_dq = tl.dot(b_ds, b_k, b_dq, input_precision=PRECISION)
    store_rows(dq, scale * b_dq, (t, end, i_hq), 0, tiles(HQ, K, BT, BK))


@triton.jit(do_not_specialize=["T"])
def flash_bwd_dkv_kernel(
    q,
    k,
    v,
    lse,
    do,
    delta,
    dk,
    dv,
    scale,
    T,
    HQ: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of BT keys of one head, summed over the heads that query it.

    Past the end q and do are 0: such queries add nothing, whatever they
    weigh.
    """
    i_t, i_h, t_0 = own_tile(T, H, BT)
    t, end = t_0 + i_t * BT, t_0 + T
    b_k = load_rows(k, (t, end, i_h), 0, tiles(H, K, BT, BK))  # [BT, BK]
    b_v = load_rows(v, (t, end, i_h), 0, tiles(H, V, BT, BV))  # [BT, BV]

    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    b_dv = tl.zeros([BT, BV], dtype=tl.float32)
    o_t, o_s = i_t * BT + tl.arange(0, BT), tl.arange(0, BS)
    G: tl.constexpr = HQ // H
    NS = tl.cdiv(T, BS)
    i_first = i_t * BT // BS
    i_full = tl.minimum(tl.cdiv(i_t * BT + BT, BS), NS)
    for DIAGONAL in tl.static_range(2):
        i_from, i_to = (i_first, i_full) if DIAGONAL else (i_full, NS)
        for i in range(i_from * G, i_to * G):  # each head in each tile
            i_s, i_hq = i // G, i_h * G + i % G
            s = t_0 + i_s * BS
            b_q = load_rows(
                q, (s, end, i_hq), 0, tiles(HQ, K, BS, BK)
            )  # [BS, BK]
            b_do = load_rows(
                do, (s, end, i_hq), 0, tiles(HQ, V, BS, BV)
            )  # [BS, BV]
            b_lse = load_row(lse, (s, end, i_hq), HQ, BS)[None, :]  # [1, BS]
            b_delta = load_row(delta, (s, end, i_hq), HQ, BS)[None, :]
            m_s = o_t[:, None] <= i_s * BS + o_s[None, :] if DIAGONAL else None
            b_p, b_ds = weights(
                b_k, b_q, b_v, b_do, b_lse, b_delta, scale, m_s, PRECISION
            )  # [BT, BS]
            b_p, b_ds = b_p.to(b_do.dtype), b_ds.to(b_q.dtype)
            b_dv = tl.dot(b_p, b_do, b_dv, input_precision=PRECISION)
            b_dk = tl.dot(b_ds, b_q, b_dk, input_precision=PRECISION)
    store_rows(dk, scale * b_dk, (t, end, i_h), 0, tiles(H, K, BT, BK))
    store_rows(dv, b_dv, (t, end, i_h), 0, tiles(H, V, BT, BV))


def flash_options(
    K: int, V: int, dtype: torch.dtype, *, backward: bool
) -> dict[str, int]:
    """Tile sizes and launch settings: BT tokens per program, BS at a time.

    Nothing here asks which GPU it is: the smallest offer 99 KiB of shared
    memory per program. In fp32, and for heads wider than 128, tiles have
    fewer than 64 rows, and every GPU keeps the operands in registers.
    """
    D, single = max(K, V), dtype == torch.float32
    BT, BS = 128, 32 if backward and D > 64 else 64
    if single or D > 128:
        BT, BS = 16 if single and D > 128 else 32, 32
    return {
        "BT": BT,
        "BS": BS,
        "BK": tile_sizes(K, dtype)["BK"],
        "BV": tile_sizes(V, dtype)["BK"],
        "num_warps": 8,
        "num_stages": 1 if single else 2,
    }


def constants(q: Tensor, v: Tensor, *, backward: bool) -> dict[str, Any]:
    """What all three kernels are compiled for."""
    HQ, K = q.shape[2:]
    H, V = v.shape[2:]
    heads = {"HQ": HQ, "H": H, "K": K, "V": V}
    precision = {"PRECISION": dot_precision(q.dtype, max(K, V))}
    options = flash_options(K, V, q.dtype, backward=backward)
    return heads | precision | options


class FlashAttention(torch.autograd.Function):
    """Keeps o and a number per query for the backward, never the weights."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        B, T, HQ, _ = q.shape
        o = q.new_empty(B, T, HQ, v.shape[3])
        lse = q.new_empty(B, T, HQ, dtype=torch.float32)
        options = constants(q, v, backward=False)
        grid = (B * HQ * triton.cdiv(T, options["BT"]),)
        with torch.cuda.device_of(q):
            flash_fwd_kernel[grid](q, k, v, o, lse, scale, T, **options)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "flash_attention: got create_graph=True, need False: "
                "its gradients have no derivative"
            )
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        delta = torch.empty_like(lse)
        B, T, HQ, _ = q.shape
        H = k.shape[2]
        options = constants(q, v, backward=True)
        NT = triton.cdiv(T, options["BT"])
        with torch.cuda.device_of(q):
            flash_bwd_dq_kernel[(B * HQ * NT,)](
                q, k, v, o, lse, do, delta, dq, ctx.scale, T, **options
            )
            flash_bwd_dkv_kernel[(B * H * NT,)](
                q, k, v, lse, do, delta, dk, dv, ctx.scale, T, **options
            )
        return dq, dk, dv, None


def flash_attention(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    *,
    scale: float | None = None,
) -> Float[Tensor, "B T HQ V"]:
    """Causal softmax attention, differentiable once.

    Args:
        q, k, v: fp32, fp16 or bf16, on a CUDA device (or interpreted, then
            not bf16); K, V <= 256; query head h uses key head h // (HQ / H).
        scale: factor on the scores; K**-0.5 if None.

    Returns:
        o in q's dtype. Gradients have their input's dtype; those of k and v
        are summed over query heads in fp32, in a fixed order.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names
            it, what it got and what it needs.
        RuntimeError: in the backward, if that is to be differentiated.
    """
    check_attention(q, k, v, scale)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return FlashAttention.apply(q, k, v, scale)
