"""MesaNet's kernel against steps of PyTorch in fp64."""

import pytest
import torch
from support.inputs import assert_same
from support.kernel_judge import deep_results, on_devices

from fastweights import ops
from fastweights.deep import mesa

HALF = {"o": 5e-3, "state": 5e-3, "dg": 2e-2, "dbeta": 2e-2, "dridge": 2e-2}
HALF |= {name: 1e-2 for name in ("dq", "dk", "dv", "dinitial_state")}


def mesa_inputs(
    *,
    B=2,
    T,
    H=2,
    K,
    V=None,
    N=None,
    gate=1.0,
    dtype=torch.float32,
    device="cpu",
):
    """Keys of unit length, a sigmoid's log decays, the layer's first ridge.

    N: sequences that have an initial state, none if 0.
    """
    torch.manual_seed(0)
    q, k = torch.randn(2, B, T, H, K)
    k, q = (t / t.norm(dim=-1, keepdim=True) for t in (k, q))
    x = {"q": q, "k": k, "v": torch.randn(B, T, H, V or K)}
    x = {name: t.to(dtype) for name, t in x.items()}
    x["g"] = gate * torch.nn.functional.logsigmoid(torch.randn(B, T, H))
    x |= {"beta": torch.rand(B, T, H), "ridge": 0.5 + torch.rand(H, K)}
    if N != 0:
        before = torch.randn(N or B, H, 2 * K, K) / K**0.5
        values = torch.randn(N or B, H, K, V or K)
        x["initial_state"] = torch.cat([before.mT @ before, values], -1)
    return {name: t.to(device) for name, t in x.items()}


def call(x, backend, cu_seqlens=None, steps=30):
    tokens = [x[name] for name in ("q", "k", "v", "g", "beta", "ridge")]
    state = x.get("initial_state")
    options = {"initial_state": state, "cu_seqlens": cu_seqlens}
    return mesa(*tokens, solver_steps=steps, backend=backend, **options)


def judge(x, tolerance=None, **options):
    with ops.record_backends() as ran:
        found = deep_results(call, x, "triton", **options)
    assert ran.count("triton solve") == 2
    assert all(what.startswith("triton") for what in ran)
    for name, t in x.items():
        assert found[f"d{name}"].dtype == t.dtype, name
    assert found["o"].dtype == x["q"].dtype
    exact = {name: t.double() for name, t in x.items()}
    with ops.record_backends() as ran:
        want = deep_results(call, exact, "torch", **options)
    assert not any("triton" in what for what in ran)
    single = x["q"].dtype == torch.float32
    assert_same(found, want, tolerance or (1e-5 if single else HALF))


@pytest.mark.parametrize(
    "T, K, V, dtype, N",
    [
        (7, 6, 4, torch.float32, 0),
        (64, 16, 8, torch.float16, 0),
        (131, 20, 20, torch.float32, None),
        (65, 64, 40, torch.float16, None),
    ],
)
def test_the_kernel_is_pytorchs_solution(T, K, V, dtype, N):
    """A chunk that fills its tile, ones that do not, and several."""
    judge(mesa_inputs(B=1, T=T, K=K, V=V, N=N, dtype=dtype))


@pytest.mark.parametrize("gate", [0.0, 1e-3, 20.0])
@on_devices(cpu=["float32"], cuda=["bfloat16"])
def test_gates(gate, device, dtype):
    """Nothing forgotten, next to nothing, all within a token or two."""
    sizes = {"B": 1, "T": 70, "H": 1, "K": 16}
    if device == "cuda":
        sizes = {"T": 500, "K": 128}
    judge(mesa_inputs(**sizes, gate=gate, dtype=dtype, device=device))


def test_gates_that_end_everything():
    """A log decay of -inf, after which the kernel's sums go on."""
    x = mesa_inputs(B=1, T=70, H=1, K=16, N=1)
    with torch.no_grad():
        want, state = call(x, "torch")
        x["g"][:, [0, 40, 66]] = -torch.inf
        rest = {n: t for n, t in x.items() if n != "initial_state"}
        parts = [
            call({n: cut(n, t, *ends) for n, t in rest.items()}, "torch")
            for ends in ((0, 40), (40, 66), (66, 70))
        ]
        o, last = call(x, "triton")
    assert o.isfinite().all()
    assert_same(
        {"o": o}, {"o": torch.cat([part[0] for part in parts], 1)}, 1e-5
    )
    assert_same({"state": last}, {"state": parts[-1][1]}, 1e-5)
    assert not torch.allclose(want, o)
    assert not torch.allclose(state, last)


def cut(name, t, start, end):
    """Tokens start to end; the gate of the first forgets nothing."""
    if name == "ridge":
        return t
    t = t[:, start:end].clone()
    if name == "g":
        t[:, 0] = 0
    return t


@on_devices(cpu=["float32"], cuda=["bfloat16"])
def test_packed_sequences_begin_anywhere(device, dtype):
    """An empty sequence, one token, and chunks that begin anywhere."""
    T, K = (100, 8) if device == "cpu" else (1000, 64)
    ends = torch.tensor([0, 5, 5, 6, 7 * T // 10, T], device=device)
    x = mesa_inputs(B=1, T=T, K=K, N=5, dtype=dtype, device=device)
    judge(x, cu_seqlens=ends)


def test_one_token_goes_on_without_the_kernel():
    x = mesa_inputs(T=1, K=8)
    with ops.record_backends() as ran:
        found = deep_results(call, x, "triton")
    assert "triton solve" not in ran
    assert_same(found, deep_results(call, x, "torch"), 1e-5)


def test_rows_that_are_solved_stay():
    """More steps than equations, and a query of 0."""
    x = mesa_inputs(B=1, T=20, K=4)
    x["q"][:, 3] = 0
    with torch.no_grad():
        few, many = (call(x, "triton", steps=n)[0] for n in (8, 60))
    assert many[:, 3].eq(0).all()
    assert_same({"o": many}, {"o": few}, 1e-5)


def test_what_the_kernel_does_not_take():
    message = "backend: got 'triton', which needs heads of at most 64, not 65"
    with pytest.raises(ValueError, match=message):
        call(mesa_inputs(B=1, T=1, H=1, K=65), "triton")
    x = mesa_inputs(T=8, K=4)
    with pytest.raises(ValueError, match="backend: got 'loop', need one of"):
        call(x, "loop")
    with pytest.raises(ValueError, match="float64"):
        call({name: t.double() for name, t in x.items()}, "triton")


ON_GPU = [(16, 16, 16), (63, 64, 64), (1000, 128, 128), (200, 100, 60)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32]
)
@pytest.mark.parametrize("T, K, V", ON_GPU)
def test_the_kernel_is_pytorchs_solution_on_a_gpu(T, K, V, dtype):
    K = min(K, 64) if dtype == torch.float32 else K
    B = max(2, 512 // T)  # of a few tokens the error is a throw of dice
    x = mesa_inputs(B=B, T=T, K=K, V=V, N=0, dtype=dtype, device="cuda")
    judge(x, 1e-4 if dtype == torch.float32 else HALF)
