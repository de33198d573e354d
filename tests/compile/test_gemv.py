"""Products of few rows as they ship, for GPUs that are not here."""

import re

import pytest
import torch
from support.offline import DTYPES, OTHERS, SHARED_MEMORY, build, check_fits
from support.pairwise import parametrize_all

from fastweights.kernels.gemv import (
    TILES_AHEAD,
    GemvMeta,
    gemv_kernel,
    gemv_options,
)

D, WIDE = 1024, 2816
# What a block of width 1,024 has, with heads of 128.
CASES = {
    "qkv": ((3072, 16, D), D, ("norm", "convolution")),
    "out": ((D,), D, ("norm", "gate", "residual")),
    "up": ((WIDE,), D, ("norm", "swiglu")),
    "down": ((D,), WIDE, ("residual",)),
}


def compile_kernel(name, M, capability, dtype="bf16"):
    sizes, K, given = CASES[name]
    tile, settings = gemv_options(M, K, sum(sizes), DTYPES[dtype])
    whole = "BY_SUMS" in tile or "NUM_PARTS" in tile
    if not whole:  # norms of many rows are a launch of their own
        given = [x for x in given if x not in ("norm", "gate")]
    x, stride = (
        f"*{dtype}",
        K if "NUM_PARTS" in tile else "i32",
    )  # 16 divides K
    norm, gate = (x if y in given else None for y in ("norm", "gate"))
    groups = {
        "x": (x, stride),
        "norm": (norm, gate, stride, "fp32"),
        "convolution": (x, x, x, None, None, 1),
    }
    absent = ("residual", "convolution")
    constants = settings | {y: None for y in absent if y not in given}
    constants["META"] = GemvMeta(
        K=K,
        SIZES=sizes,
        TOTAL=sum(sizes),
        SOURCES=(0,) * len(sizes),
        ROWS_NORMED=bool(norm) and not gate,
        V=128 if gate else 0,
        SIGMOID=False,
        SWIGLU="swiglu" in given,
        W=4 if "convolution" in given else 0,
        SILU=True,
        MANY_TOKENS=False,
        EARLY=capability >= 90,
        **tile,
    )
    types = groups | {"weights": (x,) * len(sizes), "M": "i32", "R": "i32"}
    return build(gemv_kernel, capability, dtype, constants, types)


@parametrize_all(
    covered_once=[str(x) for x in OTHERS],
    name=[*CASES],
    M=[1, 2, 16, 64],
    capability=[*SHARED_MEMORY],
    dtype=["bf16", "fp32"],
)
def test_next_to_nothing_spills(name, M, capability, dtype, tmp_path):
    compiled = compile_kernel(name, M, capability, dtype)
    # Parts of columns are faster so than in tiles of which nothing spills.
    check_fits(compiled, capability, tmp_path, 32 if 2 < M <= 16 else 0)


@pytest.mark.parametrize("name", CASES)
def test_one_row_reads_its_weights_before_it_waits(name):
    """All of them, 16 bytes a lane: after the wait there is x to read."""
    sizes, K, given = CASES[name]
    tile, settings = gemv_options(1, K, sum(sizes), torch.bfloat16)
    assert -(-K // tile["BK"]) <= TILES_AHEAD
    elements = tile["BN"] * tile["BK"] * -(-K // tile["BK"])
    wide = (
        elements * (1 + ("swiglu" in given)) // (256 * settings["num_warps"])
    )
    ptx = compile_kernel(name, 1, 90).asm["ptx"]
    before, _, _ = ptx.partition("griddepcontrol.wait")
    assert len(re.findall(r"ld\.global\.v4\.b32", before)) == wide
