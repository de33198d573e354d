"""Habits: texts that hide combinations of traits, and who finds them.

A text is a codebase, and a key one of its functions, with traits that are each
there or not. Every text hides two habits. A habit is a pair of traits and how
each has to be, and a function fits it if both are so. The value is 1 where the
first habit fits, less 1 where the second does. In some texts a habit fits
where exactly one of its traits is there, and in some it has three traits. A
memory says what it expects of a function, is told the value, and learns. Its
error is that of these guesses. What is slow is trained over many texts:

    python -m fastweights_lab.experiments.hidden_habits > hidden_habits.json

is the record in ``data``: the networks' trained starts, three seeds each, how
many functions the list of all features needs, and the errors of a programmer
who tries all pairs. It takes three quarters of an hour on one core.

``ttt`` reads as TTT's memories do (Sun et al. 2024): a matrix, or a network of
GELU units, whose gradients are taken where a chunk of 16 begins, with one rate
for all weights. It leaves out their LayerNorm, since a value here is a number.
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

from fastweights.deep.dual_form import (
    answer_queries,
    as_layers,
    gradients,
    layer_outputs,
    map_layers,
    sum_gradients,
)

FUNCTIONS, EVERY = 512, 16
"""Of a text, and how many an error is averaged over."""

TEXTS, SEEDS, UNITS = 32, 3, 16
CHUNK = 4
"""Functions that take their gradients at the same weights, in training."""

TTT_CHUNK = 16
"""The same in TTT's memories, in training and after it."""

SQUARE = 3 / 8
"""The mean square of all values."""

ODD_SQUARE = 1 / 2
"""The same, if habits fit where exactly one trait is there."""

THREE_SQUARE = 7 / 32
"""The same, if habits have three traits."""

ENOUGH = 0.1
"""The error at which habits count as found."""

MOST = 2**22
"""Pairs of habits at which the programmer begins to try each with each."""

Keys = Float[Tensor, "*texts T K"]
Values = Float[Tensor, "*texts T"]
Habits = Int[Tensor, "*texts 2 size"]
"""The traits of each habit."""


def new_habits(
    k: Keys, source: torch.Generator, size: int = 2
) -> tuple[Values, Habits]:
    """The values of keys by two habits per text, and the habits."""
    *texts, T, traits = k.shape
    order = torch.rand(*texts, 1, traits, generator=source).argsort(-1)
    named = order[..., : 2 * size]
    wanted = torch.randint(2, named.shape, generator=source)
    there = k.gather(-1, named.expand(*texts, T, 2 * size)) > 0
    fits = (there == wanted).unflatten(-1, (2, size)).all(-1).float()
    habits = named[..., 0, :].unflatten(-1, (2, size))
    return fits[..., 0] - fits[..., 1], habits


def exactly_one(k: Keys, habits: Habits) -> Values:
    """The values if a habit fits where just one of its two traits is there."""
    four = habits.flatten(-2)[..., None, :].expand(*k.shape[:-1], 4)
    there = k.gather(-1, four).sign().unflatten(-1, (2, 2))
    fits = (1 - there.prod(-1)) / 2
    return fits[..., 0] - fits[..., 1]


def drawn(
    *shape: int, source: torch.Generator, traits: int, size: int = 2
) -> tuple[Keys, Values, Habits]:
    """Keys, of length 1, and values of texts [*texts, T], and their habits."""
    signs = 2.0 * torch.randint(2, (*shape, traits), generator=source) - 1
    k = signs / traits**0.5
    return k, *new_habits(k, source, size)


def drawn_odd(
    *shape: int, source: torch.Generator, traits: int
) -> tuple[Keys, Values, Habits]:
    """As ``drawn``, of texts in which exactly one trait has to be there."""
    k, _, habits = drawn(*shape, source=source, traits=traits)
    return k, exactly_one(k, habits), habits


def tested(
    traits: int,
    texts: int = 128,
    functions: int = FUNCTIONS,
    size: int = 2,
) -> tuple[Keys, Values, Habits]:
    """The texts of all tests."""
    source = torch.Generator().manual_seed(99)
    return drawn(texts, functions, source=source, traits=traits, size=size)


def errors(
    guesses: Float[Tensor, "... T"], v: Values, square: float = SQUARE
) -> Tensor:
    """Squared error per 16 functions, over that of always guessing 0."""
    squares = (guesses - v).square().mean(-2) / square
    return squares.unflatten(-1, (-1, EVERY)).mean(-1)


def needed(errors: Float[Tensor, " n"]) -> int:
    """How many functions it takes until the error is small."""
    return EVERY * (1 + int((errors < ENOUGH).nonzero()[0]))


