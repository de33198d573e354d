"""TTT-Linear by mini-batches: one program per head and sequence.

The weights W [K, K] and b [K] stay in registers, in fp32, from mini-batch to
mini-batch; products are in q's dtype. Of the forward nothing is kept but the
steps' factors X = rate * error, as they were multiplied, in q's dtype: the
backward walks from the last weights to the first by adding back the very
products k^T X that were subtracted, and needs no weights in between.

Letters are those of :func:`fastweights.deep.ttt`: LN(z) = u weight + bias
with u = (z - mean) s, the error E is the loss's slope at z = k W + b; factors
are its rows, one per token of a mini-batch. What has K channels is in tiles
BK wide, mini-batches of C <= 16 tokens in BC rows; past the end all is 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.kernels.gpu import dot_precision
from fastweights.kernels.tile import (
    Tiles,
    add_pairs,
    load_numbers,
    load_rows,
    numbers_at,
    store_rows,
)

EPS = tl.constexpr(1e-6)
FP32 = torch.float32


class TTTMeta(NamedTuple):
    """Constants of a kernel: its argument META."""

    H: int
    K: int
    C: int  # tokens of a mini-batch
    BC: int
    BK: int
    PRECISION: str

    @property
    def TILES(self) -> Tiles:
        """The tiles of q, k and v."""
        return Tiles(self.H, self.K, self.BC, self.BK)


@triton.jit
def mean(b_x, K: tl.constexpr):
    """The mean over the K channels of b_x [BC, BK], 0 past them: [BC, 1]."""
    return tl.sum(b_x, axis=1)[:, None] * (1.0 / K)


@triton.jit
def clear_padding(b_x, K: tl.constexpr):
    """b_x [BC, BK], 0 past the K channels."""
    if b_x.shape[1] == K:
        return b_x
    else:
        return tl.where(tl.arange(0, b_x.shape[1])[None, :] < K, b_x, 0.0)


@triton.jit
def centre(b_W, K: tl.constexpr):
    """b_W [BK, BK] without the means over its columns.

    LN takes no notice of them, and no step changes them but by rounding,
    since errors sum to 0. Without them z has next to no mean, and the spread
    can be found from the sums of z and of z^2, which are there at once.
    """
    return clear_padding(b_W - mean(b_W, K), K)


@triton.jit
def standardise(b_z, K: tl.constexpr):
    """b_z less its mean, in units of its spread, and 1 / spread.

    Small as the mean of a centred z is, it may not stay: errors would then
    not sum to 0, and the next mean would be larger.
    """
    b_m, b_zz = tl.reduce((b_z, b_z * b_z), 1, add_pairs)
    b_m, b_zz = b_m[:, None] * (1.0 / K), b_zz[:, None] * (1.0 / K)
    b_s = tl.rsqrt(tl.maximum(b_zz - b_m * b_m, 0.0) + EPS)
    return clear_padding((b_z - b_m) * b_s, K), b_s


@triton.jit
def norm_backward(b_d, b_u, K: tl.constexpr):
    """b_d without what moves LN's mean or spread, and mean(b_d b_u)."""
    b_m, b_mu = tl.reduce((b_d, b_d * b_u), 1, add_pairs)
    b_m, b_mu = b_m[:, None] * (1.0 / K), b_mu[:, None] * (1.0 / K)
    return clear_padding(b_d - b_m - b_u * b_mu, K), b_mu


@triton.jit
def square_at(K: tl.constexpr, BK: tl.constexpr):
    """Offsets and mask of [BK, BK] in a contiguous [K, K]."""
    o_k, o_n = tl.arange(0, BK)[:, None], tl.arange(0, BK)[None, :]
    return o_k * K + o_n, (o_k < K) & (o_n < K)


@triton.jit
def scores(b_q, b_k, b_factors, TURNED: tl.constexpr, PRECISION: tl.constexpr):
    """q k^T + 1, and the same where s <= t times t's factor, both [BC, BC].

    TURNED: with t along the columns, from k and q in place of q and k.
    """
    b_S = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) + 1.0
    o_t = tl.arange(0, b_q.shape[0])
    if TURNED:
        m_s = o_t[:, None] <= o_t[None, :]
        return b_S, tl.where(m_s, b_factors[None, :], 0.0)
    else:
        m_s = o_t[:, None] >= o_t[None, :]
        return b_S, tl.where(m_s, b_factors[:, None], 0.0)


