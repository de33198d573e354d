"""Calls whose number of tokens a compiled graph leaves open.

How tokens lie in chunks and windows depends on how many there are, and a
graph of PyTorch's operations would be another one for each length. Where
torch.compile or torch.export do not know the length, such a function is one
operator: what is in it runs as it does without a compiler, and its backward
computes it again.
"""

from __future__ import annotations

import ast
import operator
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fastweights.ops.common.registration import LIBRARY, register

OutputAndState = tuple[Tensor, Tensor]
Layout = tuple[Sequence[int], torch.dtype]  # a shape and a dtype

TENSOR = "a tensor"
"""What stands in the text of a call's arguments for each tensor."""

SCHEMA = "str function, Tensor[] tensors, str arguments"


def is_dynamic(T: int) -> bool:
    """Whether a graph is being made that must hold for any T."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(T)


def call_as_operator(
    function: Callable[..., OutputAndState],
    results: tuple[Layout, Layout],
    *args: Any,
    **options: Any,
) -> OutputAndState:
    """function(*args, **options) as one operator: an output and a state.

    ``results`` has the shape and dtype of both. The function stands at the top
    of a module. Arguments without tensors are constants. A graph keeps them
    and the function's name as text, which can be saved with it.
    """
    arguments = args, options
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    text = repr(tree_map(_constant, arguments))
    name = f"{function.__module__}:{function.__name__}"
    return FORWARD(name, tensors, text, *results[0], *results[1])


def _constant(x: Any) -> Any:
    """A graph's constant for an argument: an open number becomes its value."""
    if isinstance(x, Tensor):
        return TENSOR
    is_integer = isinstance(x, int | torch.SymInt) and not isinstance(x, bool)
    return operator.index(x) if is_integer else x


def _run(
    function: str, tensors: Sequence[Tensor], arguments: str
) -> OutputAndState:
    values = iter(tensors)
    args, options = tree_map(
        lambda x: next(values) if x == TENSOR else x,
        ast.literal_eval(arguments),
    )
    return pkgutil.resolve_name(function)(*args, **options)


def _forward(
    function: str, tensors: list[Tensor], arguments: str, *results: Any
) -> OutputAndState:
    o, state = _run(function, tensors, arguments)
    return o.contiguous(), state.contiguous()


def _fake(function, tensors, arguments, *results):
    shape, dtype, state_shape, state_dtype = results
    o = tensors[0].new_empty(shape, dtype=dtype)
    return o, o.new_empty(state_shape, dtype=state_dtype)


def _backward(
    do: Tensor,
    dstate: Tensor,
    function: str,
    tensors: list[Tensor],
    arguments: str,
) -> list[Tensor]:
    """Gradients of all tensors but those of integers, in order."""
    with torch.enable_grad():
        tensors = [
            x.detach().requires_grad_(x.is_floating_point()) for x in tensors
        ]
        grads = torch.autograd.grad(
            _run(function, tensors, arguments),
            [x for x in tensors if x.requires_grad],
            (do, dstate),
            allow_unused=True,
            materialize_grads=True,
        )
    return [x.contiguous() for x in grads]


def _fake_backward(do, dstate, function, tensors, arguments):
    return [x.new_empty(x.shape) for x in tensors if x.is_floating_point()]


def _save(ctx: Any, inputs: tuple, output: OutputAndState) -> None:
    ctx.function, tensors, ctx.arguments = inputs[:3]
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        name = ctx.function.split(":")[1]
        raise NotImplementedError(
            f"{name}: got a gradient of its gradient, which a graph for "
            "any length does not have"
        )
    tensors = ctx.saved_tensors  # checkpointing lets them be read once
    results = iter(BACKWARD(do, dstate, ctx.function, tensors, ctx.arguments))
    grads = [next(results) if x.is_floating_point() else None for x in tensors]
    return None, grads, *[None] * 5


FORWARD = register(
    f"any_length({SCHEMA}, SymInt[] output, ScalarType dtype, "
    "SymInt[] state, ScalarType state_dtype) -> (Tensor o, Tensor after)",
    _forward,
    _fake,
    _differentiate,
    _save,
)
BACKWARD = register(
    f"any_length_backward(Tensor do, Tensor dstate, {SCHEMA}) -> Tensor[]",
    _backward,
    _fake_backward,
)
# Past autograd, not through it, where nothing inside could have gradients.
LIBRARY.impl(
    "any_length_backward", torch.library.fallthrough_kernel, "Autograd"
)
