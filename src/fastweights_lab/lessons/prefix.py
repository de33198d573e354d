"""Across chunks in parallel: every chunk's state at once, in memory.

Three kernels where :mod:`fastweights_lab.lessons.linear` has one. What each
chunk adds to the state is known without the others; the state that enters a
chunk is a prefix sum of these; with it, the outputs of all chunks are
independent.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastweights.kernels.gpu import dot_precision
from fastweights.kernels.tile import state_at, tile_at
from fastweights_lab.lessons import check_inputs
from fastweights_lab.lessons.linear import chunk_output, tile_sizes


@triton.jit
def this_program(NT, NV: tl.constexpr):
    """The sequence and head, the chunk and the value tile it works on."""
    i = tl.program_id(0)
    return i // NV // NT, i // NV % NT, i % NV


@triton.jit(do_not_specialize=["T"])
def chunk_states_kernel(
    k,
    v,
    states,
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
    """k^T v of one chunk and value tile, into row i_t + 1 of its head."""
    NT = tl.cdiv(T, BT)
    i_bh, i_t, i_v = this_program(NT, (V + BV - 1) // BV)
    i_b, i_hv = i_bh // HV, i_bh % HV
    i_h = i_hv // (HV // H)
    o_k, m_k = tile_at(i_b, i_t, i_h, 0, T, H, K, BT, BK)
    o_v, m_v = tile_at(i_b, i_t, i_hv, i_v, T, HV, V, BT, BV)
    o_S, m_S = state_at(i_bh * (NT + 1) + i_t + 1, i_v, K, V, BK, BV)
    b_k = tl.load(k + o_k, mask=m_k, other=0.0)  # [BT, BK]
    b_v = tl.load(v + o_v, mask=m_v, other=0.0)  # [BT, BV]
    b_S = tl.dot(tl.trans(b_k), b_v, input_precision=PRECISION)  # [BK, BV]
    tl.store(states + o_S, b_S, mask=m_S)


@triton.jit(do_not_specialize=["N"])
def prefix_scan_kernel(
    x,
    N,
    E: tl.constexpr,
    BN: tl.constexpr,
    BE: tl.constexpr,
):
    """Running sums of x [G, N, E] along N, in place, BE columns each.

    Inside a tile of BN rows Triton's scan finds the sums; from tile to tile
    one row is carried.
    """
    NE: tl.constexpr = (E + BE - 1) // BE
    i_g, i_e = tl.program_id(0) // NE, tl.program_id(0) % NE
    b_total = tl.zeros([BE], dtype=tl.float32)
    for i_n in range(tl.cdiv(N, BN)):
        o_x, m_x = tile_at(i_g, i_n, 0, i_e, N, 1, E, BN, BE)
        b_x = tl.load(x + o_x, mask=m_x, other=0.0)  # [BN, BE]
        b_sum = b_total[None, :] + tl.cumsum(b_x, axis=0)  # [BN, BE]
        tl.store(x + o_x, b_sum, mask=m_x)
        b_total += tl.sum(b_x, axis=0)  # [BE]


@triton.jit(do_not_specialize=["T"])
def chunk_outputs_kernel(
    q,
    k,
    v,
    states,
    o,
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
    """Outputs of one chunk and value tile, from row i_t of its head."""
    NT = tl.cdiv(T, BT)
    i_bh, i_t, i_v = this_program(NT, (V + BV - 1) // BV)
    i_b, i_hv = i_bh // HV, i_bh % HV
    i_h = i_hv // (HV // H)
    o_k, m_k = tile_at(i_b, i_t, i_h, 0, T, H, K, BT, BK)
    o_v, m_v = tile_at(i_b, i_t, i_hv, i_v, T, HV, V, BT, BV)
    o_S, m_S = state_at(i_bh * (NT + 1) + i_t, i_v, K, V, BK, BV)
    b_q = tl.load(q + o_k, mask=m_k, other=0.0)  # [BT, BK]
    b_k = tl.load(k + o_k, mask=m_k, other=0.0)  # [BT, BK]
    b_v = tl.load(v + o_v, mask=m_v, other=0.0)  # [BT, BV]
    b_S = tl.load(states + o_S, mask=m_S, other=0.0)  # [BK, BV]
    b_o = chunk_output(b_q, b_k, b_v, b_S, scale, PRECISION)  # [BT, BV]
    tl.store(o + o_v, b_o, mask=m_v)


def chunk_states(
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    *,
    initial_state: Float[Tensor, "B HV K V"] | None = None,
    chunk_size: int = 64,
) -> Float[Tensor, "B HV N+1 K V"]:
    """Row 0: the initial state. Row n + 1: k^T v of chunk n. fp32."""
    k, v = k.contiguous(), v.contiguous()
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    N = triton.cdiv(T, chunk_size)
    states = k.new_empty(B, HV, N + 1, K, V, dtype=torch.float32)
    states[:, :, 0] = 0 if initial_state is None else initial_state
    options = chunk_options(K, k.dtype)
    options |= {"PRECISION": dot_precision(k.dtype, K)}
    sizes = H, HV, K, V, chunk_size
    grid = (B * HV * N * triton.cdiv(V, options["BV"]),)
    with torch.cuda.device_of(k):
        chunk_states_kernel[grid](k, v, states, T, *sizes, **options)
    return states


def prefix_scan(states: Float[Tensor, "B HV N+1 K V"]) -> None:
    """Running sum over the rows, in place.

    Row n becomes the state that enters chunk n, row N the final one.
    """
    B, HV, rows, K, V = states.shape
    options = prefix_options(rows)
    grid = (B * HV * triton.cdiv(K * V, options["BE"]),)
    with torch.cuda.device_of(states):
        prefix_scan_kernel[grid](states, rows, E=K * V, **options)


def chunk_outputs(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    states: Float[Tensor, "B HV N+1 K V"],
    *,
    scale: float,
    chunk_size: int = 64,
) -> Float[Tensor, "B T HV V"]:
    """Outputs of all chunks, given the state that enters each."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = triton.cdiv(T, chunk_size)
    o = torch.empty_like(v)
    options = chunk_options(K, q.dtype)
    options |= {"PRECISION": dot_precision(q.dtype, K)}
    sizes = H, HV, K, V, chunk_size
    grid = (B * HV * N * triton.cdiv(V, options["BV"]),)
    with torch.cuda.device_of(q):
        chunk_outputs_kernel[grid](
            q, k, v, states, o, scale, T, *sizes, **options
        )
    return o


