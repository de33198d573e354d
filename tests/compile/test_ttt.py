"""TTT-Linear's kernels as they ship, for GPUs that are not here."""

import pytest
from support.offline import SHARED_MEMORY, build, check_fits
from support.pairwise import parametrize_all

from fastweights.kernels import ttt

KERNELS = {"fwd": ttt.ttt_fwd_kernel, "bwd": ttt.ttt_bwd_kernel}
# Bytes that the backward spills, by the compute capability and K.
SPILLED = {
    ("fwd", 90, 64): 0,
    ("fwd", 90, 128): 0,
    ("bwd", 90, 64): 136,
    ("bwd", 90, 128): 704,
    ("fwd", 100, 128): 0,
    ("bwd", 100, 128): 640,
}


def compile_kernel(name, capability, dtype, K, C=16):
    tile, settings = ttt.ttt_options(K)
    precision = "tf32x3" if dtype == "fp32" else "tf32"
    meta = ttt.TTTMeta(H=16, K=K, C=C, PRECISION=precision, **tile)
    x, y = f"*{dtype}", "*fp32"
    types = {"tokens": (x, x, x, y), "memory": (y, y), "norm": (y, y)}
    types |= {"factors": y, "results": (x, x, y, y), "T": "i32"}
    types |= {"output_grads": (x, y, y), "grads": (x, x, x, *[y] * 6)}
    constants = settings | {"META": meta}
    return build(KERNELS[name], capability, dtype, constants, types)


@pytest.mark.parametrize(
    ("name", "capability", "K"),
    [
        x if x[1] == 90 else pytest.param(*x, marks=pytest.mark.full)
        for x in SPILLED
    ],
)
def test_how_much_spills(name, capability, K, tmp_path):
    compiled = compile_kernel(name, capability, "bf16", K)
    spilled = SPILLED[name, capability, K]
    check_fits(compiled, capability, tmp_path, spilled=spilled)


@pytest.mark.full
@parametrize_all(
    capability=[*SHARED_MEMORY],
    dtype=["bf16", "fp16", "fp32"],
    name=[*KERNELS],
)
def test_fits_every_gpu(name, capability, dtype, tmp_path):
    """Where "auto" does not choose it too: it spills, but it runs."""
    K = 64 if dtype == "fp32" else 100
    compiled = compile_kernel(name, capability, dtype, K)
    check_fits(compiled, capability, tmp_path, spilled=2**20)
