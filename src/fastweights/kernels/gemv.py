"""Few rows times weight matrices, with what a token needs around them.

A decoded token reads every weight once, and nothing else takes as long. So
one kernel does a product and what stands before and behind it: the norm of a
row, the step of the short convolution, SwiGLU, the residual. On an H200 a
launch costs what reading five million weights does, and these spare two
thirds of the launches of a block.

Bytes: those of the weights. A program has BN of their rows and all of x's, or
BM of them. One or two rows of x go by plain sums, up to 16 through tensor
cores, a part of the columns in each warp; both read what they can before the
kernel before them ends. More rows go tile by tile. Either way a row's sums
run in one order, whatever stands in the others.
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

SUMS_ROWS = 2  # with more, a row costs more than weights read from memory
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
def rows_by_sums(
    x,
    matrices,
    norm,
    gate,
    eps,
    M,
    stride,
    stride_gate,
    o_m,
    o_n,
    m_n,
    K: tl.constexpr,
    V: tl.constexpr,
    SIGMOID: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """norm(x) times rows o_n of each of the matrices, as [BM, BN] each.

    The norm of a row is a factor of its whole product: it comes last. With
    V > 0 it is one for each head of V channels.
    """
    BM: tl.constexpr = o_m.shape[0]
    NM: tl.constexpr = len(matrices)
    tiles = ()
    for i in tl.static_range(min(TILES_AHEAD, (K + BK - 1) // BK)):
        for j in tl.static_range(NM):
            tiles += (load_tile(matrices[j], o_n, m_n, i * BK, K, BK),)
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    squares, sums = (), ()
    for _ in tl.static_range(BM):
        squares += (tl.zeros([BK], tl.float32),)
        for _ in tl.static_range(NM):
            sums += (tl.zeros([o_n.shape[0], BK], tl.float32),)
    for i in tl.static_range((K + BK - 1) // BK):
        o_k = i * BK + tl.arange(0, BK)
        more, after = (), ()
        for r in tl.static_range(BM):
            m_x = (o_k < K) & (r < M)
            b_x = tl.load(x + r * stride + o_k, mask=m_x, other=0.0)
            b_x = b_x.to(tl.float32)
            if V > 0:
                p_gate = None if gate is None else gate + r * stride_gate + o_k
                b_x = normed_heads(b_x, norm, p_gate, m_x, eps, V, SIGMOID)
            elif norm is not None:
                more += (squares[r] + b_x * b_x,)
                b_n = tl.load(norm + o_k, mask=o_k < K, other=0.0)
                b_x *= b_n.to(tl.float32)
            for j in tl.static_range(NM):
                if i < TILES_AHEAD:
                    b_w = tiles[i * NM + j]
                else:
                    b_w = load_tile(matrices[j], o_n, m_n, i * BK, K, BK)
                after += (
                    sums[r * NM + j] + b_w.to(tl.float32) * b_x[None, :],
                )
        if norm is not None and V == 0:
            squares = more
        sums = after
    products = ()
    for j in tl.static_range(NM):
        b_y = tl.zeros([BM, o_n.shape[0]], tl.float32)
        for r in tl.static_range(BM):
            b_r = tl.sum(sums[r * NM + j], axis=1)[None, :]
            if norm is not None and V == 0:
                b_r *= tl.rsqrt(tl.sum(squares[r]) / K + eps)
            b_y = b_r if BM == 1 else tl.where(o_m[:, None] == r, b_r, b_y)
        products += (b_y,)
    return products


@triton.jit
def load_parts(w, norm, o_n, m_n, o_g, K: tl.constexpr, V: tl.constexpr):
    """Columns o_g [G, BK] of the rows o_n of w [N, K], [G, BN, BK].

    Times what a row's norm would multiply its columns by.
    """
    o_k = o_g[:, None, :]
    p_w = w + o_n.to(tl.int64)[None, :, None] * K + o_k
    b_w = tl.load(p_w, mask=m_n[None, :, None] & (o_k < K), other=0.0)
    if norm is not None and V == 0:
        b_n = tl.load(norm + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_w = (b_w.to(tl.float32) * b_n).to(b_w.dtype)
    return b_w


@triton.jit
def load_row_parts(x, stride, o_m, m_m, o_g, K: tl.constexpr):
    """Columns o_g [G, BK] of the rows o_m of x, [G, BM, BK]."""
    o_k = o_g[:, None, :]
    p_x = x + o_m[None, :, None] * stride + o_k
    return tl.load(p_x, mask=m_m[None, :, None] & (o_k < K), other=0.0)


@triton.jit
def rows_by_parts(
    x,
    matrices,
    norm,
    gate,
    eps,
    stride,
    stride_gate,
    o_m,
    m_m,
    o_n,
    m_n,
    K: tl.constexpr,
    V: tl.constexpr,
    SIGMOID: tl.constexpr,
    G: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """norm(x) times rows o_n of each of the matrices, as [BM, BN] each.

    Columns go in G parts of BK, one per warp, whose sums meet at the end: no
    tensor core waits for another's product.
    """
    BM: tl.constexpr = o_m.shape[0]
    PARTS: tl.constexpr = (K + G * BK - 1) // (G * BK)
    o_g = tl.arange(0, G)[:, None] * BK + tl.arange(0, BK)[None, :]  # [G, BK]
    tiles, rows, gates = (), (), ()
    for i in tl.static_range(PARTS):
        o_k = i * G * BK + o_g
        for j in tl.static_range(len(matrices)):
            if i < TILES_AHEAD:
                tiles += (load_parts(matrices[j], norm, o_n, m_n, o_k, K, V),)
    if V > 0:
        b_head = tl.load(norm + tl.arange(0, V)).to(tl.float32)
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    for i in tl.static_range(min(TILES_AHEAD, PARTS)):
        o_k = i * G * BK + o_g
        rows += (load_row_parts(x, stride, o_m, m_m, o_k, K),)
        if gate is not None:
            gates += (load_row_parts(gate, stride_gate, o_m, m_m, o_k, K),)
    b_square = tl.zeros([G, BM, BK], tl.float32)
    sums = ()
    for _ in tl.static_range(len(matrices)):
        sums += (tl.zeros([G, BM, o_n.shape[0]], tl.float32),)
    for i in tl.static_range(PARTS):
        o_k = i * G * BK + o_g
        if i < TILES_AHEAD:
            b_x = rows[i]
        else:
            b_x = load_row_parts(x, stride, o_m, m_m, o_k, K)
        if V > 0:
            b_n = b_x.to(tl.float32)
            b_h = tl.reshape(b_n, [G, BM, BK // V, V])
            b_h *= tl.rsqrt(tl.sum(b_h * b_h, 3) / V + eps)[:, :, :, None]
            b_h *= b_head[None, None, None, :]
            b_n = tl.reshape(b_h, [G, BM, BK])
            if gate is not None:
                if i < TILES_AHEAD:
                    b_g = gates[i].to(tl.float32)
                else:
                    b_g = load_row_parts(gate, stride_gate, o_m, m_m, o_k, K)
                    b_g = b_g.to(tl.float32)
                b_n *= sigmoid(b_g)
                if not SIGMOID:
                    b_n *= b_g
            b_x = b_n.to(b_x.dtype)
        elif norm is not None:
            b_square += b_x.to(tl.float32) * b_x.to(tl.float32)
        after = ()
        for j in tl.static_range(len(matrices)):
            if i < TILES_AHEAD:
                b_w = tiles[i * len(matrices) + j]
            else:
                b_w = load_parts(matrices[j], norm, o_n, m_n, o_k, K, V)
            b_w = tl.permute(b_w, [0, 2, 1])
            after += (tl.dot(b_x, b_w, sums[j], input_precision=PRECISION),)
        sums = after
    b_r = tl.full([BM], 1.0, tl.float32)
    if norm is not None and V == 0:
        b_r = tl.rsqrt(tl.sum(tl.sum(b_square, 2), 0) / K + eps)
    products = ()
    for j in tl.static_range(len(matrices)):
        products += (tl.sum(sums[j], axis=0) * b_r[:, None],)
    return products


@triton.jit
def rows_by_dots(
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
def inputs_before(
    convolution, o_r, m_r, t, o_c, m_c, C: tl.constexpr, W: tl.constexpr
):
    """Taps, bias and the inputs before tokens t [BM] of channels o_c.

    Of rows o_r of the last inputs [R, W - 1, C]: for each tap but the newest
    [BM, BN] for the tokens that reach so far back, and, of each sequence's
    first token, all W - 1 as they are, which may have to stay.
    """
    taps, bias, history = convolution
    m = m_r[:, None] & m_c[None, :]
    p_h = history + o_r[:, None] * ((W - 1) * C) + o_c[None, :]
    weights, seen, kept = (), (), ()
    for j in tl.static_range(W):
        weights += (tl.load(taps + o_c * W + j, mask=m_c, other=0.0),)
    for j in tl.static_range(W - 1):
        m_h = m & (j + t < W - 1)[:, None]
        seen += (tl.load(p_h + (j + t)[:, None] * C, mask=m_h, other=0.0),)
        m_h = m & (t == 0)[:, None]
        kept += (tl.load(p_h + j * C, mask=m_h, other=0.0),)
    b_bias = tl.zeros([o_c.shape[0]], tl.float32)
    if bias is not None:
        b_bias += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    return weights, b_bias, seen, kept


@triton.jit
def convolved(
    b_x,
    before,
    history,
    o_r,
    m_r,
    t,
    n,
    o_c,
    m_c,
    C: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    MANY: tl.constexpr,
):
    """The short convolution of channels o_c of tokens t [BM], [BM, BN].

    The last inputs, as :func:`inputs_before` found them, move on by n [BM]
    tokens. If there are MANY of each sequence, its rows follow each other in
    this tile.
    """
    weights, b_bias, seen, kept = before
    m = m_r[:, None] & m_c[None, :]
    p_h = history + o_r[:, None] * ((W - 1) * C) + o_c[None, :]
    b_x = b_x.to(history.dtype.element_ty)
    b_y = b_x.to(tl.float32) * weights[W - 1].to(tl.float32)[None, :]
    b_y += b_bias[None, :]
    for j in tl.static_range(W - 1):
        lag = W - 1 - j
        b_h = seen[j].to(tl.float32)
        if MANY:
            o_m = tl.arange(0, b_x.shape[0])
            is_lag = (o_m[:, None] == o_m[None, :] + lag) & (t >= lag)[:, None]
            b_l = tl.where(is_lag[:, :, None], b_x[None, :, :], 0.0)
            b_h += tl.sum(b_l.to(tl.float32), axis=1)
        b_y += b_h * weights[j].to(tl.float32)[None, :]
    if MANY:
        tl.debug_barrier()  # nothing is written before all is read
    for j in tl.static_range(W - 1):
        slot = j - n
        m_k = m & ((t == 0) & (slot >= 0))[:, None]
        tl.store(p_h + slot[:, None] * C, kept[j], mask=m_k)
    slot = W - 1 + t - n
    m_k = m & ((slot >= 0) & (slot < W - 1))[:, None]
    tl.store(p_h + slot[:, None] * C, b_x, mask=m_k)
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
    accepted,
    y,
    eps,
    M,
    R,
    T,
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
    MANY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    G: tl.constexpr,
    SUMS: tl.constexpr,
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
    # Nothing that the kernel before writes: read before it ends.
    m_y = m_m[:, None] & m_n[None, :]
    o_y = o_m[:, None] * TOTAL + target + o_n[None, :]
    if residual is not None:
        b_residual = tl.load(residual + o_y, mask=m_y, other=0.0)
    if W > 0:
        i_b, t = o_m // T, (o_m % T).to(tl.int32)
        m_c, m_r = m_n & (target == 0), m_m
        o_r, n = i_b, tl.zeros_like(t) + T
        if rows is not None:
            o_r = tl.load(rows + i_b, mask=m_m, other=-1).to(tl.int64)
            m_r = (o_r >= 0) & (o_r < R)
        if accepted is not None:
            n = tl.load(accepted + i_b, mask=m_m, other=0).to(tl.int32)
        before = inputs_before(convolution, o_r, m_r, t, o_n, m_c, SIZES[0], W)
    matrices = (w,)
    if SWIGLU:
        matrices = (w, w + SIZES[0] * K)
    if SUMS:
        products = rows_by_sums(
            x + source,
            matrices,
            norm,
            gate,
            eps,
            M,
            stride,
            stride_gate,
            o_m,
            o_n,
            m_n,
            K,
            V,
            SIGMOID,
            BK,
            EARLY,
        )
    elif G > 0:
        products = rows_by_parts(
            x + source,
            matrices,
            norm,
            gate,
            eps,
            stride,
            stride_gate,
            o_m,
            m_m,
            o_n,
            m_n,
            K,
            V,
            SIGMOID,
            G,
            BK,
            PRECISION,
            EARLY,
        )
    else:
        products = rows_by_dots(
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
        b_c = convolved(
            b_y,
            before,
            convolution[2],
            o_r,
            m_r,
            t,
            n,
            o_n,
            m_c,
            SIZES[0],
            W,
            SILU,
            MANY,
        )
        b_y = tl.where(target == 0, b_c, b_y)
    if residual is not None:
        b_y += b_residual.to(tl.float32)
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
    tokens: int = 1,
    accepted: Tensor | None = None,
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
        residual: [M, N], added to the only product; not what the kernel just
            before this one writes.
        convolution: taps [N, W], bias [N] and last inputs [R, W - 1, N] of a
            short convolution of the first product; the inputs move on.
        silu: whether that has SiLU behind it.
        rows: [B], whose inputs those are, if not sequence b's row b.
        tokens: rows of x that follow each other in each sequence, M = B T.
        accepted: [B], by how many tokens the inputs move on, if not by T.
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
    whole = options["SUMS"] or options["G"] > 0
    together = whole and (not V or options["BK"] % V == 0)
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
            accepted,
            y,
            eps,
            M,
            0 if convolution is None else len(convolution[2]),
            tokens,
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
            MANY=tokens > 1,
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
    ahead = {"PRECISION": "ieee", "num_stages": 1, "G": 0, "SUMS": False}
    if M <= SUMS_ROWS:
        BN, BK, warps = (8, 512, 8) if N > 1024 else (4, 1024, 4)
        tile = {"BM": triton.next_power_of_2(M), "BN": BN, "SUMS": True}
        return ahead | tile | {"BK": min(BK, least), "num_warps": warps}
    # Products in fp32 take no tensor core: small tiles, which do not spill.
    half = dtype != torch.float32
    if M <= 16 and half:
        tile = {"BM": 16, "BN": 16, "BK": min(128, max(16, least // 4))}
        return ahead | tile | {"G": 4, "num_warps": 4}
    return {
        "BM": min(triton.next_power_of_2(M), 64 if half else 16),
        "BN": 16 if N <= 1024 or not half else 32,
        "BK": min(128 if half else 32, max(16, least)),
        "G": 0,
        "SUMS": False,
        "PRECISION": "tf32" if half else "ieee",
        "num_warps": 4,
        "num_stages": 4 if half else 3,
    }
