"""Triton kernels. Importing this package does not import Triton.

``README.md`` beside this file shows how they work together, ``TUNING.md``
why they are as they are.

What stands here is what the wrappers of one kernel do on the host before a
launch (linear, prefix): they check their arguments, and name the one
that does not fit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.arguments import MAX_K, check_arguments, wrong_shape


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    initial_state: Tensor | None,
    chunk_size: int,
) -> None:
    """Raise TypeError or ValueError for the first argument that is wrong."""
    if isinstance(q, Tensor) and q.dtype == torch.float64:
        raise TypeError(
            "q: got torch.float64, need torch.float32, float16 or bfloat16"
        )
    if isinstance(q, Tensor) and q.dim() == 4 and q.shape[3] > MAX_K:
        wrong_shape("q", q, f"[B, T, H, K] with K <= {MAX_K}")
    check_arguments(
        q, k, v, None, None, scale, initial_state, None, chunk_size
    )
    if chunk_size is None:
        raise TypeError("chunk_size: got None, need an int")
    if scale is None:
        raise TypeError("scale: got NoneType, need a real number")
    tensors = {"q": q, "k": k, "v": v, "initial_state": initial_state}
    for name, x in tensors.items():
        if x is not None and torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{name}: got a tensor that requires a gradient, need one "
                "that does not, or torch.no_grad(): this has no backward"
            )
    check_device(q)


def check_device(q: Tensor) -> None:
    """Raise if q is where, or of a dtype that, these kernels cannot run."""
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


def dot_precision(dtype: torch.dtype, K: int) -> str:
    """How the tensor cores multiply fp32: in one tf32 product or in three.

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
