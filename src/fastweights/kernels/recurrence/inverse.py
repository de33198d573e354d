"""The delta rule's inverse of a chunk, by joining neighbours.

(I + Diag(beta) A)^{-1} = I + Diag(beta) R, and R is what is found. intra.py
calls it; its backward is the product with R transposed in scan_bwd_kernel.
"""

import triton
import triton.language as tl


@triton.jit
def joint_mask(level, BT: tl.constexpr):
    """Mask [BT, BT] of the blocks that join two neighbours of 2^level rows."""
    o_c = tl.arange(0, BT) >> level
    return (o_c[:, None] ^ 1) == o_c[None, :]


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
def join(b_R, b_A, b_beta, m_off, PRECISION: tl.constexpr):
    """R of two neighbours joined, from R of each; they meet in m_off of b_A.

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
    m_diagonal = o_b[:, None, None, None] == o_b[None, None, :, None]
    b_blocks = tl.where(m_diagonal, tl.reshape(b_A, [NB, 16, NB, 16]), 0.0)
    b_blocks = tl.sum(b_blocks, axis=2)  # [NB, 16, 16]
    b_b = tl.reshape(b_beta, [NB, 16])[:, :, None]
    b_R = -tl.where(joint_mask(0, 16)[None], b_blocks, 0.0)
    for level in tl.static_range(1, 4):
        b_R = join(b_R, b_blocks, b_b, joint_mask(level, 16)[None], PRECISION)
    b_R = tl.where(m_diagonal, b_R[:, :, None, :], 0.0)
    b_R = tl.reshape(b_R, [BT, BT])
    for level in tl.static_range(4, 6):
        if 2**level < BT:
            m_off = joint_mask(level, BT)
            b_R = join(b_R, b_A, b_beta[:, None], m_off, PRECISION)
    return b_R


@triton.jit
def checked_inverse(b_Aek, PRECISION: tl.constexpr):
    """R of the lower triangular b_Aek [BT, BT], of beta = 1 and two keys.

    Nothing says beforehand how large it is: of a key that erases, a token may
    amplify what the state has. So in fp16, and again in tf32 if that was too
    large for it, or no number. What is found on the way is a part of R, or
    a product of one that R has in it.
    """
    b_one = tl.full([b_Aek.shape[0]], 1.0, dtype=tl.float32)
    if PRECISION == "tf32":
        b_R = rest_of_inverse(b_Aek, b_one, "fp16")
        if tl.max(tl.where(tl.abs(b_R) < 64.0, 0, 1)) > 0:
            b_R = rest_of_inverse(b_Aek, b_one, "tf32")
    else:
        b_R = rest_of_inverse(b_Aek, b_one, PRECISION)
    return b_R


@triton.jit
def bounded_inverse(b_Akk, b_beta, mild, PRECISION: tl.constexpr):
    """R of the lower triangular b_Akk [BT, BT], with the diagonal |k|^2.

    ``mild``: no beta is below 0, and the largest times the largest |k|^2 is
    about 2 at most. Then the inverse stays small, and fp16 has the range as
    well as the precision of tf32.
    """
    if PRECISION == "tf32":
        if mild:
            b_R = rest_of_inverse(b_Akk, b_beta, "fp16")
        else:
            b_R = rest_of_inverse(b_Akk, b_beta, "tf32")
    else:
        b_R = rest_of_inverse(b_Akk, b_beta, PRECISION)
    return b_R
