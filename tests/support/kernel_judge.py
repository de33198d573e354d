"""The judge of the kernels: inputs, the loop in fp64, the budgets."""

import pytest
import torch
import torch.nn.functional as F

from fastweights.checks import relative_error

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
HALF |= {"dinitial_state": 8e-3, "dg": 2e-2, "dbeta": 2e-2}
LENGTHS = (1, 63, 64, 65, 1000)
SIZES = (
    (60, 100),
    (64, 64),
    (100, 16),
    (8, 60),
    (128, 129),
    (64, 512),
    (256, 128),
    (128, 256),
    (32, 32),
)
HEADS = ((2, 2), (2, 4), (1, 8))


def pairwise_cases():
    """Every length with every head size; the rest takes turns.

    The long one has few heads, large chunks and no wide values: the
    interpreter's time goes by the number of programs. Each length takes some
    of the sizes, and each size some of the lengths; the rest has the mark
    full.
    """
    cases = []
    for i, T in enumerate(LENGTHS):
        for j, (K, V) in enumerate(SIZES):
            H, HV = HEADS[(i + j) % 3] if T < 1000 else (1, 2)
            chunk_size = (16, 32, 64)[(i + 2 * j) % 3] if T < 1000 else 64
            initial = (i + j) % 2 == 0
            dtype = (torch.float32, torch.float16)[(i + j // 2) % 2]
            name = f"T{T}-K{K}-V{V}-H{H}-HV{HV}-C{chunk_size}"
            name += f"-{str(dtype)[6:]}" + "-S0" * initial
            shape = (1, T, H, HV, K, V)
            case = shape, dtype, chunk_size, initial
            left_out = (i + j) % 3 or V > 128 if T == 1000 else (i + j) % 2
            marks = pytest.mark.full if left_out else ()
            cases.append(pytest.param(*case, id=name, marks=marks))
    return cases


def inputs(shape, dtype, initial=False, device="cpu", seed=0):
    """Random q, unit keys k, values v, and a state or None."""
    B, T, H, HV, K, V = shape
    torch.manual_seed(seed)
    options = {"dtype": dtype, "device": device}
    q = torch.randn(B, T, H, K, **options)
    k = F.normalize(torch.randn(B, T, H, K, device=device), dim=-1).to(dtype)
    v = torch.randn(B, T, HV, V, **options)
    state = torch.randn(B, HV, K, V, device=device) if initial else None
    return q, k, v, state


def loop(q, k, v, scale, state=None):
    """S_t = S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t, one by one."""
    q, k, v = q.double(), k.double(), v.double()
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    S = 0.0 if state is None else state.double()
    o = torch.empty_like(v)
    for t in range(q.shape[1]):
        S = S + k[:, t, :, :, None] * v[:, t, :, None, :]
        o[:, t] = scale * (q[:, t, :, None, :] @ S)[:, :, 0]
    return o, S


def judge(function, tensors, *, tol, scale=0.3, **options):
    """Outputs and state of ``function`` are within ``tol`` of the loop."""
    q, k, v, state = tensors
    o, S = function(q, k, v, scale=scale, initial_state=state, **options)
    o_ref, S_ref = loop(q, k, v, scale, state)
    assert o.dtype == v.dtype and o.shape == v.shape
    assert S.dtype == torch.float32
    errors = relative_error(o, o_ref), relative_error(S, S_ref)
    assert max(errors) <= tol, errors
    return errors


def state_results(run, x, backend, use="both", **options):
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
