"""One more token for every row: a step, and a draw from its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweights.models.captured_step import CapturedStep, is_capturable
from fastweights.models.model import LanguageModel, LayerStates
from fastweights.models.sampling import Sampling
from fastweights.ranks.group import refuse_ranks

MIN_CAPTURED_STEPS = 4
"""Tokens for which a capture pays: it takes as long as two steps."""

NOT_FINITE = (
    "model: got logits that are not finite, need finite ones, or -inf for "
    "some tokens; its parameters may have diverged in training"
)


def prefill(
    model: LanguageModel, prompts: list[Int[Tensor, " _"]], room: int
) -> tuple[Float[Tensor, "N V"], LayerStates]:
    """Logits of the token after each prompt, and the states after them.

    Args:
        model: which reads all of them, packed if there are several.
        prompts: tokens of each.
        room: tokens that may follow one, which states have room for.
    """
    refuse_ranks("generate")
    device = model.embedding.weight.device
    if device.type == "meta":  # it is fetched when it is called
        device = prompts[0].device
    lengths = [len(prompt) for prompt in prompts]
    capacity = max(lengths) + room
    states = model.preallocate_states(len(prompts), capacity, device=device)
    packed = torch.cat([prompt.to(device) for prompt in prompts])[None]
    if len(prompts) == 1:
        x, after = model.hidden(packed, states)
        return model.logits(x[:, -1]), after
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device)
    x, after = model.hidden(packed, states, cu_seqlens)
    return model.logits(x[0, cu_seqlens[1:] - 1]), after


class Decoding:
    """Rows of a model that go on together, a token per step.

    Args:
        model: whose tokens they are.
        states: its states after the prompts; they are changed in place.
        logits: [N, V], of the token after those prompts.
        sampling: how the rows' tokens are drawn.
        stop_tokens: tokens at which a row is done.
        max_steps: how many steps there will be at most.
    """

    token: Int[Tensor, " N"]
    """The last token of each row."""

    done: Bool[Tensor, " N"]
    """Rows that have come to their end."""

    not_finite: Float[Tensor, " N"]
    """NaN for rows with logits that were not finite before they were done."""

    def __init__(
        self,
        model: LanguageModel,
        states: LayerStates,
        logits: Float[Tensor, "N V"],
        *,
        sampling: Sampling,
        stop_tokens: list[int],
        max_steps: int,
    ) -> None:
        device, N = logits.device, len(logits)
        self.model, self.states, self.sampling = model, states, sampling
        self.token = torch.zeros(N, dtype=torch.int64, device=device)
        self.done = torch.zeros(N, dtype=torch.bool, device=device)
        self.not_finite = torch.zeros(N, device=device)
        self.stop_tokens = torch.tensor(
            stop_tokens, dtype=torch.int64, device=device
        )
        self.logits: Tensor | None = logits
        self.captured_step: CapturedStep | None = None
        if max_steps >= MIN_CAPTURED_STEPS and is_capturable(
            model, self.token
        ):
            self.captured_step = CapturedStep()

    def step(self) -> None:
        """Draw every row's next token, having read the one before.

        The first call only draws, from the prompts' logits.
        """
        if self.logits is not None:
            self._draw_from(self.logits)
            self.logits = None
        elif self.captured_step is None:
            self.states = self._step(self.states)
        else:
            self.states = self.captured_step(self._step, self.states)

    def _step(self, states: LayerStates) -> LayerStates:
        """Read the last tokens, draw the next; the states after them."""
        logits, after = self.model(self.token[:, None], states)
        self._draw_from(logits[:, 0])
        return after

    def _draw_from(self, logits: Float[Tensor, "N V"]) -> None:
        """Draw from logits to ``token``; note what is done, or not finite."""
        largest, likeliest = logits.max(-1)
        zero_or_nan = largest * 0  # NaN of what is not finite
        if len(self.stop_tokens):
            zero_or_nan = zero_or_nan.where(~self.done, 0)
        self.not_finite += zero_or_nan
        self.token.copy_(self.sampling.draw(logits, largest, likeliest))
        if len(self.stop_tokens):
            self.done |= torch.isin(self.token, self.stop_tokens)


def copy_to_device(numbers: Tensor | list[Any], like: Tensor) -> Tensor:
    """Copy numbers to the device of ``like``, without waiting for it."""
    on_host = torch.as_tensor(numbers)
    if like.is_cuda:
        on_host = on_host.pin_memory()
    return on_host.to(like.device, non_blocking=True)


def start_fetch(x: Tensor) -> Callable[[], list[Any]]:
    """Start a copy to the host.

    Returns:
        a function that waits for it and gives its list.
    """
    on_host = x.to("cpu", non_blocking=True, copy=True)
    if not x.is_cuda:
        return on_host.tolist
    event = torch.cuda.current_stream(x.device).record_event()

    def numbers() -> list[Any]:
        event.synchronize()
        return on_host.tolist()

    return numbers
