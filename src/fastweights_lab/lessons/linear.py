"""Linear attention in sequence: the state never leaves the multiprocessor."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastweights.kernels.gpu import dot_precision, gpu_of
from fastweights.kernels.tile import min_tile_columns, state_at, tile_at
from fastweights_lab.lessons import check_inputs


@triton.jit
def chunk_output(b_q, b_k, b_v, b_S, scale, PRECISION: tl.constexpr):
    """scale (q S + tril(q k^T) v): from earlier chunks, and from this one.

    b_q, b_k [BT, BK]; b_v [BT, BV]; b_S [BK, BV], the state that enters.
    """
    o_c = tl.arange(0, b_q.shape[0])
    b_A = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BT, BT]
    b_A = tl.where(o_c[:, None] >= o_c[None, :], b_A, 0.0).to(b_v.dtype)
    b_S = b_S.to(b_q.dtype)
    b_o = tl.dot(b_q, b_S, input_precision=PRECISION)  # [BT, BV]
    b_o = tl.dot(b_A, b_v, b_o, input_precision=PRECISION)  # [BT, BV]
    return scale * b_o


@triton.jit(do_not_specialize=["T"])
def linear_scan_kernel(
    q,
    k,
    v,
    o,
    initial_state,
    state,
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One value tile of one head of one sequence, chunk after chunk."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_bh, i_v = tl.program_id(0) // NV, tl.program_id(0) % NV
    i_b, i_hv = i_bh // HV, i_bh % HV
    i_h = i_hv // (HV // H)

    o_S, m_S = state_at(i_bh, i_v, K, V, BK, BV)
    if initial_state is None:
        b_S = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        b_S = tl.load(initial_state + o_S, mask=m_S, other=0.0)  # [BK, BV]

    for i_t in range(tl.cdiv(T, BT)):
        o_k, m_k = tile_at(i_b, i_t, i_h, 0, T, H, K, BT, BK)
        o_v, m_v = tile_at(i_b, i_t, i_hv, i_v, T, HV, V, BT, BV)
        b_q = tl.load(q + o_k, mask=m_k, other=0.0)  # [BT, BK]
        b_k = tl.load(k + o_k, mask=m_k, other=0.0)  # [BT, BK]
        b_v = tl.load(v + o_v, mask=m_v, other=0.0)  # [BT, BV]
        b_o = chunk_output(b_q, b_k, b_v, b_S, scale, PRECISION)  # [BT, BV]
        tl.store(o + o_v, b_o, mask=m_v)
        b_k = tl.trans(b_k)  # [BK, BT]
        b_S = tl.dot(b_k, b_v, b_S, input_precision=PRECISION)  # [BK, BV]
    tl.store(state + o_S, b_S, mask=m_S)


def tile_sizes(K: int, dtype: torch.dtype) -> dict[str, int]:
    """BK and BV for heads of K key channels.

    No row is shorter than that of the narrowest tile, however few channels
    there are.
    """
    BV = min_tile_columns(dtype)
    return {"BK": max(BV, triton.next_power_of_2(K)), "BV": BV}


def scan_options(
    K: int, dtype: torch.dtype, capability: tuple[int, int]
) -> dict[str, Any]:
    """Tile sizes and launch settings for one head size, dtype and GPU."""
    stages = 1 if K > 128 else 2 if K > 64 or dtype == torch.float32 else 3
    if capability[0] == 10:  # nothing ahead: see TUNING.md
        stages = 1
    return tile_sizes(K, dtype) | {"num_warps": 4, "num_stages": stages}


def scan(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    *,
    scale: float,
    initial_state: Float[Tensor, "B HV K V"] | None = None,
    chunk_size: int = 64,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "B HV K V"]]:
    """Linear attention in one pass: o_t = scale S_t^T q_t.

    Args:
        q, k, v: fp32, fp16 or bf16, on a CUDA device (or interpreted, then
            not bf16); K <= 256; value head h uses key head h // (HV / H).
            Products are in that dtype, so that fp16 needs |S| < 65504.
        scale: factor on the outputs.
        initial_state: fp32; zeros if None.
        chunk_size: tokens per chunk, 16, 32 or 64.

    Returns:
        o in v's dtype, and the final state in fp32.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names
            it, what it got and what it needs.
    """
    check_inputs(q, k, v, scale, initial_state, chunk_size)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    o = torch.empty_like(v)
    state = q.new_empty(B, HV, K, V, dtype=torch.float32)
    options = scan_options(K, q.dtype, gpu_of(q.device).capability)
    options |= {"PRECISION": dot_precision(q.dtype, K)}
    sizes = H, HV, K, V, chunk_size
    grid = (B * HV * triton.cdiv(V, options["BV"]),)
    with torch.cuda.device_of(q):
        linear_scan_kernel[grid](
            q, k, v, o, initial_state, state, scale, T, *sizes, **options
        )
    return o, state
