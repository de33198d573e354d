"""State tracking: which product of a group's elements have we come to?"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from fastweights_lab.tasks.task import IGNORE, Batch, Draws, Task


@dataclass(frozen=True)
class StateTracking(Task):
    """The running product of a group's elements (Grazzi et al. 2025).

        BOS x1 x2 x3 ..       targets: -  x1  x1 x2  x1 x2 x3  ..

    ``group`` is Z2 (parity: x is 0 or 1), Zm (sums modulo m), or
    S3, S4, S5 (all permutations of so many things). Each x is drawn from
    all elements, or from the swaps of two things alone, which S3 to S5
    have: one reflection of the state each. A product is made from left to
    right, as things are done: first x1, then x2.

    With ``parts`` = n each element is n tokens, of which each says the same
    element as its part 1, 2, .., n of it, and the target is at the last. A
    layer that makes one step per token then has n per element, as in
    DeltaProduct (Siems et al. 2025).

    Tokens are 0 for BOS, then part 1 of the elements that x can be, in
    their order in :func:`elements`, then part 2,
    and so on; then the answers: all elements of the group. Every position
    but BOS and parts that are not the last counts in the loss.

    A perfect memory holds the one element it has come to.

    Groups: 0 "state".
    """

    kinds = ("state",)

    group: str = "Z2"
    """Z2, Z3, .., S2 to S5."""

    inputs: Literal["all", "swaps"] = "all"
    """What x is drawn from."""

    elements: int = 32
    parts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.drawn

    @property
    def drawn(self) -> tuple[int, ...]:
        """Numbers of the elements that x is drawn from."""
        order = len(elements(self.group))
        return (
            swaps(self.group) if self.inputs == "swaps" else (*range(order),)
        )

    @property
    def vocabulary(self) -> int:
        return self._first_answer + len(elements(self.group))

    @property
    def _first_answer(self) -> int:
        return 1 + self.parts * len(self.drawn)

    @property
    def length(self) -> int:
        return 1 + self.parts * self.elements

    @property
    def chance(self) -> float:
        """The accuracy of one who says what is likeliest at each position.

        That is 1 / order for all elements. After t swaps only permutations
        of t's parity are possible, and at first not all of them.
        """
        table = torch.tensor(products(self.group))[:, self.drawn]
        p = torch.zeros(len(table), dtype=torch.float64)
        p[0] = 1
        best = 0.0
        for _ in range(self.elements):
            share = (p / len(self.drawn))[:, None].expand_as(table)
            p = torch.zeros_like(p).index_add(
                0, table.flatten(), share.flatten()
            )
            best += p.max().item()
        return best / self.elements

    def draw(self, rows: int, draws: Draws) -> Batch:
        number = draws.integers(len(self.drawn), rows, self.elements)
        drawn = _drawn(self, draws.device)
        state = running(drawn[number], self.group)

        part = torch.arange(self.parts, device=draws.device)
        x = 1 + number[..., None] + part * len(self.drawn)
        tokens = torch.cat([torch.zeros_like(x[:, 0, :1]), x.flatten(1)], 1)
        targets = torch.full_like(tokens, IGNORE)
        targets[:, self.parts :: self.parts] = self._first_answer + state
        groups = torch.where(targets == IGNORE, IGNORE, 0)
        return Batch(tokens, targets, groups)


def running(x: Int[Tensor, "B T"], group: str) -> Int[Tensor, "B T"]:
    """x1, x1 x2, x1 x2 x3, ..: in ceil(log2 T) products of everything.

    After the step with distance d each place has the product of the 2 d
    elements up to it, or of all if they are fewer (Hillis and Steele 1986).
    """
    table = _products(group, x.device)
    d = 1
    while d < x.shape[1]:
        x = torch.cat([x[:, :d], table[x[:, :-d], x[:, d:]]], 1)
        d *= 2
    return x


# Copied to a device once each: a CUDA graph could not wait for them.


@cache
def _drawn(task: StateTracking, device: torch.device) -> Tensor:
    return torch.tensor(task.drawn, device=device)


@cache
def _products(group: str, device: torch.device) -> Tensor:
    return torch.tensor(products(group), device=device)


# Finite groups as tables: cyclic ones, and permutations.

Table = tuple[tuple[int, ...], ...]


@cache
def elements(name: str) -> tuple[tuple[int, ...], ...]:
    """The group's elements, the neutral one first.

    Z5's are (0,) to (4,). Those of S5 are permutations p of 0 to 4 in
    lexicographic order, which take i to p[i].

    Raises:
        ValueError: there is no such group here.
    """
    found = re.fullmatch(r"Z([1-9]\d{0,3})|S([1-5])", name)
    if found is None or name in ("Z1", "S1"):
        raise ValueError(f"group: got {name!r}, need Z2, Z3, .. or S2 to S5")
    size, degree = found.groups()
    if size is not None:
        return tuple((i,) for i in range(int(size)))
    return tuple(itertools.permutations(range(int(degree))))


@cache
def products(name: str) -> Table:
    """table[a][b]: the number of the element "first a, then b"."""
    every = elements(name)
    number = {x: i for i, x in enumerate(every)}
    if name[0] == "Z":
        return tuple(
            tuple((a + b) % len(every) for b in range(len(every)))
            for a in range(len(every))
        )
    return tuple(
        tuple(number[tuple(b[i] for i in a)] for b in every) for a in every
    )


def swaps(name: str) -> tuple[int, ...]:
    """Numbers of the elements that swap two things and leave the rest.

    Raises:
        ValueError: the group has none.
    """
    every = elements(name)
    moved = [sum(i != x for i, x in enumerate(p)) for p in every]
    if name[0] != "S":
        raise ValueError(
            f"inputs: got 'swaps' for {name}, need 'all': it has no swaps"
        )
    return tuple(i for i, count in enumerate(moved) if count == 2)
