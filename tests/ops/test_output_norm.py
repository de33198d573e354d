"""The output norm: the formula in fp64, gradients, and what it refuses."""

import pytest
import torch
from support.graphs import in_one_graph
from support.inputs import assert_same
from support.norm_inputs import norm_inputs, norm_results
from support.refused import refused

from fastweights.layers import OutputNorm
from fastweights.ops.output_norm import gated_rms_norm


def literal(o, weight, gate=None, gate_activation="silu", eps=1e-5):
    """The formula, one head of one token at a time."""
    B, T, HV, V = o.shape
    rows = []
    for b in range(B):
        for t in range(T):
            for h in range(HV):
                x = o[b, t, h]
                w = weight if weight.dim() == 1 else weight[h]
                y = x / (sum(z * z for z in x) / V + eps) ** 0.5 * w
                if gate is not None:
                    a = gate[b, t, h * V : (h + 1) * V]
                    y = y / (1 + torch.exp(-a))
                    if gate_activation == "silu":
                        y = y * a
                rows.append(y)
    return torch.cat(rows).view(B, T, HV * V)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("gate_activation", ["silu", "sigmoid", None])
def test_it_is_the_formula(gate_activation, groups):
    """An eps of the size of the squares, so that its place shows."""
    x = norm_inputs(groups=groups, gate=gate_activation is not None)
    options = {"gate_activation": gate_activation, "eps": 0.5}
    found = norm_results(gated_rms_norm, x, **options)
    assert_same(found, norm_results(literal, x, **options), 1e-14)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("gate_activation", ["silu", "sigmoid"])
def test_gradcheck(gate_activation, groups):
    x = norm_inputs(B=1, T=2, groups=groups)
    inputs = [t.detach().requires_grad_() for t in x.values()]

    def function(*inputs):
        return gated_rms_norm(
            *inputs, gate_activation=gate_activation, eps=0.1
        )

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_rounded_once(autocast):
    x = norm_inputs(T=40, dtype=torch.bfloat16, single=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = norm_results(gated_rms_norm, x)
    ref = norm_results(
        gated_rms_norm, {name: t.double() for name, t in x.items()}
    )
    assert found["y"].dtype == torch.bfloat16
    for name, t in x.items():
        assert found[f"d{name}"].dtype == t.dtype, name
    assert_same(found, ref, 2.5e-3)
    assert_same({"dw": found["dweight"]}, {"dw": ref["dweight"]}, 1e-6)


@pytest.mark.parametrize("gate_activation", ["silu", "sigmoid", None])
def test_the_layer_calls_it(gate_activation):
    """With a weight per group, which Mamba-2 puts in the other's place."""
    x = norm_inputs(groups=True, gate=gate_activation is not None)
    norm = OutputNorm(4, gate_activation, eps=0.5)
    norm.weight = torch.nn.Parameter(x.pop("weight"))
    ref = literal(x["o"], norm.weight, x.get("gate"), gate_activation, 0.5)
    torch.testing.assert_close(norm(**x), ref)


def test_a_call_without_a_token_has_gradients():
    found = norm_results(gated_rms_norm, norm_inputs(T=0))
    assert found["y"].shape == (2, 0, 12) and not found["dweight"].any()


def test_in_one_compiled_graph():
    x = norm_inputs()
    with in_one_graph(gated_rms_norm) as function:
        assert_same(
            norm_results(function, x), norm_results(gated_rms_norm, x), 1e-12
        )


X = norm_inputs(dtype=torch.float32)


@refused("""
o=1
    TypeError: o: got int, need a Tensor
o=X["o"].int()
    TypeError: o: got torch.int32, need one of (torch.float64, torch.float32,
    torch.float16, torch.bfloat16)
o=X["o"][0]
    ValueError: o: got shape [5, 3, 4], need [B, T, HV, V] with HV, V >= 1
weight=torch.ones(3)
    ValueError: weight: got shape [3], need [4] or [3, 4]
gate=X["gate"][:, 1:]
    ValueError: gate: got shape [2, 4, 12], need [2, 5, 12]
gate=X["gate"].to("meta")
    ValueError: gate: got device meta, need o's, cpu
gate_activation="relu"
    ValueError: gate_activation: got 'relu', need one of
    ('silu', 'sigmoid', None)
gate_activation=None
    ValueError: gate_activation: got None, need the gate's
eps=-1.0
    ValueError: eps: got -1.0, need >= 0
backend="loop"
    ValueError: backend: got 'loop', need one of ('auto', 'triton', 'torch')
{name: t.double() for name, t in X.items()} | {"backend": "triton"}
    ValueError: backend: got 'triton', which needs tensors in float32, float16
    or bfloat16, not float64
""")
def test_what_does_not_fit_is_named(wrong, error):
    with error():
        gated_rms_norm(**X | eval(f"dict({wrong})"))
