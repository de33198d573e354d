"""Maps of states, composed over ranks: by an all-gather, or by doubling.

A rank's tokens map the state S that enters it to M S + B, where M is a
matrix, or a factor for each row or entry of S. Maps travel in B's dtype, M
and B side by side, and are composed in fp64, which TF32 does not round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.ranks.group import Overlap, Ranks

# An all-gather costs one call, but P - 1 hops and maps, doubling log2 P of
# each. By the constants of chapter 16 that is 101 us against 121 in a box of
# 8, and 734 against 308 on 16 ranks.
MAX_GATHERED = 8


def gathers_maps(ranks: Ranks, batch_invariant: bool = False) -> bool:
    """Whether maps are gathered: by few ranks, or to be batch-invariant."""
    return ranks.size <= MAX_GATHERED or batch_invariant


def prefix_over_ranks(
    ranks: Ranks,
    M: Tensor,
    B: Tensor,
    matrix: bool,
    batch_invariant: bool = False,
    overlap: Overlap = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compose the maps of ranks, of which this one's is M, B.

    Returns:
        the state that enters this rank; that which leaves the last one, None
        if maps are not gathered; and all ranks' maps, or only this one's,
        [ranks or 1, ...].
    """
    own = torch.cat([M.to(B.dtype).expand(*B.shape[:-1], -1), B], -1)
    V = B.shape[-1]
    if not gathers_maps(ranks, batch_invariant):
        arguments = own.double().tensor_split([-V], -1), B.dtype, matrix
        state = _prefix_by_doubling(ranks, *arguments, overlap)
        return state, None, own[None]
    maps = ranks.gather(own, overlap)
    M, B = maps.double().tensor_split([-V], -1)
    states = _compose_states(M, B, None, matrix)
    # A part of what was gathered: a backward asks each rank for its gradient.
    states[0] = B[:0].sum(0)
    return states[ranks.rank], states[-1], maps


def suffix_over_ranks(
    ranks: Ranks,
    M: Tensor,
    D: Tensor,
    dlast: Tensor | None,
    batch_invariant: bool,
    overlap: Overlap,
) -> Tensor | None:
    """Compose gradients from the last rank on: M^T dS + D enters a rank.

    M are those of all maps that prefix_over_ranks returned, D is this rank's,
    and dlast its part in the gradient of the state that leaves the last rank.

    Returns:
        the gradient of the state that leaves this rank; None for zeros.
    """
    matrix, M = M.shape[-1] == M.shape[-2], M.double()
    M = M.mT if matrix else M
    if not gathers_maps(ranks, batch_invariant):
        arguments = (M[0], D.double()), D.dtype, matrix, overlap
        state = _prefix_by_doubling(ranks, *arguments, back=True)
        return None if ranks.rank == ranks.size - 1 else state
    own = torch.stack([D] if dlast is None else [D, dlast])
    D, *parts = ranks.gather(own, overlap).double().unbind(1)
    dS = parts[0].sum(0) if parts else None
    from_last = slice(None, ranks.rank, -1)  # from the last rank on
    maps = M.unbind()[from_last], D.unbind()[from_last]
    return _compose_states(*maps, dS, matrix)[-1]


def _compose_states(M: Any, B: Any, state: Any, matrix: bool) -> list[Any]:
    """``state``, None for zeros, and those after each map in turn."""
    states = [state]
    for M_r, B_r in zip(M, B, strict=True):
        if state is not None:
            B_r = (M_r @ state if matrix else M_r * state) + B_r
        state = B_r
        states.append(state)
    return states


def _prefix_by_doubling(
    ranks: Ranks,
    own: Any,
    dtype: torch.dtype,
    matrix: bool,
    overlap: Overlap,
    back: bool = False,
) -> Tensor:
    """Compose the maps of the ranks before this one; back: after it.

    In round i each rank hands the map of 2^i ranks up to its own to the rank
    2^i further on. What comes goes before its own, and before what it has of
    the ranks before it: ceil(log2 ranks) rounds.
    """
    before: Any = None

    def compose(first: Any, then: Any) -> Any:
        M, B = then
        N, C = [M @ x if matrix else M * x for x in first]
        return N, C + B

    for i in range((ranks.size - 1).bit_length()):
        step, width = 2**i, own[0].shape[-1]
        sent = torch.cat(own, -1).to(dtype)
        received = ranks.shift(sent, -step if back else step, overlap).double()
        first = received.tensor_split([width], -1)
        before = compose(first, before) if before else first
        own, overlap = compose(first, own), None
    return before[1]
