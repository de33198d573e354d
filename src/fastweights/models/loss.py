"""Cross-entropy of the next token without a tensor of all logits.

The logits of B T tokens take B T V numbers, for a vocabulary of V tokens
many times what anything else in the model takes. Here the tokens go through
the head in pieces, and each piece's gradient is made beside its loss, while
its logits are there: nothing is computed twice, and what stays for the
backward has the size of the hidden states and of the head's weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fastweights import torch_internals
from fastweights.arguments import (
    check_dims,
    check_integers,
    check_packed,
    check_tensors,
    is_readable,
    refuse_shape,
)
from fastweights.dtypes import (
    cast_for_autocast,
    compute_dtype,
    under_autocast,
    upcast,
    without_autocast,
)
from fastweights.ops.common.registration import register
from fastweights.packing import sequence_ids
from fastweights.ranks.group import current_ranks, token_offset_and_total

Head = Float[Tensor, "V D"]

MIN_ROWS = 256
"""The fewest rows that go through the head at once. If it has more columns, as
many as those: to add its gradient up then takes no longer than to find it."""
MAX_LOGITS = 2**25
"""Probabilities that are in fp32 at once."""


def linear_cross_entropy(
    hidden: Float[Tensor, "*rows D"],
    head_weight: Head,
    targets: Int[Tensor, "*rows"],
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    """The mean of -log softmax(head_weight hidden)[target], in nats, in fp32.

    What F.cross_entropy(hidden @ head_weight.T, targets) is, with the
    difference that a mean over no targets at all is 0. Under autocast hidden
    and head_weight are rounded on their way in, and the logits are fp32 from
    there on. A gradient of its gradients is refused.

    Args:
        hidden: states of the last layer, one row per prediction.
        head_weight: the head's matrix, one row per token of the vocabulary.
        targets: tokens, 0 to V - 1, or ``ignore_index``.
        ignore_index: marks rows that predict nothing.

    Returns:
        the mean, [], fp32 (fp64 if hidden is).
    """
    if torch_internals.under_transform():
        logits = F.linear(*cast_for_autocast(hidden, head_weight))
        return losses_of_logits(logits, targets, ignore_index)
    _check(hidden, head_weight, targets, ignore_index)
    if torch.is_grad_enabled() and (
        hidden.requires_grad or head_weight.requires_grad
    ):
        total = _SummedLoss.apply(hidden, head_weight, targets, ignore_index)
    else:
        total = _losses(hidden, head_weight, targets, ignore_index)[0].sum()
    return total / _num_targets(targets, ignore_index)


def token_losses(
    hidden: Float[Tensor, "*rows D"],
    head_weight: Head,
    targets: Int[Tensor, "*rows"],
    ignore_index: int = -100,
) -> Float[Tensor, "*rows"]:
    """Each row's -log softmax(head_weight hidden)[target], 0 if ignored.

    It has no gradient; for evaluation.

    Args:
        hidden, head_weight, targets, ignore_index: as in
            :func:`linear_cross_entropy`.

    Returns:
        one loss per row, fp32 (fp64 if hidden is).
    """
    _check(hidden, head_weight, targets, ignore_index)
    return _losses(hidden, head_weight, targets, ignore_index)[0]


def losses_of_logits(
    logits: Float[Tensor, "*rows V"],
    targets: Int[Tensor, "*rows"],
    ignore_index: int = -100,
    reduction: Literal["mean", "none"] = "mean",
) -> Float[Tensor, "*rows"] | Float[Tensor, ""]:
    """:func:`linear_cross_entropy`'s mean, or each row's loss, from logits.

    It has gradients of any order, and works under torch.func.
    """
    V = logits.shape[-1]
    check_tokens("targets", targets, V, logits.shape[:-1], ignore_index)
    losses = F.cross_entropy(
        upcast(logits).reshape(-1, V),
        targets.reshape(-1).to(torch.int64),
        ignore_index=ignore_index,
        reduction="none",
    )
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() / _num_targets(targets, ignore_index)


def check_tokens(
    name: str,
    tokens: Tensor,
    vocab_size: int,
    shape: Sequence[int] | None = None,
    ignore_index: int | None = None,
) -> None:
    """Raise unless they are integers of this shape, 0 to vocab_size - 1.

    ``ignore_index`` may be among them. Values are read where that costs no
    synchronisation: on a CPU, where nothing is traced.
    """
    check_tensors(**{name: tokens})
    if ignore_index is not None:
        check_integers(ignore_index=ignore_index)
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"{name}: got {tokens.dtype}, need torch.int64 or torch.int32"
        )
    if shape is not None and tokens.shape != shape:
        refuse_shape(name, tokens, f"{list(shape)}")
    if not tokens.numel() or not is_readable(tokens):
        return
    if ignore_index is not None:
        tokens = tokens.where(tokens != ignore_index, 0)
    low, high = map(int, tokens.aminmax())
    if low < 0 or high >= vocab_size:
        besides = "" if ignore_index is None else f" or {ignore_index}"
        raise ValueError(
            f"{name}: got {low if low < 0 else high}, need 0 to "
            f"{vocab_size - 1}{besides}"
        )


def _check(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, ignored: int
) -> None:
    """Raise for the first argument that does not fit the others."""
    check_tensors(hidden=hidden, head_weight=head_weight)
    if head_weight.dtype != hidden.dtype and not under_autocast(hidden):
        raise TypeError(
            f"head_weight: got {head_weight.dtype}, need hidden's, "
            f"{hidden.dtype}"
        )
    D = hidden.shape[-1]
    if head_weight.dim() != 2 or head_weight.shape[1] != D:
        refuse_shape("head_weight", head_weight, f"[V, {D}]")
    check_tokens(
        "targets", targets, len(head_weight), hidden.shape[:-1], ignored
    )


def _num_targets(targets: Tensor, ignored: int) -> Tensor:
    """Rows with a target, counted as 1 if none; on ranks the mean number."""
    count = (targets != ignored).sum()
    if (ranks := current_ranks()) is None:
        return count.clamp(min=1)
    return ranks.sum(count).clamp(min=1) / ranks.size


def next_tokens(
    tokens: Tensor,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """The token after each token, as targets.

    The last token of each row, or of each packed sequence, has none, and so
    have tokens after the last sequence. Under context_parallel that of a
    rank's last token is the first one of the next rank.

    Args:
        tokens: [B, T], integers.
        cu_seqlens: [N + 1] offsets of packed sequences, B = 1.
        ignore_index: what stands where there is none.

    Returns:
        [B, T], in the dtype of the tokens.

    Raises:
        TypeError, ValueError: tokens or offsets are of another dtype or
            shape.
    """
    check_dims("[B, T]", tokens=tokens)
    T = tokens.shape[1]
    start, total = token_offset_and_total(T)
    check_packed(tokens, cu_seqlens, total=total)
    targets = F.pad(tokens[:, 1:], (0, 1), value=ignore_index)
    if (ranks := current_ranks()) is not None:
        firsts = ranks.gather(F.pad(tokens, (0, max(1 - T, 0)))[:, :1])
        later = firsts[ranks.rank + 1 :], ranks.counts(T)[ranks.rank + 1 :]
        following = [x for x, number in zip(*later, strict=True) if number]
        if following and T:
            targets = torch.cat([tokens[:, 1:], following[0]], 1)
    if cu_seqlens is None:
        return targets
    row = sequence_ids(cu_seqlens - start, T + 1)
    last = (row[:-1] != row[1:]) | (row[:-1] == len(cu_seqlens) - 1)
    return targets.masked_fill(last, ignore_index)


class _SummedLoss(torch.autograd.Function):
    """The sum of the losses, whose gradient is made in the forward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignored: int
    ) -> Tensor:
        losses, *grads = _losses(x, weight, targets, ignored, gradients=True)
        ctx.save_for_backward(*grads)
        ctx.dtypes = x.dtype, weight.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "linear_cross_entropy: its gradient has no gradient "
                "(create_graph); F.cross_entropy of all logits has one"
            )
        (dtotal,) = gradients
        # In half precision one over their number would be off by .2 %, the
        # same way for every gradient.
        dx, dweight = (
            (upcast(t) * dtotal).to(dtype)
            for t, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return dx, dweight, None, None


@torch.no_grad()
def _losses(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignored: int,
    gradients: bool = False,
) -> list[Tensor]:
    """Each row's loss, and the gradients of their sum if they are asked for.

    dx has x's dtype under autocast, dweight is in fp32 (fp64).
    """
    compute = IN_PIECES if torch.compiler.is_compiling() else _losses_in_pieces
    x, weight = cast_for_autocast(x, weight)
    return compute(x, weight, targets, ignored, gradients)


def _losses_in_pieces(
    x: Tensor, weight: Tensor, targets: Tensor, ignored: int, gradients: bool
) -> list[Tensor]:
    """Each row's loss and, with ``gradients``, dx and dweight."""
    dtype = compute_dtype(x.dtype)
    losses, dx = [], []
    dweight = torch.zeros_like(weight, dtype=dtype) if gradients else weight
    at_once = max(x.shape[-1], MIN_ROWS) if gradients else MIN_ROWS
    with without_autocast(x):
        for rows, row_targets in _pieces(x, targets, at_once):
            counted = row_targets != ignored
            if gradients:
                rows = rows.masked_fill(~counted[:, None], 0)
            error = rows @ weight.T
            size = max(1, MAX_LOGITS // len(weight)) if gradients else at_once
            for logits, tokens in _pieces(error, row_targets, size):
                log_p = F.log_softmax(logits, -1, dtype=dtype)
                index = tokens.where(tokens != ignored, 0).long()[:, None]
                own = log_p.gather(-1, index)
                losses.append(-own[:, 0])
                if gradients:
                    # The softmax in the logits' place, less 1 at the targets.
                    torch.exp(log_p, out=logits)
                    logits.scatter_(1, index, own.expm1().to(logits.dtype))
            if gradients:
                dx.append((error @ weight).masked_fill_(~counted[:, None], 0))
                if x.dtype == dtype:
                    dweight.addmm_(error.T, rows)
                elif x.is_cuda:
                    options: Any = {"out_dtype": dtype, "out": dweight}
                    torch.addmm(dweight, error.T, rows, **options)
                else:
                    dweight += error.T @ rows
            del error, logits, log_p  # before the next ones are made
    row_losses = torch.cat(losses).view(targets.shape)
    row_losses = row_losses.where(targets != ignored, 0)
    if not gradients:
        return [row_losses]
    return [row_losses, torch.cat(dx).view(x.shape), dweight]


def _pieces(
    x: Float[Tensor, "*rows D"], targets: Tensor, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and their targets in pieces of ``size`` rows."""
    rows, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    return zip(rows.split(size), targets.split(size), strict=True)


def _fake(
    x: Tensor, weight: Tensor, targets: Tensor, ignored: int, gradients: bool
) -> list[Tensor]:
    dtype = compute_dtype(x.dtype)
    results = [x.new_empty(targets.shape, dtype=dtype)]
    if gradients:
        results += x.new_empty(x.shape), torch.empty_like(weight, dtype=dtype)
    return results


# One node of a compiled graph, for any number of rows.
IN_PIECES = register(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, "
    "int ignored, bool gradients) -> Tensor[]",
    _losses_in_pieces,
    _fake,
)
