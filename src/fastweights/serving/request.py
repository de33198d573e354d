"""A prompt and its answer, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from fastweights.arguments import check_integers, check_sizes
from fastweights.layers import LayerState
from fastweights.serving.prefixes import PrefixHasher

if TYPE_CHECKING:
    from fastweights.serving.engine import Engine


@dataclass(eq=False)
class Request:
    """A prompt and its answer: what :meth:`Engine.add` returns."""

    engine: Engine = field(repr=False)
    prompt: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    stop: frozenset[int]
    seed: int
    new_tokens: list[int] = field(default_factory=list)
    """The answer so far."""
    finish_reason: str | None = field(default=None, init=False)
    """Why it has ended, None before: "length" (there are max_new_tokens),
    "stop" (a token of ``stop`` came next), "cancelled", or "not finite" (the
    logits of its next token)."""
    all_tokens: list[int] = field(init=False, repr=False)
    """The prompt, and the answer so far."""
    row: int = field(default=-1, init=False, repr=False)
    """Its row of the engine's pool; -1: none."""
    initial_states: list[LayerState] | None = field(default=None, repr=False)
    """States that its row is to begin with."""
    num_drawn: int = field(default=0, init=False, repr=False)
    """Tokens that steps have drawn for it, fetched or not."""
    forks: list[Request] = field(default_factory=list, init=False, repr=False)
    """Requests that wait for it to read the prompt that they share."""
    hasher: PrefixHasher = field(
        default_factory=PrefixHasher, init=False, repr=False
    )
    """Finds the keys of what it has read, for the engine's prefixes."""

    def __post_init__(self) -> None:
        self.new_tokens = [*self.new_tokens]  # a fork's are its own
        self.all_tokens = self.prompt + self.new_tokens

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None

    def append(self, token: int) -> None:
        """Append a token to the answer."""
        self.new_tokens.append(token)
        self.all_tokens.append(token)

    @property
    def unread(self) -> int:
        """Tokens that are still to be read before it takes part in steps."""
        if self.done:
            return 0
        whole = len(self.all_tokens) - 1
        if self.row < 0:
            return whole
        return max(whole - self.engine.pool.tokens_read[self.row], 0)

    def fork(self, n: int, seed: int | None = None) -> list[Request]:
        """Make n requests with this one's prompt, options and tokens so far.

        They begin with copies of its state: what it has read is not read
        again. While it reads its prompt they wait for it.

        Args:
            n: how many.
            seed: of the first one's draws, the next ones' are seed + 1 and
                so on; None: PyTorch's generator draws each.
        """
        check_sizes(n=n)
        seeds = [as_seed(None if seed is None else seed + i) for i in range(n)]
        self.engine._collect()
        running = self in self.engine.running
        states = self.engine.pool.snapshot(self.row) if running else None
        forks = [replace(self, seed=s, initial_states=states) for s in seeds]
        if running or self.done:
            self.engine._enqueue(forks)
        else:
            self.forks += forks
        return forks

    def cancel(self) -> None:
        """End the request, if it has not ended, and free its row at once."""
        if not self.done:
            self.engine._end(self, "cancelled")


def as_seed(seed: int | None) -> int:
    """The seed, or one that PyTorch's generator draws."""
    if seed is None:
        return int(torch.randint(2**63 - 1, (), device="cpu"))
    check_integers(seed=seed)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed: got {seed}, need 0 to 2**63 - 1")
    return seed
