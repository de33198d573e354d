"""The family on the host: what to allocate, what to launch, and how.

A backend of :func:`fastweights.linear_recurrence` (``default_chunk_size``,
``empty_saved``, ``forward``, ``backward``), and the stages it is made of, one
kernel each, under the names that :mod:`fastweights.reference.chunkwise` and
:mod:`fastweights.reference.chunkwise_backward` give them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastweights.arguments import check_offsets
from fastweights.kernels import dot_precision
from fastweights.kernels.intra import intra_bwd_kernel, intra_fwd_kernel
from fastweights.kernels.scan import scan_bwd_kernel, scan_fwd_kernel


def launch_options(
    stage: str,
    K: int,
    dtype: torch.dtype,
    *,
    gate: int,
    delta: bool,
    shared: int,
) -> dict[str, int]:
    """Tile sizes and launch settings of a stage, from one table.

    ``gate`` is the gate's width, 0, 1 or K. Measured on an H200 with
    K = V = 128 in bf16. There no row of a tile is shorter than 128 bytes
    (``tile.tile_sizes``). A GPU that has less ``shared`` memory for one
    program, in bytes, keeps the operands of its products in registers:
    smaller tiles, more warps.
    """
    narrow = 32 if dtype == torch.float32 else 64
    large, power = shared > 200_000, triton.next_power_of_2(K)
    if stage == "intra":
        BK = narrow if large else 32
        return {"BK": BK, "num_warps": 4, "num_stages": 1}
    ahead = large and dtype != torch.float32 and K <= 128
    if stage == "intra_backward":
        few = ahead and gate == 0 and not delta  # products, so few warps
        BK = narrow if large else 32
        if ahead and gate <= 1 and not few:
            BK = max(BK, power)
        return {
            "BK": BK,
            "BV": narrow,
            "num_warps": 4 if few else 8,
            "num_stages": 2 if ahead else 1,
        }
    full = gate > 0 and delta and stage == "scan"  # no registers to spare
    return {
        "BK": max(narrow, power),
        "BV": narrow if large else narrow // 2,
        "num_warps": 4 if large and K <= 128 else 8,
        "num_stages": 2 if ahead and not full else 1,
    }


def shared_memory(device: torch.device) -> int:
    """Bytes of it for one program; without a GPU, those of an H200."""
    if device.type != "cuda":
        return 232_448
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@dataclass
class Call:
    """One call's inputs, made contiguous, and what follows from their shapes.

    Every chunk of every sequence has a slot (``tile.chunk_span``).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    chunk_size: int

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            if isinstance(x, Tensor):
                setattr(self, name, x.contiguous())

    @property
    def num_sequences(self) -> int:
        if self.cu_seqlens is None:
            return len(self.q)
        return len(self.cu_seqlens) - 1

    @property
    def slots(self) -> int:
        tokens = self.q.shape[0] * self.q.shape[1]
        return triton.cdiv(tokens, self.chunk_size) + self.num_sequences

    @property
    def gate_width(self) -> int:
        if self.g is None:
            return 0
        return self.q.shape[3] if self.g.dim() == 4 else 1

    def sizes(self, stage: str) -> dict[str, Any]:
        """Compile-time constants and launch settings of a stage's kernel."""
        H, K = self.q.shape[2:]
        HV, DG = self.v.shape[2], self.gate_width
        delta, dtype = self.beta is not None, self.q.dtype
        if DG > 1 and not stage.startswith("intra"):
            H = HV  # intra's own q and k, a value head each
        return {
            "T": self.q.shape[1],
            "H": H,
            "HV": HV,
            "K": K,
            "BT": self.chunk_size,
            "DG": DG,
            "DELTA": delta,
            "PRECISION": dot_precision(dtype, K),
            **launch_options(
                stage,
                K,
                dtype,
                gate=DG,
                delta=delta,
                shared=shared_memory(self.q.device),
            ),
        }

    def new_states(self, number: int, dtype: torch.dtype) -> Tensor:
        HV, V = self.v.shape[2:]
        shape = (number, HV, self.q.shape[3], V)
        return self.q.new_empty(shape, dtype=dtype)


