"""The family's kernels as they ship, compiled for GPUs that are not here."""

import re

import pytest
import torch
from support.offline import (
    AS_RECORDED,
    DTYPES,
    SHARED_MEMORY,
    build_launch,
    check_fits,
    cuobjdump,
    unwaited_products,
)
from support.pairwise import all_but

from fastweights.kernels.gpu import GPU
from fastweights.kernels.recurrence import stages
from fastweights.kernels.recurrence.settings import CallKind

FP32 = DTYPES["fp32"]
STAGES = (
    "intra",
    "intra_unfactorable",
    "intra_again",
    "scan",
    "chunk_states",
    "scan_backward",
    "intra_backward",
    "intra_backward_unfactorable",
    "segment_maps",
    "segment_maps_backward",
    "gate_backward",
    "compose",
    "compose_backward",
)
SCANS = (
    "segment_maps",
    "scan",
    "chunk_states",
    "segment_maps_backward",
    "scan_backward",
)
# Stage, width of the gate, rule. An additive one without gates has no intra,
# and what takes no keys has no more rules.
LAUNCHES = [
    (stage, width, rule)
    for stage in STAGES
    for width in (0, 1, "K")
    for rule in ("additive", "erase", "delta")
    if stage != "intra" or rule != "additive" or width != 0
    if not stage.endswith(("unfactorable", "again")) or width == "K"
    if not stage.startswith("compose") or (width != 1 and rule != "erase")
    if stage != "gate_backward" or (width == 1 and rule != "erase")
]


def on_each(values, *, whole=(), step=1, launches=LAUNCHES):
    """Every launch with every value; most of them with the mark full.

    With the values in ``whole`` there are two launches of every stage: the
    delta rule with a gate per channel, the heaviest, and one of the others,
    which take turns. With each other value there is one launch of every
    stage, or of every step-th, and both launches and stages take turns.
    """
    chosen = []
    for i, value in enumerate(values):
        for j, stage in enumerate(STAGES):
            mine = [x for x in launches if x[0] == stage]
            if not mine:
                continue
            if value in whole:
                *others, heaviest = mine
                mine = [others[j % len(others)], heaviest]
            else:
                mine = [] if (i + j) % step else [mine[i % len(mine)]]
            chosen += [(*x, value) for x in mine]
    return all_but(chosen, [(*x, y) for x in launches for y in values])


OF_SCANS = [x for x in LAUNCHES if x[0] in SCANS]
OF_UNFACTORABLE = [x for x in LAUNCHES if x[0].endswith("unfactorable")]


def compile_stage(
    stage,
    width,
    rule,
    capability,
    D=128,
    dtype="bf16",
    *,
    precision="tf32",
    group=1,
    chunk_size=64,
    ragged=False,
):
    """A stage as calls launch it, with all the states that there can be.

    For head size D = K = V, or, if ragged, for V that no tile divides.
    """
    DG, V, low = D if width == "K" else width, D - 8 * ragged, DTYPES[dtype]
    gpu = GPU(SHARED_MEMORY[capability], 132, divmod(capability, 10))
    erases, delta = rule == "erase", rule != "additive"
    sizes = (4, 4 * group, D, V, DG, delta, chunk_size)
    kind = CallKind(gpu, low, *sizes, precision, erases)
    gate = FP32 if DG > 0 else None
    beta, erase_key = {"delta": (FP32, None), "erase": (None, low)}.get(
        rule, (None, None)
    )
    dtypes = stages.CallTensors(
        low, low, low, gate, beta, erase_key, FP32, None
    )
    forward = stages.forward_schedule(kind, dtypes, True).launches
    dtypes = dtypes._replace(do=low, dstate=FP32)
    backward = stages.backward_schedule(kind, dtypes, True).launches
    names = ["intra"] * (delta or DG > 0) + ["intra_unfactorable"] * (DG > 1)
    names += ["segment_maps", "compose", "scan"]
    found = dict(zip(names, forward, strict=True))
    names = ["intra_again"] * (DG > 1)
    names += ["segment_maps_backward", "compose_backward", "chunk_states"]
    names += ["scan_backward", "intra_backward"]
    names += ["gate_backward"] * (DG == 1)
    names += ["intra_backward_unfactorable"] * (DG > 1)
    found |= dict(zip(names, backward, strict=True))
    return build_launch(found[stage], capability)


def allowed(stage, width, capability, rule="delta"):
    """Bytes of registers that may spill, about 1.3 times the worst seen.

    Little spills in intra without a gate a channel, of which four programs
    share a multiprocessor (with two keys three, which hold a triangle until
    its inverse is known to be small), nothing in chunk_states before Hopper.
    A scan has the state, a product and, from Hopper on, the loads of two or
    three chunks to hold. The backward inside a chunk holds four score
    matrices and up to five tiles of gradients, with a gate a channel two
    more. Before Hopper and on 12.0 the operands of tl.dot live in registers
    too.
    """
    if stage.endswith("unfactorable"):
        return 2048
    if stage == "intra":
        return 768 if width == "K" or rule == "erase" else 200
    if stage != "intra_backward":
        return 640
    if width == "K":
        return 2048
    return 640 if capability in (90, 100) else 1536


