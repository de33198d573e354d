"""Products of few rows as they ship, for GPUs that are not here."""

import re

import pytest
import torch
from crossed import crossed
from offline import DTYPES, OTHERS, SHARED, build, judge

from fastweights.kernels.gemv import TILES_AHEAD, gemv_kernel, gemv_options

NOTHING = {"norm": None, "gate": None, "residual": None, "rows": None}
NOTHING |= {"convolution": None, "V": 0, "SIGMOID": False, "SWIGLU": False}
NOTHING |= {"W": 0, "SILU": True, "T": 1, "MANY": False, "accepted": None}
D, WIDE = 1024, 2816
# What a block of width 1,024 has, with heads of 128.
CASES = {
    "qkv": ((3072, 16, D), D, {"norm": ..., "convolution": ..., "W": 4}),
    "out": ((D,), D, {"norm": ..., "gate": ..., "residual": ..., "V": 128}),
    "up": ((WIDE,), D, {"norm": ..., "SWIGLU": True}),
    "down": ((D,), WIDE, {"residual": ...}),
}


def compile_kernel(name, M, capability, dtype="bf16"):
    sizes, K, given = CASES[name]
    options = gemv_options(M, K, sum(sizes), DTYPES[dtype])
    if not (
        options["SUMS"] or options["G"]
    ):  # norms of many rows are a launch of their own
        given = given | {"norm": None, "gate": None, "V": 0}
    constants = NOTHING | given | options
    constants |= {"K": K, "TOTAL": sum(sizes), "SIZES": sizes}
    constants |= {"SOURCES": (0,) * len(sizes), "EARLY": capability >= 90}
    constants = {x: y for x, y in constants.items() if y is not ...}
    if options["G"]:  # strides that 16 divides
        constants |= {"stride": K, "stride_gate": K}
    types = dict.fromkeys(("M", "R", "stride", "stride_gate"), "i32")
    types |= {"eps": "fp32", "weights": (f"*{dtype}",) * len(sizes)}
    types |= {"convolution": (f"*{dtype}",) * 3}
    return build(gemv_kernel, capability, dtype, constants, types)


@crossed(
    seldom=[str(x) for x in OTHERS],
    name=[*CASES],
    M=[1, 2, 16, 64],
    capability=[*SHARED],
    dtype=["bf16", "fp32"],
)
def test_next_to_nothing_spills(name, M, capability, dtype, tmp_path):
    compiled = compile_kernel(name, M, capability, dtype)
    # Parts of columns are faster so than in tiles of which nothing spills.
    judge(compiled, capability, tmp_path, 32 if 2 < M <= 16 else 0)


@pytest.mark.parametrize("name", CASES)
def test_one_row_reads_its_weights_before_it_waits(name):
    """All of them, 16 bytes a lane: after the wait there is x to read."""
    sizes, K, given = CASES[name]
    tile = gemv_options(1, K, sum(sizes), torch.bfloat16)
    assert -(-K // tile["BK"]) <= TILES_AHEAD
    elements = tile["BN"] * tile["BK"] * -(-K // tile["BK"])
    wide = elements * (1 + given.get("SWIGLU", 0)) // (256 * tile["num_warps"])
    ptx = compile_kernel(name, 1, 90).asm["ptx"]
    before, _, _ = ptx.partition("griddepcontrol.wait")
    assert len(re.findall(r"ld\.global\.v4\.b32", before)) == wide
