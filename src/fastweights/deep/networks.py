"""Inner models beside the matrix of :mod:`fastweights.fast_weights`.

Functions (params, x) -> prediction with params a nest of tensors [B, H, ...],
x [B, H, K] and predictions [B, H, V].
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fastweights.fast_weights import Model, Params, linear_model

Vector = Float[Tensor, "*lead K"]


def gelu(x: Tensor) -> Tensor:
    """GELU with its tanh, x Phi(x) up to 1e-3."""
    return F.gelu(x, approximate="tanh")


def affine(params: tuple[Tensor, Tensor], x: Vector) -> Tensor:
    """W^T x + b: TTT-Linear's model."""
    W, b = params
    return linear_model(W, x) + b


def network(activation: Callable[[Tensor], Tensor] = gelu) -> Model:
    """Layers one behind the other, with the activation between them.

    params is ((W1, b1), (W2, b2), ...) or (W1, W2, ...): with two of the
    first kind TTT-MLP's model, with some of the second Titans'.
    """

    def model(params: Params, x: Tensor) -> Tensor:
        for i, layer in enumerate(params):
            x = x if i == 0 else activation(x)
            with_bias = isinstance(layer, tuple | list)
            x = affine(layer, x) if with_bias else linear_model(layer, x)
        return x

    return model


def normed(
    model: Model, weight: Tensor, bias: Tensor, eps: float = 1e-6
) -> Model:
    """The model with a LayerNorm behind it; weight and bias are [H, V]."""

    def with_norm(params: Params, x: Tensor) -> Tensor:
        y = model(params, x)
        y = y - y.mean(-1, keepdim=True)
        y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
        return y * weight + bias

    return with_norm


def swiglu(params: tuple[Tensor, Tensor, Tensor], x: Vector) -> Tensor:
    """W1^T (silu(W0^T x) * W2^T x), of params (W0, W1, W2): LaCT's model."""
    W0, W1, W2 = params
    hidden = F.silu(linear_model(W0, x)) * linear_model(W2, x)
    return linear_model(W1, hidden)


def residual(model: Model) -> Model:
    """x + model(x)."""

    def with_residual(params: Params, x: Tensor) -> Tensor:
        return x + model(params, x)

    return with_residual
