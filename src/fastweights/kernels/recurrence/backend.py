"""The kernels as a backend of :func:`fastweights.linear_recurrence`.

As :mod:`fastweights.torch_backend.recurrence` it has ``empty_saved``,
``forward`` and ``backward``. What a call launches is written in the
:class:`fastweights.kernels.recurrence.schedule.Schedule` of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fastweights.arguments import (
    Operands,
    OperatorOptions,
    check_offsets_on_host,
)
from fastweights.kernels.gpu import dot_precision, gpu_of
from fastweights.kernels.recurrence import stages
from fastweights.kernels.recurrence.schedule import (
    allocate,
    buffer_offsets,
    compile_together,
)
from fastweights.kernels.recurrence.settings import Kind, lengths_of
from fastweights.kernels.recurrence.stages import Given

Exchanging = Callable[..., None] | None  # a method of ranks.exchange


def kind_of(
    given: Given,
    chunk_size: int,
    invariant: bool = False,
    ranks: bool = False,
) -> tuple[Kind, tuple]:
    """What kind of call that is; and what lengths_of it takes.

    Of a traced call these may be symbols; heads and widths are numbers.
    """
    q, v, g, offsets = given.q, given.v, given.g, given.cu_seqlens
    (B, T, H, K), (_, _, HV, V) = q.shape, v.shape
    heads = H, HV, K, V = int(H), int(HV), int(K), int(V)
    gate_width = 0 if g is None else 1 if g.dim() == 3 else K
    precision = dot_precision(q.dtype, K)
    erases = given.erase is not None
    delta = erases or given.beta is not None
    rest: Any = (gate_width, delta, chunk_size, precision, erases, ranks)
    kind = Kind(gpu_of(q.device), q.dtype, *heads, *rest)
    N = B if offsets is None else offsets.shape[0] - 1
    return kind, (B, T, N, offsets is not None, invariant)


def dtypes_of(given: Given) -> Given:
    return Given._make([None if x is None else x.dtype for x in given])


def empty_saved(
    operands: Operands, options: OperatorOptions, ranks: bool = False
) -> list[Tensor]:
    """Room for what :func:`forward` saves."""
    given, (_, chunk_size, _, invariant) = Given(*operands), options
    kind, sizes = kind_of(given, chunk_size, invariant, ranks)
    lengths = lengths_of.__wrapped__(kind, *sizes)  # no symbol is a key
    saved = stages.Rooms(kind, dtypes_of(given)).saved
    size = buffer_offsets((x.lines for x in saved), lengths)[-1]
    return allocate(saved, size, operands.q, lengths)


def aligned(x: Tensor | None) -> Tensor | None:
    """``x``, or a copy, contiguous and at an address divisible by 16.

    As Triton's wide loads and tensor descriptors need it, and all that
    PyTorch allocates is; a slice of a tensor may be neither.
    """
    if x is None:
        return None
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def run(
    inputs: Iterable[Tensor | None],
    saved: list[Tensor] | None,
    options: OperatorOptions,
    exchange: Exchanging = None,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The results of a forward or, if it ``saved``, a backward; what is saved.

    The inputs are those of Given, to a forward without the last two. With a
    forward's kernels are compiled those of the backward that its inputs will
    need, if they require a gradient, and only the outputs have one. What a
    rank has to ``exchange`` is told in schedule.Schedule.
    """
    scale, chunk_size, _, invariant = options
    given = Given(*[aligned(x) for x in inputs])
    with torch.cuda.device_of(given.q):
        ranks = exchange is not None
        kind, sizes = kind_of(given, chunk_size, invariant, ranks)
        lengths, of = lengths_of(kind, *sizes), dtypes_of(given)
        segmented, back = lengths.borders > 0, saved is not None
        make_schedule = (
            stages.backward_schedule if back else stages.forward_schedule
        )
        schedule = make_schedule(kind, of, segmented)
        if not schedule.kernels:
            together = [schedule]
            leaves = [x for x in given if x is not None and x.requires_grad]
            if leaves and not back:
                dstate = torch.float32 if ranks else None
                of = of._replace(do=of.v, dstate=dstate)
                together.append(stages.backward_schedule(kind, of, segmented))
            compile_together(*together)
            schedule.load(kind.gpu.shared)
        return schedule(given, lengths, scale, saved, exchange)


def forward(
    operands: Operands,
    options: OperatorOptions,
    exchange: Exchanging = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o in v's dtype, the final states in fp32, and what is saved.

    Saved is one buffer, but in Triton's interpreter a tensor each.
    """
    check_offsets_on_host(operands.cu_seqlens, operands.q.shape[1])
    made, saved = run(operands, None, options, exchange)
    return made["o"], made["state"], saved


def backward(
    do: Tensor | None,
    dstate: Tensor | None,
    operands: Operands,
    saved: list[Tensor],
    options: OperatorOptions,
    exchange: Exchanging = None,
) -> list[Tensor]:
    """Gradients of q, k, v and of g, beta, erase, initial_state where given.

    Each has its input's dtype. do or dstate is None where nothing depends on
    that output.
    """
    g, beta = operands.g, operands.beta
    if do is None:
        do = torch.zeros_like(operands.v)
    made, _ = run((*operands, do, dstate), saved, options, exchange)
    if g is not None and made["dg"].dim() < g.dim():  # the head's one channel
        made["dg"] = made["dg"].view_as(g)
    if beta is not None and made["dbeta"].dim() > beta.dim():  # by value tiles
        made["dbeta"] = made["dbeta"].sum(-1).to(beta.dtype)
    return [*made.values()]
