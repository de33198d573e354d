"""Mamba's selective scan: its step, its loop, and what it refuses."""

import functools

import pytest
import torch
from inputs import results, same
from torch._dynamo.testing import CompileCounterWithBackend

import fastweights as fw
from fastweights import ops
from fastweights.reference import steps


def tokens(
    *,
    batch=2,
    T=20,
    D=3,
    N=5,
    dtype=torch.float64,
    strength=None,
    device="cpu",
    seed=0,
):
    """Random inputs; ``strength`` is dt A if it is to be the same for all."""
    torch.manual_seed(seed)
    x = {
        "x": torch.randn(batch, T, D),
        "dt": torch.rand(batch, T, D) + 0.01,
        "A": -(torch.rand(D, N) * 3).exp(),
        "B": torch.randn(batch, T, N),
        "C": torch.randn(batch, T, N),
        "D": torch.randn(D),
        "initial_state": torch.randn(batch, D, N),
    }
    if strength is not None:
        x["dt"], x["A"] = torch.ones(batch, T, D), torch.full((D, N), strength)
    wide = torch.promote_types(dtype, torch.float32)
    narrow = ("x", "B", "C")
    return {
        name: t.to(device, dtype if name in narrow else wide)
        for name, t in x.items()
    }


def explicit(x, dt, A, B, C, D=None, initial_state=None):
    """No recurrence: what token j wrote, decayed by all tokens up to t."""
    g = dt[..., None] * A  # [B, T, D, N]
    t = torch.arange(x.shape[1])
    between = (t[:, None] < t) & (t <= t[:, None, None])  # j < i <= t
    decay = torch.einsum("tji,bidn->btjdn", between.to(g.dtype), g).exp()
    decay = decay * (t <= t[:, None])[:, :, None, None]  # j <= t
    h = torch.einsum("btjdn,bjd,bjn->btdn", decay, dt * x, B)
    if initial_state is not None:
        h = h + g.cumsum(dim=1).exp() * initial_state[:, None]
    y = torch.einsum("btdn,btn->btd", h, C)
    return y if D is None else y + D * x, h[:, -1]


def test_step():
    x = tokens(T=1)
    h, A = x["initial_state"], x["A"]
    named = {name: x[name][:, 0] for name in ("x", "dt", "B", "C")}
    found, y = steps.selective(h, A=A, **named)
    ref = explicit(**x | {"D": torch.zeros(3)})
    torch.testing.assert_close((y[:, None], found), ref)


def test_step_in_a_scan():
    x = tokens()
    inputs = [x[name] for name in ("x", "dt", "A", "B", "C")]
    inputs[2] = x["A"].expand(2, 20, 3, 5)
    found = steps.scan(steps.selective, x["initial_state"], *inputs)
    ref = fw.selective_scan(**x | {"D": None}, backend="loop")
    torch.testing.assert_close(found, ref, rtol=0, atol=0)


@pytest.mark.parametrize("strength", [None, -1e-3, -30.0])
@pytest.mark.parametrize("without", [(), ("D",), ("D", "initial_state")])
@pytest.mark.parametrize("backend", ["auto", "loop"])
def test_loop_is_the_explicit_sum(strength, without, backend):
    x = {
        name: t
        for name, t in tokens(strength=strength).items()
        if name not in without
    }
    found = results(fw.selective_scan, x, backend=backend)
    same(found, results(explicit, x), 1e-11)


@pytest.mark.parametrize("use", ["o", "state"])
def test_gradients_from_one_result(use):
    x = tokens()
    found = results(fw.selective_scan, x, use=use)
    same(found, results(explicit, x, use=use), 1e-11)


@pytest.mark.parametrize("backend", ["auto", "loop"])
def test_gradients_of_gradients(backend):
    x = tokens(batch=1, T=3, D=2, N=2)
    *positional, state = (t.requires_grad_() for t in x.values())

    def function(initial_state, *inputs):
        return fw.selective_scan(
            *inputs, initial_state=initial_state, backend=backend
        )

    assert torch.autograd.gradcheck(function, (state, *positional))
    assert torch.autograd.gradgradcheck(function, (state, *positional))


def test_two_halves_are_the_whole():
    x = tokens(T=21)
    y, state = fw.selective_scan(**x)
    whole = {name: x[name] for name in ("A", "D")}
    outputs, last = [], x["initial_state"]
    for part in (slice(0, 8), slice(8, 21)):
        cut = {n: x[n][:, part] for n in ("x", "dt", "B", "C")}
        o, last = fw.selective_scan(**cut, **whole, initial_state=last)
        outputs.append(o)
    torch.testing.assert_close((torch.cat(outputs, 1), last), (y, state))


