"""Device functions that all kernels share.

Where a tile lies and what it answers; chunks of packed sequences.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_at(
    i_n,
    i_t,
    i_h,
    i_d,
    T,
    H: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Offsets and mask of tile (i_t, i_d) of x[i_n, :, i_h, :].

    x is a contiguous [B, T, H, D], the tile [BT, BD].
    """
    o_t = i_t * BT + tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    o_row = (i_n.to(tl.int64) * T + o_t) * H + i_h  # may exceed 2^31
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
    """Offsets and mask of value tile i_v of state i_s, for all its rows."""
    return tile_at(i_s, 0, 0, i_v, K, 1, V, BK, BV)


@triton.jit
def sequence_offset(i_n, cu_seqlens, T):
    """The first token of sequence i_n when all lie end to end.

    Nobody has checked cu_seqlens: what is no token is the nearest that is,
    or T, so that numbers may be wrong, but no address.
    """
    if cu_seqlens is None:
        return tl.cast(i_n, tl.int64) * T
    else:
        t = tl.load(cu_seqlens + i_n).to(tl.int64)
        return tl.minimum(tl.maximum(t, 0), T)


@triton.jit
def sequence_span(i_n, cu_seqlens, T):
    """The first token of sequence i_n, and its end, which is not before it."""
    start = sequence_offset(i_n, cu_seqlens, T)
    end = sequence_offset(i_n + 1, cu_seqlens, T)
    if cu_seqlens is not None:
        end = tl.maximum(start, end)
    return start, end


@triton.jit
def first_slot(i_n, cu_seqlens, T, BT):
    """The slot of the first chunk of sequence i_n; the others follow.

    A segment is a chunk of more tokens, and all of this holds for it too.

    Sequences of one length have no slot between them. Of packed ones,
    sequence n, which starts at token t, has the slots t // BT + n onwards:
    no two share one, and at most one slot per sequence stays empty, so that
    cdiv(T, BT) + N slots do for any packing. They do for any cu_seqlens: the
    chunks from t to T are cdiv(T, BT) - t // BT at most.
    """
    if cu_seqlens is None:
        return tl.cast(i_n, tl.int64) * tl.cdiv(T, BT)
    else:
        return sequence_offset(i_n, cu_seqlens, T) // BT + i_n


