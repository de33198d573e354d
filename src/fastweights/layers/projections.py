"""Several projections of one input, whose gradient is summed as it is made.

Autograd gives every product's gradient of the input a tensor of its own, and
adds these up afterwards: three projections of [tokens, D] write it three
times, read it three times and write the sum. Here a product starts from what
the products before it have left, which a matrix product does at its end, and
which costs it next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fastweights import private
from fastweights.layers.plain_modules import is_product
from fastweights.ops.flops import FORMULAS, Shape
from fastweights.ops.registration import past_dispatcher, registered


def project(
    x: Float[Tensor, "B T D"], *modules: nn.Module | None
) -> list[Any]:
    """Each module's output for x, None for a module that is None.

    That is all it is, for any modules. Those that are an ``nn.Linear``
    without a bias which nobody has touched (:func:`.is_product`) add their
    gradients of x up in one place, without a tensor for each.
    """
    one_by_one = not (torch.is_grad_enabled() and x.requires_grad)
    if not torch.compiler.is_compiling():
        one_by_one |= private.transformed() or torch.jit.is_tracing()
    # Which of them are products whose gradients of x are added up.
    products = [
        not (m is None or one_by_one) and is_product(m, x) for m in modules
    ]
    if sum(products) < 2:
        return [None if m is None else m(x) for m in modules]
    pairs = [*zip(modules, products, strict=True)]
    tensors = [x, *(m.weight for m, product in pairs if m and product)]
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        tensors = [t.to(torch.get_autocast_dtype(kind)) for t in tensors]
    found = iter(Projections.apply(*tensors))
    return [
        None if m is None else next(found) if product else m(x)
        for m, product in pairs
    ]


class Projections(torch.autograd.Function):
    """x W^T for each W [n, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return tuple(F.linear(x, w) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = [None if g is None else g.flatten(0, -2) for g in grads]
        dweights = [
            g.mT @ x.flatten(0, -2) if asked and g is not None else None
            for g, asked in zip(rows, ctx.needs_input_grad[1:], strict=True)
        ]
        pairs = [
            p for p in zip(rows, weights, strict=True) if p[0] is not None
        ]
        if not (ctx.needs_input_grad[0] and pairs):
            return None, *dweights
        # The longest product last: it has the most time to read the others'.
        pairs.sort(key=lambda pair: pair[1].shape[0])
        left, right = map(list, zip(*pairs, strict=True))
        operator: Callable = SUM
        if not (torch.compiler.is_compiling() or torch.is_grad_enabled()):
            operator = past_dispatcher(SUM, _sum, (*left, *right))
        return operator(left, right).view_as(x), *dweights


def _sum(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """sum_i a_i b_i, of matrices."""
    total = a[0] @ b[0]
    for left, right in zip(a[1:], b[1:], strict=True):
        total.addmm_(left, right)
    return total


def _fake(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return a[0].new_empty(a[0].shape[0], b[0].shape[1])


def _flops(a: list[Shape], b: list[Shape], **named: Any) -> int:
    rows = zip(a, b, strict=True)
    return sum(2 * left[0] * left[1] * right[1] for left, right in rows)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.number = len(inputs[0])
    ctx.save_for_backward(*inputs[0], *inputs[1])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[list[Tensor], ...]:
    tensors = ctx.saved_tensors
    a, b = tensors[: ctx.number], tensors[ctx.number :]
    return [grad @ x.mT for x in b], [x.mT @ grad for x in a]


SUM = registered(
    "sum_of_products(Tensor[] a, Tensor[] b) -> Tensor",
    *(_sum, _fake, _differentiate, _save),
)
FORMULAS["sum_of_products"] = _flops
