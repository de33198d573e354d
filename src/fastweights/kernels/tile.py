"""Device functions the kernels share.

Where a tile lies and what it answers; chunks of packed sequences; gates;
scores that decay; the inverse of the delta rule.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


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
def sequence_at(i_n, cu_seqlens, T):
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
    start = sequence_at(i_n, cu_seqlens, T)
    end = sequence_at(i_n + 1, cu_seqlens, T)
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
        return sequence_at(i_n, cu_seqlens, T) // BT + i_n


@triton.jit
def sequence_of(i_c, cu_seqlens, N, T, BT, BORDER: tl.constexpr = False):
    """The sequence whose chunk slot i_c holds; or border i_c, of segments.

    Among packed sequences a program finds its own by bisection. Sequence n
    is only found from slot n onwards, whatever is in cu_seqlens.
    """
    if cu_seqlens is None:
        i_n = i_c // tl.cdiv(T, BT)
    else:
        i_last = tl.minimum(i_c, N - 1)
        i_n = tl.maximum(i_c - T // BT, 0)  # first_slot(i_n) is not past i_c
        i_n = tl.minimum(i_n, i_last)
        if BORDER:
            i_n, i_last = 0 * N, N - 1
        while i_n < i_last:
            i_mid = (i_n + i_last + 1) // 2
            i_first = first_slot(i_mid, cu_seqlens, T, BT)
            if BORDER:  # not later than the one with the last of its tokens
                i_first -= i_mid
            if i_first <= i_c:
                i_n = i_mid
            else:
                i_last = i_mid - 1
    return i_n


@triton.jit
def chunk_span(i_c, cu_seqlens, N, T, BT: tl.constexpr):
    """What chunk slot i_c holds: its first token, and its sequence's end.

    An empty slot's first token is past the end. No first token is negative,
    by what :func:`sequence_of` says.
    """
    i_n = sequence_of(i_c, cu_seqlens, N, T, BT)
    t, end = sequence_span(i_n, cu_seqlens, T)
    return t + (i_c - first_slot(i_n, cu_seqlens, T, BT)) * BT, end


@dataclass(frozen=True)
class Tiles:
    """How a tensor [tokens, H, D] is cut into tiles [BT, BD].

    With TMA, Hopper's tensor memory accelerator loads them.
    """

    H: int
    D: int
    BT: int
    BD: int
    TMA: bool = False


@triton.constexpr_function
def tiles(H, D, BT, BD):
    """:class:`Tiles`, from inside a kernel."""
    return Tiles(H, D, BT, BD)


@triton.jit
def rows_at(x, rows, i_d, TILES: tl.constexpr):
    """Pointers and mask of one tile of x, whose columns are those of i_d.

    ``rows`` is (t, end, i_h): its rows are the tokens of head i_h from t on,
    which is 64 bits wide, and those from end on are masked. What differs
    between programs is one number, the rest constants to each thread, and
    rows are compared in 32 bits: fewer registers in every kernel.
    """
    t, end, i_h = rows
    o_t, o_d = tl.arange(0, TILES.BT), tl.arange(0, TILES.BD)
    left = tl.minimum(tl.maximum(end - t, 0), TILES.BT).to(tl.int32)
    mask = (o_t < left)[:, None]
    if TILES.D % TILES.BD != 0:  # else no tile has columns past the last
        mask &= (i_d * TILES.BD + o_d < TILES.D)[None, :]
    p_x = x + ((t * TILES.H + i_h) * TILES.D + i_d * TILES.BD)
    o_x = o_t.to(tl.int64)[:, None] * (TILES.H * TILES.D) + o_d[None, :]
    return p_x + o_x, mask


@triton.jit
def load_rows(x, rows, i_d, TILES: tl.constexpr):
    """The tile that :func:`rows_at` points to, and 0 where it is masked."""
    p_x, m_x = rows_at(x, rows, i_d, TILES)
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def store_rows(x, b_x, rows, i_d, TILES: tl.constexpr):
    """The tile back to where :func:`load_rows` would load it from."""
    p_x, m_x = rows_at(x, rows, i_d, TILES)
    tl.store(p_x, b_x, mask=m_x)


@triton.jit
def row_at(x, rows, H: tl.constexpr, BT: tl.constexpr):
    """The same of x [tokens, H], one number per token: pointers, mask [BT]."""
    t, end, i_h = rows
    o_t = tl.arange(0, BT)
    return x + (t * H + i_h) + o_t * H, t + o_t < end


@triton.jit
def load_row(x, rows, H: tl.constexpr, BT: tl.constexpr):
    """What :func:`row_at` points to, and 0 where it is masked."""
    p_x, m_x = row_at(x, rows, H, BT)
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def sequence_tiles(x, span, TILES: tl.constexpr):
    """x, for :func:`load_chunk`, of the tokens start to end = ``span``.

    For the tensor memory accelerator a descriptor: one thread asks for a
    tile, and rows past the end are 0. Columns past D would be the next
    head's, so BD divides D.
    """
    start, end = span
    if TILES.TMA:
        p_x = x + start.to(tl.int64) * (TILES.H * TILES.D)
        rows = (end - start).to(tl.int32)
        WIDTH: tl.constexpr = TILES.H * TILES.D
        return tl.make_tensor_descriptor(
            p_x, [rows, WIDTH], [WIDTH, 1], [TILES.BT, TILES.BD]
        )
    else:
        return x


@triton.jit
def load_chunk(x, span, c, i_h, i_d, TILES: tl.constexpr):
    """From token start + c of ``span``; x is from :func:`sequence_tiles`."""
    if TILES.TMA:
        return x.load([c, i_h * TILES.D + i_d * TILES.BD])
    else:
        start, end = span
        return load_rows(x, (start + c, end, i_h), i_d, TILES)


@triton.jit
def slot_row(x, i_ch, BT: tl.constexpr):
    """Pointers [BT] to the row of chunk and head i_ch of x [slots, H, BT]."""
    return x + i_ch * BT + tl.arange(0, BT)


@triton.jit
def load_state(states, i_s, i_v, condition, META: tl.constexpr):
    """Value tile i_v of state i_s, [BK, BV], if ``condition``; else 0."""
    o_S, m_S = state_at(i_s, i_v, META.K, META.V, META.BK, META.BV)
    return tl.load(states + o_S, mask=mask_if(condition, m_S), other=0.0)


@triton.jit
def store_state(states, b_S, i_s, i_v, condition, META: tl.constexpr):
    """The tile back to where it was loaded from, if ``condition``."""
    o_S, m_S = state_at(i_s, i_v, META.K, META.V, META.BK, META.BV)
    tl.store(states + o_S, b_S, mask=mask_if(condition, m_S))


@triton.jit
def time_order(BT: tl.constexpr):
    """[BT, BT]: by how many tokens the row's is later than the column's."""
    o_c = tl.arange(0, BT)
    return o_c[:, None] - o_c[None, :]


@triton.jit
def by_columns(x, WIDE: tl.constexpr):
    """x, the result of a product, so that 8 warps share its columns.

    If a product of 64 rows leads to another one, Triton has both groups of
    four warps compute all of it. It does not look for the other product past
    the end of a branch, so here is one, which is always taken. Times 1 less 0
    gives the branch something to do. The machine code has neither.
    """
    if WIDE:  # noqa: SIM102  (the kernel has it or has not)
        if tl.num_programs(0) > 0:
            x = tl.fma(x, 1.0, -0.0)
    return x


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
    b_r = tl.rsqrt(1.0 + tl.exp2(b_z * -1.4426950408889634))
    return b_r * b_r


@triton.jit
def nonzero(b_beta):
    """beta, or 1e-20 where |beta| is less: a factor that can be a divisor."""
    return tl.where(tl.abs(b_beta) < 1e-20, 1e-20, b_beta)


@triton.jit
def halves(b_bits, x):
    """Whether a head or channel is seen from where half of it has decayed.

    That is, half of the 2^b_bits that it decays by in a chunk. What has x's
    dtype is then multiplied by numbers from 2^-80 to 2^80, and keeps its bits
    if it is 2^-40 or more.
    """
    fp16: tl.constexpr = x.dtype.element_ty == tl.float16
    return b_bits >= (-8.0 if fp16 else -160.0)


@triton.jit
def decay_in_parts(b_bits, x):
    """Two factors a and b of the decay of a chunk, which is a b a.

    a from the entrance to the point from which the chunk is seen, and from
    there to the exit: half of the decay, and b = 1. What does not halve is
    seen from the entrance and the exit: a = 1, and b is all of it.
    """
    m_halves = halves(b_bits, x)
    b_half = tl.exp2(tl.where(m_halves, 0.5 * b_bits, 0.0))
    return b_half, tl.exp2(tl.where(m_halves, 0.0, b_bits))


@triton.jit
def decay_matrix(G, i_ch, BT: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """e^{G_i - G_j} for j <= i, else 1, [BT, BT]; or that TRANSPOSED."""
    b_G = tl.load(slot_row(G, i_ch, BT))  # [BT]
    b_high = b_G.to(tl.float32)
    b_low = (b_G - b_high).to(tl.float32)
    b_D = b_high[:, None] - b_high[None, :]
    b_D += b_low[:, None] - b_low[None, :]
    if TRANSPOSED:
        b_D = -b_D
    return tl.exp2(tl.minimum(b_D, 0.0))


@triton.jit
def joins(level, BT: tl.constexpr):
    """Mask [BT, BT] of the blocks that join two neighbours of 2^level rows."""
    o_c = tl.arange(0, BT) >> level
    return (o_c[:, None] ^ 1) == o_c[None, :]


@triton.constexpr_function
def num_levels(BT):
    """How often BT rows can be halved, log2 of it: see decays_of_pairs."""
    return BT.bit_length() - 1


@triton.jit
def clamped(x, least):
    """x, or least where x is less. A NaN stays, to be seen in the results."""
    return tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def split_gates(b_g):
    """Log decays b_g as a sum of two fp16 tiles, in log2 units.

    22 bits, or 2^-25, and what is below the clamp decays to 0 in one step
    anyway.
    """
    b_g = clamped(b_g.to(tl.float32) * LOG2_E, -30000.0)
    b_high = b_g.to(tl.float16)
    return b_high, (b_g - b_high.to(tl.float32)).to(tl.float16)


@triton.jit
def chunk_bits(b_high, b_low, EXACT: tl.constexpr):
    """What the gates of a chunk add up to, [BK], rounded as summed_gates."""
    b_g = b_high.to(tl.float32)
    if EXACT:
        b_g += b_low.to(tl.float32)
    return tl.sum(b_g, axis=0)


@triton.jit
def ones_where(mask, dtype: tl.constexpr):
    """1 where mask, else 0: selected, since a conversion is slow."""
    return tl.where(mask, tl.cast(1.0, dtype), tl.cast(0.0, dtype))


@triton.jit
def summed_gates(
    m_sum, b_high, b_low, EXACT: tl.constexpr, WIDE: tl.constexpr = False
):
    """Row i adds up the gates of the rows j with m_sum[i, j].

    m_sum [BT, BT], gates [BT, BK]. Sums, never differences of sums: a weak
    gate after strong ones does not drown. Unless EXACT without b_low, which
    misses a decay e^G by a factor 2^(+-2^-11 |G|), so by 2^-12 at most:
    enough for half precision. WIDE, with 8 warps: see by_columns.
    """
    b_sum = ones_where(m_sum, tl.float16)
    b_G = by_columns(tl.dot(b_sum, b_high), WIDE)  # [BT, BK]
    if EXACT:
        b_G = by_columns(tl.dot(b_sum, b_low, b_G), WIDE)
    return b_G


@triton.jit
def summed_rows(m_sum, b_x, HALVES: tl.constexpr, WIDE: tl.constexpr = False):
    """Row i adds up the rows j of b_x with m_sum[i, j]; fp32, [BT, BK].

    In tf32x3, or with HALVES to 16 bits, as sums of two numbers in bf16,
    which has the range of fp32.
    """
    if not HALVES:
        return tl.dot(m_sum.to(tl.float32), b_x, input_precision="tf32x3")
    b_sum, b_high = ones_where(m_sum, tl.bfloat16), b_x.to(tl.bfloat16)
    b_low = (b_x - b_high.to(tl.float32)).to(tl.bfloat16)
    b_x = by_columns(tl.dot(b_sum, b_high), WIDE)
    return tl.dot(b_sum, b_low, b_x)


@triton.jit
def first_level(b_high, x, WIDE: tl.constexpr = False):
    """The level of the largest blocks that may be folded at their middles.

    Of 2^level rows, where no half of a block decays by more than 2^-80
    (halves) in any channel. The log decays b_high [BT, BK] are added up over
    the nodes of a tree, one per row of a product: node 1 is the whole chunk,
    2 and 3 are its halves, 4 to 7 its quarters. The last nodes have two rows
    each. Where one of these decays too far, the level is 0, that of single
    rows.
    """
    BT: tl.constexpr = b_high.shape[0]
    LEVELS: tl.constexpr = num_levels(BT)
    o_c = tl.arange(0, BT)
    o_depth = tl.zeros([BT], dtype=tl.int32)
    for depth in tl.static_range(1, LEVELS):
        o_depth += tl.where(o_c >= 2**depth, 1, 0)
    o_shift = LEVELS - o_depth
    o_node = (o_c + BT)[None, :] >> o_shift[:, None]
    m_sum = o_node == o_c[:, None]
    b_sum = summed_gates(m_sum, b_high, b_high, False, WIDE)  # [BT, BK]
    b_least = 2.0 * tl.min(b_sum, axis=1)  # [BT]
    deepest = tl.max(tl.where(halves(b_least, x), 0, o_depth))
    return tl.where(deepest == LEVELS - 1, 0, LEVELS - deepest)


@triton.jit
def decays_of_pairs(
    b_high,
    b_low,
    level,
    first,
    EXACT: tl.constexpr,
    WIDE: tl.constexpr = False,
):
    """Factors of the rows i and of the columns j of scores, and a mask.

    [BT, BK] each, and [BT, BT]. From j to i decays what the gates of j + 1 to
    i add up to. A block of 2^level rows is folded at its middle, the border
    of its two halves: one factor is the decay between a row and the border,
    the other, on the far side of it, its inverse. At the first level all
    pairs of a block are taken, and its halves' decays must have a bound
    (first_level). At those after it, pairs with one token in each half: they
    need no inverse, and both factors are that decay. Level 0 has no border.
    """
    o_c = tl.arange(0, b_high.shape[0])
    half = tl.maximum(level - 1, 0)
    o_half = o_c >> half
    m_second = (o_half % 2 == 1)[:, None]
    m_own = o_half[:, None] == o_half[None, :]
    m_sum = m_own & ((o_c[None, :] <= o_c[:, None]) == m_second)
    b_D = summed_gates(m_sum & (level > 0), b_high, b_low, EXACT, WIDE)
    b_far = tl.where(level == first, -b_D, b_D)
    b_r = tl.exp2(tl.where(m_second, b_D, b_far))
    b_c = tl.exp2(tl.where(m_second, b_far, b_D))
    m_block = (o_c >> level)[:, None] == (o_c >> level)[None, :]
    return b_r, b_c, m_block & ((level == first) | (m_own == 0))


@triton.jit
def add_pairs(a, b, c, d):
    """For tl.reduce: two sums in one exchange between the warps."""
    return a + c, b + d


@triton.jit
def add_product(b_x, b_y, b_z, PRECISION: tl.constexpr):
    """b_x b_y + b_z in fp32; the factors as fp16, or as PRECISION says.

    In one tf32 product they are the nearest tf32 numbers: the tensor cores
    take the ten leading bits as they are, which is one way off, and the
    inverse amplifies that.
    """
    if PRECISION == "fp16":
        b_z = tl.dot(b_x.to(tl.float16), b_y.to(tl.float16), b_z)
    else:
        if PRECISION == "tf32":
            b_x = (b_x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
            b_y = (b_y.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
            b_x = b_x.to(tl.float32, bitcast=True)
            b_y = b_y.to(tl.float32, bitcast=True)
        b_z = tl.dot(b_x, b_y, b_z, input_precision=PRECISION)
    return b_z


@triton.jit
def joined(b_R, b_A, b_beta, m_off, PRECISION: tl.constexpr):
    """Of the R of two neighbours that of both; they meet in m_off of b_A.

    R_21 = -(I + R_22 Diag(beta_2)) A_21 (I + Diag(beta_1) R_11).
    """
    b_off = tl.where(m_off, b_A, 0.0)
    b_x = add_product(b_R, b_beta * b_off, b_off, PRECISION)
    return b_R - add_product(b_x, b_beta * b_R, b_x, PRECISION)


@triton.jit
def rest_of_inverse(b_A, b_beta, PRECISION: tl.constexpr):
    """R for A, what is below the diagonal of the lower triangular b_A.

    [BT, BT]; b_beta [BT]; fp32. (I + Diag(beta) A)^{-1} = I + Diag(beta) R
    and (I + A Diag(beta))^{-1} = I + R Diag(beta), also where beta is 0.
    Blocks of 2^level rows have theirs already, and neighbours join. Up to 16
    rows that is done in the blocks of the diagonal only, all of them at once.
    """
    BT: tl.constexpr = b_A.shape[0]
    NB: tl.constexpr = BT // 16
    o_b = tl.arange(0, NB)
    m_own = o_b[:, None, None, None] == o_b[None, None, :, None]
    b_D = tl.where(m_own, tl.reshape(b_A, [NB, 16, NB, 16]), 0.0)
    b_D = tl.sum(b_D, axis=2)  # [NB, 16, 16]
    b_b = tl.reshape(b_beta, [NB, 16])[:, :, None]
    b_R = -tl.where(joins(0, 16)[None], b_D, 0.0)
    for level in tl.static_range(1, 4):
        b_R = joined(b_R, b_D, b_b, joins(level, 16)[None], PRECISION)
    b_R = tl.where(m_own, b_R[:, :, None, :], 0.0)
    b_R = tl.reshape(b_R, [BT, BT])
    for level in tl.static_range(4, 6):
        if 2**level < BT:
            m_off = joins(level, BT)
            b_R = joined(b_R, b_A, b_beta[:, None], m_off, PRECISION)
    return b_R


INTERPRETED = not isinstance(tile_at, triton.JITFunction)


def narrowest(dtype: torch.dtype) -> int:
    """Columns of the narrowest tile: 128 bytes per row.

    Then all tiles in shared memory are laid out alike. For Hopper ptxas
    12.8.93 and 13.0.88 mistake the address of a buffer that is read with two
    layouts: wrong numbers, or a fault; 13.1.80 is right
    (flash-linear-attention PR 1262). Triton 3.6 and 3.7 ship 12.8, 3.9 ships
    12.9, of which neither is known.
    """
    return 32 if dtype == torch.float32 else 64


def tile_sizes(K: int, dtype: torch.dtype) -> dict[str, int]:
    """BK and BV for heads of K key channels.

    No row is shorter than :func:`narrowest`, however few channels there are.
    """
    BV = narrowest(dtype)
    return {"BK": max(BV, triton.next_power_of_2(K)), "BV": BV}
