"""MesaNet's equations as one operator, which Triton computes.

Where its kernel (:mod:`fastweights.kernels.mesa`) does not run, conjugate
gradients are steps of PyTorch, each a call of linear attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.ops.common.backends import (
    deep_backend,
    max_head_size,
    record_run,
)
from fastweights.ops.common.registration import register

MAX_K = 128
"""The widest head of the kernel; fp32: half of it."""


def kernel_takes(backend: str, q: Tensor) -> bool:
    """Whether the kernel solves the equations of these tokens.

    Raises:
        ValueError: backend is none, or "triton" where the kernel cannot run.
    """
    K, limit = q.shape[-1], max_head_size(q, MAX_K)
    missing = "" if limit >= K else f"heads of at most {limit}, not {K}"
    return deep_backend(backend, q.device, q.dtype, missing) == "triton"


def _solve(
    b: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    ridge: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    steps: int,
    half: bool,
) -> Tensor:
    from fastweights.kernels import mesa as triton_mesa

    record_run("triton solve")
    matrices = (k, g, beta, ridge, initial_state, cu_seqlens)
    dtype = torch.bfloat16 if half else torch.float32
    return triton_mesa.solve(b, *matrices, steps, dtype)


SOLVE = register(
    "mesa_solve(Tensor b, Tensor k, Tensor g, Tensor beta, Tensor ridge, "
    "Tensor? initial_state, Tensor? cu_seqlens, int steps, bool half)"
    " -> Tensor",
    _solve,
    lambda b, *_: b.new_empty(b.shape),
)
