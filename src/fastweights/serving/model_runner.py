"""An engine's calls of the model: prompts that are read, steps of all rows.

On a GPU both are captured (:class:`.CapturedStep`). A step always has all
rows. Prompts are packed in one of a few sizes, and padded to it: a captured
call runs again with whatever fits its size.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from dataclasses import replace

import torch

from fastweights.models.captured_step import CapturedStep, is_capturable
from fastweights.models.decoding import copy_to_device, start_fetch
from fastweights.models.model import LanguageModel, LayerStates
from fastweights.models.pool import StatePool
from fastweights.models.sampling import Sampling, draw_tokens
from fastweights.ops.common.backends import recurrence_backend
from fastweights.serving.request import Request

KEYS_PER_BLOCK = 512
"""Keys that attention adds up at a time: it is given whole blocks of them."""

MIN_CAPTURED_PREFILL = 256
"""Tokens of the smallest captured read: fewer would take as long."""


class ModelRunner:
    """The engine's calls of the model, on the rows of a pool.

    A prefill reads prompts of requests that take no part in steps yet. A step
    has all rows, each at its own number, whether they take part or not: what
    one of them computes, and the order in which it is added up, depend on
    nobody else. What a step reads and writes stays where it is, so that on a
    GPU it can be captured.

    Args:
        model: reads the tokens.
        pool: has the model's states.
    """

    def __init__(self, model: LanguageModel, pool: StatePool) -> None:
        self.model, self.pool = model, pool
        zeros = functools.partial(
            torch.zeros, pool.num_rows, device=pool.device
        )
        ints = functools.partial(zeros, dtype=torch.int64)
        self.rows, self.token, self.drawn_token = ints() - 1, ints(), ints()
        self.sampling = Sampling(
            zeros(dtype=torch.float64), zeros(), ints(), ints()
        )
        self.states: LayerStates = [
            x.as_pool_unchecked(self.rows, 0) for x in pool.states
        ]
        self.is_capturable = is_capturable(model, self.token)
        # By two answers: are all rows greedy, do all draw from all tokens?
        self.captured_steps: dict[tuple[bool, bool], CapturedStep] = {}
        self.captures_prefills = self.is_capturable and can_capture_prefills(
            model, pool
        )
        # Graphs run one after the other, in the same memory.
        handle = torch.cuda.graph_pool_handle
        self.graph_pool = handle() if self.is_capturable else None
        # By the numbers of tokens and of sequences.
        self.prefills: dict[tuple[int, int], CapturedPrefill] = {}

    def prefill(self, pieces: list[tuple[Request, int]]) -> None:
        """Read the next n tokens of each request, given (request, n)."""
        tokens, offsets = [], [0]
        for request, n in pieces:
            start = self.pool.tokens_read[request.row]
            tokens += request.all_tokens[start : start + n]
            offsets.append(len(tokens))
        rows = [request.row for request, _ in pieces]
        counts = [n for _, n in pieces]
        if self.captures_prefills:
            T = next_power_of_2(max(len(tokens), MIN_CAPTURED_PREFILL))
            N = min(next_power_of_2(len(rows)), self.pool.num_rows)
            if (T, N) not in self.prefills:
                self.prefills[T, N] = CapturedPrefill(self, T, N)
            self.prefills[T, N](tokens, offsets, rows)
            self.pool.add_tokens_read(rows, counts)
            return
        packed = torch.tensor([tokens], device=self.pool.device)
        cu_seqlens = torch.tensor(offsets, device=self.pool.device)
        with self.pool.states_for(rows, counts) as states:
            self.model.hidden(packed, states, cu_seqlens)

    def enter(self, request: Request) -> None:
        """Add a request, which has read all but its last token, to steps."""
        row, sampling = request.row, self.sampling
        request.num_drawn = len(request.new_tokens)
        self.rows[row], self.token[row] = row, request.all_tokens[-1]
        sampling.seed[row] = request.seed
        sampling.num_drawn[row] = request.num_drawn
        sampling.temperature[row] = request.temperature
        # Not 1: the sum of all but the least likely may be rounded to it.
        sampling.top_p[row] = 2 if request.top_p == 1 else request.top_p

    def leave(self, row: int) -> None:
        """Take a row out of steps."""
        self.rows[row] = -1

    def step(self, requests: list[Request]) -> Callable[[], list[int]]:
        """Read the last token of the rows that take part; draw the next.

        Returns:
            a function that waits for the device and returns the tokens of
            all rows: -1 where logits were not finite.
        """
        used = max(self.pool.tokens_read[x.row] for x in requests)
        # No matter whose text is the longest.
        blocks = -(-(used + 1) // KEYS_PER_BLOCK)
        room = min(blocks * KEYS_PER_BLOCK, self.pool.tokens_per_row)
        for state in self.states:
            if state is not None:
                state.read_at_most = room - 1
        greedy = all(x.temperature == 0 for x in requests)
        whole_distribution = greedy or all(x.top_p == 1 for x in requests)
        sampling = replace(
            self.sampling, greedy=greedy, whole_distribution=whole_distribution
        )
        step = functools.partial(self._step, sampling)
        if self.is_capturable:
            captured = self.captured_steps.setdefault(
                (greedy, whole_distribution),
                CapturedStep(graph_pool=self.graph_pool),
            )
            captured(step, self.states)
        else:
            step(self.states)
        self.pool.add_tokens_read(
            [x.row for x in requests], [1] * len(requests)
        )
        for request in requests:
            request.num_drawn += 1
        return start_fetch(self.drawn_token)

    def _step(self, sampling: Sampling, states: LayerStates) -> LayerStates:
        logits, after = self.model(self.token[:, None], states)
        self.drawn_token.copy_(draw_tokens(logits[:, 0], sampling))
        self.token.copy_(self.drawn_token.clamp(min=0))
        return after


class CapturedPrefill:
    """A captured call of the model that reads packed tokens.

    Args:
        runner: has the model and the pool.
        T: tokens, padded after all sequences.
        N: sequences, padded by other rows, which read nothing.
    """

    def __init__(self, runner: ModelRunner, T: int, N: int) -> None:
        self.model, self.sizes = runner.model, (T, N + 1, N)
        self.inputs = runner.token.new_zeros(sum(self.sizes))
        self.tokens, self.cu_seqlens, rows = self.inputs.split(self.sizes)
        self.states: LayerStates = [
            x.as_pool_unchecked(rows, 0, all_inside=True)
            for x in runner.pool.states
        ]
        self.pool_rows = range(runner.pool.num_rows)
        self.captured_step = CapturedStep(graph_pool=runner.graph_pool)

    def __call__(
        self, tokens: list[int], offsets: list[int], rows: list[int]
    ) -> None:
        """Read into each row the tokens between its offsets."""
        T, num_offsets, N = self.sizes
        others = [row for row in self.pool_rows if row not in rows]
        inputs = tokens + [0] * (T - len(tokens))
        inputs += offsets + offsets[-1:] * (num_offsets - len(offsets))
        inputs += [*rows, *others][:N]
        # torch.tensor takes seven times as long: 2 ms for 8,192 tokens.
        integers = torch.frombuffer(array("q", inputs), dtype=torch.int64)
        self.inputs.copy_(copy_to_device(integers, self.inputs))
        self.captured_step(self._step, self.states)

    def _step(self, states: LayerStates) -> LayerStates:
        _, after = self.model.hidden(
            self.tokens[None], states, self.cu_seqlens
        )
        return after


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is n or more."""
    return 1 << (n - 1).bit_length()


def can_capture_prefills(model: LanguageModel, pool: StatePool) -> bool:
    """Whether the model reads packed prompts without waiting for the device.

    The family's layers do, where kernels compute all of them. Attention,
    networks and PyTorch's backends read how long sequences are.
    """
    weight = model.embedding.weight
    layers = [block.get_submodule("layer") for block in model.blocks]
    if not all(getattr(x, "supports_captured_packs", False) for x in layers):
        return False
    widths = {state.tensor("S").shape[-2] for state in pool.states}
    queries = [weight.new_empty(K) for K in widths]
    return {recurrence_backend("auto", q) for q in queries} == {"triton"}
