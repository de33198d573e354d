"""TTT-Linear's kernels against the chunks of PyTorch in fp64."""

import pytest
import torch
from support.graphs import in_one_graph
from support.inputs import assert_same
from support.kernel_judge import DEVICES, deep_results, on_devices
from support.operator_cases import OpChecks

from fastweights import ops
from fastweights.deep import ttt
from fastweights.ops.common import backends

TRITON = ["triton forward", "triton backward"]
HALF = {"o": 5e-3, "state": 5e-3, "drate": 2e-2, "dstep_scale": 2e-2}
HALF |= {f"d{name}": 1e-2 for name in ("q", "k", "v", "W", "b")}
HALF |= {f"d{name}": 1e-2 for name in ("weight", "bias", "initial_state")}


def ttt_inputs(
    *, B=2, T, H=2, K, C, dtype=torch.float32, device="cpu", initial=True
):
    """Keys of unit length, rates as the layer has them at most, step_scale."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, T, H, K)
    k, q = k / k.norm(dim=-1, keepdim=True), q / K**0.5
    x = {"q": q, "k": k, "v": v}
    x = {name: t.to(dtype) for name, t in x.items()}
    x |= {"rate": torch.rand(B, T, H) / K**0.5}
    x |= {"W": torch.randn(H, K, K) / K**0.5, "b": torch.randn(H, K)}
    x |= {"weight": 0.5 + torch.rand(H, K), "bias": torch.randn(H, K)}
    x |= {"step_scale": 1 / torch.arange(1, C + 1) + 0.1 * torch.rand(C)}
    if initial:
        learned = torch.randn(B, H, 1, K * K + K) / K**0.5
        x["initial_state"] = torch.cat([learned, 0 * learned], 2)
    return {name: t.to(device) for name, t in x.items()}


def call(x, backend):
    *tokens, W, b, weight, bias, step_scale = (
        t for name, t in x.items() if name != "initial_state"
    )
    state = x.get("initial_state")
    options = {"initial_state": state, "backend": backend}
    return ttt(*tokens, [(W, b)], (weight, bias), step_scale, **options)


def judge(x, use="both", tolerance=None):
    with ops.record_backends() as ran:
        found = deep_results(call, x, "triton", use)
    assert ran == TRITON
    for name, t in x.items():
        assert found[f"d{name}"].dtype == t.dtype, name
    assert found["o"].dtype == x["q"].dtype
    exact = {name: t.double() for name, t in x.items()}
    with ops.record_backends() as ran:
        want = deep_results(call, exact, "torch", use)
    assert not ran
    single = x["q"].dtype == torch.float32
    assert_same(found, want, tolerance or (1e-5 if single else HALF))


@pytest.mark.parametrize(
    "T, K, C, dtype",
    [
        (9, 16, 3, torch.float32),
        (35, 16, 16, torch.float16),
        (16, 6, 4, torch.float32),
        (33, 20, 10, torch.float16),
    ],
)
def test_the_kernels_are_pytorchs_mini_batches(T, K, C, dtype):
    """A mini-batch that fills its tile and ones that do not, and a rest."""
    judge(ttt_inputs(T=T, K=K, C=C, dtype=dtype))


@on_devices(cpu=["float32"], cuda=["float16", "bfloat16"])
def test_weights_of_a_layer_at_its_start(device, dtype):
    """So small that LN's slope is large: what a rounding leaves would grow."""
    T, K = (128 if device == "cpu" else 2048), 64
    where = {"dtype": dtype, "device": device, "initial": False}
    x = ttt_inputs(B=1, T=T, K=K, C=16, **where)
    x["W"] *= 0.02 * K**0.5
    x["v"] /= K**0.5
    x["b"], x["bias"] = 0 * x["b"], 0 * x["bias"]
    x["weight"] = torch.ones_like(x["weight"])
    x["rate"] /= K**0.5
    judge(x)


@pytest.mark.parametrize("use", ["o", "state"])
def test_one_result_from_nothing_learned(use):
    """The state is a difference of weights, and so is its gradient."""
    judge(ttt_inputs(T=8, K=8, C=4, initial=False), use=use, tolerance=1e-4)


def test_a_mini_batch_that_teaches_nothing():
    """A last row of 0, to which the layer clamps."""
    x = ttt_inputs(T=8, K=8, C=4)
    x["step_scale"][-1] = 0.0
    judge(x)


