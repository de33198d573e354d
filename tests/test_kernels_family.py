"""The family's kernels, every gate and both rules, against the fp64 loop."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from inputs import GATES, RULES, member
from kernel_judge import BUDGET, PRODUCTS, compiled, interpreted

import fastweights as fw
from fastweights.checks import relative_error
from fastweights.kernels.launch import forward

pytestmark = pytest.mark.usefixtures("poison")

MEMBERS = list(itertools.product(GATES, RULES))
ALL = pytest.mark.parametrize("gate, rule", MEMBERS)
# T, H, HV, K, V, chunk size, dtype, initial state
CASES = {
    "one-token": (1, 2, 4, 60, 100, 64, torch.float32, True),
    "less-than-a-chunk": (63, 1, 2, 64, 129, 64, torch.float16, False),
    "one-chunk": (64, 1, 2, 100, 64, 64, torch.float32, False),
    "small-chunks": (65, 2, 2, 60, 100, 16, torch.float16, True),
    "half-chunks": (65, 1, 8, 64, 64, 32, torch.float32, True),
    "long": (1000, 1, 1, 64, 64, 64, torch.float32, True),
    "wide-keys": (70, 1, 1, 256, 64, 64, torch.float16, True),
    "wide-values": (33, 1, 2, 64, 512, 16, torch.float32, False),
}
STRENGTHS = (0.0, -1e-3, -5.0, -10.0, -20.0)


def run(x, *, chunk_size=64, cu_seqlens=None, scale=0.3, **options):
    """The kernels' forward on a member's inputs."""
    x = {name: x.get(name) for name in ("q", "k", "v", "g", "beta")} | x
    state = x.pop("initial_state", None)
    return forward(
        **x,
        scale=scale,
        initial_state=state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        **options,
    )


def judge(x, *, tol, cu_seqlens=None, scale=0.3, **options):
    """Output and states are within ``tol`` of the loop's; their errors."""
    o, state, _ = run(x, cu_seqlens=cu_seqlens, scale=scale, **options)
    o_ref, state_ref = fw.linear_recurrence(
        **{name: t.double() for name, t in x.items()},
        cu_seqlens=cu_seqlens,
        scale=scale,
        backend="loop",
    )
    assert o.dtype == x["v"].dtype and state.dtype == torch.float32
    assert o.shape == o_ref.shape and state.shape == state_ref.shape
    errors = relative_error(o, o_ref), relative_error(state, state_ref)
    assert max(errors) <= tol, errors
    return errors


@interpreted
@ALL
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loop(gate, rule, case):
    T, H, HV, K, V, chunk_size, dtype, initial = case
    x = member(gate, rule, T=T, H=H, HV=HV, K=K, V=V, dtype=dtype)
    if not initial:
        del x["initial_state"]
    judge(x, tol=BUDGET[dtype], chunk_size=chunk_size)


@interpreted
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", ["fixed", "scalar", "vector"])
@pytest.mark.parametrize("strength", STRENGTHS)
def test_constant_gates(gate, rule, strength):
    x = member(gate, rule, T=130, K=64, V=64, HV=1, strength=strength)
    judge({n: t.float() for n, t in x.items()}, tol=1e-4)


@interpreted
@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_gates_that_open_again(gate):
    """What is left after a strong gate is as exact as what comes later."""
    x = member(gate, "delta", T=128, K=64, V=64, strength=-1e-3)
    x = {n: t.float() for n, t in x.items()}
    x["g"][:, :40] = -20
    judge(x, tol=1e-4)


@interpreted
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_identical_keys(gate, beta):
    x = member(gate, "delta", T=100, K=64, V=64, strength=-1e-3)
    x = {n: t.float() for n, t in x.items()}
    x["k"] = x["k"][:, :1].expand_as(x["k"])
    x["beta"].fill_(beta)
    judge(x, tol=1e-4)


