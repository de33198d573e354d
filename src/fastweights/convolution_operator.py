"""The short convolution's operator: its backends, gradient, fake tensors.

A backend (:mod:`fastweights.kernels.convolution` or
:mod:`fastweights.reference.convolution`) has ``forward`` and ``backward``.
Which one runs is asked inside the operator, so that torch.compile has nothing
to ask while it traces.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fastweights.arguments import check_offsets
from fastweights.ops import (
    LIBRARY,
    choose_backend,
    past_dispatcher,
    ran,
    without_autocast,
)
from fastweights.reference import convolution as pytorch

Backend = Literal["auto", "triton", "torch"]
BACKENDS = get_args(Backend)
NAMES = ("x", "weight", "bias", "initial_state", "cu_seqlens")
NUMBER = len(NAMES)  # of tensors, of which all but the last have a gradient

INPUTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, "
    "Tensor? cu_seqlens"
)
# H, K, HV and V, of which H is 0 where v is all there is, in x's shape;
# what is added under the root of the norm, None without one.
OPTIONS = "int[] heads, float? eps, bool silu, str backend"

LIBRARY.define(
    f"short_convolution({INPUTS}, {OPTIONS})"
    " -> (Tensor q, Tensor k, Tensor v, Tensor state)"
)
LIBRARY.define(
    "short_convolution_backward(Tensor? dq, Tensor? dk, Tensor? dv, "
    f"Tensor? dstate, {INPUTS}, {OPTIONS}) -> Tensor[] grads"
)


def implementation(asked: str, x: Tensor) -> tuple[str, ModuleType]:
    """A backend's name, and where its functions stand.

    Without a token PyTorch's, since there is nothing to launch.
    """
    if asked == "triton" and x.dtype == torch.float64:
        raise ValueError(
            "backend: got 'triton', which needs x in float32, float16 or "
            "bfloat16, not float64"
        )
    runs = asked
    if asked != "torch":
        runs = choose_backend(asked, x.device, x.dtype)
    if runs == "triton" and x.shape[1]:
        from fastweights.kernels import convolution as module

        return "triton", module
    return "torch", pytorch


def check_on_host(cu_seqlens: Tensor | None, T: int) -> None:
    """Raise ValueError for offsets that are none, if the host has them."""
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        check_offsets(cu_seqlens.tolist(), T)


def new_outputs(x: Tensor, heads: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Room for q, k and v; without heads for v alone, in x's shape."""
    (B, T, _), (H, K, HV, V) = x.shape, heads
    if not H:
        return x.new_empty(0), x.new_empty(0), x.new_empty(x.shape)
    q, k = (x.new_empty(B, T, H, K) for _ in range(2))
    return q, k, x.new_empty(B, T, HV, V)


def _forward(
    x: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a backend computes."""
    *inputs, heads, eps, silu, asked = arguments
    backend, module = implementation(asked, x)
    check_on_host(inputs[-1], x.shape[1])
    ran(f"{backend} forward")
    with without_autocast(x):
        return module.forward(x, *inputs, tuple(heads), eps, silu)


@torch.library.register_fake("fastweights::short_convolution")
def _(x, weight, bias, initial_state, cu_seqlens, heads, eps, silu, backend):
    shape = pytorch.state_shape(x, weight.shape[1], cu_seqlens)
    return *new_outputs(x, heads), x.new_empty(shape)


def _backward(
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dstate: Tensor | None,
    x: Tensor,
    *arguments: Any,
) -> list[Tensor]:
    """Gradients of the inputs up to initial_state that are not None.

    Each has its input's shape and dtype. A gradient of a result is None where
    nothing depends on it.
    """
    *others, heads, eps, silu, asked = arguments
    backend, module = implementation(asked, x)
    ran(f"{backend} backward")
    outputs = [dq, dk, dv]
    if any(dy is None for dy in outputs):
        empty = new_outputs(x, heads)
        outputs = [
            room.zero_() if dy is None else dy
            for dy, room in zip(outputs, empty, strict=True)
        ]
    given = (None if t is None else t.contiguous() for t in (*outputs, dstate))
    with without_autocast(x):
        grads = module.backward(*given, x, *others, tuple(heads), eps, silu)
    return [
        grad.to(t.dtype).contiguous()
        for grad, t in zip(grads, (x, *others[: NUMBER - 2]), strict=True)
        if t is not None
    ]


@torch.library.register_fake("fastweights::short_convolution_backward")
def _(dq, dk, dv, dstate, *others):
    inputs = others[: NUMBER - 1]
    return [x.new_empty(x.shape) for x in inputs if x is not None]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:NUMBER])
    ctx.options = inputs[NUMBER:]
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, *douts: Tensor | None
) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors  # checkpointing lets them be read once
    operator: Callable = BACKWARD  # which refuses a gradient of its own
    if not torch.is_grad_enabled():
        operator = past_dispatcher(BACKWARD, _backward, (*douts, *tensors))
    grads = iter(operator(*douts, *tensors, *ctx.options))
    inputs = tensors[: NUMBER - 1]
    found = [None if x is None else next(grads) for x in inputs]
    return (*found, None, *[None] * len(ctx.options))


class Convolution(torch.autograd.Function):
    """FORWARD with its gradient, which costs the host less than its own."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = past_dispatcher(FORWARD, _forward, inputs[:NUMBER])(*inputs)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate)


def _refuse(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "short_convolution: got a gradient of its gradient, which it has not"
    )


for _name, _function, _gradient, _setup in (
    ("short_convolution", _forward, _differentiate, _save),
    ("short_convolution_backward", _backward, _refuse, None),
):
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_autograd(
        f"fastweights::{_name}", _gradient, setup_context=_setup
    )
FORWARD = torch.ops.fastweights.short_convolution.default
BACKWARD = torch.ops.fastweights.short_convolution_backward.default
