"""Cross-entropy of the next token without a tensor of all logits.

The logits of B T tokens take B T V numbers, for a vocabulary of V tokens
many times what anything else in the model takes. Here the tokens go through
the head in pieces, and each piece's gradient is made beside its loss, while
its logits are there: nothing is computed twice, and what stays for the
backward has the size of the hidden states and of the head's weight.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.ops import autocast, without_autocast
from fastweights.reference.backend import outside

Hidden = Float[Tensor, "*rows D"]
Head = Float[Tensor, "V D"]


def cross_entropy(
    x: Hidden,
    weight: Head,
    targets: Int[Tensor, "*rows"],
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    """The mean of -log softmax(weight x)[target], in nats, and in fp32.

    What F.cross_entropy(x @ weight.T, targets) is, with the difference that
    a mean over no targets at all is 0. Under autocast x and weight are
    rounded on their way in, and the logits are fp32 from there on. A gradient
    of its gradients is refused.

    Args:
        x: hidden states, one row per prediction.
        weight: the head's, one row per token of the vocabulary.
        targets: tokens, 0 to V - 1, or ``ignore_index``.
        ignore_index: marks rows that predict nothing.
    """
    if x.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets: got shape {list(targets.shape)}, need "
            f"{list(x.shape[:-1])}"
        )
    count = (targets != ignore_index).sum().clamp(min=1)
    x, weight = autocast(x, weight)
    learned = x.requires_grad or weight.requires_grad
    if learned and torch.is_grad_enabled():
        total = _Total.apply(x, weight, targets, ignore_index)
    else:
        total = token_losses(x, weight, targets, ignore_index).sum()
    return total / count


def token_losses(
    x: Hidden,
    weight: Head,
    targets: Int[Tensor, "*rows"],
    ignore_index: int = -100,
) -> Float[Tensor, "*rows"]:
    """Each row's -log softmax(weight x)[target], 0 where it is ignored.

    It has no gradient; for evaluation.
    """
    with torch.no_grad():
        x, weight = autocast(x, weight)
        losses = [
            _piece(rows, weight, at, ignore_index)[0]
            for rows, at in _pieces(x, weight, targets)
        ]
        return torch.cat(losses).view(targets.shape)


def next_tokens(
    tokens: Int[Tensor, "B T"],
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    ignore_index: int = -100,
) -> Int[Tensor, "B T"]:
    """For each token the one after it, as targets.

    The last token of each row, or of each packed sequence, has none, and so
    have tokens after the last sequence.
    """
    targets = F.pad(tokens[:, 1:], (0, 1), value=ignore_index)
    if cu_seqlens is None:
        return targets
    # An empty sequence at the front comes to -1: the last token has none.
    last = (cu_seqlens[1:].to(torch.int64) - 1) % tokens.shape[1]
    targets = targets.index_fill(1, last, ignore_index)
    return targets.masked_fill(
        outside(cu_seqlens, tokens.shape[1]), ignore_index
    )


class _Total(torch.autograd.Function):
    """The sum of the losses, whose gradient is made in the forward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignored: int
    ) -> Tensor:
        full = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros((), dtype=full, device=x.device)
        dx, dweight = [], torch.zeros_like(weight, dtype=full)
        with without_autocast(x):
            for rows, at in _pieces(x, weight, targets):
                losses, logits, lse = _piece(rows, weight, at, ignored)
                total = total + losses.sum()
                there = (at != ignored)[:, None]
                error = (logits - lse).exp()
                one = torch.ones_like(lse)
                index = at.where(there[:, 0], 0)[:, None]
                error = error.scatter_add(1, index, -one)
                error = (error * there).to(x.dtype)
                dx.append(error @ weight)
                dweight = dweight + error.T @ rows
        ctx.save_for_backward(
            torch.cat(dx).view(x.shape), dweight.to(weight.dtype)
        )
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "cross_entropy: its gradient has no gradient (create_graph); "
                "F.cross_entropy of all logits has one"
            )
        (dtotal,) = gradients
        dx, dweight = ctx.saved_tensors
        return (
            dx * dtotal.to(dx.dtype),
            dweight * dtotal.to(dweight.dtype),
            None,
            None,
        )


def _pieces(
    x: Tensor, weight: Tensor, targets: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Rows in so many pieces that one's logits take no more than x does.

    The number is V / D whatever the rows are, so that one compiled graph
    serves every number of rows.
    """
    V, D = weight.shape
    number = math.ceil(V / D)
    rows = x.reshape(-1, D).tensor_split(number)
    at = targets.reshape(-1).tensor_split(number)
    return list(zip(rows, at, strict=True))


def _piece(
    rows: Tensor, weight: Tensor, targets: Tensor, ignored: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, logits and their logsumexp of some rows, in fp32."""
    full = torch.promote_types(rows.dtype, torch.float32)
    logits = (rows @ weight.T).to(full)
    lse = logits.logsumexp(-1, keepdim=True)
    there = targets != ignored
    at = targets.where(there, 0)[:, None]
    losses = (lse - logits.gather(-1, at))[:, 0].where(there, 0)
    return losses, logits, lse