@interpreted
@ALL
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences(gate, rule, dtype):
    """Lengths of 0, at both ends too, of 1, of a chunk and of more."""
    lengths = torch.tensor([0, 37, 0, 0, 1, 16, 35, 0])
    cu_seqlens = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(dtype)
    N, T = len(lengths), int(lengths.sum())
    x = member(gate, rule, T=T, N=N, K=64, V=33)
    x = {n: t.float() for n, t in x.items()}
    judge(x, tol=1e-4, cu_seqlens=cu_seqlens, chunk_size=16)
    x = {n: t for n, t in x.items() if n != "initial_state"}
    judge(x, tol=1e-4, cu_seqlens=cu_seqlens, chunk_size=32)


@interpreted
@ALL
def test_non_contiguous_views(gate, rule):
    x = member(gate, rule, B=2, T=20, K=33, V=20, dtype=torch.float32)
    views = {
        name: t.movedim(0, -1).contiguous().movedim(-1, 0)
        for name, t in x.items()
    }
    assert not any(t.is_contiguous() for t in views.values() if t.dim() > 1)
    judge(views, tol=1e-4, chunk_size=16)


@interpreted
@ALL
def test_states_kept_for_the_backward(gate, rule):
    """h holds, at its chunk's slot, the state that enters each chunk."""
    cu_seqlens = torch.tensor([0, 20, 20, 57])
    x = member(gate, rule, T=57, N=3, K=64, V=33, dtype=torch.float32)
    *_, saved = run(x, cu_seqlens=cu_seqlens, chunk_size=16, keep_states=True)
    slot = {0: 0, 16: 1, 20: 3, 36: 4, 52: 5}  # 20 // 16 + 2, and onwards
    for t, i in slot.items():
        n = 0 if t < 20 else 2
        start = int(cu_seqlens[n])
        state = x["initial_state"][n : n + 1]
        if t > start:
            part = {
                name: y[:, start:t] if y.dim() > 1 else y
                for name, y in x.items()
                if name != "initial_state"
            }
            _, state = fw.linear_recurrence(**part, initial_state=state)
        assert relative_error(saved.h[i], state[0]) < 1e-5


@pytest.mark.gpu
@compiled
@ALL
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    "dtype, precision, tol", PRODUCTS.values(), ids=PRODUCTS
)
def test_products_on_gpu(gate, rule, D, dtype, precision, tol, request):
    request.getfixturevalue("matmul_precision")(precision)
    x = member(gate, rule, B=2, T=1000, H=2, HV=4, K=D, V=D)
    wide = ("initial_state", "g", "beta")
    x = {
        name: t.to("cuda", torch.float32 if name in wide else dtype)
        for name, t in x.items()
    }
    print(*(f"{error:.1e}" for error in judge(x, tol=tol)))


@pytest.mark.gpu
@compiled
@ALL
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loop_on_gpu(gate, rule, case):
    T, H, HV, K, V, chunk_size, _, initial = case
    x = member(gate, rule, T=T, H=H, HV=HV, K=K, V=V, dtype=torch.bfloat16)
    if not initial:
        del x["initial_state"]
    x = {name: t.cuda() for name, t in x.items()}
    judge(x, tol=5e-3, chunk_size=chunk_size)


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", ["scalar", "vector"])
@pytest.mark.parametrize("strength", STRENGTHS)
def test_constant_gates_on_gpu(gate, rule, strength):
    x = member(gate, rule, T=500, K=64, V=64, strength=strength)
    judge({n: t.cuda().float() for n, t in x.items()}, tol=1e-4)


@pytest.mark.gpu
@compiled
@ALL
def test_packed_sequences_on_gpu(gate, rule):
    lengths = torch.tensor([0, 137, 0, 0, 1, 64, 350, 0])
    cu_seqlens = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int().cuda()
    N, T = len(lengths), int(lengths.sum())
    x = member(gate, rule, T=T, N=N, K=64, V=64)
    x = {n: t.cuda().float() for n, t in x.items()}
    judge(x, tol=1e-4, cu_seqlens=cu_seqlens)
