"""TTT-Linear's kernels as they ship, for GPUs that are not here."""

import pytest

pytest.importorskip("triton")

from crossed import crossed
from offline import SHARED, build, judge

from fastweights.kernels import ttt
from fastweights.kernels.tile import INTERPRETED

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="the interpreter replaces the compiler"
)

KERNELS = {"fwd": ttt.ttt_fwd_kernel, "bwd": ttt.ttt_bwd_kernel}
NARROW = ("q", "k", "v", "o", "X", "do", "dq", "dk", "dv")
# Bytes that the backward spills on Hopper, by the size of a head.
SPILLED = {("fwd", 64): 0, ("fwd", 128): 0, ("bwd", 64): 136}
SPILLED |= {("bwd", 128): 680}


def compile_kernel(name, capability, dtype, K, C=16):
    kernel = KERNELS[name]
    constants = {"H": 16, "K": K, "C": C} | ttt.options(K)
    precision = "tf32x3" if dtype == "fp32" else "tf32"
    constants["PRECISION"] = precision
    wide = [x for x in kernel.arg_names if x not in NARROW]
    types = dict.fromkeys(wide, "*fp32") | {"T": "i32"}
    return build(kernel, capability, dtype, constants, types)


@pytest.mark.parametrize(("name", "K"), SPILLED)
def test_what_spills(name, K, tmp_path):
    compiled = compile_kernel(name, 90, "bf16", K)
    judge(compiled, 90, tmp_path, spilled=SPILLED[name, K])


@pytest.mark.full
@crossed(capability=[*SHARED], dtype=["bf16", "fp16", "fp32"], name=[*KERNELS])
def test_fits_every_gpu(name, capability, dtype, tmp_path):
    """It has no more shared memory than there is; what it spills is so."""
    compiled = compile_kernel(name, capability, dtype, 100)
    judge(compiled, capability, tmp_path, spilled=2**20)
