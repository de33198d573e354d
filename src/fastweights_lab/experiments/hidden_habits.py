"""Habits: texts that hide a combination of traits, and who finds it.

A text is a codebase, and a key one of its functions, with traits that are each
there or not. Every text hides a habit, two traits and how each has to be: a
function that fits both has the value 1, and every other -1. A memory says what
it expects of a function, is told the value, and learns. Its error is that of
these guesses. What is slow is trained over many texts:

    python -m fastweights_lab.experiments.hidden_habits > hidden_habits.json

is the record in ``data``: the networks' trained starts, three seeds each. It
takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

FUNCTIONS, EVERY = 512, 16
"""Of a text, and how many an error is averaged over."""

TEXTS, SEEDS, UNITS = 32, 3, 16
CHUNK = 4
"""Functions that take their gradients at the same weights, in training."""

USUAL = -0.5
"""The mean of all values: one in four is 1."""

Keys = Float[Tensor, "*texts T K"]
Values = Float[Tensor, "*texts T"]
Habit = Int[Tensor, "*texts 2"]


def new_habit(k: Keys, source: torch.Generator) -> tuple[Values, Habit]:
    """The values of keys by a habit per text, and the habit's two traits."""
    *texts, T, traits = k.shape
    two = torch.rand(*texts, 1, traits, generator=source).argsort(-1)[..., :2]
    wanted = torch.randint(2, (*texts, 1, 2), generator=source)
    there = k.gather(-1, two.expand(*texts, T, 2)) > 0
    return 2.0 * (there == wanted).all(-1) - 1, two[..., 0, :]


def drawn(
    *shape: int, source: torch.Generator, traits: int
) -> tuple[Keys, Values, Habit]:
    """Keys, of length 1, and values of texts [*texts, T], and their habits."""
    signs = 2.0 * torch.randint(2, (*shape, traits), generator=source) - 1
    k = signs / traits**0.5
    return k, *new_habit(k, source)


def drawn_to_change(
    *shape: int, source: torch.Generator, traits: int, at: int | None = None
) -> tuple[Keys, Values, Int[Tensor, "*texts 2 2"]]:
    """Texts whose habit changes once, at a random function by default."""
    k, v, first = drawn(*shape, source=source, traits=traits)
    later, second = new_habit(k, source)
    start = torch.full((*shape[:-1], 1), at or 0)
    if at is None:
        start = torch.randint(shape[-1], start.shape, generator=source)
    v = torch.where(torch.arange(shape[-1]) < start, v, later)
    return k, v, torch.stack([first, second], -2)


def tested(traits: int, texts: int = 128) -> tuple[Keys, Values, Habit]:
    """The texts of all tests."""
    source = torch.Generator().manual_seed(99)
    return drawn(texts, FUNCTIONS, source=source, traits=traits)


def errors(guesses: Float[Tensor, "... T"], v: Values) -> Tensor:
    """Squared error per 16 functions, over that of guessing the mean."""
    squares = (guesses - v).square().mean(-2) / (1 - USUAL**2)
    return squares.unflatten(-1, (-1, EVERY)).mean(-1)


def network(
    weights: Sequence[Tensor], k: Keys, v: Values, chunk: int = 1
) -> tuple[Float[Tensor, "... T"], list[Tensor]]:
    """Guesses and last weights of a network that learns as it reads.

    Args:
        weights: W1 [..., K, U], b1 [..., 1, U], W2 [..., U, 1], b2
            [..., 1, 1] of W2^T tanh(W1^T k + b1) + b2, and the logs of
            their rates, [..., 4, 1, 1]. To forget it takes the logs of four
            rates of forgetting too: per function, each weight goes a part of
            the way back to its first value.
        k, v: the text.
        chunk: functions that take their gradients at the same weights.
    """
    *first, logs = weights[:5]
    now, rates = first, logs.exp().unbind(-3)
    kept = [torch.ones(())] * 4
    if len(weights) > 5:
        kept = [*(-chunk * weights[5].exp()).exp().unbind(-3)]
    said = []
    for x, target in zip(k.split(chunk, -2), v.split(chunk, -1), strict=True):
        W1, b1, W2, b2 = now
        h = (x @ W1 + b1).tanh()
        guess = h @ W2 + b2
        e2 = guess - target[..., None]
        e1 = (e2 @ W2.mT) * (1 - h * h)
        steps = (
            x.mT @ e1,
            e1.sum(-2, keepdim=True),
            h.mT @ e2,
            e2.sum(-2, keepdim=True),
        )
        now = [
            torch.lerp(w0, w, part) - rate * step
            for w0, w, part, rate, step in zip(
                first, now, kept, rates, steps, strict=True
            )
        ]
        said.append(guess[..., 0])
    return torch.cat(said, -1), now


