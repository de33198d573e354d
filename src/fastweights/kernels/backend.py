"""The kernels as a backend of :func:`fastweights.linear_recurrence`.

As :mod:`fastweights.reference.backend`: ``default_chunk_size``,
``empty_saved``, ``forward`` and ``backward``. What a call launches is written
in the :class:`fastweights.kernels.plan.Schedule` of its kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastweights.arguments import check_offsets
from fastweights.kernels import dot_precision, launch
from fastweights.kernels.lengths import Lengths, lengths_of
from fastweights.kernels.plan import Schedule, compile_together, places
from fastweights.kernels.settings import Kind, properties
from fastweights.kernels.tile import INTERPRETED

Given = Sequence[Tensor | None]  # in the order of launch.GIVEN


def default_chunk_size(q: Tensor) -> int:
    """Tokens per chunk where the caller leaves that open."""
    return 64


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
    if offsets is None:
        return kind, (B, T, B, False)
    return kind, (B, T, offsets.shape[0] - 1, True)


def dtypes(given: Given) -> launch.Dtypes:
    return tuple([None if x is None else x.dtype for x in given])


def empty_saved(
    q: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> list[Tensor]:
    """Room for what :func:`forward` keeps."""
    given = (q, q, v, g, beta, None, cu_seqlens)
    kind, sizes = kind_of(given, chunk_size)
    lengths = lengths_of.__wrapped__(kind, *sizes)  # no symbol is a key
    kept = launch.kept(kind, launch.rooms(kind, dtypes(given)))
    if INTERPRETED:
        return [x.empty(q, lengths) for x in kept]
    return [q.new_empty(places(kept, lengths)[-1], dtype=torch.uint8)]


def scheduled(given: Given, chunk_size: int) -> tuple[Schedule, Lengths]:
    """The schedule of a forward or, of nine tensors, a backward; loaded.

    With a forward's are compiled the kernels of the backward that its inputs
    will need, if they require a gradient, and only the outputs have one.
    """
    kind, sizes = kind_of(given, chunk_size)
    lengths, of = lengths_of(kind, *sizes), dtypes(given)
    cut, back = min(lengths.NS, 3), len(given) > 7
    found = (launch.backward if back else launch.forward)(kind, of, cut)
    if not found.kernels:
        together = [found]
        if not back and any(x.requires_grad for x in given if x is not None):
            of = (*of, of[2], None)
            together.append(launch.backward(kind, of, cut))
        compile_together(*together)
        found.load(kind.gpu.shared)
    return found, lengths


def aligned(x: Tensor | None) -> Tensor | None:
    """``x``, or a copy, contiguous and at an address divisible by 16.

    As Triton's wide loads and tensor descriptors need it, and all that
    PyTorch allocates is; a slice of a tensor may be neither.
    """
    if x is None:
        return None
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


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

    That is one buffer, but in Triton's interpreter a tensor each.
    """
    if cu_seqlens is not None and not cu_seqlens.is_cuda:
        check_offsets(cu_seqlens.tolist(), q.shape[1])
    inputs = (q, k, v, g, beta, initial_state, cu_seqlens)
    given = [aligned(x) for x in inputs]
    with torch.cuda.device_of(q):
        schedule, lengths = scheduled(given, chunk_size)
        (o, state), saved = schedule(given, lengths, scale)
    return o, state, saved


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
    inputs = (q, k, v, g, beta, initial_state, cu_seqlens, do, dstate)
    given = [aligned(x) for x in inputs]
    with torch.cuda.device_of(q):
        schedule, lengths = scheduled(given, chunk_size)
        grads, _ = schedule(given, lengths, scale, saved)
    if beta is not None:
        at = 3 + (g is not None)
        if grads[at].dim() > beta.dim():  # of each value tile
            grads[at] = grads[at].sum(-1).to(beta.dtype)
    return grads
