"""The kernels as a backend of :func:`fastweights.linear_recurrence`.

As :mod:`fastweights.reference.backend`: ``empty_saved``, ``forward`` and
``backward``. What a call launches is written in the
:class:`fastweights.kernels.plan.Schedule` of its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.arguments import check_offsets_on_host
from fastweights.kernels import dot_precision, launch
from fastweights.kernels.gpu import properties
from fastweights.kernels.lengths import Lengths, lengths_of
from fastweights.kernels.plan import (
    Schedule,
    compile_together,
    memory,
    numbers_of,
    places,
)
from fastweights.kernels.settings import Kind

Given = Sequence[Tensor | None]  # in the order of launch.GIVEN


def kind_of(given: Given, chunk_size: int) -> tuple[Kind, tuple]:
    """What kind of call that is; and B, T, sequences and whether packed.

    Of a traced call these may be symbols; heads and widths are numbers.
    """
    q, _, v, g, beta, _, offsets, *_ = given
    assert q is not None and v is not None
    B, T, H, K = q.shape
    gate = 0 if g is None else 1 if g.dim() == 3 else int(K)
    precision = dot_precision(q.dtype, int(K))
    heads = (int(H), int(v.shape[2]), int(K), int(v.shape[3]))
    rule = (gate, beta is not None, chunk_size, precision)
    kind = Kind(properties(q.device), q.dtype, *heads, *rule)
    N = B if offsets is None else offsets.shape[0] - 1
    return kind, (B, T, N, offsets is not None)


def dtypes(given: Given) -> launch.Dtypes:
    return tuple([None if x is None else x.dtype for x in given])


def empty_saved(*call: Any) -> list[Tensor]:
    """Room for what :func:`forward` keeps.

    Of q, v, g, beta, cu_seqlens and chunk_size.
    """
    q, v, g, beta, offsets, chunk_size = call
    given = (q, q, v, g, beta, None, offsets)
    kind, sizes = kind_of(given, chunk_size)
    lengths = lengths_of.__wrapped__(kind, *sizes)  # no symbol is a key
    kept = launch.kept(kind, launch.rooms(kind, dtypes(given)))
    lines = numbers_of(x.lines for x in kept)(*lengths)
    return memory(kept, places(lines)[-1], q, lengths)


def scheduled(given: Given, chunk_size: int) -> tuple[Schedule, Lengths]:
    """The schedule of a forward or, of nine tensors, a backward; loaded.

    With a forward's are compiled the kernels of the backward that its inputs
    will need, if they require a gradient, and only the outputs have one.
    """
    kind, sizes = kind_of(given, chunk_size)
    lengths, of = lengths_of(kind, *sizes), dtypes(given)
    cut, back = lengths.borders > 0, len(given) > 7
    schedule = (launch.backward if back else launch.forward)(kind, of, cut)
    if not schedule.kernels:
        together = [schedule]
        if not back and any(x.requires_grad for x in given if x is not None):
            together += [launch.backward(kind, (*of, of[2], None), cut)]
        compile_together(*together)
        schedule.load(kind.gpu.shared)
    return schedule, lengths


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
    inputs: Given, saved: list[Tensor] | None, scale: float, chunk_size: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The results of a call, and what is kept."""
    given = [aligned(x) for x in inputs]
    with torch.cuda.device_of(inputs[0]):
        schedule, lengths = scheduled(given, chunk_size)
        return schedule(given, lengths, scale, saved)


def forward(*call: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o in v's dtype, the final states in fp32, and what is kept.

    Of q, k, v, g, beta, initial_state, cu_seqlens, scale and chunk_size. Kept
    is one buffer, but in Triton's interpreter a tensor each.
    """
    *inputs, scale, chunk_size = call
    check_offsets_on_host(inputs[6], inputs[0].shape[1])
    (o, state), saved = run(inputs, None, scale, chunk_size)
    return o, state, saved


def backward(*call: Any) -> list[Tensor]:
    """Gradients of q, k, v and of g, beta, initial_state where given.

    Of do, dstate, the inputs of the forward, what it kept, scale and
    chunk_size. Each has its input's dtype. do or dstate is None where nothing
    depends on that output.
    """
    do, dstate, *inputs, saved, scale, chunk_size = call
    v, g, beta = inputs[2:5]
    if do is None:
        do = torch.zeros_like(v)
    grads, _ = run((*inputs, do, dstate), saved, scale, chunk_size)
    if g is not None and grads[3].dim() < g.dim():  # the head's one channel
        grads[3] = grads[3].view_as(g)
    if beta is not None:
        at = 3 + (g is not None)
        if grads[at].dim() > beta.dim():  # of each value tile
            grads[at] = grads[at].sum(-1).to(beta.dtype)
    return grads