class Chunked(NamedTuple):
    """q and k as the states meet them: q_in, k_in, k_out [B, T, HV, K].

    They are q, k, k unless the gate is a channel's. total [slots, HV, K],
    the decay of a chunk, is there for such a gate only.
    """

    q_in: Tensor
    k_in: Tensor
    k_out: Tensor
    total: Tensor | None


def intra(
    x: Call, *, scores: bool = True
) -> tuple[Chunked, Tensor | None, Tensor | None]:
    """Inside each chunk: decayed q and k, Aqk and P [B, T, HV, C].

    Aqk is None unless the gate is a channel's (the scan recomputes it), P
    unless there is a delta rule, and both without ``scores``.
    """
    B, T, HV, K = *x.q.shape[:2], x.v.shape[2], x.q.shape[3]
    square, wide = (B, T, HV, x.chunk_size), (B, T, HV, K)
    chunked, Aqk, P = Chunked(x.q, x.k, x.k, None), None, None
    if x.gate_width > 1:
        q_in, k_out = x.q.new_empty(wide), x.q.new_empty(wide)
        k_in = x.k if x.beta is None else x.q.new_empty(wide)
        total = x.q.new_empty(x.slots, HV, K, dtype=torch.float32)
        chunked = Chunked(q_in, k_in, k_out, total)
        Aqk = x.q.new_empty(square) if scores else None
    if x.beta is not None and scores:
        P = x.q.new_empty(square)
    if x.gate_width > 1 or P is not None:
        intra_fwd_kernel[(x.slots * HV,)](
            x.q,
            x.k,
            x.g,
            x.beta,
            Aqk,
            P,
            *chunked,
            x.cu_seqlens,
            N=x.num_sequences,
            **x.sizes("intra"),
        )
    return chunked, Aqk, P


def _scan_grid(x: Call, sizes: dict[str, Any]) -> tuple[int]:
    HV, V = x.v.shape[2:]
    return (x.num_sequences * HV * triton.cdiv(V, sizes["BV"]),)


def _scan(
    stage: str,
    x: Call,
    chunked: Chunked,
    Aqk: Tensor | None,
    P: Tensor | None,
    **to: Tensor,
) -> None:
    """The forward scan, into those of its results that are asked for."""
    sizes = x.sizes(stage)
    *tokens, total = chunked
    results = (to.get(n) for n in ("state", "h", "v_new"))
    scan_fwd_kernel[_scan_grid(x, sizes)](
        *tokens,
        x.v,
        x.g,
        x.beta,
        Aqk,
        P,
        total,
        to.get("o"),
        x.initial_state,
        *results,
        x.cu_seqlens,
        x.scale,
        V=x.v.shape[3],
        **sizes,
    )


