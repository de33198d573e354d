"""How a chunk decays: in parts, in sums of gates, between two of its tokens.

:func:`is_factorable` decides whether two factors per token say all decays of a
head or channel.
"""

import triton
import triton.language as tl

from fastweights.kernels import tile


@triton.jit
def is_factorable(b_total, dtype: tl.constexpr):
    """Whether the decay between any two tokens is a product of two factors.

    One factor is of the row, one of the column, both as seen from where half
    of the chunk's decay, 2^b_total, is done. Numbers of this dtype are then
    multiplied by 2^-80 to 2^80, and keep their bits if they are 2^-40 or more.
    """
    return b_total >= (-8.0 if dtype == tl.float16 else -160.0)


@triton.jit
def split_decay(b_total, dtype: tl.constexpr):
    """The outer and inner parts, a and b, of a chunk's decay a b a.

    A factorable decay is seen from where half of it is done: a leads there
    from the entrance, a leads from there to the exit, and b is 1. Any other is
    seen from the entrance and from the exit: a is 1, and b all of the decay.
    """
    m_factorable = is_factorable(b_total, dtype)
    b_outer = tl.exp2(tl.where(m_factorable, 0.5 * b_total, 0.0))
    return b_outer, tl.exp2(tl.where(m_factorable, 0.0, b_total))


@triton.jit
def decay_matrix(b_G, TRANSPOSED: tl.constexpr = False):
    """2^{G_i - G_j} for j <= i, else 1, [BT, BT]; or that TRANSPOSED.

    b_G [BT] is fp64 and has been loaded, not computed: Triton gives it the
    layouts of rows and of columns.
    """
    b_high = b_G.to(tl.float32)
    b_low = (b_G - b_high).to(tl.float32)
    b_D = b_high[:, None] - b_high[None, :]
    b_D += b_low[:, None] - b_low[None, :]
    if TRANSPOSED:
        b_D = -b_D
    return tl.exp2(tl.minimum(b_D, 0.0))


@triton.constexpr_function
def num_levels(BT):
    """log2 of BT: how often its rows can be halved, see pairs_across."""
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
def chunk_total(b_high, b_low, IS_FP32: tl.constexpr):
    """Add up the gates of a chunk, [BK], rounded as sum_gates."""
    b_g = b_high.to(tl.float32)
    if IS_FP32:
        b_g += b_low.to(tl.float32)
    return tl.sum(b_g, axis=0)


@triton.jit
def ones_where(mask, dtype: tl.constexpr):
    """1 where mask, else 0: selected, since a conversion is slow."""
    return tl.where(mask, tl.cast(1.0, dtype), tl.cast(0.0, dtype))


@triton.jit
def sum_gates(
    m_sum,
    b_high,
    b_low,
    IS_FP32: tl.constexpr,
    BY_COLUMNS: tl.constexpr = False,
):
    """Add up for row i the gates of the rows j with m_sum[i, j].

    m_sum is [BT, BT], gates and sums are [BT, BK]. No difference of two sums
    is taken: a weak gate after strong ones does not drown. Unless IS_FP32,
    b_low is left out, and a decay 2^G is off by a factor of 2^(+-2^-11 |G|),
    by 2^-12 at most: enough for half precision. BY_COLUMNS is for 8 warps.
    """
    b_sum = ones_where(m_sum, tl.float16)
    b_G = tile.by_columns(tl.dot(b_sum, b_high), BY_COLUMNS)  # [BT, BK]
    if IS_FP32:
        b_G = tile.by_columns(tl.dot(b_sum, b_low, b_G), BY_COLUMNS)
    return b_G


@triton.jit
def sum_rows(
    m_sum, b_x, IS_BF16: tl.constexpr, BY_COLUMNS: tl.constexpr = False
):
    """Add up for row i the rows j of b_x with m_sum[i, j]; fp32, [BT, BK].

    The product is in tf32x3; if IS_BF16 it has 16 bits, from sums of two bf16
    numbers, which have the range of fp32.
    """
    if not IS_BF16:
        return tl.dot(m_sum.to(tl.float32), b_x, input_precision="tf32x3")
    b_sum, b_high = ones_where(m_sum, tl.bfloat16), b_x.to(tl.bfloat16)
    b_low = (b_x - b_high.to(tl.float32)).to(tl.bfloat16)
    b_y = tile.by_columns(tl.dot(b_sum, b_high), BY_COLUMNS)
    return tl.dot(b_sum, b_low, b_y)


