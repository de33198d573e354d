"""What kernels ask of a GPU: its memory, its size, what it can do."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch


class GPU(NamedTuple):
    """What launch settings depend on, and which one it is."""

    shared: int  # bytes of shared memory that one program may have
    multiprocessors: int
    capability: tuple[int, int]
    device: torch.device = torch.device("cpu")

    @property
    def has_large_shared(self) -> bool:
        """Whether a program may have as much shared memory as on Hopper."""
        return self.shared > 200_000

    @property
    def forbids_prefetch(self) -> bool:
        """Whether nothing may be loaded ahead: :func:`.settings_of`."""
        return self.capability[0] == 10


@functools.cache
def gpu_of(device: torch.device) -> GPU:
    """What kernels ask of a GPU; for another device an H200's."""
    if device.type != "cuda":
        return GPU(232_448, 132, (9, 0), device)
    found: Any = torch.cuda.get_device_properties(device)
    return GPU(
        found.shared_memory_per_block_optin,
        found.multi_processor_count,
        (found.major, found.minor),
        device,
    )


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it is done.

    That is programmatic dependent launch, which Hopper brought.
    """
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
