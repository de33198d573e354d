"""Tokens guessed ahead, several of which one pass of a model checks.

A pass reads of each row the tokens that are confirmed and that its states
have not taken in, then drafts of what may follow. What the model draws after
the last confirmed token and after each draft says which drafts are right;
they and the draw behind them are what the next pass has confirmed. States
advance by confirmed tokens alone (``LayerState.num_accepted``), so nothing is
ever rolled back: right drafts are read twice, which at few rows costs next to
nothing, since a pass takes as long as reading the weights.

A draw is a function of a row's seed, of the place and of the logits
(:mod:`fastweights.models.sampling`), so a draft is right if it is what plain
decoding would draw there: tokens are the same ones, greedy or sampled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.models.captured_step import CapturedStep, is_capturable
from fastweights.models.config import ModelConfig
from fastweights.models.decoding import (
    NOT_FINITE,
    copy_to_device,
    prefill,
    start_fetch,
)
from fastweights.models.model import LanguageModel, LayerStates
from fastweights.models.sampling import Sampling, draw_tokens
from fastweights.models.streaming import Draft, check_ids

PASS_SIZES = (1, 8, 12, 16)
"""Tokens that a pass may read of each row. It reads the fewest that are
enough: each costs time, each size a capture. What fills a row up is none."""

PASS_TOKENS = PASS_SIZES[-1]

MAX_DRAFTS = (PASS_TOKENS - 1) // 2
"""The most drafts of a row: if all are right, one pass has room for them, for
the draw behind them, and for as many drafts again."""

Text = list[int]


@dataclass
class Continuation:
    """A prompt, and what has been drawn after it.

    Args:
        text: all tokens so far.
        prompt_length: tokens of the prompt.
        max_new_tokens: that may follow it.
        stop_tokens: tokens at which the row is done.
    """

    text: Text
    prompt_length: int
    max_new_tokens: int
    stop_tokens: list[int]
    done: bool = False
    not_finite: bool = False
    """Whether logits were not finite."""

    def append_draws(self, draws: Text, drafts: Text) -> None:
        """Append the draws, up to the first whose draft is another token."""
        for token, draft in zip(draws, [*drafts, None], strict=False):
            self.not_finite = not self.done and token < 0
            if self.done or self.not_finite:
                return
            self.text.append(token)
            left = self.prompt_length + self.max_new_tokens - len(self.text)
            self.done = left == 0 or token in self.stop_tokens
            if token != draft:
                return

    def token_at(self, t: int) -> int:
        """The token that step t draws, or the last, which stands for none."""
        return self.text[min(self.prompt_length + t, len(self.text) - 1)]


def speculate(
    reader: Reader,
    logits: Float[Tensor, "N V"],
    propose: Callable[[], list[Text]],
) -> Iterator[Int[Tensor, " N"]]:
    """Yield what :func:`fastweights.models.streaming.stream` does.

    Args:
        reader: of the rows, which has read their prompts.
        logits: of the token after each prompt.
        propose: drafts up to MAX_DRAFTS tokens behind each row's text, none
            behind one that is done.
    """
    continuations, sent = reader.continuations, 0
    first = draw_tokens(logits, reader.sampling).tolist()
    for one, token in zip(continuations, first, strict=True):
        one.append_draws([token], [])
    while True:
        counts = [len(one.text) - one.prompt_length for one in continuations]
        both = zip(counts, continuations, strict=True)
        going = [n for n, one in both if not one.done]
        ready = min(going, default=max(counts))
        steps = [
            [one.token_at(t) for one in continuations]
            for t in range(sent, ready)
        ]
        sent, diverged = ready, any(one.not_finite for one in continuations)
        drafts, wait_for_draws = [], None
        if going and not diverged:  # the device reads on meanwhile
            drafts = propose()
            wait_for_draws = reader(drafts)
        if steps:
            yield from copy_to_device(steps, logits)
        if diverged:
            raise ValueError(NOT_FINITE)
        if wait_for_draws is None:
            return
        for one, drawn, draft in zip(
            continuations, wait_for_draws(), drafts, strict=True
        ):
            one.append_draws(drawn, draft)


class Reader:
    """A model that has taken in a part of each row's text.

    Args:
        model: which reads, in CUDA graphs where it can be captured.
        states: its states after the prompts; they are changed in place.
        continuations: whose texts grow.
        sampling: how they are drawn from.
    """

    def __init__(
        self,
        model: LanguageModel,
        states: LayerStates,
        continuations: list[Continuation],
        sampling: Sampling,
    ) -> None:
        self.model, self.states = model, states
        self.continuations = continuations
        self.sampling = sampling
        self.tokens_read = [one.prompt_length for one in continuations]
        # Tokens of each row, how many are new, and were drawn before.
        self.inputs = sampling.seed.new_zeros(
            len(continuations), PASS_TOKENS + 2
        )
        self.draws = self.inputs[:, :PASS_TOKENS].clone()
        self.captured_steps: dict[int, CapturedStep] = {}
        if is_capturable(model, self.draws):
            self.captured_steps = {T: CapturedStep(T) for T in PASS_SIZES}

    def __call__(self, drafts: list[Text]) -> Callable[[], list[Text]]:
        """Read what is new in each text, which the states take in, and drafts.

        Returns:
            a function that waits for the device and gives the draws after
            what is new and after each draft: -1 from logits that are not
            finite.
        """
        inputs, spans = [], []
        for one, n, draft in zip(
            self.continuations, self.tokens_read, drafts, strict=True
        ):
            new = [] if one.done else one.text[n:]
            tokens = new + draft
            padding = [0] * (PASS_TOKENS - len(tokens))
            num_drawn = n + 1 - one.prompt_length
            inputs.append([*tokens, *padding, len(new), num_drawn])
            spans.append((len(new), len(tokens)))
        self.inputs.copy_(copy_to_device(inputs, self.inputs))
        # Of one token each all have to be new.
        sizes = PASS_SIZES if set(spans) == {(1, 1)} else PASS_SIZES[1:]
        T = next(T for T in sizes if max(end for _, end in spans) <= T)
        step = functools.partial(self._step, T)
        if self.captured_steps:
            self.states = self.captured_steps[T](step, self.states)
        else:
            self.states = step(self.states)
        read = zip(self.tokens_read, spans, strict=True)
        self.tokens_read = [n + new for n, (new, _) in read]
        for state in self.states:
            if state is not None:
                state.read_at_most = max(self.tokens_read)
        fetched = start_fetch(self.draws)
        return lambda: [
            row[max(n - 1, 0) : end]
            for row, (n, end) in zip(fetched(), spans, strict=True)
        ]

    def _step(self, T: int, states: LayerStates) -> LayerStates:
        """Read T of the inputs, write T of the draws; the states after."""
        num_accepted, num_drawn = self.inputs[:, PASS_TOKENS:].T.contiguous()
        accepting = [s for s in states if s is not None and T > 1]
        for state in accepting:
            state.num_accepted = num_accepted
        logits, after = self.model(self.inputs[:, :T], states)
        if any(state.num_accepted is not None for state in accepting):
            raise ValueError(
                "model: got a layer that reads past LayerState.num_accepted, "
                "need each as those of fastweights.layers, or no draft"
            )
        sampling = self.sampling.for_draws(T, num_drawn)
        token = draw_tokens(logits.flatten(0, 1), sampling)
        self.draws[:, :T] = token.view(-1, T)
        return after


def make_proposer(
    draft: Draft,
    model: LanguageModel,
    continuations: list[Continuation],
    sampling: Sampling,
) -> Callable[[], list[Text]]:
    """A function that drafts MAX_DRAFTS tokens at most behind each text."""
    V = model.config.vocab_size
    if isinstance(getattr(draft, "config", None), ModelConfig):
        draft_model: Any = draft
        size = draft_model.config.vocab_size
        if size != V:
            raise ValueError(
                f"draft: got a vocabulary of {size}, need the model's, {V}"
            )
        device = draft_model.embedding.weight.device
        if device != sampling.seed.device:
            raise ValueError(
                f"draft: got device {device}, need the model's, "
                f"{sampling.seed.device}"
            )
        prompts = [torch.tensor(one.text) for one in continuations]
        _, states = prefill(
            draft_model, prompts, continuations[0].max_new_tokens + PASS_TOKENS
        )
        reader = Reader(draft_model, states, continuations, sampling)
        return lambda: draft_by_model(reader)
    if draft != "lookup" and not callable(draft):
        raise ValueError(
            f'draft: got {draft!r}, need "lookup", a LanguageModel, a '
            "function or None"
        )
    guessers: list[Any] = [
        NgramLookup() if draft == "lookup" else lambda text: draft(text.copy())
        for _ in continuations
    ]

    def propose() -> list[Text]:
        drafts: list[Text] = []
        for guess, one in zip(guessers, continuations, strict=True):
            tokens = [] if one.done else guess(one.text)
            drafts.append([int(token) for token in tokens][:MAX_DRAFTS])
            check_ids("draft", drafts[-1], V)
        return drafts

    return propose


def draft_by_model(reader: Reader) -> list[Text]:
    """What a second model draws, a pass for each draft."""
    drafts: list[Text] = [[] for _ in reader.continuations]
    for _ in range(MAX_DRAFTS):
        draws = reader(drafts)()  # none of a row that is done
        for draft, drawn in zip(drafts, draws, strict=True):
            draft += [max(token, 0) for token in drawn[-1:]]
    return drafts


class NgramLookup:
    """What followed the last tokens where they stood in the text before.

    The last three tokens, else two, else one, are looked up where they stood
    last (prompt lookup, Saxena 2023). What reaches the end of the text goes on
    from its beginning, as if the text had a period.
    """

    def __init__(self) -> None:
        self.seen, self.next_place = 0, dict[tuple[int, ...], int]()

    def __call__(self, text: Text) -> Text:
        """Up to MAX_DRAFTS tokens; the text is the last call's and more."""
        for end in range(max(self.seen, 1), len(text)):
            for n in range(1, min(3, end) + 1):
                self.next_place[tuple(text[end - n : end])] = end
        self.seen = len(text)
        for n in (3, 2, 1):
            place = self.next_place.get(tuple(text[-n:]))
            if place is not None:
                period = len(text) - place
                return [text[place + j % period] for j in range(MAX_DRAFTS)]
        return []
