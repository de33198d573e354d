"""The recurrence as an operator of PyTorch's, of whole sequences.

It picks a backend: ``reference/backend.py`` or ``kernels/recurrence``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from fastweights.arguments import (
    DEFAULT_CHUNK_SIZE,
    check_arguments,
    check_values,
)
from fastweights.dtypes import compute_dtype, without_autocast
from fastweights.ops.backends import (
    Backend,
    backend_for,
    check_backend,
    record_run,
)
from fastweights.ops.invariance import is_invariant
from fastweights.ops.registration import Operator
from fastweights.reference import backend as torch_backend
from fastweights.reference.backend import first_states, per_value_head


def of_one_rank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """linear_recurrence of sequences that are here as a whole."""
    given: Any = {"g": g, "beta": beta, "erase": erase}
    given |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    check_arguments(q, k, v, **given, scale=scale, chunk_size=chunk_size)
    check_backend(backend)
    check_values(q, k, v, **given)
    of, states = (q, k, v, g, beta, erase), (initial_state, cu_seqlens)
    return computed_by(RECURRENCE, *of, *states, scale, chunk_size, backend)


def computed_by(
    operator: Operator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    chunk_size: int | None,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """What an operator makes of arguments that have been checked."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    # Views of a wider tensor are copied once, not in forward and backward.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if g is not None and g.dim() == 1:
        # Widened before it is repeated, it gathers its gradient so.
        g = g.to(compute_dtype(q.dtype)).expand(v.shape[:3])
    if erase is not None:
        erase = per_value_head(erase, v.shape[2]).contiguous()
    inputs = (q, k, v, g, beta, erase, initial_state, cu_seqlens, scale)
    if backend == "loop":
        record_run("loop forward")
        with without_autocast(q):
            return torch_backend.loop(*inputs)
    return operator(*inputs, chunk_size, backend, is_invariant())


def implementation(
    asked: str, q: Tensor, chunk_size: int | None
) -> tuple[str, ModuleType, int]:
    """A backend's name, where its functions stand, and tokens per chunk."""
    backend = backend_for(asked, q)
    module: ModuleType = torch_backend
    if backend == "triton":
        from fastweights.kernels.recurrence import backend as module
    return backend, module, chunk_size or DEFAULT_CHUNK_SIZE


def _forward(
    q: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What a backend computes, and what its backward re-uses."""
    *inputs, chunk_size, asked, invariant = arguments
    backend, module, chunk_size = implementation(asked, q, chunk_size)
    record_run(f"{backend} forward")
    with without_autocast(q):
        return module.forward(q, *inputs, chunk_size, invariant)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    g, beta, erase, initial_state, cu_seqlens, *options = others
    _, chunk_size, asked, invariant = options
    _, module, chunk_size = implementation(asked, q, chunk_size)
    tokens = (q, v, g, beta, erase, cu_seqlens)
    saved = module.empty_saved(*tokens, chunk_size, invariant)
    state = first_states(q, v, initial_state, cu_seqlens)
    return v.new_empty(v.shape), state, saved


def _backward(
    do: Tensor | None, dstate: Tensor | None, q: Tensor, *arguments: Any
) -> list[Tensor]:
    """Gradients of the inputs up to initial_state that are not None."""
    *inputs, chunk_size, asked, invariant = arguments
    backend, module, chunk_size = implementation(asked, q, chunk_size)
    record_run(f"{backend} backward")
    with without_autocast(q):
        return module.backward(do, dstate, q, *inputs, chunk_size, invariant)


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
    )


RECURRENCE = make_operator("linear_recurrence", _forward, _fake, _backward)