@pytest.mark.parametrize(
    "stage, width, rule, capability",
    on_each(SHARED_MEMORY, whole=(90,), step=4),
)
def test_registers_and_products_in_bf16(
    stage, width, rule, capability, tmp_path
):
    compiled = compile_stage(stage, width, rule, capability)
    most = allowed(stage, width, capability, rule)
    check_fits(compiled, capability, tmp_path, most)
    products = stage not in ("intra", "compose", "compose_backward")
    products |= rule != "additive"
    products &= stage != "gate_backward"
    products |= (stage, width) == ("intra", "K")
    if capability in (90, 100) and products:
        kind = "wgmma" if capability == 90 else "tcgen05.mma"
        assert kind in compiled.asm["ptx"]
    assert not unwaited_products(compiled.asm["ttgir"])


@pytest.mark.parametrize(
    "stage, width, rule, ragged",
    on_each([False, True], whole=(False,), launches=OF_SCANS),
)
def test_tensor_memory_accelerator(stage, width, rule, ragged, tmp_path):
    """It loads the tiles of every scan, but of ragged heads.

    Tiles do not divide those. The others are judged by
    test_registers_and_products_in_bf16.
    """
    compiled = compile_stage(stage, width, rule, 90, ragged=ragged)
    if ragged:
        check_fits(compiled, 90, tmp_path, allowed(stage, width, 90))
    by_tma = "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert by_tma == (not ragged)


@pytest.mark.parametrize(
    "stage, width, rule, D",
    on_each([128, 256], whole=(128,), launches=[*OF_SCANS, *OF_UNFACTORABLE]),
)
def test_no_product_is_computed_twice(stage, width, rule, D):
    """Of 64 rows each group of four warps has columns of its own."""
    ttgir = compile_stage(stage, width, rule, 90, D).asm["ttgir"]
    found = re.findall(
        r"^(#mma\d*) = .*warpsPerCTA = \[(\d+), \d+\]", ttgir, re.M
    )
    by_rows = {layout: int(warps) for layout, warps in found}
    used = re.findall(r"warp_group_dot .*-> tensor<64x\d+xf32, (#\w+)>", ttgir)
    assert used or rule == "additive"
    assert {by_rows[layout] for layout in used} <= {4}


@pytest.mark.skipif(not AS_RECORDED, reason="registers are Triton 3.7's")
@pytest.mark.parametrize("rule", ["additive", "delta", "erase"])
@pytest.mark.parametrize(
    "stage", ["intra", "intra_backward", "intra_backward_unfactorable"]
)
def test_products_do_not_wait_for_each_other(stage, rule, tmp_path):
    """ptxas waits after each instruction where registers do not suffice."""
    compiled = compile_stage(stage, "K", rule, 90)
    sass = cuobjdump(compiled.asm["cubin"], "-sass", tmp_path)
    assert sass.count("WARPGROUP.DEPBAR") < sass.count("HGMMA") / 2


@pytest.mark.parametrize(
    "stage, width, rule, size",
    on_each([(64, 90), (256, 90), (64, 86), (256, 86)], step=4),
)
def test_other_head_sizes(stage, width, rule, size, tmp_path):
    D, capability = size
    compiled = compile_stage(stage, width, rule, capability, D)
    check_fits(compiled, capability, tmp_path, 3072 if D == 256 else 2048)


@pytest.mark.parametrize(
    "stage, width, rule, chunk_size", on_each([16, 32], step=3)
)
def test_other_chunk_sizes(stage, width, rule, chunk_size, tmp_path):
    compiled = compile_stage(
        stage, width, rule, 90, chunk_size=chunk_size, group=2
    )
    check_fits(
        compiled, 90, tmp_path, 4096 if "unfactorable" in stage else 1024
    )
    if stage.startswith("intra"):
        assert "wgmma" not in compiled.asm["ptx"]


@pytest.mark.parametrize("stage, width, rule, group", on_each([2], step=3))
def test_several_value_heads(stage, width, rule, group, tmp_path):
    """Their sums are two tiles more."""
    compiled = compile_stage(stage, width, rule, 90, group=group)
    check_fits(compiled, 90, tmp_path, 3072)


@pytest.mark.parametrize(
    "stage, width, rule, products",
    on_each([("tf32x3", 86), ("tf32x3", 90), ("tf32", 90)], step=4),
)
def test_fp32(stage, width, rule, products, tmp_path):
    """Three products keep each operand twice, and spill.

    The scans in full fp32 do not run well before Hopper, where operands are
    in registers too: they fit, and most of what they hold is spilled.
    """
    precision, capability = products
    compiled = compile_stage(
        stage, width, rule, capability, dtype="fp32", precision=precision
    )
    check_fits(
        compiled, capability, tmp_path, 4096 if capability == 90 else 16384
    )


def test_a_rank_takes_no_more_registers(tmp_path):
    """Packed, with a gate per channel: no more registers than of one GPU."""
    gpu, low = GPU(SHARED_MEMORY[90], 132, (9, 0)), torch.bfloat16
    sizes = (4, 4, 128, 128, 128, True, 64, "tf32", False)
    kind = CallKind(gpu, low, *sizes, on_ranks=True)
    dtypes = stages.CallTensors(
        low, low, low, FP32, FP32, None, FP32, torch.int64
    )
    back = dtypes._replace(do=low, dstate=FP32)
    schedules = (
        stages.forward_schedule(kind, dtypes, True),
        stages.backward_schedule(kind, back, True),
    )
    launches = [
        launch
        for schedule in schedules
        for launch in schedule.launches
        if getattr(launch.arguments[-1], "RANKS", False)
    ]
    assert len(launches) == 9
    for launch in launches:
        check_fits(build_launch(launch, 90), 90, tmp_path, 200)