def chunk_options(K: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes and launch settings of the two chunk kernels."""
    return tile_sizes(K, dtype) | {"num_warps": 4, "num_stages": 1}


def prefix_options(rows: int) -> dict[str, Any]:
    """Tile sizes and launch settings of the prefix scan over ``rows``."""
    BN = min(32, triton.next_power_of_2(rows))
    return {"BN": BN, "BE": 128, "num_warps": 4, "num_stages": 2}


def parallel_scan(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    *,
    scale: float,
    initial_state: Float[Tensor, "B HV K V"] | None = None,
    chunk_size: int = 64,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "B HV K V"]]:
    """Linear attention by a parallel prefix scan: what ``scan`` computes.

    Arguments, results and errors are those of
    :func:`fastweights_lab.lessons.linear.scan`. Keeps one fp32 state per chunk
    in memory, (T / chunk_size + 1) K V numbers per head. In half precision
    K > 128 with chunk_size 64 needs 104 KiB of shared memory, more than
    compute capabilities 8.6, 8.9 and 12.0 have.
    """
    check_inputs(q, k, v, scale, initial_state, chunk_size)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    states = chunk_states(
        k, v, initial_state=initial_state, chunk_size=chunk_size
    )
    prefix_scan(states)
    o = chunk_outputs(q, k, v, states, scale=scale, chunk_size=chunk_size)
    return o, states[:, :, -1].clone()
