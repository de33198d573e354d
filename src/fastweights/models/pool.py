"""A pool of states: requests that come and go share one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from fastweights.decoding import NARROW
from fastweights.layers import LayerState

if TYPE_CHECKING:
    from fastweights.models.model import LanguageModel

NARROWED = frozenset(
    {
        "deltanet",
        "gated_deltanet",
        "gla",
        "kda",
        "lightning",
        "mamba2",
        "recurrence",
        "retention",
    }
)
"""Kinds of layer whose steps are :func:`fastweights.decode_step`."""


class StatePool:
    """The states of up to ``size`` sequences, one row of each tensor per row.

        pool = StatePool(model, size=64, capacity=4096)
        row = pool.take()                                 # a request comes
        with torch.no_grad():
            logits, _ = model(prompt[None], pool.at([row], len(prompt)))
            logits, _ = model(tokens, pool.at(rows, 1))   # rows go on together
        pool.give(row)                                    # and is done

    The tensors stay where they are from the first request to the last. Rows
    of a step are any of those that are taken, in any order, each once; -1
    fills a batch up. Packed prompts go in together: ``model(packed,
    pool.at(rows, longest), cu_seqlens)``.

    Args:
        model: whose states they are.
        size: rows.
        capacity: tokens per row that softmax attention has room for.
        dtype: of the recurrences' states S; None is theirs, fp32. bf16 is
            half the memory, for layers of the family, at an error that
            :data:`fastweights.decoding.NARROW` states.

    Raises:
        ValueError: S of some layer cannot have that dtype.
    """

    def __init__(
        self,
        model: LanguageModel,
        size: int,
        capacity: int,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        device = model.embedding.weight.device
        token = torch.zeros(size, 1, dtype=torch.int64, device=device)
        with torch.no_grad():
            _, states = model(token, model.new_states(size, capacity))
        self.states: list[LayerState] = [s for s in states if s is not None]
        if dtype is not None:
            self._keep_in(dtype, {*model.config.kinds})
        self.device, self.capacity = device, capacity
        self.free = list(range(size))[::-1]
        self.read = [0] * size
        for row in range(size):
            self._clear(row)

    def _keep_in(self, dtype: torch.dtype, kinds: set[str]) -> None:
        if other := sorted(kinds - NARROWED - {"softmax"}):
            raise ValueError(
                f"dtype: got {dtype} for a model with {', '.join(other)}, "
                f"need None, or layers of {', '.join(sorted(NARROWED))}"
            )
        if dtype not in (torch.float32, *NARROW):
            raise ValueError(
                f"dtype: got {dtype}, need torch.float32 or torch.bfloat16"
            )
        for state in self.states:
            if state.S is not None:
                state.S = state.S.to(dtype)

    def _clear(self, row: int) -> None:
        for state in self.states:
            for name, x in state.tensors().items():
                x[row] = -torch.inf if name == "m" else 0
        self.read[row] = 0

    def take(self) -> int:
        """A row for a new sequence, empty.

        Raises:
            RuntimeError: all of them are taken.
        """
        if not self.free:
            raise RuntimeError(
                f"pool: got a sequence more than its {len(self.read)} rows"
            )
        return self.free.pop()

    def give(self, row: int) -> None:
        """A row back: what it held is gone."""
        if row in self.free or not 0 <= row < len(self.read):
            raise ValueError(f"row: got {row}, need one that is taken")
        self._clear(row)
        self.free.append(row)

    def at(self, rows: Sequence[int], tokens: int) -> list[LayerState]:
        """States for one call of the model with these rows.

        Args:
            rows: the row of each sequence, taken before; -1 for none.
            tokens: the most tokens that the call has for one of them.
        """
        some = [row for row in rows if row >= 0]
        if taken := set(some) & set(self.free):
            raise ValueError(f"rows: got {min(taken)}, which is not taken")
        if len(set(some)) < len(some) or max(some, default=0) >= len(
            self.read
        ):
            raise ValueError(
                f"rows: got {list(rows)}, need rows below {len(self.read)}, "
                "each once"
            )
        used = max((self.read[row] for row in some), default=0)
        for row in some:
            self.read[row] += tokens
        index = torch.tensor(list(rows), device=self.device)
        return [state.at(index, used) for state in self.states]

    def keep(self, rows: Sequence[int]) -> Kept:
        """Copies of rows, before tokens that may turn out to be wrong."""
        index = torch.tensor(list(rows), device=self.device)
        states = [
            # Keys and values of later tokens are overwritten, not undone.
            {
                name: x.index_select(0, index)
                for name, x in state.tensors().items()
                if name not in ("keys", "values")
            }
            for state in self.states
        ]
        return Kept(index, states, [self.read[row] for row in rows])

    def restore(self, kept: Kept) -> None:
        """Rows as they were when they were kept."""
        for state, tensors in zip(self.states, kept.states, strict=True):
            for name, x in tensors.items():
                state.tensors()[name].index_copy_(0, kept.rows, x)
        for row, read in zip(kept.rows.tolist(), kept.read, strict=True):
            self.read[row] = read


class Kept:
    """Rows of a pool as they were: what :meth:`StatePool.keep` returns."""

    def __init__(
        self,
        rows: Int[Tensor, " B"],
        states: list[dict[str, Tensor]],
        read: list[int],
    ) -> None:
        self.rows, self.states, self.read = rows, states, read
