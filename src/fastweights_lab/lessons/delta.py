"""DeltaNet's forward in six versions, from PyTorch to segments: chapter 15.

    o, state = segments(q, k, v, beta, scale=128**-0.5)

All versions compute the same and return the same. Chunks have 64 tokens; K
and V are 128 at most; there is no initial state and no backward. The
library's kernels have all of that and are longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastweights.kernels.gpu import gpu_of
from fastweights.kernels.recurrence.inverse import joint_mask
from fastweights.kernels.tile import (
    INTERPRETED,
    min_tile_columns,
    state_at,
    tile_at,
)
from fastweights_lab.lessons import check_inputs
from fastweights_lab.lessons.linear import chunk_output

CHUNK = 64
MAX_WIDTH = 128
PRECISION = tl.constexpr("ieee")  # of fp32, which only the interpreter takes
Result = tuple[Float[Tensor, "B T HV V"], Float[Tensor, "B HV K V"]]


@triton.jit
def inverse_by_rows(b_M):
    """(I + M)^-1 [BT, BT], one row after the other, each from those above."""
    BT: tl.constexpr = b_M.shape[0]
    o_c = tl.arange(0, BT)
    b_P = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0)
    for i in range(1, BT):
        m_i = (o_c == i)[:, None]
        b_m = tl.sum(tl.where(m_i, b_M, 0.0), axis=0)  # row i of M
        b_row = tl.sum(b_m[:, None] * b_P, axis=0)  # M_i P
        b_P = tl.where(m_i, b_P - b_row[None, :], b_P)
    return b_P


@triton.jit
def inverse_by_blocks(b_M, dtype: tl.constexpr):
    """(I + M)^-1 [BT, BT]: blocks of 2^level rows join, all at once.

    The operands of its products are rounded to ``dtype``.
    """
    BT: tl.constexpr = b_M.shape[0]
    o_c = tl.arange(0, BT)
    b_P = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0)
    b_P -= tl.where(joint_mask(0, BT), b_M, 0.0)
    for level in tl.static_range(1, 6):
        if 2**level < BT:
            b_off = tl.where(joint_mask(level, BT), b_M, 0.0).to(dtype)
            b_p = b_P.to(dtype)
            b_x = tl.dot(b_p, b_off, input_precision=PRECISION)  # P M_off
            b_P -= tl.dot(b_x.to(dtype), b_p, input_precision=PRECISION)
    return b_P


@triton.jit
def overlaps(b_k, b_beta):
    """M [BT, BT]: beta k k^T below the diagonal, zeros elsewhere."""
    o_c = tl.arange(0, b_k.shape[0])
    b_A = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    return tl.where(o_c[:, None] > o_c[None, :], b_beta * b_A, 0.0)


@triton.jit
def new_values(b_k, b_v, b_beta, b_P, b_S):
    """P Diag(beta) (v - k S), what a chunk writes: [BT, BV]."""
    b_e = b_v - tl.dot(b_k, b_S.to(b_k.dtype), input_precision=PRECISION)
    b_e = (b_beta * b_e).to(b_k.dtype)
    return tl.dot(b_P, b_e, input_precision=PRECISION).to(b_k.dtype)


@triton.jit(do_not_specialize=["T"])
def program_kernel(
    q,
    k,
    v,
    beta,
    o,
    state,
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One head of one sequence: all of it, chunk after chunk."""
    i_bh = tl.program_id(0)
    i_b, i_hv = i_bh // HV, i_bh % HV
    i_h = i_hv // (HV // H)
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    for i_t in range(tl.cdiv(T, BT)):
        o_k, m_k = tile_at(i_b, i_t, i_h, 0, T, H, K, BT, BK)
        o_v, m_v = tile_at(i_b, i_t, i_hv, 0, T, HV, V, BT, BV)
        o_b, m_b = tile_at(i_b, i_t, i_hv, 0, T, HV, 1, BT, 1)
        b_q = tl.load(q + o_k, mask=m_k, other=0.0)  # [BT, BK]
        b_k = tl.load(k + o_k, mask=m_k, other=0.0)  # [BT, BK]
        b_v = tl.load(v + o_v, mask=m_v, other=0.0)  # [BT, BV]
        b_beta = tl.load(beta + o_b, mask=m_b, other=0.0)  # [BT, 1]
        b_M = overlaps(b_k, b_beta)  # [BT, BT]
        if BLOCKS:
            dtype: tl.constexpr = inverse_dtype(b_k.dtype)
            b_P = inverse_by_blocks(b_M, dtype).to(b_k.dtype)
        else:
            b_P = inverse_by_rows(b_M).to(b_k.dtype)
        b_new = new_values(b_k, b_v, b_beta, b_P, b_S)  # [BT, BV]
        b_o = chunk_output(b_q, b_k, b_new, b_S, scale, PRECISION)
        tl.store(o + o_v, b_o, mask=m_v)
        b_kT = tl.trans(b_k)  # [BK, BT]
        b_S = tl.dot(b_kT, b_new, b_S, input_precision=PRECISION)
    o_S, m_S = state_at(i_bh, 0, K, V, BK, BV)
    tl.store(state + o_S, b_S, mask=m_S)


