"""mLSTM and normalised linear attention on the kernels, in half precision.

There they run once for the outputs and once more, in fp32, for what divides
them.
"""

import pytest
import torch
import torch.nn.functional as F
from support.kernel_judge import on_devices

import fastweights as fw
from fastweights import feature_maps, ops
from fastweights.checks import relative_error

RUNS = ["triton forward"] * 2 + ["triton backward"] * 2


def normaliser_inputs(dtype, device, T, K):
    """Two value heads to a key head, and every kind of gate."""
    generator = torch.Generator().manual_seed(1)
    x = {
        name: torch.randn(1, T, heads, K, generator=generator).to(dtype)
        for name, heads in (("q", 1), ("k", 1), ("v", 2))
    }
    x["g"] = F.logsigmoid(3 + torch.randn(1, T, 2, generator=generator))
    x["i"] = 3 * torch.randn(1, T, 2, generator=generator)
    for name, t in (("i", 0), ("i", 5), ("g", 7), ("g", 14), ("i", 14)):
        x[name][:, t, 1] = -torch.inf
    return {name: t.to(device) for name, t in x.items()}


def judge(function, x, state, budget, **options):
    """Results and gradients against PyTorch's chunks in fp64."""
    found, wanted = [], []
    for results, backend in ((found, "triton"), (wanted, "torch")):
        leaves = [*x.values(), state]
        if backend == "torch":
            leaves = [t.double() for t in leaves]
        leaves = [t.detach().requires_grad_() for t in leaves]
        *inputs, first = leaves
        m = torch.zeros_like(first[..., 0, 0])
        with ops.record_backends() as ran:
            o, last = function(
                **dict(zip(x, inputs, strict=True)),
                initial_state=(first, m) if "i" in x else first,
                eps=0.0,
                backend=backend,
                **options,
            )
            last = last[0] if "i" in x else last
            # small: o divides by next to nothing here, and a gradient of
            # fp16's q ends at 65504
            loss = torch.linspace(-0.1, 0.2, o.numel(), device=o.device)
            loss = (o * loss.view_as(o)).sum() + last.square().sum()
            grads = torch.autograd.grad(loss, leaves)
        if backend == "triton":
            assert ran == RUNS
        results.extend([o, last, *grads])
    assert found[0].dtype == x["v"].dtype
    names = ("o", "state", *(f"d{name}" for name in x), "dstate")
    for name, a, b in zip(names, found, wanted, strict=True):
        assert relative_error(a, b) < budget, name


def mlstm(dtype, device, T, K, budget, **options):
    offsets = torch.tensor([0, T // 2, T // 2, T], device=device)
    state = torch.randn(3, 2, K, K + 1, device=device)
    x = normaliser_inputs(dtype, device, T, K)
    judge(fw.mlstm, x, state, budget, cu_seqlens=offsets, **options)


def normalised(dtype, device, T, K, budget, **options):
    state = torch.rand(1, 2, K, K + 1, device=device)
    x = normaliser_inputs(dtype, device, T, K)
    x = {name: x[name] for name in "qkv"} | {"q": x["q"].abs()}
    options |= {"feature_map": feature_maps.relu, "normalize": True}
    judge(fw.linear_attention, x, state, budget, **options)


@pytest.mark.parametrize("member", [mlstm, normalised])
@on_devices(cpu=["float16"], cuda=["float16", "bfloat16"])
def test_kernels_with_a_normaliser_are_the_definition(member, device, dtype):
    torch.manual_seed(0)
    if device == "cpu":
        member(dtype, device, 24, 8, 2e-3, chunk_size=16)
    else:
        member(dtype, device, 300, 64, 1e-2)
