"""Triton kernels. Importing this package does not import Triton.

``README.md`` beside this file shows how they work together, ``TUNING.md``
why they are as they are.
"""

from __future__ import annotations

import torch


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
