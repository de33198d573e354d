"""The kernels as a backend of :func:`fastweights.linear_recurrence`.

As :mod:`fastweights.reference.backend`: ``default_chunk_size``,
``empty_saved``, ``forward`` and ``backward``. A call's launches are those of
its :class:`fastweights.kernels.plan.Plan`, but in Triton's interpreter, which
makes them at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fastweights.arguments import check_offsets
from fastweights.kernels import dot_precision, launch
from fastweights.kernels.call import INPUTS, Call, aligned
from fastweights.kernels.plan import (
    Plan,
    Sizes,
    buffers,
    compile_together,
    nowhere,
    places,
    sizes,
)
from fastweights.kernels.settings import properties
from fastweights.kernels.tile import INTERPRETED


def default_chunk_size(q: Tensor) -> int:
    """Tokens a chunk where the caller leaves that open."""
    return 64


def empty_saved(
    q: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> list[Tensor]:
    """Room for what :func:`forward` keeps."""
    inputs = (q, q, v, g, beta, None, cu_seqlens)
    saved = launch.empty_kept(Call(*inputs, 1.0, chunk_size, on=q.device))
    if INTERPRETED:
        return saved
    return [q.new_empty(places(saved)[-1], dtype=torch.uint8)]


@functools.lru_cache(maxsize=4096)
def planned(
    inputs: Sizes,
    gradients: Sizes | None,
    chunk_size: int,
    device: torch.device,
    precision: str,
) -> Plan:
    """What a forward launches; given the sizes of do and dstate, a backward.

    ``precision`` is part of what its kernels are compiled for.
    """
    scale = float("nan")
    given = nowhere(inputs)
    named = dict(zip(INPUTS, given, strict=True))
    x = Call(**named, scale=scale, chunk_size=chunk_size, on=device)
    if gradients is None:
        *results, saved = launch.forward(x)
        return Plan(x.traced, buffers(given), results, saved, scale)
    last, saved = nowhere(gradients), launch.empty_kept(x)
    x.others = (*last, *saved)
    grads = launch.backward(x)
    there = [*buffers(given + last), saved]
    return Plan(x.traced, there, grads, None, scale)


def plan(
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None] | None,
    chunk_size: int,
) -> Plan:
    """The plan of a forward or backward, compiled and loaded.

    With a forward's also the kernels of the backward that its inputs will
    need, if they require a gradient, and only the outputs have one.
    """
    q, of = inputs[0], sizes(inputs)
    assert q is not None
    last = None if gradients is None else sizes(gradients)
    rest = (chunk_size, q.device, dot_precision(q.dtype, q.shape[3]))
    found = planned(of, last, *rest)
    if not found.runs:
        plans = [found]
        if any(t.requires_grad for t in inputs if t is not None):
            plans.append(planned(of, (of[2], None), *rest))
        compile_together(*plans)
        found.load(properties(q.device).shared)
    return found


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o in v's dtype, the final states in fp32, and what is kept.

    In Triton's interpreter that is the tensors of :func:`launch.kept`, else
    one buffer with all of them.
    """
    if cu_seqlens is not None and not cu_seqlens.is_cuda:
        check_offsets(cu_seqlens.tolist(), q.shape[1])
    inputs = (q, k, v, g, beta, initial_state, cu_seqlens)
    if INTERPRETED:
        return launch.forward(Call(*inputs, scale, chunk_size))
    given = [aligned(t) for t in inputs]
    with torch.cuda.device_of(q):
        o, state, saved = plan(given, None, chunk_size)(given, scale)
    return o, state, [saved]


def backward(
    do: Tensor | None,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    scale: float,
    chunk_size: int,
) -> list[Tensor]:
    """Gradients of q, k, v and of g, beta, initial_state where given.

    Each has its input's dtype. do or dstate is None where nothing depends
    on that output.
    """
    if do is None:
        do = torch.zeros_like(v, memory_format=torch.contiguous_format)
    inputs = (q, k, v, g, beta, initial_state, cu_seqlens)
    others = (do, dstate, *saved)
    if INTERPRETED:
        grads = launch.backward(
            Call(*inputs, scale, chunk_size, others=others)
        )
    else:
        given = [aligned(t) for t in (*inputs, *others)]
        with torch.cuda.device_of(q):
            grads = plan(given[:7], given[7:9], chunk_size)(given, scale)
    if beta is not None:
        at = 3 + (g is not None)
        if grads[at].dim() > beta.dim():  # of each value tile
            grads[at] = grads[at].sum(-1).to(beta.dtype)
    return grads
