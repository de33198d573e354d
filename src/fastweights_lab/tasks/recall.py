"""Pairs, told once or written several times, then their keys again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fastweights_lab.tasks.task import (
    ASK,
    IGNORE,
    Batch,
    Draws,
    Task,
    alternate,
    ask,
    check_enough,
    join,
    last_times,
    take,
    tell,
)


@dataclass(frozen=True)
class AssociativeRecall(Task):
    """Zoology's multi-query associative recall (Arora et al. 2023).

        k1 v1 k2 v2 .. kn vn  . . k2 . . . k1 . k3 . ..

    The first 2 n tokens are the pairs, keys and values each drawn without
    replacement; with ``passes`` they are told so often (Arora et al. 2024:
    JRT). The rest of the ``length`` tokens is slots of two tokens. n of them
    begin with a key, one key each, and the target there is its value; all
    other tokens are filler. With s slots the keys are dealt to slots in the
    order of their pairs: the first key's is drawn with a probability
    proportional to (1 + slot)^(power - 1), slots counted from 0, the next
    one's likewise of the slots that are left, and so on. With the small
    power most questions come soon, and the first pairs' soonest.

    Tokens are 0, keys 1 to V/2 - 1, and values V/2 to V - 1. Filler is 0, or
    random: any token of the vocabulary, so that a quarter of the filler
    looks like more pairs.

    A perfect memory holds ``pairs`` pairs. One that knows which values were
    there and not whose they are is right in 1 of ``pairs`` questions; one
    that knows nothing in 1 of V - V/2.

    Groups: 0 "recall".
    """

    kinds = ("recall",)

    pairs: int = 16
    length: int = 64
    vocabulary: int = 256
    """Tokens V that there are, half of them values."""

    filler: Literal["zero", "random"] = "random"
    """Zoology's default is random; its ICLR figure 2 has zero."""

    passes: int = 1
    power: float = 0.01
    """Exponent a of the slots: 1 would make them uniform."""

    def __post_init__(self) -> None:
        super().__post_init__()
        need = 2 * self.pairs * (self.passes + 1)
        check_enough("length", self.length, need, "pairs and questions")
        if self.length % 2:
            raise ValueError(f"length: got {self.length}, need it even")
        need = 2 * self.pairs + 2
        check_enough("vocabulary", self.vocabulary, need, "keys and values")

    @property
    def chance(self) -> float:
        return 1 / (self.vocabulary - self.vocabulary // 2)

    def draw(self, rows: int, draws: Draws) -> Batch:
        half, n = self.vocabulary // 2, self.pairs
        keys = 1 + draws.distinct(n, half - 1, rows)
        values = half + draws.distinct(n, self.vocabulary - half, rows)
        pairs = alternate(keys, values).repeat(1, self.passes)
        start = pairs.shape[1]
        at = start + 2 * self._slots(rows, (self.length - start) // 2, draws)

        tokens = torch.zeros(
            rows, self.length, dtype=torch.int64, device=draws.device
        )
        if self.filler == "random":
            tokens = draws.integers(self.vocabulary, rows, self.length)
        tokens = torch.cat([pairs, tokens[:, start:]], 1).scatter(1, at, keys)
        targets = torch.full_like(tokens, IGNORE).scatter(1, at, values)
        groups = torch.full_like(tokens, IGNORE).scatter(1, at, 0)
        return Batch(tokens, targets, groups)

    def _slots(self, rows: int, slots: int, draws: Draws) -> Tensor:
        """n different slots per row, [rows, n], in the order drawn.

        The largest of log p + Gumbel noise, the next largest, and so on are
        draws without replacement, one after the other (Yellott 1977).
        """
        place = torch.arange(1, slots + 1, device=draws.device)
        log_p = (self.power - 1) * place.log()
        noise = -draws.uniform(rows, slots).clamp_min(1e-9).log()
        return (log_p - noise.log()).topk(self.pairs, -1).indices


@dataclass(frozen=True)
class _Written(Task):
    """n keys, each written ``writes`` times, then each asked about once."""

    kinds = ("recall",)

    pairs: int = 8
    writes: int = 3
    keys: int = 64
    values: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_enough("keys", self.keys, self.pairs, "pairs of a sequence")

    @property
    def vocabulary(self) -> int:
        return ASK + 1 + self.keys + self.values

    @property
    def length(self) -> int:
        return 2 * self.pairs * (self.writes + 1)

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
        return join(
            tell(alternate(take(names, order), values)),
            ask(names, latest, torch.zeros_like(names)),
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
