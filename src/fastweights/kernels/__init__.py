"""Triton kernels. Importing this package does not import Triton.

What stands here is what every wrapper does on the host before a launch: it
checks its arguments, and names the one that does not fit.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_K = 256
CHUNK_SIZES = (16, 32, 64)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    chunk_size: int,
    *,
    interpreted: bool,
) -> None:
    """Raise TypeError or ValueError for the first argument that is wrong.

    ``interpreted`` says that Triton's interpreter runs the kernels.
    """
    tensors = {"q": q, "k": k, "v": v}
    if initial_state is not None:
        tensors["initial_state"] = initial_state
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, need a Tensor")
        if name == "q" and x.dtype not in DTYPES:
            raise TypeError(f"q: got {x.dtype}, need one of {DTYPES}")
        dtype = torch.float32 if name == "initial_state" else q.dtype
        if x.dtype != dtype:
            raise TypeError(f"{name}: got {x.dtype}, need {dtype}")
        if x.device != q.device:
            raise ValueError(
                f"{name}: got device {x.device}, need q's, {q.device}"
            )
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{name}: got a tensor that requires a gradient, need one "
                "that does not, or torch.no_grad(): this has no backward"
            )

    if q.dim() != 4 or min(q.shape) < 1 or q.shape[3] > MAX_K:
        need = f"[B, T, H, K], none of them 0, K <= {MAX_K}"
        raise ValueError(f"q: got shape {list(q.shape)}, need {need}")
    if k.shape != q.shape:
        raise ValueError(
            f"k: got shape {list(k.shape)}, need q's, {list(q.shape)}"
        )
    B, T, H, K = q.shape
    if (
        v.dim() != 4
        or v.shape[:2] != q.shape[:2]
        or min(v.shape) < 1
        or v.shape[2] % H
    ):
        need = f"[{B}, {T}, HV, V] with HV a multiple of q's {H} heads"
        raise ValueError(f"v: got shape {list(v.shape)}, need {need}")
    HV, V = v.shape[2:]
    if initial_state is not None and initial_state.shape != (B, HV, K, V):
        raise ValueError(
            f"initial_state: got shape {list(initial_state.shape)}, "
            f"need {[B, HV, K, V]}"
        )
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(
            f"chunk_size: got {chunk_size!r}, need one of {CHUNK_SIZES}"
        )
    if interpreted and q.dtype == torch.bfloat16:
        raise TypeError(
            "q: got torch.bfloat16 in Triton's interpreter, which multiplies "
            "its bit patterns; need torch.float32 or torch.float16"
        )
    if not interpreted and not q.is_cuda:
        raise ValueError(
            f"q: got device {q.device}, need a CUDA device, or Triton's "
            "interpreter: TRITON_INTERPRET=1 before Triton's first import"
        )


def dot_precision(dtype: torch.dtype, K: int) -> str:
    """How the tensor cores multiply fp32: in one tf32 product or in three.

    As ``torch.get_float32_matmul_precision()`` asks: three for "highest"
    (operands split in two, fp32 accuracy), else one (ten bits of mantissa).
    K > 128 takes three always, which needs less shared memory. Half
    precision is multiplied exactly either way.
    """
    exact = torch.get_float32_matmul_precision() == "highest" or K > 128
    return "tf32x3" if exact and dtype == torch.float32 else "tf32"
