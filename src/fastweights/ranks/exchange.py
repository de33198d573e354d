"""What ranks tell each other while the kernels of a call run.

The kernels cut long sequences into segments, find a map of each, and compose
these. A rank's tokens are a segment of segments: its own map is their product,
and its own state what they make of none. The ranks gather both, and each
composes the state that enters it, from where its kernels compose once more; or
many of them find it by doubling. The backward does the same from the other
end, with the forward's maps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastweights.ranks.group import Ranks
from fastweights.ranks.stretch import choose, double, stretch_of


def onward(
    M: Tensor, S: Tensor | None, B: Tensor, *, back: bool = False
) -> Tensor:
    """M S + B, or M^T S + B; M is a matrix, or the factors of S's rows.

    In fp64, which TF32 does not round; B is, and S if there is one.
    """
    if S is None:
        return B
    M = M.double()
    if M.shape[-1] != M.shape[-2]:
        return M * S + B
    return (M.mT if back else M) @ S + B


class Exchange:
    """Of one call. ``forward`` and ``backward`` have compose_kernel's tensors.

    And the launches that are left to them, as schedule.Schedule says. ``told``
    is what all ranks told forward, each its map and the state that it leaves,
    [ranks, R, HV, K, K + V], or 1 + V of the additive rule. ``last`` is the
    state that leaves the last rank, which a batch's ``dstate`` is the gradient
    of. Sums of ranks are in fp64. If it is ``invariant``, equal ranks of a
    batch compose in_turn: see compose_all. If it ``doubles``, told is what
    this rank told, and there is neither last nor dstate.
    """

    last: Tensor

    def __init__(
        self,
        ranks: Ranks,
        q: Tensor,
        cu_seqlens: Tensor | None,
        told: Any = None,
        dstate: Tensor | None = None,
        *,
        invariant: bool = False,
    ) -> None:
        self.ranks, self.told, self.dstate = ranks, told, dstate
        self.doubles = ranks.doubles(invariant)
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

    def own_map(self, through: Tensor | None, B: Tensor) -> Tensor:
        """This rank's, the last of those through its segments, beside B."""
        K, wide = B.shape[-2], 1 if through is None else through.shape[-1]
        if through is None or self.T == 0:
            one = torch.eye(K) if wide == K else torch.ones(K, 1)
            M = one.to(B).expand(*B.shape[:-1], -1)
        else:
            through = through[:-1] if self.stretch else through
            M = through.unflatten(0, (len(B), -1))[:, -1]
        return self.stretch.through(M) if self.stretch else M

    def forward(
        self,
        tensors: list[Any],
        compose: Callable[..., None],
        meanwhile: Callable[[], None],
        arrive: Callable[[Tensor], None],
    ) -> None:
        """Make of ``entering`` what enters this rank's sequences."""
        entering, _, leaving, maps, through = tensors
        rank, size, s = self.ranks.rank, self.ranks.size, self.stretch
        if self.in_turn:
            first = self.ranks.gather(entering)[0]
            given = tensors, compose, first, range(size)
            self.last = self.compose_all(*given)
            wide = 1 if maps is None else maps.shape[-1]
            shape = *entering.shape[:-1], wide + entering.shape[-1]
            self.told = entering.new_zeros(size, *shape)  # a backward asks
            return
        compose()
        B = leaving
        if s:
            leaves = s.leaves & (self.T > 0)
            B = choose(leaves, B.index_select(0, s.leaving), 0)
        own = torch.cat([self.own_map(through, B), B], -1)
        rows = s and (s.entering, s.enters)
        if self.doubles:
            self.told = own[None]
            state = self.double(B, meanwhile)
            self.add(state, entering, rows, arrive)
            return
        self.told = self.ranks.gather_meanwhile(own, meanwhile)
        M, B = self.told.double().tensor_split([-B.shape[-1]], -1)
        states: list[Any] = [None]
        for r in range(size):
            states.append(onward(M[r], states[-1], B[r]))
        self.last = states[-1]
        self.add(states[rank], entering, rows, arrive)

    def backward(
        self,
        tensors: list[Any],
        compose: Callable[..., None],
        meanwhile: Callable[[], None],
        arrive: Callable[[Tensor], None],
    ) -> None:
        """Make of ``entering`` the gradient of what leaves the sequences."""
        entering, _, leaving, *_ = tensors
        rank, size, s = self.ranks.rank, self.ranks.size, self.stretch
        grad = None
        if self.in_turn:
            grad = torch.zeros_like(entering)
            if self.dstate is not None:
                grad = self.ranks.gather(self.dstate).double().sum(0).to(grad)
            order = range(size)[::-1]
            self.compose_all(tensors, compose, grad, order)
            meanwhile()
            return
        compose()
        D = leaving
        if s:
            enters = s.enters & (self.T > 0)
            D = choose(enters, D.index_select(0, s.entering), 0)
        rows = s and (s.leaving, s.leaves)
        if self.doubles:
            grad = self.double(D, meanwhile, back=True)
            self.add(grad, entering, rows, arrive)
            return
        own = torch.stack([D] if self.dstate is None else [D, self.dstate])
        D, *lasts = (
            self.ranks.gather_meanwhile(own, meanwhile).double().unbind(1)
        )
        for x in lasts:  # of each rank's part in it
            grad = x.sum(0)
        for r in range(size - 1, rank, -1):
            M = self.told[r, ..., : -D.shape[-1]]
            grad = onward(M, grad, D[r], back=True)
        self.add(grad, entering, rows, arrive)

    def double(
        self, B: Tensor, work: Callable[[], None], *, back: bool = False
    ) -> Tensor | None:
        """What enters this rank of others, by stretch.double."""
        M = self.told[0, ..., : -B.shape[-1]]
        matrix = M.shape[-1] == M.shape[-2]
        M, end = (M.mT if back and matrix else M), back * (self.ranks.size - 1)
        options: Any = {"matrix": matrix, "back": back, "work": work}
        state = double(self.ranks, M, B, **options)
        return None if self.ranks.rank == end else state

    @staticmethod
    def add(
        state: Tensor | None,
        entering: Tensor,
        rows: tuple[Tensor, Tensor] | None,
        arrive: Callable[[Tensor], None],
    ) -> None:
        """What arrives, to what enters: of a pack in one row, if in any."""
        if state is None:
            return
        if rows:
            row, passes = rows
            state = choose(passes, state.to(entering.dtype), 0)
            arriving = torch.zeros_like(entering).index_copy_(0, row, state)
            entering += arriving
        else:
            arriving = entering.copy_(state)
        arrive(arriving)

    def compose_all(
        self,
        tensors: list[Any],
        compose: Callable[..., None],
        state: Tensor,
        order: range,
    ) -> Tensor:
        """The segments of all ranks, as one that has them all composes them.

        In this order, with the same kernel, from this state on, for its bits:
        what leaves the last; ``entering`` becomes what enters this rank.
        """
        entering, *given = tensors[:4]
        told = [self.ranks.gather(x) for x in given if x is not None]
        for r in order:
            if r == self.ranks.rank:
                entering.copy_(state)
            theirs = [x[r].clone() for x in told]
            compose(state, *theirs)
            _, state, *_ = theirs
        compose()
        return state
