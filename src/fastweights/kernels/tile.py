"""Device functions the kernels share: where a tile lies, what it answers."""

import torch
import triton
import triton.language as tl


@triton.jit
def tile_at(
    i_b,
    i_t,
    i_h,
    i_d,
    T,
    H: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Offsets and mask of tile (i_t, i_d) of x[i_b, :, i_h, :].

    x is a contiguous [B, T, H, D], the tile [BT, BD].
    """
    o_t = i_t * BT + tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    o_row = (i_b.to(tl.int64) * T + o_t) * H + i_h  # past 2^31 in training
    mask = (o_t < T)[:, None] & (o_d < D)[None, :]
    return o_row[:, None] * D + o_d[None, :], mask


@triton.jit
def state_at(
    i_s,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Offsets and mask of all keys of value tile i_v of state i_s."""
    return tile_at(i_s, 0, 0, i_v, K, 1, V, BK, BV)


@triton.jit
def chunk_output(b_q, b_k, b_v, b_S, scale, PRECISION: tl.constexpr):
    """scale (q S + tril(q k^T) v): from earlier chunks, and from this one.

    b_q, b_k [BT, BK]; b_v [BT, BV]; b_S [BK, BV], the state that enters.
    """
    o_c = tl.arange(0, b_q.shape[0])
    b_A = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BT, BT]
    b_A = tl.where(o_c[:, None] >= o_c[None, :], b_A, 0.0).to(b_v.dtype)
    b_S = b_S.to(b_q.dtype)
    b_o = tl.dot(b_q, b_S, input_precision=PRECISION)  # [BT, BV]
    b_o = tl.dot(b_A, b_v, b_o, input_precision=PRECISION)  # [BT, BV]
    return scale * b_o


INTERPRETED = not isinstance(tile_at, triton.JITFunction)


def tile_sizes(K: int, dtype: torch.dtype) -> dict[str, int]:
    """BK and BV for heads of K key channels.

    No row of a tile is shorter than 128 bytes, however few channels there
    are: then all tiles in shared memory are laid out alike. ptxas 12.8
    mistakes the address of a buffer that is read with two layouts.
    """
    BV = 32 if dtype == torch.float32 else 64
    return {"BK": max(BV, triton.next_power_of_2(K)), "BV": BV}
