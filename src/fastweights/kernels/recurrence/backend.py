"""The kernels as a backend of :func:`fastweights.linear_recurrence`.

As :mod:`fastweights.torch_backend.recurrence` it has ``empty_saved``,
``forward`` and ``backward``. What a call launches is written in the
:class:`fastweights.kernels.recurrence.schedule.Schedule` of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fastweights.arguments import (
    RecurrenceOperands,
    RecurrenceOptions,
    check_offsets_on_host,
)
from fastweights.kernels.gpu import dot_precision, gpu_of
from fastweights.kernels.recurrence import stages
from fastweights.kernels.recurrence.schedule import (
    allocate,
    buffer_offsets,
    compile_together,
)
from fastweights.kernels.recurrence.settings import CallKind, lengths_of
from fastweights.kernels.recurrence.stages import CallTensors
from fastweights.kernels.recurrence.state_passing import StateExchange


def kind_and_sizes(
    tensors: CallTensors, options: RecurrenceOptions, on_ranks: bool = False
) -> tuple[CallKind, tuple]:
    """The kind of this call, and what lengths_of takes beside it.

    In a traced call sizes may be symbols; heads and widths are numbers.
    """
    q, v, g, offsets = tensors.q, tensors.v, tensors.g, tensors.cu_seqlens
    (B, T, H, K), (_, _, HV, V) = q.shape, v.shape
    widths = H, HV, K, V = int(H), int(HV), int(K), int(V)
    gate_width = 0 if g is None else 1 if g.dim() == 3 else K
    erases = tensors.erase_key is not None
    delta = erases or tensors.beta is not None
    rule = gate_width, delta, options.chunk_size, dot_precision(q.dtype, K)
    kind = CallKind(
        gpu_of(q.device), q.dtype, *widths, *rule, erases, on_ranks
    )
    N = B if offsets is None else offsets.shape[0] - 1
    return kind, (B, T, N, offsets is not None, options.batch_invariant)


def dtypes_of(tensors: CallTensors) -> CallTensors:
    dtypes = [None if x is None else x.dtype for x in tensors]
    return CallTensors._make(dtypes)


def empty_saved(
    operands: RecurrenceOperands,
    options: RecurrenceOptions,
    on_ranks: bool = False,
) -> list[Tensor]:
    """Allocate what :func:`forward` saves."""
    tensors = CallTensors(*operands)
    kind, sizes = kind_and_sizes(tensors, options, on_ranks)
    lengths = lengths_of.__wrapped__(kind, *sizes)  # no symbol is a key
    saved = stages.TensorSpecs(kind, dtypes_of(tensors)).saved
    size = buffer_offsets((x.lines for x in saved), lengths)[-1]
    return allocate(saved, size, operands.q, lengths)


def aligned(x: Tensor | None) -> Tensor | None:
    """``x``, or a copy, contiguous and at an address divisible by 16.

    Triton's wide loads and tensor descriptors need that. All that PyTorch
    allocates is so; a slice of a tensor may be neither.
    """
    if x is None:
        return None
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def run_schedule(
    inputs: Iterable[Tensor | None],
    saved: list[Tensor] | None,
    options: RecurrenceOptions,
    exchange: StateExchange | None = None,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The results of a forward, or with ``saved`` of a backward; and saved.

    The inputs are those of CallTensors, for a forward without the last two.
    If a forward's inputs require a gradient, the kernels of its backward are
    compiled with its own, for a backward in which only o has a gradient.
    """
    tensors = CallTensors(*[aligned(x) for x in inputs])
    with torch.cuda.device_of(tensors.q):
        on_ranks = exchange is not None
        kind, sizes = kind_and_sizes(tensors, options, on_ranks)
        lengths, dtypes = lengths_of(kind, *sizes), dtypes_of(tensors)
        segmented, back = lengths.borders > 0, saved is not None
        make_schedule = (
            stages.backward_schedule if back else stages.forward_schedule
        )
        schedule = make_schedule(kind, dtypes, segmented)
        if not schedule.kernels:
            schedules = [schedule]
            differentiable = any(
                x is not None and x.requires_grad for x in tensors
            )
            if differentiable and not back:
                dstate = torch.float32 if on_ranks else None
                dtypes = dtypes._replace(do=dtypes.v, dstate=dstate)
                schedules.append(
                    stages.backward_schedule(kind, dtypes, segmented)
                )
            compile_together(*schedules)
            schedule.load(kind.gpu.shared)
        return schedule(tensors, lengths, options.scale, saved, exchange)


def forward(
    operands: RecurrenceOperands,
    options: RecurrenceOptions,
    exchange: StateExchange | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o in v's dtype, the final states in fp32, and what is saved.

    Saved is one buffer, but in Triton's interpreter a tensor each.
    """
    check_offsets_on_host(operands.cu_seqlens, operands.q.shape[1])
    results, saved = run_schedule(operands, None, options, exchange)
    return results["o"], results["state"], saved


def backward(
    do: Tensor | None,
    dstate: Tensor | None,
    operands: RecurrenceOperands,
    saved: list[Tensor],
    options: RecurrenceOptions,
    exchange: StateExchange | None = None,
) -> list[Tensor]:
    """Gradients of q, k, v and, if given, g, beta, erase_key, initial_state.

    Each has its input's dtype. do or dstate is None where nothing depends on
    that output.
    """
    g, beta = operands.g, operands.beta
    if do is None:
        do = torch.zeros_like(operands.v)
    grads, _ = run_schedule((*operands, do, dstate), saved, options, exchange)
    if g is not None and grads["dg"].dim() < g.dim():  # the head's one channel
        grads["dg"] = grads["dg"].view_as(g)
    if beta is not None and grads["dbeta"].dim() > beta.dim():
        # A part for each value tile.
        grads["dbeta"] = grads["dbeta"].sum(-1).to(beta.dtype)
    return [*grads.values()]
