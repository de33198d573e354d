"""The recurrence as an operator of PyTorch's, of whole sequences.

It picks a backend: ``torch_backend/recurrence.py`` or ``kernels/recurrence``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from fastweights.arguments import (
    DEFAULT_CHUNK_SIZE,
    Operands,
    check_arguments,
    check_values,
)
from fastweights.dtypes import compute_dtype, without_autocast
from fastweights.heads import per_value_head, state_shape
from fastweights.ops import flops
from fastweights.ops.backends import (
    Backend,
    check_backend,
    record_run,
    recurrence_backend,
)
from fastweights.ops.invariance import is_invariant
from fastweights.ops.registration import Operator
from fastweights.packing import first_states
from fastweights.torch_backend import recurrence as torch_backend


def of_one_rank(
    operands: Operands,
    scale: float | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """linear_recurrence of sequences that are here as a whole."""
    check_arguments(operands, scale=scale, chunk_size=chunk_size)
    check_backend(backend)
    check_values(operands)
    *inputs, scale = laid_out(operands, scale)
    if backend == "loop":
        record_run("loop forward")
        with without_autocast(operands.q):
            return torch_backend.loop(Operands(*inputs), scale)
    return RECURRENCE(*inputs, scale, chunk_size, backend, is_invariant())


def laid_out(operands: Operands, scale: float | None) -> tuple[Any, ...]:
    """The operands as an operator takes them, and the scale as a number."""
    q, k, v, g, beta, erase, *states = operands
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    # Views of a wider tensor are copied once, not in forward and backward.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if g is not None and g.dim() == 1:
        # Widened before it is repeated, it gathers its gradient so.
        g = g.to(compute_dtype(q.dtype)).expand(v.shape[:3])
    if erase is not None:
        erase = per_value_head(erase, v.shape[2]).contiguous()
    return q, k, v, g, beta, erase, *states, scale


def implementation(
    backend: str, q: Tensor, chunk_size: int | None
) -> tuple[str, ModuleType, int]:
    """What runs: a backend, where its functions stand, tokens per chunk."""
    chosen = recurrence_backend(backend, q)
    module: ModuleType = torch_backend
    if chosen == "triton":
        from fastweights.kernels.recurrence import backend as module
    return chosen, module, chunk_size or DEFAULT_CHUNK_SIZE


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What a backend computes, and what its backward re-uses."""
    *tensors, scale, chunk_size, backend, invariant = arguments
    operands = Operands(*tensors)
    chosen, module, chunk_size = implementation(
        backend, operands.q, chunk_size
    )
    record_run(f"{chosen} forward")
    with without_autocast(operands.q):
        return module.forward(operands, scale, chunk_size, invariant)


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    *tensors, _, chunk_size, backend, invariant = arguments
    operands = Operands(*tensors)
    q, _, v, *_, initial_state, cu_seqlens = operands
    _, module, chunk_size = implementation(backend, q, chunk_size)
    saved = module.empty_saved(operands, chunk_size, invariant)
    state = first_states(q, state_shape(q, v), initial_state, cu_seqlens)
    return v.new_empty(v.shape), state, saved


def _backward(
    do: Tensor | None, dstate: Tensor | None, *arguments: Any
) -> list[Tensor]:
    """Gradients of the inputs up to initial_state that are not None."""
    *tensors, saved, scale, chunk_size, backend, invariant = arguments
    operands = Operands(*tensors)
    chosen, module, chunk_size = implementation(
        backend, operands.q, chunk_size
    )
    record_run(f"{chosen} backward")
    with without_autocast(operands.q):
        return module.backward(
            *(do, dstate, operands, saved), scale, chunk_size, invariant
        )


def make_operator(name: str, *functions: Callable) -> Operator:
    forward, fake, backward = functions
    return Operator(
        name,
        "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, "
        "Tensor? erase, Tensor? initial_state, Tensor? cu_seqlens",
        "float scale, int? chunk_size, str backend, bool invariant",
        "Tensor o, Tensor state, Tensor[] saved",
        hidden=1,
        kept=1,
        forward=forward,
        fake=fake,
        backward=backward,
        instead='only backend="loop" has',
        flops=(flops.forward, flops.backward),
    )


RECURRENCE = make_operator("linear_recurrence", _forward, _fake, _backward)
