"""linear_recurrence of tokens that ranks share: fw.context_parallel.

Kernels hand their segments' maps to :mod:`fastweights.ranks.exchange` as they
run. Other backends find a rank's map by calls of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastweights.arguments import (
    RecurrenceOperands,
    RecurrenceOptions,
    check_recurrence_arguments,
    check_values_if_enabled,
)
from fastweights.dtypes import without_autocast
from fastweights.heads import state_shape
from fastweights.ops.common.backends import (
    Backend,
    check_backend,
    record_run,
    recurrence_backend,
)
from fastweights.ops.common.batch_invariance import is_batch_invariant
from fastweights.ops.recurrence_operator import (
    ForwardResults,
    backend_module,
    local_recurrence,
    make_recurrence_operator,
    prepare_call,
)
from fastweights.packing import states_or_zeros
from fastweights.ranks.exchange import Exchange
from fastweights.ranks.group import Ranks, current_ranks
from fastweights.ranks.prefix import gathers_maps
from fastweights.ranks.shard import (
    pad_to_one_token,
    run_additive_over_ranks,
    run_over_ranks,
    shard_of,
    total_decay,
)


def recurrence_over_ranks(
    ranks: Ranks,
    operands: RecurrenceOperands,
    scale: float | None,
    chunk_size: int | None,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """linear_recurrence of this rank's tokens, which may be none."""
    check_recurrence_arguments(
        operands, scale=scale, chunk_size=chunk_size, min_tokens=0
    )
    check_backend(backend)
    T = operands.q.shape[1]
    q, k, v, g, beta, erase_key, initial_state, cu_seqlens = pad_to_one_token(
        *operands
    )
    if g is not None and g.dim() == 1:
        g = (min(T, 1) * g).expand(v.shape[:3])
    tokens = q, k, v, g, beta, erase_key
    states = states_or_zeros(q, state_shape(q, v), initial_state, cu_seqlens)
    if recurrence_backend(backend, q) == "triton":
        shard: Any = None  # nothing is to be looked up in it
        summed = sums_final_states(ranks, cu_seqlens, is_batch_invariant())
        if initial_state is not None or summed:
            shard = shard_of(ranks, q, T, cu_seqlens)
            states = shard.initial_states(states)
        check_values_if_enabled(RecurrenceOperands(*tokens))
        operands = RecurrenceOperands(*tokens, states, cu_seqlens)
        operands, options = prepare_call(operands, scale, chunk_size, backend)
        o, state = RECURRENCE_ON_RANKS(*operands, *options)
        if summed:
            state = shard.final_states(state)
        return o[:, :T], state
    shard = shard_of(ranks, q, T, cu_seqlens)
    states = shard.initial_states(states)

    def run(v: Tensor, states: Tensor, offsets: Tensor | None) -> Any:
        operands = RecurrenceOperands(
            q, k, v, g, beta, erase_key, states, offsets
        )
        return local_recurrence(operands, scale, chunk_size, backend)

    run_v = functools.partial(run, v)
    if beta is None and erase_key is None:
        decay = total_decay(g, q)
        o, state = run_additive_over_ranks(shard, run_v, states, decay)
        return o[:, :T], state
    # Each column of a state is a recurrence of its own. V of them give B, and
    # K that begin as the identity and write nothing give M.
    state = states.index_select(0, shard.outgoing)
    R, HV, K, V = state.shape
    identity = torch.eye(K, dtype=state.dtype, device=state.device)
    identity = identity.expand(R, HV, K, K)
    state = torch.cat([state, shard.where_passing(identity)], -1)
    wide = torch.cat([v, v.new_zeros(*v.shape[:3], K)], -1)
    _, state = run(wide, shard.states_for_map(state), shard.offsets_for_map())
    B, M = shard.outgoing_of_map(state).split([V, K], -1)
    o, state = run_over_ranks(shard, run_v, states, M, B, matrix=True)
    return o[:, :T], state


def sums_final_states(
    ranks: Ranks, cu_seqlens: Tensor | None, batch_invariant: bool
) -> bool:
    """Whether final states are to be summed over ranks, each from one of them.

    A pack's are, and a batch's if maps are not gathered: no rank knows all.
    """
    return cu_seqlens is not None or not gathers_maps(ranks, batch_invariant)


def _forward(
    operands: RecurrenceOperands, options: RecurrenceOptions
) -> ForwardResults:
    """o of this rank; final states of all ranks, unless they are summed later.

    Saved are also the ranks' maps and the states that enter this one.
    """
    q, cu_seqlens = operands.q, operands.cu_seqlens
    ranks, batch_invariant = _ranks(), options.batch_invariant
    exchange = Exchange(ranks, q, cu_seqlens, batch_invariant=batch_invariant)
    initial_state: Any = operands.initial_state
    entering = initial_state.clone(memory_format=torch.contiguous_format)
    local = _local(operands, entering, exchange)
    record_run("triton forward")
    with without_autocast(q):
        o, state, saved = backend_module("triton").forward(
            local, options, exchange.forward
        )
    if not sums_final_states(ranks, cu_seqlens, batch_invariant):
        state = exchange.last.to(state.dtype)
    return o, state, [*saved, exchange.maps, entering]


def _fake(
    operands: RecurrenceOperands, options: RecurrenceOptions
) -> ForwardResults:
    q, _, v, _, beta, erase_key, initial_state, cu_seqlens = operands
    assert initial_state is not None
    saved = backend_module("triton").empty_saved(operands, options, True)
    N, K = initial_state.shape[0] if cu_seqlens is None else 1, q.shape[-1]
    width = 1 if beta is None and erase_key is None else K
    row = N, v.shape[2], K, width + v.shape[3]
    ranks = _ranks()
    size = ranks.size if gathers_maps(ranks, options.batch_invariant) else 1
    maps = initial_state.new_empty(size, *row)
    states = [torch.empty_like(initial_state) for _ in range(2)]
    return v.new_empty(v.shape), states[0], [*saved, maps, states[1]]


def _backward(
    do: Tensor | None,
    dstate: Tensor | None,
    operands: RecurrenceOperands,
    saved: list[Tensor],
    options: RecurrenceOptions,
) -> list[Tensor]:
    """Gradients of the inputs, each rank's own part."""
    q, cu_seqlens = operands.q, operands.cu_seqlens
    batch_invariant = options.batch_invariant
    *saved, maps, entering = saved
    leaving = torch.zeros_like(entering)
    summed = sums_final_states(_ranks(), cu_seqlens, batch_invariant)
    if summed and dstate is not None:
        leaving, dstate = leaving.copy_(dstate), None
    arguments = _ranks(), q, cu_seqlens, maps, dstate
    exchange = Exchange(*arguments, batch_invariant=batch_invariant)
    local = _local(operands, entering, exchange)
    record_run("triton backward")
    with without_autocast(q):
        return backend_module("triton").backward(
            do, leaving, local, saved, options, exchange.backward
        )


def _local(
    operands: RecurrenceOperands, entering: Tensor, exchange: Exchange
) -> RecurrenceOperands:
    """The operands of the rank's tokens, and the states that enter them."""
    offsets = exchange.cu_seqlens
    return operands._replace(initial_state=entering, cu_seqlens=offsets)


def _ranks() -> Ranks:
    """The ranks of the context that is open."""
    ranks = current_ranks()
    if ranks is None:
        raise RuntimeError(
            "context_parallel: got a backward outside of it, need it inside, "
            "since ranks send each other gradients"
        )
    return ranks


RECURRENCE_ON_RANKS = make_recurrence_operator(
    "linear_recurrence_on_ranks", _forward, _fake, _backward
)
