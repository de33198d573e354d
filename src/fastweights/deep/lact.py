"""LaCT: one large step per large chunk (Zhang et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    check_dims,
    check_flags,
    check_sizes,
)
from fastweights.deep.chunk_layout import ChunkLayout, ChunkPart, choose_rows
from fastweights.deep.network_arguments import (
    check_network_inputs,
    check_shapes,
    check_state,
)
from fastweights.deep.newton_schulz import EPS, newton_schulz
from fastweights.deep.optimisers import unit_columns
from fastweights.dtypes import compute_dtype, without_autocast
from fastweights.ops.common import any_length
from fastweights.ranks.group import refuse_ranks

Weights = Sequence[Tensor]
"""W0, W1 and W2."""


def answer_by_swiglu(w: Weights, x: Tensor) -> Tensor:
    """W1^T (silu(W0^T x) * W2^T x) of x [B, H, C, K], in x's dtype."""
    w0, w1, w2 = (W.to(x.dtype) for W in w)
    return (F.silu(x @ w0) * (x @ w2)) @ w1


def sum_of_gradients(
    w: Weights, k: Tensor, v: Tensor, rates: Tensor
) -> Weights:
    """The chunk's sums of rate * gradient of f(k) . v, per matrix.

    Products are in k's dtype, what is between them in that of the rates [B,
    H, C, 3], which are for W0, W1 and W2.
    """
    dtype, full = k.dtype, rates.dtype
    w0, w1, w2 = (W.to(dtype) for W in w)
    gate, up, hidden = (x.to(full) for x in (k @ w0, k @ w2, v @ w1.mT))
    s = torch.sigmoid(gate)
    silu = gate * s
    rate = rates[..., None].unbind(-2)
    errors = (
        rate[0] * hidden * up * s * (1 + gate * (1 - s)),
        rate[1] * silu * up,
        rate[2] * hidden * silu,
    )
    d0, d1, d2 = errors
    return _outer_sum(k, d0), _outer_sum(v, d1).mT, _outer_sum(k, d2)


def _outer_sum(x: Tensor, errors: Tensor) -> Tensor:
    """x^T errors by products in x's dtype, in that of the errors.

    At a rate of 1e-3 most of them are below fp16's least normal number:
    there the largest, of C, becomes C^-1/2.
    """
    if x.dtype != torch.float16:
        return (x.mT @ errors.to(x.dtype)).to(errors.dtype)
    largest = errors.detach().abs().amax((-2, -1), keepdim=True)
    size = largest.where(largest > 0, 1.0) * math.sqrt(x.shape[-2])
    product = x.mT @ (errors / size).to(x.dtype)
    return product.to(errors.dtype) * size


def orthogonalise(M: Weights, dtype: torch.dtype) -> Weights:
    """newton_schulz of W0's, W1's and W2's, with products in ``dtype``.

    W1 has the others' shape turned if K = V: then the three are one batch,
    which fills a GPU better than a third of it.
    """
    m0, m1, m2 = M
    if m0.shape == m1.mT.shape:
        together = torch.stack([m0, m1.mT, m2])
        m0, m1, m2 = newton_schulz(together, eps=EPS, dtype=dtype).unbind()
        return [m0, m1.mT, m2]
    return [newton_schulz(m, eps=EPS, dtype=dtype) for m in M]


