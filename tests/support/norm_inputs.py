"""Inputs of the output norm, and its results with all gradients."""

import torch


def norm_inputs(
    *,
    B=2,
    T=5,
    HV=3,
    V=4,
    groups=False,
    gate=True,
    dtype=torch.float64,
    single=None,
    device="cpu",
):
    """Random inputs; ``single`` is the weight's dtype, if not o's.

    The gate is a slice of a wider projection.
    """
    torch.manual_seed(0)
    x = {"o": torch.randn(B, T, HV, V)}
    x["weight"] = torch.randn(HV, V) if groups else torch.randn(V)
    if gate:
        x["gate"] = torch.randn(B, T, HV * V + 24)
    kinds = {"weight": single or dtype}
    x = {name: t.to(device, kinds.get(name, dtype)) for name, t in x.items()}
    if gate:
        x["gate"] = x["gate"][..., 16 : 16 + HV * V]
    return x


def norm_results(function, inputs, **options):
    """y and every input's gradient, from a fixed random loss."""
    x = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    y = function(**x, **options)
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=generator).to(torch.bfloat16)
    y.backward(dy.to(y.device, y.dtype))
    return {"y": y.detach()} | {f"d{name}": t.grad for name, t in x.items()}
