"""How a chunk decays: in parts, in sums of gates, between two of its tokens.

:func:`is_weak` decides what a head or channel is: weak, so that two factors
per token say all of its decays, or strong.
"""

import triton
import triton.language as tl

from fastweights.kernels import tile


@triton.jit
def is_weak(b_total, x):
    """Whether a head or channel is seen from where half of it has decayed.

    That is, half of the 2^b_total that it decays by in a chunk. What has x's
    dtype is then multiplied by numbers from 2^-80 to 2^80, and keeps its bits
    if it is 2^-40 or more.
    """
    fp16: tl.constexpr = x.dtype.element_ty == tl.float16
    return b_total >= (-8.0 if fp16 else -160.0)


@triton.jit
def decay_in_parts(b_total, x):
    """Two factors a and b of the decay of a chunk, which is a b a.

    a from the entrance to the point from which the chunk is seen, and from
    there to the exit: half of the decay, and b = 1. What does not halve is
    seen from the entrance and the exit: a = 1, and b is all of it.
    """
    m_weak = is_weak(b_total, x)
    b_outer = tl.exp2(tl.where(m_weak, 0.5 * b_total, 0.0))
    return b_outer, tl.exp2(tl.where(m_weak, 0.0, b_total))


@triton.jit
def decay_matrix(G, i_ch, BT: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """e^{G_i - G_j} for j <= i, else 1, [BT, BT]; or that TRANSPOSED."""
    b_G = tl.load(tile.slot_row(G, i_ch, BT))  # [BT]
    b_high = b_G.to(tl.float32)
    b_low = (b_G - b_high).to(tl.float32)
    b_D = b_high[:, None] - b_high[None, :]
    b_D += b_low[:, None] - b_low[None, :]
    if TRANSPOSED:
        b_D = -b_D
    return tl.exp2(tl.minimum(b_D, 0.0))


@triton.constexpr_function
def num_levels(BT):
    """How often BT rows can be halved, log2 of it: see pairs_across."""
    return BT.bit_length() - 1


@triton.jit
def clamp_below(x, least):
    """x, or least where x is less. A NaN stays, to be seen in the results."""
    return tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def split_gates(b_g):
    """Log decays b_g as a sum of two fp16 tiles, in log2 units.

    22 bits, or 2^-25, and what is below the clamp decays to 0 in one step
    anyway.
    """
    b_g = clamp_below(b_g.to(tl.float32) * tile.LOG2_E, -30000.0)
    b_high = b_g.to(tl.float16)
    return b_high, (b_g - b_high.to(tl.float32)).to(tl.float16)


@triton.jit
def chunk_total(b_high, b_low, EXACT: tl.constexpr):
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
    b_G = tile.by_columns(tl.dot(b_sum, b_high), WIDE)  # [BT, BK]
    if EXACT:
        b_G = tile.by_columns(tl.dot(b_sum, b_low, b_G), WIDE)
    return b_G


@triton.jit
def summed_rows(m_sum, b_x, SPLIT: tl.constexpr, WIDE: tl.constexpr = False):
    """Row i adds up the rows j of b_x with m_sum[i, j]; fp32, [BT, BK].

    In tf32x3, or with SPLIT to 16 bits, as sums of two numbers in bf16,
    which has the range of fp32.
    """
    if not SPLIT:
        return tl.dot(m_sum.to(tl.float32), b_x, input_precision="tf32x3")
    b_sum, b_high = ones_where(m_sum, tl.bfloat16), b_x.to(tl.bfloat16)
    b_low = (b_x - b_high.to(tl.float32)).to(tl.bfloat16)
    b_y = tile.by_columns(tl.dot(b_sum, b_high), WIDE)
    return tl.dot(b_sum, b_low, b_y)


@triton.constexpr_function
def fold_of(dtype, far):
    """A level and a number of bits: of the blocks folded at their middles.

    They have 2^level rows, and a step in them decays by at most so many bits:
    half a block of those stays in the range of fp32. In half precision tiles
    with longer steps, far, have shorter blocks.
    """
    if dtype == tl.float32:
        return 2, 56.0
    return (3, 29.0) if far else (4, 14.0)


@triton.jit
def shuts(b_total):
    """Whether a channel has steps whose decay is 0, as of a gate of -inf.

    That is, 2^-8192 in a chunk. Its tile is folded nowhere.
    """
    return tl.min(b_total) < -8192.0


@triton.jit
def to_middle(b_high, b_low, level, EXACT, WIDE: tl.constexpr = False):
    """What decays between a row and the middle of its block of 2^level rows.

    Exponents [BT, BK], at most 0: of a row in the second half what the gates
    from the middle to it add up to, of one in the first those after it. And
    which rows are in the second half, [BT, 1].
    """
    o_c = tl.arange(0, b_high.shape[0])
    o_half = o_c >> (level - 1)
    m_second = (o_half % 2 == 1)[:, None]
    m_same = o_half[:, None] == o_half[None, :]
    m_sum = m_same & ((o_c[None, :] <= o_c[:, None]) == m_second)
    return summed_gates(m_sum, b_high, b_low, EXACT, WIDE), m_second


@triton.jit
def pairs_across(level, BT: tl.constexpr):
    """Pairs [BT, BT] of a row and a column whose border is such a middle."""
    o_half = tl.arange(0, BT) >> (level - 1)
    m_second = (o_half % 2 == 1)[:, None]
    return m_second & ((o_half[:, None] ^ 1) == o_half[None, :])


@triton.jit
def folded(b_high, b_low, shut, x, WIDE: tl.constexpr = False):
    """Factors of rows and columns, [BT, BK], and pairs [BT, BT] in one block.

    A block of fold_of(x's dtype) is seen from its middle: the decay of a pair
    is a product of two factors, of which one may be large. So a step there
    decays by no more than the bits of fold_of, and what decays further leaves
    2^-29 of itself, or 2^-56 in fp32. If the tile ``shut``, blocks are single
    rows. And the level of what is left.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    BT: tl.constexpr = b_high.shape[0]
    ROOM: tl.constexpr = num_levels(BT)
    NEAR: tl.constexpr = fold_of(dtype, False)
    FAR: tl.constexpr = fold_of(dtype, True)
    EXACT: tl.constexpr = dtype == tl.float32
    far = tl.min(b_high.to(tl.float32)) < -NEAR[1]
    fold = tl.where(far, min(FAR[0], ROOM), min(NEAR[0], ROOM))
    least = tl.where(far, -FAR[1], -NEAR[1])
    m_far = b_high < least
    b_high = tl.where(m_far, least.to(tl.float16), b_high)
    b_low = tl.where(m_far, tl.cast(0.0, tl.float16), b_low)
    b_D, m_second = to_middle(b_high, b_low, fold, EXACT, WIDE)
    b_D = tl.where(m_second, b_D, -b_D)
    level = tl.where(shut, 0, fold)
    o_b = tl.arange(0, BT) >> level
    m_A = o_b[:, None] == o_b[None, :]
    return tl.exp2(b_D), tl.exp2(-b_D), m_A, level + 1
