"""Finite groups as tables: cyclic ones, and permutations."""

from __future__ import annotations

import itertools
import re
from functools import cache

GROUPS = "Z2, Z3, .., S2, S3, .., S5, or A3, A4, A5"
"""What the groups are called."""

Table = tuple[tuple[int, ...], ...]


@cache
def elements(name: str) -> tuple[tuple[int, ...], ...]:
    """The group's elements, the neutral one first.

    Z5's are (0,) to (4,). Those of S5 and A5 are permutations p of 0 to 4 in
    lexicographic order, which take i to p[i].

    Raises:
        ValueError: there is no such group here.
    """
    found = re.fullmatch(r"Z([1-9]\d{0,3})|([SA])([1-5])", name)
    if found is None or name in ("Z1", "S1", "A1", "A2"):
        raise ValueError(f"group: got {name!r}, need {GROUPS}")
    size, kind, degree = found.groups()
    if size is not None:
        return tuple((i,) for i in range(int(size)))
    permutations = itertools.permutations(range(int(degree)))
    return tuple(p for p in permutations if kind == "S" or even(p))


def even(p: tuple[int, ...]) -> bool:
    """Whether a permutation is a product of an even number of swaps."""
    turned = sum(a > b for a, b in itertools.combinations(p, 2))
    return turned % 2 == 0


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