def delta_rule(x: Keys, v: Values, rate: float) -> Values:
    """Guesses of a matrix that reads features x, by one triangular solve."""
    errors = torch.linalg.solve_triangular(
        torch.eye(x.shape[-2]).to(x) + rate * (x @ x.mT).tril(-1),
        v[..., None],
        upper=False,
        unitriangular=True,
    )
    return v - errors[..., 0]


def agreement(x: Keys, y: Keys) -> Tensor:
    """The covariance of two keys' values, over all habits.

    A habit holds of both keys with a chance of a quarter if they share its
    two traits.
    """
    traits = x.shape[-1]
    shared = ((x @ y.mT + 1) * traits / 2).round()
    pairs = math.comb(traits, 2)
    return shared * (shared - 1) / 2 / pairs - 1 / 4


def best_fit(overlaps: Float[Tensor, "*texts T T"], v: Values) -> Values:
    """Guesses of the best fit to all tokens so far, of the keys' overlaps.

    One Cholesky factor has the fits to all prefixes: its solution is each
    guess's error over the factor's diagonal.
    """
    L = torch.linalg.cholesky(overlaps)
    u = torch.linalg.solve_triangular(L, v[..., None], upper=False)[..., 0]
    return v - u * L.diagonal(dim1=-2, dim2=-1)


def by_list(k: Keys, v: Values) -> Values:
    """Guesses of the best fit to a list of all features."""
    k, v = k.double(), v.double()
    noise = 1e-6 * torch.eye(k.shape[-2]).to(k)
    return USUAL + best_fit(agreement(k, k) + noise, v - USUAL)


def by_matrix(k: Keys, v: Values, rate: float) -> Values:
    """Guesses of the delta rule, from the mean."""
    return USUAL + delta_rule(k, v - USUAL, rate)


def by_softmax(k: Keys, v: Values, sharpness: float) -> Values:
    """Guesses by attention from each key to the keys before it."""
    said = F.scaled_dot_product_attention(
        k[..., 1:, :],
        k[..., :-1, :],
        v[..., :-1, None],
        is_causal=True,
        scale=sharpness,
    )
    return F.pad(said[..., 0], (1, 0), value=USUAL)


def network_start(
    source: torch.Generator, traits: int, forgets: bool = False
) -> list[Tensor]:
    """An ordinary start, [SEEDS, 1, ...], with a rate per weight."""
    rates = torch.tensor([3.0, 0.01, 0.01, 0.01])
    start = [
        torch.randn(SEEDS, 1, traits, UNITS, generator=source),
        torch.randn(SEEDS, 1, 1, UNITS, generator=source) / 2,
        torch.randn(SEEDS, 1, UNITS, 1, generator=source) / UNITS**0.5,
        torch.zeros(SEEDS, 1, 1, 1),
        rates.log().expand(SEEDS, 1, 4)[..., None, None],
    ]
    if forgets:  # at first a part of 300 per function
        start.append(torch.full((SEEDS, 1, 4, 1, 1), -math.log(300)))
    return start


def trained(
    slow: Sequence[Tensor],
    draw: Callable[..., tuple],
    shape: Sequence[int],
    steps: int,
) -> list[Tensor]:
    """A network's slow weights after training on its guesses of new texts."""
    source = torch.Generator().manual_seed(1)
    slow = [x.clone().requires_grad_() for x in slow]
    optimiser = torch.optim.Adam(slow, 0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        k, v, _ = draw(*shape, source=source)
        losses = (network(slow, k, v, CHUNK)[0] - v).square().mean((1, 2))
        for x, grad in zip(
            slow, torch.autograd.grad(losses.sum(), slow), strict=True
        ):  # clipped at 0.1 per seed
            norm = torch.linalg.vector_norm(
                grad, dim=tuple(range(1, grad.dim())), keepdim=True
            )
            x.grad = grad * (0.1 / norm).clamp(max=1)
        optimiser.step()
        schedule.step()
    return [x.detach() for x in slow]


class Training(NamedTuple):
    """How a network's start is trained."""

    traits: int
    changes: bool = False
    """Whether the habit of a text, then twice as long, changes once."""
    forgets: bool = False


TRAININGS = {
    "12 traits": Training(12),
    "48 traits": Training(48),
    "changes": Training(48, changes=True),
    "forgets": Training(48, changes=True, forgets=True),
}
"""By their names in the record."""


def main() -> None:
    """Train networks and print their starts as one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", default=list(TRAININGS))
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    found = {}
    for name in arguments.names:
        traits, changes, forgets = TRAININGS[name]
        slow = trained(
            network_start(torch.Generator().manual_seed(0), traits, forgets),
            functools.partial(
                drawn_to_change if changes else drawn, traits=traits
            ),
            (SEEDS, TEXTS, FUNCTIONS * (1 + changes)),
            arguments.steps,
        )
        found[name] = [rounded(x) for x in slow]
    print(json.dumps(found))


def rounded(x: Tensor) -> Any:
    """A nest of lists, with five digits of each number."""
    if x.dim():
        return [rounded(row) for row in x]
    return float(f"{x.item():.5g}")


if __name__ == "__main__":
    main()
