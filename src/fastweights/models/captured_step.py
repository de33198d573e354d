"""A step of a model as a CUDA graph, which is one launch.

A step is some hundred launches, which take Python twenty times as long as the
GPU. Captured once, they are one: all that a step reads and writes (states,
the last token, what has come to its end) stays where it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastweights import torch_internals
from fastweights.arguments import TENSOR_TYPES
from fastweights.layers.common.state import first_tokens
from fastweights.models.model import LanguageModel, LayerStates
from fastweights.ops.common.backends import record_run

SPARE_TOKENS = 256
"""For how many tokens more than there are a captured step has room."""


class CapturedStep:
    """A step of a model as a CUDA graph, which is one launch.

    The first call is the step in Python, which loads kernels. From the second
    on it is captured, and what it reads and writes stays where it is.

    Args:
        tokens_per_step: that a step reads.
        graph_pool: a handle of memory that other captured steps use too, of
            which no two run at a time; None: it has its own.
    """

    def __init__(
        self, tokens_per_step: int = 1, graph_pool: Any = None
    ) -> None:
        self.tokens_per_step, self.graph_pool = tokens_per_step, graph_pool
        self.graph: torch.cuda.CUDAGraph | None = None
        self.room, self.warm = 0, False

    def __call__(
        self, step: Callable[[LayerStates], LayerStates], states: LayerStates
    ) -> LayerStates:
        """The states after a step, which is the same one in each call."""
        if not self.warm:
            self.warm = True
            return step(states)
        with_keys = [s for s in states if s is not None and s.keys is not None]
        most = max((s.read_at_most for s in with_keys), default=0)
        used = most + self.tokens_per_step
        if self.graph is None or (with_keys and used > self.room):
            self._capture(step, states, used)
        assert self.graph is not None
        record_run("graph step")
        self.graph.replay()
        for state in with_keys:
            state.read_at_most += self.tokens_per_step
        return states

    def _capture(
        self,
        step: Callable[[LayerStates], LayerStates],
        states: LayerStates,
        used: int,
    ) -> None:
        """The step as a graph, on keys and values of ``used`` tokens or more.

        Softmax attention in a graph reads all the room that it is given:
        here an eighth more than is used, until that is used too.
        """
        room = used + max(SPARE_TOKENS, used // 8)
        views = [None if s is None else first_tokens(s, room) for s in states]
        self.graph = None  # its memory is the next one's
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        capturing = _capture_stream(current.device)
        capturing.wait_stream(current)
        with torch.cuda.stream(capturing):
            graph.capture_begin(self.graph_pool, "thread_local")
            try:
                step(views)
            finally:  # else CUDA's random numbers stay those of a capture
                graph.capture_end()
        current.wait_stream(capturing)
        self.graph, self.room = graph, room


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream(device)


def is_capturable(model: LanguageModel, token: Tensor) -> bool:
    """Whether a step does the same whenever it runs, and on one GPU.

    All modules are this library's or PyTorch's, without hooks, and parameters
    plain tensors there; not under torch.compile, autocast, or a mode that
    looks at operators. A capture that fails leaves CUDA's random numbers
    broken, so that other modules are not tried.
    """
    return (
        token.is_cuda
        and not torch.cuda.is_current_stream_capturing()
        and not torch.is_autocast_enabled("cuda")
        and not torch_internals.is_traced()
        and not torch_internals.has_global_hooks()
        and all(
            type(module).__module__.split(".")[0] in ("fastweights", "torch")
            and "forward" not in vars(module)
            and not module._forward_hooks
            and not module._forward_pre_hooks
            and module._compiled_call_impl is None
            for module in model.modules()
        )
        and all(
            type(x) in TENSOR_TYPES and x.device == token.device
            for x in model.parameters()
        )
    )
