"""Habits: a text that hides a combination of traits, and who finds it.

A key has ``traits`` traits, each there or not. Every text hides a habit, two
traits and how each has to be: where both are so the value is 1, and elsewhere
-1. No single trait shows it. A memory says what it expects of a key, is told
the value, and learns, as in ``hidden_walls``, whose network this is:

    python -m fastweights_lab.experiments.hidden_habits > hidden_habits.json

is the record in ``data``: errors per 16 tokens with few traits and with many.
It takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import functools
import json
import math

import torch
from torch import Tensor

from fastweights_lab.experiments import hidden_walls
from fastweights_lab.experiments.hidden_walls import SEEDS, Keys, Values

TRAITS = {12: ("steps", "frozen"), 48: ("steps",)}
"""How many traits a key has, and which networks race on it."""

TOKENS, EVERY, CHUNK = 512, 16, 4
USUAL = -0.5
"""The mean of all values: one in four is 1."""

RATES = 1, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12
"""Of the matrix, which has the best of them."""


def drawn(
    *shape: int, source: torch.Generator, traits: int = 12
) -> tuple[Keys, Values]:
    """Keys, of length 1, and values of texts of the shape [*texts, T]."""
    signs = 2.0 * torch.randint(2, (*shape, traits), generator=source) - 1
    order = torch.rand(*shape[:-1], traits, generator=source).argsort(-1)
    wanted = torch.randint(2, (*shape[:-1], 1, 2), generator=source)
    two = order[..., None, :2].expand(*shape, 2)
    both = (signs.gather(-1, two) == 2 * wanted - 1).all(-1)
    return signs / traits**0.5, 2.0 * both - 1


def agreement(x: Keys, y: Keys) -> Tensor:
    """The covariance of two keys' values, over all habits.

    A habit holds of both keys with a chance of a quarter if they share its
    two traits.
    """
    traits = x.shape[-1]
    shared = ((x @ y.mT + 1) * traits / 2).round()
    pairs = math.comb(traits, 2)
    return shared * (shared - 1) / 2 / pairs - 1 / 4


def moving(units: int, traits: int) -> int:
    """Numbers that a network of this many hidden units learns with."""
    return traits * units + units + units + 1


def network_start(
    source: torch.Generator, traits: int, way: str = "steps"
) -> list[Tensor]:
    """An ordinary start, [SEEDS, 1, ...], with a rate per weight.

    With "frozen" the first matrix and its bias do not learn, and there are
    as many units as numbers move otherwise.
    """
    rates, units = [3.0, 0.01, 0.01, 0.01], hidden_walls.HIDDEN
    if way == "frozen":
        units = moving(units, traits) - 1  # and the last bias
        rates = [1.0, 1.0, 1 / units, 0.01]
    return [
        torch.randn(SEEDS, 1, traits, units, generator=source),
        torch.randn(SEEDS, 1, 1, units, generator=source) / 2,
        torch.randn(SEEDS, 1, units, 1, generator=source) / units**0.5,
        torch.zeros(SEEDS, 1, 1, 1),
        torch.tensor(rates).log().expand(SEEDS, 1, 4)[..., None, None],
    ]


def errors(found: Values, v: Values) -> Tensor:
    """Squared error per 16 tokens, over that of always guessing the mean."""
    squares = (found - v).square().mean(-2) / (1 - USUAL**2)
    return squares.unflatten(-1, (-1, EVERY)).mean(-1)


def tested(traits: int, texts: int = 128) -> tuple[Keys, Values]:
    """The texts of all tests."""
    source = torch.Generator().manual_seed(99)
    return drawn(texts, TOKENS, source=source, traits=traits)


def floor(k: Keys, v: Values) -> Tensor:
    """The errors of the best fixed features."""
    k, v = k.double(), v.double()
    noise = 1e-6 * torch.eye(k.shape[-2]).to(k)
    return errors(
        USUAL + hidden_walls.best_fit(agreement(k, k) + noise, v - USUAL), v
    )


def by_matrix(k: Keys, v: Values) -> Tensor:
    """The errors of the delta rule at its best rate."""
    found = (
        errors(USUAL + hidden_walls.delta_rule(k, v - USUAL, rate), v)
        for rate in RATES
    )
    return min(found, key=torch.Tensor.mean)


def by_network(traits: int, way: str, steps: int) -> list[Tensor]:
    """The errors of a network that was trained, one per seed."""
    slow = hidden_walls.trained(
        functools.partial(hidden_walls.guesses, way=way, chunk=CHUNK),
        network_start(torch.Generator().manual_seed(0), traits, way),
        0.03,
        steps,
        functools.partial(drawn, traits=traits),
        TOKENS,
    )
    k, v = tested(traits)
    return [
        errors(hidden_walls.network([x[i] for x in slow], k, v, 1, way)[0], v)
        for i in range(SEEDS)
    ]


def main() -> None:
    """Run all memories and print their errors as one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traits", nargs="*", type=int, default=list(TRAITS))
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    found = {}
    for traits in arguments.traits:
        texts = tested(traits)
        lines = {"floor": [floor(*texts)], "matrix": [by_matrix(*texts)]}
        for way in TRAITS[traits]:
            lines[way] = by_network(traits, way, arguments.steps)
        found[str(traits)] = {
            name: [hidden_walls.rounded(x) for x in seeds]
            for name, seeds in lines.items()
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