def network(
    weights: Sequence[Tensor], k: Keys, v: Values, chunk: int = 1
) -> tuple[Float[Tensor, "... T"], list[Tensor]]:
    """Guesses and last weights of a network that learns as it reads.

    Args:
        weights: W1 [..., K, U], b1 [..., 1, U], W2 [..., U, 1], b2
            [..., 1, 1] of W2^T tanh(W1^T k + b1) + b2, and the logs of
            their rates, [..., 4, 1, 1].
        k, v: the text.
        chunk: functions that take their gradients at the same weights.
    """
    *now, logs = weights
    rates = logs.exp().unbind(-3)
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
            w - rate * step
            for w, rate, step in zip(now, rates, steps, strict=True)
        ]
        said.append(guess[..., 0])
    return torch.cat(said, -1), now


def ttt(
    weights: Sequence[Tensor], k: Keys, v: Values
) -> Float[Tensor, "... T"]:
    """Guesses of TTT's memories, by their dual form.

    W_t = W' - rate sum_{s <= t} grad_s(W'), with the weights W' at a chunk's
    start; a function is guessed by the weights that the one before has left.

    Args:
        weights: W1 [..., K, U], b1 [..., U] and, of a network, W2 [..., U, 1]
            and b2 [..., 1]; and the logs of how far keys are stretched and of
            the rate, [..., 2, 1, 1].
        k, v: the text.
    """
    *start, logs = weights
    stretch, rate = logs.exp().unbind(-3)
    now, k = as_layers(start), stretch * k
    said = [layer_outputs(now, k[..., :1, :])[-1]]
    chunks = (
        x.split(TTT_CHUNK, -2) for x in (k.roll(-1, -2), k, v[..., None])
    )
    for q, x, target in zip(*chunks, strict=True):
        grads = gradients(now, x, target)
        share = rate * torch.ones(x.shape[-2], x.shape[-2]).to(x).tril()
        last = share[..., -1, :]
        said.append(answer_queries(q, now, None, grads, None, last, share))
        sums = sum_gradients(grads, last)
        now = map_layers(torch.sub, now, sums)
    return torch.cat(said, -2)[..., :-1, 0]


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
    two traits, and one habit of one key and the other of the other with a
    chance of a sixteenth.
    """
    traits = x.shape[-1]
    shared = ((x @ y.mT + 1) * traits / 2).round()
    pairs = math.comb(traits, 2)
    return (shared * (shared - 1) / 2 / pairs - 1 / 4) / 2


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
    return best_fit(agreement(k, k) + noise, v)


def by_programmer(
    k: Float[Tensor, "T K"], v: Float[Tensor, " T"], odd: bool = False
) -> Float[Tensor, " T"]:
    """Guesses for one text by the mean of all pairs of habits that fit so far.

    Exact, once MOST pairs or fewer are left. Before, a habit has only to fit
    the functions that show it: all that raise, or all that return None.

    Args:
        k, v: the text.
        odd: habits fit where exactly one of their traits is there.
    """
    traits = torch.combinations(torch.arange(k.shape[1]))
    x, y = (k > 0).mT[traits].unbind(1)
    fits = x ^ y
    if not odd:
        fits = torch.cat([x & y, x & ~y, ~x & y, ~x & ~y])
        traits = traits.repeat(4, 1)
    # The fits of two habits differ by the values if coded sums do.
    source = torch.Generator().manual_seed(0)
    codes = torch.randint(2**40, v.shape, generator=source)
    sums, total = torch.zeros(len(fits), dtype=torch.long), 0
    first = second = torch.arange(len(fits))
    said = []
    for now, code, value in zip(fits.mT, codes, v.long(), strict=True):
        weights = torch.ones(len(first), 1), torch.ones(1, len(second))
        if len(first) * len(second) <= MOST:
            alike = traits[first][:, None, :, None] == traits[second][:, None]
            both = ~alike.flatten(2).any(-1)
            both &= sums[first][:, None] - sums[second] == total
            kept, others = both.any(1), both.any(0)
            both = both[kept][:, others].float()
            first, second = first[kept], second[others]
            weights = both.sum(1, keepdim=True), both.sum(0, keepdim=True)
        share, other = (
            weights[0] / weights[0].sum(),
            weights[1] / weights[1].sum(),
        )
        said.append(
            now[first].float() @ share[:, 0] - other[0] @ now[second].float()
        )
        if value:
            first = first[now[first] == (value > 0)]
            second = second[now[second] == (value < 0)]
        sums, total = sums + code * now, total + code * value
    return torch.stack(said)


def by_softmax(k: Keys, v: Values, sharpness: float) -> Values:
    """Guesses by attention from each key to the keys before it."""
    said = F.scaled_dot_product_attention(
        k[..., 1:, :],
        k[..., :-1, :],
        v[..., :-1, None],
        is_causal=True,
        scale=sharpness,
    )
    return F.pad(said[..., 0], (1, 0))


def by_network(
    slow: Sequence[Tensor], k: Keys, v: Values
) -> Float[Tensor, "... T"]:
    """A network's guesses in training."""
    return network(slow, k, v, CHUNK)[0]


