"""Calls whose number of tokens a compiled graph leaves open.

How tokens lie in chunks and windows depends on how many there are, and a
graph of PyTorch's operations would be another one for each length. Where
torch.compile or torch.export do not know the length, such a function is one
operator: what is in it runs as it does without a compiler, and its backward
computes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.registration import LIBRARY, registered

Both = tuple[Tensor, Tensor]
FUNCTIONS: dict[str, Callable[..., Both]] = {}
"""Functions by name: (tensors, numbers, backend) -> output as v, state."""

PLACES = ("initial_state", "position", "lengths")
"""Tensors that functions of chunks take by name."""

ARGUMENTS = (
    "str name, Tensor[] given, bool[] there, int[] numbers, str backend"
)


def is_open(T: int) -> bool:
    """Whether a graph is made that is to hold for other T than this one."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(T)


def call(
    name: str,
    tensors: Sequence[Tensor | None],
    numbers: list[int],
    state: list[int],
    dtype: torch.dtype,
    backend: str = "",
) -> Both:
    """The function of this name, as one operator.

    The third of the tensors has the shape and dtype of the output; the
    state's are ``state`` and ``dtype``. There is at least one number.
    """
    given = [x for x in tensors if x is not None]
    there = [x is not None for x in tensors]
    return FORWARD(name, given, there, numbers, backend, state, dtype)


def _tensors(
    given: Sequence[Tensor], there: Sequence[bool]
) -> list[Tensor | None]:
    """The tensors, with None in the places of those that are not there."""
    more = iter(given)
    return [next(more) if x else None for x in there]


def _forward(
    name: str,
    given: list[Tensor],
    there: list[bool],
    numbers: list[int],
    backend: str,
    state: list[int],
    dtype: torch.dtype,
) -> Both:
    tensors = _tensors(given, there)
    o, after = FUNCTIONS[name](tensors, numbers, backend)
    return o.contiguous(), after.contiguous()


def _fake(name, given, there, numbers, backend, state, dtype):
    v = given[2]
    return v.new_empty(v.shape), v.new_empty(state, dtype=dtype)


def _backward(
    do: Tensor,
    dstate: Tensor,
    name: str,
    given: list[Tensor],
    there: list[bool],
    numbers: list[int],
    backend: str,
) -> list[Tensor]:
    """Gradients of all that are no integers, in order."""
    with torch.enable_grad():
        given = [
            x.detach().requires_grad_(x.is_floating_point()) for x in given
        ]
        found = torch.autograd.grad(
            FUNCTIONS[name](_tensors(given, there), numbers, backend),
            [x for x in given if x.requires_grad],
            (do, dstate),
            allow_unused=True,
            materialize_grads=True,
        )
    return [x.contiguous() for x in found]


def _empty(do, dstate, name, given, there, numbers, backend):
    return [x.new_empty(x.shape) for x in given if x.is_floating_point()]


def _save(ctx: Any, inputs: tuple, output: Both) -> None:
    ctx.name, given, *ctx.rest = inputs[:5]
    ctx.save_for_backward(*given)


def _differentiate(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{ctx.name}: got a gradient of its gradient, which a graph for "
            "any length has not"
        )
    given = ctx.saved_tensors  # checkpointing lets them be read once
    found = iter(BACKWARD(do, dstate, ctx.name, given, *ctx.rest))
    grads = [next(found) if x.is_floating_point() else None for x in given]
    return None, grads, None, None, None, None, None


FORWARD = registered(
    f"any_length({ARGUMENTS}, SymInt[] state, ScalarType dtype)"
    " -> (Tensor o, Tensor state_after)",
    *(_forward, _fake, _differentiate, _save),
)
BACKWARD = registered(
    f"any_length_backward(Tensor do, Tensor dstate, {ARGUMENTS}) -> Tensor[]",
    *(_backward, _empty),
)
# Past autograd, not through it, where nothing inside could have gradients.
LIBRARY.impl(
    "any_length_backward", torch.library.fallthrough_kernel, "Autograd"
)
