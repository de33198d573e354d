"""Packed sequences as rows of a batch, for layers that have no other way."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from fastweights import torch_internals
from fastweights.layers.common.state import LayerState, Offsets, token_counts
from fastweights.packing import group_by_length, sequence_ids

Compute = Callable[..., tuple[Tensor, LayerState]]


class UnpackedRows:
    """The sequences of a call, one per row, and back.

    Without ``cu_seqlens`` they are rows already. With it each gets a row as
    long as the longest, whose length is read back from the device: unlike
    the recurrences these layers need one number on the host then.

    Attributes:
        num_read: tokens that each row has read before; None without a state.
        lengths: tokens of each row now; None: all that x has.
    """

    def __init__(
        self, x: Tensor, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.num_tokens = token_counts(x, cu_seqlens, state)
        self.num_read = state and state.batch_field("num_read")
        self.lengths: Int[Tensor, " N"] | None = None
        if cu_seqlens is not None:
            self.lengths = self.num_tokens
            self.longest = max(int(self.num_tokens.max()), 1)
            token = torch.arange(x.shape[1], device=x.device)
            self.row = sequence_ids(cu_seqlens, x.shape[1])
            self.column = token - cu_seqlens[self.row].to(token.dtype)
            # Tokens after the last sequence have a row that is cut off.
            N = self.num_tokens.shape[0]
            self.column = self.column.masked_fill(self.row == N, 0)

    def spread(self, x: Tensor) -> Tensor:
        """[1, T, ...] -> [N, longest, ...]; past a row's end it is 0."""
        if self.cu_seqlens is None:
            return x
        N = self.num_tokens.shape[0]
        rows = x.new_zeros(N + 1, self.longest, *x.shape[2:])
        return rows.index_put((self.row, self.column), x[0])[:N]

    def pack(self, y: Tensor) -> Tensor:
        """[N, longest, ...] -> [1, T, ...]; 0 after the last sequence."""
        if self.cu_seqlens is None:
            return y
        N = self.num_tokens.shape[0]
        y = y[self.row.clamp(max=N - 1), self.column]
        tail = (self.row == N).view(-1, *[1] * (y.dim() - 1))
        return y.masked_fill(tail, 0)[None]

    def num_read_after(self) -> Int[Tensor, " N"]:
        """The number of tokens that each row has read after the call."""
        if self.num_read is None:
            return self.num_tokens
        return self.num_read + self.num_tokens


def compute_by_length(
    compute: Compute, x: Tensor, state: LayerState | None, cu_seqlens: Offsets
) -> tuple[Tensor, LayerState]:
    """A layer's ``compute``, called once for packed sequences of like length.

    Then none is filled up to more than twice its own tokens; together all
    would be filled up to the longest. The lengths are read back from the
    device, but not in a graph, which keeps the one call.
    """
    groups = groups_of_like_length(x, cu_seqlens)
    if len(groups) < 2:
        return compute(x, state, cu_seqlens)
    outputs, fields = [], []
    for n, tokens in groups:
        old = state
        if state is not None and state.rows is not None:
            old = state.as_pool_unchecked(state.rows[n], state.read_at_most)
        elif state is not None:
            old = state.select(n)
        offsets = F.pad(token_counts(x, cu_seqlens)[n].cumsum(0), (1, 0))
        y, new = compute(x[:, tokens], old, offsets)
        outputs.append(y)
        fields.append(new.tensors())
    ns, ts = (torch.cat(index) for index in zip(*groups, strict=True))
    y = torch.cat(outputs, 1)
    y = y.new_zeros(1, x.shape[1], y.shape[2]).index_copy(1, ts, y)
    order = ns.argsort()
    state = LayerState()
    for name in fields[0]:
        setattr(state, name, torch.cat([x[name] for x in fields])[order])
    return y, state


def groups_of_like_length(
    x: Tensor, cu_seqlens: Offsets
) -> list[tuple[Int[Tensor, " n"], Int[Tensor, " t"]]]:
    """Groups of sequences to take together, and their tokens in a row.

    There are none where all may be taken together.
    """
    if torch_internals.is_traced():
        return []
    offsets = cu_seqlens.tolist()
    spans = [range(*span) for span in itertools.pairwise(offsets)]
    lengths = [*map(len, spans)]
    if max(lengths) * len(spans) <= 2 * offsets[-1]:
        return []
    return [
        (
            torch.tensor(ns, device=x.device),
            torch.tensor([t for n in ns for t in spans[n]], device=x.device),
        )
        for ns in group_by_length(lengths)
    ]
