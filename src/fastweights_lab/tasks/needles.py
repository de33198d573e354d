"""A needle in a haystack: one thing to keep through a long text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fastweights_lab.tasks.task import (
    ASK,
    Batch,
    Draws,
    Task,
    alternate,
    ask,
    check_enough,
    join,
    take,
    tell,
)

SEP = ASK + 1
MARK = SEP + 1

NEEDLE, LOCAL = 0, 1


@dataclass(frozen=True)
class Needles(Task):
    """The needle of RULER (Hsieh et al. 2024) with tokens for words.

        SEP k v k v k v k v ASK k ASK k   M v   SEP ..   SEP ..   ASK M

    The haystack is ``segments`` segments. Each begins with SEP and has
    ``pairs`` fresh pairs, keys drawn without replacement and values with
    it, and then questions about ``questions`` of its keys, drawn without
    replacement: these are local facts, to be forgotten afterwards. Before
    one segment, each as likely as another, stand the needles: a marker
    and a value, for the markers 0, 1, .. in this order. They are asked about
    in the same order after the last segment. Targets are at the key or
    marker behind ASK.

    Three levels follow S-NIAH-1 to 3:

    1. every segment is the same, in all sequences: the first keys with the
       first values, and the first of them asked. Nothing of it counts; one
       needle.
    2. segments as above; one needle.
    3. segments as above; ``needles`` needles, for a uuid is longer than a
       number.

    Tokens are 1 for ASK, 2 for SEP, then ``needles`` markers (also where a
    level uses one of them), then ``keys`` keys, then ``values`` values, which
    needles and pairs share.

    A perfect memory holds the needles and one segment's pairs; the needles
    alone in level 1. It has to hold the needles for as long as the text is,
    and to replace the pairs.

    Groups: 0 "needle", 1 "local".
    """

    kinds = ("needle", "local")

    level: Literal[1, 2, 3] = 2
    segments: int = 8
    needles: int = 4
    pairs: int = 4
    questions: int = 2
    keys: int = 64
    values: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "questions of a segment"
        check_enough("pairs", self.pairs, self.questions, why)
        why = "pairs of a segment"
        check_enough("keys", self.keys, self.pairs, why)
        if self.level == 1:
            check_enough("values", self.values, self.pairs, why)

    @property
    def marked(self) -> int:
        """Needles that there are at this level."""
        return self.needles if self.level == 3 else 1

    @property
    def vocabulary(self) -> int:
        return MARK + self.needles + self.keys + self.values

    @property
    def length(self) -> int:
        return self.segments * self._segment + 4 * self.marked

    @property
    def _segment(self) -> int:
        return 1 + 2 * (self.pairs + self.questions)

    def draw(self, rows: int, draws: Draws) -> Batch:
        hay = self._haystack(rows, draws)
        markers = MARK + torch.arange(self.marked, device=draws.device)
        markers = markers.expand(rows, -1)
        found = self._value(draws.integers(self.values, rows, self.marked))
        needle = tell(alternate(markers, found))

        # Before the needle, the needle, after it: where each token is in
        # the haystack with the needle behind it.
        start = draws.integers(self.segments, rows, 1) * self._segment
        size, end = 2 * self.marked, hay.tokens.shape[1]
        here = torch.arange(end + size, device=draws.device).expand(rows, -1)
        source = torch.where(here < start, here, here - size)
        inside = (here >= start) & (here < start + size)
        source = torch.where(inside, end + here - start, source)
        text = join(hay, needle).map(lambda x: take(x, source))
        question = ask(markers, found, torch.full_like(markers, NEEDLE))
        return join(text, question)

    def _haystack(self, rows: int, draws: Draws) -> Batch:
        """All segments, one after another."""
        shape = (rows, self.segments)
        first = torch.arange(self.pairs, device=draws.device)
        keys = values = first.expand(*shape, -1)
        chosen = keys[..., : self.questions]
        if self.level > 1:
            keys = draws.distinct(self.pairs, self.keys, *shape)
            values = draws.integers(self.values, *shape, self.pairs)
            chosen = draws.distinct(self.questions, self.pairs, *shape)
        keys, values = MARK + self.needles + keys, self._value(values)
        separator = torch.full((*shape, 1), SEP, device=draws.device)
        local = torch.full_like(chosen, LOCAL)
        question = ask(take(keys, chosen), take(values, chosen), local)
        if self.level == 1:
            question = tell(question.tokens)
        pairs = tell(alternate(keys, values))
        segments = join(tell(separator), pairs, question)
        return segments.map(lambda x: x.flatten(1))

    def _value(self, number: Tensor) -> Tensor:
        return MARK + self.needles + self.keys + number
