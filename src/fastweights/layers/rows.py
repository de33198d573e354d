"""Packed sequences as rows of a batch, for layers that have no other way."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from fastweights.layers.state import (
    LayerState,
    Offsets,
    lengths,
    sequence_of,
)


class Rows:
    """The sequences of a call, one per row, and back.

    Without ``cu_seqlens`` they are rows already. With it each gets a row as
    long as the longest, whose length is read back from the device: unlike
    the recurrences these layers need one number on the host then.

    Attributes:
        position: tokens that each row has read before; None without a state.
        lengths: tokens of each row now; None: all that x has.
    """

    def __init__(
        self, x: Tensor, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.count = lengths(x, cu_seqlens)
        self.position: Int[Tensor, " N"] | None = None
        self.lengths: Int[Tensor, " N"] | None = None
        if state is not None:
            self.position = state.get("position")
        if cu_seqlens is not None:
            self.lengths = self.count
            self.longest = max(int(self.count.max()), 1)
            token = torch.arange(x.shape[1], device=x.device)
            self.row = sequence_of(cu_seqlens, x.shape[1])
            self.place = token - cu_seqlens[self.row].to(token.dtype)
            # Tokens after the last sequence have a row that is cut off.
            N = self.count.shape[0]
            self.place = self.place.masked_fill(self.row == N, 0)

    def spread(self, x: Tensor) -> Tensor:
        """[1, T, ...] -> [N, longest, ...]; past a row's end it is 0."""
        if self.cu_seqlens is None:
            return x
        N = self.count.shape[0]
        rows = x.new_zeros(N + 1, self.longest, *x.shape[2:])
        return rows.index_put((self.row, self.place), x[0])[:N]

    def pack(self, y: Tensor) -> Tensor:
        """[N, longest, ...] -> [1, T, ...]; 0 after the last sequence."""
        if self.cu_seqlens is None:
            return y
        N = self.count.shape[0]
        y = y[self.row.clamp(max=N - 1), self.place]
        after = (self.row == N).view(-1, *[1] * (y.dim() - 1))
        return y.masked_fill(after, 0)[None]

    def after(self) -> Int[Tensor, " N"]:
        """How many tokens each row has read after the call."""
        if self.position is None:
            return self.count
        return self.position + self.count
