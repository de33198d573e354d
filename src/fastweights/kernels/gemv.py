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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from fastweights.kernels import output_norm
from fastweights.kernels.gpu import starts_early
from fastweights.kernels.tile import dot, sigmoid

SUMS_ROWS = 2  # with more, a row costs more than weights read from memory
TILES_AHEAD = tl.constexpr(4)  # tiles of a matrix that a program reads ahead


class GemvMeta(NamedTuple):
    """Constants of :func:`gemv_kernel`: its argument META."""

    K: int  # columns of each matrix
    SIZES: tuple[int, ...]  # what each one has of y's columns
    TOTAL: int  # those of all
    SOURCES: tuple[int, ...]  # the first of x's columns that each one reads
    ROWS_NORMED: bool
    V: int  # channels of a normed head; 0: heads are not normed
    SIGMOID: bool  # whether a gate has the sigmoid, not SiLU
    SWIGLU: bool
    W: int  # taps of the convolution; 0: there is none
    SILU: bool  # whether the convolution has it behind it
    MANY_TOKENS: bool  # whether sequences have several tokens
    EARLY: bool  # whether the kernel starts before the one before is done
    BM: int
    BN: int
    BK: int
    NUM_PARTS: int = 0  # of a tile's columns, one per warp
    BY_SUMS: bool = False  # whether rows are few enough for plain sums


@triton.jit
def matrix_of(weights, META: tl.constexpr):
    """Find a program's matrix [N, K], its tile of N, N, and two columns.

    The first one of its x, and the first one of its y. Programs go through
    the matrices one after the other.
    """
    i_tile, tiles_before = tl.program_id(0), 0
    w, N, source, target = weights[0], META.SIZES[0], META.SOURCES[0], 0
    for j in tl.static_range(1, len(META.SIZES)):
        tiles_before += (META.SIZES[j - 1] + META.BN - 1) // META.BN
        is_later = tl.program_id(0) >= tiles_before
        if is_later:
            w = weights[j]
        i_tile = tl.where(is_later, tl.program_id(0) - tiles_before, i_tile)
        N = tl.where(is_later, META.SIZES[j], N)
        source = tl.where(is_later, META.SOURCES[j], source)
        target = tl.where(is_later, target + META.SIZES[j - 1], target)
    return w, i_tile, N, source, target


@triton.jit
def load_tile(w, outputs, k, META: tl.constexpr):
    """Columns k to k + BK of the rows ``outputs`` of w [N, K], [BN, BK]."""
    o_n, m_n = outputs
    o_k = k + tl.arange(0, META.BK)
    p_w = w + o_n.to(tl.int64)[:, None] * META.K + o_k[None, :]
    return tl.load(p_w, mask=m_n[:, None] & (o_k < META.K)[None, :], other=0.0)


