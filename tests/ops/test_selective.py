"""Mamba's selective scan: its step, its loop, and what it refuses."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from support.graphs import in_one_graph
from support.inputs import assert_same, results
from support.pairwise import parametrize_pairs
from support.scan_inputs import scan_inputs, selective_scan_fn

import fastweights as fw
from fastweights import ops
from fastweights.checks import Exponentials, Footprint
from fastweights.ops.selective import SCAN
from fastweights.reference import steps
from fastweights.torch_backend import selective as torch_selective


def explicit(dt, z=None, dt_bias=None, dt_softplus=False, **x):
    """Of Mamba's arguments too: what makes the step, and gates y."""
    dt = dt if dt_bias is None else dt + dt_bias
    y, h = of_steps(dt=F.softplus(dt) if dt_softplus else dt, **x)
    return y if z is None else y * z * z.sigmoid(), h


def of_steps(x, dt, A, B, C, D=None, initial_state=None, cu_seqlens=None):
    """No recurrence: what token j wrote, decayed by all tokens up to t."""
    if cu_seqlens is not None:
        parts = []
        for s, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            cut = (t[:, a:b] for t in (x, dt, B, C))
            first = initial_state[s : s + 1]
            x_s, dt_s, B_s, C_s = cut
            found = of_steps(x_s, dt_s, A, B_s, C_s, D, first)
            parts.append(found if b > a else (x_s, first))
        return tuple(
            torch.cat(part, dim)
            for part, dim in zip(zip(*parts, strict=True), (1, 0), strict=True)
        )
    G = B.shape[2] if B.dim() == 4 else 1
    B, C = (t.reshape(*t.shape[:2], G, A.shape[1]) for t in (B, C))
    B, C = (t.repeat_interleave(x.shape[2] // G, dim=2) for t in (B, C))
    g = dt[..., None] * A  # [B, T, D, N]
    t = torch.arange(x.shape[1])
    between = (t[:, None] < t) & (t <= t[:, None, None])  # j < i <= t
    decay = torch.einsum("tji,bidn->btjdn", between.to(g.dtype), g).exp()
    decay = decay * (t <= t[:, None])[:, :, None, None]  # j <= t
    h = torch.einsum("btjdn,bjd,bjdn->btdn", decay, dt * x, B)
    if initial_state is not None:
        h = h + g.cumsum(dim=1).exp() * initial_state[:, None]
    y = torch.einsum("btdn,btdn->btd", h, C)
    return y if D is None else y + D * x, h[:, -1:].flatten(0, 1)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 4 tokens, so that a few are many."""
    monkeypatch.setattr(torch_selective, "tile_length", lambda D, N, G: 4)


def test_a_step_is_the_scan_of_one_token():
    x = scan_inputs(T=1)
    h, A = x["initial_state"], x["A"]
    named = {name: x[name][:, 0] for name in ("x", "dt", "B", "C")}
    found, y = steps.selective(h, A=A, **named)
    ref = explicit(**x | {"D": torch.zeros(3)})
    torch.testing.assert_close((y[:, None], found), ref)


def test_step_in_a_scan():
    x = scan_inputs()
    inputs = [x[name] for name in ("x", "dt", "A", "B", "C")]
    inputs[2] = x["A"].expand(2, 20, 3, 5)
    found = steps.scan(steps.selective, x["initial_state"], *inputs)
    ref = fw.selective_scan(**x | {"D": None}, backend="loop")
    torch.testing.assert_close(found, ref, rtol=0, atol=0)


PYTORCH = ("torch", "loop")
OFFSETS = {
    "empty": [0, 0, 5, 5, 6, 20, 20],
    "chunks": [0, 4, 12, 20],
    "one": [0, 20],
}


@pytest.mark.usefixtures("small_chunks", "empty_is_nan")
@parametrize_pairs(
    backend=PYTORCH,
    T=[20, 1, 2, 3, 4, 5, 7, 8, 13],
    G=[None, 1, 2, 6],
    strength=[None, -1e-3, -30.0],
    own=[False, True],
    without=[(), ("D",), ("D", "initial_state"), ("z",), ("dt_bias",)],
    use=["both", "o", "state"],
    offsets=OFFSETS | {"batch": None},
)
def test_it_is_the_explicit_sum(
    backend, T, G, strength, own, without, use, offsets
):
    sizes, given = {"batch": 2}, {}
    if offsets:
        if "initial_state" in without:
            without = ("D",)
        given = {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32)}
        sizes, T = {"batch": 1, "S": len(offsets) - 1}, 20
    x = scan_inputs(T=T, D=6, N=2, G=G, own=own, strength=strength, **sizes)
    x = {name: t for name, t in x.items() if name not in without}
    given |= {"dt_softplus": own, "use": use}
    found = results(fw.selective_scan, x, backend=backend, **given)
    assert_same(found, results(explicit, x, **given), 1e-11)


def test_a_state_of_one_number():
    x = scan_inputs(T=13, D=2, N=1)
    assert_same(results(fw.selective_scan, x), results(explicit, x), 1e-11)


@pytest.mark.parametrize("T, D, N", [(130, 2, 3), (34, 300, 16)])
def test_chunks_as_they_ship(T, D, N):
    """Of 64 tokens, and of 16 where a state is large."""
    x = scan_inputs(batch=1, T=T, D=D, N=N)
    found = results(fw.selective_scan, x)
    assert_same(found, results(fw.selective_scan, x, backend="loop"), 1e-11)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("backend", PYTORCH)
def test_mambas_own_arguments(backend):
    x = scan_inputs(T=9, D=6, N=2, G=2, own=True)
    del x["initial_state"]
    found = results(fw.selective_scan, x, backend=backend, dt_softplus=True)

    def mambas(x, dt, A, B, C, D, z, dt_bias):
        u, delta, z, B, C = (t.movedim(1, -1) for t in (x, dt, z, B, C))
        y, h = selective_scan_fn(u, delta, A, B, C, D, z, dt_bias)
        return y.mT, h

    assert_same(found, results(mambas, x), 1e-11)


def test_steps_are_added_and_softened_in_single_precision():
    """A bias far above bf16's last bit of dt is not lost beside it."""
    x = scan_inputs(dtype=torch.bfloat16, own=True)
    x["dt"] = (x["dt"] - 6).bfloat16()
    found = results(fw.selective_scan, x, dt_softplus=True)
    exact = {name: t.double() for name, t in x.items()}
    ref = results(fw.selective_scan, exact, dt_softplus=True)
    assert found["ddt"].dtype == found["o"].dtype == torch.bfloat16
    assert found["ddt_bias"].dtype == torch.float32
    assert_same(found, ref, 4e-3)
    assert_same({"state": found["state"]}, {"state": ref["state"]}, 1e-6)


@pytest.mark.parametrize("backend", PYTORCH)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gate_is_taken_in_single_precision(dtype, backend):
    """y is rounded once, after it: what is fp32 has gradients as in fp32."""
    x = scan_inputs(own=True, dtype=dtype)
    x["z"] = x["z"].float()
    options = {"dt_softplus": True, "backend": backend}
    found = results(fw.selective_scan, x, **options)
    exact = {name: t.double() for name, t in x.items()}
    ref = results(fw.selective_scan, exact, **options)
    assert_same({"o": found["o"]}, {"o": ref["o"]}, torch.finfo(dtype).eps)
    single = ("dD", "dA", "dz", "ddt", "ddt_bias")
    found, ref = ({name: x[name] for name in single} for x in (found, ref))
    assert_same(found, ref, 1e-6)


@pytest.mark.parametrize("strength", [-1e3, -1e30])
def test_nothing_overflows(strength):
    """Only a token's own write is left, and every gradient is finite."""
    x = scan_inputs(T=70, dtype=torch.float32, strength=strength)
    found = results(fw.selective_scan, x)
    ref = results(fw.selective_scan, x, backend="loop")
    assert all(t.isfinite().all() for t in found.values())
    assert_same(found, ref, 1e-6)


def test_a_chunk_at_a_time():
    """No tensor has the states of all tokens, and no exponent is positive."""
    T, D, N = 1024, 8, 16
    x = scan_inputs(batch=1, T=T, D=D, N=N, dtype=torch.float32)
    x |= {name: x[name][:, :, None] for name in ("B", "C")}
    inputs = (*x.values(), None)
    chunks = T // 64
    states = torch.empty(chunks * D * N)
    with Footprint() as footprint, Exponentials() as exponentials:
        y, state = torch_selective.forward(*inputs, states, torch.float32)
        torch_selective.backward(y, state, *inputs, states)
    assert footprint.largest == T * N < T * D * N
    assert exponentials.count == 2 * (T + 2 * chunks) * D * N
    assert exponentials.largest <= 0


def test_states_are_kept_for_a_backward_only():
    """One per chunk, and none of them without a gradient."""
    x = scan_inputs(batch=1, T=130, D=2, N=3)
    B, C = x["B"][:, :, None], x["C"][:, :, None]
    inputs = (x["x"], x["dt"], x["A"], B, C, x["D"], x["initial_state"])
    packed = torch.tensor([0, 130])
    for cu_seqlens, chunks in ((None, 3), (packed, 3)):
        for keep in (False, True):
            *_, states = SCAN.forward(
                *inputs, cu_seqlens, keep, False, "torch"
            )
            assert states.shape == (chunks * keep * 2 * 3,)
        assert torch.equal(states[:6].view(1, 2, 3), x["initial_state"])


def test_states_are_kept_where_a_gradient_is_asked_for(monkeypatch):
    kept, operator = [], SCAN

    def record(*arguments):
        kept.append(arguments[-3])
        return operator(*arguments)

    monkeypatch.setattr("fastweights.ops.selective.SCAN", record)
    x = scan_inputs(T=2)
    fw.selective_scan(**x)
    x["A"].requires_grad_()
    fw.selective_scan(**x)
    with torch.no_grad():
        fw.selective_scan(**x)
    assert kept == [False, True, False]


def test_gradients_of_gradients():
    x = scan_inputs(batch=1, T=3, D=2, N=2)
    *positional, state = (t.requires_grad_() for t in x.values())

    def function(initial_state, *inputs):
        return fw.selective_scan(
            *inputs, initial_state=initial_state, backend="loop"
        )

    assert torch.autograd.gradcheck(function, (state, *positional))
    assert torch.autograd.gradgradcheck(function, (state, *positional))


def test_the_loop_has_tangents():
    x = scan_inputs(T=3)

    def loop(values):
        return fw.selective_scan(**x | {"x": values}, backend="loop")[0]

    one = torch.ones_like(x["x"])
    _, slope = torch.func.jvp(loop, (x["x"],), (one,))
    torch.testing.assert_close(slope, loop(x["x"] + one) - loop(x["x"]))


@pytest.mark.parametrize("single", [False, True], ids=["all", "some"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16]
)
def test_any_dtype_is_computed_in_fp32_at_least(dtype, single):
    """dt, A and D may be fp32 beside any x; arithmetic is in fp32."""
    x = scan_inputs(dtype=dtype)
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
    assert_same(
        found, results(explicit, exact), max(full, torch.finfo(dtype).eps)
    )


@pytest.mark.parametrize("backend", ["auto", "torch", "loop"])
def test_record_says_what_ran(backend):
    with ops.record_backends() as ran:
        results(fw.selective_scan, scan_inputs(), backend=backend)
    ref = ["torch forward", "torch backward"]
    assert ran == (["loop forward"] if backend == "loop" else ref)


ones = functools.partial(torch.ones, dtype=torch.float64)
WRONG = {
    "x-shape": ("x", ones(2, 20), ValueError, r"need \[B, T, D\]"),
    "x-empty": ("x", ones(2, 0, 3), ValueError, r"shape \[2, 0, 3\]"),
    "dt-dtype": ("dt", ones(2, 20, 3).half(), TypeError, "float32 or"),
    "dt-shape": ("dt", ones(2, 20), ValueError, r"need x's, \[2, 20, 3\]"),
    "A-dtype": ("A", ones(3, 5).bfloat16(), TypeError, "torch.bfloat16"),
    "A-shape": ("A", ones(4, 5), ValueError, r"need \[3, N\] with 1 <= N"),
    "A-flat": ("A", ones(3), ValueError, r"shape \[3\]"),
    "A-wide": ("A", ones(3, 257), ValueError, "N <= 256"),
    "B-dtype": ("B", ones(2, 20, 5).float(), TypeError, "torch.float64"),
    "B-shape": ("B", ones(2, 20, 4), ValueError, r"need \[2, 20, 5\]"),
    "B-groups": ("B", ones(2, 20, 2, 5), ValueError, "G a divisor of D = 3"),
    "B-no-groups": ("B", ones(2, 20, 0, 5), ValueError, "G a divisor of D"),
    "B-flat": ("B", ones(2, 20), ValueError, r"need \[2, 20, 5\] or"),
    "C-dtype": ("C", ones(2, 20, 5).float(), TypeError, "torch.float64"),
    "C-shape": ("C", ones(2, 19, 5), ValueError, r"need \[2, 20, 5\]"),
    "D-shape": ("D", ones(3, 1), ValueError, r"need \[3\]"),
    "D-dtype": ("D", ones(3).half(), TypeError, "torch.float16"),
    "C-groups": ("C", ones(2, 20, 1, 5), ValueError, r"need \[2, 20, 5\]"),
    "z-shape": ("z", ones(2, 20), ValueError, r"need x's, \[2, 20, 3\]"),
    "z-dtype": ("z", ones(2, 20, 3).half(), TypeError, "torch.float16"),
    "bias-shape": ("dt_bias", ones(1), ValueError, r"need \[3\]"),
    "bias-dtype": ("dt_bias", ones(3).half(), TypeError, "torch.float16"),
    "softplus": ("dt_softplus", 1, TypeError, "1, need True or False"),
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
def test_what_does_not_fit_is_named(name, value, error, words):
    with pytest.raises(error, match=f"^{name}: got .*{words}"):
        fw.selective_scan(**scan_inputs() | {name: value})


def test_refuses_a_batch_of_packed_sequences():
    packed = {"cu_seqlens": torch.tensor([0, 20])}
    with pytest.raises(ValueError, match=r"^x: got .* because cu_seqlens is"):
        fw.selective_scan(**scan_inputs(), **packed)
    wrong = scan_inputs(batch=1, S=2)
    with pytest.raises(ValueError, match=r"^initial_state: .*\[1, 3, 5\]"):
        fw.selective_scan(**wrong, **packed)


@pytest.mark.parametrize("backend", ["cuda", None])
def test_refuses_other_backends(backend):
    with pytest.raises(ValueError, match=r"backend: got .* 'triton', 'torch"):
        fw.selective_scan(**scan_inputs(), backend=backend)


def test_triton_says_what_it_needs():
    with pytest.raises(ValueError, match=r"tensors in float32, float16 or"):
        fw.selective_scan(**scan_inputs(), backend="triton")
    with pytest.raises(ValueError, match="backend: got 'triton', which needs"):
        fw.selective_scan(
            **scan_inputs(dtype=torch.bfloat16), backend="triton"
        )


def test_the_loop_in_one_compiled_graph():
    x = scan_inputs(T=3)
    ref = results(fw.selective_scan, x, backend="loop")
    with in_one_graph(fw.selective_scan) as compiled:
        assert_same(results(compiled, x, backend="loop"), ref, 1e-12)
