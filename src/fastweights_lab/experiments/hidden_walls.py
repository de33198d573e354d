"""Walls: a text that hides two directions, and memories that read it once.

Keys are directions in twelve dimensions. Every text hides two walls, planes
through the origin. A key has the value 1 on the bright side of both, -1 on the
dark side of both, and 0 elsewhere. A memory says what it expects of a key, is
told the value, and learns; its error is that of these guesses. What is slow is
trained over many texts:

    python -m fastweights_lab.experiments.hidden_walls > hidden_walls.json

is the record in ``data``: the network's trained starts, three seeds per way
of learning. It takes some minutes on one core.
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
from jaxtyping import Float
from torch import Tensor

from fastweights.deep.newton_schulz import newton_schulz

WIDTH, HIDDEN = 12, 16
NUMBERS = WIDTH * HIDDEN + HIDDEN + HIDDEN + 1
"""Of the network."""

TOKENS, TEXTS, SEEDS = 1024, 32, 3
CHUNK = 16
"""Tokens that take their gradients at the same weights, in training."""

Keys = Float[Tensor, "*texts T K"]
Values = Float[Tensor, "*texts T"]
Memory = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]


class Training(NamedTuple):
    """How slow weights are trained."""

    way: str = "steps"
    """Of ``network``."""
    jumps: bool = False
    """Whether every text's walls jump once, at a random token."""
    chunk: int = CHUNK


TRAININGS = {
    "steps": Training(),
    "Muon": Training("Muon"),
    "frozen": Training("frozen"),
    "jumps": Training(jumps=True),
    "forgets": Training("forgets", jumps=True),
    "jumps, surprised": Training("surprised", jumps=True),
    "chunks of 64": Training(chunk=64),
    "chunks of 256": Training(chunk=256),
}
"""By their names in the record."""


def drawn(
    *shape: int, source: torch.Generator, width: int = WIDTH, walls: int = 2
) -> tuple[Keys, Values, Float[Tensor, "*texts walls K"]]:
    """Keys and values of texts of the shape [*texts, T], and their walls."""
    normals = torch.randn(*shape[:-1], walls, width, generator=source)
    normals = F.normalize(normals, dim=-1)
    k = F.normalize(torch.randn(*shape, width, generator=source), dim=-1)
    return k, (k @ normals.mT).sign().mean(-1), normals


def drawn_to_jump(*shape: int, source: torch.Generator) -> tuple[Keys, Values]:
    """Texts [*texts, T], each with new walls from a random token on."""
    k, v, _ = drawn(*shape, source=source)
    normals = torch.randn(*shape[:-1], 2, WIDTH, generator=source)
    later = (k @ normals.mT).sign().mean(-1)
    at = torch.randint(shape[-1], (*shape[:-1], 1), generator=source)
    return k, torch.where(torch.arange(shape[-1]) < at, v, later)


