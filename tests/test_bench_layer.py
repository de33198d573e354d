"""Where a layer's time goes: kernels, told apart by their names."""

import pytest
import torch

from fastweights import bench_layer, timing
from fastweights.bench_layer import by_part, part_of
from fastweights.kernels import (
    compose,
    convolution,
    intra,
    intra_backward,
    output_norm,
    scan,
)

OURS = {
    "convolution": [convolution],
    "output norm": [output_norm],
    "recurrence": [compose, intra, intra_backward, scan],
}
THEIRS = {
    "projections": [
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        "sm90_xmma_gemm_bf16bf16_bf16f32",
        "void cutlass::Kernel2<cutlass_80_tensorop>",
    ],
    "rest": [
        "triton_poi_fused_add_view_4",
        "void at::native::reduce_kernel<128, 4>",
        "Memset (Device)",
    ],
}


@pytest.mark.parametrize("part", OURS)
def test_the_librarys_kernels(part):
    for module in OURS[part]:
        names = [
            name
            for name, x in vars(module).items()
            if name.endswith("_kernel") and hasattr(x, "arg_names")
            if x.__module__ == module.__name__
        ]
        assert names and {part_of(name) for name in names} == {part}


@pytest.mark.parametrize("part", THEIRS)
def test_other_kernels(part):
    assert {part_of(name) for name in THEIRS[part]} == {part}


def test_a_part_is_the_sum_of_its_kernels():
    kernels = [("scan_fwd_kernel", 2.0), ("intra_fwd_kernel", 3.0), ("", 1.0)]
    want = dict.fromkeys(bench_layer.PARTS, 0.0)
    assert by_part(kernels) == want | {"recurrence": 5.0, "rest": 1.0}


@pytest.mark.skipif(timing.ON_GPU, reason="there is a GPU")
def test_takes_a_gpu(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_layer"])
    with pytest.raises(SystemExit, match="no CUDA device"):
        bench_layer.main()


@pytest.mark.gpu
@pytest.mark.skipif(not timing.ON_GPU, reason="needs a GPU")
def test_the_parts_are_the_whole(monkeypatch):
    """Kernels that stand in no part's way, and gaps between them."""
    monkeypatch.setattr(bench_layer, "SEEDS", range(1))
    torch._dynamo.reset()
    *parts, whole, _ = bench_layer.layer()
    seconds = {row["part"]: row["seconds"] for row in parts}
    assert seconds.keys() == bench_layer.PARTS.keys()
    assert all(x > 0 for x in seconds.values())
    total = sum(seconds.values())
    assert 0.8 * whole["seconds"] < total < 1.2 * whole["seconds"]
