"""The output norm's kernels against PyTorch in fp64."""

import pytest
import torch
from support.graphs import in_one_graph
from support.inputs import assert_same
from support.norm_inputs import norm_inputs, norm_results
from support.operator_cases import OpChecks

from fastweights import ops
from fastweights.kernels import output_norm as kernels
from fastweights.ops.output_norm import gated_rms_norm


def judge(x, tolerance=1e-6, **options):
    """y and every gradient, against PyTorch in fp64."""
    with ops.record_backends() as ran:
        found = norm_results(gated_rms_norm, x, backend="triton", **options)
    assert ran == ["triton forward", "triton backward"]
    assert found["y"].dtype == x["o"].dtype
    for name, t in x.items():
        assert found[f"d{name}"].dtype == t.dtype, name
    exact = {name: t.double() for name, t in x.items()}
    assert_same(
        found, norm_results(gated_rms_norm, exact, **options), tolerance
    )
    return found


@pytest.fixture
def few(monkeypatch):
    """Four tiles of four rows at once, so that programs walk."""
    options = kernels.norm_options

    def lower(*of, **how):
        meta, settings = options(*of, **how)
        return meta._replace(BR=4), settings

    monkeypatch.setattr(kernels, "norm_options", lower)
    monkeypatch.setattr(kernels, "programs_at_once", lambda *_: 4)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("gate_activation", ["silu", "sigmoid", None])
@pytest.mark.parametrize("HV, V", [(3, 96), (1, 5)])
def test_rows_that_fill_no_tile(HV, V, gate_activation, groups):
    """37 tokens, of which no program has a whole number of tiles.

    An eps of the size of the squares, so that its place shows.
    """
    gate = gate_activation is not None
    x = norm_inputs(
        B=1, T=37, HV=HV, V=V, groups=groups, gate=gate, dtype=torch.float32
    )
    judge(x, gate_activation=gate_activation, eps=0.5)


@pytest.mark.parametrize("V", [128, 4100])
def test_tiles_as_they_ship(V):
    judge(norm_inputs(B=1, T=9, HV=2, V=V, dtype=torch.float32))


@pytest.mark.usefixtures("few")
def test_more_groups_than_programs():
    judge(norm_inputs(B=1, T=9, HV=6, V=8, groups=True, dtype=torch.float32))


@pytest.mark.usefixtures("few")
def test_half_precision_sums_its_gradients_in_fp32():
    kind = {"dtype": torch.float16, "single": torch.float32}
    found = judge(norm_inputs(V=32, **kind), 4e-4)
    x = {name: t.double() for name, t in norm_inputs(V=32, **kind).items()}
    ref = norm_results(gated_rms_norm, x)
    assert_same({"dw": found["dweight"]}, {"dw": ref["dweight"]}, 1e-6)


@pytest.mark.usefixtures("few")
def test_other_layouts():
    """An o and gates that no kernel can read as they lie; an eps of 0."""
    x = norm_inputs(V=8, dtype=torch.float32)
    ref = judge(x, eps=0.0)
    views = {
        "o": x["o"].mT.contiguous().mT,
        "gate": x["gate"].mT.contiguous().mT,
    }
    assert_same(judge(x | views, eps=0.0), ref, 0.0)
    views = {"gate": x["gate"].transpose(0, 1).contiguous().transpose(0, 1)}
    assert_same(judge(x | views, eps=0.0), ref, 0.0)


def test_a_slice_of_a_projection_is_not_copied():
    gate = norm_inputs()["gate"]
    rows = kernels.gate_rows(gate)
    assert rows.data_ptr() == gate.data_ptr() and rows.stride() == (36, 1)


def test_kernels_of_a_call_without_a_token():
    found = norm_results(
        gated_rms_norm, norm_inputs(T=0, dtype=torch.float32), backend="triton"
    )
    assert found["y"].shape == (2, 0, 12) and not found["dweight"].any()


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("gate", [True, False])
def test_the_operators_in_torchs_own_checks_and_compiled(gate):
    """opcheck's schema and shapes, and in one compiled graph."""
    x = norm_inputs(gate=gate, dtype=torch.float32)
    with OpChecks():
        want = norm_results(gated_rms_norm, x, backend="triton")
    with ops.record_backends() as ran, in_one_graph(gated_rms_norm) as run:
        found = norm_results(run, x, backend="triton")
    assert ran == ["triton forward", "triton backward"]
    assert_same(found, want, 0.0)


BUDGETS = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 3e-6}


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize(
    "V, gate_activation",
    [(128, "silu"), (256, "sigmoid"), (96, None), (4096, "silu")],
)
@pytest.mark.parametrize("dtype", BUDGETS)
def test_the_kernels_on_a_gpu_give_the_same_bits_twice(
    dtype, V, gate_activation, groups
):
    """And twice the same bits."""
    kind = {"dtype": dtype, "single": torch.float32, "device": "cuda"}
    gate = gate_activation is not None
    x = norm_inputs(B=1, T=4097, HV=2, V=V, groups=groups, gate=gate, **kind)
    first = judge(x, BUDGETS[dtype], gate_activation=gate_activation)
    again = norm_results(gated_rms_norm, x, gate_activation=gate_activation)
    assert_same(again, first, 0.0)
