"""Parameters that are crossed in full by ``make test-all`` only.

A fault shows where two parameters meet, seldom only where three do. So
``make test`` takes the first of all combinations that together have every
pair of values, and the others carry the mark ``full``.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

Axis = Sequence[Any] | Mapping[str, Any]


def crossed(
    *, seldom: Iterable[str] = (), **axes: Axis
) -> pytest.MarkDecorator:
    """Parametrise by all combinations, those past a pairwise cover ``full``.

    An axis is a sequence of values, or a mapping from their ids. Values
    whose ids are ``seldom`` are covered once, not with every other value.
    """
    names = list(axes)
    values = [
        [*axis.items()]
        if isinstance(axis, Mapping)
        else [(_id(x), x) for x in axis]
        for axis in axes.values()
    ]
    sizes = [range(len(x)) for x in values]
    rare = {
        (axis, i)
        for axis, labelled in enumerate(values)
        for i, (label, _) in enumerate(labelled)
        if label in seldom
    }
    cover = set(pairwise(sizes, rare))
    parameters = []
    for combination in itertools.product(*sizes):
        at = [x[i] for x, i in zip(values, combination, strict=True)]
        parameters.append(
            pytest.param(
                *(value for _, value in at),
                id="-".join(label for label, _ in at),
                marks=() if combination in cover else pytest.mark.full,
            )
        )
    return pytest.mark.parametrize(", ".join(names), parameters)


def pairwise(
    sizes: Sequence[Iterable[int]], rare: Iterable[tuple[int, int]] = ()
) -> list[tuple[int, ...]]:
    """Combinations in which any two axes take each pair of their values.

    Of a value that is ``rare``, as (axis, value), one combination will do.
    Greedy: always the first of those that have the most new pairs.
    """
    rare = set(rare)

    def pairs(combination: tuple[int, ...]) -> set[tuple]:
        values = set(enumerate(combination))
        common = sorted(values - rare)
        return {*itertools.combinations(common, 2), *(values & rare)}

    left = [(x, pairs(x)) for x in itertools.product(*sizes)]
    missing = set().union(*(found for _, found in left))
    chosen = []
    while missing:
        best, found = max(left, key=lambda x: len(x[1] & missing))
        chosen.append(best)
        missing -= found
    return chosen


def all_but(chosen: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """``values``, those that are not chosen with the mark ``full``.

    A value is a parameter, or a tuple of several.
    """
    chosen = list(chosen)
    return [
        pytest.param(
            *(x if isinstance(x, tuple) else (x,)),
            marks=() if x in chosen else pytest.mark.full,
        )
        for x in values
    ]


def in_turn(
    chosen: Iterable[Any], others: Iterable[Any], values: Sequence[Any]
) -> list[tuple[Any, Any]]:
    """Each value with what is chosen, and the others with one value each."""
    turns = itertools.cycle(values)
    common = list(itertools.product(values, chosen))
    return [*common, *((next(turns), x) for x in others)]


def _id(x: Any) -> str:
    return str(x).removeprefix("torch.")
