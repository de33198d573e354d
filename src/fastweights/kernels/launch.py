"""The family on the host: what to allocate, what to launch, and how."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastweights.kernels import dot_precision
from fastweights.kernels.intra import intra_fwd_kernel
from fastweights.kernels.scan import scan_fwd_kernel


class Saved(NamedTuple):
    """What the stages hand on; None where a member has no such thing.

    q_in, k_in, k_out [B, T, HV, K], q, k, k unless the gate is a channel's;
    Aqk, P [B, T, HV, C]; total [slots, HV, K]; h [slots, HV, K, V].
    """

    q_in: Tensor
    k_in: Tensor
    k_out: Tensor
    Aqk: Tensor | None
    P: Tensor | None
    total: Tensor | None
    h: Tensor | None


def launch_options(
    stage: str,
    K: int,
    dtype: torch.dtype,
    *,
    gated: bool,
    delta: bool,
    shared: int,
) -> dict[str, int]:
    """Tile sizes and launch settings of a stage, from one table.

    Measured on an H200 with K = V = 128 in bf16: two programs of four warps
    on a multiprocessor are best, and loading ahead where both still fit.
    There no row of a tile is shorter than 128 bytes (``tile.tile_sizes``).
    A GPU that has less ``shared`` memory for one program, in bytes, keeps
    the operands of its products in registers: smaller tiles, more warps.
    """
    narrow = 32 if dtype == torch.float32 else 64
    large = shared > 200_000
    if stage == "intra":
        BK = narrow if large else 32
        return {"BK": BK, "num_warps": 4, "num_stages": 1}
    ahead = dtype != torch.float32 and K <= 128 and not (gated and delta)
    return {
        "BK": max(narrow, triton.next_power_of_2(K)),
        "BV": narrow if large else narrow // 2,
        "num_warps": 4 if large and K <= 128 else 8,
        "num_stages": 2 if large and ahead else 1,
    }


def shared_memory(device: torch.device) -> int:
    """Bytes of it for one program; without a GPU, those of an H200."""
    if device.type != "cuda":
        return 232_448
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    *,
    keep_states: bool = False,
) -> tuple[Tensor, Tensor, Saved]:
    """o in v's dtype, the final states in fp32, and what the stages saved.

    Arguments are those of :func:`fastweights.linear_recurrence`, checked
    there. ``keep_states`` keeps the states that enter the chunks.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    slots = triton.cdiv(B * T, chunk_size) + N
    DG = 0 if g is None else K if g.dim() == 4 else 1
    if g is not None and g.dim() == 1:
        g = g.expand(B, T, HV)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    g, beta, initial_state, cu_seqlens = (
        None if x is None else x.contiguous()
        for x in (g, beta, initial_state, cu_seqlens)
    )
    sizes: dict[str, Any] = {
        "H": H,
        "HV": HV,
        "K": K,
        "BT": chunk_size,
        "DG": DG,
    }
    sizes |= {"DELTA": beta is not None}
    sizes["PRECISION"] = dot_precision(q.dtype, K)
    table: dict[str, Any] = {"K": K, "dtype": q.dtype, "gated": DG > 0}
    table |= {"delta": beta is not None, "shared": shared_memory(q.device)}

    with torch.cuda.device_of(q):
        Aqk = P = total = h = None
        q_in, k_in, k_out = q, k, k
        if beta is not None:
            P = q.new_empty(B, T, HV, chunk_size)
        if DG > 1:
            Aqk = q.new_empty(B, T, HV, chunk_size)
            q_in, k_in, k_out = (q.new_empty(B, T, HV, K) for _ in "qkk")
            total = q.new_empty(slots, HV, K, dtype=torch.float32)
        if DG > 1 or beta is not None:
            intra_fwd_kernel[(slots * HV,)](
                q,
                k,
                g,
                beta,
                Aqk,
                P,
                q_in,
                k_in,
                k_out,
                total,
                cu_seqlens,
                N,
                T,
                **sizes,
                **launch_options("intra", **table),
            )
        o = torch.empty_like(v)
        state = q.new_empty(N, HV, K, V, dtype=torch.float32)
        if keep_states:
            h = q.new_empty(slots, HV, K, V)
        options = launch_options("scan", **table)
        scan_fwd_kernel[(N * HV * triton.cdiv(V, options["BV"]),)](
            q_in,
            k_in,
            k_out,
            v,
            g,
            beta,
            Aqk,
            P,
            total,
            o,
            initial_state,
            state,
            h,
            cu_seqlens,
            scale,
            T,
            V=V,
            **(sizes | {"H": HV if DG > 1 else H}),
            **options,
        )
    return o, state, Saved(q_in, k_in, k_out, Aqk, P, total, h)
