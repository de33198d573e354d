"""Gradients of a network at many tokens, without ever writing them down.

The gradient of a layer z = W^T x + b at one token is an outer product of what
the layer has read and of the loss's slope at z, its error. So weights after
token t that are combinations

    W_t = keep_t W + carry_t S - sum_s share_ts x_s error_s^T

of two given sets of weights and of the gradients of the chunk answer a query
with products of C x C scores, as linear attention does: nobody forms one W_t
per token (the dual form of Sun et al. 2024, section 2.5; there keep is 1).

Here x is [B, H, C, .], weights are ((W, b), ...) with W [B, H, K, N] and b
[B, H, N], keep and carry [B, H, C], share [B, H, C, C], its lower triangle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fastweights.deep.networks import gelu

WeightAndBias = tuple[Tensor, Tensor]
NetworkWeights = list[WeightAndBias]
Norm = tuple[Tensor, Tensor]
PerToken = Float[Tensor, "B H C"]
EPS = 1e-6


class Gradients(NamedTuple):
    """Every layer's inputs [B, H, C, K] and errors [B, H, C, N]."""

    inputs: list[Tensor]
    errors: list[Tensor]


def layer_outputs(layers: NetworkWeights, x: Tensor) -> list[Tensor]:
    """Every layer's output, before any activation."""
    outputs: list[Tensor] = []
    for W, b in layers:
        x = gelu(outputs[-1]) if outputs else x
        outputs.append(x @ W + b[..., None, :])
    return outputs


def gelu_slope(z: Tensor) -> Tensor:
    """The derivative of the GELU with tanh."""
    root, cubic, square = math.sqrt(2 / math.pi), 0.044715, z.square()
    t = (root * z * (1 + cubic * square)).tanh()
    change = root * (1 + 3 * cubic * square)
    return (1 + t + z * (1 - t.square()) * change) / 2


def layer_norm(z: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """LN(z), z at mean 0 and variance 1, and 1 / its deviation."""
    z = z - z.mean(-1, keepdim=True)
    scale = (z.square().mean(-1, keepdim=True) + EPS).rsqrt()
    weight, bias = norm
    unit = z * scale
    return unit * weight[:, None] + bias[:, None], unit, scale


def output_error(z: Tensor, target: Tensor, norm: Norm | None) -> Tensor:
    """d/dz of |y - target|^2 / 2, where y is z or its LayerNorm."""
    if norm is None:
        return z - target
    y, unit, scale = layer_norm(z, norm)
    d = (y - target) * norm[0][:, None]
    d = d - d.mean(-1, keepdim=True)
    return (d - unit * (d * unit).mean(-1, keepdim=True)) * scale


def gradients(
    layers: NetworkWeights, k: Tensor, target: Tensor, norm: Norm | None = None
) -> Gradients:
    """The gradients of a chunk's tokens, all at the same weights."""
    outputs = layer_outputs(layers, k)
    errors = [output_error(outputs[-1], target, norm)]
    for (W, _), z in zip(layers[:0:-1], outputs[-2::-1], strict=True):
        errors.append((errors[-1] @ W.mT) * gelu_slope(z))
    return Gradients([k, *map(gelu, outputs[:-1])], errors[::-1])


def answer_queries(
    q: Tensor,
    weights: NetworkWeights,
    carried: NetworkWeights | None,
    grads: Gradients,
    keep: PerToken | None,
    carry: Float[Tensor, "#B #H C"],
    share: Float[Tensor, "B H C C"],
) -> Tensor:
    """Each query's answer by the weights of its own token.

    W is ``weights`` and S is ``carried``; keep None is 1, carried None is 0.
    """
    x = z = q
    for i, (W, b) in enumerate(weights):
        x = gelu(z) if i else q
        z = x @ W + b[..., None, :]
        z = z if keep is None else keep[..., None] * z
        if carried is not None:
            dW, db = carried[i]
            z = z + carry[..., None] * (x @ dW + db[..., None, :])
        # The bias is a weight whose input is always 1: hence the 1.
        scores = share * (x @ grads.inputs[i].mT + 1)
        z = z - scores @ grads.errors[i]
    return z


def sum_gradients(grads: Gradients, share: PerToken) -> NetworkWeights:
    """The sum of a chunk's gradients, each times its share."""
    sums = []
    for inputs, errors in zip(*grads, strict=True):
        weighted = share[..., None] * errors
        sums.append((inputs.mT @ weighted, weighted.sum(-2)))
    return sums


def map_layers(
    function: Callable[..., Tensor], *layers: NetworkWeights
) -> NetworkWeights:
    """Apply a function to the weights at the same place of each network."""
    pairs = (zip(*layer, strict=True) for layer in zip(*layers, strict=True))
    return [(function(*W), function(*b)) for W, b in pairs]


def tensors_of(layers: NetworkWeights) -> list[Tensor]:
    """The weights and biases in one list."""
    return [x for layer in layers for x in layer]


def as_layers(tensors: Sequence[Tensor]) -> NetworkWeights:
    """Undo :func:`tensors_of`."""
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def flatten(layers: NetworkWeights) -> Float[Tensor, "B H P"]:
    """All weights of a head as one row of numbers."""
    return torch.cat([x.flatten(2) for x in tensors_of(layers)], -1)


def unflatten(
    x: Float[Tensor, "B H P"], like: NetworkWeights
) -> NetworkWeights:
    """Undo :func:`flatten`; ``like`` has weights [H, ...] of these shapes."""
    shapes = [w.shape[1:] for w in tensors_of(like)]
    parts = x.split([s.numel() for s in shapes], -1)
    return as_layers(
        [p.unflatten(-1, s) for p, s in zip(parts, shapes, strict=True)]
    )