def test_a_long_way_back():
    """100 mini-batches: the weights of the first are found from the last."""
    judge(ttt_inputs(B=1, T=200, H=1, K=8, C=2), tolerance=1e-4)


def test_views_that_are_not_contiguous():
    x = ttt_inputs(T=8, K=8, C=4)
    views = {n: t.mT.contiguous().mT for n, t in x.items() if t.dim() > 1}
    with OpChecks():
        found = deep_results(call, x | views, "triton")
    assert_same(found, deep_results(call, x, "triton"), 0.0)


def test_kept_for_a_backward_only():
    x = ttt_inputs(T=8, K=8, C=4, initial=False)
    with ops.record_backends() as ran:
        o, _ = call(x, "triton")
    assert ran == TRITON[:1] and not o.requires_grad
    x["q"].requires_grad_()
    (dq,) = torch.autograd.grad(
        call(x, "triton")[0].sum(), x["q"], create_graph=True
    )
    with pytest.raises(NotImplementedError, match='backend="torch"'):
        dq.sum().backward()


@DEVICES
def test_in_one_compiled_graph(device):
    backend, tolerance, x = "aot_eager", 1e-6, ttt_inputs(T=9, K=8, C=4)
    if device == "cuda":
        x = ttt_inputs(T=100, K=64, C=16, device=device)
        backend, tolerance = "inductor", 1e-5
    with ops.record_backends() as ran, in_one_graph(call, backend) as run:
        found = deep_results(run, x, "triton")
    assert ran == TRITON
    assert_same(found, deep_results(call, x, "triton"), tolerance)


def test_what_the_kernel_does_not_take():
    x = ttt_inputs(T=8, K=8, C=4)
    message = "backend: got 'triton', which needs one layer, heads of at most"
    with pytest.raises(ValueError, match=message):
        call(ttt_inputs(B=1, T=1, H=1, K=65, C=4), "triton")
    with pytest.raises(ValueError, match=message):
        call(ttt_inputs(T=1, K=4, C=17), "triton")
    two = 2 * [(x["W"], x["b"])]
    tokens = (x[name] for name in ("q", "k", "v", "rate"))
    with pytest.raises(ValueError, match=message):
        ttt(
            *tokens,
            two,
            (x["weight"], x["bias"]),
            x["step_scale"],
            backend="triton",
        )
    with pytest.raises(ValueError, match="backend: got 'loop', need one of"):
        call(x, "loop")
    with pytest.raises(ValueError, match="float64"):
        call({name: t.double() for name, t in x.items()}, "triton")


@pytest.mark.parametrize(
    ("capability", "dtype", "want"),
    [
        ((9, 0), torch.bfloat16, "triton"),
        ((10, 0), torch.float16, "triton"),
        ((9, 0), torch.float32, "torch"),
        ((8, 0), torch.bfloat16, "torch"),
    ],
)
def test_where_the_kernel_is_chosen(capability, dtype, want, monkeypatch):
    monkeypatch.setattr(backends, "resolve_backend", lambda *_: "triton")
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda _: capability
    )
    there = torch.device("cuda")
    assert backends.deep_backend("auto", there, dtype) == want
    assert backends.deep_backend("triton", there, dtype) == "triton"
    monkeypatch.setattr(backends, "resolve_backend", lambda *_: "torch")
    assert backends.deep_backend("auto", there, dtype) == "torch"


ON_GPU = [(16, 16, 16), (250, 64, 16), (1000, 128, 16)]
ON_GPU += [(99, 100, 7), (260, 64, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32]
)
@pytest.mark.parametrize("T, K, C", ON_GPU)
def test_the_kernels_are_pytorchs_mini_batches_on_a_gpu(T, K, C, dtype):
    K = min(K, 64) if dtype == torch.float32 else K
    judge(ttt_inputs(T=T, K=K, C=C, dtype=dtype, device="cuda"))


@pytest.mark.gpu
def test_deterministic_on_gpu():
    x = ttt_inputs(B=4, T=500, H=8, K=64, C=16, dtype=torch.bfloat16)
    x = {name: t.cuda() for name, t in x.items()}
    first, second = (deep_results(call, x, "triton") for _ in range(2))
    assert_same(second, first, 0.0)
