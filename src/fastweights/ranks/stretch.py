"""What a rank has of the sequences of a call, and the maps that ranks compose.

Whatever its length, a stretch of tokens maps the state that enters it, S to
M S + B. Chunks compose such maps within a multiprocessor and segments within
a GPU; here ranks do. Each sends one map for each sequence that goes on at the
next rank: of a batch every row, of a pack at most one sequence. M is 0 for a
sequence that begins on the rank, and its initial state is then in B. From
the maps of the ranks before it a rank composes the states that enter it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweights.arguments import check_offsets, is_readable
from fastweights.ranks.group import Ranks


class Stretch(NamedTuple):
    """What a rank has of a call's N sequences, and which pass its borders.

    Rows are indices of sequences: of a batch all, of a pack one, which means
    nothing where no sequence passes. ``empty`` is what an empty state holds.
    """

    ranks: Any  # Ranks; None in a plan
    cu_seqlens: Int[Tensor, " N+1"] | None  # of the rank's own tokens
    begins: Bool[Tensor, " N"]  # whose first token is here
    ends: Bool[Tensor, " N"]  # whose last one is
    entering: Int[Tensor, " R"]
    enters: Bool[Tensor, " R"]
    leaving: Int[Tensor, " R"]
    leaves: Bool[Tensor, " R"]

    def first(self, state: Tensor, empty: float = 0.0) -> Tensor:
        """The states of sequences that begin here; others are empty."""
        return choose(self.begins, state, empty)

    def enter(self, first: Tensor, state: Tensor) -> Tensor:
        """The first states, and those that come from the ranks before."""
        own = first.index_select(0, self.entering)
        state = choose(self.enters, state.to(first.dtype), own)
        return first.index_copy(0, self.entering, state)

    def map_offsets(self) -> Tensor | None:
        """Of a pack two sequences: all before the one that leaves, and it."""
        if self.cu_seqlens is None:
            return None
        start, end = (self.cu_seqlens[self.leaving + i] for i in (0, 1))
        end = torch.where(self.leaves, end, start)
        return torch.cat([torch.zeros_like(start), start, end])

    def map_start(self, first: Tensor, empty: float = 0.0) -> Tensor:
        """Their first states, of ``first`` of those that leave."""
        if self.cu_seqlens is None:
            return first
        return torch.cat([torch.full_like(first, empty), first])

    def leave(self, state: Tensor, empty: float = 0.0) -> Tensor:
        """Of their last states those that go on at the next rank."""
        if self.cu_seqlens is not None:
            state = state[1:]
        return choose(self.leaves, state, empty)

    def through(self, x: Tensor, empty: float = 0.0) -> Tensor:
        """x, of sequences that enter and leave; they have all tokens here."""
        same = self.enters & self.leaves & (self.entering == self.leaving)
        return choose(same, x, empty)

    def finish(self, state: Tensor, last: Tensor | None = None) -> Tensor:
        """The final states: of a batch ``last``, if what leaves is known.

        Else each is the ``state`` on the rank that has its last token.
        """
        pack = self.cu_seqlens is not None
        if last is not None and not pack:
            return last.to(state.dtype)
        own = choose(self.ends, state, 0)
        return own if pack and not self.ranks.states else self.ranks.sum(own)


def choose(rows: Bool[Tensor, " N"], x: Tensor, y: Tensor | float) -> Tensor:
    """x [N, ...] in these rows, y in the others."""
    return torch.where(rows.view(-1, *[1] * (x.dim() - 1)), x, y)


def stretch_of(
    ranks: Ranks, x: Tensor, T: int, cu_seqlens: Int[Tensor, " N+1"] | None
) -> Stretch:
    """This rank's, of a batch or pack x [B, ...] with T tokens here."""
    counts, last = ranks.counts(T), ranks.rank == ranks.size - 1
    if cu_seqlens is None:
        rows = torch.arange(len(x), device=x.device)
        every = torch.ones_like(rows, dtype=torch.bool)
        begins, ends = every & (ranks.rank == 0), every & last
        return Stretch(ranks, None, begins, ends, rows, ~begins, rows, every)
    if is_readable(cu_seqlens):
        check_offsets(cu_seqlens.tolist(), sum(counts))
    start = ranks.start(T)
    found = stretch_of_pack(cu_seqlens, start, start + T, last)
    return found._replace(ranks=ranks)


