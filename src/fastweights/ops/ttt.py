"""TTT-Linear's whole mini-batches as one operator, which Triton computes.

Where its kernel (:mod:`fastweights.kernels.ttt`) does not run, what calls it
goes on as PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.dtypes import without_autocast
from fastweights.ops.common.backends import (
    deep_backend,
    max_head_size,
    record_run,
)
from fastweights.ops.common.registration import Operator

MAX_K, MAX_C = 128, 16
"""The widest head and the longest mini-batch of the kernel; fp32: half K."""


def kernel_takes(backend: str, q: Tensor, size: int, depth: int) -> bool:
    """Whether the kernel computes these tokens, by mini-batches of ``size``.

    Raises:
        ValueError: backend is none, or "triton" where the kernel cannot run.
    """
    K, limit = q.shape[-1], max_head_size(q, MAX_K)
    need = (
        f"one layer, heads of at most {limit} and mini-batches of at most "
        f"{MAX_C} tokens, not {depth}, {K} and {size}"
    )
    fits = depth == 1 and limit >= K and size <= MAX_C
    missing = "" if fits else need
    return deep_backend(backend, q.device, q.dtype, missing) == "triton"


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute outputs, and with ``keep`` what the backward needs."""
    from fastweights.kernels import ttt as triton_ttt

    *inputs, keep = arguments
    q = inputs[0]
    record_run("triton forward")
    X = torch.empty_like(q) if keep else q.new_empty(0)
    with without_autocast(q):
        inputs.append(X if keep else None)
        o, W, b = triton_ttt.forward(*inputs)
    return o, W, b, X


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, _, _, _, W, b, *_, keep = arguments
    X = q.new_empty(q.shape) if keep else q.new_empty(0)
    after = W.new_empty(W.shape), b.new_empty(b.shape)
    return q.new_empty(q.shape), *after, X


def _backward(
    do: Tensor | None,
    dW_after: Tensor | None,
    db_after: Tensor | None,
    *arguments: Any,
) -> list[Tensor]:
    """Gradients of all inputs; None is a result that nothing depends on."""
    from fastweights.kernels import ttt as triton_ttt

    q, k, v, rate, _, _, weight, bias, step_scale, saved, _ = arguments
    W_after, b_after, _ = saved
    record_run("triton backward")
    grads = (do, dW_after, db_after)
    output_grads = [
        torch.zeros_like(x) if dx is None else dx.contiguous()
        for dx, x in zip(grads, (q, W_after, b_after), strict=True)
    ]
    inputs = (q, k, v, rate, weight, bias, step_scale, *saved)
    with without_autocast(q):
        return triton_ttt.backward(*[*output_grads, *inputs])


TTT = Operator(
    "ttt_linear",
    "Tensor q, Tensor k, Tensor v, Tensor rate, Tensor W, Tensor b, "
    "Tensor weight, Tensor bias, Tensor step_scale",
    "bool keep",
    "Tensor o, Tensor W_after, Tensor b_after, Tensor X",
    num_hidden=1,
    num_kept=3,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    alternative="torch",
    public_name="ttt",
)
