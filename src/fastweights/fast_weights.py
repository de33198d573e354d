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

__all__ = [
    "broadcast_rate",
    "decayed_sgd",
    "inner_product",
    "learn",
    "linear_model",
    "momentum_sgd",
    "online_learner",
    "sgd",
    "squared_error",
]

Params = Any
Model = Callable[[Params, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Gradient = Callable[[Params], Params]
# (params, gradient, optimiser_state, *rates at t) -> params, optimiser_state
Optimiser = Callable[..., tuple[Params, Any]]
Rate = Float[Tensor, "*lead"]
Decay = Float[Tensor, "*gate"]  # its log; *lead, or per channel [*lead, K]


def linear_model(
    S: Float[Tensor, "*#lead K V"], x: Float[Tensor, "*#lead K"]
) -> Float[Tensor, "*#lead V"]:
    """S^T x: the state as a matrix that predicts values from keys.

    Args:
        S: [..., K, V].
        x: [..., K], in S's dtype; leading dimensions are broadcast.

    Returns:
        [..., V] in that dtype.
    """
    return torch.einsum("...kv,...k->...v", S, x)


def inner_product(
    prediction: Float[Tensor, "*lead V"], target: Float[Tensor, "*lead V"]
) -> Rate:
    """-prediction . target, which nothing bounds from below.

    Args:
        prediction, target: [..., V].

    Returns:
        [...], in their dtype.
    """
    return -(prediction * target).sum(-1)


def squared_error(
    prediction: Float[Tensor, "*lead V"], target: Float[Tensor, "*lead V"]
) -> Rate:
    """|prediction - target|^2 / 2.

    Args:
        prediction, target: [..., V].

    Returns:
        [...], in their dtype.
    """
    return (prediction - target).square().sum(-1) / 2


def broadcast_rate(rate: Rate, W: Tensor) -> Tensor:
    """A rate per head or channel, in as many dimensions as the weights.

    Args:
        rate: [B, H], or [B, H, K].
        W: [B, H, ...].

    Returns:
        ``rate`` with dimensions of size 1 behind its own.
    """
    return rate.reshape(rate.shape + (1,) * (W.dim() - rate.dim()))


def sgd(
    params: Params, gradient: Gradient, optimiser_state: None, rate: Rate
) -> tuple[Params, None]:
    """One step of gradient descent: W - rate * gradient(W).

    Args:
        params: W, a tensor or a nest of tensors [B, H, ...].
        gradient: from W to its gradient, a nest like it.
        optimiser_state: None.
        rate: [B, H], or [B, H, K] for a rate per channel.

    Returns:
        the weights after the step, in their dtype, and the optimiser's state.
    """

    def step(W: Tensor, dW: Tensor) -> Tensor:
        return W - broadcast_rate(rate, W) * dW

    return tree_map(step, params, gradient(params)), optimiser_state


def decayed_sgd(
    params: Params,
    gradient: Gradient,
    optimiser_state: None,
    rate: Rate,
    g: Decay,
) -> tuple[Params, None]:
    """Weight decay, then a step from there: the gradient at e^g W.

    Args:
        params, gradient, optimiser_state, rate: as in :func:`sgd`.
        g: log of the decay, [B, H] or [B, H, K].

    Returns:
        the weights after the step, in their dtype, and the optimiser's state.
    """

    def decay(W: Tensor) -> Tensor:
        return broadcast_rate(g, W).exp() * W

    return sgd(tree_map(decay, params), gradient, optimiser_state, rate)


def momentum_sgd(
    params: Params,
    gradient: Gradient,
    optimiser_state: Params,
    rate: Rate,
    momentum: Rate,
    g: Decay,
) -> tuple[Params, Params]:
    """M <- momentum M + rate * gradient(W), and then W <- e^g W - M.

    M is a running sum of scaled gradients. Gradient and decay are both of
    the old W (Titans, Behrouz et al. 2025, eqs. 13 and 14, where -M is
    called S).

    Args:
        params, gradient, rate: as in :func:`sgd`.
        optimiser_state: M, a nest like ``params``.
        momentum: [B, H] or [B, H, K], and so is g.
        g: log of the decay.

    Returns:
        the weights and M after the step, in their dtypes.
    """

    def gather(M: Tensor, dW: Tensor) -> Tensor:
        return broadcast_rate(momentum, M) * M + broadcast_rate(rate, M) * dW

    def step(W: Tensor, M: Tensor) -> Tensor:
        return broadcast_rate(g, W).exp() * W - M

    optimiser_state = tree_map(gather, optimiser_state, gradient(params))
    return tree_map(step, params, optimiser_state), optimiser_state


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
    optimiser's state), the inputs q, k, v and the optimiser's rates. The
    loop is differentiable. The losses of all sequences and heads are summed:
    no weight is in more than one of them.

        learner = online_learner(linear_model, squared_error, sgd)
        o, (S, _) = learn(learner, (S, None), q, k, v, beta)    # DeltaNet

    Mini-batches, projections of the weights and other optimisers are in
    :mod:`fastweights.deep.optimisers`, other models in
    :mod:`fastweights.deep.networks`.

    Args:
        model: from params and x [B, H, K] to a prediction [B, H, V].
        loss: from prediction and target to [B, H].
        optimiser: from params, gradient, optimiser_state and rates to params
            and optimiser_state after the step.
        read: whether the query is read "after" the token is learned, or
            "before".

    Returns:
        a step: from the state and a token's inputs to the next state and o.

    Raises:
        ValueError: ``read`` is neither.
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
        params, optimiser_state = optimiser(
            state[0], gradient, state[1], *rates
        )
        o = model(params if read == "after" else state[0], q)
        return (params, optimiser_state), o

    return step


def learn(
    learner: Learner, state: tuple[Params, Any], *inputs: Any
) -> tuple[Float[Tensor, "B T H V"], tuple[Params, Any]]:
    """:func:`fastweights.reference.steps.scan`, for inputs that are nests.

    A rate may be a nest of tensors [B, T, ...], one per weight.

    Args:
        learner: what :func:`online_learner` returned.
        state: params and the optimiser's state before the first token.
        inputs: q, k, v and the rates of all tokens, [B, T, ...] each.

    Returns:
        o [B, T, H, V], and the state after the last token; dtypes are those
        of the model.
    """
    leaves, spec = tree_flatten(inputs)

    def step(state: Any, *at_t: Tensor) -> tuple[Any, Tensor]:
        return learner(state, *tree_unflatten(list(at_t), spec))

    return steps.scan(step, state, *leaves)
