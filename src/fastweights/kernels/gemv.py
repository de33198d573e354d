"""Few rows times weight matrices, with what a token needs around them.

A decoded token reads every weight once, and nothing else takes as long. So
one kernel does a product and what stands before and behind it: the norm of a
row, the step of the short convolution, SwiGLU, the residual. On an H200 a
launch costs what reading five million weights does, and these spare two
thirds of the launches of a block.

Bytes: those of the weights. A program has BN of their rows and all of x's, or
BM of them. Up to four rows of x are four programs, whose sums are plain ones
and which read all that they can before the kernel before them ends; more rows
go through the tensor cores. Either way a row's sums run in one order, whatever
stands in the others.
"""

# mypy: disable-error-code="assignment, var-annotated"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from fastweights.kernels import output_norm
from fastweights.kernels.gpu import starts_early
from fastweights.kernels.tile import sigmoid

TILES_AHEAD = tl.constexpr(4)  # tiles of a matrix that a program reads ahead


@triton.jit
def matrix_of(
    weights, SIZES: tl.constexpr, SOURCES: tl.constexpr, BN: tl.constexpr
):
    """This program's matrix [N, K], its tile of N, N, and two columns.

    The first one of its x, and the first one of its y. Programs go through
    the matrices one after the other.
    """
    i_n, before = tl.program_id(0), 0
    w, N, source, target = weights[0], SIZES[0], SOURCES[0], 0
    for j in tl.static_range(1, len(SIZES)):
        before += (SIZES[j - 1] + BN - 1) // BN
        is_later = tl.program_id(0) >= before
        if is_later:
            w = weights[j]
        i_n = tl.where(is_later, tl.program_id(0) - before, i_n)
        N = tl.where(is_later, SIZES[j], N)
        source = tl.where(is_later, SOURCES[j], source)
        target = tl.where(is_later, target + SIZES[j - 1], target)
    return w, i_n, N, source, target


@triton.jit
def load_tile(w, o_n, m_n, k, K: tl.constexpr, BK: tl.constexpr):
    """Columns k to k + BK of the rows o_n of w [N, K], [BN, BK]."""
    o_k = k + tl.arange(0, BK)
    p_w = w + o_n.to(tl.int64)[:, None] * K + o_k[None, :]
    return tl.load(p_w, mask=m_n[:, None] & (o_k < K)[None, :], other=0.0)


