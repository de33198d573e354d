"""TTT-Linear and TTT-MLP (Sun et al. 2024), a mini-batch at a time."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.deep import dual
from fastweights.deep.arguments import (
    check_layers,
    check_shapes,
    check_tokens,
)
from fastweights.deep.chunks import Layout
from fastweights.deep.dual import Layers, Norm
from fastweights.ops import without_autocast
from fastweights.reference.backend import wide


def ttt(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H K"],
    rate: Float[Tensor, "B T H"],
    start: Layers,
    norm: Norm,
    rows: Float[Tensor, " C"],
    *,
    initial_state: Float[Tensor, "B H 2 P"] | None = None,
    position: Int[Tensor, " B"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B H 2 P"]]:
    """Weights that learn v from k by mini-batches, read by q.

    With W' the weights at a mini-batch's start, its tokens t = 0, 1, ...:

        W_t = W' - rows_t sum_{s <= t} rate_s grad_s(W')
        grad_s = gradient of |LN(f(k_s; W')) - (v_s - k_s)|^2 / 2
        o_t = q_t + LN(f(q_t; W_t))

    and the next mini-batch starts with the last of these weights. This is
    ``online_learner(normed(network(), *norm), squared_error, summed(sgd,
    C))`` with q added, in the paper's dual form (section 2.5).

    Args:
        q, k, v: of one dtype; computed in fp32 (fp64 if they are).
        rate: per token and head.
        start: the model's layers (W [H, K, N], b [H, N]), with GELU (tanh)
            between them: one for TTT-Linear, two for TTT-MLP.
        norm: the LayerNorm's weight and bias, [H, K] both; eps is 1e-6.
        rows: the mini-batch's C factors, of the paper 1 / (t + 1).
        initial_state: what the weights have learned since ``start``, and the
            sum of the unfinished mini-batch, of P numbers each, in fp32.
        position: tokens that each row has read before; needed, like
            ``initial_state``, to go on.
        lengths: tokens of each row; None: T.

    Returns:
        o, in q's dtype, and the state after each row's last token.

    Raises:
        TypeError, ValueError: a dtype, device or shape does not fit; the
            message names the argument, what it got and what it needs.
    """
    check_tokens(q, k, v, {"rate": rate}, position, lengths)
    dtype, size = q.dtype, len(rows)
    full = wide(dtype)
    B, T, H, K = q.shape
    check_layers(start, H, K, K)
    P = sum(x[0].numel() for layer in start for x in layer)
    check_shapes(
        {
            "v": (v, (B, T, H, K)),
            "norm[0]": (norm[0], (H, K)),
            "norm[1]": (norm[1], (H, K)),
            "initial_state": (initial_state, (B, H, 2, P)),
        }
    )
    with without_autocast(q):
        q, k, v, rate = (x.to(full) for x in (q, k, v, rate))
        start = [(W.to(full), b.to(full)) for W, b in start]
        norm = (norm[0].to(full), norm[1].to(full))
        rows = rows.to(full)
        first = dual.flatten([(W[None], b[None]) for W, b in start])
        if initial_state is None:
            initial_state = q.new_zeros(B, H, 2, P)
        since, total = initial_state.to(full).unbind(2)
        weights = dual.unflatten(first + since, start)
        # Nothing, where every part begins a chunk.
        sums: Layers | None = None
        layout = Layout(size, T, q.device, position, lengths)
        if not layout.regular:
            sums = dual.unflatten(total, start)
        outputs = []
        for part in layout:
            eta = part.take(rate, 0.0).mT
            # [B, H, C, K]
            q_, k_, v_ = (part.take(x).transpose(1, 2) for x in (q, k, v))
            found = dual.gradients(weights, k_, v_ - k_, norm)
            # [B, 1, C], then share [B, H, C, C]
            row = rows[part.place][:, None]
            share = (row[..., None] * eta[:, :, None]).tril()
            z = dual.read(q_, weights, sums, found, None, -row, share)
            o = q_ + dual.layer_norm(z, norm)[0]
            outputs.append(o.transpose(1, 2))
            more = dual.gather(found, eta)
            more = more if sums is None else dual.each(torch.add, sums, more)
            stepped = dual.each(lambda W, G: W - rows[-1] * G, weights, more)
            weights = dual.each(part.choose, stepped, weights)
            if layout.regular:
                total = 0 * total if part.ends else dual.flatten(more)
            else:
                nothing = dual.each(torch.zeros_like, more)
                sums = dual.each(part.choose, nothing, more)
                total = dual.flatten(sums)
        since = dual.flatten(weights) - first
        o = layout.join(outputs).to(dtype)
        return o, torch.stack([since, total], 2)
