"""Selective copying: keep what matters, in order, and skip the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastweights_lab.tasks.batch import (
    ASK,
    BLANK,
    Batch,
    Draws,
    Task,
    check_enough,
    joined,
    told,
)


@dataclass(frozen=True)
class SelectiveCopying(Task):
    """Mamba's selective copying (Gu and Dao 2023).

        . x1 . . x2 x3 . . . xn .   ASK ASK ASK .. ASK

    n values, each of them drawn from all, stand at n of the first ``text``
    positions, drawn without replacement; the other positions are blank.
    Then comes ASK n times. The target at the first ASK is the first value,
    at the second ASK the second, and so on.

    Tokens are 0 for blank, 1 for ASK, then ``values`` values.

    A perfect memory holds ``symbols`` pairs, of a place in the order and a
    value. The blanks must not count: where a value stands says nothing about
    the place at which it is asked for.

    Groups: 0 "copy".
    """

    kinds = ("copy",)

    symbols: int = 8
    """Values n to copy."""

    text: int = 48
    """Positions before the first ASK."""

    values: int = 16
    """Values that there are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_enough("text", self.text, self.symbols, "symbols")

    @property
    def vocabulary(self) -> int:
        return ASK + 1 + self.values

    @property
    def length(self) -> int:
        return self.text + self.symbols

    @property
    def held(self) -> int:
        return self.symbols

    def draw(self, rows: int, draws: Draws) -> Batch:
        n = self.symbols
        values = ASK + 1 + draws.integers(self.values, rows, n)
        at = draws.distinct(n, self.text, rows).sort(-1).values
        text = torch.full((rows, self.text), BLANK, device=draws.device)
        asking = torch.full_like(values, ASK)
        return joined(
            told(text.scatter(1, at, values)),
            Batch(asking, values, torch.zeros_like(values)),
        )
