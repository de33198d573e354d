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
    join,
    take,
    tell,
)

LETTERS = 26
ASSIGN, PRINT, END = "x=0\n", "print(x)\n", "\n"
NONE = ord("?")
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
        if self.names > LETTERS:
            most = self.variables * LETTERS // self.names
            raise ValueError(
                f"variables: got {self.variables}, need {most} or fewer"
            )

    @property
    def names(self) -> int:
        """Letters of a program."""
        return self.variables

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
        again = _zipf(n, draws, *shape)
        which = torch.cat([draws.orders(n, rows), again], 1)
        digits = draws.integers(self.values, *which.shape)
        asked = draws.integers(n, *shape)
        times, values = _by_then(which, digits, asked, n)

        letters = ord("a") + draws.distinct(n, LETTERS, rows)
        assigned = _lines(ASSIGN, take(letters, which), digits)
        question = _printed(
            take(letters, asked), ord("0") + values, _group(times)
        )
        later = join(tell(assigned[:, n:]), question)
        return join(
            tell(assigned[:, :n].flatten(1)),
            later.map(lambda x: x.flatten(1)),
        )


@dataclass(frozen=True)
class Calls(Reassignment):
    """Programs of several calls: nothing that a call has set outlives it.

        k=7
        print(k)
        k=1
        print(c)
        ..

        c=4
        print(k)
        ..

    Each of ``calls`` calls draws ``variables`` of twice as many letters and
    assigns to them ``questions`` times, by Zipf's law as in
    :class:`Reassignment`. Behind each assignment a line prints a letter: with
    the same probability one that this call has set, or one that it has not.
    The target is the letter's digit, or "?" where this call has not set it.
    An empty line ends a call.

    A perfect memory replaces one letter's value at an assignment, and lets
    go of all letters' values at an empty line.

    Groups: 0 "never set", 1 "set in an earlier call", and from 2 on those of
    :class:`Reassignment`, of a letter that this call has set.
    """

    kinds = ("never set", "set in an earlier call", *KINDS)

    calls: int = 3

    @property
    def names(self) -> int:
        return 2 * self.variables

    @property
    def length(self) -> int:
        block = len(ASSIGN) + len(PRINT)
        return self.calls * (self.questions * block + len(END))

    @property
    def chance(self) -> float:
        """The accuracy of one who always says "?"."""
        return 1 / 2

    def draw(self, rows: int, draws: Draws) -> Batch:
        n, shape = self.names, (rows, self.calls, self.questions)
        own = draws.distinct(self.variables, n, *shape[:2])
        which = take(own, _zipf(self.variables, draws, *shape))
        digits = draws.integers(self.values, *shape)
        there = F.one_hot(which, n).cumsum(-2) > 0
        inside = draws.uniform(*shape) < 1 / 2
        fits = there == inside[..., None]
        asked = (draws.uniform(*shape, n) + fits).argmax(-1)
        times, values = _by_then(which, digits, asked, n)
        in_call = there[..., -1, :].long()
        earlier = (in_call.cumsum(1) > in_call).long()

        letters = ord("a") + draws.distinct(n, LETTERS, rows)[:, None]
        letters = letters.expand_as(earlier)
        lines = join(
            tell(_lines(ASSIGN, take(letters, which), digits)),
            _printed(
                take(letters, asked),
                torch.where(inside, ord("0") + values, NONE),
                torch.where(inside, 2 + _group(times), take(earlier, asked)),
            ),
        ).map(lambda x: x.flatten(2))
        end = torch.full((*shape[:2], 1), ord(END), device=draws.device)
        return join(lines, tell(end)).map(lambda x: x.flatten(1))


def _zipf(n: int, draws: Draws, *shape: int) -> Int[Tensor, "*B m"]:
    """0 to n - 1, where i comes 1 / (i + 1) times as often as 0."""
    zipf = 1 / torch.arange(1, n + 1, device=draws.device)
    shares = (zipf.cumsum(0) / zipf.sum())[:-1]
    return torch.bucketize(draws.uniform(*shape), shares)


def _by_then(
    which: Int[Tensor, "*B m"],
    digits: Int[Tensor, "*B m"],
    asked: Int[Tensor, "*B q"],
    n: int,
) -> tuple[Int[Tensor, "*B q"], Int[Tensor, "*B q"]]:
    """How often each asked variable was reassigned, and its digit.

    Questions stand behind the last q of the m assignments.
    """
    written = F.one_hot(which, n)
    time = torch.arange(which.shape[-1], device=which.device)[:, None]
    q, of_asked = asked.shape[-1], asked[..., None]
    often = written.cumsum(-2)[..., -q:, :]
    last = (written * time).cummax(-2).values[..., -q:, :]
    times = take(often, of_asked)[..., 0] - 1
    return times, take(digits, take(last, of_asked)[..., 0])


def _group(times: Int[Tensor, "*B q"]) -> Int[Tensor, "*B q"]:
    """Which of KINDS; -1 below all of them."""
    reached = [times >= least for least in KINDS.values()]
    return torch.stack(reached).sum(0) - 1


def _printed(
    letters: Int[Tensor, "*B q"],
    answers: Int[Tensor, "*B q"],
    groups: Int[Tensor, "*B q"],
) -> Batch:
    """Lines that print, with the answer at their end."""
    lines = _lines(PRINT, letters, answers)
    nothing = torch.full_like(lines[..., 1:], IGNORE)
    return Batch(
        lines,
        torch.cat([nothing, answers[..., None]], -1),
        torch.cat([nothing, groups[..., None]], -1),
    )


def _lines(
    pattern: str, letters: Int[Tensor, "*B n"], digits: Int[Tensor, "*B n"]
) -> Int[Tensor, "*B n c"]:
    """The pattern's bytes, with letters for its x and digits for its 0."""
    of = {"x": letters, "0": ord("0") + digits}
    return torch.stack(
        [of.get(c, torch.full_like(letters, ord(c))) for c in pattern], -1
    )
