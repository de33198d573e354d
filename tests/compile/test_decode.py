"""The decoding kernel as it ships, compiled for GPUs that are not here."""

import re

import pytest
from support import offline
from support.offline import SHARED_MEMORY
from support.pairwise import parametrize_all

from fastweights.kernels.decode import (
    DecodeMeta,
    decode_kernel,
    decode_options,
)


def compile_decode(
    width,
    delta,
    T,
    capability,
    D=128,
    dtype="bf16",
    rows=False,
    state="fp32",
    layer=False,
    erase=False,
):
    """The kernel with its launch settings, for head size D = K = V.

    T is 1, which Triton makes a constant, or any other number of tokens. A
    layer's step has logits of its gates, and q and k of any length.
    """
    width = D if width == "K" else width
    BK, BV, num_warps = decode_options(D, T)
    meta = DecodeMeta(
        *(16, 16, D, D),
        GATE_WIDTH=width,
        FIXED=False,
        NORM=layer,
        LOWER_BOUND=None,
        MAX_BETA=2.0 if layer else 0.0,
        STATE_IS_READY=layer,
        EARLY=capability >= 90,
        BK=BK,
        BV=BV,
    )
    x, wide = f"*{dtype}", "*fp32"
    g, beta = wide if width else None, wide if delta else None
    offsets = "*i64" if rows else None
    types = {
        "tokens": (x, x, x, g, beta),
        "erase_key": (x, "i32") if erase else None,
        "pool": (f"*{state}", offsets, offsets if T > 1 else None),
        "decay_parameters": (wide, wide) if layer else None,
        "strides": ("i32",) * 5,
        "scale": "fp32",
        "T": 1 if T == 1 else "i32",
        "N": "i32",
    }
    constants = {"META": meta, "num_warps": num_warps}
    return offline.build(decode_kernel, capability, dtype, constants, types)


def judge(compiled, capability, tmp_path, spilled=0):
    """It fits, spills nothing, and moves the state 16 bytes a lane."""
    ptx = compiled.asm["ptx"]
    assert re.findall(r"ld\.global\.v4\.b32", ptx)
    assert re.findall(r"st\.global\.v4\.b32", ptx)
    return offline.check_fits(
        compiled, capability, tmp_path, spilled, set_addresses=False
    )


@pytest.mark.parametrize("width", [1, "K"])
def test_a_layers_step(width, tmp_path):
    compiled = compile_decode(width, True, 1, 90, layer=True, rows=True)
    judge(compiled, 90, tmp_path)


@pytest.mark.parametrize("T", [1, 16])
@pytest.mark.parametrize("width", [1, "K"])
def test_another_key_erases(width, T, tmp_path):
    compiled = compile_decode(width, False, T, 90, erase=True)
    judge(compiled, 90, tmp_path)


def test_rows_of_a_pool(tmp_path):
    judge(compile_decode(1, True, 16, 90, rows=True), 90, tmp_path)


@pytest.mark.parametrize("T", [1, 16])
def test_a_state_in_bf16_is_rounded_to_nearest(T, tmp_path):
    compiled = compile_decode(1, True, T, 90, state="bf16")
    judge(compiled, 90, tmp_path)
    assert "cvt.rn.bf16x2.f32" in compiled.asm["ptx"]


@parametrize_all(
    covered_once=[str(x) for x in offline.OTHERS],
    capability=[*SHARED_MEMORY],
    width=(0, 1, "K"),
    delta=(False, True),
    T=(1, 16),
)
def test_registers_in_bf16(width, delta, T, capability, tmp_path):
    compiled = compile_decode(width, delta, T, capability)
    # What one warp has of a tile is next to too much on Blackwell.
    registers = judge(compiled, capability, tmp_path, 8 if T > 1 else 0)
    # five programs of 128 threads a multiprocessor, or twelve of 32
    assert registers <= (96 if T == 1 else 168) + offline.MORE_REGISTERS


@parametrize_all(D=[16, 64, 256], width=(0, 1, "K"), delta=(False, True))
def test_registers_for_other_head_sizes(width, delta, D, tmp_path):
    judge(compile_decode(width, delta, 16, 90, D), 90, tmp_path)


@parametrize_all(
    dtype=["fp16", "fp32"], width=(0, 1, "K"), delta=(False, True)
)
def test_registers_in_other_dtypes(width, delta, dtype, tmp_path):
    judge(compile_decode(width, delta, 16, 90, dtype=dtype), 90, tmp_path)


@parametrize_all(width=(0, 1, "K"), delta=(False, True), T=(1, 16))
def test_all_loads_come_before_any_wait(width, delta, T):
    """A wait between two loads would add a trip to memory to each step.

    Shared memory, which q, k and g go through to the threads that need them,
    and the sums over warps and o, is used after all loads.
    """
    ptx = compile_decode(width, delta, T, 90).asm["ptx"]
    moves = re.findall(r"(ld\.global|bar\.sync|st\.shared)", ptx)
    loads = [i for i, move in enumerate(moves) if move == "ld.global"]
    others = [i for i, move in enumerate(moves) if move != "ld.global"]
    assert max(loads) < min(others)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_nothing_is_read_before_the_kernel_before_is_done(capability):
    """From Hopper on its programs are there by then, and wait.

    The next kernel's may start after that wait, not before.
    """
    ptx = compile_decode(1, True, 1, capability).asm["ptx"]
    moves = re.findall(r"griddepcontrol\.\w+|(?:ld|st)\.global", ptx)
    first = ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]
    assert (moves[:2] == first) == (capability >= 90)
    assert not any(move.startswith("grid") for move in moves[2:])
    assert capability >= 90 or moves[0] == "ld.global"
