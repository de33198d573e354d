"""Chapter 15's kernels, compiled for Hopper without one."""

import pytest
import torch
from support.offline import SHARED_MEMORY, build, check_fits

from fastweights_lab.lessons import delta

SIZES = {"H": 4, "HV": 8, "K": 128, "V": 128, "BT": 64, "BK": 128}
WHOLE = {"W": 128, "initial_state": None}
PROGRAM = delta.program_options(128, 128, torch.bfloat16)
# What compute capability 9.0 launches, and the bytes each may spill there.
LAUNCHES = {
    "rows": (delta.program_kernel, PROGRAM | {"BLOCKS": False}, 320),
    "blocks": (delta.program_kernel, PROGRAM | {"BLOCKS": True}, 600),
    "inverse": (delta.inverse_kernel, {"num_warps": 4, "num_stages": 1}, 0),
}
for name, strip, stages, of in (
    ("ahead", 128, 3, WHOLE),
    ("two stages", 128, 2, WHOLE),
    ("nothing ahead", 128, 1, WHOLE),
    ("strips", 64, 2, WHOLE),
    ("three stages", 64, 3, WHOLE),
    ("one stage", 64, 1, WHOLE),
    ("segments", 64, 2, {"W": 128}),
    ("maps", 64, 2, {"W": 256, "o": None}),
):
    options = delta.scan_options(
        torch.device("cpu"), 128, torch.bfloat16, strip, stages
    )
    spilled = 64 if strip == 128 else 0
    LAUNCHES[name] = (delta.scan_kernel, options | of, spilled)


def compile_kernel(name, capability):
    kernel, options, _ = LAUNCHES[name]
    types = dict.fromkeys(("state", "initial_state", "beta"), "*fp32")
    types |= {"T": "i32", "scale": "fp32"}
    return build(kernel, capability, "bf16", SIZES | options, types)


@pytest.mark.parametrize("name", LAUNCHES)
def test_memory_and_registers_hold_each_version(name, tmp_path):
    check_fits(compile_kernel(name, 90), 90, tmp_path, LAUNCHES[name][2])


@pytest.mark.parametrize("name", ["blocks", "nothing ahead", "one stage"])
def test_smaller_memory_holds_some_versions(name):
    """What runs on 8.6: nothing is loaded ahead, and registers spill."""
    assert compile_kernel(name, 86).metadata.shared <= SHARED_MEMORY[86]
