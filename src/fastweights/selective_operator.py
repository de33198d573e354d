"""selective_scan's operator: its backends, its gradient, its fake tensors.

A backend (:mod:`fastweights.kernels.selective` or
:mod:`fastweights.reference.selective`) has ``tile_length``, ``forward`` and
``backward``. Which one runs is asked inside the operator, so that
torch.compile has nothing to ask while it traces.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastweights.ops import (
    LIBRARY,
    choose_backend,
    ran,
    without_autocast,
)
from fastweights.reference import selective as chunkwise
from fastweights.reference.backend import wide

INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
    "Tensor? initial_state, Tensor? cu_seqlens"
)
NUMBER = 8  # of these inputs, of which all but the last have a gradient

LIBRARY.define(
    f"selective_scan({INPUTS}, bool keep, bool full, str backend)"
    " -> (Tensor y, Tensor state, Tensor states)"
)
LIBRARY.define(
    f"selective_scan_backward(Tensor? dy, Tensor? dstate, {INPUTS}, "
    "Tensor states, str backend) -> Tensor[] grads"
)


def implementation(asked: str, x: Tensor) -> tuple[str, ModuleType]:
    """A backend's name, and where its functions stand."""
    if asked == "triton" and x.dtype == torch.float64:
        raise ValueError(
            "backend: got 'triton', which needs x, B and C in float32, "
            "float16 or bfloat16, not float64"
        )
    backend = choose_backend(asked, x.device, x.dtype)
    module: ModuleType = chunkwise
    if backend == "triton":
        from fastweights.kernels import selective as module
    return backend, module


def empty_states(
    module: ModuleType,
    x: Tensor,
    A: Tensor,
    B: Tensor,
    cu_seqlens: Tensor | None,
    keep: bool,
) -> Tensor:
    """Room for the state that enters each tile of time, if it is kept.

    In one dimension: torch.compile would make a case of a single tile.
    Packed sequences begin with tiles of their own: sequence n with tile
    ``cu_seqlens[n] // length + n``, past all of the one before it.
    """
    batch, T, _ = x.shape
    length = module.tile_length(*A.shape, B.shape[2])
    tiles = 0
    if keep and cu_seqlens is None:
        tiles = -(-T // length)
    elif keep and cu_seqlens is not None:
        tiles = T // length + cu_seqlens.shape[0] - 1
    return x.new_empty(batch * tiles * A.numel(), dtype=wide(x.dtype))


def _forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What a backend computes; with ``keep``, what its backward re-uses.

    y is in x's dtype, with ``full`` in that of the arithmetic.
    """
    *inputs, keep, full, asked = arguments
    backend, module = implementation(asked, x)
    ran(f"{backend} forward")
    _, A, B, *_, cu_seqlens = inputs
    states = empty_states(module, x, A, B, cu_seqlens, keep)
    with without_autocast(x):
        kept = states if keep else None
        y, state = module.forward(x, *inputs, kept, y_dtype(x, full))
    return y, state, states


def y_dtype(x: Tensor, full: bool) -> torch.dtype:
    """The dtype of y, in which a gate after it takes its gradient too."""
    return wide(x.dtype) if full else x.dtype


@torch.library.register_fake("fastweights::selective_scan")
def _(x, dt, A, B, C, D, initial_state, cu_seqlens, keep, full, backend):
    _, module = implementation(backend, x)
    states = empty_states(module, x, A, B, cu_seqlens, keep)
    S = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y = x.new_empty(x.shape, dtype=y_dtype(x, full))
    return y, states.new_empty(S, *A.shape), states


def _backward(
    dy: Tensor | None, dstate: Tensor | None, x: Tensor, *arguments: Any
) -> list[Tensor]:
    """Gradients of the inputs up to initial_state that are not None.

    Each has its input's shape and dtype. dy or dstate is None where nothing
    depends on that result.
    """
    *others, asked = arguments
    backend, module = implementation(asked, x)
    ran(f"{backend} backward")
    dy = torch.zeros_like(x) if dy is None else dy.contiguous()
    dstate = None if dstate is None else dstate.contiguous()
    with without_autocast(x):
        grads = module.backward(dy, dstate, x, *others)
    inputs = (x, *others[: NUMBER - 2])
    return [
        grad.to(t.dtype).contiguous()
        for grad, t in zip(grads, inputs, strict=True)
        if t is not None
    ]


@torch.library.register_fake("fastweights::selective_scan_backward")
def _(dy, dstate, *others):
    inputs = others[: NUMBER - 1]
    return [x.new_empty(x.shape) for x in inputs if x is not None]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, _, _, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dy: Tensor | None, dstate: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors  # checkpointing lets them be read once
    grads = iter(BACKWARD(dy, dstate, *tensors, ctx.backend))
    inputs = tensors[: NUMBER - 1]
    found = [None if x is None else next(grads) for x in inputs]
    return (*found, None, None, None, None)


def _refuse(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "selective_scan: got a gradient of its gradient, which only "
        'backend="loop" has'
    )


for _name, _function, _gradient, _setup in (
    ("selective_scan", _forward, _differentiate, _save),
    ("selective_scan_backward", _backward, _refuse, None),
):
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_autograd(
        f"fastweights::{_name}", _gradient, setup_context=_setup
    )
FORWARD = torch.ops.fastweights.selective_scan.default
BACKWARD = torch.ops.fastweights.selective_scan_backward.default
