"""What computes networks as fast weights: a kernel of Triton, or PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights import private
from fastweights.ops.backends import check_backend, choose_backend

LEADING = (9, 10)
"""Major compute capabilities whose registers the kernels do not exceed."""


@private.constant_in_graphs
def kernel_runs(
    backend: str, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether a kernel runs there, and for "auto" whether it is worth it.

    It is in half precision on Hopper and on Blackwell's data centre GPU. On
    others, and in fp32, it would keep kilobytes per thread outside of the
    registers (tests/compile/test_ttt.py), or not find room for its matrices.
    """
    if choose_backend(backend, device, dtype) != "triton":
        return False
    if backend == "triton":
        return True
    major, _ = torch.cuda.get_device_capability(device)
    return dtype != torch.float32 and major in LEADING


def by_kernel(backend: str, q: Tensor, fits: bool, need: str) -> bool:
    """Whether a kernel that ``fits`` these tokens is to compute them.

    Raises:
        ValueError: backend is none, or "triton" where the kernel cannot run;
            ``need`` says what it needs.
    """
    check_backend(backend)
    if backend == "loop":
        raise ValueError(
            "backend: got 'loop', need 'auto', 'triton' or 'chunkwise'"
        )
    if backend == "triton" and not fits:
        raise ValueError(f"backend: got 'triton', which needs {need}")
    if backend == "chunkwise" or not fits:
        return False
    if backend == "auto" and q.device.type != "cuda":
        return False
    return kernel_runs(backend, q.device, q.dtype)


def widest(q: Tensor, K: int) -> int:
    """The widest head of a kernel that takes K channels, and in fp32 half."""
    return K // 2 if q.dtype == torch.float32 else K
