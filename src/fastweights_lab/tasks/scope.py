"""What a gate is for: a reset after which nothing before it holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fastweights_lab.tasks.task import (
    ASK,
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

RESET = ASK + 1
NONE = RESET + 1

INSIDE, OUTSIDE = 0, 1


@dataclass(frozen=True)
class Scope(Task):
    """Pairs hold up to the next RESET; a key without a value has NONE.

        RESET k v k v k v k v   ASK k  ASK k  ASK k  ASK k   RESET ..

    A sequence is ``segments`` segments. In each, ``pairs`` keys, drawn
    without replacement, are written ``writes`` times each, all in a random
    order; a key's values in a segment all differ. Then come 2 *
    ``questions`` questions in a random order. Half of them are about keys of
    this segment: the target is the value written last. The other half are
    about keys that this segment has not, and of which earlier segments had
    as many as possible: the target is NONE. Within a segment no key is asked
    about twice. Targets are at the key behind ASK.

    Tokens are 1 for ASK, 2 for RESET, 3 for NONE, then ``keys`` keys, then
    ``values`` values.

    A perfect memory holds one segment's pairs, and forgets them at RESET.
    One that says NONE to everything is right in half of all questions.

    Groups: 0 "in scope", 1 "out of scope".
    """

    kinds = ("in scope", "out of scope")

    segments: int = 6
    pairs: int = 4
    writes: int = 1
    questions: int = 2
    keys: int = 64
    values: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "questions of a segment"
        check_enough("pairs", self.pairs, self.questions, why)
        why = "pairs of a segment, and questions about others"
        check_enough("keys", self.keys, self.pairs + self.questions, why)
        check_enough("values", self.values, self.writes, "writes of a key")

    @property
    def vocabulary(self) -> int:
        return NONE + 1 + self.keys + self.values

    @property
    def length(self) -> int:
        segment = 1 + 2 * self.pairs * self.writes + 4 * self.questions
        return self.segments * segment

    @property
    def chance(self) -> float:
        """The accuracy of one who always says NONE."""
        return 1 / 2

    def draw(self, rows: int, draws: Draws) -> Batch:
        shape, n = (rows, self.segments), self.pairs
        names = draws.distinct(n, self.keys, *shape)
        values = draws.distinct(self.writes, self.values, *shape, n)
        order = draws.orders(n * self.writes, *shape)
        which = order // self.writes
        written = take(values.flatten(-2), order)
        latest = take(written, last_times(which, n))

        here = F.one_hot(names, self.keys).sum(-2)
        before = here.cumsum(1) - here > 0
        rank = draws.uniform(*shape, self.keys) + before - 2 * here
        others = rank.topk(self.questions, -1).indices

        # The first names are any: names and writes are in random orders.
        first, some = NONE + 1, slice(self.questions)
        keys = torch.cat([names[..., some], others], -1) + first
        inside = latest[..., some] + first + self.keys
        answers = torch.cat([inside, torch.full_like(others, NONE)], -1)
        groups = torch.cat(
            [
                torch.full_like(inside, INSIDE),
                torch.full_like(others, OUTSIDE),
            ],
            -1,
        )
        mixed = draws.orders(2 * self.questions, *shape)
        reset = torch.full((*shape, 1), RESET, device=draws.device)
        pairs = alternate(
            take(names, which) + first,
            written + first + self.keys,
        )
        parts = (
            tell(reset),
            tell(pairs),
            ask(*(take(x, mixed) for x in (keys, answers, groups))),
        )
        return join(*parts).map(lambda x: x.flatten(1))


@dataclass(frozen=True)
class Sections(Scope):
    """:class:`Scope` with every key written twice in its section.

    Now three things have to be done at once: replace a value (the delta
    rule), let go of a section at RESET (a gate), and keep a section's pairs
    until they are asked about.
    """

    writes: int = 2
