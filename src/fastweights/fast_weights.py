"""A recurrence as learning: the state is a model that trains on its input.

At each token a small model, the fast weights, takes one step of an optimiser
on one example, (k_t, v_t), and then answers the query q_t. Which layer that
is follows from three choices: the model, its loss, and the optimiser
(Schlag et al. 2021; Sun et al. 2025; Wang et al. 2025).

Here a model is a function (params, x) -> prediction, with params a tensor or
a nest of tensors [B, H, ...] and x [B, H, K]; a loss takes prediction and
target, [B, H, V] both, to [B, H]. Every sequence and head learns by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fastweights.reference import steps

Params = Any
Model = Callable[[Params, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Gradient = Callable[[Params], Params]
# (params, gradient, memory, *rates at t) -> params, memory
Optimiser = Callable[..., tuple[Params, Any]]
Rate = Float[Tensor, "*lead"]
Decay = Float[Tensor, "*gate"]  # its log; *lead, or per channel [*lead, K]


def linear_model(
    S: Float[Tensor, "*lead K V"], x: Float[Tensor, "*lead K"]
) -> Float[Tensor, "*lead V"]:
    """S^T x: the state as a matrix that predicts values from keys."""
    return torch.einsum("...kv,...k->...v", S, x)


def inner_product(
    prediction: Float[Tensor, "*lead V"], target: Float[Tensor, "*lead V"]
) -> Rate:
    """-prediction . target, which nothing bounds from below."""
    return -(prediction * target).sum(-1)


def squared_error(
    prediction: Float[Tensor, "*lead V"], target: Float[Tensor, "*lead V"]
) -> Rate:
    """|prediction - target|^2 / 2."""
    return (prediction - target).square().sum(-1) / 2


def factor(rate: Rate, W: Tensor) -> Tensor:
    """A rate per head [B, H] or channel [B, H, K], for weights [B, H, ...]."""
    return rate.reshape(rate.shape + (1,) * (W.dim() - rate.dim()))


def sgd(
    params: Params, gradient: Gradient, memory: None, rate: Rate
) -> tuple[Params, None]:
    """One step of gradient descent: W - rate * gradient(W)."""

    def step(W: Tensor, dW: Tensor) -> Tensor:
        return W - factor(rate, W) * dW

    return tree_map(step, params, gradient(params)), memory


def decayed_sgd(
    params: Params,
    gradient: Gradient,
    memory: None,
    rate: Rate,
    g: Decay,
) -> tuple[Params, None]:
    """Weight decay, then a step from there: the gradient at e^g W."""

    def decay(W: Tensor) -> Tensor:
        return factor(g, W).exp() * W

    return sgd(tree_map(decay, params), gradient, memory, rate)


def momentum_sgd(
    params: Params,
    gradient: Gradient,
    memory: Params,
    rate: Rate,
    momentum: Rate,
    g: Decay,
) -> tuple[Params, Params]:
    """M <- momentum M + rate * gradient(W), and then W <- e^g W - M.

    M is a running sum of scaled gradients. Gradient and decay are both of
    the old W (Titans, Behrouz et al. 2025, eqs. 13 and 14, where -M is
    called S).
    """

    def gather(M: Tensor, dW: Tensor) -> Tensor:
        return factor(momentum, M) * M + factor(rate, M) * dW

    def step(W: Tensor, M: Tensor) -> Tensor:
        return factor(g, W).exp() * W - M

    memory = tree_map(gather, memory, gradient(params))
    return tree_map(step, params, memory), memory


Learner = Callable[..., tuple[tuple[Params, Any], Tensor]]


def online_learner(
    model: Model,
    loss: Loss,
    optimiser: Optimiser,
    *,
    read: Literal["after", "before"] = "after",
) -> Learner:
    """The layer of a model, a loss and an optimiser, as one step.

    For :func:`fastweights.reference.steps.scan`: the state is (params, the
    optimiser's memory), the inputs q, k, v and the optimiser's rates. The
    query is read after the token is learned, or before. The loop is
    differentiable. The losses of all sequences and heads are summed: no
    weight is in more than one of them.

    Mini-batches, projections of the weights and other optimisers are in
    :mod:`fastweights.deep.optimisers`, other models in
    :mod:`fastweights.deep.models`.
    """
    if read not in ("after", "before"):
        raise ValueError(f"read: got {read!r}, need 'after' or 'before'")

    def step(
        state: tuple[Params, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *rates: Tensor,
    ) -> tuple[tuple[Params, Any], Tensor]:
        def objective(params: Params) -> Tensor:
            return loss(model(params, k), v).sum()

        gradient = torch.func.grad(objective)
        params, memory = optimiser(state[0], gradient, state[1], *rates)
        o = model(params if read == "after" else state[0], q)
        return (params, memory), o

    return step


def learn(
    learner: Learner, state: tuple[Params, Any], *inputs: Any
) -> tuple[Float[Tensor, "B T H V"], tuple[Params, Any]]:
    """:func:`fastweights.reference.steps.scan`, for inputs that are nests.

    A rate may be a nest of tensors [B, T, ...], one per weight.
    """
    leaves, spec = tree_flatten(inputs)

    def step(state: Any, *at_t: Tensor) -> tuple[Any, Tensor]:
        return learner(state, *tree_unflatten(list(at_t), spec))

    return steps.scan(step, state, *leaves)
