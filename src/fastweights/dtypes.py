"""The dtypes of inputs, what they are computed in, and autocast's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

MIN_LOG_DECAY = -750.0
"""A log decay that is 0 in every dtype, as all below it."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that inputs of ``dtype`` are computed in: fp32 or fp64."""
    return dtype if dtype == torch.float64 else torch.float32


def upcast(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 if it is that: gates, norms and positions."""
    return x.to(compute_dtype(x.dtype))


def cast_for_autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands of a product in autocast's dtype if it is on, but fp64."""
    if not isinstance(operands[0], Tensor) or not under_autocast(operands[0]):
        return operands
    if not all(isinstance(x, Tensor) for x in operands):
        return operands
    dtype = torch.get_autocast_dtype(operands[0].device.type)
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(x.to(dtype) if x.dtype in narrow else x for x in operands)


def under_autocast(x: Tensor) -> bool:
    """Whether autocast is on where x lies; "meta" has none."""
    # By flags, since the name of a device takes ten times as long.
    kind = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def without_autocast(q: Tensor) -> AbstractContextManager:
    """A context without autocast; one that is off is not entered: 5 us."""
    if not under_autocast(q):
        return nullcontext()
    return torch.autocast(q.device.type, enabled=False)
