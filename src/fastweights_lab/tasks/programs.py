"""Text in which a correction matters: variables that get new values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from fastweights_lab.tasks.task import (
    IGNORE,
    Batch,
    Draws,
    Task,
    joined,
    take,
    told,
)

LETTERS = 26
ASSIGN, PRINT = "x=0\n", "print(x)\n"
KINDS = {
    "never": 0,
    "1 to 2 times": 1,
    "3 to 6 times": 3,
    "7 to 14 times": 7,
    "15 times or more": 15,
}
"""Groups, and the least number of reassignments in each."""


@dataclass(frozen=True)
class Reassignment(Task):
    """Programs, byte by byte: what does Python print?

        k=7
        c=4
        k=1
        print(c)
        c=9
        print(k)
        ..

    ``variables`` letters get a digit each, in a random order. Then come
    ``questions`` new assignments, each with a line behind it that prints one
    of the variables, any of them with the same probability. Which variable a
    new assignment is of follows Zipf's law: the first of the letters, in an
    order of their own, is drawn twice as often as the second, three times as
    often as the third, and so on. So some variables change all the time and
    some keep one value throughout. The target, at the end of a line that
    prints, is the digit that the variable has by then.

    A perfect memory holds ``variables`` pairs, if a new value replaces the
    old one. One that adds up cannot say which came last; one that lets go of
    all that is old loses the variables that seldom change.

    Groups, by how often the variable had been reassigned since the start:
    0 "never", 1 "1 to 2 times", 2 "3 to 6 times", 3 "7 to 14 times",
    4 "15 times or more".
    """

    kinds = tuple(KINDS)
    values = 10

    variables: int = 8
    questions: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variables > LETTERS:
            raise ValueError(
                f"variables: got {self.variables}, need {LETTERS} or fewer"
            )

    @property
    def vocabulary(self) -> int:
        """Those of ASCII."""
        return 128

    @property
    def length(self) -> int:
        block = len(ASSIGN) + len(PRINT)
        return self.variables * len(ASSIGN) + self.questions * block

    def draw(self, rows: int, draws: Draws) -> Batch:
        n, shape = self.variables, (rows, self.questions)
        zipf = 1 / torch.arange(1, n + 1, device=draws.device)
        shares = (zipf.cumsum(0) / zipf.sum())[:-1]
        again = torch.bucketize(draws.uniform(*shape), shares)
        which = torch.cat([draws.orders(n, rows), again], 1)
        digits = draws.integers(self.values, *which.shape)
        asked = draws.integers(n, *shape)

        # Of each variable at each question: how often, and when last.
        written = F.one_hot(which, n)
        time = torch.arange(which.shape[1], device=draws.device)[:, None]
        often = written.cumsum(1)[:, n:]
        last = (written * time).cummax(1).values[:, n:]
        of_asked = asked[..., None]
        times = take(often, of_asked)[..., 0] - 1
        answers = take(digits, take(last, of_asked)[..., 0])

        letters = ord("a") + draws.distinct(n, LETTERS, rows)
        assigned = _lines(ASSIGN, take(letters, which), digits)
        printed = _lines(PRINT, take(letters, asked), answers)
        nothing = torch.full_like(printed[..., 1:], IGNORE)
        reached = [times >= least for least in KINDS.values()]
        groups = torch.stack(reached).sum(0) - 1
        question = Batch(
            printed,
            torch.cat([nothing, ord("0") + answers[..., None]], -1),
            torch.cat([nothing, groups[..., None]], -1),
        )
        later = joined(told(assigned[:, n:]), question)
        return joined(
            told(assigned[:, :n].flatten(1)),
            later.map(lambda x: x.flatten(1)),
        )


def _lines(
    pattern: str, letters: Int[Tensor, "*B n"], digits: Int[Tensor, "*B n"]
) -> Int[Tensor, "*B n c"]:
    """The pattern's bytes, with letters for its x and digits for its 0."""
    of = {"x": letters, "0": ord("0") + digits}
    return torch.stack(
        [of.get(c, torch.full_like(letters, ord(c))) for c in pattern], -1
    )