@triton.jit
def normed_heads(
    b_x,
    norm,
    p_gate,
    mask,
    eps,
    V: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Heads of V channels, side by side in b_x [BK], normed and gated.

    By the sigmoid of the gate at p_gate [BK], or its SiLU.
    """
    b_h = tl.reshape(b_x, [b_x.shape[0] // V, V])
    b_h *= tl.rsqrt(tl.sum(b_h * b_h, axis=1) / V + eps)[:, None]
    b_h *= tl.load(norm + tl.arange(0, V)).to(tl.float32)[None, :]
    b_x = tl.reshape(b_h, [b_x.shape[0]])
    if p_gate is not None:
        b_gate = tl.load(p_gate, mask=mask, other=0.0).to(tl.float32)
        b_x *= sigmoid(b_gate)
        if not SIGMOID:
            b_x *= b_gate
    return tl.where(mask, b_x, 0.0)


@triton.jit
def row_times(
    x,
    matrices,
    norm,
    gate,
    eps,
    o_n,
    m_n,
    K: tl.constexpr,
    V: tl.constexpr,
    SIGMOID: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """norm(x) times rows o_n of each of the matrices, as [1, BN] each.

    The norm of a row is a factor of its whole product: it comes last. With
    V > 0 it is one for each head of V channels.
    """
    tiles = ()
    for i in tl.static_range(min(TILES_AHEAD, (K + BK - 1) // BK)):
        for j in tl.static_range(len(matrices)):
            tiles += (load_tile(matrices[j], o_n, m_n, i * BK, K, BK),)
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    b_square = tl.zeros([BK], tl.float32)
    sums = ()
    for _ in tl.static_range(len(matrices)):
        sums += (tl.zeros([o_n.shape[0], BK], tl.float32),)
    for i in tl.static_range((K + BK - 1) // BK):
        o_k = i * BK + tl.arange(0, BK)
        b_x = tl.load(x + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        if V > 0:
            p_gate = None if gate is None else gate + o_k
            b_x = normed_heads(b_x, norm, p_gate, o_k < K, eps, V, SIGMOID)
        elif norm is not None:
            b_square += b_x * b_x
            b_x *= tl.load(norm + o_k, mask=o_k < K, other=0).to(tl.float32)
        after = ()
        for j in tl.static_range(len(matrices)):
            if i < TILES_AHEAD:
                b_w = tiles[i * len(matrices) + j]
            else:
                b_w = load_tile(matrices[j], o_n, m_n, i * BK, K, BK)
            after += (sums[j] + b_w.to(tl.float32) * b_x[None, :],)
        sums = after
    b_r = 1.0
    if norm is not None and V == 0:
        b_r = tl.rsqrt(tl.sum(b_square) / K + eps)
    products = ()
    for j in tl.static_range(len(matrices)):
        products += ((tl.sum(sums[j], axis=1) * b_r)[None, :],)
    return products


@triton.jit
def rows_times(
    x,
    matrices,
    stride,
    o_m,
    m_m,
    o_n,
    m_n,
    K: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows o_m of x times rows o_n of each of the matrices, [BM, BN] each."""
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    sums = ()
    for _ in tl.static_range(len(matrices)):
        sums += (tl.zeros([o_m.shape[0], o_n.shape[0]], tl.float32),)
    p_x = x + o_m[:, None] * stride
    for k in range(0, K, BK):
        o_k = k + tl.arange(0, BK)
        m_x = m_m[:, None] & (o_k < K)[None, :]
        b_x = tl.load(p_x + o_k[None, :], mask=m_x, other=0.0)  # [BM, BK]
        after = ()
        for j in tl.static_range(len(matrices)):
            b_w = tl.trans(load_tile(matrices[j], o_n, m_n, k, K, BK))
            after += (tl.dot(b_x, b_w, sums[j], input_precision=PRECISION),)
        sums = after
    return sums


@triton.jit
def convolved(
    b_x,
    convolution,
    o_r,
    m_r,
    o_c,
    C: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
):
    """One step of the short convolution of channels o_c, [BM, BN].

    Of rows o_r of its last inputs [R, W - 1, C], which move on by one.
    """
    taps, bias, history = convolution
    m_c = o_c < C
    m = m_r[:, None] & m_c[None, :]
    p_h = history + o_r[:, None] * ((W - 1) * C) + o_c[None, :]
    b_x = b_x.to(history.dtype.element_ty)
    b_w = tl.load(taps + o_c * W + (W - 1), mask=m_c, other=0.0)
    b_y = b_x.to(tl.float32) * b_w.to(tl.float32)[None, :]
    if bias is not None:
        b_y += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    for j in tl.static_range(W - 1):
        b_h = tl.load(p_h + j * C, mask=m, other=0.0)
        b_w = tl.load(taps + o_c * W + j, mask=m_c, other=0.0)
        b_y += b_h.to(tl.float32) * b_w.to(tl.float32)[None, :]
        if j > 0:
            tl.store(p_h + (j - 1) * C, b_h, mask=m)
    tl.store(p_h + (W - 2) * C, b_x, mask=m)
    return b_y * sigmoid(b_y) if SILU else b_y


@triton.jit(do_not_specialize=["M", "R"])
def gemv_kernel(
    x,
    weights,
    norm,
    gate,
    residual,
    convolution,
    rows,
    y,
    eps,
    M,
    R,
    stride,
    stride_gate,
    K: tl.constexpr,
    TOTAL: tl.constexpr,
    SIZES: tl.constexpr,
    SOURCES: tl.constexpr,
    V: tl.constexpr,
    SIGMOID: tl.constexpr,
    SWIGLU: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of y [M, TOTAL], as :func:`gemv` says.

    EARLY, programs start while those of the kernel before end, and read
    weights, which are nobody's result, before they wait for it.
    """
    w, i_n, N, source, target = matrix_of(weights, SIZES, SOURCES, BN)
    o_m = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    o_n = i_n * BN + tl.arange(0, BN)
    m_m, m_n = o_m < M, o_n < N
    matrices = (w,)
    if SWIGLU:
        matrices = (w, w + SIZES[0] * K)
    if BM == 1:
        i_m = tl.program_id(1).to(tl.int64)
        x += i_m * stride + source
        if gate is not None:
            gate += i_m * stride_gate
        products = row_times(
            x,
            matrices,
            norm,
            gate,
            eps,
            o_n,
            m_n,
            K,
            V,
            SIGMOID,
            BK,
            EARLY,
        )
    else:
        products = rows_times(
            x + source,
            matrices,
            stride,
            o_m,
            m_m,
            o_n,
            m_n,
            K,
            BK,
            PRECISION,
            EARLY,
        )
    b_y = products[0]
    if SWIGLU:
        b_y = b_y * sigmoid(b_y) * products[1]
    if W > 0:
        if target == 0:
            o_r, m_r = o_m, m_m
            if rows is not None:
                o_r = tl.load(rows + o_m, mask=m_m, other=-1).to(tl.int64)
                m_r = (o_r >= 0) & (o_r < R)
            b_y = convolved(b_y, convolution, o_r, m_r, o_n, SIZES[0], W, SILU)
    m_y = m_m[:, None] & m_n[None, :]
    o_y = o_m[:, None] * TOTAL + target + o_n[None, :]
    if residual is not None:
        b_y += tl.load(residual + o_y, mask=m_y, other=0.0).to(tl.float32)
    tl.store(y + o_y, b_y, mask=m_y)


def gemv(
    x: Tensor,
    *weights: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: Tensor | None = None,
    activation: str | None = None,
    swiglu: bool = False,
    residual: Tensor | None = None,
    convolution: tuple[Tensor, Tensor | None, Tensor] | None = None,
    silu: bool = True,
    rows: Tensor | None = None,
    sources: Sequence[int] = (0,),
) -> Tensor:
    """Products of few rows with matrices, side by side, in x's dtype.

    Args:
        x: [M, D], rows at any distance, each without gaps.
        weights: [N, K] each, contiguous, K the same for all.
        norm: weight [K] of the RMS norm of x's rows, which comes first; [V]
            if it is one for each head of V channels.
        eps: of that norm.
        gate: [M, K], rows at any distance, which multiplies normed heads by
            its ``activation``, "silu" or "sigmoid".
        swiglu: whether the only matrix [2 N, K] has gates, then values.
        residual: [M, N], added to the only product.
        convolution: taps [N, W], bias [N] and last inputs [R, W - 1, N] of a
            short convolution of the first product; the inputs move on.
        silu: whether that has SiLU behind it.
        rows: [M], whose inputs those are, if not sequence m's row m.
        sources: for each matrix the first of its K columns of x.

    Returns:
        y [M, N of all matrices].
    """
    M, K = len(x), weights[0].shape[1]
    sizes = tuple([len(w) // (1 + swiglu) for w in weights])
    options = gemv_options(M, K, sum(sizes), x.dtype)
    V = 0  # channels of a head; 0: the norm is that of a row
    if norm is not None and (gate is not None or len(norm) < K):
        V = len(norm)
    together = options["BM"] == 1 and (not V or options["BK"] % V == 0)
    if norm is not None and not together:
        x = _normed(x, norm, gate, eps, activation)
        norm, gate, V = None, None, 0
    y = x.new_empty(M, sum(sizes))
    tiles = sum([triton.cdiv(N, options["BN"]) for N in sizes])
    early = starts_early(x.device)
    with torch.cuda.device_of(x):
        gemv_kernel[(tiles, triton.cdiv(M, options["BM"]))](
            x,
            weights,
            norm,
            gate,
            residual,
            convolution,
            rows,
            y,
            eps,
            M,
            0 if convolution is None else len(convolution[2]),
            x.stride(0),
            0 if gate is None else gate.stride(0),
            K=K,
            TOTAL=sum(sizes),
            SIZES=sizes,
            SOURCES=tuple(sources) * (len(sizes) // len(sources)),
            V=V,
            SIGMOID=activation == "sigmoid",
            SWIGLU=swiglu,
            W=0 if convolution is None else convolution[0].shape[1],
            SILU=silu,
            EARLY=early,
            launch_pdl=early,
            **options,
        )
    return y


def _normed(
    x: Tensor,
    norm: Tensor,
    gate: Tensor | None,
    eps: float,
    activation: str | None,
) -> Tensor:
    """The norm as a launch of its own: of many rows it is no small work."""
    if gate is None and len(norm) == x.shape[1]:
        return F.rms_norm(x, norm.shape, norm, eps)
    heads = x.view(len(x), 1, -1, len(norm))
    by = None if gate is None else gate[:, None]
    silu = activation == "silu"
    return output_norm.forward(heads, norm, by, silu, eps)[:, 0]


def gemv_options(M: int, K: int, N: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes and launch settings, measured on an H200."""
    least = triton.next_power_of_2(K)
    if M <= 4:
        BN, BK, warps = (8, 512, 8) if N > 1024 else (4, 1024, 4)
        tile = {"BM": 1, "BN": BN, "BK": min(BK, least), "num_warps": warps}
        return {"PRECISION": "ieee", "num_stages": 1} | tile
    # Products in fp32 take no tensor core: small tiles, which do not spill.
    half = dtype != torch.float32
    return {
        "BM": min(max(16, triton.next_power_of_2(M)), 64 if half else 16),
        "BN": 16 if N <= 1024 or not half else 32,
        "BK": min(128 if half else 32, max(16, least)),
        "PRECISION": "tf32" if half else "ieee",
        "num_warps": 4,
        "num_stages": 4 if half else 3,
    }
