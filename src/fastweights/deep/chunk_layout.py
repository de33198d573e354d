"""Tokens laid out in chunks, where rows may begin in the middle of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class ChunkPart(NamedTuple):
    """Tokens of every row that lie in one chunk of it."""

    tokens: slice | Int[Tensor, "B C"]
    """Where they stand in the call."""

    place: Int[Tensor, "B C"]
    """Where they stand in the chunk."""

    valid: Bool[Tensor, "B C"] | None
    """Whether the token exists; None: all do."""

    ends: bool | Bool[Tensor, " B"]
    """Whether these tokens complete the chunk."""

    def take(self, x: Tensor, empty: float | None = None) -> Tensor:
        """x [B, T, ...] at these tokens, [B, C, ...].

        ``empty`` stands in place of tokens that do not exist.
        """
        if isinstance(self.tokens, slice):
            y = x[:, self.tokens]
        else:
            y = torch.take_along_dim(x, _like(self.tokens, x), 1)
        return y if empty is None else self.fill_missing(y, empty)

    def fill_missing(self, y: Tensor, empty: Tensor | float) -> Tensor:
        """y [B, C, ...], with ``empty`` where no token exists."""
        return (
            y if self.valid is None else y.where(_like(self.valid, y), empty)
        )

    def where_ends(self, then: Tensor, other: Tensor) -> Tensor:
        """``then`` [B, ...] where the chunk ends, else ``other``."""
        return choose_rows(self.ends, then, other)


class ChunkLayout:
    """The layout of a call's T tokens in chunks of ``size``.

    Without ``position`` and ``lengths`` all rows begin with a chunk and have
    T tokens: the last part is shorter than a chunk if T asks for it, and
    nothing is masked. A call of one token is one part of one token. Else a
    row's tokens stand at their places in a grid of whole chunks, whose other
    places are masked.

    Args:
        size: tokens per chunk.
        T: tokens of the call, those of the longest row.
        position: tokens that each row has read before; None: none.
        lengths: tokens of each row now; None: T.
    """

    def __init__(
        self,
        size: int,
        T: int,
        device: torch.device,
        position: Int[Tensor, " B"] | None = None,
        lengths: Int[Tensor, " B"] | None = None,
    ) -> None:
        self.size, self.T, self.device = size, T, device
        self.regular = position is None and lengths is None
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        self.first = zero if position is None else position % size
        self.lengths = zero + T if lengths is None else lengths

    def __iter__(self) -> Iterator[ChunkPart]:
        if self.regular:
            for start in range(0, self.T, self.size):
                n = min(self.size, self.T - start)
                place = torch.arange(n, device=self.device)[None]
                yield ChunkPart(
                    slice(start, start + n), place, None, n == self.size
                )
        elif self.T == 1:
            valid = self.lengths > 0
            ends = valid & (self.first == self.size - 1)
            yield ChunkPart(
                slice(0, 1), self.first[:, None], valid[:, None], ends
            )
        else:
            slots = torch.arange(self.size, device=self.device)
            for start in range(0, self.T + self.size - 1, self.size):
                end = self.first + self.lengths
                token = (start + slots - self.first[:, None]).expand(
                    len(end), -1
                )
                valid = (token >= 0) & (token < self.lengths[:, None])
                yield ChunkPart(
                    token.clamp(0, self.T - 1),
                    slots.expand(token.shape),
                    valid,
                    end >= start + self.size,
                )

    def join(self, outputs: list[Tensor]) -> Tensor:
        """The outputs [B, C, ...] of all parts as one [B, T, ...]."""
        y = torch.cat(outputs, 1)
        if self.regular or self.T == 1:
            return y
        token = torch.arange(self.T, device=self.device)
        index = self.first[:, None] + token
        return torch.take_along_dim(y, _like(index, y), 1)


def choose_rows(
    rows: bool | Bool[Tensor, " B"], then: Tensor, other: Tensor
) -> Tensor:
    """``then`` [B, ...] in these rows (True: all), else ``other``."""
    if isinstance(rows, bool):
        return then if rows else other
    return then.where(_like(rows, then), other)


def _like(x: Tensor, y: Tensor) -> Tensor:
    """Append dimensions of 1 to x until it has as many as y."""
    return x.reshape(*x.shape, *[1] * (y.dim() - x.dim()))
