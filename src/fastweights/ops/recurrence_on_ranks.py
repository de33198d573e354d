"""linear_recurrence of tokens that ranks share: fw.context_parallel.

Kernels hand their segments' maps to :mod:`fastweights.ranks.exchange` as they
run. Other backends find a rank's map by calls of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastweights.arguments import check_arguments, check_values
from fastweights.dtypes import without_autocast
from fastweights.ops.backends import (
    check_backend,
    record_run,
    recurrence_kernels_run,
)
from fastweights.ops.invariance import is_invariant
from fastweights.ops.recurrence_operator import (
    computed_by,
    implementation,
    make_operator,
    of_one_rank,
)
from fastweights.ranks.exchange import Exchange
from fastweights.ranks.group import Ranks, current
from fastweights.ranks.prefix import gathers
from fastweights.ranks.shard import (
    additive_over_ranks,
    over_ranks,
    shard_of,
    total_decay,
    with_a_token,
)
from fastweights.reference.backend import first_states


def recurrence_over_ranks(
    ranks: Ranks,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """linear_recurrence of this rank's tokens, which may be none."""
    scale, chunk_size, backend = options
    check_arguments(
        q,
        k,
        v,
        g=g,
        beta=beta,
        erase=erase,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        min_tokens=0,
    )
    check_backend(backend)
    T = q.shape[1]
    q, k, v, g, beta, erase = with_a_token(q, k, v, g, beta, erase)
    if g is not None and g.dim() == 1:
        g = (min(T, 1) * g).expand(v.shape[:3])
    first = first_states(q, v, initial_state, cu_seqlens)
    if recurrence_kernels_run(backend, q.device, q.dtype, q.shape[-1]):
        shard: Any = None  # nothing is to be looked up in it
        finish = sums_final_states(ranks, cu_seqlens, is_invariant())
        if initial_state is not None or finish:
            shard = shard_of(ranks, q, T, cu_seqlens)
            first = shard.initial_states(first)
        check_values(q, k, v, g=g, beta=beta, erase=erase)
        of, states = (q, k, v, g, beta, erase), (first, cu_seqlens)
        o, state = computed_by(ON_RANKS, *of, *states, *options)
        if finish:
            state = shard.final_states(state)
        return o[:, :T], state
    shard = shard_of(ranks, q, T, cu_seqlens)
    first = shard.initial_states(first)

    def run(v: Tensor, first: Tensor, offsets: Tensor | None) -> Any:
        return of_one_rank(q, k, v, g, beta, erase, first, offsets, *options)

    of_v = functools.partial(run, v)
    if beta is None and erase is None:
        decay = total_decay(g, q)
        o, state = additive_over_ranks(shard, of_v, first, decay)
        return o[:, :T], state
    # Each column of a state is a recurrence of its own. V of them give B, and
    # K that begin as the identity and write nothing give M.
    own = first.index_select(0, shard.outgoing)
    R, HV, K, V = own.shape
    one = torch.eye(K, dtype=own.dtype, device=own.device)
    own = torch.cat([own, shard.passing(one.expand(R, HV, K, K))], -1)
    wide = torch.cat([v, v.new_zeros(*v.shape[:3], K)], -1)
    _, found = run(wide, shard.map_initial_states(own), shard.map_offsets())
    B, M = shard.map_outgoing(found).split([V, K], -1)
    o, state = over_ranks(shard, of_v, first, M, B, matrix=True)
    return o[:, :T], state


def sums_final_states(
    ranks: Ranks, cu_seqlens: Tensor | None, invariant: bool
) -> bool:
    """Whether final states are to be summed over ranks, each from one of them.

    They are of a pack, or if maps are not gathered: no rank knows all then.
    """
    return cu_seqlens is not None or not gathers(ranks, invariant)


def _forward(
    q: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """As of one rank; final states are those of all, unless to be summed.

    Also kept are the ranks' maps and the states that enter this one.
    """
    *inputs, first, cu_seqlens, scale, chunk_size, _, invariant = arguments
    exchange = Exchange(_ranks(), q, cu_seqlens, invariant=invariant)
    entering = first.clone(memory_format=torch.contiguous_format)
    states = entering, exchange.cu_seqlens
    _, module, chunk_size = implementation("triton", q, chunk_size)
    record_run("triton forward")
    with without_autocast(q):
        o, state, saved = module.forward(
            *(q, *inputs, *states, scale, chunk_size, invariant),
            exchange.forward,
        )
    if not sums_final_states(_ranks(), cu_seqlens, invariant):
        state = exchange.last.to(state.dtype)
    return o, state, [*saved, exchange.maps, entering]


def _fake(
    q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    g, beta, erase, first, cu_seqlens, *options = others
    _, chunk_size, _, invariant = options
    _, module, chunk_size = implementation("triton", q, chunk_size)
    tokens = (q, v, g, beta, erase, cu_seqlens)
    saved = module.empty_saved(*tokens, chunk_size, invariant, True)
    rows, K = first.shape[0] if cu_seqlens is None else 1, q.shape[-1]
    width = 1 if beta is None and erase is None else K
    row = rows, v.shape[2], K, width + v.shape[3]
    size = _ranks().size if gathers(_ranks(), invariant) else 1
    maps = first.new_empty(size, *row)
    states = [torch.empty_like(first) for _ in range(2)]
    return v.new_empty(v.shape), states[0], [*saved, maps, states[1]]


def _backward(
    do: Tensor | None, dstate: Tensor | None, q: Tensor, *arguments: Any
) -> list[Tensor]:
    """Gradients of the inputs, as of one rank."""
    *inputs, _, cu_seqlens, saved, scale, chunk_size, _, invariant = arguments
    *saved, maps, entering = saved
    leaving = torch.zeros_like(entering)
    summed = sums_final_states(_ranks(), cu_seqlens, invariant)
    if summed and dstate is not None:
        leaving, dstate = leaving.copy_(dstate), None
    given = _ranks(), q, cu_seqlens, maps, dstate
    exchange = Exchange(*given, invariant=invariant)
    states = entering, exchange.cu_seqlens
    _, module, chunk_size = implementation("triton", q, chunk_size)
    record_run("triton backward")
    with without_autocast(q):
        return module.backward(
            *(do, leaving, q, *inputs, *states, saved),
            *(scale, chunk_size, invariant, exchange.backward),
        )


def _ranks() -> Ranks:
    """Those of the context that is open."""
    ranks = current()
    if ranks is None:
        raise RuntimeError(
            "context_parallel: got a backward outside of it, need it inside, "
            "since ranks send each other gradients"
        )
    return ranks


ON_RANKS = make_operator(
    "linear_recurrence_on_ranks", _forward, _fake, _backward
)
