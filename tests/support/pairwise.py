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


def parametrize_all(
    *, covered_once: Iterable[str] = (), **axes: Axis
) -> pytest.MarkDecorator:
    """Parametrise by all combinations, those past a pairwise cover ``full``.

    An axis is a sequence of values, or a mapping from their ids. Values
    whose ids are ``covered_once`` are so, not with every other value.
    """
    values = [_labelled(axis) for axis in axes.values()]
    sizes = [range(len(x)) for x in values]
    rare = {
        (axis, i)
        for axis, labelled in enumerate(values)
        for i, (label, _) in enumerate(labelled)
        if label in covered_once
    }
    cover = set(pairwise(sizes, rare))
    parameters = [
        _parameter(values, x, () if x in cover else pytest.mark.full)
        for x in itertools.product(*sizes)
    ]
    return pytest.mark.parametrize(", ".join(axes), parameters)


def parametrize_pairs(**axes: Axis) -> pytest.MarkDecorator:
    """Parametrise by a cover of all pairs, and by nothing else."""
    values = [_labelled(axis) for axis in axes.values()]
    parameters = [
        _parameter(values, x)
        for x in pairwise([range(len(v)) for v in values])
    ]
    return pytest.mark.parametrize(", ".join(axes), parameters)


def pairwise(
    sizes: Sequence[Sequence[int]], rare: Iterable[tuple[int, int]] = ()
) -> list[tuple[int, ...]]:
    """Combinations in which any two axes take each pair of their values.

    Of a value that is ``rare``, as (axis, value), one combination will do.
    Each begins with the first pair that is missing, and gets at every other
    axis the value that brings the most new pairs.
    """
    rare = set(rare)

    def new(row: dict[int, int]) -> set[tuple]:
        found = {(x,) for x in row.items()}
        found |= {*itertools.combinations(sorted({*row.items()} - rare), 2)}
        return missing & found

    values = [[(a, i) for i in size] for a, size in enumerate(sizes)]
    missing = {(x,) for x in rare}
    for some in itertools.combinations(values, min(2, len(values))):
        missing |= {x for x in itertools.product(*some) if not rare & set(x)}
    chosen = []
    while missing:
        row = dict(min(missing, key=lambda pair: (-len(pair), pair)))
        for axis in range(len(sizes)):
            if axis not in row:
                row[axis] = max(
                    sizes[axis], key=lambda i, a=axis: len(new({**row, a: i}))
                )
        chosen.append(tuple(row[axis] for axis in range(len(sizes))))
        missing -= new(row)
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


def _labelled(axis: Axis) -> list[tuple[str, Any]]:
    if isinstance(axis, Mapping):
        return [*axis.items()]
    return [(_id(x), x) for x in axis]


def _parameter(values: list, combination: tuple[int, ...], marks: Any = ()):
    at = [x[i] for x, i in zip(values, combination, strict=True)]
    label = "-".join(label for label, _ in at)
    return pytest.param(*(value for _, value in at), id=label, marks=marks)
