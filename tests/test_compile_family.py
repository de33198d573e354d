"""The family's kernels as they ship, compiled for GPUs that are not here."""

import re

import pytest

triton = pytest.importorskip("triton")

from test_compile import (  # noqa: E402
    DTYPES,
    SHARED,
    cuobjdump,
    unset_uniform_registers,
)
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fastweights.kernels.intra import intra_fwd_kernel  # noqa: E402
from fastweights.kernels.launch import launch_options  # noqa: E402
from fastweights.kernels.scan import scan_fwd_kernel  # noqa: E402
from fastweights.kernels.tile import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="the interpreter replaces the compiler"
)

KERNELS = {"intra": intra_fwd_kernel, "scan": scan_fwd_kernel}
# Stage, gate's width (of 128 channels), delta rule
LAUNCHES = [
    ("intra", 0, True),
    ("intra", 1, True),
    ("intra", "K", False),
    ("intra", "K", True),
    *(("scan", width, rule) for width in (0, 1, "K") for rule in (0, 1)),
]
FULL = ("g", "beta", "total", "initial_state", "state")


def compile_stage(stage, width, delta, capability, D=128, dtype="bf16"):
    """A stage with its launch settings, for head size D = K = V."""
    kernel = KERNELS[stage]
    DG = D if width == "K" else width
    options = launch_options(
        stage,
        D,
        DTYPES[dtype],
        gated=DG > 0,
        delta=bool(delta),
        shared=SHARED[capability],
    )
    absent = {"g": DG > 0, "beta": delta, "P": delta, "h": False}
    absent |= {"Aqk": DG > 1, "total": DG > 1, "cu_seqlens": False}
    if stage == "intra":
        absent |= dict.fromkeys(("q_in", "k_in", "k_out"), DG > 1)
    constants = {name: None for name, there in absent.items() if not there}
    constants |= {"H": 4, "HV": 8, "K": D, "V": D, "BT": 64, "DG": DG}
    constants |= {"DELTA": bool(delta), "PRECISION": "tf32x3"} | options
    if dtype == "bf16":
        constants["PRECISION"] = "tf32"
    launch = {x: constants.pop(x) for x in ("num_warps", "num_stages")}
    constants = {x: y for x, y in constants.items() if x in kernel.arg_names}
    signature = {}
    for name in kernel.arg_names:
        kind = f"*{'fp32' if name in FULL else dtype}"
        kind = {"scale": "fp32", "T": "i32", "N": "i32"}.get(name, kind)
        signature[name] = "constexpr" if name in constants else kind
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=launch)


def judge(compiled, capability, tmp_path, spilled):
    """It fits, spills at most so many bytes, and every address is set."""
    assert compiled.metadata.shared <= SHARED[capability]
    cubin = compiled.asm["cubin"]
    usage = cuobjdump(cubin, "-res-usage", tmp_path)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    print(compiled.metadata.shared, "shared bytes", registers, "registers")
    assert int(stack) <= spilled
    if capability == 90:
        sass = cuobjdump(cubin, "-sass", tmp_path)
        assert "HGMMA" in sass
        assert not unset_uniform_registers(sass)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("stage, width, delta", LAUNCHES)
def test_bf16(stage, width, delta, capability, tmp_path):
    compiled = compile_stage(stage, width, delta, capability)
    # Before Hopper the operands of tl.dot live in registers, and spill.
    spilled = 640 if capability in (90, 100) else 1600
    judge(compiled, capability, tmp_path, spilled)


@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("stage, width, delta", LAUNCHES)
def test_other_head_sizes(stage, width, delta, D, tmp_path):
    compiled = compile_stage(stage, width, delta, 90, D)
    judge(compiled, 90, tmp_path, 640)


@pytest.mark.parametrize("stage, width, delta", LAUNCHES)
def test_fp32(stage, width, delta, tmp_path):
    """Three tf32 products keep each operand twice, and spill."""
    compiled = compile_stage(stage, width, delta, 90, 128, "fp32")
    judge(compiled, 90, tmp_path, 4096)
