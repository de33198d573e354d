"""linear_recurrence in PyTorch: what its operator asks of a backend.

A backend has ``default_chunk_size``, ``empty_saved``, ``forward`` and
``backward``, on tensors as :func:`fastweights.linear_recurrence` takes them.
Here that is a frame around :mod:`.chunkwise`: dtypes, value heads that share
a key head, no gate, packed sequences.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import check_offsets
from fastweights.reference.chunkwise import (
    chunkwise_forward,
    from_chunks,
    to_chunks,
)
from fastweights.reference.chunkwise_backward import chunkwise_backward

Offsets = Int[Tensor, " N+1"] | None
States = Float[Tensor, "N HV K V"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that inputs of ``dtype`` are computed in."""
    return torch.promote_types(dtype, torch.float32)


def sequences(cu_seqlens: Offsets, T: int) -> list[tuple[slice, slice]]:
    """Which states and which tokens belong together, none left empty."""
    if cu_seqlens is None:
        return [(slice(None), slice(None))]
    offsets = cu_seqlens.tolist()
    check_offsets(offsets, T)
    return [
        (slice(n, n + 1), slice(a, b))
        for n, (a, b) in enumerate(itertools.pairwise(offsets))
        if a < b
    ]


def widen(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The inputs in fp32 or fp64, key heads repeated, gates [B,T,HV,DG]."""
    dtype, (B, T, HV) = wide(q.dtype), v.shape[:3]
    q, k = (
        x.to(dtype).repeat_interleave(HV // x.shape[2], dim=2) for x in (q, k)
    )
    if g is None:
        g = q.new_zeros(1).expand(B, T, HV)
    if g.dim() == 3:
        g = g[..., None]
    beta = None if beta is None else beta.to(dtype)
    return q, k, v.to(dtype), g.to(dtype), beta


def tokens_at(t: slice, *tensors: Tensor | None) -> list[Any]:
    """The tokens t of each tensor; a None stays None."""
    return [None if x is None else x[:, t] for x in tensors]


def first_states(
    q: Tensor, v: Tensor, initial_state: States | None, cu_seqlens: Offsets
) -> States:
    """A copy of the initial states, zeros if there are none."""
    if initial_state is not None:
        return initial_state.clone(memory_format=torch.contiguous_format)
    N = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    shape = (N, v.shape[2], q.shape[3], v.shape[3])
    return q.new_zeros(shape, dtype=wide(q.dtype))


def default_chunk_size(q: Tensor) -> int:
    """Tokens a chunk where the caller leaves that open."""
    return 64


def empty_saved(
    q: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Offsets,
    chunk_size: int,
) -> list[Tensor]:
    """Room for Aqk and, under the delta rule, P: a row of C a token.

    Another backend may keep more, of a size that g and cu_seqlens decide.
    """
    shape, dtype = (*v.shape[:3], chunk_size), wide(q.dtype)
    number = 1 if beta is None else 2
    return [q.new_empty(shape, dtype=dtype) for _ in range(number)]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: States | None,
    cu_seqlens: Offsets,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, States, list[Tensor]]:
    """Outputs, final states, and what the backward re-uses."""
    o = v.new_empty(v.shape)
    saved = empty_saved(q, v, g, beta, cu_seqlens, chunk_size)
    tokens = widen(q, k, v, g, beta)
    state = first_states(q, v, initial_state, cu_seqlens)
    for n, t in sequences(cu_seqlens, q.shape[1]):
        o_n, state[n], Aqk, P = chunkwise_forward(
            *tokens_at(t, *tokens),
            scale=scale,
            initial_state=state[n],
            chunk_size=chunk_size,
        )
        parts = [x for x in (o_n, Aqk, P) if x is not None]
        for x, x_n in zip((o, *saved), parts, strict=True):
            x[:, t] = from_chunks(x_n, x[:, t].shape[1])
    return o, state, saved


def backward(
    do: Tensor | None,
    dstate: States | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: States | None,
    cu_seqlens: Offsets,
    saved: list[Tensor],
    scale: float,
    chunk_size: int,
) -> list[Tensor]:
    """Gradients of q, k, v and of g, beta, initial_state where given.

    Each has its input's shape and dtype. do or dstate is None where nothing
    depends on that output.
    """
    tokens = widen(q, k, v, g, beta)
    state = first_states(q, v, initial_state, cu_seqlens)
    do = torch.zeros_like(v) if do is None else do
    do = do.to(state.dtype)
    dS = torch.zeros_like(state)
    if dstate is not None:
        dS.copy_(dstate)
    grads = [x.new_empty(x.shape) for x in tokens if x is not None]
    for n, t in sequences(cu_seqlens, q.shape[1]):
        Aqk, *P = (to_chunks(x[:, t], chunk_size) for x in saved)
        *grads_n, dS[n] = chunkwise_backward(
            *tokens_at(t, *tokens),
            do=do[:, t],
            dS=dS[n],
            scale=scale,
            initial_state=state[n],
            chunk_size=chunk_size,
            Aqk=Aqk,
            P=P[0] if P else None,
        )
        parts = [x for x in grads_n if x is not None]
        for dx, dx_n in zip(grads, parts, strict=True):
            dx[:, t] = dx_n
    dq, dk, dv, dg, *dbeta = grads
    # Value heads that share a key head are summed before they are rounded.
    dq, dk = (x.unflatten(2, (q.shape[2], -1)).sum(3) for x in (dq, dk))
    pairs: list[tuple[Tensor | None, Tensor]]
    pairs = [(q, dq), (k, dk), (v, dv), (g, dg), (initial_state, dS)]
    pairs[4:4] = [(beta, x) for x in dbeta]
    return [
        dx.reshape(x.shape).to(x.dtype) for x, dx in pairs if x is not None
    ]
