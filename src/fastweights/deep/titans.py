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
        q, k, v: of one dtype; computed in fp32 (fp64 if they are).
        rate, momentum, g: per token and head; g is the log of the decay.
        start: the model's layers (W [H, K, N], b [H, N]), with GELU (tanh)
            between them.
        norm: weight and bias [H, V] of a LayerNorm behind the model, or None.
        chunk_size: tokens whose gradients are taken at the same weights.
        initial_state: what the weights have learned since ``start``, S, and
            what the weights of the chunk's start had learned; in fp32.
        position, lengths: as in :func:`fastweights.deep.ttt`.

    Returns:
        o, in q's dtype, and the state after each row's last token.

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
        momentum, decay = momentum.to(full), g.to(full).exp()
        start = [(W.to(full), b.to(full)) for W, b in start]
        if norm is not None:
            norm = (norm[0].to(full), norm[1].to(full))
        if initial_state is None:
            initial_state = q.new_zeros(B, H, 3, P)
        M, S, base = unpack_state(initial_state, start)
        tokens = (q, k, v, rate, momentum, decay)
        outputs, done = [], 0
        layout = ChunkLayout(chunk_size, T, q.device, position, lengths)
        if layout.regular and (done := T // chunk_size * chunk_size):
            cut = [x[:, :done] for x in tokens]
            M, S, o = _whole_chunks(M, S, cut, norm, chunk_size)
            outputs.append(o)
            base = M
            layout = ChunkLayout(chunk_size, T - done, q.device)
        q, k, v, rate, momentum, decay = (x[:, done:] for x in tokens)
        rest = []
        for part in layout:
            # [B, H, C]; a token that is not there keeps W and S.
            theta = part.take(rate, 0.0).mT
            eta, alpha = (part.take(x, 1.0).mT for x in (momentum, decay))
            exists = part.take(torch.ones_like(rate), 0.0).mT
            q_, k_, v_ = (part.take(x).transpose(1, 2) for x in (q, k, v))
            M, S, z = chunk(
                M, S, base, q_, k_, v_, theta, eta, alpha, exists, norm
            )
            rest.append(z.transpose(1, 2))
            base = map_layers(part.where_ends, M, base)
        if rest:
            outputs.append(layout.join(rest))
        return torch.cat(outputs, 1).to(dtype), pack_state(M, S, base, start)


def unpack_state(
    state: Float[Tensor, "B H 3 P"], start: NetworkWeights
) -> tuple[NetworkWeights, NetworkWeights, NetworkWeights]:
    """The weights, S, and the weights with which the chunk began."""
    parts = state.to(start[0][0].dtype).unbind(2)
    since, S, began = (unflatten(x, start) for x in parts)
    add = partial(map_layers, torch.add)
    return add(since, start), S, add(began, start)


def pack_state(
    M: NetworkWeights,
    S: NetworkWeights,
    base: NetworkWeights,
    start: NetworkWeights,
) -> Float[Tensor, "B H 3 P"]:
    """Inverse of :func:`unpack_state`."""
    since, began = (map_layers(torch.sub, x, start) for x in (M, base))
    return flatten([*since, *S, *began]).unflatten(-1, (3, -1))


def chunk(
    M: NetworkWeights,
    S: NetworkWeights,
    base: NetworkWeights,
    q: Float[Tensor, "B H C K"],
    k: Float[Tensor, "B H C K"],
    v: Float[Tensor, "B H C V"],
    theta: Float[Tensor, "B H C"],
    eta: Float[Tensor, "B H C"],
    alpha: Float[Tensor, "B H C"],
    exists: Float[Tensor, "B H C"] | None = None,
    norm: Norm | None = None,
) -> tuple[NetworkWeights, NetworkWeights, Float[Tensor, "B H C V"]]:
    """The weights and S after the last of some tokens, and what they read.

    Gradients are those of the weights ``base``. ``exists`` is 1 for a token
    and 0 for padding; None: there is no padding.
    """
    grads = gradients(base, k, v, norm)
    slow, fast = pairwise_products(alpha), pairwise_products(eta)
    # How much of S at token s is in W at token t, [B, H, C, C].
    reach = slow if exists is None else slow * exists[..., None, :]
    share = (reach @ fast) * theta[..., None, :]
    keep, speed = running_product(alpha), running_product(eta)
    carry = (reach @ speed[..., None])[..., 0]
    z = answer_queries(q, M, S, grads, keep, carry, share)
    if norm is not None:
        z = layer_norm(z, norm)[0]
    moved = sum_gradients(grads, share[..., -1, :])
    surprise = sum_gradients(grads, fast[..., -1, :] * theta)
    kept, reached = keep[..., -1], carry[..., -1]
    M = map_layers(partial(_blend, kept, reached), M, S, moved)
    S = map_layers(partial(_blend, speed[..., -1], None), S, S, surprise)
    return M, S, z


def _whole_chunks(
    M: NetworkWeights,
    S: NetworkWeights,
    tokens: Sequence[Tensor],
    norm: Norm | None,
    chunk_size: int,
) -> tuple[NetworkWeights, NetworkWeights, Float[Tensor, "B T H V"]]:
    """Complete chunks of q, k, v and of the three rates, [B, T, H, ...]."""
    number = 2 * len(M)

    def step(state: LoopState, *xs: Tensor) -> tuple[LoopState, Tensor]:
        M, S = as_layers(state[:number]), as_layers(state[number:])
        q, k, v, theta, eta, alpha = xs
        M, S, z = chunk(M, S, M, q, k, v, theta, eta, alpha, norm=norm)
        return [*tensors_of(M), *tensors_of(S)], z

    state: LoopState = [*tensors_of(M), *tensors_of(S)]
    state, o = scan_chunks(step, state, tokens, chunk_size)
    return as_layers(state[:number]), as_layers(state[number:]), o


def _blend(
    keep: Tensor, carry: Tensor | None, M: Tensor, S: Tensor, moved: Tensor
) -> Tensor:
    """keep M + carry S - moved, with keep and carry per head [B, H]."""
    M = broadcast_rate(keep, M) * M - moved
    return M if carry is None else M + broadcast_rate(carry, M) * S
