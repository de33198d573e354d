"""Complete chunks, one behind the other: a loop in time, three ways.

Eager PyTorch runs the chunks' step as often as there are chunks. What a
backward needs of a step is several times the weights, so that with gradients
it is kept of some steps only and computed again for the others. torch.compile
would write the step down once per chunk; as a ``scan`` it compiles it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastweights import torch_internals

GROUP_SIZE = 16
"""Chunks per checkpoint: a backward of n holds the weights of n / 16 + 16."""

MAX_UNROLLED = 2
"""The most chunks that torch.compile unrolls."""

LoopState = Sequence[Tensor]
Step = Callable[..., tuple[LoopState, Tensor]]


def scan_chunks(
    step: Step,
    state: LoopState,
    tokens: Sequence[Float[Tensor, "B T H *rest"]],
    size: int,
) -> tuple[LoopState, Float[Tensor, "B T H V"]]:
    """Run ``step`` over all chunks; return the last state and all outputs.

    Args:
        step: (state, *tokens of a chunk [B, H, C, ...]) -> state, output
            [B, H, C, V]; a new state of the same shapes.
        state: tensors.
        tokens: T is a multiple of ``size``, and not 0.
        size: tokens C per chunk.
    """
    count = tokens[0].shape[1] // size
    # [N, B, H, C, ...]
    chunks = [
        x.unflatten(1, (count, size)).movedim(1, 0).transpose(2, 3)
        for x in tokens
    ]
    scans = torch_internals.SCAN and count > MAX_UNROLLED
    if scans and torch.compiler.is_compiling():
        state, outputs = _scanned(step, state, chunks)
    elif torch.is_grad_enabled() and count > 2 * GROUP_SIZE:
        state, outputs = _checkpointed(step, state, chunks)
    else:
        state, outputs = _looped(step, state, chunks)
    return state, outputs.transpose(2, 3).movedim(0, 1).flatten(1, 2)


def _scanned(
    step: Step, state: LoopState, chunks: Sequence[Tensor]
) -> tuple[LoopState, Tensor]:
    """Fold chunks [N, B, H, C, ...] by one loop in a compiled graph."""
    first = [x.clone(memory_format=torch.contiguous_format) for x in state]
    given = [x.contiguous() for x in chunks]
    assert torch_internals.SCAN is not None
    state, outputs = torch_internals.SCAN(
        lambda state, xs: step(state, *xs), first, given
    )
    # Gradients of one memory, which a scan refuses, become several.
    return [1.0 * x for x in state], outputs


def _looped(
    step: Step, state: LoopState, chunks: Sequence[Tensor]
) -> tuple[LoopState, Tensor]:
    """Fold chunks [N, B, H, C, ...] by a loop in Python."""
    outputs = []
    for xs in zip(*chunks, strict=True):
        state, output = step(state, *xs)
        outputs.append(output)
    return state, torch.stack(outputs)


def _checkpointed(
    step: Step, state: LoopState, chunks: Sequence[Tensor]
) -> tuple[LoopState, Tensor]:
    """Fold chunks, keeping for a backward the state before each group."""
    collected = []
    groups = ([*x.split(GROUP_SIZE)] for x in chunks)
    for group in zip(*groups, strict=True):
        state, outputs = checkpoint(
            _looped,
            step,
            state,
            group,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        collected.append(outputs)
    return state, torch.cat(collected)
