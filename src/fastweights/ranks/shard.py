"""A rank's shard of the sequences of a call, and operators run over shards.

A rank's tokens map the state S that enters them to M S + B, as chunks do
within a multiprocessor and segments within a GPU. Each rank sends one map for
each sequence that goes on at the next rank: of a batch every row, of a pack
at most one sequence. M is 0 for a sequence that begins on the rank, and its
initial state is then in B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweights.arguments import check_offsets, is_readable
from fastweights.ranks.group import Ranks
from fastweights.ranks.prefix import prefix_over_ranks


class Shard(NamedTuple):
    """A rank's tokens of a call's N sequences, and which cross its borders.

    R sequences may come in and go on: of a batch all, of a pack one, whose
    index means nothing where none does. ``empty`` is what an empty state
    holds.

    A rank finds its map by a call of the operator. Of a batch it has all of
    the rank's tokens; of a pack they are two sequences: all before the one
    that goes on, and that one.
    """

    ranks: Ranks
    cu_seqlens: Int[Tensor, " N+1"] | None  # of the rank's own tokens
    begins: Bool[Tensor, " N"]  # whose first token is here
    ends: Bool[Tensor, " N"]  # whose last one is
    incoming: Int[Tensor, " R"]  # the sequence that comes from the rank before
    receives: Bool[Tensor, " R"]  # whether one does
    outgoing: Int[Tensor, " R"]  # the sequence that goes on at the next rank
    sends: Bool[Tensor, " R"]  # whether one does

    def initial_states(self, state: Tensor, empty: float = 0.0) -> Tensor:
        """The states of sequences that begin here, others empty."""
        return where_rows(self.begins, state, empty)

    def with_incoming(self, initial_states: Tensor, state: Tensor) -> Tensor:
        """The initial states, and those that other ranks have sent."""
        own = initial_states.index_select(0, self.incoming)
        state = where_rows(self.receives, state.to(initial_states.dtype), own)
        return initial_states.index_copy(0, self.incoming, state)

    def offsets_for_map(self) -> Tensor | None:
        """The offsets of the call for the map; None of a batch."""
        if self.cu_seqlens is None:
            return None
        start, end = (self.cu_seqlens[self.outgoing + i] for i in (0, 1))
        end = torch.where(self.sends, end, start)
        return torch.cat([torch.zeros_like(start), start, end])

    def states_for_map(self, own: Tensor, empty: float = 0.0) -> Tensor:
        """The call's initial states, given the outgoing sequences'."""
        if self.cu_seqlens is None:
            return own
        return torch.cat([torch.full_like(own, empty), own])

    def outgoing_of_map(self, state: Tensor, empty: float = 0.0) -> Tensor:
        """The call's final states of the outgoing sequences."""
        if self.cu_seqlens is not None:
            state = state[1:]
        return where_rows(self.sends, state, empty)

    def where_passing(self, x: Tensor, empty: float = 0.0) -> Tensor:
        """x where a sequence comes in and goes on, else ``empty``.

        All of the rank's tokens are then that sequence's.
        """
        same = (self.incoming == self.outgoing) & self.receives & self.sends
        return where_rows(same, x, empty)

    def final_states(
        self, state: Tensor, last: Tensor | None = None
    ) -> Tensor:
        """Final states: a batch's ``last``, if that is known.

        Else each is the ``state`` on the rank that has its last token.
        """
        pack = self.cu_seqlens is not None
        if last is not None and not pack:
            return last.to(state.dtype)
        x = where_rows(self.ends, state, 0)
        if pack and not self.ranks.share_final_states:
            return x
        return self.ranks.sum(x)


def where_rows(
    rows: Bool[Tensor, " N"], x: Tensor, y: Tensor | float
) -> Tensor:
    """x [N, ...] in these rows, y in the others."""
    return torch.where(rows.view(-1, *[1] * (x.dim() - 1)), x, y)


