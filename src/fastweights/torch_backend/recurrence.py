"""linear_recurrence in PyTorch: what its operator asks of a backend.

A backend has ``empty_saved``, ``forward`` and ``backward``, on tensors as
:func:`fastweights.linear_recurrence` takes them. Here that is a frame around
:mod:`fastweights.reference.chunkwise`: dtypes, value heads that share a key
head, no gate, packed sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.arguments import RecurrenceOperands, RecurrenceOptions
from fastweights.dtypes import compute_dtype
from fastweights.heads import HeadStates, state_shape
from fastweights.packing import (
    Offsets,
    Piece,
    pack_pieces,
    sequence_spans,
    states_or_zeros,
)
from fastweights.reference.chunkwise import (
    chunkwise_forward,
    from_chunks,
    to_chunks,
)
from fastweights.reference.chunkwise_backward import chunkwise_backward
from fastweights.reference.steps import recurrence, scan
from fastweights.torch_backend.decode import advance, expand_inputs

SCORES_IN_CACHE = 2**17  # numbers, that one core works on at once


def pieces(
    cu_seqlens: Offsets | None, v: Tensor, options: RecurrenceOptions
) -> list[Piece]:
    """Sequences that are computed together, and stay in a core's cache.

    A batch has pieces of some rows, a pack those of :func:`pack_pieces`; if
    ``batch_invariant``, each sequence is alone. No chunk is longer than them.
    """
    (B, T, HV), C = v.shape[:3], options.chunk_size
    room = max(1, torch.get_num_threads() * SCORES_IN_CACHE // HV)
    if options.batch_invariant:
        room = 0
    if cu_seqlens is not None:
        return pack_pieces(cu_seqlens, v, C, lambda C: room // C**2)
    C = min(C, T)
    rows = max(1, room // (T * C))
    parts = [slice(b, b + rows) for b in range(0, B, rows)]
    return [Piece(n, (n, slice(None)), C) for n in parts]


def loop(operands: RecurrenceOperands, scale: float) -> tuple[Tensor, Tensor]:
    """Run one token at a time, with the gradients that autograd finds."""
    q, k, v, g, beta, erase_key, initial_state, cu_seqlens = operands
    if cu_seqlens is not None and cu_seqlens.is_meta:
        raise ValueError(
            "cu_seqlens: got a tensor on the device meta, need one with "
            'values, which backend="loop" reads'
        )
    g = torch.zeros_like(v[..., 0]) if g is None else g
    wide = expand_inputs(q, k, v, g, beta, erase_key)
    named = zip(RecurrenceOperands._fields, wide, strict=False)
    tokens = {name: x for name, x in named if x is not None}
    tokens["q"] = scale * tokens["q"]

    def step(S: Tensor, *at_t: Tensor) -> tuple[Tensor, Tensor]:
        return recurrence(S, **dict(zip(tokens, at_t, strict=True)))

    state = states_or_zeros(q, state_shape(q, v), initial_state, cu_seqlens)
    # No token's, but o depends on the states, if nothing else does: under
    # context_parallel every rank takes part in a backward.
    outputs = [state[: len(v), :, :0].transpose(1, 2)]
    states = list(state.split(1))
    for n, t in sequence_spans(cu_seqlens, q.shape[1]):
        inputs = (x[:, t] for x in tokens.values())
        o, last = scan(step, state[n], *inputs)
        outputs.append(o)
        states[n] = last.split(1)
    num_left = v.shape[1] - sum(o.shape[1] for o in outputs)
    outputs.append(state.new_zeros(len(v), num_left, *v.shape[2:]))
    return torch.cat(outputs, dim=1).to(v.dtype), torch.cat(states)


def empty_saved(
    operands: RecurrenceOperands, options: RecurrenceOptions
) -> list[Tensor]:
    """Allocate Aqk and, if a rule erases, P: a row of C per token.

    One token needs no room, unless ``batch_invariant``: there are as many
    tensors, but empty, so that a graph for any T is one for T = 1. Another
    backend may keep more, in sizes that follow from g and cu_seqlens.
    """
    q, _, v, _, beta, erase_key, *_ = operands
    B, T, HV = v.shape[:3]
    single_token = T == 1 and not options.batch_invariant
    width = 0 if single_token else torch.sym_min(options.chunk_size, T)
    shape = (B, HV, T, width)  # a head's rows together
    number = 1 if beta is None and erase_key is None else 2
    return [
        q.new_empty(shape, dtype=compute_dtype(q.dtype)) for _ in range(number)
    ]


def forward(
    operands: RecurrenceOperands, options: RecurrenceOptions
) -> tuple[Tensor, HeadStates, list[Tensor]]:
    """Outputs, final states, and what the backward re-uses."""
    q, _, v, *_, initial_state, cu_seqlens = operands
    tokens = expand_inputs(*operands.per_token)
    state = states_or_zeros(q, state_shape(q, v), initial_state, cu_seqlens)
    saved = empty_saved(operands, options)
    single_token = v.shape[1] == 1 and not options.batch_invariant
    if single_token and (nonempty := sequence_spans(cu_seqlens, 1)):
        [(n, _)] = nonempty
        o = advance(state[n], *tokens, scale=options.scale).to(v.dtype)
        return o, state, saved
    o = v.new_empty(v.shape)
    if cu_seqlens is not None:
        # Short sequences fill less than a row; the last may end before T.
        for x in (o, *saved):
            x.zero_()
    for part in pieces(cu_seqlens, v, options):
        inputs, n = part.select(*tokens), part.states
        o_n, state[n], Aqk, P = chunkwise_forward(
            *inputs,
            scale=options.scale,
            initial_state=None if initial_state is None else state[n],
            chunk_size=part.chunk_size,
        )
        length = inputs[0].shape[1]
        part.put(o, from_chunks(o_n, length))
        saved_n = [Aqk] if P is None else [Aqk, P]
        for x, x_n in zip(saved, saved_n, strict=True):
            part.put(x.transpose(1, 2), from_chunks(x_n, length))
    return o, state, saved


def backward(
    do: Tensor | None,
    dstate: HeadStates | None,
    operands: RecurrenceOperands,
    saved: list[Tensor],
    options: RecurrenceOptions,
) -> list[Tensor]:
    """Gradients of q, k, v and, if given, g, beta, erase_key, initial_state.

    Each has its input's shape and dtype. do or dstate is None where nothing
    depends on that output.
    """
    q, _, v, *_, initial_state, cu_seqlens = operands
    tokens = expand_inputs(*operands.per_token)
    do = torch.zeros_like(v) if do is None else do
    do = do.to(compute_dtype(q.dtype))
    dS = None
    if initial_state is not None:
        # An empty sequence hands its state's gradient on as it is.
        dS = torch.zeros_like(initial_state)
        dS = dS if dstate is None else dS.copy_(dstate)
    # It is 0 for tokens after the last sequence.
    empty = torch.empty_like if cu_seqlens is None else torch.zeros_like
    grads = [
        empty(x, memory_format=torch.contiguous_format)
        for x in tokens
        if x is not None
    ]
    for part in pieces(cu_seqlens, v, options):
        n, C = part.states, part.chunk_size
        saved_n = part.select(*(x.transpose(1, 2) for x in saved if x.numel()))
        saved_n = [to_chunks(x[..., :C], C) for x in saved_n]
        *grads_n, dS_n = chunkwise_backward(
            *part.select(*tokens),
            do=part.take(do),
            dS=None if dstate is None else dstate[n],
            scale=options.scale,
            initial_state=None if initial_state is None else initial_state[n],
            chunk_size=C,
            **dict(zip(("Aqk", "P"), saved_n, strict=False)),
        )
        if dS is not None:
            dS[n] = dS_n
        present = [x for x in grads_n if x is not None]
        for dx, dx_n in zip(grads, present, strict=True):
            part.put(dx, dx_n)
    if q.shape[2] != v.shape[2]:
        # Heads that share a key head are summed before they are rounded.
        grads[:2] = (
            x.unflatten(2, (q.shape[2], -1)).sum(3) for x in grads[:2]
        )
    inputs = operands.differentiable().values()
    if dS is not None:
        grads.append(dS)
    return [
        dx.reshape(x.shape).to(x.dtype)
        for x, dx in zip(inputs, grads, strict=True)
    ]
