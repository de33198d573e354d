"""Softmax attention's kernels as they ship, for GPUs that are not here."""

import itertools

import pytest

pytest.importorskip("triton")
import triton
from crossed import all_but, crossed, in_turn
from offline import (
    DTYPES,
    LEADING,
    MORE_REGISTERS,
    OTHERS,
    SHARED,
    build,
    judge,
)

from fastweights.kernels import flash
from fastweights.kernels.tile import INTERPRETED
from fastweights.private import version_of

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="the interpreter replaces the compiler"
)

KERNELS = {
    "fwd": flash.flash_fwd_kernel,
    "dq": flash.flash_bwd_dq_kernel,
    "dkv": flash.flash_bwd_dkv_kernel,
}


def compile_kernel(name, capability, D=128, dtype="bf16", precision="tf32x3"):
    """A kernel with its launch settings, for head size D = K = V."""
    kernel = KERNELS[name]
    constants = {"HQ": 8, "H": 4, "K": D, "V": D, "PRECISION": precision}
    constants |= flash.flash_options(
        D, D, DTYPES[dtype], backward=name != "fwd"
    )
    types = {"scale": "fp32", "T": "i32", "lse": "*fp32", "delta": "*fp32"}
    return build(kernel, capability, dtype, constants, types)


@pytest.mark.parametrize(
    "name, capability",
    all_but(
        in_turn(LEADING, OTHERS, [*KERNELS]),
        itertools.product(KERNELS, SHARED),
    ),
)
def test_bf16(name, capability, tmp_path):
    compiled = compile_kernel(name, capability)
    # Elsewhere the operands of tl.dot live in registers, and a few spill,
    # at most 184 bytes (dkv on 12.0).
    spilled = 0 if capability in (90, 100) else 256
    judge(compiled, capability, tmp_path, spilled)
    assert capability != 90 or "wgmma" in compiled.asm["ptx"]


@crossed(
    seldom=["86"], capability=(86, *LEADING), name=[*KERNELS], D=[64, 256]
)
def test_other_head_sizes(name, D, capability, tmp_path):
    """Here 8 bytes spill, with other versions of Triton 24.

    Only Triton 3.6 spills 288 of dkv on a Blackwell, at D = 64.
    """
    old = capability == 100 and version_of(triton) < (3, 7)
    spilled = 288 if old and (name, D) == ("dkv", 64) else 64
    judge(compile_kernel(name, capability, D), capability, tmp_path, spilled)


@crossed(
    seldom=["86"], capability=(86, *LEADING), name=[*KERNELS], D=[128, 256]
)
def test_fp32(name, D, capability, tmp_path):
    """Three tf32 products keep each operand twice, and spill."""
    compiled = compile_kernel(name, capability, D, "fp32")
    judge(compiled, capability, tmp_path, 640)


@pytest.mark.parametrize("name", KERNELS)
def test_tf32(name, tmp_path):
    """ptxas stays at 128 registers, for two programs side by side.

    It pays with 16 bytes that spill.
    """
    compiled = compile_kernel(name, 90, 128, "fp32", "tf32")
    assert judge(compiled, 90, tmp_path, 32) <= 144 + MORE_REGISTERS
