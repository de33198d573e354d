"""Kernels compiled for GPUs that are not here, and what came of it."""

import re
import subprocess
from pathlib import Path

import torch
import triton
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastweights.kernels.recurrence.schedule import (
    SCALE,
    RuntimeNumber,
    TensorSpec,
    regroup,
)
from fastweights.torch_internals import version_of

# Shared memory one program may have, in bytes, by compute capability.
SHARED_MEMORY = {
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
# Hopper and Blackwell's data centre GPU, whose products are their own; and
# those that differ from one another in memory and registers only.
LEADING = (90, 100)
OTHERS = tuple(x for x in SHARED_MEMORY if x not in LEADING)
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
# Whether this ptxas leaves registers unset where tiles are narrower than
# tile.min_tile_columns. 13.0 is wrong elsewhere, 13.1 right (FLA PR 1262).
LEAVES_UNSET = {(12, 8): True, (12, 9): False, (13, 1): False}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def build(kernel, capability, dtype, constants, types):
    """The kernel compiled, its launch settings among the constants.

    Arguments that are neither constants nor of a given type are aligned
    pointers to ``dtype``; a tuple's have a tuple of types, in which what is
    no string is a constant.
    """
    settings = ("num_warps", "num_stages", "maxnreg")
    launch = {x: constants[x] for x in settings if x in constants}
    signature, fixed, aligned = {}, {}, {}

    def kind(x, *path):
        if isinstance(x, tuple):
            return regroup(x, (kind(y, *path, i) for i, y in enumerate(x)))
        if not isinstance(x, str):
            fixed[path] = x
            return "constexpr"
        if x.startswith("*"):
            aligned[path] = [["tt.divisibility", 16]]
        return x

    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            fixed[i,] = constants[name]
            signature[name] = "constexpr"
        else:
            signature[name] = kind(types.get(name, f"*{dtype}"), i)
    source = ASTSource(kernel, signature, fixed, aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=launch)


def source_of(launch):
    """The kernel of a launch, and such arguments as it is given."""
    signature, constants, aligned = {}, {}, {}

    def kind(x, *path):
        if isinstance(x, tuple):
            return regroup(x, (kind(y, *path, i) for i, y in enumerate(x)))
        if isinstance(x, TensorSpec):
            aligned[path] = [["tt.divisibility", 16]]
            return "*" + canonicalize_dtype(x.dtype)
        if isinstance(x, RuntimeNumber):
            return "fp32" if x == SCALE else "i32"
        constants[path] = x
        return "constexpr"

    names = launch.kernel.arg_names
    for i, (name, x) in enumerate(zip(names, launch.arguments, strict=True)):
        signature[name] = kind(x, i)
    return ASTSource(launch.kernel, signature, constants, aligned)


def build_launch(launch, capability):
    """The kernel of a launch compiled: see :func:`source_of`."""
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(
        source_of(launch), target=target, options=launch.options
    )


# The limits that tests name are those of Triton 3.7. Others allot registers
# otherwise: 3.9 spills up to 32 bytes and takes up to 10 registers more.
AS_RECORDED = version_of(triton) == (3, 7)
MORE_BYTES, MORE_REGISTERS = (0, 0) if AS_RECORDED else (32, 10)


def check_fits(compiled, capability, folder, spilled, *, set_addresses=True):
    """It fits, spills at most so many bytes, and every address is set."""
    cubin = compiled.asm["cubin"]
    usage = cuobjdump(cubin, "-res-usage", folder)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    shared = compiled.metadata.shared
    print(shared, "shared bytes", registers, "registers", stack, "spilled")
    assert shared <= SHARED_MEMORY[capability]
    assert (getattr(compiled.metadata, "tmem_size", 0) or 0) <= TENSOR_MEMORY
    assert int(stack) <= spilled + MORE_BYTES
    assert not overtaking_copies(compiled.asm["ttgir"])
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


def overtaking_copies(ttgir):
    """Buffers that a loop fills again while a product may still read them.

    Hopper's products run on while the program goes ahead, until it waits
    for them. Triton 3.6 gives a tile that is also used outside a product one
    buffer, and fills it for the next iteration without waiting first.
    """
    found, buffers, views, running = set(), {}, {}, []
    name = r"%[\w-]+(?:#\d+)?"
    for line in ttgir.splitlines():
        line = re.sub(r" loc\(.*", "", line)
        result = re.match(rf"\s*({name})(?::\d+)? = (\S+) (.*)", line)
        operation, rest = result.group(2, 3) if result else ("", line)
        places = re.sub(r"\[.*?\]", "", rest.split(" : ")[0])
        operands = re.findall(name, places)
        if "scf.for" in operation:
            running = []
        elif operation == "ttg.local_alloc" and not operands:
            buffers[result[1]] = int(re.search(r"memdesc<(\d+)x", rest)[1])
            views[result[1]] = result[1]
        elif operation.startswith("ttg.memdesc") and operands[0] in views:
            views[result[1]] = views[operands[0]]
        elif operation == "ttng.warp_group_dot" and "isAsync = true" in rest:
            running.append({views.get(x) for x in operands[:2]})
        elif operation == "ttng.warp_group_dot_wait":
            pending = int(re.search(r"pendings = (\d+)", rest)[1])
            running = running[len(running) - pending :] if pending else []
        elif re.search("async_copy|local_store|async_tma_copy_global", line):
            buffer = views.get(operands[1])
            if buffers.get(buffer) == 1 and any(buffer in x for x in running):
                found.add(buffer)
    return found


def unwaited_products(ttgir):
    """Tensor memory's products that a loop leaves running as it goes on.

    On capability 10.x a product ends when its barrier says so. A loop that
    Triton pipelines waits for that one iteration later, and is the form that
    races or is reordered (TUNING.md says where that is reported); with
    one stage each product is waited for where it was started.
    """
    found, loops = set(), []
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        if re.search(r"scf\.(for|while)\b", line):
            loops.append((indent, set()))
        elif loops and re.match(r"\s*}", line) and indent == loops[-1][0]:
            found |= loops.pop()[1]
        elif loops and "ttng.tc_gen5_mma" in line:
            loops[-1][1].update(re.findall(r"(%[\w-]+(?:#\d+)?)\[", line))
        elif "ttng.wait_barrier" in line:
            waited = re.search(r"wait_barrier (%[\w-]+(?:#\d+)?)", line)[1]
            for _, running in loops:
                running.discard(waited)
    return found


def ptxas_version():
    """Major and minor version of the assembler that Hopper's code is from."""
    version = triton.knobs.nvidia.ptxas.version
    return tuple(int(x) for x in version.split(".")[:2])
