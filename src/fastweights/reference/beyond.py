"""One step of layers that came after the family, or stand beside it.

As in :mod:`fastweights.reference.steps`: S is [..., K, V], g the log of a
decay, per head [...] or per key channel [..., K], and every step reads what
it has written. Papers keep the transpose of S. Chapter 13 says which of
them the library's recurrence runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from fastweights.reference.steps import (
    Key,
    PerHead,
    State,
    Value,
    deltanet,
    outer,
    read,
    softmax,
)


def rwkv7(
    S: State, q: Key, k: Key, v: Value, g: Key, kappa: Key, a: Key
) -> tuple[State, Value]:
    """RWKV-7 (Peng et al. 2025): decay and erase the same old state.

    What kappa, a key of unit length, reads is erased under a * kappa, with a
    in [0, 1]^K. Two vectors read, q and kappa, and two are written, k and
    -a * kappa.
    """
    erased = outer(a * kappa, read(S, kappa))
    S = g.exp()[..., None] * S - erased + outer(k, v)
    return S, read(S, q)


def delta_product(
    S: State,
    q: Key,
    k: Float[Tensor, "*lead n K"],
    v: Float[Tensor, "*lead n V"],
    g: PerHead,
    beta: Float[Tensor, "*lead n"],
) -> tuple[State, Value]:
    """Gated DeltaProduct (Siems et al. 2025): n delta steps per token.

    g = 0 is DeltaProduct. The same as n tokens of Gated DeltaNet, of which
    only the first decays and only the last is read.
    """
    S = g.exp()[..., None, None] * S
    for i in range(k.shape[-2]):
        S, o = deltanet(S, q, k[..., i, :], v[..., i, :], beta[..., i])
    return S, o


def mamba3(
    state: tuple[State, Key, Value],
    q: Key,
    k: Key,
    v: Value,
    dt: PerHead,
    g: PerHead,
    share: PerHead,
) -> tuple[tuple[State, Key, Value], Value]:
    """Mamba-3 (2026): a step writes the last token and this one.

    The trapezoidal rule, with dt the step size, g = -A dt for a rate A > 0,
    and a learned share in [0, 1] of the new end; 1 is Mamba-2. q and k come
    turned back by the running sum of their angles, as in rotary positions.
    Each token's k and v are written once more, one token later.
    """
    S, k_last, v_last = state
    old, new = (1 - share) * dt * g.exp(), share * dt
    S = g.exp()[..., None, None] * S + outer(k_last, old[..., None] * v_last)
    S = S + outer(k, new[..., None] * v)
    return (S, k, v), read(S, q)


def log_linear(
    state: tuple[Float[Tensor, "*lead L K V"], int],
    q: Key,
    k: Key,
    v: Value,
    g: PerHead,
    weights: Float[Tensor, "*lead L"],
) -> tuple[tuple[Float[Tensor, "*lead L K V"], int], Value]:
    """Log-linear attention (Guo et al. 2025): a state per bucket of the past.

    Level 0 holds token t itself. If the l-th bit of t from the right is 1,
    level l holds a bucket of 2^(l-1) tokens, as in a Fenwick tree: small
    buckets near t, large ones far away. ``weights`` are those of the token
    that reads, one per level. L levels are enough for 2^(L-1) tokens. The
    state starts with zeros and t = 0.
    """
    S, t = state
    low = (t & -t).bit_length()  # the lowest bit of t that is 1, from 1 on
    merged = S[..., :low, :, :].sum(-3, keepdim=True)
    rest = S[..., low + 1 :, :, :] if low else S[..., 1:, :, :]
    empty = torch.zeros_like(S[..., : max(low - 1, 0), :, :])
    now = outer(k, v)[..., None, :, :]
    older = torch.cat([empty, merged, rest] if low else [rest], -3)
    S = torch.cat([now, g.exp()[..., None, None, None] * older], -3)
    return (S, t + 1), (weights[..., None] * read(S, q[..., None, :])).sum(-2)


def path(
    cache: tuple[Tensor, Tensor],
    q: Key,
    k: Key,
    v: Value,
    w: Key,
    beta: PerHead,
) -> tuple[tuple[Tensor, Tensor], Value]:
    """PaTH attention (Yang et al. 2025): later tokens change earlier keys.

    Softmax attention in which token t multiplies all keys before it by
    I - beta_t w_t w_t^T: positions that depend on the data. ``cache`` is that
    of :func:`fastweights.reference.steps.softmax`; scale q beforehand.
    """
    keys, values = cache
    along = torch.einsum("...nk,...k->...n", keys, w)
    keys = keys - (beta[..., None] * along)[..., None] * w[..., None, :]
    return softmax((keys, values), q, k, v)


def atlas(
    state: tuple[State, State, Tensor, Tensor, Tensor],
    q: Key,
    k: Key,
    v: Value,
    strength: PerHead,
    momentum: PerHead,
    g: PerHead,
    rate: PerHead,
    *,
    window: int,
    orthogonal: Callable[[Tensor], Tensor] = lambda M: M,
) -> tuple[tuple[State, State, Tensor, Tensor, Tensor], Value]:
    """Atlas (Behrouz et al. 2025): learn the last tokens again, every token.

    The gradient of sum_i strength_i |S^T k_i - v_i|^2 / 2 over the window
    goes into a running sum, and that, orthogonalised, into the weights
    (signs as in the paper's appendix; here the model is a matrix, there a
    network of polynomials of k). The paper's OmegaNet takes the plain
    gradient step: momentum 0, and no ``orthogonal``. The state is S, the sum
    M, and the window's keys, values and strengths, which start empty.
    """
    S, M, keys, values, strengths = state
    keys = torch.cat([keys, k[..., None, :]], -2)[..., -window:, :]
    values = torch.cat([values, v[..., None, :]], -2)[..., -window:, :]
    strengths = torch.cat([strengths, strength[..., None]], -1)[..., -window:]
    errors = strengths[..., None] * (keys @ S - values)
    M = momentum[..., None, None] * M + keys.mT @ errors
    step = rate[..., None, None] * orthogonal(M)
    S = g.exp()[..., None, None] * S - step
    return (S, M, keys, values, strengths), read(S, q)
