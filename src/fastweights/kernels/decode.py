"""A few new tokens of every head: the state is read and written once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from fastweights.kernels.gpu import starts_early
from fastweights.kernels.tile import (
    add_pairs,
    add_triples,
    mask_if,
    sigmoid,
    state_at,
)


@triton.jit
def load_vector(x, o_d, D: tl.constexpr):
    """Elements o_d of x [D], zeros past D."""
    return tl.load(x + o_d, mask=o_d < D, other=0.0)


@triton.jit
def softplus(b_x):
    """log(1 + e^x), to 1e-7."""
    return tl.maximum(b_x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_x)))


class DecodeMeta(NamedTuple):
    """Constants of :func:`decode_kernel`: its argument META."""

    H: int
    HV: int
    K: int
    V: int
    GATE_WIDTH: int  # 0, 1 or K
    FIXED: bool  # whether all tokens have the same g
    NORM: bool  # whether q and k are brought to unit length
    LOWER_BOUND: float | None  # of g, with decay_parameters
    MAX_BETA: float  # of a sigmoid, 0 where beta comes as it is
    STATE_IS_READY: bool  # whether the kernel before does not write to it
    EARLY: bool  # whether the kernel starts before the one before is done
    BK: int
    BV: int


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["T"])
def decode_kernel(
    tokens,
    erase_key,
    o,
    pool,
    decay_parameters,
    strides,
    scale,
    T,
    N,
    META: tl.constexpr,
):
    """T tokens of one value tile of one head, its state in registers.

    ``pool`` is (state, rows, num_accepted): sequence i_n has row rows[i_n] of
    the N states, or i_n if rows is None, and of its tokens the state takes in
    the first num_accepted[i_n], or all.
    ``strides`` lie between the ``tokens``, q, k, v, g and beta. With
    ``decay_parameters``, (A_log, dt_bias), the log decay is made of g here.
    ``erase_key`` is the key [B, T, HV, K] that erases in place of k, and its
    stride.

    No tl.dot: the time goes where the state's bytes go, and the sums stay
    in fp32. T = 1, which Triton makes a constant of, compiles without the
    loop; all other lengths share one kernel. EARLY, its programs start while
    those of the kernel before it end, and wait for all that it has written.
    Then they let the next kernel start: not before, or that would start while
    the kernel before this one still writes, and only its own wait, which
    other people's kernels may lack, would keep it from reading too early.
    """
    q, k, v, g, beta = tokens
    state, rows, num_accepted = pool
    K: tl.constexpr = META.K
    V: tl.constexpr = META.V
    BK: tl.constexpr = META.BK
    BV: tl.constexpr = META.BV
    HV: tl.constexpr = META.HV
    if META.EARLY and not META.STATE_IS_READY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    NV: tl.constexpr = (V + BV - 1) // BV
    i_nh, i_v = tl.program_id(0) // NV, tl.program_id(0) % NV
    i_n, i_hv = (i_nh // HV).to(tl.int64), i_nh % HV
    i_h = i_hv // (HV // META.H)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    i_row = i_n
    if rows is not None:
        i_row = tl.load(rows + i_n).to(tl.int64)
    o_S, m_S = state_at(i_row * HV + i_hv, i_v, K, V, BK, BV)
    if rows is not None:
        is_there = (i_row >= 0) & (i_row < N)
        m_S = mask_if(is_there, m_S)
    b_S = tl.load(state + o_S, mask=m_S, other=0.0)  # [BK, BV]
    b_S = b_S.to(tl.float32)
    if decay_parameters is not None:
        A_log, dt_bias = decay_parameters
        b_rate = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
        if META.GATE_WIDTH == 1:
            b_bias = tl.load(dt_bias + i_hv).to(tl.float32)
        else:
            b_bias = load_vector(dt_bias + i_hv * K, o_k, K).to(tl.float32)
    if META.EARLY and META.STATE_IS_READY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if num_accepted is not None:
        last = tl.load(num_accepted + i_n).to(tl.int32) - 1
    s_q, s_k, s_v, s_g, s_beta = strides
    for t in range(T):
        i_t = i_n * T + t
        # All loads first, so that none waits for what another is used for.
        b_k = load_vector(k + i_t * s_k + i_h * K, o_k, K)  # [BK]
        b_q = load_vector(q + i_t * s_q + i_h * K, o_k, K)  # [BK]
        b_new = load_vector(v + i_t * s_v + i_hv * V, o_v, V)  # [BV]
        if META.GATE_WIDTH == 1:
            b_g = tl.load(g + (i_hv if META.FIXED else i_t * s_g + i_hv))
        elif META.GATE_WIDTH > 1:
            b_g = load_vector(g + i_t * s_g + i_hv * K, o_k, K)  # [BK]
        if beta is not None:
            b_beta = tl.load(beta + i_t * s_beta + i_hv).to(tl.float32)
        if erase_key is not None:
            e, s_e = erase_key
            b_e = load_vector(e + i_t * s_e + i_hv * K, o_k, K)  # [BK]
        b_k, b_q = b_k.to(tl.float32), b_q.to(tl.float32)
        b_new = b_new.to(tl.float32)
        if META.GATE_WIDTH > 0:
            b_g = b_g.to(tl.float32)
        if decay_parameters is not None:
            b_g += b_bias
            if META.LOWER_BOUND is None:
                b_g = -b_rate * softplus(b_g)
            else:
                b_g = META.LOWER_BOUND * sigmoid(b_rate * b_g)
        if META.MAX_BETA > 0:
            b_beta = META.MAX_BETA * sigmoid(b_beta)
        if META.NORM:
            b_kk, b_qq, b_kq = tl.reduce(
                (b_k * b_k, b_q * b_q, b_k * b_q), 0, add_triples
            )
            b_rk, b_rq = tl.rsqrt(b_kk + 1e-6), tl.rsqrt(b_qq + 1e-6)
            b_k, b_q, b_kq = b_k * b_rk, b_q * b_rq, b_kq * b_rk * b_rq
        elif beta is not None or erase_key is not None:
            b_kq = tl.sum(b_k * b_q)
        b_k, b_q = b_k[:, None], b_q[:, None]  # [BK, 1]
        if META.GATE_WIDTH > 0:
            b_decay = tl.exp(b_g)
            b_S *= b_decay[:, None] if META.GATE_WIDTH > 1 else b_decay
        if beta is not None or erase_key is not None:
            # What is found and what q reads before the write, in one exchange
            # between the warps.
            b_erase = b_k if erase_key is None else b_e.to(tl.float32)[:, None]
            b_found, b_o = tl.reduce((b_S * b_erase, b_S * b_q), 0, add_pairs)
            b_new = b_new - b_found  # [BV]
            if beta is not None:
                b_new = b_beta * b_new
            b_o += b_kq * b_new
            b_S += b_k * b_new[None, :]
        else:
            b_S += b_k * b_new[None, :]
            b_o = tl.sum(b_S * b_q, axis=0)  # [BV]
        b_o *= scale
        if rows is not None:
            b_o = tl.where(is_there, b_o, 0.0)
        tl.store(o + (i_t * HV + i_hv) * V + o_v, b_o, mask=o_v < V)
        if num_accepted is not None:
            if t == last:
                tl.store(state + o_S, b_S, mask=m_S)
    if num_accepted is None:
        tl.store(state + o_S, b_S, mask=m_S)


def decode_options(K: int, T: int = 1) -> tuple[int, int, int]:
    """BK, BV and the number of warps for T tokens and K key channels.

    One token is bound by the state's bytes: a row of a tile is 128 of them,
    one line of the cache, in eight lanes of 16, and there are as many threads
    as key channels. More tokens wait for each other's sums: a warp has a tile
    of its own, so that no sum leaves it.
    """
    BK = max(32, triton.next_power_of_2(K))
    if T > 1:
        return BK, 16, max(1, BK // 128)
    return BK, 32, BK // 32


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    rows: Tensor | None,
    scale: float,
    *,
    erase_key: Tensor | None = None,
    num_accepted: Tensor | None = None,
    qk_l2norm: bool = False,
    decay_parameters: tuple[Tensor, Tensor] | None = None,
    lower_bound: float | None = None,
    max_beta: float = 0.0,
    state_is_ready: bool = False,
) -> Tensor:
    """o in v's dtype; ``state`` is updated in place, contiguous or not.

    Arguments are those of :func:`fastweights.decode_step`, checked there.
    The others are a layer's: ``qk_l2norm`` brings q and k to unit length. With
    ``decay_parameters`` (A_log [HV], dt_bias [HV] or [HV K]) g is what
    :class:`fastweights.layers.Decay` with this ``lower_bound`` takes. The
    strength is ``max_beta`` times the sigmoid of beta, unless that is 0.
    ``state_is_ready`` says that the kernel launched before does not write to
    the state.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k, v = _evenly_strided(q), _evenly_strided(k), _evenly_strided(v)
    g, beta, e = (
        None if x is None else _evenly_strided(x) for x in (g, beta, erase_key)
    )
    S = state.contiguous()
    o = v.new_empty(v.shape)
    BK, BV, num_warps = decode_options(K, T)
    early = starts_early(q.device)
    meta = DecodeMeta(
        H=H,
        HV=HV,
        K=K,
        V=V,
        GATE_WIDTH=0 if g is None else K if g.dim() == 4 else 1,
        FIXED=g is not None and g.dim() == 1,
        NORM=qk_l2norm,
        LOWER_BOUND=lower_bound,
        MAX_BETA=max_beta,
        STATE_IS_READY=state_is_ready,
        EARLY=early,
        BK=BK,
        BV=BV,
    )
    rows = None if rows is None else rows.contiguous()
    num_accepted = None if num_accepted is None else num_accepted.contiguous()
    with torch.cuda.device_of(q):
        decode_kernel[(B * HV * triton.cdiv(V, BV),)](
            (q, k, v, g, beta),
            None if e is None else (e, _token_stride(e)),
            o,
            (S, rows, num_accepted),
            decay_parameters,
            tuple([_token_stride(x) for x in (q, k, v, g, beta)]),
            scale,
            T,
            S.shape[0],
            meta,
            num_warps=num_warps,
            launch_pdl=early,
        )
    if S is not state:
        state.copy_(S)
    return o


def _evenly_strided(x: Tensor) -> Tensor:
    """x, or a copy, with tokens at one distance, each side by side."""
    if x.dim() < 3:
        return x.contiguous()
    (B, T, *sizes), (far, near, *inside) = x.shape, x.stride()
    side = inside[-1] == 1 and (len(inside) < 2 or inside[0] == sizes[1])
    return (
        x if side and (min(B, T) == 1 or far == T * near) else x.contiguous()
    )


def _token_stride(x: Tensor | None) -> int:
    """The stride of tokens in x [B, T, ..]; 0 where all have the same."""
    if x is None or x.dim() < 3:
        return 0
    return x.stride(0) if x.shape[1] == 1 else x.stride(1)
