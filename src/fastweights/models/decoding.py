"""What one more token of every row is: a step, drawn from its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweights.models.model import LanguageModel
from fastweights.models.recording import Recording, States, is_recordable
from fastweights.models.sampling import Sampling
from fastweights.ranks.group import refuse_ranks

LEAST_TOKENS = 4
"""Tokens for which a recording pays: it takes as long as two steps."""

NOT_FINITE = (
    "model: got logits that are not finite, need finite ones, or -inf for "
    "some tokens; its parameters may have diverged in training"
)


def prefill(
    model: LanguageModel, rows: list[Int[Tensor, " _"]], room: int
) -> tuple[Float[Tensor, "N V"], States]:
    """Logits of the token after each prompt, and the states after them.

    Args:
        model: which reads all of them, packed if there are several.
        rows: prompts.
        room: tokens that may follow one, which states have room for.
    """
    refuse_ranks("generate")
    device = model.embedding.weight.device
    if device.type == "meta":  # it is fetched when it is called
        device = rows[0].device
    lengths = [len(row) for row in rows]
    states = model.new_states(len(rows), max(lengths) + room, device=device)
    packed = torch.cat([row.to(device) for row in rows])[None]
    if len(rows) == 1:
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
        ends: tokens at which a row is done.
        tokens: how many steps there will be at most.
    """

    token: Int[Tensor, " N"]
    """The last token of each row."""

    done: Bool[Tensor, " N"]
    """Rows that have come to their end."""

    spoiled: Float[Tensor, " N"]
    """NaN for rows whose logits were not finite before they were done."""

    def __init__(
        self,
        model: LanguageModel,
        states: States,
        logits: Float[Tensor, "N V"],
        *,
        sampling: Sampling,
        ends: list[int],
        tokens: int,
    ) -> None:
        device, N = logits.device, len(logits)
        self.model, self.states, self.sampling = model, states, sampling
        self.token = torch.zeros(N, dtype=torch.int64, device=device)
        self.done = torch.zeros(N, dtype=torch.bool, device=device)
        self.spoiled = torch.zeros(N, device=device)
        self.ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self.logits: Tensor | None = logits
        self.recording: Recording | None = None
        if tokens >= LEAST_TOKENS and is_recordable(model, self.token):
            self.recording = Recording()

    def step(self) -> None:
        """Draw every row's next token, having read the one before.

        The first call only draws, from the prompts' logits.
        """
        if self.logits is not None:
            self._take(self.logits)
            self.logits = None
        elif self.recording is None:
            self.states = self._step(self.states)
        else:
            self.states = self.recording(self._step, self.states)

    def _step(self, states: States) -> States:
        """Read the last tokens, draw the next; the states after them."""
        logits, after = self.model(self.token[:, None], states)
        self._take(logits[:, 0])
        return after

    def _take(self, logits: Float[Tensor, "N V"]) -> None:
        """Draw from logits to ``token``; note what is done, or not finite."""
        largest, likeliest = logits.max(-1)
        nothing = largest * 0  # NaN of what is not finite
        if len(self.ends):
            nothing = nothing.where(~self.done, 0)
        self.spoiled += nothing
        self.token.copy_(self.sampling.draw(logits, largest, likeliest))
        if len(self.ends):
            self.done |= torch.isin(self.token, self.ends)


def send(numbers: Tensor | list[Any], to: Tensor) -> Tensor:
    """A tensor of the numbers where ``to`` is, which waits for no device."""
    on_host = torch.as_tensor(numbers)
    if to.is_cuda:
        on_host = on_host.pin_memory()
    return on_host.to(to.device, non_blocking=True)


def fetch(x: Tensor) -> Callable[[], list[Any]]:
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
