"""Kernels compiled for GPUs that are not here, and what came of it."""

import re
import subprocess
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Shared memory one program may have, in bytes, by compute capability.
SHARED = {
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    120: 101376,
}
# Columns of tensor memory, which holds accumulators on 10.0. Where they do
# not suffice, Triton compiles a trap.
TENSOR_MEMORY = 512
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def build(kernel, capability, dtype, constants, types):
    """The kernel compiled, its launch settings among the constants.

    Arguments that are neither constants nor of a given type are aligned
    pointers to ``dtype``.
    """
    settings = ("num_warps", "num_stages")
    launch = {x: constants[x] for x in settings if x in constants}
    names = kernel.arg_names
    constants = {x: y for x, y in constants.items() if x in names}
    signature = {
        x: "constexpr" if x in constants else types.get(x, f"*{dtype}")
        for x in names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=launch)


def judge(compiled, capability, folder, spilled, *, set_addresses=True):
    """It fits, spills at most so many bytes, and every address is set."""
    cubin = compiled.asm["cubin"]
    usage = cuobjdump(cubin, "-res-usage", folder)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    shared = compiled.metadata.shared
    print(shared, "shared bytes", registers, "registers", stack, "spilled")
    assert shared <= SHARED[capability]
    assert (getattr(compiled.metadata, "tmem_size", 0) or 0) <= TENSOR_MEMORY
    assert int(stack) <= spilled
    if capability == 90 and set_addresses:
        assert not unset_uniform_registers(cuobjdump(cubin, "-sass", folder))
    return int(registers)


def cuobjdump(cubin, option, folder):
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [TOOLS / "cuobjdump", option, path]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout


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


def ptxas_version():
    command = [TOOLS / "ptxas", "--version"]
    return subprocess.run(command, capture_output=True, text=True).stdout
