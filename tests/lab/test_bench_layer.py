"""Where a layer's time goes: kernels, told apart by their names."""

import statistics
from pathlib import Path

import pytest
import torch

from fastweights.kernels import (
    convolution_backward,
    convolution_forward,
    output_norm,
)
from fastweights.kernels.recurrence import compose, intra, intra_backward, scan
from fastweights_lab import records
from fastweights_lab.bench import layer as bench_layer
from fastweights_lab.bench import timing
from fastweights_lab.bench.layer import by_part, part_of
from fastweights_lab.program import main

OURS = {
    "convolution": [convolution_backward, convolution_forward],
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
def test_kernels_of_the_library(part):
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
def test_takes_a_gpu():
    with pytest.raises(SystemExit, match="no CUDA device"):
        main("bench", "layer")


@pytest.mark.gpu
@pytest.mark.skipif(not timing.ON_GPU, reason="needs a GPU")
def test_the_parts_are_the_whole(monkeypatch):
    """Kernels that stand in no part's way, and gaps between them."""
    monkeypatch.setattr(bench_layer, "SEEDS", range(1))
    torch._dynamo.reset()
    *parts, whole = bench_layer.rows()
    seconds = {row["part"]: row["seconds"] for row in parts}
    assert seconds.keys() == bench_layer.PARTS.keys()
    assert all(x > 0 for x in seconds.values())
    total = sum(seconds.values())
    assert 0.8 * whole["seconds"] < total < 1.2 * whole["seconds"]


def test_what_the_readme_says_of_a_layer():
    """And that all else takes less than 0.6 of the recurrence's median."""
    draws = {}
    for row in records.load("h200_layer")["rows"]:
        if "seed" in row:
            draws.setdefault(row["seed"], {})[row["part"]] = row["seconds"]
    assert len(draws) == 5
    names = ("convolution", "output norm", "rest")
    found = {"all": [], "projections": [], "recurrence": [], "else": []}
    for parts in draws.values():
        beside = sum(parts[name] for name in names)
        for name, times in found.items():
            times.append(1e3 * parts.get(name, beside))
    assert max(found["else"]) < 0.6 * statistics.median(found["recurrence"])
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    for name, words in {
        "all": "takes {} ms forward and backward on an H200",
        "projections": "{} ms are matrix products",
        "recurrence": "{} ms the recurrence",
        "else": "{} ms everything else",
    }.items():
        low, high = min(found[name]), max(found[name])
        assert words.format(f"{low:.1f} to {high:.1f}") in text, name
