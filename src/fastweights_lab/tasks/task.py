"""What every task has: sizes, seeded batches, and how sequences are built.

A sequence is put together of parts: what is told, and what is asked. A
question is two tokens, ASK and a key, and its answer is the target at the
key's position. The answer itself never stands behind the question, so that
no answer is read as one more thing to remember.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, get_args, get_type_hints

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import check_sizes
from fastweights.layers.common.layer_arguments import check_one_of

IGNORE = -100
"""The target and the group of a position at which nothing is asked."""

ASK = 1
"""The token that announces a question."""

SEEDS = 2**32


@dataclass(frozen=True)
class Batch:
    """Sequences of one task, all of one length; or parts of them.

    Only positions with a target count in the loss and in an accuracy.
    """

    tokens: Int[Tensor, "*B T"]
    """0 to vocabulary - 1, int64."""

    targets: Int[Tensor, "*B T"]
    """The token to say at this position, -100 where nothing is asked."""

    groups: Int[Tensor, "*B T"]
    """Which kind of question, an index of the task's ``kinds``; or -100."""

    def map(self, function: Any) -> Batch:
        """A function of a tensor, on all three."""
        parts = (self.tokens, self.targets, self.groups)
        return Batch(*map(function, parts))


def tell(tokens: Int[Tensor, "*B T"]) -> Batch:
    """Tokens at which nothing is asked."""
    nothing = torch.full_like(tokens, IGNORE)
    return Batch(tokens, nothing, nothing)


def ask(
    keys: Int[Tensor, "*B n"],
    answers: Int[Tensor, "*B n"],
    groups: Int[Tensor, "*B n"],
) -> Batch:
    """Questions, each of them ASK and a key: [.., 2 n]."""
    nothing = torch.full_like(keys, IGNORE)
    return Batch(
        alternate(torch.full_like(keys, ASK), keys),
        alternate(nothing, answers),
        alternate(nothing, groups),
    )


def join(*parts: Batch) -> Batch:
    """One after the other."""
    return Batch(
        torch.cat([part.tokens for part in parts], -1),
        torch.cat([part.targets for part in parts], -1),
        torch.cat([part.groups for part in parts], -1),
    )


def alternate(
    a: Int[Tensor, "*B n"], b: Int[Tensor, "*B n"]
) -> Int[Tensor, "*B m"]:
    """a[0], b[0], a[1], b[1], ..: m = 2 n."""
    return torch.stack([a, b], -1).flatten(-2)


def take(
    x: Int[Tensor, "*B n"], index: Int[Tensor, "*B m"]
) -> Int[Tensor, "*B m"]:
    """x[.., index], row by row."""
    return x.gather(-1, index)


def last_times(which: Int[Tensor, "*B m"], n: int) -> Int[Tensor, "*B n"]:
    """When each of n things came last, where which says what came when."""
    time = torch.arange(which.shape[-1], device=which.device)
    last = which.new_zeros(*which.shape[:-1], n)
    return last.scatter_reduce(-1, which, time.expand_as(which), "amax")


class Draws:
    """Random numbers of one seed, on one device."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = self.generator.device

    def uniform(self, *shape: int) -> Float[Tensor, " ..."]:
        """Numbers in [0, 1), fp32, which every device has."""
        return torch.rand(
            shape,
            generator=self.generator,
            device=self.device,
            dtype=torch.float32,
        )

    def integers(self, high: int, *shape: int) -> Int[Tensor, " ..."]:
        """Integers 0 to high - 1."""
        return torch.randint(
            high, shape, generator=self.generator, device=self.device
        )

    def orders(self, n: int, *shape: int) -> Int[Tensor, "... n"]:
        """0 to n - 1 in a random order, one order per place in shape."""
        return self.uniform(*shape, n).argsort(-1)

    def distinct(self, n: int, of: int, *shape: int) -> Int[Tensor, "... n"]:
        """n different integers 0 to of - 1, in a random order."""
        return self.uniform(*shape, of).topk(n, -1).indices


class Task(ABC):
    """A kind of sequence, with its sizes; each task is a frozen dataclass.

        task = OverwritingRecall(pairs=8)
        batch = task.batch(rows=64, seed=0)
        batch.tokens, batch.targets, batch.groups      # all [64, task.length]

    Raises:
        ValueError, TypeError: a size does not fit; the message names it,
            what it got and what it needs.
    """

    kinds: ClassVar[tuple[str, ...]]
    """What the groups of a batch are called."""

    values: int
    """Values that there are, where there are any."""

    def __post_init__(self) -> None:
        """Check every size, and every choice among a Literal's."""
        hints = get_type_hints(type(self))
        for of in fields(self):  # type: ignore[arg-type]
            value, choices = getattr(self, of.name), get_args(hints[of.name])
            if choices:
                check_one_of(choices, **{of.name: value})
            elif hints[of.name] is int:
                check_sizes(**{of.name: value})

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Tokens that there are."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens T of a sequence."""

    @property
    def chance(self) -> float:
        """Best accuracy, over all questions, without remembering anything.

        A guess that knows the layout and the position; here any value.
        """
        return 1 / self.values

    @abstractmethod
    def draw(self, rows: int, draws: Draws) -> Batch:
        """What :meth:`batch` returns, from a source of random numbers."""

    def batch(
        self, rows: int, seed: int, device: torch.device | str = "cpu"
    ) -> Batch:
        """Sequences, the same for the same seed on the same kind of device.

        Args:
            rows: sequences B.
            seed: 0 to 2^32 - 1; the CPU's generator would not tell a larger
                one from its last 32 bits.
            device: where they are drawn. A CPU and a GPU draw different ones.
        """
        check_sizes(rows=rows)
        if not isinstance(seed, int) or not 0 <= seed < SEEDS:
            raise ValueError(f"seed: got {seed!r}, need 0 to 2^32 - 1")
        return self.draw(rows, Draws(seed, device))

    def settings(self) -> dict[str, Any]:
        """The task's name and sizes, as JSON holds them."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return {"task": type(self).__name__, **fields}


def check_enough(name: str, value: int, least: int, what: str) -> None:
    """Raise ValueError unless the size is at least this; ``what`` says why."""
    if value < least:
        raise ValueError(f"{name}: got {value}, need {least} or more: {what}")
