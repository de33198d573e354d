"""MesaNet's equations as one operator, which Triton computes.

Where its kernel (:mod:`fastweights.kernels.mesa`) does not run, conjugate
gradients are steps of PyTorch, each a call of linear attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.deep.ttt_operator import chosen
from fastweights.ops import LIBRARY, check_name, ran

MAX_K = 128
"""The widest head of the kernel; fp32: half of it."""

LIBRARY.define(
    "mesa_solve(Tensor b, Tensor k, Tensor g, Tensor beta, Tensor ridge, "
    "Tensor? initial_state, Tensor? cu_seqlens, int steps, bool half)"
    " -> Tensor"
)


def takes(backend: str, q: Tensor) -> bool:
    """Whether the kernel solves the equations of these tokens.

    Raises:
        ValueError: backend is none, or "triton" where the kernel cannot run.
    """
    check_name(backend)
    if backend == "loop":
        raise ValueError(
            "backend: got 'loop', need 'auto', 'triton' or 'chunkwise'"
        )
    K, most = q.shape[-1], MAX_K // (2 if q.dtype == torch.float32 else 1)
    if backend == "triton" and most < K:
        raise ValueError(
            f"backend: got 'triton', which needs heads of at most {most}, "
            f"not {K}"
        )
    if backend == "chunkwise" or most < K:
        return False
    if backend == "auto" and q.device.type != "cuda":
        return False
    return chosen(backend, q.device, q.dtype)


def _solve(*arguments: Any) -> Tensor:
    from fastweights.kernels import mesa as kernel

    *inputs, half = arguments
    ran("triton solve")
    dtype = torch.bfloat16 if half else torch.float32
    return kernel.solve(*inputs, dtype)


@torch.library.register_fake("fastweights::mesa_solve")
def _(b, k, g, beta, ridge, initial_state, cu_seqlens, steps, half):
    return b.new_empty(b.shape)


LIBRARY.impl("mesa_solve", _solve, "CompositeExplicitAutograd")
SOLVE = torch.ops.fastweights.mesa_solve.default
