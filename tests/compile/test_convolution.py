"""The short convolution's kernels as they ship, for GPUs not here."""

import itertools
import re

import pytest
from support.offline import MORE_REGISTERS, SHARED_MEMORY, build, check_fits

from fastweights.kernels import convolution
from fastweights.kernels.convolution_forward import ConvolutionMeta

KERNELS = {
    "fwd": convolution.convolution_fwd_kernel,
    "bwd": convolution.convolution_bwd_kernel,
}
# H, K, HV, V as in Qwen3-Next, and as in OLMo-Hybrid; no heads at all.
HEADS = {
    "128": (16, 128, 32, 128),
    "96": (30, 96, 30, 192),
    "256": (8, 256, 8, 512),
    "none": (0, 0, 1, 6144),
    "odd": (1, 5, 3, 7),
    "one": (0, 0, 1, 1),
}


def compile_kernel(
    name, capability, dtype="bf16", heads="128", W=4, given=None
):
    """A kernel with its launch settings; the filter is fp32.

    Of packed sequences, with a bias and every gradient, unless ``given`` has
    None for them.
    """
    H, K, HV, V = HEADS[heads]
    C = 2 * H * K + HV * V
    back, given = name == "bwd", given or {}
    lean = back and given is TRAINED and dtype != "fp32" and capability == 90
    tile, settings = convolution.convolution_options(
        C, H, K, 2**15, back, lean
    )
    meta = ConvolutionMeta(C, H, K, W, SILU=True, NORM=H > 0, **tile)
    x, w = f"*{dtype}", "*fp32"
    bias, state, offsets, dstate, dinitial = (
        given.get(name, y)
        for name, y in zip(TRAINED, (w, x, "*i32", x, x), strict=True)
    )
    types = {"inputs": (x, w, bias, state), "cu_seqlens": offsets}
    types |= {"outputs": (x, x, x), "output_grads": (x, x, x, dstate)}
    types |= {"grads": (x, w, dinitial), "T": "i32", "N": "i32", "eps": "fp32"}
    constants = settings | {"META": meta}
    return build(KERNELS[name], capability, dtype, constants, types)


TRAINED = dict.fromkeys(
    ("bias", "initial_state", "cu_seqlens", "dstate", "dinitial")
)
full = pytest.mark.full
OTHERS = [x for x in SHARED_MEMORY if x != 90]
EACH_TIME = {("fwd", 80), ("bwd", 100)}


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=full)])
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_spills(name, dtype, tmp_path):
    """With every argument there is."""
    check_fits(compile_kernel(name, 90, dtype), 90, tmp_path, spilled=0)


@pytest.mark.parametrize("name", KERNELS)
def test_in_training(name, tmp_path):
    """Without what training seldom has: a row is few and wide words.

    A thread's four channels are one word of 64 bits (registers have 32: v2
    of b32), and a multiprocessor has 32 or 16 programs side by side.
    """
    compiled = compile_kernel(name, 90, "bf16", given=TRAINED)
    registers = check_fits(compiled, 90, tmp_path, spilled=0)
    assert registers <= {"fwd": 64, "bwd": 128}[name] + MORE_REGISTERS
    for operation in ("ld", "st"):
        found = re.findall(rf"{operation}\.global\S*", compiled.asm["ptx"])
        assert all(x.endswith(("v2.b32", "v4.b32")) for x in found), found


@pytest.mark.parametrize(
    "name, capability",
    [
        pytest.param(*x, marks=() if x in EACH_TIME else full)
        for x in itertools.product(KERNELS, OTHERS)
    ],
)
def test_on_other_gpus(name, capability, tmp_path):
    compiled = compile_kernel(name, capability, given=TRAINED)
    check_fits(compiled, capability, tmp_path, spilled=0)


@pytest.mark.parametrize(
    "heads, W",
    [
        ("odd", 3),
        pytest.param("96", 2, marks=full),
        pytest.param("256", 3, marks=full),
        pytest.param("none", 2, marks=full),
        pytest.param("one", 4, marks=full),
    ],
)
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_spills_at_other_sizes(name, heads, W, tmp_path):
    compiled = compile_kernel(name, 90, "bf16", heads, W)
    check_fits(compiled, 90, tmp_path, spilled=0)
