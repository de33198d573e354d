"""The output norm's kernels as they ship, for GPUs not here."""

import re

import pytest
import torch
from support.offline import DTYPES, build, check_fits

from fastweights.kernels import output_norm

KERNELS = {
    "fwd": output_norm.norm_fwd_kernel,
    "bwd": output_norm.norm_bwd_kernel,
}


@pytest.mark.parametrize(
    "dtype, HV, V, capability",
    [
        ("bf16", 16, 128, 90),
        ("fp32", 16, 128, 90),
        ("bf16", 30, 96, 90),
        ("bf16", 1, 4096, 90),
        ("bf16", 16, 128, 80),
        pytest.param("bf16", 16, 128, 100, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_spills(name, dtype, HV, V, capability, tmp_path):
    """And a thread reads and writes 16 bytes at once, but of the weight.

    The backward keeps to the registers that programs_at_once counts on. The
    gate's stride is a constant, since ``build`` tells of no divisor.
    """
    o = torch.empty(1, 1, HV, V, dtype=DTYPES[dtype])
    meta, settings = output_norm.norm_options(
        o, o[0, 0, 0], True, name == "bwd"
    )
    constants = settings | {"META": meta, "stride": 2 * HV * V}
    x, y = f"*{dtype}", "*fp32"
    types = {"inputs": (x, y, x), "grads": (x, x, y)}
    types |= {"eps": "fp32", "rows": "i32"}
    kernel = build(KERNELS[name], capability, dtype, constants, types)
    check_fits(kernel, capability, tmp_path, spilled=0)
    found = re.findall(r"(?:ld|st)\.global\S*", kernel.asm["ptx"])
    wide = [x for x in found if x.endswith("v4.b32")]
    assert len(found) - len(wide) <= {"fwd": 1, "bwd": 2}[name]