def stretch_of_pack(
    cu_seqlens: Int[Tensor, " N+1"], start: int, end: int, last: bool
) -> Stretch:
    """That of the tokens from start up to end, which may be none.

    ``last``: whether no rank follows. An empty sequence begins and ends with
    the rank that has the token after it, or with the last one.
    """
    first, stop = cu_seqlens[:-1], cu_seqlens[1:]
    begins = (first >= start) & ((first < end) | last)
    ends = (stop > start) & (stop <= end)
    ends = torch.where(first == stop, begins, ends)

    def passing(border: int) -> tuple[Tensor, Tensor]:
        row = (stop <= border).sum()[None].clamp(max=len(stop) - 1)
        return row, (first[row] < border) & (border < stop[row])

    own = (cu_seqlens - start).clamp(0, end - start)
    return Stretch(None, own, begins, ends, *passing(start), *passing(end))


def over_ranks(
    stretch: Stretch,
    run: Callable[[Tensor, Tensor | None], Any],
    first: Tensor,
    M: Float[Tensor, "R *heads K K_or_1"],
    B: Float[Tensor, "R *heads K V"],
    *,
    matrix: bool = False,
) -> tuple[Any, ...]:
    """run(states, offsets), a tuple that ends with states, over all ranks.

    M is a matrix, or a factor for each row or entry of a state. Maps travel
    in B's dtype, side by side, and are composed in fp64, which TF32 does not
    round.
    """
    ranks: Any = stretch.ranks
    M = M.to(B.dtype).expand(*B.shape[:-1], -1)
    if ranks.doubles():
        entering = stretch.enter(first, double(ranks, M, B, matrix=matrix))
        *results, state = run(entering, stretch.cu_seqlens)
        return *results, stretch.finish(state)
    maps = ranks.gather(torch.cat([M, B], -1)).double()
    M, B = maps.split([M.shape[-1], B.shape[-1]], -1)
    states = [torch.zeros_like(B[0]), B[0]]
    for M_r, B_r in zip(M[1:], B[1:], strict=True):
        before = states[-1]
        states.append((M_r @ before if matrix else M_r * before) + B_r)
    entering = pick(states, ranks)
    *results, state = run(stretch.enter(first, entering), stretch.cu_seqlens)
    return *results, stretch.finish(state, states[-1])


def double(
    ranks: Ranks,
    M: Tensor,
    B: Tensor,
    *,
    matrix: bool = False,
    back: bool = False,
    work: Any = None,
) -> Tensor:
    """What the ranks before this one make of zero; back: those after it.

    In round i each rank hands the map of 2^i ranks up to its own to the rank
    2^i further on. What comes goes before its own, and before what it has of
    the ranks before it: ceil(log2 ranks) rounds.
    """
    own: Any = M.double(), B.double()
    before: Any = None

    def compose(first: Any, then: Any) -> Any:
        M, B = then
        N, C = [M @ x if matrix else M * x for x in first]
        return N, C + B

    for i in range((ranks.size - 1).bit_length()):
        told = torch.cat(own, -1).to(B.dtype)
        told = ranks.hop(told, -(2**i) if back else 2**i, work)
        got: Any = told.double().tensor_split([M.shape[-1]], -1)
        before = compose(got, before) if before else got
        own, work = compose(got, own), None
    return before[1]


def additive_over_ranks(
    stretch: Stretch,
    run: Callable[[Tensor, Tensor | None], Any],
    first: Tensor,
    decay: Tensor,
) -> tuple[Any, ...]:
    """:func:`over_ranks` of a state that its tokens decay and add to.

    decay has the factors of all tokens here, [N, ...], which are a sequence's
    that goes through. What they add is the state that they leave of none.
    """
    own = stretch.map_start(first.index_select(0, stretch.leaving))
    *_, state = run(own, stretch.map_offsets())
    B = stretch.leave(state)
    return over_ranks(stretch, run, first, stretch.through(decay), B)


def pick(states: list[Tensor], ranks: Ranks) -> Tensor:
    """This rank's, of the states before each rank.

    As a part of all of them: a backward then asks for the gradient of what
    was gathered on every rank, the first one too.
    """
    return torch.stack(states)[ranks.rank]


def total_decay(
    g: Float[Tensor, "B T HV *K"] | None, q: Tensor
) -> Float[Tensor, "B HV_or_1 K_or_1 1"]:
    """The factors of a state's rows over all of q's tokens."""
    if g is None:
        return q.new_ones(len(q), 1, 1, 1)
    g = g.sum(1, dtype=torch.float64).exp()
    return g[..., None] if g.dim() == 3 else g[..., None, None]


def with_a_token(*tensors: Any) -> list[Any]:
    """Each [B, T, ...] with a token of zeros if T is 0; others as they are."""
    return [
        torch.cat([x, x.new_zeros(len(x), 1, *x.shape[2:])], 1)
        if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == 0
        else x
        for x in tensors
    ]