@triton.jit
def norm_heads(b_x, norm, r, o_k, mask, META: tl.constexpr):
    """Columns o_k of row r, b_x [BK]: heads side by side, normed and gated."""
    weight, gate, stride_gate, eps = norm
    V: tl.constexpr = META.V
    b_h = tl.reshape(b_x, [b_x.shape[0] // V, V])
    b_h *= tl.rsqrt(tl.sum(b_h * b_h, axis=1) / V + eps)[:, None]
    b_h *= tl.load(weight + tl.arange(0, V)).to(tl.float32)[None, :]
    b_x = tl.reshape(b_h, [b_x.shape[0]])
    if gate is not None:
        p_gate = gate + r * stride_gate + o_k
        b_gate = tl.load(p_gate, mask=mask, other=0.0).to(tl.float32)
        b_x *= sigmoid(b_gate)
        if not META.SIGMOID:
            b_x *= b_gate
    return tl.where(mask, b_x, 0.0)


@triton.jit
def product_by_sums(x, matrices, norm, rows, outputs, META: tl.constexpr):
    """norm(x) times the rows ``outputs`` of each matrix, as [BM, BN] each.

    The norm of a row is a factor of its whole product: it comes last. With
    V > 0 it is one for each head of V channels.
    """
    p_x, stride = x
    weight, _, _, eps = norm
    o_m, _, M = rows
    K: tl.constexpr = META.K
    BM: tl.constexpr = META.BM
    BN: tl.constexpr = META.BN
    BK: tl.constexpr = META.BK
    NM: tl.constexpr = len(matrices)
    TILES: tl.constexpr = (K + BK - 1) // BK
    tiles = []
    for i in tl.static_range(min(TILES_AHEAD, TILES)):
        tiles += [load_tile(w, outputs, i * BK, META) for w in matrices]
    if META.EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    squares, sums = [], []
    for _ in tl.static_range(BM):
        squares += [tl.zeros([BK], tl.float32)]
        sums += [tl.zeros([BN, BK], tl.float32) for _ in matrices]
    for i in tl.static_range(TILES):
        o_k = i * BK + tl.arange(0, BK)
        more, after = [], []
        for r in tl.static_range(BM):
            m_x = (o_k < K) & (r < M)
            b_x = tl.load(p_x + r * stride + o_k, mask=m_x, other=0.0)
            b_x = b_x.to(tl.float32)
            if META.V > 0:
                b_x = norm_heads(b_x, norm, r, o_k, m_x, META)
            elif META.ROWS_NORMED:
                more += [squares[r] + b_x * b_x]
                b_n = tl.load(weight + o_k, mask=o_k < K, other=0.0)
                b_x *= b_n.to(tl.float32)
            for j in tl.static_range(NM):
                if i < TILES_AHEAD:
                    b_w = tiles[i * NM + j]
                else:
                    b_w = load_tile(matrices[j], outputs, i * BK, META)
                b_w = b_w.to(tl.float32)
                after += [sums[r * NM + j] + b_w * b_x[None, :]]
        squares, sums = more, after
    products = []
    for j in tl.static_range(NM):
        b_y = tl.zeros([BM, BN], tl.float32)
        for r in tl.static_range(BM):
            b_r = tl.sum(sums[r * NM + j], axis=1)[None, :]
            if META.ROWS_NORMED:
                b_r *= tl.rsqrt(tl.sum(squares[r]) / K + eps)
            b_y = b_r if BM == 1 else tl.where(o_m[:, None] == r, b_r, b_y)
        products += [b_y]
    return products


@triton.jit
def load_parts(w, weight, outputs, o_g, META: tl.constexpr):
    """Columns o_g of the rows ``outputs`` of w, [NUM_PARTS, BN, BK].

    Times what a row's norm would multiply its columns by.
    """
    o_n, m_n = outputs
    o_k = o_g[:, None, :]
    p_w = w + o_n.to(tl.int64)[None, :, None] * META.K + o_k
    b_w = tl.load(p_w, mask=m_n[None, :, None] & (o_k < META.K), other=0.0)
    if META.ROWS_NORMED:
        b_n = tl.load(weight + o_k, mask=o_k < META.K, other=0.0)
        b_w = (b_w.to(tl.float32) * b_n.to(tl.float32)).to(b_w.dtype)
    return b_w


@triton.jit
def load_row_parts(x, stride, rows, o_g, K: tl.constexpr):
    """Columns o_g of the rows of x, [NUM_PARTS, BM, BK]."""
    o_m, m_m, _ = rows
    o_k = o_g[:, None, :]
    p_x = x + o_m[None, :, None] * stride + o_k
    return tl.load(p_x, mask=m_m[None, :, None] & (o_k < K), other=0.0)


@triton.jit
def product_by_parts(x, matrices, norm, rows, outputs, META: tl.constexpr):
    """norm(x) times the rows ``outputs`` of each matrix, as [BM, BN] each.

    Columns go in NUM_PARTS of BK, one per warp, whose sums meet at the end: no
    tensor core waits for another's product.
    """
    p_x, stride = x
    weight, gate, stride_gate, eps = norm
    K: tl.constexpr = META.K
    V: tl.constexpr = META.V
    BM: tl.constexpr = META.BM
    BN: tl.constexpr = META.BN
    BK: tl.constexpr = META.BK
    NUM_PARTS: tl.constexpr = META.NUM_PARTS
    NM: tl.constexpr = len(matrices)
    TILES: tl.constexpr = (K + NUM_PARTS * BK - 1) // (NUM_PARTS * BK)
    o_g = tl.arange(0, NUM_PARTS)[:, None] * BK + tl.arange(0, BK)[None, :]
    tiles, xs, gates = [], [], []
    for i in tl.static_range(min(TILES_AHEAD, TILES)):
        o_k = i * NUM_PARTS * BK + o_g
        tiles += [load_parts(w, weight, outputs, o_k, META) for w in matrices]
    if V > 0:
        b_head = tl.load(weight + tl.arange(0, V)).to(tl.float32)
    if META.EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    for i in tl.static_range(min(TILES_AHEAD, TILES)):
        o_k = i * NUM_PARTS * BK + o_g
        xs += [load_row_parts(p_x, stride, rows, o_k, K)]
        if gate is not None:
            gates += [load_row_parts(gate, stride_gate, rows, o_k, K)]
    b_square = tl.zeros([NUM_PARTS, BM, BK], tl.float32)
    sums = [tl.zeros([NUM_PARTS, BM, BN], tl.float32) for _ in matrices]
    for i in tl.static_range(TILES):
        o_k = i * NUM_PARTS * BK + o_g
        if i >= TILES_AHEAD:
            xs += [load_row_parts(p_x, stride, rows, o_k, K)]
        b_x = xs[i]
        if V > 0:
            b_h = tl.reshape(b_x.to(tl.float32), [NUM_PARTS, BM, BK // V, V])
            b_h *= tl.rsqrt(tl.sum(b_h * b_h, 3) / V + eps)[:, :, :, None]
            b_h *= b_head[None, None, None, :]
            b_n = tl.reshape(b_h, [NUM_PARTS, BM, BK])
            if gate is not None:
                if i >= TILES_AHEAD:
                    gates += [load_row_parts(gate, stride_gate, rows, o_k, K)]
                b_g = gates[i].to(tl.float32)
                b_n *= sigmoid(b_g)
                if not META.SIGMOID:
                    b_n *= b_g
            b_x = b_n.to(b_x.dtype)
        elif META.ROWS_NORMED:
            b_square += b_x.to(tl.float32) * b_x.to(tl.float32)
        after = []
        for j in tl.static_range(NM):
            if i >= TILES_AHEAD:
                tiles += [load_parts(matrices[j], weight, outputs, o_k, META)]
            b_w = tl.permute(tiles[i * NM + j], [0, 2, 1])
            after += [dot(b_x, b_w, sums[j], "ieee", False)]
        sums = after
    b_r = tl.full([BM], 1.0, tl.float32)
    if META.ROWS_NORMED:
        b_r = tl.rsqrt(tl.sum(tl.sum(b_square, 2), 0) / K + eps)
    return [tl.sum(b_sum, axis=0) * b_r[:, None] for b_sum in sums]


@triton.jit
def product_by_dots(x, matrices, rows, outputs, META: tl.constexpr):
    """x times the rows ``outputs`` of each matrix, as [BM, BN] each."""
    p_x, stride = x
    o_m, m_m, _ = rows
    BM: tl.constexpr = META.BM
    BN: tl.constexpr = META.BN
    if META.EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    sums = [tl.zeros([BM, BN], tl.float32) for _ in matrices]
    p_x += o_m[:, None] * stride
    for k in range(0, META.K, META.BK):
        o_k = k + tl.arange(0, META.BK)
        m_x = m_m[:, None] & (o_k < META.K)[None, :]
        b_x = tl.load(p_x + o_k[None, :], mask=m_x, other=0.0)  # [BM, BK]
        after = []
        for j in tl.static_range(len(matrices)):
            b_w = tl.trans(load_tile(matrices[j], outputs, k, META))
            after += [dot(b_x, b_w, sums[j], "ieee", False)]
        sums = after
    return sums


@triton.jit
def inputs_before(convolution, rows, R, channels, META: tl.constexpr):
    """Load for a tile's convolution all but the tile's own inputs.

    Returns:
        (taps, bias): one per tap, and one, [BN] each.
        (seen, kept): [BM, BN] each, for each tap but the newest. seen has the
            last inputs [R, W - 1, C] that tokens reach back to; kept has, for
            a sequence's first token, all as they are: some may have to stay.
        places: pointers to a sequence's first one, mask, which token of its
            sequence each is, and by how many the sequence's inputs move on.
    """
    taps, bias, history, pool_rows, num_accepted, T = convolution
    o_m, m_m, _ = rows
    o_c, m_c = channels
    C: tl.constexpr = META.SIZES[0]
    W: tl.constexpr = META.W
    i_n, t = o_m // T, (o_m % T).to(tl.int32)
    o_r, m_r, n = i_n, m_m, tl.zeros_like(t) + T
    if pool_rows is not None:
        o_r = tl.load(pool_rows + i_n, mask=m_m, other=-1).to(tl.int64)
        m_r = (o_r >= 0) & (o_r < R)
    if num_accepted is not None:
        n = tl.load(num_accepted + i_n, mask=m_m, other=0).to(tl.int32)
    m = m_r[:, None] & m_c[None, :]
    p_h = history + o_r[:, None] * ((W - 1) * C) + o_c[None, :]
    weights, seen, kept = [], [], []
    for j in tl.static_range(W):
        weights += [tl.load(taps + o_c * W + j, mask=m_c, other=0.0)]
    for j in tl.static_range(W - 1):
        m_h = m & (j + t < W - 1)[:, None]
        seen += [tl.load(p_h + (j + t)[:, None] * C, mask=m_h, other=0.0)]
        m_h = m & (t == 0)[:, None]
        kept += [tl.load(p_h + j * C, mask=m_h, other=0.0)]
    b_bias = tl.zeros([o_c.shape[0]], tl.float32)
    if bias is not None:
        b_bias += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    return (weights, b_bias), (seen, kept), (p_h, m, t, n)


@triton.jit
def convolve_tile(b_x, taps, inputs, places, META: tl.constexpr):
    """The short convolution of tokens b_x and the inputs before, [BM, BN].

    Beside b_x it takes what :func:`inputs_before` has. The last inputs move
    on. With MANY_TOKENS a sequence's follow each other in this tile.
    """
    weights, b_bias = taps
    seen, kept = inputs
    p_h, m, t, n = places
    C: tl.constexpr = META.SIZES[0]
    W: tl.constexpr = META.W
    b_x = b_x.to(p_h.dtype.element_ty)
    b_y = b_x.to(tl.float32) * weights[W - 1].to(tl.float32)[None, :]
    b_y += b_bias[None, :]
    for j in tl.static_range(W - 1):
        lag = W - 1 - j
        b_h = seen[j].to(tl.float32)
        if META.MANY_TOKENS:
            o_m = tl.arange(0, b_x.shape[0])
            is_lag = (o_m[:, None] == o_m[None, :] + lag) & (t >= lag)[:, None]
            b_l = tl.where(is_lag[:, :, None], b_x[None, :, :], 0.0)
            b_h += tl.sum(b_l.to(tl.float32), axis=1)
        b_y += b_h * weights[j].to(tl.float32)[None, :]
    if META.MANY_TOKENS:
        tl.debug_barrier()  # nothing is written before all is read
    for j in tl.static_range(W - 1):
        slot = j - n
        m_k = m & ((t == 0) & (slot >= 0))[:, None]
        tl.store(p_h + slot[:, None] * C, kept[j], mask=m_k)
    slot = W - 1 + t - n
    m_k = m & ((slot >= 0) & (slot < W - 1))[:, None]
    tl.store(p_h + slot[:, None] * C, b_x, mask=m_k)
    return b_y * sigmoid(b_y) if META.SILU else b_y


@triton.jit(do_not_specialize=["M", "R"])
def gemv_kernel(
    x, weights, norm, residual, convolution, y, M, R, META: tl.constexpr
):
    """A tile of y [M, all SIZES], as :func:`gemv` says.

    x comes with its stride, the norm's weight with the gate, the gate's stride
    and eps; the convolution is its taps, bias and last inputs [R, W - 1, N],
    the sequences' rows of those, num_accepted, and tokens per sequence.
    EARLY, programs start while those of the kernel before end, and read
    weights, which are nobody's result, before they wait for it.
    """
    w, i_tile, N, source, target = matrix_of(weights, META)
    o_m = (tl.program_id(1) * META.BM + tl.arange(0, META.BM)).to(tl.int64)
    o_n = i_tile * META.BN + tl.arange(0, META.BN)
    m_m, m_n = o_m < M, o_n < N
    rows, outputs = (o_m, m_m, M), (o_n, m_n)
    # Nothing that the kernel before writes: read before it ends.
    m_y = m_m[:, None] & m_n[None, :]
    o_y = o_m[:, None] * META.TOTAL + target + o_n[None, :]
    if residual is not None:
        b_residual = tl.load(residual + o_y, mask=m_y, other=0.0)
    if META.W > 0:
        channels = o_n, m_n & (target == 0)
        before = inputs_before(convolution, rows, R, channels, META)
    matrices = (w,)
    if META.SWIGLU:
        matrices = (w, w + META.SIZES[0] * META.K)
    x = x[0] + source, x[1]
    if META.BY_SUMS:
        products = product_by_sums(x, matrices, norm, rows, outputs, META)
    elif META.NUM_PARTS > 0:
        products = product_by_parts(x, matrices, norm, rows, outputs, META)
    else:
        products = product_by_dots(x, matrices, rows, outputs, META)
    b_y = products[0]
    if META.SWIGLU:
        b_y = b_y * sigmoid(b_y) * products[1]
    if META.W > 0:
        b_c = convolve_tile(b_y, *before, META)
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
    num_accepted: Tensor | None = None,
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
        num_accepted: [B], by how many tokens the inputs move on, if not by T.
        sources: for each matrix the first of its K columns of x.

    Returns:
        y [M, N of all matrices].
    """
    M, K = len(x), weights[0].shape[1]
    sizes = tuple([len(w) // (1 + swiglu) for w in weights])
    tile, settings = gemv_options(M, K, sum(sizes), x.dtype)
    V = 0  # channels of a head; 0: the norm is that of a row
    if norm is not None and (gate is not None or len(norm) < K):
        V = len(norm)
    whole_rows = "BY_SUMS" in tile or "NUM_PARTS" in tile
    if norm is not None and (not whole_rows or (V and tile["BK"] % V)):
        x = _norm_rows(x, norm, gate, eps, activation)
        norm, gate, V = None, None, 0
    norms = norm, gate, 0 if gate is None else gate.stride(0), eps
    conv_group: Any = None
    W = R = 0
    if convolution is not None:
        conv_group = (*convolution, rows, num_accepted, tokens)
        W, R = convolution[0].shape[1], len(convolution[2])
    early = starts_early(x.device)
    meta = GemvMeta(
        K=K,
        SIZES=sizes,
        TOTAL=sum(sizes),
        SOURCES=tuple(sources) * (len(sizes) // len(sources)),
        ROWS_NORMED=norm is not None and V == 0,
        V=V,
        SIGMOID=activation == "sigmoid",
        SWIGLU=swiglu,
        W=W,
        SILU=silu,
        MANY_TOKENS=tokens > 1,
        EARLY=early,
        **tile,
    )
    y = x.new_empty(M, meta.TOTAL)
    tiles = sum([triton.cdiv(N, meta.BN) for N in sizes])
    inputs = x, x.stride(0)
    arguments = inputs, weights, norms, residual, conv_group, y, M, R, meta
    with torch.cuda.device_of(x):
        gemv_kernel[(tiles, triton.cdiv(M, meta.BM))](
            *arguments, launch_pdl=early, **settings
        )
    return y


def _norm_rows(
    x: Tensor,
    norm: Tensor,
    gate: Tensor | None,
    eps: float,
    activation: str | None,
) -> Tensor:
    """The norm as a launch of its own: of many rows it is no small work."""
    if gate is None and len(norm) == x.shape[1]:
        return F.rms_norm(x, norm.shape, norm, eps)
    o = x.view(len(x), 1, -1, len(norm))
    gates = None if gate is None else gate[:, None]
    silu = activation == "silu"
    return output_norm.forward(o, norm, gates, silu, eps)[:, 0]


def gemv_options(
    M: int, K: int, N: int, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, int]]:
    """Tiles and launch settings, measured on an H200."""
    BM, padded_K = triton.next_power_of_2(M), triton.next_power_of_2(K)
    half, warps, stages = dtype != torch.float32, 4, 1
    if M <= SUMS_ROWS:
        BN, BK, warps = (8, 512, 8) if N > 1024 else (4, 1024, 4)
        tile = {"BM": BM, "BN": BN, "BK": min(BK, padded_K), "BY_SUMS": True}
    elif M <= 16 and half:
        BK = min(128, max(16, padded_K // 4))
        tile = {"BM": 16, "BN": 16, "BK": BK, "NUM_PARTS": 4}
    elif half:
        BK = min(128, max(16, padded_K))
        tile = {"BM": min(BM, 64), "BN": 32 if N > 1024 else 16, "BK": BK}
        stages = 4
    else:  # products take no tensor core: small tiles, which do not spill
        tile = {"BM": min(BM, 16), "BN": 16, "BK": min(32, max(16, padded_K))}
        stages = 3
    return tile, {"num_warps": warps, "num_stages": stages}