def shard_of(
    ranks: Ranks, x: Tensor, T: int, cu_seqlens: Int[Tensor, " N+1"] | None
) -> Shard:
    """This rank's shard of a batch or pack x [B, ...], of T tokens."""
    counts, last = ranks.counts(T), ranks.rank == ranks.size - 1
    if cu_seqlens is None:
        rows = torch.arange(len(x), device=x.device)
        every = torch.ones_like(rows, dtype=torch.bool)
        begins, ends = every & (ranks.rank == 0), every & last
        return Shard(ranks, None, begins, ends, rows, ~begins, rows, every)
    if is_readable(cu_seqlens):
        check_offsets(cu_seqlens.tolist(), sum(counts))
    start = ranks.tokens_before(T)
    return shard_of_pack(ranks, cu_seqlens, start, start + T, last)


def shard_of_pack(
    ranks: Ranks,
    cu_seqlens: Int[Tensor, " N+1"],
    start: int,
    end: int,
    last: bool,
) -> Shard:
    """The shard of a pack's tokens from start up to end, maybe none.

    ``last``: whether no rank follows. An empty sequence begins and ends with
    the rank that has the token after it, or with the last one.
    """
    first, stop = cu_seqlens[:-1], cu_seqlens[1:]
    begins = (first >= start) & ((first < end) | last)
    ends = (stop > start) & (stop <= end)
    ends = torch.where(first == stop, begins, ends)

    def crossing(border: int) -> tuple[Tensor, Tensor]:
        row = (stop <= border).sum()[None].clamp(max=len(stop) - 1)
        return row, (first[row] < border) & (border < stop[row])

    offsets = (cu_seqlens - start).clamp(0, end - start)
    borders = *crossing(start), *crossing(end)
    return Shard(ranks, offsets, begins, ends, *borders)


def run_over_ranks(
    shard: Shard,
    run: Callable[[Tensor, Tensor | None], Any],
    initial_states: Tensor,
    M: Float[Tensor, "R *heads K K_or_1"],
    B: Float[Tensor, "R *heads K V"],
    *,
    matrix: bool = False,
) -> tuple[Any, ...]:
    """Call run(states, offsets) -> (..., final states) as over all ranks.

    This rank's map is M, a matrix or factors of a state's rows, and B.
    """
    incoming, last, _ = prefix_over_ranks(shard.ranks, M, B, matrix)
    states = shard.with_incoming(initial_states, incoming)
    *results, state = run(states, shard.cu_seqlens)
    return *results, shard.final_states(state, last)


def run_additive_over_ranks(
    shard: Shard,
    run: Callable[[Tensor, Tensor | None], Any],
    initial_states: Tensor,
    decay: Tensor,
) -> tuple[Any, ...]:
    """Call run as :func:`run_over_ranks`, for an additive rule with decays.

    decay has the factors of all tokens here, [N, ...], which are a sequence's
    that comes in and goes on. What they add is what they make of no state.
    """
    own = initial_states.index_select(0, shard.outgoing)
    *_, state = run(shard.states_for_map(own), shard.offsets_for_map())
    M, B = shard.where_passing(decay), shard.outgoing_of_map(state)
    return run_over_ranks(shard, run, initial_states, M, B)


def total_decay(
    g: Float[Tensor, "B T HV *K"] | None, q: Tensor
) -> Float[Tensor, "B HV_or_1 K_or_1 1"]:
    """The factors of a state's rows over all of q's tokens."""
    if g is None:
        return q.new_ones(len(q), 1, 1, 1)
    g = g.sum(1, dtype=torch.float64).exp()
    return g[..., None] if g.dim() == 3 else g[..., None, None]


def pad_to_one_token(*tensors: Any) -> list[Any]:
    """Add a token of zeros to each [B, 0, ...]; leave others as they are."""
    return [
        torch.cat([x, x.new_zeros(len(x), 1, *x.shape[2:])], 1)
        if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == 0
        else x
        for x in tensors
    ]
