"""Optimisers for :func:`fastweights.fast_weights.online_learner`, and chunks.

An optimiser is a function (params, gradient, optimiser_state, *rates at t) ->
params, optimiser_state. Those of :mod:`fastweights.fast_weights` take a step
per token, at the weights that the token before has left. The functions
:func:`stale`, :func:`summed` and :func:`projected` make others of them:

    TTT       summed(sgd, 16)
    Titans    stale(momentum_sgd, 16)
    LaCT      summed(projected(muon, to_norms_of(start)), 2048, every="chunk"),
              with read="before"
    MesaNet   newton

Between chunks a learner's state is (params, optimiser_state) whatever the
chunk; inside one the latter is a :class:`ChunkState`, which has the
optimiser's own in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

from fastweights.arguments import check_sizes
from fastweights.deep.newton_schulz import EPS, newton_schulz
from fastweights.fast_weights import (
    Gradient,
    Optimiser,
    Params,
    Rate,
    broadcast_rate,
)


class ChunkState(NamedTuple):
    """A chunk in the making, without the weights of the moment."""

    optimiser_state: Any
    """The optimiser's own."""

    start: Params
    """The weights with which the chunk began."""

    total: Params
    """The sum of its gradients so far, each times its rate."""

    place: int
    """Tokens of it that have been read."""


def _chunk_of(params: Params, optimiser_state: Any) -> ChunkState:
    """The chunk in the making, or one that begins here."""
    if isinstance(optimiser_state, ChunkState):
        return optimiser_state
    return ChunkState(
        optimiser_state, params, tree_map(torch.zeros_like, params), 0
    )


def stale(
    optimiser: Optimiser, size: int, base: Params | None = None
) -> Optimiser:
    """The optimiser, with gradients of the weights that began the chunk.

    It steps from token to token as before, but the gradients of ``size``
    tokens no longer wait for each other. With ``base`` all gradients are
    taken there, at a sequence's first weights, say.
    """
    check_sizes(size=size)

    def step(
        params: Params, gradient: Gradient, optimiser_state: Any, *rates: Any
    ) -> tuple[Params, Any]:
        chunk = _chunk_of(params, optimiser_state)
        slope = gradient(chunk.start if base is None else base)
        params, optimiser_state = optimiser(
            params, lambda _: slope, chunk.optimiser_state, *rates
        )
        if chunk.place + 1 == size:
            return params, optimiser_state
        return params, chunk._replace(
            optimiser_state=optimiser_state, place=chunk.place + 1
        )

    return step


def summed(
    optimiser: Optimiser,
    size: int,
    every: Literal["token", "chunk"] = "token",
    base: Params | None = None,
) -> Optimiser:
    """Steps from the chunk's first weights, on the sum of its gradients.

    The gradients are those of the chunk's first weights (of ``base``, if it
    is given), each times the first of its token's rates: a number per head
    or channel, or a nest of them, one per weight. The optimiser gets the
    other rates, of the last token of the sum. It steps anew at every token,
    always from the chunk's first weights with the optimiser's state of that
    time; or only at the chunk's last.
    """
    check_sizes(size=size)
    if every not in ("token", "chunk"):
        raise ValueError(f"every: got {every!r}, need 'token' or 'chunk'")

    def step(
        params: Params,
        gradient: Gradient,
        optimiser_state: Any,
        rate: Any,
        *rates: Any,
    ) -> tuple[Params, Any]:
        chunk = _chunk_of(params, optimiser_state)
        slope = gradient(chunk.start if base is None else base)
        if isinstance(rate, Tensor):
            rate = tree_map(lambda _: rate, slope)

        def add(total: Tensor, dW: Tensor, rate: Rate) -> Tensor:
            return total + broadcast_rate(rate, dW) * dW

        total = tree_map(add, chunk.total, slope, rate)
        last = chunk.place + 1 == size
        if last or every == "token":
            params, optimiser_state = optimiser(
                chunk.start, lambda _: total, chunk.optimiser_state, *rates
            )
        if last:
            return params, optimiser_state
        return params, chunk._replace(total=total, place=chunk.place + 1)

    return step


def projected(
    optimiser: Optimiser, project: Callable[[Params], Params]
) -> Optimiser:
    """The optimiser, whose weights then go through ``project``."""

    def step(
        params: Params, gradient: Gradient, optimiser_state: Any, *rates: Any
    ) -> tuple[Params, Any]:
        params, optimiser_state = optimiser(
            params, gradient, optimiser_state, *rates
        )
        return project(params), optimiser_state

    return step


def unit_columns(W: Tensor, eps: float = 1e-5) -> Tensor:
    """W [..., K, N], its columns divided by their norms + eps."""
    return W / (W.norm(dim=-2, keepdim=True) + eps)


def to_norms_of(start: Params) -> Callable[[Params], Params]:
    """A function that brings each unit's weights back to their norm in start.

    The units of W [..., K, N] are its columns: LaCT's 'rows', since papers
    keep the transpose (Zhang et al. 2025).
    """

    def project(params: Params) -> Params:
        return tree_map(
            lambda W, first: (
                unit_columns(W) * first.norm(dim=-2, keepdim=True)
            ),
            params,
            start,
        )

    return project


def muon(
    params: Params, gradient: Gradient, optimiser_state: Params, momentum: Rate
) -> tuple[Params, Params]:
    """A step of the orthogonalised running sum M <- momentum M + gradient.

    W <- W - newton_schulz(M), matrix by matrix (Jordan 2024; as LaCT has it,
    without Nesterov's term).
    """

    def gather(M: Tensor, dW: Tensor) -> Tensor:
        return broadcast_rate(momentum, M) * M + dW

    optimiser_state = tree_map(gather, optimiser_state, gradient(params))
    return (
        tree_map(
            lambda W, M: W - newton_schulz(M, eps=EPS), params, optimiser_state
        ),
        optimiser_state,
    )


def newton(
    params: Tensor,
    gradient: Gradient,
    optimiser_state: Tensor,
    rate: Rate,
    g: Rate,
    ridge: Float[Tensor, "*lead K"],
) -> tuple[Tensor, Tensor]:
    """One step of Newton's method, from one optimum straight to the next.

    For a linear model [B, H, K, V] and the squared error. The tokens' decayed
    errors plus sum_d ridge_d |S_d|^2 / 2 have the curvature H + Diag(ridge),
    with H <- e^g H + rate k k^T, the optimiser's state [B, H, K, K]. S was the
    minimum before, so that the gradient is now the token's own plus what is
    left of the ridge's, (1 - e^g) Diag(ridge) S: recursive least squares with
    forgetting, and MesaNet's optimum (von Oswald et al. 2025).
    """

    K, V = params.shape[-2:]
    nothing = torch.zeros_like(params)

    def curvature(direction: Tensor) -> Tensor:
        """k k^T direction: the gradient's change, which is affine."""
        change = direction.expand(params.shape[:-1])[..., None]
        change = F.pad(change, (0, V - 1))
        return (gradient(change) - gradient(nothing))[..., 0]

    basis = torch.eye(K, dtype=params.dtype, device=params.device)
    columns = [curvature(e) for e in basis]
    keep = broadcast_rate(g, optimiser_state).exp()
    added = broadcast_rate(rate, optimiser_state) * torch.stack(columns, -1)
    optimiser_state = keep * optimiser_state + added
    slope = broadcast_rate(rate, params) * gradient(params)
    slope = slope + (1 - keep) * ridge[..., None] * params
    step = torch.linalg.solve(optimiser_state + torch.diag_embed(ridge), slope)
    return params - step, optimiser_state