@pytest.mark.parametrize("single", [False, True], ids=["all", "some"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16]
)
def test_dtypes(dtype, single):
    """dt, A and D may be fp32 beside any x; arithmetic is in fp32."""
    x = tokens(dtype=dtype)
    for name in ("dt", "A", "D"):
        x[name] = x[name].to(torch.float32 if single else dtype)
    found = results(fw.selective_scan, x)
    wide = torch.promote_types(dtype, torch.float32)
    assert (found["o"].dtype, found["state"].dtype) == (dtype, wide)
    for name in x:
        assert found[f"d{name}"].dtype == x[name].dtype, name
    exact = {name: t.double() for name, t in x.items()}
    narrowest = torch.float32 if single else wide
    full = 64 * torch.finfo(narrowest).eps
    same(found, results(explicit, exact), max(full, torch.finfo(dtype).eps))


def test_the_initial_state_stays_as_it_is():
    x = tokens()
    before = x["initial_state"].clone()
    _, state = fw.selective_scan(**x)
    state.zero_()
    assert torch.equal(x["initial_state"], before)


def test_autocast_rounds_x_b_and_c():
    x = tokens(dtype=torch.float32)
    rounded = {n: x[n].bfloat16() for n in ("x", "B", "C")}
    ref = fw.selective_scan(**x | rounded)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fw.selective_scan(**x)
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found, ref, rtol=0, atol=0)


def test_record_says_what_ran():
    x = tokens()
    for backend in ("auto", "loop"):
        with ops.record_backends() as ran:
            fw.selective_scan(**x, backend=backend)
        assert ran == ["loop forward"]


ones = functools.partial(torch.ones, dtype=torch.float64)
WRONG = {
    "x-list": ("x", [1.0], TypeError, "list, need a Tensor"),
    "x-dtype": ("x", ones(2, 20, 3).int(), TypeError, "torch.int32"),
    "x-shape": ("x", ones(2, 20), ValueError, r"need \[B, T, D\]"),
    "x-empty": ("x", ones(2, 0, 3), ValueError, r"shape \[2, 0, 3\]"),
    "dt-none": ("dt", None, TypeError, "NoneType, need a Tensor"),
    "dt-dtype": ("dt", ones(2, 20, 3).half(), TypeError, "float32 or"),
    "dt-shape": ("dt", ones(2, 20), ValueError, r"need x's, \[2, 20, 3\]"),
    "A-dtype": ("A", ones(3, 5).bfloat16(), TypeError, "torch.bfloat16"),
    "A-shape": ("A", ones(4, 5), ValueError, r"need \[3, N\] with 1 <= N"),
    "A-flat": ("A", ones(3), ValueError, r"shape \[3\]"),
    "A-wide": ("A", ones(3, 257), ValueError, "N <= 256"),
    "B-dtype": ("B", ones(2, 20, 5).float(), TypeError, "torch.float64"),
    "B-shape": ("B", ones(2, 20, 4), ValueError, r"need \[2, 20, 5\]"),
    "B-device": ("B", ones(2, 20, 5).to("meta"), ValueError, "need x's, cpu"),
    "C-dtype": ("C", ones(2, 20, 5).float(), TypeError, "torch.float64"),
    "C-shape": ("C", ones(2, 19, 5), ValueError, r"need \[2, 20, 5\]"),
    "D-number": ("D", 1.0, TypeError, "float, need a Tensor"),
    "D-shape": ("D", ones(3, 1), ValueError, r"need \[3\]"),
    "D-dtype": ("D", ones(3).half(), TypeError, "torch.float16"),
    "state-dtype": (
        "initial_state",
        ones(2, 3, 5).float(),
        TypeError,
        "need torch.float64",
    ),
    "state-shape": (
        "initial_state",
        ones(2, 5, 3),
        ValueError,
        r"need \[2, 3, 5\]",
    ),
}


@pytest.mark.parametrize(
    "name, value, error, words", WRONG.values(), ids=WRONG
)
def test_refuses(name, value, error, words):
    with pytest.raises(error, match=f"^{name}: got .*{words}"):
        fw.selective_scan(**tokens() | {name: value})


@pytest.mark.parametrize("backend", ["chunkwise", "cuda", None])
def test_refuses_other_backends(backend):
    with pytest.raises(ValueError, match=r"backend: got .* 'triton', 'loop'"):
        fw.selective_scan(**tokens(), backend=backend)


def test_triton_says_what_it_needs():
    with pytest.raises(ValueError, match=r"x, B and C in float32, float16 or"):
        fw.selective_scan(**tokens(), backend="triton")
    with pytest.raises(ValueError, match="backend: got 'triton', which needs"):
        fw.selective_scan(**tokens(dtype=torch.bfloat16), backend="triton")


@pytest.mark.parametrize("backend", ["auto", "loop"])
def test_in_one_compiled_graph(backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        fw.selective_scan, backend=counter, fullgraph=True
    )
    x = tokens(T=6)
    ref = results(fw.selective_scan, x, backend=backend)
    for _ in range(2):
        with ops.record_backends() as ran:
            same(results(compiled, x, backend=backend), ref, 1e-12)
        assert ran == ["loop forward"]
    assert counter.frame_count == 1
    torch._dynamo.reset()
