"""The recurrence as an operator of PyTorch's, of whole sequences.

It picks a backend: ``torch_backend/recurrence.py`` or ``kernels/recurrence``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from fastweights.arguments import (
    DEFAULT_CHUNK_SIZE,
    RecurrenceOperands,
    RecurrenceOptions,
    check_recurrence_arguments,
    check_values_if_enabled,
)
from fastweights.dtypes import compute_dtype, without_autocast
from fastweights.heads import per_value_head, state_shape
from fastweights.ops.common import flops
from fastweights.ops.common.backends import (
    Backend,
    check_backend,
    record_run,
    recurrence_backend,
)
from fastweights.ops.common.batch_invariance import is_batch_invariant
from fastweights.ops.common.registration import Operator
from fastweights.packing import states_or_zeros
from fastweights.torch_backend import recurrence as torch_recurrence

ForwardResults = tuple[Tensor, Tensor, list[Tensor]]  # o, state, saved


def local_recurrence(
    operands: RecurrenceOperands,
    scale: float | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """linear_recurrence of sequences that are here as a whole."""
    check_recurrence_arguments(operands, scale=scale, chunk_size=chunk_size)
    check_backend(backend)
    check_values_if_enabled(operands)
    operands, options = prepare_call(operands, scale, chunk_size, backend)
    if backend == "loop":
        record_run("loop forward")
        with without_autocast(operands.q):
            return torch_recurrence.loop(operands, options.scale)
    return RECURRENCE(*operands, *options)


def prepare_call(
    operands: RecurrenceOperands,
    scale: float | None,
    chunk_size: int | None,
    backend: str,
) -> tuple[RecurrenceOperands, RecurrenceOptions]:
    """The operands and options of a call, as an operator takes them."""
    # Views of a wider tensor are copied once, not in forward and backward.
    contiguous = [None if x is None else x.contiguous() for x in operands]
    q, k, v, g, beta, erase_key, *states = RecurrenceOperands._make(contiguous)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    options = RecurrenceOptions(
        scale=scale,
        chunk_size=chunk_size or DEFAULT_CHUNK_SIZE,
        backend=backend,
        batch_invariant=is_batch_invariant(),
    )
    if g is not None and g.dim() == 1:
        # Widened before it is repeated, it gathers its gradient so.
        g = g.to(compute_dtype(q.dtype)).expand(v.shape[:3])
    if erase_key is not None:
        erase_key = per_value_head(erase_key, v.shape[2])
    return RecurrenceOperands(q, k, v, g, beta, erase_key, *states), options


@functools.cache
def backend_module(backend: str) -> ModuleType:
    """The module of a backend; kernels are imported if they run."""
    if backend == "triton":
        from fastweights.kernels.recurrence import backend as triton_recurrence

        return triton_recurrence
    return torch_recurrence


def _forward(
    operands: RecurrenceOperands, options: RecurrenceOptions
) -> ForwardResults:
    """The results of a backend, and what its backward re-uses."""
    backend = recurrence_backend(options.backend, operands.q)
    record_run(f"{backend} forward")
    with without_autocast(operands.q):
        return backend_module(backend).forward(operands, options)


def _fake(
    operands: RecurrenceOperands, options: RecurrenceOptions
) -> ForwardResults:
    q, _, v, *_, initial_state, cu_seqlens = operands
    backend = recurrence_backend(options.backend, q)
    saved = backend_module(backend).empty_saved(operands, options)
    state = states_or_zeros(q, state_shape(q, v), initial_state, cu_seqlens)
    return v.new_empty(v.shape), state, saved


def _backward(
    do: Tensor | None,
    dstate: Tensor | None,
    operands: RecurrenceOperands,
    saved: list[Tensor],
    options: RecurrenceOptions,
) -> list[Tensor]:
    """Gradients of the inputs up to initial_state that are not None."""
    backend = recurrence_backend(options.backend, operands.q)
    record_run(f"{backend} backward")
    with without_autocast(operands.q):
        return backend_module(backend).backward(
            do, dstate, operands, saved, options
        )


def make_recurrence_operator(
    name: str, forward: Callable, fake: Callable, backward: Callable
) -> Operator:
    """An Operator; its functions take operands and options as groups."""
    n = len(RecurrenceOperands._fields)

    def on_groups(function: Callable) -> Callable:
        def call(*flat: Any, **_: Any) -> Any:
            options = RecurrenceOptions._make(flat[n:])
            return function(RecurrenceOperands._make(flat[:n]), options)

        return call

    def back_on_groups(function: Callable) -> Callable:
        def call(do: Any, dstate: Any, *flat: Any, **_: Any) -> Any:
            operands, saved = RecurrenceOperands._make(flat[:n]), flat[n]
            options = RecurrenceOptions._make(flat[n + 1 :])
            return function(do, dstate, operands, saved, options)

        return call

    return Operator(
        name,
        "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, "
        "Tensor? erase_key, Tensor? initial_state, Tensor? cu_seqlens",
        "float scale, int chunk_size, str backend, bool batch_invariant",
        "Tensor o, Tensor state, Tensor[] saved",
        num_hidden=1,
        num_kept=1,
        forward=on_groups(forward),
        fake=on_groups(fake),
        backward=back_on_groups(backward),
        alternative="loop",
        flops=(on_groups(flops.forward), back_on_groups(flops.backward)),
    )


RECURRENCE = make_recurrence_operator(
    "linear_recurrence", _forward, _fake, _backward
)
