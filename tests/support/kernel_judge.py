"""The judge of the kernels: devices, budgets, results of networks."""

import pytest
import torch

DEVICES = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def on_devices(*, cpu, cuda):
    """Parametrise by device and dtype: the interpreter's, and a GPU's."""
    devices = {"cpu": (cpu, ()), "cuda": (cuda, pytest.mark.gpu)}
    parameters = [
        pytest.param(device, getattr(torch, x), id=f"{device}-{x}", marks=mark)
        for device, (dtypes, mark) in devices.items()
        for x in dtypes
    ]
    return pytest.mark.parametrize("device, dtype", parameters)


BUDGET = {
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 5e-3,
}
# Operand dtype, torch's fp32 matmul precision, allowed relative error.
PRODUCTS = {
    "bf16": (torch.bfloat16, "highest", 5e-3),
    "fp16": (torch.float16, "highest", 5e-3),
    "fp32": (torch.float32, "highest", 1e-4),
    "tf32": (torch.float32, "high", 5e-3),
}
# The same for each result of a half precision call; fp32 has one for all.
HALF = {"o": 5e-3, "state": 5e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3}
HALF |= {"dinitial_state": 8e-3, "derase_key": 8e-3, "dg": 2e-2, "dbeta": 2e-2}


def deep_results(run, x, backend, use="both", **options):
    """o, the state and every input's gradient, of x as the dict that it is."""
    x = {name: t.detach().requires_grad_() for name, t in x.items()}
    found = dict(zip(("o", "state"), run(x, backend, **options), strict=True))
    loss = 0.0
    for name, t in found.items():
        if use in ("both", name):
            weight = torch.linspace(1, 2, t.numel(), device=t.device)
            loss = loss + (weight.reshape(t.shape) * t.double().sin()).sum()
    unused = {} if use == "both" else {"materialize_grads": True}
    grads = torch.autograd.grad(loss, x.values(), **unused)
    found |= {f"d{name}": g for name, g in zip(x, grads, strict=True)}
    return {name: t.detach() for name, t in found.items()}


def needs_memory(gigabytes):
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    return pytest.mark.skipif(
        free < gigabytes * 1e9, reason=f"needs {gigabytes} GB on the GPU"
    )
