"""Requests that come and go, on one pool of states.

A prompt is read but for its last token, which is the first that a step reads:
steps alone draw tokens, and a state is always one token behind its text.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from fastweights.arguments import check_flags, check_sizes
from fastweights.models.model import LanguageModel
from fastweights.models.pool import StatePool
from fastweights.models.streaming import as_prompt, as_stops, check_sampling
from fastweights.serving.model_runner import ModelRunner
from fastweights.serving.prefixes import PrefixCache
from fastweights.serving.request import Request, as_seed

STEPS_PER_PREFILL = 2
"""Steps that take as long as to read few tokens. While there are more requests
than rows, prompts wait to be read with those of the next ones, until they
have lost as many tokens as such steps draw: each loses one per step."""

RunningStep = tuple[list[Request], list[int], Callable[[], list[int]]]
"""Requests of a step, their rows, and a function that waits for all tokens."""


class Engine:
    """Answers to many prompts at once, by a model on one device.

        engine = Engine(model, num_rows=64, tokens_per_row=8192)
        request = engine.add(prompt, max_new_tokens=100)
        while engine.busy:
            for request, token in engine.step():
                ...

    Requests wait for one of ``num_rows`` rows in the order in which they came.
    What they have to read goes in packed, at most ``max_prefill_tokens`` a
    step, between the tokens of those that have read it. On a GPU a step is
    captured, as in :meth:`.LanguageModel.generate`, and so are prefills, each
    filled up to a power of 2, by layers of the family; a hook has to be there
    before the engine is made.

    A request's tokens depend on its prompt, its options and its seed. Who
    takes part in its steps changes no bit (but of mLSTM's on a CPU). Products
    of a packed batch add up in an order that depends on its length, which
    changes states by 1e-8 to 1e-6 of their size in fp32. ``batch_invariant``
    has each prompt read alone, in pieces from multiples of
    ``max_prefill_tokens`` on: this changes no bit either, and many short
    prompts take longer then.

    Args:
        model: whose answers they are.
        num_rows: how many requests go on together.
        tokens_per_row: that softmax attention has room for.
        max_prefill_tokens: of prompts, at most, that a step reads.
        max_prefix_bytes: of states that are kept after prompts and after each
            multiple of ``max_prefill_tokens`` in one, for prompts that begin
            alike, and of their keys; what was not used for longest goes
            first.
        state_dtype: of the recurrences' states, as of :class:`StatePool`.
        batch_invariant: whether bits are the same whoever else is there.

    Raises:
        ValueError: a number is too small, or S of some layer cannot have
            that dtype.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        num_rows: int = 64,
        tokens_per_row: int = 8192,
        max_prefill_tokens: int = 2048,
        max_prefix_bytes: int = 0,
        state_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> None:
        check_sizes(max_prefill_tokens=max_prefill_tokens)
        check_flags(batch_invariant=batch_invariant)
        self.pool = StatePool(
            model, num_rows, tokens_per_row, state_dtype=state_dtype
        )
        self.runner = ModelRunner(model, self.pool)
        self.prefix_cache = PrefixCache(max_prefix_bytes)
        self.model, self.batch_invariant = model, batch_invariant
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self._last_step: RunningStep | None = None
        # For step() to return.
        self._new_tokens: list[tuple[Request, int]] = []
        self._lost_tokens = 0  # by prompts that wait for others

    def add(
        self,
        prompt: Int[Tensor, " T"],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: int | Iterable[int] | Tensor | None = None,
        seed: int | None = None,
    ) -> Request:
        """Make a request to answer a prompt, which waits for its turn.

        Args:
            prompt: tokens, one or more.
            max_new_tokens: how many the answer has at most.
            temperature: logits are divided by it; 0 takes the likeliest.
            top_p: draw from the fewest tokens with at least this probability.
            stop: tokens at which the answer ends, without them.
            seed: of the draws; None: PyTorch's generator draws one.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: an argument cannot be meant, or softmax attention has
                no room for so many tokens.
        """
        vocab_size = self.model.config.vocab_size
        tokens = as_prompt("prompt", prompt, vocab_size)
        check_sampling(max_new_tokens, temperature, top_p, None)
        length = len(tokens) + max_new_tokens
        if self.pool.has_keys and length > self.pool.tokens_per_row:
            raise ValueError(
                f"prompt: got {len(tokens)} tokens and max_new_tokens="
                f"{max_new_tokens}, need at most {self.pool.tokens_per_row} "
                "together, tokens_per_row"
            )
        stop_tokens = frozenset(as_stops(stop, vocab_size))
        sampling = temperature, top_p, stop_tokens, as_seed(seed)
        request = Request(self, tokens.tolist(), max_new_tokens, *sampling)
        self._enqueue([request])
        return request

    @property
    def busy(self) -> bool:
        """Whether a request goes on, or step() has tokens to return."""
        requests = self.waiting, self.prefilling, self.running
        return any((*requests, self._new_tokens, self._last_step))

    @torch.no_grad()
    def step(self) -> list[tuple[Request, int]]:
        """Take a step of all requests; return the tokens of the step before.

        They are fetched while the device computes this step's. If the model
        raises, so does this: requests whose states may be half changed wait
        again, before all others, and read their text anew. Logits that are
        not finite end the request that they belong to.
        """
        self._admit()
        self._prefill()
        last = self._step_running()
        self._collect()
        self._last_step = last
        new, self._new_tokens = self._new_tokens, []
        return new

    def _enqueue(self, requests: list[Request]) -> None:
        """Let requests wait for a row; end those that have all tokens."""
        for request in requests:
            if len(request.new_tokens) < request.max_new_tokens:
                self.waiting.append(request)
            else:
                request.finish_reason = "length"

    def _admit(self) -> None:
        """Give waiting requests free rows, and states kept of a prefix."""
        while self.waiting and self.pool.free:
            request = self.waiting.popleft()
            request.row = self.pool.acquire()
            self.prefilling.append(request)
            states, request.initial_states = request.initial_states, None
            if states is None:
                multiple = (
                    self.max_prefill_tokens if self.batch_invariant else 1
                )
                tokens = request.all_tokens[:-1]
                states = self.prefix_cache.longest(tokens, multiple)
            if states is not None:
                with self._requeue_on_error([request]):
                    self.pool.restore(request.row, states)

    def _prefill(self) -> None:
        """Read the next tokens of prompts, unless more are worth a wait."""
        pieces, room = [], self.max_prefill_tokens
        for request in self.prefilling:
            place = (
                self.pool.tokens_read[request.row] % self.max_prefill_tokens
            )
            n = min(request.unread, self.max_prefill_tokens - place)
            if self.batch_invariant and n > room:
                room = 0
            n = min(n, room)
            room -= n
            if n:
                pieces.append((request, n))
        self._lost_tokens += len(pieces)
        more_come = room and self.running and self.waiting
        worth_a_wait = STEPS_PER_PREFILL * self.pool.num_rows
        waits = more_come and self._lost_tokens < worth_a_wait
        if pieces and not waits:
            self._lost_tokens = 0
            packs = [[x] for x in pieces] if self.batch_invariant else [pieces]
            for pack in packs:
                self._prefill_packed(pack)
        for request in [x for x in self.prefilling if not x.unread]:
            self._start_steps(request)

    def _prefill_packed(self, pieces: list[tuple[Request, int]]) -> None:
        """Read the next n tokens of each request in one call; keep states."""
        requests = [request for request, _ in pieces]
        with self._requeue_on_error(requests):
            self.runner.prefill(pieces)
        if not self.prefix_cache.max_bytes:
            return
        for request in requests:
            read = self.pool.tokens_read[request.row]
            if read % self.max_prefill_tokens == 0 or not request.unread:
                key = request.hasher.key(request.all_tokens, read)
                self.prefix_cache.add(key, self.pool.snapshot(request.row))

    def _start_steps(self, request: Request) -> None:
        """Let a request take part in steps, and queue its forks."""
        self.prefilling.remove(request)
        self.running.append(request)
        self.runner.enter(request)
        forks, request.forks = request.forks, []
        if forks := [fork for fork in forks if not fork.done]:
            snapshot = self.pool.snapshot(request.row)
            for fork in reversed(forks):
                fork.initial_states = snapshot
                self.waiting.appendleft(fork)

    def _step_running(self) -> RunningStep | None:
        """Draw the next token of all requests that take part."""
        if not self.running:
            return None
        requests = [*self.running]
        with self._requeue_on_error(requests):
            wait_for_tokens = self.runner.step(requests)
        rows = [request.row for request in requests]
        for request in requests:
            if request.num_drawn == request.max_new_tokens:
                self._leave(request)
        return requests, rows, wait_for_tokens

    def _collect(self) -> None:
        """Give requests the tokens that the last step drew."""
        if self._last_step is None:
            return
        last, self._last_step = self._last_step, None
        requests, rows, wait_for_tokens = last
        tokens = wait_for_tokens()
        for request, row in zip(requests, rows, strict=True):
            token = tokens[row]
            if request.done:  # since that step began
                continue
            if token < 0:
                self._end(request, "not finite")
            elif token in request.stop:
                self._end(request, "stop")
            else:
                request.append(token)
                self._new_tokens.append((request, token))
                if len(request.new_tokens) == request.max_new_tokens:
                    self._end(request, "length")

    def _end(self, request: Request, reason: str) -> None:
        """End a request; the first of its forks reads on for the others."""
        request.finish_reason, request.initial_states = reason, None
        if request in self.waiting:
            self.waiting.remove(request)
        self._leave(request)
        forks, request.forks = request.forks, []
        if forks := [fork for fork in forks if not fork.done]:
            forks[0].forks += forks[1:]
            self.waiting.appendleft(forks[0])

    def _leave(self, request: Request) -> None:
        """Free the request's row, if it has one."""
        if request.row < 0:
            return
        self.runner.leave(request.row)
        self.pool.release(request.row)
        for requests in (self.prefilling, self.running):
            if request in requests:
                requests.remove(request)
        request.row = -1

    @contextlib.contextmanager
    def _requeue_on_error(self, requests: Iterable[Request]) -> Iterator[None]:
        """Let requests wait again if this raises: states may be half new."""
        try:
            yield
        except BaseException:
            self._collect()
            for request in reversed([x for x in requests if not x.done]):
                self._leave(request)
                self.waiting.appendleft(request)
            raise