@triton.constexpr_function
def fold_limits(dtype):
    """Limits of folded blocks: the most bits of one step, the least level.

    A step that decays more counts as those, so 2^-29 of what it clears, or
    2^-56 in fp32, is left for the rest of its block. A block has 2^level rows:
    of the least level no half decays by more than 2^-116; the greatest is 5.
    """
    return (56.0, 2) if dtype == tl.float32 else (29.0, 3)


@triton.constexpr_function
def half_blocks(rows, BT, BK, level):
    """The shape in which some rows are halves of blocks of 2^level of BT."""
    return BT >> (level - 1), (rows << (level - 1)) // BT, BK


@triton.jit
def fold_level_of(b_high, b_least, dtype: tl.constexpr):
    """1 + the level of a tile's blocks: from there on pairs are of two blocks.

    They are the longest whose halves decay by 2^-116 at most (fold_limits), so
    that factors stay in the range of fp32. Blocks are single rows where a
    channel decays by 2^-8192, as by a gate of -inf: that lets nothing pass.
    b_least is the least total of a channel: most tiles need no second look.
    """
    BT: tl.constexpr = b_high.shape[0]
    BK: tl.constexpr = b_high.shape[1]
    LIMITS: tl.constexpr = fold_limits(dtype)
    LAST: tl.constexpr = min(5, num_levels(BT))
    fold_level = 1 + LAST
    if b_least < -116.0:
        b_step = b_high.to(tl.float32)
        if tl.min(b_step) < -116.0 / 2 ** (LAST - 1):
            b_half = tl.maximum(b_step, -LIMITS[0])  # of a block
            fold_level = 1 + min(LIMITS[1], LAST)
            for level in tl.static_range(LIMITS[1] + 1, LAST + 1):
                b_half = tl.reshape(
                    b_half, half_blocks(b_half.shape[0], BT, BK, level)
                )
                b_half = tl.sum(b_half, axis=1)
                fold_level = tl.where(
                    tl.min(b_half) < -116.0, fold_level, 1 + level
                )
            fold_level = tl.where(b_least < -8192.0, 1, fold_level)
    return fold_level


@triton.jit
def to_middle(b_high, b_low, level, IS_FP32, BY_COLUMNS: tl.constexpr = False):
    """Decays between a row and the middle of its block of 2^level rows.

    Returns exponents [BT, BK], which are at most 0, and which rows are in the
    second half, [BT, 1]. A row there has the sum of the gates from the middle
    up to it, and a row in the first half that of the gates after it.
    """
    o_c = tl.arange(0, b_high.shape[0])
    o_half = o_c >> (level - 1)
    m_second = (o_half % 2 == 1)[:, None]
    m_same = o_half[:, None] == o_half[None, :]
    m_sum = m_same & ((o_c[None, :] <= o_c[:, None]) == m_second)
    return sum_gates(m_sum, b_high, b_low, IS_FP32, BY_COLUMNS), m_second


@triton.jit
def pairs_across(level, BT: tl.constexpr):
    """Pairs [BT, BT] of a row and a column whose border is such a middle."""
    o_half = tl.arange(0, BT) >> (level - 1)
    m_second = (o_half % 2 == 1)[:, None]
    return m_second & ((o_half[:, None] ^ 1) == o_half[None, :])


@triton.jit
def folded_factors(
    b_high,
    b_low,
    fold_level,
    dtype: tl.constexpr,
    BY_COLUMNS: tl.constexpr = False,
):
    """Factors of rows and columns, [BT, BK], and pairs [BT, BT] in one block.

    A block, of the level before fold_level (fold_level_of), is seen from its
    middle: the decay of a pair is a product of two factors, of which one may
    be large, up to 2^116. The last result is the level at which the other
    pairs begin.
    """
    BT: tl.constexpr = b_high.shape[0]
    LIMITS: tl.constexpr = fold_limits(dtype)
    IS_FP32: tl.constexpr = dtype == tl.float32
    m_far = b_high < -LIMITS[0]
    b_high = tl.where(m_far, tl.cast(-LIMITS[0], tl.float16), b_high)
    b_low = tl.where(m_far, tl.cast(0.0, tl.float16), b_low)
    level = tl.maximum(fold_level - 1, 1)  # of single rows no factor is used
    b_D, m_second = to_middle(b_high, b_low, level, IS_FP32, BY_COLUMNS)
    b_D = tl.where(m_second, b_D, -b_D)
    o_b = tl.arange(0, BT) >> (fold_level - 1)
    m_A = o_b[:, None] == o_b[None, :]
    return tl.exp2(b_D), tl.exp2(-b_D), m_A, fold_level
