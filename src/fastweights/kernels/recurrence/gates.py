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
    b_half = tl.exp2(tl.where(m_weak, 0.5 * b_total, 0.0))
    return b_half, tl.exp2(tl.where(m_weak, 0.0, b_total))


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
    """How often BT rows can be halved, log2 of it: see decays_of_pairs."""
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


@triton.jit
def first_level(b_high, x, WIDE: tl.constexpr = False):
    """The level of the largest blocks that may be folded at their middles.

    Of 2^level rows, where no half of a block decays by more than 2^-80
    (is_weak) in any channel. The log decays b_high [BT, BK] are added up over
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
    deepest = tl.max(tl.where(is_weak(b_least, x), 0, o_depth))
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
    lower = tl.maximum(level - 1, 0)
    o_half = o_c >> lower
    m_second = (o_half % 2 == 1)[:, None]
    m_same = o_half[:, None] == o_half[None, :]
    m_sum = m_same & ((o_c[None, :] <= o_c[:, None]) == m_second)
    b_D = summed_gates(m_sum & (level > 0), b_high, b_low, EXACT, WIDE)
    b_far = tl.where(level == first, -b_D, b_D)
    b_r = tl.exp2(tl.where(m_second, b_D, b_far))
    b_c = tl.exp2(tl.where(m_second, b_far, b_D))
    m_block = (o_c >> level)[:, None] == (o_c >> level)[None, :]
    return b_r, b_c, m_block & ((level == first) | (m_same == 0))
