"""A few new tokens of every head: the state is read and written once."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from fastweights.kernels.tile import add_pairs, mask_if, state_at


@triton.jit
def row_of(x, i_row, o_d, D: tl.constexpr):
    """Elements o_d of row i_row of x [rows, D], zeros past D."""
    return tl.load(x + i_row * D + o_d, mask=o_d < D, other=0.0)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["T"])
def decode_kernel(
    q,
    k,
    v,
    g,
    beta,
    o,
    state,
    rows,
    scale,
    T,
    N,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DG: tl.constexpr,
    FIXED: tl.constexpr,
    DELTA: tl.constexpr,
    EARLY: tl.constexpr,
):
    """T tokens of one value tile of one head, its state in registers.

    Sequence i_b has row rows[i_b] of the N states, or i_b if rows is None.

    No tl.dot: the time goes where the state's bytes go, and the sums stay
    in fp32. T = 1, which Triton makes a constant of, compiles without the
    loop; all other lengths share one kernel. EARLY, its programs start while
    those of the kernel before it end, and wait for all that it has written.
    Then they let the next kernel start: not before, or that would start while
    the kernel before this one still writes, and only its own wait, which
    other people's kernels may lack, would keep it from reading too early.
    """
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    NV: tl.constexpr = (V + BV - 1) // BV
    i_bh, i_v = tl.program_id(0) // NV, tl.program_id(0) % NV
    i_b, i_hv = (i_bh // HV).to(tl.int64), i_bh % HV
    i_h = i_hv // (HV // H)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    i_n = i_b
    if rows is not None:
        i_n = tl.load(rows + i_b).to(tl.int64)
    o_S, m_S = state_at(i_n * HV + i_hv, i_v, K, V, BK, BV)
    if rows is not None:
        is_there = (i_n >= 0) & (i_n < N)
        m_S = mask_if(is_there, m_S)
    b_S = tl.load(state + o_S, mask=m_S, other=0.0)  # [BK, BV]
    b_S = b_S.to(tl.float32)

    i_key, i_value = i_b * T * H + i_h, i_b * T * HV + i_hv
    for _ in range(T):
        # All loads first, so that none waits for what another is used for.
        b_k = row_of(k, i_key, o_k, K)  # [BK]
        b_q = row_of(q, i_key, o_k, K)  # [BK]
        b_new = row_of(v, i_value, o_v, V)  # [BV]
        if DG == 1:
            b_g = tl.load(g + (i_hv if FIXED else i_value))
        elif DG > 1:
            b_g = row_of(g, i_value, o_k, K)  # [BK]
        if DELTA:
            b_beta = tl.load(beta + i_value).to(tl.float32)
        b_k, b_q = b_k.to(tl.float32), b_q.to(tl.float32)
        b_new = b_new.to(tl.float32)
        if DELTA:
            b_kq = tl.sum(b_k * b_q)
        b_k, b_q = b_k[:, None], b_q[:, None]  # [BK, 1]
        if DG > 0:
            b_decay = tl.exp(b_g.to(tl.float32))
            b_S *= b_decay[:, None] if DG > 1 else b_decay
        if DELTA:
            # What k finds and what q reads before the write, in one exchange
            # between the warps.
            b_found, b_o = tl.reduce((b_S * b_k, b_S * b_q), 0, add_pairs)
            b_new = b_beta * (b_new - b_found)  # [BV]
            b_o += b_kq * b_new
            b_S += b_k * b_new[None, :]
        else:
            b_S += b_k * b_new[None, :]
            b_o = tl.sum(b_S * b_q, axis=0)  # [BV]
        b_o *= scale
        if rows is not None:
            b_o = tl.where(is_there, b_o, 0.0)
        tl.store(o + i_value * V + o_v, b_o, mask=o_v < V)
        i_key += H
        i_value += HV
    tl.store(state + o_S, b_S, mask=m_S)


def decode_options(K: int) -> dict[str, int]:
    """Tile sizes and launch settings for heads of K key channels.

    A row of a tile is 128 bytes, one line of the cache, in eight lanes of
    16 bytes. There are as many threads as key channels: a thread holds 32
    elements of the state whatever K is, and many programs share a
    multiprocessor.
    """
    BK = max(32, triton.next_power_of_2(K))
    return {"BK": BK, "BV": 32, "num_warps": BK // 32}


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it is done.

    That is programmatic dependent launch, which Hopper brought.
    """
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    rows: Tensor | None,
    scale: float,
) -> Tensor:
    """o in v's dtype; ``state`` is updated in place, contiguous or not.

    Arguments are those of :func:`fastweights.decode_step`, checked there.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    g, beta = (None if x is None else x.contiguous() for x in (g, beta))
    S = state.contiguous()
    o = torch.empty_like(v)
    options = decode_options(K)
    early = starts_early(q.device)
    with torch.cuda.device_of(q):
        decode_kernel[(B * HV * triton.cdiv(V, options["BV"]),)](
            q,
            k,
            v,
            g,
            beta,
            o,
            S,
            None if rows is None else rows.contiguous(),
            scale,
            T,
            S.shape[0],
            H=H,
            HV=HV,
            K=K,
            V=V,
            DG=0 if g is None else K if g.dim() == 4 else 1,
            FIXED=g is not None and g.dim() == 1,
            DELTA=beta is not None,
            EARLY=early,
            launch_pdl=early,
            **options,
        )
    if S is not state:
        state.copy_(S)
    return o