@triton.constexpr_function
def inverse_dtype(dtype):
    """fp16, which has three bits more than bf16; the interpreter's fp32."""
    return tl.float32 if dtype == tl.float32 else tl.float16


@triton.jit(do_not_specialize=["T"])
def inverse_kernel(
    k,
    beta,
    P,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """The inverse P of one chunk of one head."""
    NT = tl.cdiv(T, BT)
    i_bh, i_t = tl.program_id(0) // NT, tl.program_id(0) % NT
    i_b, i_hv = i_bh // HV, i_bh % HV
    i_h = i_hv // (HV // H)
    o_k, m_k = tile_at(i_b, i_t, i_h, 0, T, H, K, BT, BK)
    o_b, m_b = tile_at(i_b, i_t, i_hv, 0, T, HV, 1, BT, 1)
    o_P, m_P = tile_at(i_b, i_t, i_hv, 0, T, HV, BT, BT, BT)
    b_k = tl.load(k + o_k, mask=m_k, other=0.0)  # [BT, BK]
    b_beta = tl.load(beta + o_b, mask=m_b, other=0.0)  # [BT, 1]
    dtype: tl.constexpr = inverse_dtype(b_k.dtype)
    b_P = inverse_by_blocks(overlaps(b_k, b_beta), dtype)  # [BT, BT]
    tl.store(P + o_P, b_P, mask=m_P)


@triton.jit(do_not_specialize=["T"])
def scan_kernel(
    q,
    k,
    v,
    beta,
    P,
    o,
    initial_state,
    state,
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """BV columns of one head's state [K, W], chunk after chunk.

    Columns from V on have no values: they are zeros. Without o there are
    no outputs.
    """
    NW: tl.constexpr = (W + BV - 1) // BV
    i_bh, i_v = tl.program_id(0) // NW, tl.program_id(0) % NW
    i_b, i_hv = i_bh // HV, i_bh % HV
    i_h = i_hv // (HV // H)
    o_S, m_S = state_at(i_bh, i_v, K, W, BK, BV)
    if initial_state is None:
        b_S = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        b_S = tl.load(initial_state + o_S, mask=m_S, other=0.0)  # [BK, BV]
    for i_t in range(tl.cdiv(T, BT)):
        o_k, m_k = tile_at(i_b, i_t, i_h, 0, T, H, K, BT, BK)
        o_v, m_v = tile_at(i_b, i_t, i_hv, i_v, T, HV, V, BT, BV)
        o_b, m_b = tile_at(i_b, i_t, i_hv, 0, T, HV, 1, BT, 1)
        o_P, m_P = tile_at(i_b, i_t, i_hv, 0, T, HV, BT, BT, BT)
        b_k = tl.load(k + o_k, mask=m_k, other=0.0)  # [BT, BK]
        b_v = tl.load(v + o_v, mask=m_v, other=0.0)  # [BT, BV]
        b_P = tl.load(P + o_P, mask=m_P, other=0.0)  # [BT, BT]
        b_beta = tl.load(beta + o_b, mask=m_b, other=0.0)  # [BT, 1]
        b_new = new_values(b_k, b_v, b_beta, b_P, b_S)  # [BT, BV]
        if o is not None:
            b_q = tl.load(q + o_k, mask=m_k, other=0.0)  # [BT, BK]
            b_o = chunk_output(b_q, b_k, b_new, b_S, scale, PRECISION)
            tl.store(o + o_v, b_o, mask=m_v)
        b_kT = tl.trans(b_k)  # [BK, BT]
        b_S = tl.dot(b_kT, b_new, b_S, input_precision=PRECISION)
    tl.store(state + o_S, b_S, mask=m_S)


def pytorch(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    beta: Float[Tensor, "B T HV"],
    *,
    scale: float,
) -> Result:
    """Version 1: a loop over chunks, in fp32, with PyTorch's products.

    The only one that runs without Triton's interpreter on a CPU.
    """
    heads = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(heads, dim=2) for x in (q, k))
    S = v.new_zeros(*v.shape[::2], q.shape[3], v.shape[3]).float()
    outputs = []
    for t in range(0, q.shape[1], CHUNK):
        n = slice(t, t + CHUNK)
        Q, K, V = (x[:, n].transpose(1, 2).float() for x in (q, k, v))
        b = beta[:, n].mT[..., None]
        M = b * (K @ K.mT).tril(-1)
        new = torch.linalg.solve_triangular(
            M, b * (V - K @ S), upper=False, unitriangular=True
        )
        o = scale * (Q @ S + (Q @ K.mT).tril() @ new)
        outputs.append(o.transpose(1, 2).to(v.dtype))
        S = S + K.mT @ new
    return torch.cat(outputs, dim=1), S


def program(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    beta: Float[Tensor, "B T HV"],
    *,
    scale: float,
    by_blocks: bool = False,
) -> Result:
    """Version 2: one program per head does everything, row after row."""
    q, k, v, beta, o = checked(q, k, v, beta, scale)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    state = q.new_empty(B, HV, K, V, dtype=torch.float32)
    sizes = {"H": H, "HV": HV, "K": K, "V": V, "BT": CHUNK}
    sizes |= program_options(K, V, q.dtype)
    with torch.cuda.device_of(q):
        program_kernel[(B * HV,)](
            *(q, k, v, beta, o, state, scale, T), BLOCKS=by_blocks, **sizes
        )
    return o, state


def blocks(*tensors: Tensor, scale: float) -> Result:
    """Version 3: as ``program``, but the inverse by blocks."""
    return program(*tensors, scale=scale, by_blocks=True)


def ahead(*tensors: Tensor, scale: float, stages: int = 3) -> Result:
    """Version 4: all inverses in a launch before; tiles loaded ahead."""
    return scan(*tensors, scale=scale, strip=MAX_WIDTH, stages=stages)


def strips(*tensors: Tensor, scale: float, stages: int = 2) -> Result:
    """Version 5: two programs per head, each with half of the values."""
    return scan(*tensors, scale=scale, strip=MAX_WIDTH // 2, stages=stages)


def segments(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    beta: Float[Tensor, "B T HV"],
    *,
    scale: float,
    number: int | None = None,
) -> Result:
    """Version 6: as ``strips``, but ``number`` segments run side by side.

    Raises:
        ValueError: the tokens are not so many segments of whole chunks.
    """
    q, k, v, beta, o = checked(q, k, v, beta, scale)
    (B, T), (HV, V), K = q.shape[:2], v.shape[2:], q.shape[3]
    if number is None:
        number = number_of_segments(q, v)
    if number > 1 and T % (number * CHUNK):
        raise ValueError(
            f"number: got {number} segments of {T} tokens, need whole chunks "
            f"of {CHUNK} in each"
        )
    P = inverses(k, beta)
    parts = [
        x.view(B * number, T // number, *x.shape[2:])
        for x in (q, k, v, beta, P, o)
    ]
    options = scan_options(q.device, K, q.dtype, MAX_WIDTH // 2, 2)
    shape = (B, number, HV, K, V + K)
    entering = None
    if number > 1:
        # From zero to B, and from the identity, with no values, to Phi.
        maps = q.new_zeros(shape, dtype=torch.float32)
        maps[..., V:].diagonal(dim1=-2, dim2=-1).fill_(1.0)
        maps = maps.view(B * number, *shape[2:])
        launch([*parts[:5], None], maps, maps, scale, options)
        b, Phi = maps.view(shape).split([V, K], dim=-1)
        states = [torch.zeros_like(b[:, 0])]
        for i in range(number - 1):
            states.append(Phi[:, i] @ states[i] + b[:, i])
        entering = torch.stack(states, dim=1).flatten(0, 1)
    state = q.new_empty(B * number, HV, K, V, dtype=torch.float32)
    launch(parts, entering, state, scale, options)
    return o, state.view(B, number, HV, K, V)[:, -1].clone()


VERSIONS: dict[str, Callable[..., Result]] = {
    x.__name__: x for x in (pytorch, program, blocks, ahead, strips, segments)
}
"""The six versions by name, in the order of the chapter."""


def checked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, beta (in fp32), contiguous, and room for the outputs."""
    check_inputs(q, k, v, scale, None, CHUNK, beta)
    if q.dtype == torch.float32 and not INTERPRETED:
        raise TypeError(
            "q: got torch.float32, need torch.float16 or bfloat16, or Triton's"
            " interpreter"
        )
    if gpu_of(q.device).forbids_prefetch:
        raise ValueError(
            f"q: got device {q.device} of compute capability 10, for which "
            "these kernels are not, need another"
        )
    for name, x in (("k", k), ("v", v)):
        if x.shape[3] > MAX_WIDTH:
            raise ValueError(
                f"{name}: got a width of {x.shape[3]}, need {MAX_WIDTH} at "
                "most"
            )
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return q, k, v, beta.float().contiguous(), torch.empty_like(v)


def inverses(k: Tensor, beta: Tensor) -> Float[Tensor, "B T HV C"]:
    """P of every chunk: a row for each token, a column for each of its."""
    B, T, H, K = k.shape
    HV = beta.shape[2]
    P = k.new_empty(B, T, HV, CHUNK)
    BK = max(min_tile_columns(k.dtype), triton.next_power_of_2(K))
    grid = (B * HV * triton.cdiv(T, CHUNK),)
    with torch.cuda.device_of(k):
        inverse_kernel[grid](
            *(k, beta, P, T, H, HV, K, CHUNK, BK), num_warps=4, num_stages=1
        )
    return P


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float,
    strip: int,
    stages: int,
) -> Result:
    """All inverses, then a program per head and ``strip`` of its values."""
    q, k, v, beta, o = checked(q, k, v, beta, scale)
    K, (HV, V) = q.shape[3], v.shape[2:]
    state = q.new_empty(len(q), HV, K, V, dtype=torch.float32)
    P = inverses(k, beta)
    options = scan_options(q.device, K, q.dtype, strip, stages)
    launch((q, k, v, beta, P, o), None, state, scale, options)
    return o, state


def launch(
    tensors: Sequence[Any],
    initial_state: Tensor | None,
    state: Tensor,
    scale: float,
    options: dict[str, Any],
) -> None:
    """One program of ``scan_kernel`` for each strip of ``state``.

    ``tensors`` are q, k, v, beta, P and o, or None in the place of o.
    """
    q, k, v, beta, P, o = tensors
    B, T, H, K = k.shape
    (HV, V), W = v.shape[2:], state.shape[3]
    grid = (B * HV * triton.cdiv(W, options["BV"]),)
    with torch.cuda.device_of(q):
        scan_kernel[grid](
            *(q, k, v, beta, P, o, initial_state, state, scale, T),
            *(H, HV, K, V, W, CHUNK),
            **options,
        )


def program_options(K: int, V: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes and launch settings of versions 2 and 3."""
    BK, BV = (
        max(min_tile_columns(dtype), triton.next_power_of_2(x)) for x in (K, V)
    )
    return {"BK": BK, "BV": BV, "num_warps": 8, "num_stages": 1}


def scan_options(
    device: torch.device, K: int, dtype: torch.dtype, strip: int, stages: int
) -> dict[str, int]:
    """Tile sizes and launch settings of versions 4 to 6.

    Without room for it nothing is loaded ahead.
    """
    if not gpu_of(device).has_large_shared:
        stages = 1
    BK = max(min_tile_columns(dtype), triton.next_power_of_2(K))
    warps = 8 if strip > 64 else 4
    return {"BK": BK, "BV": strip, "num_warps": warps, "num_stages": stages}


def number_of_segments(q: Tensor, v: Tensor) -> int:
    """A power of two, with at most two programs per multiprocessor."""
    programs = v.shape[0] * v.shape[2] * triton.cdiv(v.shape[3], 64)
    most = 2 * gpu_of(q.device).multiprocessors // programs
    number = 1
    while 2 * number <= most and q.shape[1] % (2 * number * CHUNK) == 0:
        number *= 2
    return number
