"""The gated norm behind the recurrence: one pass forward, one backward.

A row is one head of one token. A program of the forward has one tile of rows.
One of the backward walks over many tiles, reads the next while it computes
this one, and adds up its share of the weight's gradient in registers.

Bytes per channel and row in half precision: 6 forward (o, gate, y), 10
backward (o, gate, dy, do, dgate), which computes the norm again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.kernels.gpu import gpu_of
from fastweights.kernels.tile import sigmoid


class OutputNormMeta(NamedTuple):
    """Constants of a kernel: its argument META."""

    G: int  # groups of heads, each with a weight of its own
    HV: int
    V: int
    SILU: bool
    BR: int
    BV: int


@triton.jit
def row_offsets(i, rows, i_g, stride, META: tl.constexpr):
    """Offsets in o and in the gate of tile i of group i_g, and its mask.

    Row n of a group is row n G + i_g of all. G is 1, all heads in one group,
    or HV. ``stride`` is what lies between two tokens of the gate.
    """
    V: tl.constexpr = META.V
    n = i * META.BR + tl.arange(0, META.BR)
    o_v = tl.arange(0, META.BV)
    r = n * META.G + i_g
    o_x = r.to(tl.int64)[:, None] * V + o_v[None, :]  # [BR, BV]
    o_g = (r // META.HV).to(tl.int64) * stride + r % META.HV * V
    mask = (n < rows)[:, None] & (o_v < V)[None, :]
    return o_x, o_g[:, None] + o_v[None, :], mask


@triton.jit
def normalise(b_o, mask, eps, V: tl.constexpr):
    """o over its root mean square, and 1 over that. [BR, BV], [BR, 1].

    No row that is not there is divided by 0, which eps may be.
    """
    b_s = tl.sum(b_o * b_o, axis=1, keep_dims=True) / V + eps
    b_r = tl.rsqrt(tl.where(mask, b_s, 1.0))
    return b_o * b_r, b_r


@triton.jit(do_not_specialize=["rows"])
def norm_fwd_kernel(inputs, y, eps, rows, stride, META: tl.constexpr):
    """y of one tile."""
    o, weight, gate = inputs
    V: tl.constexpr = META.V
    i, i_g = tl.program_id(0) // META.G, tl.program_id(0) % META.G
    o_v = tl.arange(0, META.BV)
    o_x, o_g, mask = row_offsets(i, rows, i_g, stride, META)
    b_o = tl.load(o + o_x, mask=mask, other=0.0).to(tl.float32)  # [BR, BV]
    if gate is not None:
        b_g = tl.load(gate + o_g, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(weight + i_g * V + o_v, mask=o_v < V, other=0.0)  # [BV]
    b_y, _ = normalise(b_o, mask, eps, V)
    b_y *= b_w.to(tl.float32)[None, :]
    if gate is not None:
        b_y *= sigmoid(b_g)
        if META.SILU:
            b_y *= b_g
    tl.store(y + o_x, b_y, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def norm_bwd_kernel(inputs, dy, grads, eps, rows, stride, META: tl.constexpr):
    """The gradients of every step-th tile of a group.

    share [programs / G, G, V], fp32, is what the program has of the weight's
    gradient: torch adds them up.
    """
    o, weight, gate = inputs
    do, dgate, share = grads
    V: tl.constexpr = META.V
    i_g, o_v = tl.program_id(0) % META.G, tl.arange(0, META.BV)
    first = tl.program_id(0) // META.G
    step = tl.num_programs(0) // META.G
    b_w = tl.load(weight + i_g * V + o_v, mask=o_v < V, other=0.0)  # [BV]
    b_w = b_w.to(tl.float32)[None, :]
    o_x, o_g, mask = row_offsets(first, rows, i_g, stride, META)
    b_dw = tl.zeros(o_x.shape, tl.float32)
    n_o = tl.load(o + o_x, mask=mask, other=0.0)  # [BR, BV]
    n_dy = tl.load(dy + o_x, mask=mask, other=0.0)
    n_g = n_o
    if gate is not None:
        n_g = tl.load(gate + o_g, mask=mask, other=0.0)
    for i in range(first, tl.cdiv(rows, META.BR), step):
        b_o, b_dy = n_o.to(tl.float32), n_dy.to(tl.float32)
        b_g, o_y, m_y = n_g.to(tl.float32), o_x, mask
        o_x, o_g, mask = row_offsets(i + step, rows, i_g, stride, META)
        n_o = tl.load(o + o_x, mask=mask, other=0.0)
        n_dy = tl.load(dy + o_x, mask=mask, other=0.0)
        if gate is not None:
            n_g = tl.load(gate + o_g, mask=mask, other=0.0)

        b_y, b_r = normalise(b_o, m_y, eps, V)
        if gate is not None:
            b_a = sigmoid(b_g)
            b_da = b_a * (1.0 - b_a)
            if META.SILU:
                b_da = b_a + b_g * b_da
                b_a *= b_g
            b_dg = b_dy * b_y * b_w * b_da
            tl.store(dgate + o_y, b_dg, mask=m_y)
            b_dy *= b_a
        b_dw += b_dy * b_y
        b_dy *= b_w
        b_m = tl.sum(b_dy * b_y, axis=1, keep_dims=True) / V  # [BR, 1]
        tl.store(do + o_y, b_r * (b_dy - b_m * b_y), mask=m_y)
    p_w = share + tl.program_id(0) * V + o_v
    tl.store(p_w, tl.sum(b_dw, axis=0), mask=o_v < V)


def norm_options(
    o: Tensor, weight: Tensor, silu: bool, back: bool
) -> tuple[OutputNormMeta, dict[str, int]]:
    """META and launch settings: a thread has 16 channels, backward 8.

    Rows of more than 8192 or 4096 have more than that.
    """
    HV, V = o.shape[2:]
    BV, each = triton.next_power_of_2(V), 8 if back else 16
    BR = max(128 * each // BV, 1)
    warps = min(max(BR * BV // (32 * each), 4), 16)
    settings = {"num_warps": warps, "num_stages": 1}
    if back:
        half = o.element_size() < 4 and warps < 16
        settings["maxnreg"] = 96 if half else 128
    return OutputNormMeta(weight.numel() // V, HV, V, silu, BR, BV), settings


def programs_at_once(o: Tensor, settings: dict[str, int]) -> int:
    """Programs of the backward for which a GPU has registers at one time."""
    warps = 65536 // (32 * settings["maxnreg"])
    one = warps // settings["num_warps"]
    return one * gpu_of(o.device).multiprocessors


def launch_rows(
    kernel: Any,
    programs: int,
    meta: OutputNormMeta,
    settings: dict[str, int],
    inputs: Any,
    *others: Any,
) -> None:
    """Programs per group, unless there is nothing to do."""
    o, _, gate = inputs
    rows = o.numel() // (meta.G * meta.V)
    stride = 0 if gate is None else gate.stride(0)
    if programs:
        with torch.cuda.device_of(o):
            kernel[(programs * meta.G,)](
                inputs, *others, rows, stride, meta, **settings
            )


def gate_rows(gate: Tensor | None) -> Tensor | None:
    """[B * T, HV * V] with channels side by side: a view if there is one."""
    if gate is None:
        return None
    gate = gate.flatten(0, 1)
    return gate if gate.stride(1) == 1 else gate.contiguous()


def forward(
    o: Tensor, weight: Tensor, gate: Tensor | None, silu: bool, eps: float
) -> Tensor:
    """y [B, T, HV * V]; o and weight are contiguous."""
    y, inputs = torch.empty_like(o).flatten(2), (o, weight, gate_rows(gate))
    meta, settings = norm_options(o, weight, silu, back=False)
    tiles = triton.cdiv(o.numel() // weight.numel(), meta.BR)
    launch_rows(norm_fwd_kernel, tiles, meta, settings, inputs, y, eps)
    return y


def backward(
    dy: Tensor,
    o: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    silu: bool,
    eps: float,
) -> list[Tensor]:
    """Gradients of o, weight and, if there is one, the gate.

    dy, o and weight are contiguous. As many programs as run at once.
    """
    do = torch.empty_like(o)
    dgate = None if gate is None else gate.new_empty(gate.shape)
    inputs = o, weight, gate_rows(gate)
    meta, settings = norm_options(o, weight, silu, back=True)
    tiles = triton.cdiv(o.numel() // weight.numel(), meta.BR)
    at_once = programs_at_once(o, settings)
    programs = min(tiles, max(at_once // meta.G, 1))
    share = o.new_empty(programs, *weight.shape, dtype=torch.float32)
    arguments = inputs, dy, (do, dgate, share), eps
    launch_rows(norm_bwd_kernel, programs, meta, settings, *arguments)
    grads = [do, share.sum(0).to(weight.dtype)]
    return grads if dgate is None else [*grads, dgate]
