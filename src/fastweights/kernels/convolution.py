"""The short convolution, its activation and the norm of q and k: one pass.

A program walks along a chunk of BT tokens of one sequence with one block of
channels: a head of q or k, so that its norm is a sum over the row, or up to
BV of the others. The backward walks from the last token to the first, since
the gradient of an input waits for the tokens after it. A program holds three
neighbouring rows in registers and reads four rows at a time, those of the
next four tokens while it computes these, so that memory has something to do.
A row is read once, and three rows twice: the three before the chunk, and in
the backward the three behind it.

Bytes per channel and token in half precision: 4 forward (x, y), 6 backward
(x, dy, dx). The backward computes the sums again and keeps nothing; its
shares of the weights' gradient are 16 bytes per channel and chunk, written
once and read once.

Filters shorter than four have no oldest taps: W is known when a kernel is
compiled, and what they would multiply is not computed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fastweights.heads import HeadLayout, empty_heads
from fastweights.kernels.convolution_backward import convolution_bwd_kernel
from fastweights.kernels.convolution_forward import (
    ConvolutionMeta,
    convolution_fwd_kernel,
)
from fastweights.kernels.gpu import gpu_of
from fastweights.kernels.tail import clear_tail
from fastweights.packing import num_sequences

FP32 = torch.float32
LONG_CHUNK = 256  # tokens in a chunk of the backward, where there are many


def convolution_options(
    C: int, H: int, K: int, rows: int, back: bool, lean: bool = False
) -> tuple[dict[str, int], dict[str, int]]:
    """Tiles and launch settings: a warp for up to 128 channels, 4 a thread.

    A long chunk has fewer shares of the filter's gradient, a short one
    more programs: the backward takes long ones where there are many tokens.
    ``lean``: 128 registers do, for 16 programs per multiprocessor, which is
    known of Hopper alone.
    """
    BK = triton.next_power_of_2(max(K, 1))
    BV = min(max(128, BK), triton.next_power_of_2(C - 2 * H * K))
    BT = LONG_CHUNK if back and rows >= 16 * LONG_CHUNK else 64
    settings = {"num_warps": max(BK, BV, 128) // 128, "num_stages": 1}
    settings |= {"maxnreg": 128} if lean else {}
    return {"BT": BT, "BK": BK, "BV": BV}, settings


def launch_chunks(
    kernel: Any,
    meta: ConvolutionMeta,
    settings: dict[str, int],
    eps: float | None,
    inputs: Any,
    cu_seqlens: Tensor | None,
    *others: Any,
) -> None:
    """One program per chunk of tokens and block of channels."""
    x = inputs[0]
    T, N = x.shape[1], num_sequences(x, cu_seqlens)
    programs = meta.NB * num_chunks(x, cu_seqlens, meta.BT)
    with torch.cuda.device_of(x):
        kernel[(programs,)](
            inputs, cu_seqlens, *others, eps or 0.0, T, N, meta, **settings
        )


def num_chunks(x: Tensor, cu_seqlens: Tensor | None, BT: int) -> int:
    """Chunks of BT tokens there can be: see ``tile.first_slot``."""
    B, T, _ = x.shape
    if cu_seqlens is None:
        return B * triton.cdiv(T, BT)
    return triton.cdiv(T, BT) + len(cu_seqlens) - 1


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    layout: HeadLayout,
    eps: float | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Convolve as ``forward`` of :mod:`fastweights.torch_backend.convolution`.

    The tensors are contiguous, and there is a token.
    """
    (B, T, C), H, K = x.shape, layout.H, layout.K
    outputs = empty_heads(x, layout)
    N, W = num_sequences(x, cu_seqlens), weight.shape[1]
    state = x.new_empty(N, W - 1, C)
    tile, settings = convolution_options(C, H, K, B * T, back=False)
    meta = ConvolutionMeta(C, H, K, W, silu, eps is not None, **tile)
    inputs = x, weight, bias, initial_state
    arguments = inputs, cu_seqlens, outputs, state
    launch_chunks(convolution_fwd_kernel, meta, settings, eps, *arguments)
    clear_tail(cu_seqlens, *outputs)
    return *outputs, state


def backward(
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor,
    dstate: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    layout: HeadLayout,
    eps: float | None,
    silu: bool,
) -> list[Tensor | None]:
    """Gradients of x, weight, bias and initial_state, None without them.

    Those of weight and bias are in fp32. The tensors are contiguous.
    """
    (B, T, C), W = x.shape, weight.shape[1]
    H, K = layout.H, layout.K
    few = bias is None and initial_state is None and dstate is None
    on_hopper = gpu_of(x.device).capability == (9, 0)
    lean = few and x.element_size() < 4 and on_hopper
    tile, settings = convolution_options(C, H, K, B * T, back=True, lean=lean)
    taps = W if bias is None else W + 1
    number = num_chunks(x, cu_seqlens, tile["BT"])
    share = x.new_empty(number, taps, C, dtype=FP32)
    dx = torch.empty_like(x)
    dinitial = None
    if initial_state is not None:
        dinitial = torch.empty_like(initial_state)
    meta = ConvolutionMeta(C, H, K, W, silu, eps is not None, **tile)
    inputs = x, weight, bias, initial_state
    output_grads = dq, dk, dv, dstate
    arguments = inputs, cu_seqlens, output_grads, (dx, share, dinitial)
    launch_chunks(convolution_bwd_kernel, meta, settings, eps, *arguments)
    clear_tail(cu_seqlens, dx)
    total = share.sum(0)  # [W or W + 1, C]
    dbias = None if bias is None else total[W].clone()
    return [dx, total[:W].mT, dbias, dinitial]
