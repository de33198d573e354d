"""The sequences of a batch or of a pack: how many, and where each lies.

Also the states that they begin with, and which are computed together.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweights.arguments import check_offsets
from fastweights.dtypes import compute_dtype

Offsets = Int[Tensor, " N+1"]
"""cu_seqlens: where each sequence of a pack begins, and the last ends."""


def num_sequences(x: Tensor, cu_seqlens: Offsets | None) -> int:
    """The number of sequences in x [B, T, ...]: B, or those of a pack."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def states_or_zeros(
    x: Tensor,
    shape: Sequence[int],
    states: Tensor | None,
    cu_seqlens: Offsets | None,
) -> Tensor:
    """The states of x's sequences, copied; zeros of ``shape`` each if None."""
    if states is not None:
        return states.clone(memory_format=torch.contiguous_format)
    N, dtype = num_sequences(x, cu_seqlens), compute_dtype(x.dtype)
    return x.new_zeros(N, *shape, dtype=dtype)


def sequence_spans(
    cu_seqlens: Offsets | None, T: int
) -> list[tuple[slice, slice]]:
    """The states and the tokens of each sequence that is not empty."""
    if cu_seqlens is None:
        return [(slice(None), slice(None))]
    offsets = cu_seqlens.tolist()
    check_offsets(offsets, T)
    return [
        (slice(n, n + 1), slice(a, b))
        for n, (a, b) in enumerate(itertools.pairwise(offsets))
        if a < b
    ]


def tail_mask(cu_seqlens: Offsets, T: int) -> Bool[Tensor, " T"]:
    """Whether each of T packed tokens stands after the last sequence."""
    return torch.arange(T, device=cu_seqlens.device) >= cu_seqlens[-1]


def sequence_ids(cu_seqlens: Offsets, T: int) -> Int[Tensor, " T"]:
    """The sequence that each of T packed tokens belongs to.

    N, one more than the last, for tokens after all of the N sequences.
    """
    token = torch.arange(T, device=cu_seqlens.device)
    return torch.bucketize(token, cu_seqlens[1:].to(token.dtype), right=True)


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups of sequences to pad to one length, none to twice its own.

    An empty one goes with the shortest of the others.
    """
    shortest = min(filter(None, lengths), default=1)
    groups = defaultdict(list)
    for n, length in enumerate(lengths):
        groups[(max(length, shortest) - 1).bit_length()].append(n)
    return [*groups.values()]


class Piece(NamedTuple):
    """Sequences that are computed together: their states and tokens.

    Short ones of a pack are rows of one length, filled up with zeros: a zero
    key and a zero log decay leave the state as it is.
    """

    states: Any  # an index of [N, ...]
    tokens: Any  # an index of [B, T, ...], for [rows, length, ...]
    chunk_size: int
    valid: Bool[Tensor, "rows length"] | None = None  # what is no filling

    def select(self, *tensors: Tensor | None) -> list[Any]:
        """Take these rows and tokens of each tensor; a None stays None."""
        return [None if x is None else self.take(x) for x in tensors]

    def take(self, x: Tensor) -> Tensor:
        values = x[self.tokens]
        if self.valid is None:
            return values
        lead = self.valid.shape + (1,) * (values.dim() - 2)
        return values.masked_fill_(~self.valid.view(lead), 0)

    def put(self, x: Tensor, values: Tensor) -> None:
        """Put the piece's values into x, whose last dimension may be wider."""
        width = values.shape[-1]
        if self.valid is None:
            x[self.tokens][..., :width] = values
        else:
            index = self.tokens[1][self.valid]
            x[0, index, ..., :width] = values[self.valid].to(x.dtype)


def pack_pieces(
    cu_seqlens: Offsets,
    x: Float[Tensor, "1 T ..."],
    chunk_size: int,
    number_at_once: Callable[[int], int],
) -> list[Piece]:
    """A piece for each sequence longer than a chunk; then those of the others.

    Short sequences are rows with some of like length: none is filled up to
    twice its own. ``number_at_once`` is of those of a length.
    """
    T, pieces, short = x.shape[1], [], []
    for n, t in sequence_spans(cu_seqlens, T):
        if t.stop - t.start > chunk_size:
            pieces.append(Piece(n, (slice(None), t), chunk_size))
        else:
            short.append((n.start, t))
    for group in group_by_length([t.stop - t.start for _, t in short]):
        alike = [short[i] for i in group]
        count = max(1, number_at_once(max(t.stop - t.start for _, t in alike)))
        for i in range(0, len(alike), count):
            ns, ts = zip(*alike[i : i + count], strict=True)
            starts, stops = torch.tensor([(t.start, t.stop) for t in ts]).T
            longest = max(t.stop - t.start for t in ts)
            token = starts[:, None] + torch.arange(longest)
            valid = token < stops[:, None]
            index = (torch.tensor(ns), token.clamp(max=T - 1), valid)
            states, token, valid = (i.to(x.device) for i in index)
            pieces.append(Piece(states, (0, token), longest, valid))
    return pieces
