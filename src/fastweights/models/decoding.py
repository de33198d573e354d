"""What one more token of every row is, and that as a CUDA graph.

A step of a model is some hundred launches, which take Python twenty times as
long as the GPU. Recorded once, they are one launch: all that a step reads and
writes (states, the last token, what has come to its end) stays where it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweights import private
from fastweights.arguments import PLAIN
from fastweights.layers import LayerState
from fastweights.models.draws import Sampling
from fastweights.models.model import LanguageModel
from fastweights.parallel.ranks import refuse_ranks

LEAST_TOKENS = 4
"""Tokens for which a recording pays: it takes as long as two steps."""

ROOM = 256
"""Tokens more than are there that a recording of attention has room for."""

States = list[LayerState | None]

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


class Recording:
    """A step of a model as a CUDA graph, which is one launch.

    The first call is the step in Python, which loads kernels. From the second
    on it is recorded, and what it reads and writes stays where it is.

    Args:
        tokens: of each row that a step reads.
        memory: a handle of what other recordings use too, of which no two
            run at a time; None: it has its own.
    """

    def __init__(self, tokens: int = 1, memory: Any = None) -> None:
        self.tokens, self.memory = tokens, memory
        self.graph: torch.cuda.CUDAGraph | None = None
        self.room, self.warm = 0, False

    def __call__(
        self, step: Callable[[States], States], states: States
    ) -> States:
        """The states after a step, which is the same one in each call."""
        if not self.warm:
            self.warm = True
            return step(states)
        grows = [s for s in states if s is not None and s.keys is not None]
        used = max((s.used for s in grows), default=0) + self.tokens
        if self.graph is None or (grows and used > self.room):
            self._record(step, states, used)
        assert self.graph is not None
        self.graph.replay()
        for state in grows:
            state.used += self.tokens
        return states

    def _record(
        self, step: Callable[[States], States], states: States, used: int
    ) -> None:
        """The step as a graph, on keys and values of ``used`` tokens or more.

        Softmax attention in a graph reads all the room that it is given:
        here an eighth more than is used, until that is used too.
        """
        room = used + max(ROOM, used // 8)
        views = [None if s is None else _within(s, room) for s in states]
        self.graph = None  # its memory is the next one's
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream()
        beside = _stream(here.device)
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            graph.capture_begin(self.memory, "thread_local")
            try:
                step(views)
            finally:  # else CUDA's random numbers stay those of a capture
                graph.capture_end()
        here.wait_stream(beside)
        self.graph, self.room = graph, room


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings: cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream(device)


def _within(state: LayerState, room: int) -> LayerState:
    """The same memory, of keys and values the first ``room`` tokens'."""
    if state.keys is None or state.values is None:
        return replace(state)
    keys, values = state.keys[:, :room], state.values[:, :room]
    return replace(state, keys=keys, values=values)


def send(numbers: list[Any], to: Tensor) -> Tensor:
    """A tensor of the numbers where ``to`` is, which waits for no device."""
    here = torch.tensor(numbers, pin_memory=to.is_cuda)
    return here.to(to.device, non_blocking=True)


def fetch(x: Tensor) -> Callable[[], list[Any]]:
    """What waits for the device, and gives the numbers that x has by now."""
    here = x.to("cpu", non_blocking=True, copy=True)
    if not x.is_cuda:
        return here.tolist
    event = torch.cuda.current_stream(x.device).record_event()

    def numbers() -> list[Any]:
        event.synchronize()
        return here.tolist()

    return numbers


def is_recordable(model: LanguageModel, token: Tensor) -> bool:
    """Whether a step does the same whenever it runs, and on one GPU.

    All modules are this library's or PyTorch's, without hooks, and parameters
    plain tensors there; not under torch.compile, autocast, or a mode that
    looks at operators. A recording that fails leaves CUDA's random numbers
    broken, so that other modules are not tried.
    """
    return (
        token.is_cuda
        and not torch.cuda.is_current_stream_capturing()
        and not torch.is_autocast_enabled("cuda")
        and not private.is_traced()
        and not private.hooked_globally()
        and all(
            type(module).__module__.split(".")[0] in ("fastweights", "torch")
            and "forward" not in vars(module)
            and not module._forward_hooks
            and not module._forward_pre_hooks
            and module._compiled_call_impl is None
            for module in model.modules()
        )
        and all(
            type(x) in PLAIN and x.device == token.device
            for x in model.parameters()
        )
    )