def scan(
    x: Call, chunked: Chunked, Aqk: Tensor | None, P: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Across chunks: outputs [B, T, HV, V], final states [N, HV, K, V]."""
    o = torch.empty_like(x.v)
    state = x.new_states(x.num_sequences, torch.float32)
    _scan("scan", x, chunked, Aqk, P, o=o, state=state)
    return o, state


def chunk_states(
    x: Call, chunked: Chunked, P: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scan again: h, the state that enters each chunk, and v_new."""
    h = x.new_states(x.slots, x.v.dtype)
    v_new = x.v if x.beta is None else torch.empty_like(x.v)
    kept = {} if x.beta is None else {"v_new": v_new}
    _scan("chunk_states", x, chunked, None, P, h=h, **kept)
    return h, v_new


def scan_backward(
    x: Call,
    chunked: Chunked,
    Aqk: Tensor | None,
    P: Tensor | None,
    do: Tensor,
    dstate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From the last chunk to the first: y, dh and dinitial_state.

    y = P^T dv_new; dh is the gradient of the state that leaves each chunk.
    """
    sizes = x.sizes("scan_backward")
    y, dh = torch.empty_like(x.v), x.new_states(x.slots, do.dtype)
    dinitial = None
    if x.initial_state is not None:
        dinitial = torch.empty_like(x.initial_state)
    *tokens, total = chunked
    scan_bwd_kernel[_scan_grid(x, sizes)](
        *tokens,
        x.g,
        x.beta,
        Aqk,
        P,
        total,
        do,
        dstate,
        y,
        dh,
        dinitial,
        x.cu_seqlens,
        x.scale,
        V=x.v.shape[3],
        **sizes,
    )
    return y, dh, dinitial


def intra_backward(
    x: Call, do: Tensor, v_new: Tensor, y: Tensor, h: Tensor, dh: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Inside each chunk: dq, dk, dv, dg and dbeta. It may overwrite y."""
    sizes = x.sizes("intra_backward")
    NK = triton.cdiv(sizes["K"], sizes["BK"])

    def parts(like: Tensor | None) -> Tensor | None:
        """Room for one part a key tile, fp32 where they are added up."""
        if like is None or like.dim() == 4:
            return None if like is None else torch.empty_like(like)
        dtype = like.dtype if NK == 1 else torch.float32
        return like.new_empty(*like.shape, NK, dtype=dtype)

    def whole(dx: Tensor | None, like: Tensor | None) -> Tensor | None:
        if dx is None or like is None or dx.shape == like.shape:
            return dx
        return dx[..., 0] if NK == 1 else dx.sum(-1).to(like.dtype)

    dq, dk = torch.empty_like(x.q), torch.empty_like(x.k)
    dv = y if x.beta is None or NK == 1 else torch.empty_like(y)
    dg, dbeta = parts(x.g), parts(x.beta)
    intra_bwd_kernel[(x.slots * sizes["H"] * NK,)](
        x.q,
        x.k,
        x.v,
        x.g,
        x.beta,
        do,
        v_new,
        y,
        h,
        dh,
        dq,
        dk,
        dv,
        dg,
        dbeta,
        x.cu_seqlens,
        x.scale,
        N=x.num_sequences,
        V=x.v.shape[3],
        **sizes,
    )
    return dq, dk, dv, whole(dg, x.g), whole(dbeta, x.beta)


def default_chunk_size(q: Tensor) -> int:
    """Tokens a chunk where the caller leaves that open."""
    return 64


def empty_saved(
    q: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> list[Tensor]:
    """Room for Aqk, if the gate is a channel's, and P, if there is one."""
    number = (g is not None and g.dim() == 4) + (beta is not None)
    return [q.new_empty(*v.shape[:3], chunk_size) for _ in range(number)]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o in v's dtype, the final states in fp32, and what is kept."""
    if cu_seqlens is not None and not cu_seqlens.is_cuda:
        check_offsets(cu_seqlens.tolist(), q.shape[1])
    x = Call(q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size)
    with torch.cuda.device_of(q):
        chunked, Aqk, P = intra(x)
        o, state = scan(x, chunked, Aqk, P)
    return o, state, [A for A in (Aqk, P) if A is not None]


def backward(
    do: Tensor | None,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    scale: float,
    chunk_size: int,
) -> list[Tensor]:
    """Gradients of q, k, v and of g, beta, initial_state where given.

    Each has its input's dtype. do or dstate is None where nothing depends
    on that output.
    """
    x = Call(q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size)
    kept = iter(saved)
    Aqk = next(kept) if x.gate_width > 1 else None
    P = next(kept) if beta is not None else None
    do = torch.zeros_like(x.v) if do is None else do.contiguous()
    dstate = None if dstate is None else dstate.contiguous()
    with torch.cuda.device_of(q):
        chunked, _, _ = intra(x, scores=False)
        h, v_new = chunk_states(x, chunked, P)
        y, dh, dinitial = scan_backward(x, chunked, Aqk, P, do, dstate)
        del chunked
        *grads, dbeta = intra_backward(x, do, v_new, y, h, dh)
    found = (*grads, dbeta, dinitial)
    return [dx for dx in found if dx is not None]