@triton.jit(do_not_specialize=["T"])
def ttt_fwd_kernel(
    tokens, memory, norm, factors, results, T, META: tl.constexpr
):
    """Outputs and last weights of one head of one sequence.

    And, unless X is None, what the backward walks back by. T is a multiple
    of C.
    """
    q, k, v, rate = tokens
    W, b = memory
    weight, bias = norm
    o, X, W_after, b_after = results
    K: tl.constexpr = META.K
    C: tl.constexpr = META.C
    PRECISION: tl.constexpr = META.PRECISION
    TILES: tl.constexpr = META.TILES
    i_n = tl.program_id(0).to(tl.int64)
    i_h, t, end = i_n % META.H, i_n // META.H * T, i_n // META.H * T + T
    o_k, o_c = tl.arange(0, META.BK), tl.arange(0, META.BC)
    o_W, m_W = square_at(K, META.BK)
    b_W = tl.load(W + i_n * K * K + o_W, mask=m_W, other=0.0)  # [BK, BK]
    b_b = tl.load(b + i_n * K + o_k, mask=o_k < K, other=0.0)[None, :]
    b_Wm, b_bm = (mean(b_W, K), mean(b_b, K))  # [BK, 1], [1, 1]
    b_W, b_b = (centre(b_W, K), centre(b_b, K))  # [BK, BK], [1, BK]
    b_w = tl.load(weight + i_h * K + o_k, mask=o_k < K, other=0.0)[None, :]
    b_c = tl.load(bias + i_h * K + o_k, mask=o_k < K, other=0.0)[None, :]
    b_factors = tl.load(factors + o_c, mask=o_c < C, other=0.0)  # [BC]
    last = tl.load(factors + C - 1)
    first = t, t + C, i_h
    b_k = load_rows(k, first, 0, TILES)  # [BC, BK]
    b_q = load_rows(q, first, 0, TILES)
    b_v = load_rows(v, first, 0, TILES)
    b_r = load_numbers(rate, first, META.H, META.BC)  # [BC]
    for _ in range(T // C):
        # The next mini-batch's tokens are on their way while this one's
        # products wait for each other.
        place, t = (t, t + C, i_h), t + C
        ahead = t, tl.minimum(t + C, end), i_h
        n_k = load_rows(k, ahead, 0, TILES)
        n_q = load_rows(q, ahead, 0, TILES)
        n_v = load_rows(v, ahead, 0, TILES)
        n_r = load_numbers(rate, ahead, META.H, META.BC)

        b_Wd = b_W.to(b_k.dtype)
        b_z = tl.dot(b_k, b_Wd, input_precision=PRECISION) + b_b
        b_u, b_s = standardise(b_z, K)  # [BC, BK], [BC, 1]
        b_t = b_v.to(tl.float32) - b_k.to(tl.float32)
        b_h, _ = norm_backward((b_u * b_w + b_c - b_t) * b_w, b_u, K)
        b_X = (b_r[:, None] * b_h * b_s).to(b_k.dtype)  # [BC, BK]

        b_S, b_m = scores(b_q, b_k, b_factors, False, PRECISION)  # [BC, BC]
        b_A = (b_S * b_m).to(b_k.dtype)
        b_z = tl.dot(b_q, b_Wd, input_precision=PRECISION) + b_b
        b_z -= tl.dot(b_A, b_X, input_precision=PRECISION)  # [BC, BK]
        b_u, _ = standardise(b_z, K)
        b_o = b_q.to(tl.float32) + b_u * b_w + b_c
        store_rows(o, b_o, place, 0, TILES)
        if X is not None:
            store_rows(X, b_X, place, 0, TILES)

        b_kT = tl.trans(b_k)  # [BK, BC]
        b_W -= last * tl.dot(b_kT, b_X, input_precision=PRECISION)
        b_b -= last * tl.sum(b_X.to(tl.float32), axis=0)[None, :]
        b_k, b_q, b_v, b_r = n_k, n_q, n_v, n_r
    tl.store(W_after + i_n * K * K + o_W, b_W + b_Wm, mask=m_W)
    p_b = b_after + i_n * K + o_k[None, :]
    tl.store(p_b, b_b + b_bm, mask=o_k[None, :] < K)


@triton.jit(do_not_specialize=["T"])
def ttt_bwd_kernel(
    tokens,
    memory,
    norm,
    factors,
    X,
    output_grads,
    grads,
    T,
    META: tl.constexpr,
):
    """Gradients of one head of one sequence, last mini-batch first.

    dweight and dbias [B, H, K] and dfactors [B, H, C] are this program's
    share, in fp32: torch adds them up.
    """
    q, k, v, rate = tokens
    W_after, b_after = memory
    weight, bias = norm
    do, dW_after, db_after = output_grads
    dq, dk, dv, drate, dW, db, dweight, dbias, dfactors = grads
    K: tl.constexpr = META.K
    C: tl.constexpr = META.C
    PRECISION: tl.constexpr = META.PRECISION
    TILES: tl.constexpr = META.TILES
    i_n = tl.program_id(0).to(tl.int64)
    i_h, end = i_n % META.H, i_n // META.H * T + T
    o_k, o_c = tl.arange(0, META.BK), tl.arange(0, META.BC)
    m_k = o_k < K
    o_W, m_W = square_at(K, META.BK)
    b_W = tl.load(W_after + i_n * K * K + o_W, mask=m_W, other=0.0)
    b_b = tl.load(b_after + i_n * K + o_k, mask=m_k, other=0.0)[None, :]
    b_W, b_b = (centre(b_W, K), centre(b_b, K))  # [BK, BK], [1, BK]
    b_dW = tl.load(dW_after + i_n * K * K + o_W, mask=m_W, other=0.0)
    b_db = tl.load(db_after + i_n * K + o_k, mask=m_k, other=0.0)
    b_w = tl.load(weight + i_h * K + o_k, mask=m_k, other=0.0)[None, :]
    b_c = tl.load(bias + i_h * K + o_k, mask=m_k, other=0.0)[None, :]
    b_factors = tl.load(factors + o_c, mask=o_c < C, other=0.0)  # [BC]
    last = tl.load(factors + C - 1)
    b_dw, b_dc = tl.zeros_like(b_db), tl.zeros_like(b_db)
    b_dfactors = tl.zeros_like(b_factors)
    for i in range(T // C):
        t = end - (i + 1) * C
        place = t, t + C, i_h
        b_k = load_rows(k, place, 0, TILES)  # [BC, BK]
        b_q = load_rows(q, place, 0, TILES)
        b_X = load_rows(X, place, 0, TILES)
        b_v = load_rows(v, place, 0, TILES)
        b_do = load_rows(do, place, 0, TILES).to(tl.float32)
        b_r = load_numbers(rate, place, META.H, META.BC)[:, None]  # [BC, 1]
        b_kT, b_XT = tl.trans(b_k), tl.trans(b_X)  # [BK, BC]

        # The weights with which the mini-batch began.
        b_W += last * tl.dot(b_kT, b_X, input_precision=PRECISION)
        b_b += last * tl.sum(b_X.to(tl.float32), axis=0)[None, :]
        b_Wd = b_W.to(b_k.dtype)
        b_WT = tl.trans(b_Wd)

        # Through the output's LN to z = q W + b - A X, and to q.
        b_S, b_m = scores(b_q, b_k, b_factors, False, PRECISION)  # [BC, BC]
        b_A = (b_S * b_m).to(b_k.dtype)
        b_z = tl.dot(b_q, b_Wd, input_precision=PRECISION) + b_b
        b_z -= tl.dot(b_A, b_X, input_precision=PRECISION)
        b_u, b_s = standardise(b_z, K)  # [BC, BK], [BC, 1]
        b_dw += tl.sum(b_do * b_u, axis=0)
        b_dc += tl.sum(b_do, axis=0)
        b_du, _ = norm_backward(b_do * b_w, b_u, K)
        b_du *= b_s
        b_db_z = tl.sum(b_du, axis=0)
        b_dz = b_du.to(b_k.dtype)  # [BC, BK]
        b_dA = -tl.dot(b_dz, b_XT, input_precision=PRECISION)  # [BC, BC]
        m_s = o_c[:, None] >= o_c[None, :]
        b_dfactors += tl.sum(tl.where(m_s, b_dA * b_S, 0.0), axis=1)
        b_dq = b_do + tl.dot(b_dz, b_WT, input_precision=PRECISION)
        b_dS = (b_dA * b_m).to(b_k.dtype)
        b_dq += tl.dot(b_dS, b_k, input_precision=PRECISION)
        store_rows(dq, b_dq, place, 0, TILES)

        # To X = rate E: from z, and from the step W - last k^T X.
        b_dWd = b_dW.to(b_k.dtype)
        b_dX = tl.dot(b_k, b_dWd, input_precision=PRECISION) + b_db[None, :]
        b_xg = tl.sum(tl.sum(b_X.to(tl.float32) * b_dX, axis=1), axis=0)
        b_dfactors -= tl.where(o_c == C - 1, b_xg, 0.0)
        b_dX *= -last
        b_S, b_m = scores(b_k, b_q, b_factors, True, PRECISION)  # transposed
        b_A = (b_S * b_m).to(b_k.dtype)
        b_dX -= tl.dot(b_A, b_dz, input_precision=PRECISION)  # [BC, BK]
        b_dzT = tl.trans(b_dz)  # [BK, BC]
        b_dS = -tl.dot(b_X, b_dzT, input_precision=PRECISION) * b_m
        b_dk = tl.dot(b_dS.to(b_k.dtype), b_q, input_precision=PRECISION)
        b_dWT = tl.trans(b_dWd)
        b_dk -= last * tl.dot(b_X, b_dWT, input_precision=PRECISION)

        # Through E = h s, h = d - mean(d) - u mean(d u), to z = k W + b.
        b_z = tl.dot(b_k, b_Wd, input_precision=PRECISION) + b_b
        b_u, b_s = standardise(b_z, K)
        b_e = b_u * b_w + b_c - b_v.to(tl.float32) + b_k.to(tl.float32)
        b_h, b_hu = norm_backward(b_e * b_w, b_u, K)
        b_dr = tl.sum(b_dX * b_h * b_s, axis=1)  # [BC]
        p_r, m_r = numbers_at(drate, place, META.H, META.BC)
        tl.store(p_r, b_dr, mask=m_r)
        b_dX *= b_r * b_s  # to h
        b_ds = mean(b_dX * b_h, K)  # [BC, 1]
        b_dy, b_dhu = norm_backward(b_dX, b_u, K)
        b_dw += tl.sum(b_dy * b_e, axis=0)
        b_dy *= b_w
        b_dw += tl.sum(b_dy * b_u, axis=0)
        b_dc += tl.sum(b_dy, axis=0)
        store_rows(dv, -b_dy, place, 0, TILES)
        b_du = b_dy * b_w - b_dX * b_hu - b_e * b_w * b_dhu
        b_du, _ = norm_backward(b_du, b_u, K)
        b_du = b_s * (b_du - b_u * b_ds)
        b_db += b_db_z + tl.sum(b_du, axis=0)
        b_du_ = b_du.to(b_k.dtype)
        b_dk += b_dy + tl.dot(b_du_, b_WT, input_precision=PRECISION)
        store_rows(dk, b_dk, place, 0, TILES)
        b_dW += tl.dot(b_kT, b_du_, input_precision=PRECISION)
        b_qT = tl.trans(b_q)  # [BK, BC]
        b_dW += tl.dot(b_qT, b_dz, input_precision=PRECISION)
    tl.store(dW + i_n * K * K + o_W, b_dW, mask=m_W)
    tl.store(db + i_n * K + o_k, b_db, mask=m_k)
    tl.store(dweight + i_n * K + o_k, b_dw, mask=m_k)
    tl.store(dbias + i_n * K + o_k, b_dc, mask=m_k)
    tl.store(dfactors + i_n * C + o_c, b_dfactors, mask=o_c < C)


def ttt_options(K: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tiles, and warps by the size of the weights that they share."""
    BK = max(16, triton.next_power_of_2(K))
    warps = 8 if BK > 64 else 4
    return {"BC": 16, "BK": BK}, {"num_warps": warps, "num_stages": 1}


def launch_heads(kernel: Any, C: int, tokens: Any, *others: Any) -> None:
    """One program per sequence and head."""
    q = tokens[0]
    B, T, H, K = q.shape
    tile, settings = ttt_options(K)
    meta = TTTMeta(H=H, K=K, C=C, PRECISION=dot_precision(q.dtype, K), **tile)
    with torch.cuda.device_of(q):
        kernel[(B * H,)](tokens, *others, T, meta, **settings)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    W: Tensor,
    b: Tensor,
    weight: Tensor,
    bias: Tensor,
    factors: Tensor,
    X: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """o, and W and b after the last mini-batch; X is filled if it is there.

    All contiguous: q, k, v and X [B, T, H, K], rate [B, T, H], W [B, H, K, K],
    b [B, H, K], weight and bias [H, K], factors [C], of which T is a multiple;
    all but q, k, v and X in fp32.
    """
    o, W_after, b_after = (torch.empty_like(x) for x in (q, W, b))
    tokens, memory, norm = (q, k, v, rate), (W, b), (weight, bias)
    results = o, X, W_after, b_after
    C = len(factors)
    launch_heads(ttt_fwd_kernel, C, tokens, memory, norm, factors, results)
    return o, W_after, b_after


def backward(
    do: Tensor,
    dW_after: Tensor,
    db_after: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    weight: Tensor,
    bias: Tensor,
    factors: Tensor,
    W_after: Tensor,
    b_after: Tensor,
    X: Tensor,
) -> list[Tensor]:
    """Gradients of what forward reads, in its order, each as its input."""
    (B, _, H, K), C = q.shape, len(factors)
    dq, dk, dv = (torch.empty_like(q) for _ in "qkv")
    drate, dW, db = (torch.empty_like(x) for x in (rate, W_after, b_after))
    dweight, dbias = (q.new_empty(B, H, K, dtype=FP32) for _ in "wb")
    dfactors = q.new_empty(B, H, C, dtype=FP32)
    own = (dq, dk, dv, drate, dW, db)
    tokens, memory, norm = (q, k, v, rate), (W_after, b_after), (weight, bias)
    inputs = tokens, memory, norm, factors, X
    output_grads = do, dW_after, db_after
    grads = *own, dweight, dbias, dfactors
    launch_heads(ttt_bwd_kernel, C, *inputs, output_grads, grads)
    return [*own, dweight.sum(0), dbias.sum(0), dfactors.sum((0, 1))]
