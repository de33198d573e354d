"""What kernels ask of a GPU: its memory, its size, how it multiplies."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch


class GPU(NamedTuple):
    """A GPU, and the properties of it that launch settings depend on."""

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
    """The properties of a device's GPU; for another device an H200's."""
    if device.type != "cuda":
        return GPU(232_448, 132, (9, 0), device)
    properties: Any = torch.cuda.get_device_properties(device)
    return GPU(
        properties.shared_memory_per_block_optin,
        properties.multi_processor_count,
        (properties.major, properties.minor),
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


def dot_precision(dtype: torch.dtype, K: int) -> str:
    """The precision of fp32 products: "tf32", or three of it, "tf32x3".

    One where PyTorch's own products may use TF32 (the ten leading bits of
    each operand); else three (operands split in two, fp32 accuracy). K > 128
    takes three always, which needs less shared memory. Half precision is
    multiplied exactly either way.
    """
    if dtype == torch.float32 and (K > 128 or not allows_tf32()):
        return "tf32x3"
    return "tf32"


def allows_tf32() -> bool:
    """Whether fp32 products on CUDA may round their operands to TF32.

    ``torch.backends.cuda.matmul.fp32_precision`` has the answer whichever
    switch was used: ``set_float32_matmul_precision("high")`` and "medium",
    ``allow_tf32`` and ``torch.backends.fp32_precision`` all set it. To ask
    an older switch raises after a newer one was used.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
