"""What ranks send each other while the kernels of a call run.

The kernels cut long sequences into segments, find a map of each, and compose
these. A rank's tokens are a segment of segments: its own map is their product,
and its own state what they make of none. Each rank composes the maps of all
to the state that enters it (:mod:`fastweights.ranks.prefix`), and its kernels
compose once more from there. The backward does the same from the other end,
with the forward's maps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.kernels.recurrence.state_passing import (
    ComposeStates,
    ExchangeLaunches,
)
from fastweights.ranks.group import Ranks
from fastweights.ranks.prefix import prefix_over_ranks, suffix_over_ranks
from fastweights.ranks.shard import Shard, shard_of, where_rows


class Exchange:
    """The exchange of one call, by its method ``forward`` or ``backward``.

    Both are a state_passing.StateExchange. ``maps`` are those that
    prefix_over_ranks returns, ``last`` is the state that leaves the last rank
    if maps are gathered, ``dstate`` this rank's part in its gradient.
    ``batch_invariant``: equal ranks of a batch compose in turn (compose_all).
    """

    last: Any  # a Tensor, or None

    def __init__(
        self,
        ranks: Ranks,
        q: Tensor,
        cu_seqlens: Tensor | None,
        maps: Any = None,
        dstate: Tensor | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.ranks, self.maps, self.dstate = ranks, maps, dstate
        self.batch_invariant, counts = batch_invariant, ranks.tokens_per_rank
        self.T = q.shape[1] if counts is None else counts[ranks.rank]
        self.shard: Shard | None = None
        if cu_seqlens is not None:
            self.shard = shard_of(ranks, q, self.T, cu_seqlens)
        equal = cu_seqlens is None and len(set(ranks.counts(self.T))) == 1
        self.composes_in_turn = batch_invariant and equal

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Offsets of the rank's own tokens."""
        return self.shard and self.shard.cu_seqlens

    def own_map(self, products: Tensor | None, B: Tensor) -> Tensor:
        """M of this rank: the product up to the last of its segments."""
        K, wide = B.shape[-2], 1 if products is None else products.shape[-1]
        if products is None or self.T == 0:
            one = torch.eye(K) if wide == K else torch.ones(K, 1)
            M = one.to(B).expand(*B.shape[:-1], -1)
        else:
            products = products[:-1] if self.shard else products
            M = products.unflatten(0, (len(B), -1))[:, -1]
        return self.shard.where_passing(M) if self.shard else M

    def forward(
        self, states: ComposeStates, launches: ExchangeLaunches
    ) -> None:
        """Set ``entering`` to the states that enter this rank's sequences."""
        entering, size, s = states.entering, self.ranks.size, self.shard
        if self.composes_in_turn:
            first = self.ranks.gather(entering)[0]
            order = range(size)
            self.last = self.compose_all(states, launches, first, order)
            wide = 1 if states.maps is None else states.maps.shape[-1]
            shape = *entering.shape[:-1], wide + entering.shape[-1]
            self.maps = entering.new_zeros(size, *shape)  # a backward asks
            return
        launches.compose()
        B = states.leaving
        if s:
            sends = s.sends & (self.T > 0)
            B = where_rows(sends, B.index_select(0, s.outgoing), 0)
        M = self.own_map(states.products, B)
        matrix = M.shape[-1] == M.shape[-2]
        state, self.last, self.maps = prefix_over_ranks(
            self.ranks, M, B, matrix, self.batch_invariant, launches.overlap
        )
        if self.ranks.rank > 0:
            pack_row = s and (s.incoming, s.receives)
            self.add_entering(state, entering, pack_row, launches)

    def backward(
        self, states: ComposeStates, launches: ExchangeLaunches
    ) -> None:
        """Set ``entering`` to the gradient of the states that leave them."""
        entering, size, s = states.entering, self.ranks.size, self.shard
        if self.composes_in_turn:
            grad = torch.zeros_like(entering)
            if self.dstate is not None:
                grad = self.ranks.gather(self.dstate).double().sum(0).to(grad)
            order = range(size)[::-1]
            self.compose_all(states, launches, grad, order)
            launches.overlap()
            return
        launches.compose()
        D = states.leaving
        if s:
            receives = s.receives & (self.T > 0)
            D = where_rows(receives, D.index_select(0, s.incoming), 0)
        M, dlast = self.maps[..., : -D.shape[-1]], self.dstate
        state = suffix_over_ranks(
            self.ranks, M, D, dlast, self.batch_invariant, launches.overlap
        )
        if state is not None:
            pack_row = s and (s.outgoing, s.sends)
            self.add_entering(state, entering, pack_row, launches)

    @staticmethod
    def add_entering(
        state: Tensor,
        entering: Tensor,
        pack_row: tuple[Tensor, Tensor] | None,
        launches: ExchangeLaunches,
    ) -> None:
        """Add what other ranks sent to what enters, in a pack to one row."""
        if pack_row:
            row, passes = pack_row
            state = where_rows(passes, state.to(entering.dtype), 0)
            arriving = torch.zeros_like(entering).index_copy_(0, row, state)
            entering += arriving
        else:
            arriving = entering.copy_(state)
        launches.add_arriving(entering=arriving)

    def compose_all(
        self,
        states: ComposeStates,
        launches: ExchangeLaunches,
        state: Tensor,
        order: range,
    ) -> Tensor:
        """Compose the segments of all ranks, for the bits of one process.

        They are composed in this order, by the same kernel, from this state
        on. ``entering`` becomes what enters this rank; what leaves the last
        one is returned.
        """
        tensors = {"borders": states.borders, "leaving": states.leaving}
        if states.maps is not None:
            tensors["maps"] = states.maps
        gathered = {name: self.ranks.gather(x) for name, x in tensors.items()}
        for r in order:
            if r == self.ranks.rank:
                states.entering.copy_(state)
            group = {name: x[r].clone() for name, x in gathered.items()}
            launches.compose(entering=state, **group)
            state = group["leaving"]
        launches.compose()
        return state
