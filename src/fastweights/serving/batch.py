"""All rows of a pool as one batch, a token at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from fastweights.models.decoding import Recording, States, is_recordable
from fastweights.models.draws import Sampling, drawn_from
from fastweights.models.model import LanguageModel
from fastweights.models.pool import StatePool
from fastweights.serving.request import Request

BLOCK = 512
"""Keys that attention adds up at a time: it is given whole blocks of them."""


class Batch:
    """What the device does for requests, on the rows of a pool.

    A step has all rows, each at its own number, whether they take part or
    not: what one of them computes, and the order in which it is added up,
    depend on nobody else. What a step reads and writes stays where it is,
    so that on a GPU it can be a recording.

    Args:
        model: that reads the tokens.
        pool: of its states.
    """

    def __init__(self, model: LanguageModel, pool: StatePool) -> None:
        self.model, self.pool = model, pool
        zeros = functools.partial(
            torch.zeros, len(pool.read), device=pool.device
        )
        whole = functools.partial(zeros, dtype=torch.int64)
        self.rows, self.token, self.drawn = whole() - 1, whole(), whole()
        self.sampling = Sampling(
            zeros(dtype=torch.float64), zeros(), whole(), whole()
        )
        self.states: States = [x.view(self.rows, 0) for x in pool.states]
        self.recordable = is_recordable(model, self.token)
        # By whether all rows are greedy, and draw from all tokens.
        self.recordings: dict[tuple[bool, bool], Recording] = {}

    def read(self, pieces: list[tuple[Request, int]]) -> None:
        """Have requests read the next tokens of their texts, so many each."""
        tokens, offsets = [], [0]
        for request, n in pieces:
            at = self.pool.read[request.row]
            tokens += request.text[at : at + n]
            offsets.append(len(tokens))
        rows, lengths = [x.row for x, _ in pieces], [n for _, n in pieces]
        states = self.pool.at(rows, lengths)
        packed = torch.tensor([tokens], device=self.pool.device)
        cu_seqlens = torch.tensor(offsets, device=self.pool.device)
        self.model.hidden(packed, states, cu_seqlens)

    def enter(self, request: Request) -> None:
        """A request takes part, which has read all but its last token."""
        row, draws = request.row, self.sampling
        request.drawn = len(request.tokens)
        self.rows[row], self.token[row] = row, request.text[-1]
        draws.seed[row], draws.drawn[row] = request.seed, request.drawn
        draws.temperature[row] = request.temperature
        # Not 1: the sum of all but the least likely may be rounded to it.
        draws.top_p[row] = 2 if request.top_p == 1 else request.top_p

    def leave(self, row: int) -> None:
        """A row takes no part from now on."""
        self.rows[row] = -1

    def step(self, requests: list[Request]) -> Callable[[], list[int]]:
        """Have those that take part read their last token; draw the next.

        Returns:
            what waits for the device, and gives the tokens of all rows: -1
            where logits were not finite.
        """
        used = max(self.pool.read[x.row] for x in requests)
        # No matter whose text is the longest.
        room = min(-(-(used + 1) // BLOCK) * BLOCK, self.pool.capacity)
        for state in self.states:
            if state is not None:
                state.used = room - 1
        greedy = all(x.temperature == 0 for x in requests)
        kind = greedy, greedy or all(x.top_p == 1 for x in requests)
        draws = replace(self.sampling, greedy=kind[0], whole=kind[1])
        step = functools.partial(self._step, draws)
        if self.recordable:
            recording = self.recordings.setdefault(kind, Recording())
            recording(step, self.states)
        else:
            step(self.states)
        for request in requests:
            self.pool.read[request.row] += 1
            request.drawn += 1
        drawn = self.drawn.to("cpu", non_blocking=True, copy=True)
        if not self.drawn.is_cuda:
            return drawn.tolist
        event = torch.cuda.current_stream(self.drawn.device).record_event()

        def tokens() -> list[int]:
            event.synchronize()
            return drawn.tolist()

        return tokens

    def _step(self, draws: Sampling, states: States) -> States:
        logits, after = self.model(self.token[:, None], states)
        self.drawn.copy_(drawn_from(logits[:, 0], draws))
        self.token.copy_(self.drawn.clamp(min=0))
        return after