def lact(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    rates: Float[Tensor, "B T H 3"],
    start: Weights,
    momentum: Float[Tensor, "B T H"] | None = None,
    *,
    chunk_size: int = 2048,
    muon: bool = True,
    prenorm: bool = False,
    initial_state: Float[Tensor, "B H P"] | None = None,
    position: Int[Tensor, " B"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H P"]]:
    """A SwiGLU network that learns v from k once per chunk, read before.

    With w the weights W0, W2 [K, N] and W1 [N, V] of a chunk's start, read by
    all its tokens, o_t = f(q_t; w), and then, after its last,

        G = sum_t rate_t * gradient of f(k_t; w) . v_t, per matrix
        M <- G + mean_t(momentum_t) M
        w <- w + newton_schulz(M), columns brought back to their first norms

    With ``prenorm`` what is added up keeps its norms, w' <- w' + ..., and w
    is w' with columns of the first norms, from the first step on.
    A chunk that is not complete teaches nothing: its tokens are for another
    layer, in the paper attention in a window. See
    :mod:`fastweights.deep.optimisers` for the same as a learner.

    Args:
        q, k, v: [B, T, H, K] both and [B, T, H, V], of one dtype. Products
            with tokens and Newton-Schulz's are in that dtype, sums and weights
            in fp32 (fp64).
        rates: [B, T, H, 3], for W0, W1 and W2.
        start: W0 [H, K, N], W1 [H, N, V] and W2 [H, K, N].
        momentum: [B, T, H]; None: there is none.
        chunk_size: tokens per step.
        muon: whether M is orthogonalised.
        prenorm: whether weights are brought back to their norms where they
            are used, not where they are kept.
        initial_state: [B, H, P]: per matrix what the weights have learned
            since ``start``, M, and the chunk's G so far; its momentum so far;
            fp32.
        position, lengths: [B], as in :func:`fastweights.deep.ttt`.

    Returns:
        o [B, T, H, V], in q's dtype, and the state [B, H, P] after each row's
        last token.

    Raises:
        TypeError, ValueError: as :func:`fastweights.deep.ttt`.
    """
    refuse_ranks("lact")
    checked = {"rates": rates}
    checked |= {} if momentum is None else {"momentum": momentum}
    check_network_inputs(q, k, v, checked, position, lengths, matrices=3)
    check_sizes(chunk_size=chunk_size)
    check_flags(muon=muon, prenorm=prenorm)
    if not isinstance(start, tuple | list) or len(start) != 3:
        got = len(start) if hasattr(start, "__len__") else type(start).__name__
        raise TypeError(f"start: got {got}, need three tensors, W0, W1, W2")
    check_dims("[H, K, N]", **{"start[0]": start[0]})
    dtype, full = q.dtype, compute_dtype(q.dtype)
    (B, T, H, K), V = q.shape, v.shape[-1]
    N = start[0].shape[-1]
    shapes = [torch.Size(s) for s in ((K, N), (N, V), (K, N))]
    numbers = sum(s.numel() for s in shapes)
    check_shapes(
        **{f"start[{i}]": (start[i], (H, *shapes[i])) for i in range(3)}
    )
    check_state(q, initial_state, B, H, 3 * numbers + 1, after=position)
    if any_length.is_dynamic(T):
        results = (v.shape, dtype), ([B, H, 3 * numbers + 1], full)
        inputs = q, k, v, rates, start, momentum
        return any_length.call_as_operator(
            lact,
            results,
            *inputs,
            chunk_size=chunk_size,
            muon=muon,
            prenorm=prenorm,
            initial_state=initial_state,
            position=position,
            lengths=lengths,
        )
    with without_autocast(q):
        rates = rates.to(full)
        if momentum is None:
            momentum = torch.zeros_like(rates[..., 0])
        momentum = momentum.to(full)
        start = [W.to(full) for W in start]
        norms = [W.norm(dim=-2, keepdim=True) for W in start]
        if torch.is_grad_enabled():
            # The first chunk's outputs know no rates: a gradient of 0 then.
            always = torch.ones_like(start[0], dtype=torch.bool)
            start[0] = start[0].where(always, rates.sum() + momentum.sum())
        if initial_state is None:
            # One zero, which is read wherever it is needed.
            initial_state = rates.new_zeros(()).expand(B, H, 3 * numbers + 1)
        state = _unpack_state(initial_state.to(full), shapes)
        since, memory, total = (state[i : i + 3] for i in (0, 3, 6))
        mean = state[9]
        layout = ChunkLayout(chunk_size, T, q.device, position, lengths)
        outputs = []
        # The rows whose weights have taken a step.
        stepped: bool | Tensor = False
        if position is not None:
            stepped = position >= chunk_size
        for part in layout:
            w = [W + d for W, d in zip(start, since, strict=True)]
            if prenorm:
                normed = [
                    unit_columns(W) * norm
                    for W, norm in zip(w, norms, strict=True)
                ]
                w = [*map(partial(choose_rows, stepped), normed, w)]
            q_, k_, v_ = (part.take(x).transpose(1, 2) for x in (q, k, v))
            outputs.append(answer_by_swiglu(w, q_).transpose(1, 2))
            rates_ = part.take(rates, 0.0).transpose(1, 2)
            grads = sum_of_gradients(w, k_, v_, rates_)
            total = [G + more for G, more in zip(total, grads, strict=True)]
            mean = mean + part.take(momentum, 0.0).sum(1)[..., None]
            if not _step_is_due(part):
                continue
            keep = (mean / chunk_size)[..., None]
            M = [G + keep * m for G, m in zip(total, memory, strict=True)]
            steps = orthogonalise(M, dtype) if muon else M
            for i, (W, norm) in enumerate(zip(start, norms, strict=True)):
                moved = since[i] + steps[i]
                if not prenorm:
                    moved = unit_columns(w[i] + steps[i]) * norm - W
                since[i] = part.where_ends(moved, since[i])
                memory[i] = part.where_ends(M[i], memory[i])
                total[i] = part.where_ends(torch.zeros_like(M[i]), total[i])
            mean = part.where_ends(torch.zeros_like(mean), mean)
            stepped = stepped | part.ends
        flat = [x.flatten(2) for x in (*since, *memory, *total)]
        return layout.join(outputs), torch.cat([*flat, mean], -1)


def _unpack_state(x: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """Three times the three matrices, and one number."""
    shapes = [*3 * shapes, torch.Size([1])]
    parts = x.split([s.numel() for s in shapes], -1)
    return [p.unflatten(-1, s) for p, s in zip(parts, shapes, strict=True)]


def _step_is_due(part: ChunkPart) -> bool:
    """Whether a step is due; rows of a batch may differ.

    Newton-Schulz costs thousands of times what a token costs. So one number
    is read back from the device, which a compiled graph or one of CUDA cannot
    do: there every part computes the step.
    """
    if isinstance(part.ends, bool):
        return part.ends
    if torch.compiler.is_compiling() or part.ends.is_meta:
        return True
    if part.ends.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return bool(part.ends.any())