def surprised(
    errors: Float[Tensor, "*texts n 1"], short: Tensor, long: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """How much is kept after n tokens, and running means of squared errors.

    The means are over about 16 and 128 tokens. Where the short one is above
    the long one by a half, which is a value's mean square, a token forgets
    most.
    """
    n, square = errors.shape[-2], errors.square().mean(-2, keepdim=True)
    short = torch.lerp(short, square, min(n / 16, 1))
    part = (-n * (20 * (short - long) - 10).clamp(max=0).exp()).exp()
    return part, (short, torch.lerp(long, square, min(n / 128, 1)))


def network(
    weights: Sequence[Tensor],
    k: Keys,
    v: Values,
    chunk: int = 1,
    way: str = "steps",
) -> tuple[Values, list[Tensor]]:
    """Guesses and last weights of a network that learns as it reads.

    Args:
        weights: W1 [..., K, U], b1 [..., 1, U], W2 [..., U, 1], b2
            [..., 1, 1] of W2^T tanh(W1^T k + b1) + b2, and the logs of
            their rates, [..., 4, 1, 1]. To forget it takes the logs of four
            rates of forgetting too.
        k, v: the text.
        chunk: tokens that take their gradients at the same weights.
        way: "steps", the sum of the gradients; "Muon": the sum's singular
            values are set to 1, in the first matrix; "frozen": the first
            matrix and its bias stay as they are, so the hidden units are
            fixed features; "forgets": "steps", and per token each weight
            goes a part of the way back to its first value; "surprised":
            the same, and :func:`surprised` says how far.
    """
    *first, logs = weights[:5]
    now, rates = [*first], logs.exp().unbind(-3)
    kept, means = [torch.ones(())] * 4, (torch.zeros(()), torch.tensor(0.5))
    if way == "forgets":
        kept = [*(-chunk * weights[5].exp()).exp().unbind(-3)]
    said = []
    for x, target in zip(k.split(chunk, -2), v.split(chunk, -1), strict=True):
        W1, b1, W2, b2 = now
        h = (x @ W1 + b1).tanh()
        guess = h @ W2 + b2
        e2 = guess - target[..., None]
        steps = [h.mT @ e2, e2.sum(-2, keepdim=True)]
        if way != "frozen":
            e1 = (e2 @ W2.mT) * (1 - h * h)
            steps = [x.mT @ e1, e1.sum(-2, keepdim=True), *steps]
        if way == "Muon":
            steps[0] = newton_schulz(steps[0])
        if way == "surprised":
            part, means = surprised(e2, *means)
            kept = [part] * 4
        fixed = len(now) - len(steps)
        now[fixed:] = [
            torch.lerp(w0, w, part) - rate * step
            for w0, w, part, rate, step in zip(
                *(x[fixed:] for x in (first, now, kept, rates)),
                steps,
                strict=True,
            )
        ]
        said.append(guess[..., 0])
    return torch.cat(said, -1), now


def guesses(
    weights: Sequence[Tensor],
    k: Keys,
    v: Values,
    way: str,
    chunk: int = CHUNK,
) -> Values:
    """Of :func:`network`, alone, in chunks."""
    return network(weights, k, v, chunk, way)[0]


def delta_rule(
    x: Keys, v: Values, rate: Tensor | float, kept: float = 1.0
) -> Values:
    """Guesses of a matrix that reads features x, by one triangular solve.

    Per token it keeps a part of itself.
    """
    at = torch.arange(x.shape[-2]).to(x)
    left = kept ** (at[:, None] - at - 1).clamp(min=0)
    errors = torch.linalg.solve_triangular(
        torch.eye(len(at)).to(x) + rate * left * (x @ x.mT).tril(-1),
        v[..., None],
        upper=False,
        unitriangular=True,
    )
    return v - errors[..., 0]


def best_fit(overlaps: Float[Tensor, "*texts T T"], v: Values) -> Values:
    """Guesses of the best fit to all tokens so far, of the keys' overlaps.

    One Cholesky factor has the fits to all prefixes: its solution is each
    guess's error over the factor's diagonal.
    """
    L = torch.linalg.cholesky(overlaps)
    u = torch.linalg.solve_triangular(L, v[..., None], upper=False)[..., 0]
    return v - u * L.diagonal(dim1=-2, dim2=-1)


def network_start(
    source: torch.Generator, way: str = "steps", chunk: int = CHUNK
) -> list[Tensor]:
    """An ordinary start, [SEEDS, 1, ...], with a rate per weight."""
    rates = torch.tensor([3.0, 0.01, 0.01, 0.01])
    rates[0] *= CHUNK / chunk  # a longer chunk adds up more gradients
    if way == "Muon":  # a step's size does not depend on the errors
        rates[0] = 0.05
    if way == "frozen":  # the second matrix alone has to learn
        rates[2:] = 0.02
    start = [
        torch.randn(SEEDS, 1, WIDTH, HIDDEN, generator=source),
        torch.randn(SEEDS, 1, 1, HIDDEN, generator=source) / 2,
        torch.randn(SEEDS, 1, HIDDEN, 1, generator=source) / HIDDEN**0.5,
        torch.zeros(SEEDS, 1, 1, 1),
        rates.log().expand(SEEDS, 1, 4)[..., None, None],
    ]
    if way == "forgets":  # at first a part of 300 per token
        start.append(torch.full((SEEDS, 1, 4, 1, 1), -math.log(300)))
    return start


def trained(
    memory: Memory,
    slow: Sequence[Tensor],
    lr: float,
    steps: int,
    draw: Callable[..., Sequence[Tensor]] = drawn,
    tokens: int | None = None,
) -> list[Tensor]:
    """The slow weights after training on the guesses of new texts.

    Their keys and values are what ``draw`` returns first.
    """
    source = torch.Generator().manual_seed(1)
    slow = [x.clone().requires_grad_() for x in slow]
    optimiser = torch.optim.Adam(slow, lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        k, v, *_ = draw(SEEDS, TEXTS, tokens or TOKENS, source=source)
        losses = (memory(slow, k, v) - v).square().mean((1, 2))
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


def tested(texts: int = 128) -> tuple[Keys, Values, Tensor]:
    """The texts of all tests."""
    return drawn(texts, TOKENS, source=torch.Generator().manual_seed(99))


def jumped(texts: int = 128) -> tuple[Keys, Values, Tensor]:
    """The same texts, with new walls from the middle on; and those walls."""
    k, v, _ = tested(texts)
    half = TOKENS // 2
    source = torch.Generator().manual_seed(98)
    new_k, new_v, walls = drawn(texts, half, source=source)
    k, v = (
        torch.cat([k[:, :half], new_k], 1),
        torch.cat([v[:, :half], new_v], 1),
    )
    return k, v, walls


def errors(found: Values, v: Values, every: int = 32) -> Tensor:
    """Squared error per ``every`` tokens, over the texts: [..., n].

    Relative to the values' own mean square, a half.
    """
    error = 2 * (found - v).square().mean(-2)
    return error.unflatten(-1, (-1, every)).mean(-1)


def main() -> None:
    """Train networks and print what came of it as one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", default=list(TRAININGS))
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    found = {}
    for name in arguments.names:
        way, jumps, chunk = TRAININGS[name]
        slow = trained(
            functools.partial(guesses, way=way, chunk=chunk),
            network_start(torch.Generator().manual_seed(0), way, chunk),
            0.03,
            arguments.steps,
            drawn_to_jump if jumps else drawn,
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
