"""Kernels that chapters print; the library's own do more and are longer."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.arguments import (
    MAX_KERNEL_K,
    RecurrenceOperands,
    check_recurrence_arguments,
    refuse_shape,
)


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    initial_state: Tensor | None,
    chunk_size: int,
    beta: Tensor | None = None,
) -> None:
    """Raise TypeError or ValueError for the first argument that is wrong."""
    if isinstance(q, Tensor) and q.dtype == torch.float64:
        raise TypeError(
            "q: got torch.float64, need torch.float32, float16 or bfloat16"
        )
    if isinstance(q, Tensor) and q.dim() == 4 and q.shape[3] > MAX_KERNEL_K:
        refuse_shape("q", q, f"[B, T, H, K] with K <= {MAX_KERNEL_K}")
    operands = RecurrenceOperands(q, k, v, None, beta, None, initial_state)
    check_recurrence_arguments(operands, scale=scale, chunk_size=chunk_size)
    if chunk_size is None:
        raise TypeError("chunk_size: got None, need an int")
    if scale is None:
        raise TypeError("scale: got NoneType, need a real number")
    tensors = {"q": q, "k": k, "v": v, "beta": beta}
    tensors["initial_state"] = initial_state
    for name, x in tensors.items():
        if x is not None and torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{name}: got a tensor that requires a gradient, need one "
                "that does not, or torch.no_grad(): this has no backward"
            )
    from fastweights.kernels.tile import INTERPRETED

    if INTERPRETED and q.dtype == torch.bfloat16:
        raise TypeError(
            "q: got torch.bfloat16 in Triton's interpreter, which multiplies "
            "its bit patterns; need torch.float32 or torch.float16"
        )
    if not INTERPRETED and not q.is_cuda:
        raise ValueError(
            f"q: got device {q.device}, need a CUDA device, or Triton's "
            "interpreter: TRITON_INTERPRET=1 before Triton's first import"
        )
