"""A pool of states: requests that come and go share one batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fastweights.arguments import check_dtype, check_integers, check_sizes
from fastweights.layers import LayerState
from fastweights.layers.common.state import first_tokens
from fastweights.models.config import LAYERS
from fastweights.models.model import LanguageModel
from fastweights.ops.decode import NARROW_STATE_DTYPES
from fastweights.torch_internals import set_to_zero

Integers = Sequence[int] | Int[Tensor, " B"]


class StatePool:
    """The states of ``num_rows`` sequences, one row of each tensor for each.

        pool = StatePool(model, num_rows=64, tokens_per_row=4096)
        row = pool.acquire()                         # a request comes
        with torch.no_grad(), pool.states_for([row], len(prompt)) as states:
            logits, _ = model(prompt[None], states)
        tokens = logits[:, -1:].argmax(-1)           # [rows, 1]
        with torch.no_grad(), pool.states_for([row], 1) as states:
            logits, _ = model(tokens, states)        # rows go on together
        pool.release(row)                            # and is done

    The tensors stay where they are from the first request to the last, and
    have the model's dtype, S and m fp32, whatever mode (autocast, inference)
    the pool is made or used in. Rows of a step are any of those that are
    taken, in any order, each once; -1 pads a batch. Packed prompts go in
    together, beside rows that go on by a token: ``states_for(rows, lengths)``,
    and ``model(packed, states, cu_seqlens)``.

    Args:
        model: whose states they are.
        num_rows: how many sequences it has room for.
        tokens_per_row: that softmax attention has room for.
        state_dtype: of the recurrences' states S; None is theirs, fp32 (fp64
            in an fp64 model). bf16 is half the memory, for layers of the
            family, at an error that
            :data:`fastweights.serving.NARROW_STATE_DTYPES` states.

    Raises:
        ValueError: S of some layer cannot have that dtype.
    """

    def __init__(
        self,
        model: LanguageModel,
        num_rows: int,
        tokens_per_row: int,
        *,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if not hasattr(model, "preallocate_states"):
            raise TypeError(
                f"model: got {type(model).__name__}, need a LanguageModel"
            )
        check_sizes(num_rows=num_rows, tokens_per_row=tokens_per_row)
        check_dtype(state_dtype, "state_dtype")
        device = model.embedding.weight.device
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            token = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)
            empty = model.preallocate_states(num_rows, tokens_per_row)
            _, states = model(token, empty)
            self.states: list[LayerState] = [
                state for state in states if state is not None
            ]
            if state_dtype is not None:
                self._narrow_to(state_dtype, {*model.config.layer_types})
        self.device, self.num_rows = device, num_rows
        self.tokens_per_row = tokens_per_row
        # The last is the next to be acquired.
        self.free = dict.fromkeys(reversed(range(num_rows)))
        self.tokens_read = [0] * num_rows
        """Tokens that each row has read, at most."""
        self.has_keys = any(s.keys is not None for s in self.states)
        self._clear(slice(None))

    def _narrow_to(self, dtype: torch.dtype, layer_types: set[str]) -> None:
        family = {
            x
            for x, layer in LAYERS.items()
            if getattr(layer, "supports_bf16_state", False)
        }
        if others := sorted(layer_types - family - {"softmax"}):
            raise ValueError(
                f"state_dtype: got {dtype} for a model with "
                f"{', '.join(others)}, need None, or layers of "
                f"{', '.join(sorted(family))}"
            )
        if dtype not in (torch.float32, *NARROW_STATE_DTYPES):
            raise ValueError(
                f"state_dtype: got {dtype}, need torch.float32 or "
                "torch.bfloat16"
            )
        for state in self.states:
            if state.S is None:
                continue
            if state.S.dtype == torch.float64:
                raise ValueError(
                    f"state_dtype: got {dtype} for a model in torch.float64, "
                    "need None"
                )
            state.S = state.S.to(dtype)

    def _clear(self, rows: int | slice) -> None:
        fields = [pair for s in self.states for pair in s.tensors().items()]
        set_to_zero([x[rows] for name, x in fields if name != "m"])
        for name, x in fields:
            if name == "m":
                x[rows] = -torch.inf

    def acquire(self) -> int:
        """Take an empty row for a new sequence.

        Raises:
            RuntimeError: all of them are taken.
        """
        if not self.free:
            raise RuntimeError(
                f"pool: got a sequence more than its {self.num_rows} rows"
            )
        row, _ = self.free.popitem()
        return row

    def release(self, row: int) -> None:
        """Clear a row and give it back."""
        (row,) = self._checked_rows("row", [row])
        self._clear(row)
        self.tokens_read[row] = 0
        self.free[row] = None

    def snapshot(self, row: int) -> list[LayerState]:
        """Copy a row's states, with the keys and values of its tokens only."""
        (row,) = self._checked_rows("row", [row])
        read = self.tokens_read[row]
        return [first_tokens(state, read).clone() for state in self._row(row)]

    def restore(self, row: int, snapshot: list[LayerState]) -> None:
        """Copy a snapshot to a row, which may be another than its own.

        Or states of the model's own calls: their tokens count if in keys.
        """
        (row,) = self._checked_rows("row", [row])
        if len(snapshot) != len(self.states):
            raise ValueError(
                f"snapshot: got {len(snapshot)} states, need "
                f"{len(self.states)}, one per layer"
            )
        read = max((state.read_at_most for state in snapshot), default=0)
        for state, copied in zip(self._row(row), snapshot, strict=True):
            state.copy_(first_tokens(copied, read))
        self.tokens_read[row] = read

    def _row(self, row: int) -> list[LayerState]:
        """A row's states, in the memory of the pool."""
        states, read = [], self.tokens_read[row]
        for state in self.states:
            rows: Any = {k: x[row, None] for k, x in state.tensors().items()}
            states.append(LayerState(**rows, read_at_most=read))
        return states

    def states_for(
        self, rows: Integers, num_tokens: int | Integers
    ) -> AbstractContextManager[list[LayerState]]:
        """The states for a call of the model in which these rows read tokens.

            with pool.states_for([row], 1) as states:
                logits, _ = model(tokens, states)

        The rows count as having read them once the block ends. If it raises,
        they do not, and their states may be half new: release or restore
        them.

        Args:
            rows: the row of each sequence, taken before; -1 for none.
            num_tokens: how many each of them reads, or one number, the most
                that any of them reads. Where such bounds add up to
                ``tokens_per_row``, the pool asks the device how many a row
                has read.

        Raises:
            ValueError: a row is not taken or comes twice, or softmax
                attention has no room for its tokens.
        """
        index = self._checked_rows("rows", rows, allow_no_row=True)
        numbers = (
            num_tokens.tolist()
            if isinstance(num_tokens, Tensor)
            else num_tokens
        )
        if isinstance(numbers, Sequence):
            counts = list(numbers)
            for n in counts:
                check_integers(num_tokens=n)
            if len(counts) != len(index) or min(counts) < 0:
                raise ValueError(
                    f"num_tokens: got {counts}, need one number per row, "
                    f"{len(index)}, each 0 or more"
                )
        else:
            check_sizes(num_tokens=numbers)
            counts = [numbers] * len(index)
        count_of = {r: n for r, n in zip(index, counts, strict=True) if r >= 0}
        if self._overfull_rows(count_of):
            self._recount()
        if overfull := self._overfull_rows(count_of):
            row = overfull[0]
            raise ValueError(
                f"num_tokens: got {count_of[row]} for row {row}, which has "
                f"read {self.tokens_read[row]}, need at most "
                f"{self.tokens_per_row} in all"
            )
        used = max((self.tokens_read[row] for row in count_of), default=0)
        on_device = torch.tensor(index, device=self.device)
        all_inside = -1 not in index
        states = [
            state.as_pool_unchecked(on_device, used, all_inside)
            for state in self.states
        ]
        return self._counting(states, count_of, used + max(counts))

    def add_tokens_read(
        self, rows: Iterable[int], num_tokens: Iterable[int]
    ) -> None:
        """Add what rows have read outside of :meth:`states_for`."""
        for row, n in zip(rows, num_tokens, strict=True):
            self.tokens_read[row] += n

    @contextmanager
    def _counting(
        self, states: list[LayerState], count_of: dict[int, int], most: int
    ) -> Iterator[list[LayerState]]:
        """Count the rows' tokens at the end of the block.

        If it read more tokens than was said, so that some row has read more
        than ``most``, the layers are asked for all numbers.
        """
        yield states
        self.add_tokens_read(count_of, count_of.values())
        if any(state.read_at_most > most for state in states):
            self._recount()

    def _overfull_rows(self, count_of: dict[int, int]) -> list[int]:
        """The rows that may lack room for this many more tokens."""
        if not self.has_keys:
            return []
        read, most = self.tokens_read, self.tokens_per_row
        return [row for row, n in count_of.items() if read[row] + n > most]

    def _recount(self) -> None:
        """Read from the layers how many tokens each row has read."""
        counts = [s.num_read for s in self.states if s.keys is not None]
        of_layers = torch.stack([x for x in counts if x is not None])
        self.tokens_read = of_layers.amax(0).tolist()

    def _checked_rows(
        self, name: str, rows: Integers, allow_no_row: bool = False
    ) -> list[int]:
        """The rows as a list of ints; raises unless taken, each once.

        ``allow_no_row``: whether -1, no row, may be among them.
        """
        numbers = rows.tolist() if isinstance(rows, Tensor) else rows
        if not isinstance(numbers, Iterable):
            got = type(rows).__name__
            raise TypeError(f"{name}: got {got}, need a list of rows")
        index = list(numbers)
        for row in index:
            check_integers(**{name: row})
        taken = [row for row in index if row != -1 or not allow_no_row]
        size = self.num_rows
        if not index or not all(0 <= row < size for row in taken):
            need = f"rows of the pool, 0 to {size - 1}"
            raise ValueError(f"{name}: got {index}, need {need}")
        if free := [row for row in taken if row in self.free]:
            raise ValueError(
                f"{name}: got {min(free)}, need one that is taken"
            )
        if len(set(taken)) < len(taken):
            raise ValueError(f"{name}: got {index}, need each row once")
        return index
