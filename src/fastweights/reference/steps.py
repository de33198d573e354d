"""One step of each layer, and the loop that runs any of them.

The state S is a matrix of fast weights [..., K, V], read by a query as
``S^T q``. Papers often keep its transpose; this library never does. Every
step writes first and reads the new state: ``o_t`` comes from ``S_t``.

Shapes in this file: q, k [..., K]; v, o [..., V]; a gate g is the natural
log of a decay, [...] (one per head) or [..., K] (one per key channel); beta
[...]. The leading dimensions are whatever the caller has, usually [B, H].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

State = Float[Tensor, "*lead K V"]
NormalisedState = Float[Tensor, "*lead K V+1"]
Key = Float[Tensor, "*lead K"]
Value = Float[Tensor, "*lead V"]
PerHead = Float[Tensor, "*lead"]


def outer(k: Key, v: Value) -> State:
    """k v^T, from which the query k / |k|^2 reads v."""
    return k[..., :, None] * v[..., None, :]


def read(
    S: Float[Tensor, "*#lead K V"], q: Float[Tensor, "*#lead K"]
) -> Float[Tensor, "*#lead V"]:
    """S^T q: what the state answers to q."""
    return torch.einsum("...kv,...k->...v", S, q)


def linear(S: State, q: Key, k: Key, v: Value) -> tuple[State, Value]:
    """Linear attention: Katharopoulos et al. 2020, eqs. 18, 20 without z."""
    S = S + outer(k, v)
    return S, read(S, q)


def retention(
    S: State, q: Key, k: Key, v: Value, g: PerHead
) -> tuple[State, Value]:
    """RetNet (Sun et al. 2023, eq. 6): one fixed decay e^g per head."""
    S = g.exp()[..., None, None] * S + outer(k, v)
    return S, read(S, q)


def mamba2(
    S: State, q: Key, k: Key, v: Value, dt: PerHead, A: PerHead
) -> tuple[State, Value]:
    """Mamba-2 (Dao and Gu 2024) in its own terms: q, k, v are C, B, x.

    The step size dt > 0 gates what is kept, e^{dt A} with A < 0, and scales
    what is written.
    """
    S = (dt * A).exp()[..., None, None] * S + outer(k, dt[..., None] * v)
    return S, read(S, q)


def mlstm(
    state: tuple[NormalisedState, PerHead],
    q: Key,
    k: Key,
    v: Value,
    g: PerHead,
    i: PerHead,
) -> tuple[tuple[NormalisedState, PerHead], Value]:
    """mLSTM (Beck et al. 2024, eqs. 19 to 27), scaled by e^{-m}.

    The state is e^{-m} times [C, n], [..., K, V + 1], and the stabilizer m,
    [...]; g and i are the logs of the forget and the input gate. The layer
    applies the output gate of eq. 21.
    """
    S, old_m = state
    m = torch.maximum(g + old_m, i)
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    S = (g + old_m - m).exp()[..., None, None] * S
    S = S + outer(k, (i - m).exp()[..., None] * v)
    o = read(S, q)
    total = torch.maximum(o[..., -1:].abs(), (-m).exp()[..., None])
    return (S, m), o[..., :-1] / total


def gla(S: State, q: Key, k: Key, v: Value, g: Key) -> tuple[State, Value]:
    """Gated linear attention (Yang et al. 2024, eq. 3): decay per channel."""
    S = g.exp()[..., :, None] * S + outer(k, v)
    return S, read(S, q)


def deltanet(
    S: State, q: Key, k: Key, v: Value, beta: PerHead
) -> tuple[State, Value]:
    """DeltaNet (Schlag et al. 2021, eq. 24): write only what is missing."""
    S = S + outer(k, beta[..., None] * (v - read(S, k)))
    return S, read(S, q)


def gated_deltanet(
    S: State, q: Key, k: Key, v: Value, g: PerHead, beta: PerHead
) -> tuple[State, Value]:
    """Gated DeltaNet (Yang et al. 2025, eq. 10): forget, then correct."""
    S = g.exp()[..., None, None] * S
    return deltanet(S, q, k, v, beta)


def kda(
    S: State, q: Key, k: Key, v: Value, g: Key, beta: PerHead
) -> tuple[State, Value]:
    """Kimi Delta Attention (Kimi Team 2025): Gated DeltaNet, by channel."""
    S = g.exp()[..., :, None] * S
    return deltanet(S, q, k, v, beta)


def gated_deltanet2(
    S: State, q: Key, k: Key, v: Value, g: Key, b: Key, w: Value
) -> tuple[State, Value]:
    """Gated DeltaNet-2 (Hatamizadeh et al. 2026): strengths per channel.

    b in [0, 1]^K erases and w in [0, 1]^V writes; with b = w = beta it is
    KDA. A second key, b * k, reads what is erased.
    """
    S = g.exp()[..., :, None] * S
    S = S + outer(k, w * v - read(S, b * k))
    return S, read(S, q)


def comba(
    S: State, q: Key, k: Key, v: Value, p: Key, g: PerHead, beta: PerHead
) -> tuple[State, Value]:
    """Comba (Hu et al. 2025): what is erased is what another key reads.

    p, a fraction of k in the paper, reads the state before the decay.
    """
    new = beta[..., None] * (v - read(S, p))
    S = g.exp()[..., None, None] * S + outer(k, new)
    return S, read(S, q)


def recurrence(
    S: State,
    q: Key,
    k: Key,
    v: Value,
    g: Float[Tensor, "*lead DG"] | None = None,
    beta: PerHead | None = None,
    erase_key: Key | None = None,
) -> tuple[State, Value]:
    """One step of the whole family: forget if g, correct if beta.

    g is [..., 1] for a gate per head and [..., K] for a gate per key channel.
    With ``erase_key`` another key than k reads what is erased, and both keys'
    strengths are in erase_key and v: for beta they are beta k and beta v.
    """
    if g is not None:
        S = g.exp()[..., None] * S
    new = v if beta is None else beta[..., None] * (v - read(S, k))
    if erase_key is not None:
        new = v - read(S, erase_key)
    S = S + outer(k, new)
    return S, read(S, q)


def selective(
    h: Float[Tensor, "*lead D N"],
    x: Float[Tensor, "*lead D"],
    dt: Float[Tensor, "*lead D"],
    A: Float[Tensor, "*#lead D N"],
    B: Float[Tensor, "*lead N"],
    C: Float[Tensor, "*lead N"],
) -> tuple[Float[Tensor, "*lead D N"], Float[Tensor, "*lead D"]]:
    """Mamba's selective scan (Gu and Dao 2023): N numbers per channel of x.

    Here values come first in the state, as in the paper. Each entry of the
    state decays on its own, by e^{dt A} with A < 0.
    """
    h = (dt[..., None] * A).exp() * h + outer(dt * x, B)
    return h, read(h.mT, C)


def softmax(
    cache: tuple[Tensor, Tensor], q: Key, k: Key, v: Value
) -> tuple[tuple[Tensor, Tensor], Value]:
    """One step of softmax attention: its state is all keys and values.

    ``cache`` holds keys [..., n, K] and values [..., n, V] and grows by one
    row per step; scale q beforehand.
    """
    keys = torch.cat([cache[0], k[..., None, :]], dim=-2)
    values = torch.cat([cache[1], v[..., None, :]], dim=-2)
    scores = torch.einsum("...nk,...k->...n", keys, q)
    weights = torch.softmax(scores, dim=-1)
    return (keys, values), torch.einsum("...nv,...n->...v", values, weights)


def scan(
    step: Callable[..., tuple[Any, Tensor]], state: Any, *inputs: Tensor
) -> tuple[Tensor, Any]:
    """Run ``step`` over time: inputs [B, T, ...] -> outputs [B, T, ...].

    ``step(state, *inputs at time t)`` returns the next state and the output
    at t. Returns all outputs, and the state after the last step.
    """
    outputs = []
    for at_t in zip(*(x.unbind(1) for x in inputs), strict=True):
        state, o = step(state, *at_t)
        outputs.append(o)
    return torch.stack(outputs, dim=1), state
