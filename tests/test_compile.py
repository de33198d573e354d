"""Each kernel as it ships, compiled for each GPU without having one."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fastweights.kernels import linear, prefix  # noqa: E402
from fastweights.kernels.tile import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="the interpreter replaces the compiler"
)

# Shared memory one program may have, in bytes, by compute capability.
SHARED = {
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    120: 101376,
}
KERNELS = {
    "linear_scan": (linear.linear_scan_kernel, linear.scan_options),
    "chunk_states": (prefix.chunk_states_kernel, prefix.chunk_options),
    "chunk_outputs": (prefix.chunk_outputs_kernel, prefix.chunk_options),
    "prefix_scan": (prefix.prefix_scan_kernel, prefix.prefix_options),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_kernel(name, capability, D=128, dtype="bf16", precision="tf32x3"):
    """A kernel with its launch settings, for head size D = K = V."""
    kernel, options = KERNELS[name]
    types = {x: f"*{dtype}" for x in "qkvo"}
    types |= {x: "*fp32" for x in ("x", "state", "states")}
    types |= {"initial_state": "*fp32", "scale": "fp32"}
    types |= {"T": "i32", "N": "i32"}
    if name == "prefix_scan":
        constants = {"E": D * D, **options(33)}
    else:
        constants = {"H": 4, "HV": 8, "K": D, "V": D, "BT": 64}
        constants["PRECISION"] = precision
        constants |= options(D, DTYPES[dtype])
    launch = {x: constants.pop(x) for x in ("num_warps", "num_stages")}
    signature = {x: types.get(x, "constexpr") for x in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=launch)


def cuobjdump(cubin, option, folder):
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [TOOLS / "cuobjdump", option, path]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("name", KERNELS)
def test_fits(name, capability, tmp_path):
    """Shared memory is there, and registers hold nearly everything."""
    compiled = compile_kernel(name, capability)
    assert compiled.metadata.shared <= SHARED[capability]
    usage = cuobjdump(compiled.asm["cubin"], "-res-usage", tmp_path)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    print(compiled.metadata.shared, "shared bytes", registers, "registers")
    # Before Hopper operands of tl.dot live in registers, and a few spill.
    assert int(stack) <= (0 if capability in (90, 100) else 512)


WIDEST = {
    "linear_scan": {"bf16": (86, 90), "fp32": (86, 90)},
    "chunk_outputs": {"bf16": (80, 90), "fp32": (86, 90)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WIDEST)
def test_widest_head_fits(name, dtype):
    for capability in WIDEST[name][dtype]:
        compiled = compile_kernel(name, capability, 256, dtype)
        assert compiled.metadata.shared <= SHARED[capability]


def unset_uniform_registers(sass):
    """Uniform registers that the machine code reads and never writes."""
    written, read = set(), set()
    for line in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", sass, re.M):
        line = re.sub(r"^@!?U?P\w+\s+", "", line)
        operation, _, operands = line.partition(" ")
        first, _, rest = operands.partition(",")
        target = re.fullmatch(r"\s*UR(\d+)\s*", first)
        if target:
            n = int(target.group(1))
            wide = ".64" in operation or ".WIDE" in operation
            written |= {n, n + 1} if wide else {n}
            operands = rest
        sources = re.sub(r"gdesc\[UR\d+\]", "", operands)
        read |= {int(n) for n in re.findall(r"\bUR(\d+)", sources)}
    return read - written


@pytest.mark.parametrize("D", [16, 64, 128, 256])
@pytest.mark.parametrize("products", ["bf16", "tf32", "tf32x3"])
@pytest.mark.parametrize(
    "name", ["linear_scan", "chunk_states", "chunk_outputs"]
)
def test_descriptors_are_set(name, products, D, tmp_path):
    """ptxas 12.8 can leave part of a wgmma operand's address unset.

    It does so where one shared buffer holds first a tile with rows of 128
    bytes or more, then one with shorter rows: wrong results, or an illegal
    memory access.
    """
    dtype = "bf16" if products == "bf16" else "fp32"
    precision = "tf32x3" if products == "tf32x3" else "tf32"
    compiled = compile_kernel(name, 90, D, dtype, precision)
    sass = cuobjdump(compiled.asm["cubin"], "-sass", tmp_path)
    assert products != "bf16" or "HGMMA" in sass
    assert not unset_uniform_registers(sass)


def test_unset_registers_are_found(monkeypatch, tmp_path):
    """Value tiles with rows of 64 bytes bring the fault out, on ptxas 12.8."""
    narrow = {"BK": 64, "BV": 32, "num_warps": 4, "num_stages": 1}
    kernel = prefix.chunk_outputs_kernel, lambda K, dtype: narrow
    monkeypatch.setitem(KERNELS, "chunk_outputs", kernel)
    compiled = compile_kernel("chunk_outputs", 90, 64)
    sass = cuobjdump(compiled.asm["cubin"], "-sass", tmp_path)
    if "V12.8" not in ptxas_version():
        pytest.skip("another ptxas than 12.8")
    assert unset_uniform_registers(sass)


def ptxas_version():
    command = [TOOLS / "ptxas", "--version"]
    return subprocess.run(command, capture_output=True, text=True).stdout