def network_start(
    source: torch.Generator, traits: int, units: int = UNITS
) -> list[Tensor]:
    """An ordinary start, [SEEDS, 1, ...], with a rate per weight."""
    rates = torch.tensor([3.0, 0.01, 0.01, 0.01])
    return [
        torch.randn(SEEDS, 1, traits, units, generator=source),
        torch.randn(SEEDS, 1, 1, units, generator=source) / 2,
        torch.randn(SEEDS, 1, units, 1, generator=source) / units**0.5,
        torch.zeros(SEEDS, 1, 1, 1),
        rates.log().expand(SEEDS, 1, 4)[..., None, None],
    ]


def ttt_start(
    source: torch.Generator, traits: int, units: int = UNITS
) -> list[Tensor]:
    """An ordinary start for ``ttt``, of a matrix if there are no units."""
    W1, b1, W2, b2, _ = network_start(source, traits, units)
    logs = torch.tensor([300.0**0.5, 0.01]).log()
    logs = logs.expand(SEEDS, 1, 2)[..., None, None]
    if not units:
        return [torch.zeros(SEEDS, 1, traits, 1), b2[..., 0], logs]
    return [W1 / 300**0.5, b1[..., 0, :], W2, b2[..., 0], logs]


def train(
    slow: Sequence[Tensor],
    draw: Callable[..., tuple],
    shape: Sequence[int],
    steps: int,
    read: Callable[..., Tensor] = by_network,
) -> list[Tensor]:
    """Slow weights of a memory after training on its guesses of new texts."""
    source = torch.Generator().manual_seed(1)
    slow = [x.clone().requires_grad_() for x in slow]
    optimiser = torch.optim.Adam(slow, 0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        k, v, _ = draw(*shape, source=source)
        losses = (read(slow, k, v) - v).square().mean((1, 2))
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
    """How a memory's start is trained."""

    traits: int
    units: int = UNITS
    functions: int = FUNCTIONS
    draw: Callable[..., tuple] = drawn
    start: Callable[..., list[Tensor]] = network_start
    read: Callable[..., Tensor] = by_network


TRAININGS = {
    "12 traits": Training(12),
    "24 traits": Training(24),
    "48 traits": Training(48),
    "96 traits": Training(96, functions=2 * FUNCTIONS),
    "12 traits, one unit": Training(12, 1),
    "48 traits, one unit": Training(48, 1),
    "48 traits, exactly one": Training(48, draw=drawn_odd),
    "48 traits, TTT": Training(48, start=ttt_start, read=ttt),
    "48 traits, TTT's matrix": Training(48, 0, start=ttt_start, read=ttt),
    "48 traits, exactly one, TTT": Training(
        48, draw=drawn_odd, start=ttt_start, read=ttt
    ),
    "48 traits, three each, TTT": Training(
        48,
        functions=4 * FUNCTIONS,
        draw=functools.partial(drawn, size=3),
        start=ttt_start,
        read=ttt,
    ),
}
"""By their names in the record."""

LISTS = {12: 256, 24: 512, 48: 1536, 96: 5120}
"""Traits, and how many functions the list of all features reads."""


def of_programmer(traits: int, odd: bool) -> Tensor:
    """Errors of a programmer who tries all pairs."""
    k, v, habits = tested(traits, TEXTS, 4 * EVERY)
    v = exactly_one(k, habits) if odd else v
    guesses = [by_programmer(*text, odd) for text in zip(k, v, strict=True)]
    return errors(torch.stack(guesses), v, ODD_SQUARE if odd else SQUARE)


def main() -> None:
    """Train networks and print their starts as one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", default=[*TRAININGS, "the list", "a programmer"]
    )
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name in arguments.names:
        if name == "the list":
            found[name] = [
                needed(errors(by_list(k, v), v))
                for k, v, _ in (tested(n, 8, T) for n, T in LISTS.items())
            ]
            continue
        if name == "a programmer":
            found[name] = {
                kind: [round_digits(of_programmer(n, odd)) for n in LISTS]
                for kind, odd in (("both", False), ("exactly one", True))
            }
            continue
        traits, units, functions, draw, start, read = TRAININGS[name]
        slow = train(
            start(torch.Generator().manual_seed(0), traits, units),
            functools.partial(draw, traits=traits),
            (SEEDS, TEXTS, functions),
            arguments.steps,
            read,
        )
        found[name] = [round_digits(x) for x in slow]
    print(json.dumps(found))


def round_digits(x: Tensor) -> Any:
    """A nest of lists, with five digits of each number."""
    if x.dim():
        return [round_digits(row) for row in x]
    return float(f"{x.item():.5g}")


if __name__ == "__main__":
    main()
