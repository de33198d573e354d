"""What ranks tell each other while the kernels of a call run.

The kernels cut long sequences into segments, find a map of each, and compose
these. A rank's tokens are a segment of segments: its own map is their product,
and its own state what they make of none. The ranks gather both, and each
composes the state that enters it, from where its kernels compose once more.
The backward does the same from the other end, with the forward's maps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastweights.ranks.group import Ranks
from fastweights.ranks.stretch import choose, stretch_of


def product(maps: Tensor) -> Tensor:
    """Of maps [R, n, ..., K, K] that of all n, of which the first is first."""
    while (n := maps.shape[1]) > 1:
        pairs = maps[:, 1::2] @ maps[:, : n - n % 2 : 2]
        maps = torch.cat([pairs, maps[:, -1:]], 1) if n % 2 else pairs
    return maps[:, 0]


def apply(M: Tensor, S: Tensor, *, back: bool = False) -> Tensor:
    """M S, or M^T S; M is a matrix, or the factors of S's rows, [.., K, 1]."""
    if M.shape[-1] != M.shape[-2]:
        return M * S
    return (M.mT if back else M) @ S


class Exchange:
    """Of one call. ``forward`` and ``backward`` have compose_kernel's tensors.

    ``maps`` are those of all ranks, [ranks, R, HV, K, K], or [.., K, 1] of the
    additive rule, and ``last`` is the state that leaves the last rank, which
    a batch's ``dstate`` is the gradient of. Sums of ranks are in fp64. If it
    is ``invariant``, equal ranks of a batch compose in_turn: see compose_all.
    """

    last: Tensor

    def __init__(
        self,
        ranks: Ranks,
        q: Tensor,
        cu_seqlens: Tensor | None,
        maps: Any = None,
        dstate: Tensor | None = None,
        *,
        invariant: bool = False,
    ) -> None:
        self.ranks, self.maps, self.dstate = ranks, maps, dstate
        own = ranks.tokens
        self.T = q.shape[1] if own is None else own[ranks.rank]
        self.stretch: Any = None
        if cu_seqlens is not None:
            self.stretch = stretch_of(ranks, q, self.T, cu_seqlens)
        equal = len(set(ranks.counts(self.T))) == 1
        self.in_turn = invariant and equal and cu_seqlens is None

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Offsets of the rank's own tokens."""
        return self.stretch and self.stretch.cu_seqlens

    def own_map(self, maps: Tensor | None, B: Tensor) -> Tensor:
        """This rank's, of those of its segments: [*heads, K, K or 1]."""
        K, wide = B.shape[-2], 1 if maps is None else maps.shape[-1]
        if maps is None or self.T == 0:
            one = torch.eye(K) if wide == K else torch.ones(K, 1)
            M = one.to(B).expand(*B.shape[:-1], -1)
        else:
            maps = maps[:-1] if self.stretch else maps
            M = maps.double().unflatten(0, (len(B), -1))
            M = product(M) if wide == K else M.prod(1)
        return self.stretch.through(M) if self.stretch else M

    def forward(
        self,
        entering: Tensor,
        borders: Tensor,
        leaving: Tensor,
        maps: Tensor | None,
        compose: Callable[[], None],
    ) -> None:
        """Make of ``entering`` what enters this rank's sequences."""
        if self.in_turn:
            first = self.ranks.gather(entering)[0]
            order = range(self.ranks.size)
            given = entering, borders, leaving, maps
            self.last = self.compose_all(*given, compose, first, order)
            wide = 1 if maps is None else maps.shape[-1]
            shape = self.ranks.size, *entering.shape[:-1], wide
            self.maps = entering.new_zeros(shape)  # a backward asks again
            return
        before = borders.clone(), leaving.clone()
        compose()
        s, B = self.stretch, leaving
        if s:
            leaves = s.leaves & (self.T > 0)
            B = choose(leaves, B.index_select(0, s.leaving), 0)
        M = self.own_map(maps, B).to(B.dtype)
        told = self.ranks.gather(torch.cat([M, B], -1))
        self.maps = told[..., : M.shape[-1]].contiguous()
        Ms, Bs = self.maps.double(), told[..., M.shape[-1] :].double()
        states = [torch.zeros_like(Bs[0]), Bs[0]]
        for M_r, B_r in zip(Ms[1:], Bs[1:], strict=True):
            states.append(apply(M_r, states[-1]) + B_r)
        *_, self.last = states
        state = states[self.ranks.rank].to(B.dtype)
        if s:
            own = entering.index_select(0, s.entering)
            entering.index_copy_(0, s.entering, choose(s.enters, state, own))
        elif self.ranks.rank:
            entering.copy_(state)
        borders.copy_(before[0])
        leaving.copy_(before[1])

    def backward(
        self,
        entering: Tensor,
        borders: Tensor,
        leaving: Tensor,
        maps: Tensor | None,
        compose: Callable[[], None],
    ) -> None:
        """Make of ``entering`` the gradient of what leaves the sequences."""
        if self.in_turn:
            grad = torch.zeros_like(entering)
            if self.dstate is not None:
                grad = self.ranks.gather(self.dstate).double().sum(0)
            order = range(self.ranks.size)[::-1]
            given = entering, borders, leaving, maps
            self.compose_all(*given, compose, grad, order)
            return
        before = borders.clone(), leaving.clone()
        compose()
        s, D = self.stretch, leaving
        if s:
            enters = s.enters & (self.T > 0)
            D = choose(enters, D.index_select(0, s.entering), 0)
        told = [D] if self.dstate is None else [D, self.dstate]
        D, *lasts = self.ranks.gather(torch.stack(told)).unbind(1)
        grad = torch.zeros_like(D[0], dtype=torch.float64)
        for x in lasts:  # of each rank's part in it
            grad = x.double().sum(0)
        for r in range(self.ranks.size - 1, self.ranks.rank, -1):
            grad = apply(self.maps[r].double(), grad, back=True) + D[r]
        if s:
            own = entering.index_select(0, s.leaving)
            grad = choose(s.leaves, grad.to(own.dtype), own)
            entering.index_copy_(0, s.leaving, grad)
        else:
            entering.copy_(grad)
        borders.copy_(before[0])
        leaving.copy_(before[1])

    def compose_all(
        self,
        entering: Tensor,
        borders: Tensor,
        leaving: Tensor,
        maps: Tensor | None,
        compose: Callable[[], None],
        state: Tensor,
        order: range,
    ) -> Tensor:
        """The segments of all ranks, as one that has them all composes them.

        In this order, with the same kernel, from this state on, for its bits:
        what leaves the last; ``entering`` becomes what enters this rank.
        """
        tensors = [x for x in (borders, leaving, maps) if x is not None]
        own = [x.clone() for x in tensors]
        told = [self.ranks.gather(x) for x in own]
        for r in order:
            for x, all_ranks in zip(tensors, told, strict=True):
                x.copy_(all_ranks[r])
            entering.copy_(state)
            if r == self.ranks.rank:
                here = entering.clone()
            compose()
            state = leaving.clone()
        entering.copy_(here)
        for x, mine in zip(tensors, own, strict=True):
            x.copy_(mine)
        return state
