"""What networks as fast weights and their layers refuse, and by what name."""

import math

import pytest
import torch

from fastweights import feature_maps
from fastweights.checks import relative_error
from fastweights.deep import lact, mesa, titans, ttt
from fastweights.deep.optimisers import stale, summed
from fastweights.fast_weights import sgd
from fastweights.layers import LaCT

B, T, H, K, C = 2, 3, 2, 4, 4


def numbers(*values):
    return torch.tensor(values)


def operators():
    """Each with arguments that fit; options replace or join them."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, T, H, K)
    rate = torch.rand(B, T, H)
    start = [(torch.randn(H, K, K), torch.randn(H, K))]
    norm = torch.ones(H, K), torch.zeros(H, K)
    tokens = {"q": q, "k": k, "v": v}
    matrices = [*torch.randn(3, H, K, K)]
    return {
        ttt: tokens
        | {"rate": rate, "start": start, "norm": norm}
        | {"step_scale": torch.ones(C)},
        titans: tokens
        | {"rate": rate, "momentum": rate, "g": -rate}
        | {"start": start, "norm": norm},
        lact: tokens
        | {"rates": rate[..., None].expand(B, T, H, 3), "start": matrices},
        mesa: tokens | {"g": -rate, "beta": rate, "ridge": torch.ones(H, K)},
    }


STATES = {ttt: (2, 20), titans: (3, 20), lact: (145,), mesa: (K, 2 * K)}
PLACES = {
    "position": [
        (numbers(-1, 0), r"position: got \[-1, 0\], need >= 0"),
        (numbers(0.0, 3.0), "position: got torch.float32, need torch.int32"),
        (numbers(3, 0), r"initial_state: got None, need the state after "),
        ([0, 0], "position: got list, need a Tensor"),
    ],
    "lengths": [
        (numbers(4, 0), r"lengths: got \[4, 0\], need 0 to T = 3"),
        (numbers(-1, 2), r"lengths: got \[-1, 2\], need 0 to T = 3"),
        (numbers(1.0, 2.0), "lengths: got torch.float32, need torch.int32"),
    ],
}
PAIR = "need a pair of tensors"
WRONG = {
    ttt: [
        ("norm", None, f"norm: got NoneType, {PAIR}"),
        ("norm", (torch.ones(H, K),), f"norm: got 1, {PAIR}"),
        ("norm", (1.0, 2.0), r"norm\[0\]: got float, need a Tensor"),
        (
            "step_scale",
            torch.ones(0),
            r"step_scale: got shape \[0\], need \[C\]",
        ),
        (
            "step_scale",
            torch.ones(4, 2),
            r"step_scale: got shape \[4, 2\], need \[C\]",
        ),
        ("step_scale", [1.0, 0.5], "step_scale: got list, need a Tensor"),
        ("start", None, "start: got no layer"),
        ("start", [(torch.ones(H, K, K),)], rf"start\[0\]: got 1, {PAIR}"),
    ],
    titans: [
        ("norm", 3, f"norm: got int, {PAIR}"),
        ("norm", (torch.ones(H, K),), f"norm: got 1, {PAIR}"),
        ("chunk_size", 0, "chunk_size: got 0, need an integer >= 1"),
        ("chunk_size", 2.0, "chunk_size: got float, need an int"),
    ],
    lact: [
        ("muon", "no", "muon: got 'no', need True or False"),
        ("prenorm", 1, "prenorm: got 1, need True or False"),
        ("start", None, "start: got NoneType, need three tensors"),
        ("start", [torch.ones(H, K, K)] * 2, "start: got 2, need three"),
        ("start", (1, 2, 3), r"start\[0\]: got int, need a Tensor"),
        ("start", [torch.ones(())] * 3, r"start\[0\]: got shape \[\], need"),
    ],
    mesa: [
        ("ridge", 1.0, "ridge: got float, need a Tensor"),
        ("ridge", torch.zeros(H, K), "ridge: got 0.0, need finite numbers"),
        ("ridge", -torch.ones(H, K), "ridge: got -1.0, need finite numbers"),
        ("ridge", torch.full((H, K), math.inf), "ridge: got inf, need fini"),
        ("ridge", torch.ones(H, K).long(), "ridge: got torch.int64, need"),
        ("solver_steps", 0, "solver_steps: got 0, need an integer >= 1"),
        ("solver_steps", 2.5, "solver_steps: got float, need an int"),
        ("cu_seqlens", numbers(0, 3), r"q: got shape .*because cu_seqlens"),
    ],
}
CALLS = [(f, *case) for f, cases in WRONG.items() for case in cases]
CALLS += [
    (f, name, *case)
    for f in (ttt, titans, lact)
    for name, cases in PLACES.items()
    for case in cases
]
for f, shape in STATES.items():
    CALLS += [
        (f, "initial_state", 3, "initial_state: got int, need a Tensor"),
        (
            f,
            "initial_state",
            torch.zeros(B, H, *shape, dtype=torch.int64),
            "initial_state: got torch.int64, need one of",
        ),
        (
            f,
            "initial_state",
            torch.zeros(B, H, *shape[:-1], 7),
            r"initial_state: got shape .*, need \[2, 2, ",
        ),
    ]
SHORT = torch.zeros(B, T, H, K - 1)
for f, rate in ((ttt, "rate"), (titans, "rate"), (lact, "rates")):
    start = [SHORT[0]] * 3 if f is lact else [[SHORT[0]] * 2]
    CALLS += [
        (f, "k", SHORT, r"k: got shape .*, need q's, \[2, 3"),
        (f, "k", SHORT.double(), "k: got torch.float64, need"),
        (f, rate, SHORT[..., :2], rf"{rate}: got shape .*, need \[2, 3, 2"),
        (f, "start", start, r"start\[0\].*: got shape .*, need \[2, 4"),
        (f, "position", numbers(0, 0, 0), r"position: .*, need \[2\]"),
    ]
CALLS += [
    (mesa, "ridge", torch.ones(K), r"ridge: got shape \[4\], need \[2, 4"),
    (mesa, "beta", SHORT, "beta: got shape"),
]


@pytest.mark.parametrize(
    ("function", "name", "value", "message"),
    CALLS,
    ids=[f"{f.__name__}-{name}-{i}" for i, (f, name, *_) in enumerate(CALLS)],
)
def test_what_operators_refuse(function, name, value, message):
    given = operators()[function]
    function(**given)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        function(**given | {name: value})


@pytest.mark.parametrize("function", STATES, ids=lambda f: f.__name__)
def test_a_state_of_any_floating_dtype(function):
    """It is computed in fp32: a pool may have it in bf16."""
    given = operators()[function]
    state = torch.randn(B, H, *STATES[function]) / 8
    if function is mesa:
        state[..., :K] = torch.eye(K)
    state = state.bfloat16()
    want = function(**given, initial_state=state.float())
    for dtype in (torch.bfloat16, torch.float64):
        found = function(**given, initial_state=state.to(dtype))
        for a, b in zip(found, want, strict=True):
            assert a.dtype == b.dtype and relative_error(a, b) < 1e-6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: LaCT(6, 2, chunk_size=3),
            "dim / num_attention_heads: got 3, need an even number",
        ),
        (lambda: stale(sgd, 0), "size: got 0, need an integer >= 1"),
        (lambda: summed(sgd, -2), "size: got -2, need an integer >= 1"),
        (lambda: summed(sgd, 2.0), "size: got float, need an int"),
        (lambda: feature_maps.elu1(3), "x: got int, need a Tensor"),
        (lambda: feature_maps.relu("x"), "x: got str, need a Tensor"),
        (lambda: feature_maps.softmax(3), "x: got int, need a Tensor"),
    ],
)
def test_what_others_refuse(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


def test_a_rate_that_an_exponential_has_no_room_for():
    """softplus^-1(1000) is 1000."""
    for rate in (1e-3, 1.0, 1000.0):
        bias = torch.tensor(LaCT(8, 2, initial_rate=rate).rate_bias)
        found = torch.nn.functional.softplus(bias).item()
        assert found == pytest.approx(rate, rel=1e-5)
