"""The states of a film, and what they answer to each token's key."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fastweights.reference import steps


def doubles(*tensors: Tensor | None) -> list[Any]:
    """Each in fp64, on the CPU, without its gradient; None as it is."""
    return [x if x is None else x.detach().double().cpu() for x in tensors]


def states(
    k: Float[Tensor, "T K"],
    v: Float[Tensor, "T V"],
    g: Float[Tensor, " T"] | Float[Tensor, "T K"] | None = None,
    beta: Float[Tensor, " T"] | None = None,
) -> Float[Tensor, "T K V"]:
    """The states after each token, in fp64 and on the CPU, from S = 0.

    g is the natural log of the decay, one number per token or one per key
    channel; None keeps everything. beta None is the additive rule.
    """
    k, v, g, beta = doubles(k, v, g, beta)
    S = k.new_zeros(k.shape[1], v.shape[1])
    found = []
    for t in range(len(k)):
        gate = None if g is None else g[t].reshape(-1)
        rate = None if beta is None else beta[t]
        S, _ = steps.recurrence(S, k[t], k[t], v[t], gate, rate)
        found.append(S)
    return torch.stack(found)


def lines(
    k: Float[Tensor, "T K"],
    g: Float[Tensor, " T"] | Float[Tensor, "T K"] | None = None,
) -> Float[Tensor, "T T"]:
    """The lines across the bars, in fp64: what decay alone has left.

    Row t, column j: the share of v_j in the answer to k_j after token t if
    only token j had written, sum_i k_ji^2 e^(G_ti - G_ji) / |k_j|^2 with G
    the running sum of g. 0 where k_j is zero, and for tokens to come.
    """
    k, g = doubles(k, g)
    T = len(k)
    G = torch.zeros(T, 1, dtype=k.dtype)
    if g is not None:
        G = g.reshape(T, -1).cumsum(0)
    after = (G[:, None] - G[None]).exp()  # [t, j, 1 or K]
    size = k.square().sum(-1)
    left = (k.square() * after).sum(-1) / torch.where(size > 0, size, 1)
    return left.tril()


def shares(
    k: Float[Tensor, "T K"],
    v: Float[Tensor, "T V"],
    g: Float[Tensor, " T"] | Float[Tensor, "T K"] | None = None,
    beta: Float[Tensor, " T"] | None = None,
) -> Float[Tensor, "T T"]:
    """The film's bars in fp64: row t after token t, column j of token j.

    That is the share of v_j in S_t^T k_j / |k_j|^2, its product with v_j over
    |v_j|^2, as data/film.js computes it; 0 where k_j or v_j is zero, and for
    tokens that are still to come. The arguments are those of `states`.
    """
    S = states(k, v, g, beta)
    k, v = doubles(k, v)
    answers = torch.einsum("tkv,jk,jv->tj", S, k, v)
    size = k.square().sum(-1) * v.square().sum(-1)
    bars = torch.where(size > 0, answers / size, 0)
    return bars.tril()
