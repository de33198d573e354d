"""Keys that are written several times: with new values, or the same ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastweights.arguments import check_sizes
from fastweights.tasks.batch import (
    ASK,
    Batch,
    Draws,
    Task,
    alternating,
    asked,
    check_enough,
    joined,
    last_times,
    take,
    told,
)


@dataclass(frozen=True)
class _Written(Task):
    """n keys, each written ``writes`` times, then each asked about once."""

    kinds = ("recall",)

    pairs: int = 8
    """Keys n of a sequence."""

    writes: int = 3
    """How often each of them is written."""

    keys: int = 64
    """Keys that there are."""

    values: int = 64
    """Values that there are."""

    def __post_init__(self) -> None:
        check_sizes(
            pairs=self.pairs,
            writes=self.writes,
            keys=self.keys,
            values=self.values,
        )
        check_enough("keys", self.keys, self.pairs, "pairs of a sequence")

    @property
    def vocabulary(self) -> int:
        return ASK + 1 + self.keys + self.values

    @property
    def length(self) -> int:
        return 2 * self.pairs * (self.writes + 1)

    @property
    def held(self) -> int:
        return self.pairs

    @property
    def bits(self) -> float:
        return self.pairs * math.log2(self.values)

    @property
    def chance(self) -> float:
        return 1 / self.values

    def _names(self, rows: int, draws: Draws) -> Tensor:
        """The keys' tokens, [rows, n]."""
        return ASK + 1 + draws.distinct(self.pairs, self.keys, rows)

    def _sequence(self, names: Tensor, order: Tensor, values: Tensor) -> Batch:
        """Writes in an order, then questions in that of the names.

        Args:
            names: the keys' tokens, [rows, n].
            order: which of the keys each write is of, [rows, n writes].
            values: tokens written, [rows, n writes].
        """
        latest = take(values, last_times(order, names.shape[1]))
        return joined(
            told(alternating(take(names, order), values)),
            asked(names, latest, torch.zeros_like(names)),
        )


@dataclass(frozen=True)
class OverwritingRecall(_Written):
    """What was a key's last value? Each key gets several, one after another.

        k2 v k1 v k2 v' k3 v k1 v' ..   ASK k1  ASK k3  ASK k2

    The n keys, drawn without replacement, are written ``writes`` times
    each, all n * writes pairs in a random order. The values of a key all
    differ; two keys may have the same one. Then each key is asked about
    once, in a random order. The target, at the key behind ASK, is the value
    written last.

    Tokens are 1 for ASK, then ``keys`` keys, then ``values`` values.

    A perfect memory holds ``pairs`` pairs, if writing replaces what was
    there. One that adds up has to hold pairs * writes, and cannot say which
    is the last; knowing all that were written it is right in 1 of
    ``writes`` questions.

    Groups: 0 "recall".
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_enough("values", self.values, self.writes, "writes of a key")

    def draw(self, rows: int, draws: Draws) -> Batch:
        n, first = self.pairs, ASK + 1 + self.keys
        names = self._names(rows, draws)
        values = first + draws.distinct(self.writes, self.values, rows, n)
        order = draws.orders(n * self.writes, rows)
        return self._sequence(
            names,
            order // self.writes,
            take(values.flatten(1), order),
        )


@dataclass(frozen=True)
class RepeatedRecall(_Written):
    """Does it help to read the pairs several times?

        k2 v2 k1 v1 k3 v3   k3 v3 k2 v2 k1 v1   ..   ASK k1  ASK k3  ASK k2

    n pairs, keys drawn without replacement and values with it, are told
    ``writes`` times, each time all of them in a new random order. Then each
    key is asked about once, in a random order. The target, at the key
    behind ASK, is its value.

    Tokens are 1 for ASK, then ``keys`` keys, then ``values`` values.

    A perfect memory holds ``pairs`` pairs and needs one reading. The delta
    rule takes one step of Kaczmarz's method per pair, and each reading is
    one sweep of it: it comes closer with each.

    Groups: 0 "recall".
    """

    def draw(self, rows: int, draws: Draws) -> Batch:
        names = self._names(rows, draws)
        values = draws.integers(self.values, rows, self.pairs)
        values = ASK + 1 + self.keys + values
        order = draws.orders(self.pairs, rows, self.writes).flatten(1)
        return self._sequence(names, order, take(values, order))
