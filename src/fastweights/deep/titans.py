"""Titans' memory (Behrouz et al. 2025), a chunk at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import check_sizes
from fastweights.deep.chunk_layout import ChunkLayout
from fastweights.deep.chunk_loop import LoopState, scan_chunks
from fastweights.deep.dual_form import (
    NetworkWeights,
    Norm,
    answer_queries,
    as_layers,
    flatten,
    gradients,
    layer_norm,
    map_layers,
    sum_gradients,
    tensors_of,
    unflatten,
)
from fastweights.deep.network_arguments import (
    check_layers,
    check_network_inputs,
    check_state,
    check_weight_and_bias,
)
from fastweights.dtypes import compute_dtype, without_autocast
from fastweights.fast_weights import broadcast_rate
from fastweights.ops.common import any_length
from fastweights.ranks.group import refuse_ranks


def pairwise_products(
    a: Float[Tensor, "*lead C"],
) -> Float[Tensor, "*lead C C"]:
    """[t, s]: the product of a_{s+1} to a_t; 0 where s > t.

    Products of factors, not quotients of running products: a factor may be 0.
    """
    C = a.shape[-1]
    later = torch.ones(C, C, dtype=torch.bool, device=a.device).tril(-1)
    factors = a[..., None, :].where(later.mT, 1.0)
    return running_product(factors).mT.tril()


def running_product(a: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
    """``a.cumprod(-1)``, whose own backward would wait for the device.

    PyTorch's asks there whether a factor is 0. In round r each product takes
    in the one 2^r places before it.
    """
    reach = 1
    while reach < a.shape[-1]:
        longer = a[..., reach:] * a[..., :-reach]
        a = torch.cat([a[..., :reach], longer], -1)
        reach *= 2
    return a


def titans(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    rate: Float[Tensor, "B T H"],
    momentum: Float[Tensor, "B T H"],
    g: Float[Tensor, "B T H"],
    start: NetworkWeights,
    norm: Norm | None = None,
    *,
    chunk_size: int = 16,
    initial_state: Float[Tensor, "B H 3 P"] | None = None,
    position: Int[Tensor, " B"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H 3 P"]]:
    """A network that learns v from k, with momentum and decay, read by q.

    With W' the weights at a chunk's start, and S as the paper has it:

        S_t = momentum_t S_{t-1} - rate_t grad_t(W')
        W_t = e^{g_t} W_{t-1} + S_t
        grad_t = gradient of |f(k_t; W') - v_t|^2 / 2,  o_t = f(q_t; W_t)

    The paper's loss has no half: its theta is rate / 2, its alpha is
    1 - e^g, its eta the momentum (eqs. 11 to 14). This is
    ``online_learner(network(), squared_error, stale(momentum_sgd, C))``.
    Momentum and decay are two linear recurrences, one reading the other; both
    are solved by products inside the chunk (the paper's eqs. 16 to 18).

    Args:
        q, k, v: [B, T, H, K] both and [B, T, H, V], of one dtype; computed in
            fp32 (fp64 if they are).
        rate, momentum, g: [B, T, H]; g is the log of the decay.
        start: the model's layers (W [H, K, N], b [H, N]), with GELU (tanh)
            between them; the last one's N is V.
        norm: weight and bias [H, V] of a LayerNorm behind the model, or None.
        chunk_size: tokens whose gradients are taken at the same weights.
        initial_state: [B, H, 3, P] for P weights per head: what they have
            learned since ``start``, S, and what the weights of the chunk's
            start had learned; in fp32.
        position, lengths: [B], as in :func:`fastweights.deep.ttt`.

    Returns:
        o [B, T, H, V], in q's dtype, and the state [B, H, 3, P] after each
        row's last token.

    Raises:
        TypeError, ValueError: as :func:`fastweights.deep.ttt`.
    """
    refuse_ranks("titans")
    rates = {"rate": rate, "momentum": momentum, "g": g}
    check_network_inputs(q, k, v, rates, position, lengths)
    check_sizes(chunk_size=chunk_size)
    dtype, full = q.dtype, compute_dtype(q.dtype)
    B, T, H, K = q.shape
    check_layers(start, H, K, v.shape[-1])
    P = sum(x[0].numel() for layer in start for x in layer)
    check_state(q, initial_state, B, H, 3, P, after=position)
    if norm is not None:
        check_weight_and_bias("norm", norm, (H, v.shape[-1]))
    if any_length.is_dynamic(T):
        results = (v.shape, dtype), ([B, H, 3, P], full)
        inputs = q, k, v, rate, momentum, g, start, norm
        return any_length.call_as_operator(
            titans,
            results,
            *inputs,
            chunk_size=chunk_size,
            initial_state=initial_state,
            position=position,
            lengths=lengths,
        )
    with without_autocast(q):
        q, k, v, rate = (x.to(full) for x in (q, k, v, rate))
        momentum, keep = momentum.to(full), g.to(full).exp()
        start = [(W.to(full), b.to(full)) for W, b in start]
        if norm is not None:
            norm = (norm[0].to(full), norm[1].to(full))
        if initial_state is None:
            initial_state = q.new_zeros(B, H, 3, P)
        weights, surprise, base = unpack_state(initial_state, start)
        tokens = (q, k, v, rate, momentum, keep)
        outputs, done = [], 0
        layout = ChunkLayout(chunk_size, T, q.device, position, lengths)
        if layout.regular and (done := T // chunk_size * chunk_size):
            cut = [x[:, :done] for x in tokens]
            weights, surprise, o = _whole_chunks(
                weights, surprise, cut, norm, chunk_size
            )
            outputs.append(o)
            base = weights
            layout = ChunkLayout(chunk_size, T - done, q.device)
        q, k, v, rate, momentum, keep = (x[:, done:] for x in tokens)
        rest = []
        for part in layout:
            q_, k_, v_ = (part.take(x).transpose(1, 2) for x in (q, k, v))
            weights, surprise, z = chunk(
                weights,
                surprise,
                base,
                q_,
                k_,
                v_,
                # A token that is not there changes nothing.
                part.take(rate, 0.0).mT,
                part.take(momentum, 1.0).mT,
                part.take(keep, 1.0).mT,
                part.take(torch.ones_like(rate), 0.0).mT,
                norm,
            )
            rest.append(z.transpose(1, 2))
            base = map_layers(part.where_ends, weights, base)
        if rest:
            outputs.append(layout.join(rest))
        after = pack_state(weights, surprise, base, start)
        return torch.cat(outputs, 1).to(dtype), after


def unpack_state(
    state: Float[Tensor, "B H 3 P"], start: NetworkWeights
) -> tuple[NetworkWeights, NetworkWeights, NetworkWeights]:
    """The weights, the surprise, and the weights that the chunk began with."""
    parts = state.to(start[0][0].dtype).unbind(2)
    since, surprise, began = (unflatten(x, start) for x in parts)
    add = partial(map_layers, torch.add)
    return add(since, start), surprise, add(began, start)


def pack_state(
    weights: NetworkWeights,
    surprise: NetworkWeights,
    base: NetworkWeights,
    start: NetworkWeights,
) -> Float[Tensor, "B H 3 P"]:
    """Inverse of :func:`unpack_state`."""
    since, began = (map_layers(torch.sub, x, start) for x in (weights, base))
    return flatten([*since, *surprise, *began]).unflatten(-1, (3, -1))


def chunk(
    weights: NetworkWeights,
    surprise: NetworkWeights,
    base: NetworkWeights,
    q: Float[Tensor, "B H C K"],
    k: Float[Tensor, "B H C K"],
    v: Float[Tensor, "B H C V"],
    rate: Float[Tensor, "B H C"],
    momentum: Float[Tensor, "B H C"],
    keep: Float[Tensor, "B H C"],
    exists: Float[Tensor, "B H C"] | None = None,
    norm: Norm | None = None,
) -> tuple[NetworkWeights, NetworkWeights, Float[Tensor, "B H C V"]]:
    """Weights and surprise after the last of some tokens, and what they read.

    The surprise is the paper's S. Gradients are those of the weights
    ``base``; each token keeps ``keep`` of the weights before. ``exists`` is 1
    for a token and 0 for padding; None: there is no padding.
    """
    grads = gradients(base, k, v, norm)
    slow, fast = pairwise_products(keep), pairwise_products(momentum)
    # How much of token s's surprise is in token t's weights, [B, H, C, C].
    reach = slow if exists is None else slow * exists[..., None, :]
    share = (reach @ fast) * rate[..., None, :]
    kept, speed = running_product(keep), running_product(momentum)
    carry = (reach @ speed[..., None])[..., 0]
    z = answer_queries(q, weights, surprise, grads, kept, carry, share)
    if norm is not None:
        z = layer_norm(z, norm)[0]
    moved = sum_gradients(grads, share[..., -1, :])
    added = sum_gradients(grads, fast[..., -1, :] * rate)
    last = kept[..., -1], carry[..., -1]
    weights = map_layers(partial(_blend, *last), weights, surprise, moved)
    surprise = map_layers(
        partial(_blend, speed[..., -1], None), surprise, surprise, added
    )
    return weights, surprise, z


def _whole_chunks(
    weights: NetworkWeights,
    surprise: NetworkWeights,
    tokens: Sequence[Tensor],
    norm: Norm | None,
    chunk_size: int,
) -> tuple[NetworkWeights, NetworkWeights, Float[Tensor, "B T H V"]]:
    """Complete chunks of q, k, v, rate, momentum and keep, [B, T, H, ...]."""
    number = 2 * len(weights)

    def step(state: LoopState, *xs: Tensor) -> tuple[LoopState, Tensor]:
        W, S = as_layers(state[:number]), as_layers(state[number:])
        q, k, v, rate, momentum, keep = xs
        W, S, z = chunk(W, S, W, q, k, v, rate, momentum, keep, norm=norm)
        return [*tensors_of(W), *tensors_of(S)], z

    state: LoopState = [*tensors_of(weights), *tensors_of(surprise)]
    state, o = scan_chunks(step, state, tokens, chunk_size)
    return as_layers(state[:number]), as_layers(state[number:]), o


def _blend(
    keep: Tensor, carry: Tensor | None, W: Tensor, S: Tensor, moved: Tensor
) -> Tensor:
    """keep W + carry S - moved, with keep and carry per head [B, H]."""
    W = broadcast_rate(keep, W) * W - moved
    return W if carry is None else W + broadcast_rate(carry, W) * S
