"""TTT-Linear's whole mini-batches as one operator, which Triton computes.

Where its kernel (:mod:`fastweights.kernels.ttt`) does not run, what calls it
goes on as PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.deep.backends import by_kernel, widest
from fastweights.ops import LIBRARY, ran, without_autocast

MAX_K, MAX_C = 128, 16
"""The widest head and the longest mini-batch of the kernel; fp32: half K."""

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor rate, Tensor W, Tensor b, "
    "Tensor weight, Tensor bias, Tensor rows"
)
NUMBER = 9  # of these

LIBRARY.define(
    f"ttt_linear({INPUTS}, bool keep)"
    " -> (Tensor o, Tensor W_after, Tensor b_after, Tensor X)"
)
LIBRARY.define(
    "ttt_linear_backward(Tensor? do, Tensor? dW_after, Tensor? db_after, "
    f"{INPUTS}, Tensor W_after, Tensor b_after, Tensor X) -> Tensor[] grads"
)


def takes(backend: str, q: Tensor, size: int, depth: int) -> bool:
    """Whether the kernel computes these tokens, by mini-batches of ``size``.

    Raises:
        ValueError: backend is none, or "triton" where the kernel cannot run.
    """
    K, most = q.shape[-1], widest(q, MAX_K)
    need = (
        f"one layer, heads of at most {most} and mini-batches of at most "
        f"{MAX_C} tokens, not {depth}, {K} and {size}"
    )
    fits = depth == 1 and most >= K and size <= MAX_C
    return by_kernel(backend, q, fits, need)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """And what the backward needs, with ``keep``."""
    from fastweights.kernels import ttt as kernel

    *inputs, keep = arguments
    q = inputs[0]
    ran("triton forward")
    X = torch.empty_like(q) if keep else q.new_empty(0)
    with without_autocast(q):
        inputs.append(X if keep else None)
        o, W, b = kernel.forward(*inputs)
    return o, W, b, X


@torch.library.register_fake("fastweights::ttt_linear")
def _(q, k, v, rate, W, b, weight, bias, rows, keep):
    X = q.new_empty(q.shape) if keep else q.new_empty(0)
    after = W.new_empty(W.shape), b.new_empty(b.shape)
    return q.new_empty(q.shape), *after, X


def _backward(
    do: Tensor | None,
    dW_after: Tensor | None,
    db_after: Tensor | None,
    *tensors: Tensor,
) -> list[Tensor]:
    """Gradients of all inputs; None is a result that nothing depends on."""
    from fastweights.kernels import ttt as kernel

    q, k, v, rate, _, _, weight, bias, rows, W_after, b_after, X = tensors
    ran("triton backward")
    found = (do, dW_after, db_after)
    slopes = [
        torch.zeros_like(x) if dx is None else dx.contiguous()
        for dx, x in zip(found, (q, W_after, b_after), strict=True)
    ]
    inputs = (q, k, v, rate, weight, bias, rows, W_after, b_after, X)
    with without_autocast(q):
        return kernel.backward(*[*slopes, *inputs])


@torch.library.register_fake("fastweights::ttt_linear_backward")
def _(do, dW_after, db_after, *tensors):
    return [x.new_empty(x.shape) for x in tensors[:NUMBER]]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:NUMBER], *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    return *BACKWARD(*grads[:3], *ctx.saved_tensors), None


def _refuse(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "ttt: got a gradient of its gradient, which only "
        'backend="chunkwise" has'
    )


for _name, _function, _gradient, _setup in (
    ("ttt_linear", _forward, _differentiate, _save),
    ("ttt_linear_backward", _backward, _refuse, None),
):
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_autograd(
        f"fastweights::{_name}", _gradient, setup_context=_setup
    )
FORWARD = torch.ops.fastweights.ttt_linear.default
BACKWARD = torch.ops.fastweights.ttt_linear_backward.default