@triton.jit
def sequence_of(i_slot, cu_seqlens, N, T, BT, BORDER: tl.constexpr = False):
    """The sequence whose chunk slot i_slot holds; or a BORDER, of segments.

    Among packed sequences a program finds its own by bisection. Sequence n
    is only found from slot n onwards, whatever is in cu_seqlens.
    """
    if cu_seqlens is None:
        i_n = i_slot // tl.cdiv(T, BT)
    else:
        last = tl.minimum(i_slot, N - 1)
        i_n = tl.maximum(i_slot - T // BT, 0)  # its first_slot is not past it
        i_n = tl.minimum(i_n, last)
        if BORDER:
            i_n, last = 0 * N, N - 1
        while i_n < last:
            middle = (i_n + last + 1) // 2
            first = first_slot(middle, cu_seqlens, T, BT)
            if BORDER:  # not later than the one with the last of its tokens
                first -= middle
            if first <= i_slot:
                i_n = middle
            else:
                last = middle - 1
    return i_n


@triton.jit
def chunk_span(i_slot, cu_seqlens, N, T, BT: tl.constexpr):
    """The first token of the chunk in slot i_slot, and its sequence's end.

    An empty slot's first token is past the end. No first token is negative,
    by what :func:`sequence_of` says.
    """
    i_n = sequence_of(i_slot, cu_seqlens, N, T, BT)
    t, end = sequence_span(i_n, cu_seqlens, T)
    return t + (i_slot - first_slot(i_n, cu_seqlens, T, BT)) * BT, end


@dataclass(frozen=True)
class Tiles:
    """The tiles [BT, BD] into which a tensor [tokens, H, D] is cut.

    With TMA, Hopper's tensor memory accelerator loads them.
    """

    H: int
    D: int
    BT: int
    BD: int
    TMA: bool = False


@triton.jit
def rows_at(x, place, i_d, TILES: tl.constexpr):
    """Pointers and mask of one tile of x, whose columns are those of i_d.

    ``place`` is (t, end, i_h): its rows are the tokens of head i_h from t on,
    which is 64 bits wide, and those from end on are masked. What differs
    between programs is one number, the rest constants to each thread, and
    rows are compared in 32 bits: fewer registers in every kernel.
    """
    t, end, i_h = place
    o_t, o_d = tl.arange(0, TILES.BT), tl.arange(0, TILES.BD)
    left = tl.minimum(tl.maximum(end - t, 0), TILES.BT).to(tl.int32)
    mask = (o_t < left)[:, None]
    if TILES.D % TILES.BD != 0:  # else no tile has columns past the last
        mask &= (i_d * TILES.BD + o_d < TILES.D)[None, :]
    p_x = x + ((t * TILES.H + i_h) * TILES.D + i_d * TILES.BD)
    o_x = o_t.to(tl.int64)[:, None] * (TILES.H * TILES.D) + o_d[None, :]
    return p_x + o_x, mask


@triton.jit
def load_rows(x, place, i_d, TILES: tl.constexpr):
    """Load the tile that :func:`rows_at` points to, 0 where masked."""
    p_x, m_x = rows_at(x, place, i_d, TILES)
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def store_rows(x, b_x, place, i_d, TILES: tl.constexpr):
    """Store the tile where :func:`load_rows` would load it from."""
    p_x, m_x = rows_at(x, place, i_d, TILES)
    tl.store(p_x, b_x, mask=m_x)


@triton.jit
def numbers_at(x, place, H: tl.constexpr, BT: tl.constexpr):
    """Pointers to x [tokens, H], one number per token, and mask, [BT]."""
    t, end, i_h = place
    o_t = tl.arange(0, BT)
    return x + (t * H + i_h) + o_t * H, t + o_t < end


@triton.jit
def load_numbers(x, place, H: tl.constexpr, BT: tl.constexpr):
    """Load the numbers that :func:`numbers_at` points to, 0 where masked."""
    p_x, m_x = numbers_at(x, place, H, BT)
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def sequence_tiles(x, span, TILES: tl.constexpr):
    """x, for :func:`load_chunk`, of the tokens start to end = ``span``.

    The tensor memory accelerator gets a descriptor: one thread asks for a
    tile, and rows past the end are 0. Columns past D would be the next
    head's, so BD divides D.
    """
    start, end = span
    if TILES.TMA:
        p_x = x + start.to(tl.int64) * (TILES.H * TILES.D)
        length = (end - start).to(tl.int32)
        WIDTH: tl.constexpr = TILES.H * TILES.D
        return tl.make_tensor_descriptor(
            p_x, [length, WIDTH], [WIDTH, 1], [TILES.BT, TILES.BD]
        )
    else:
        return x


@triton.jit
def load_chunk(x, span, c, i_h, i_d, TILES: tl.constexpr):
    """The tile from token start + c of ``span``; x is of sequence_tiles()."""
    if TILES.TMA:
        return x.load([c, i_h * TILES.D + i_d * TILES.BD])
    else:
        start, end = span
        return load_rows(x, (start + c, end, i_h), i_d, TILES)


@triton.jit
def slot_row(x, i_sh, BT: tl.constexpr):
    """Pointers [BT] to the row of slot and head i_sh of x [slots, H, BT]."""
    return x + i_sh * BT + tl.arange(0, BT)


@triton.jit
def load_state(states, i_s, i_v, condition, META: tl.constexpr):
    """Value tile i_v of state i_s, [BK, BV], if ``condition``; else 0."""
    o_S, m_S = state_at(i_s, i_v, META.K, META.V, META.BK, META.BV)
    return tl.load(states + o_S, mask=mask_if(condition, m_S), other=0.0)


@triton.jit
def store_state(states, b_S, i_s, i_v, condition, META: tl.constexpr):
    """Store the tile where :func:`load_state` loads it, if ``condition``."""
    o_S, m_S = state_at(i_s, i_v, META.K, META.V, META.BK, META.BV)
    tl.store(states + o_S, b_S, mask=mask_if(condition, m_S))


@triton.jit
def token_lag(BT: tl.constexpr):
    """[BT, BT]: by how many tokens the row's is later than the column's."""
    o_c = tl.arange(0, BT)
    return o_c[:, None] - o_c[None, :]


@triton.jit
def by_columns(x, BY_COLUMNS: tl.constexpr):
    """x, the result of a product, so that 8 warps share its columns.

    If a product of 64 rows leads to another one, Triton has both groups of
    four warps compute all of it. It does not look for the other product past
    the end of a branch, so here is one, which is always taken. What it does to
    the bits only LLVM sees to be nothing, so the machine code has neither.
    """
    if BY_COLUMNS:
        if tl.num_programs(0) > 0:
            bits = x.to(tl.int32, bitcast=True)
            x = ((bits | 1) & (bits | -2)).to(tl.float32, bitcast=True)
    return x


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, BY_COLUMNS: tl.constexpr):
    """a b + acc, or a b if acc is None, in fp32, and by_columns or not."""
    return by_columns(tl.dot(a, b, acc, input_precision=PRECISION), BY_COLUMNS)


@triton.jit
def mask_if(condition, mask):
    """The mask of a tile if ``condition``, a number, holds; else all False.

    Selected, not ``mask & condition``: of that Triton 3.9's interpreter makes
    integers, which it then refuses as a mask.
    """
    return tl.where(condition, mask, False)


@triton.jit
def sigmoid(b_z):
    """1 / (1 + e^{-z}), to 2^-21: the square of a root is the fastest."""
    b_r = tl.rsqrt(1.0 + tl.exp2(b_z * -LOG2_E))
    return b_r * b_r


@triton.jit
def away_from_zero(b_beta):
    """beta, or 1e-20 where |beta| is less: a factor that can be a divisor."""
    return tl.where(tl.abs(b_beta) < 1e-20, 1e-20, b_beta)


@triton.jit
def add_pairs(a, b, c, d):
    """Two sums for tl.reduce, in one exchange between the warps."""
    return a + c, b + d


@triton.jit
def add_triples(a, b, c, d, e, f):
    """Three sums for tl.reduce, in one exchange between the warps."""
    return a + d, b + e, c + f


INTERPRETED = not isinstance(tile_at, triton.JITFunction)


def min_tile_columns(dtype: torch.dtype) -> int:
    """The least number of columns of a tile: 128 bytes per row.

    Then all tiles in shared memory are laid out alike. For Hopper ptxas
    12.8.93 and 13.0.88 mistake the address of a buffer that is read with two
    layouts: wrong numbers, or a fault; 13.1.80 is right
    (flash-linear-attention PR 1262). Triton 3.6 and 3.7 ship 12.8, 3.9 ships
    12.9, of which neither is known.
    """
    return 32 if dtype == torch.float32 else 64
