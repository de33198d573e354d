"""The key that erases: published steps, and what a transition may do."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.inputs import assert_same, results
from support.refused import refused

import fastweights as fw
from fastweights.checks import relative_error
from fastweights.reference import beyond, steps

B, T, H, K, V = 2, 21, 2, 5, 4
DOUBLE = {"dtype": torch.float64}
EXACT = 1e-12
ROOT = Path(__file__).resolve().parents[2]


def recipes():
    """The functions that the page of operators shows."""
    page = (ROOT / "chapters" / "api" / "operators.rst").read_text("utf-8")
    code = re.search(r"code-block:: python\n((?:\n|   .*\n)+)", page)[1]
    names = {"torch": torch, "fw": fw}
    exec(re.sub("^   ", "", code, flags=re.M), names)
    return names


def token_inputs(**widths):
    """Tensors [B, T, H, n] by name, [B, T, H] where n is 0; all unlike."""
    torch.manual_seed(0)
    x = {
        name: torch.randn(B, T, H, *([n] if n else []), **DOUBLE)
        for name, n in {"q": K, "k": K, "v": V, **widths}.items()
    }
    x["k"] = F.normalize(x["k"], dim=-1)
    x["g"] = -0.3 * x["g"].square()
    for name in ("b", "w", "a", "beta"):
        if name in x:
            x[name] = x[name].sigmoid()
    if "kappa" in x:
        x["kappa"] = F.normalize(x["kappa"], dim=-1)
    return x


def paired_inputs(**widths):
    """Two keys, values and strengths per token."""
    x = token_inputs(**widths)
    for name in ("k", "v", "beta"):
        x[name] = torch.stack([x[name], x[name].flip(1)], 2)
    return x


def scanned(step, **x):
    return steps.scan(step, torch.zeros(B, H, K, V, **DOUBLE), *x.values())


def two_delta_steps(S, q, k, v, g, kappa, a, beta):
    S, _ = steps.kda(S, q, kappa, 0 * v, g, a)
    return steps.deltanet(S, q, k, v, beta)


def delta_product(S, q, k, v, g, beta):
    return beyond.delta_product(
        S, q, k.transpose(-3, -2), v.transpose(-3, -2), g, beta.mT
    )


def with_scale(function):
    return lambda **x: function(**x, scale=1.0)


CASES = {
    "gated_deltanet2": (
        lambda: token_inputs(g=K, b=K, w=V),
        with_scale(fw.gated_deltanet2),
        steps.gated_deltanet2,
    ),
    "comba": (
        lambda: token_inputs(p=K, g=0, beta=0),
        with_scale(fw.comba),
        steps.comba,
    ),
    "rwkv7": (lambda: token_inputs(g=K, kappa=K, a=K), None, beyond.rwkv7),
    "erase_then_delta": (
        lambda: token_inputs(g=K, kappa=K, a=0, beta=0),
        None,
        two_delta_steps,
    ),
    "delta_product": (
        lambda: paired_inputs(g=0, beta=0),
        None,
        delta_product,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_published_step(name):
    """Outputs, states and the gradient of every argument."""
    draw, call, step = CASES[name]
    x = draw()
    found = results(call or recipes()[name], x)
    assert_same(found, results(lambda **x: scanned(step, **x), x), EXACT)


@pytest.mark.parametrize("backend", ["loop", "torch"])
def test_a_key_per_key_head_is_that_of_its_value_heads(backend):
    torch.manual_seed(0)
    x = {n: torch.randn(B, T, H, K, **DOUBLE) for n in ("q", "k", "erase_key")}
    x |= {"k": x["k"] / 4, "v": torch.randn(B, T, 3 * H, V, **DOUBLE)}
    repeated = x | {"erase_key": x["erase_key"].repeat_interleave(3, 2)}
    options = {"backend": backend, "chunk_size": 16}
    found = results(fw.linear_recurrence, x, **options)
    want = results(fw.linear_recurrence, repeated, **options)
    want["derase_key"] = want["derase_key"].unflatten(2, (H, 3)).sum(3)
    assert_same(found, want, EXACT)


def test_beta_k_and_beta_v_are_the_delta_rule():
    x = token_inputs(g=K, beta=0)
    found, _ = fw.linear_recurrence(
        *(x["q"], x["k"], x["beta"][..., None] * x["v"], x["g"]),
        erase_key=x["beta"][..., None] * x["k"],
    )
    assert relative_error(found, fw.kda(**x)[0]) < EXACT


@pytest.mark.parametrize("g", [-60.0, -1000.0, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_comba_bears_a_decay_that_leaves_nothing(dtype, g):
    """What p reads is still there, since it reads before the decay."""
    x = token_inputs(p=K, g=0, beta=0)
    x["g"][:, 5] = g
    S, outputs = torch.zeros(B, H, K, V, **DOUBLE), []
    for t in range(T):
        q, k, v, p, g_t, beta = (y[:, t] for y in x.values())
        new = beta[..., None] * (v - steps.read(S, p))
        S = g_t.exp()[..., None, None] * S + steps.outer(k, new)
        outputs.append(steps.read(S, q))
    narrow = {name: y.to(dtype) for name, y in x.items()}
    o, _ = fw.comba(**narrow, scale=1.0)
    error = relative_error(o, torch.stack(outputs, 1))
    assert error < (EXACT if dtype == torch.float64 else 1e-5)


def transition(k, e):
    return torch.eye(k.shape[-1], **DOUBLE) - k[..., :, None] * e[..., None, :]


def length(A):
    """By how much A lengthens a vector at most."""
    return torch.linalg.matrix_norm(A, 2)


def test_a_parallel_key_lengthens_nothing_up_to_two():
    torch.manual_seed(0)
    k = torch.randn(500, 7, **DOUBLE)
    strength = torch.linspace(0, 2, 500, **DOUBLE)[:, None]
    e = strength * k / k.square().sum(-1, keepdim=True)
    assert (length(transition(k, e)) <= 1 + 1e-12).all()
    assert (length(transition(k, 1.01 * e))[-1] > 1.01).all()


def test_strengths_per_channel_lengthen_by_2_over_root_3_at_most():
    """And by so much where they are 1 in channels with a third of |k|^2."""
    torch.manual_seed(0)
    most, b = 2 / math.sqrt(3), torch.rand(20_000, 6, **DOUBLE)
    b[::2] = b[::2].round()
    k = torch.randn(20_000, 6, **DOUBLE) ** 3
    k = F.normalize(k, dim=-1) * torch.rand(20_000, 1, **DOUBLE).sqrt()
    found = length(transition(k, b * k))
    assert most - 1e-2 < found.max() < most + 1e-12
    k = torch.tensor([1 / 3, 2 / 3], **DOUBLE).sqrt()
    e = torch.tensor([1.0, 0], **DOUBLE) * k
    assert abs(length(transition(k, e)) - most) < 1e-12


def test_such_tokens_may_take_turns_and_grow():
    """A quarter in two tokens, unless the state decays by sqrt(3) / 2."""
    k = torch.tensor([[1.0, 5], [5, 1]], **DOUBLE).div(6).sqrt()
    A = transition(k, torch.eye(2, **DOUBLE) * k)
    assert abs(torch.linalg.eigvals(A[1] @ A[0]).abs().max() - 1.25) < 1e-12
    n = 300
    k, b = (x.repeat(n, 1)[None, :, None] for x in (k, torch.eye(2, **DOUBLE)))
    w = v = torch.zeros(1, 2 * n, 1, 1, **DOUBLE)
    start = torch.ones(1, 1, 2, 1, **DOUBLE)
    sizes = []
    for decay in (1.0, math.sqrt(3) / 2):
        g = torch.full_like(k, math.log(decay))
        _, S = fw.gated_deltanet2(k, k, v, g, b, w, initial_state=start)
        sizes.append(S.norm().item())
    assert 1.25**n / 100 < sizes[0] < 1.25**n and sizes[1] < 1e-6


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


@refused("""
b=ones(1, 6, 3, 3)
    ValueError: b: got shape [1, 6, 3, 3], need [1, 6, 4, 3] or [1, 6, 2, 3]
b=ones(1, 6, 4, 3).half()
    TypeError: b: got torch.float16, need torch.float32
w=ones(1, 6, 2, 5)
    ValueError: w: got shape [1, 6, 2, 5], need [1, 6, 4, 5]
w=None
    TypeError: w: got NoneType, need a Tensor
g=ones(1, 6, 4)
    ValueError: g: got shape [1, 6, 4], need [B, T, HV, K]
""")
def test_gated_deltanet2_refuses(wrong, error):
    x = {"q": ones(1, 6, 2, 3), "k": ones(1, 6, 2, 3), "v": ones(1, 6, 4, 5)}
    x |= {"g": -ones(1, 6, 4, 3), "b": ones(1, 6, 4, 3), "w": ones(1, 6, 4, 5)}
    fw.gated_deltanet2(**x)
    with error():
        fw.gated_deltanet2(**x | eval(f"dict({wrong})"))


@refused("""
p=ones(1, 6, 3, 3)
    ValueError: p: got shape [1, 6, 3, 3], need [1, 6, 4, 3] or [1, 6, 2, 3]
p=ones(1, 6, 4, 3).double()
    TypeError: p: got torch.float64, need torch.float32
g=ones(4)
    ValueError: g: got shape [4], need [B, T, HV]
beta=ones(1, 6, 2)
    ValueError: beta: got shape [1, 6, 2], need [1, 6, 4]
""")
def test_comba_refuses(wrong, error):
    x = {"q": ones(1, 6, 2, 3), "k": ones(1, 6, 2, 3), "v": ones(1, 6, 4, 5)}
    x |= {"p": ones(1, 6, 2, 3), "g": -ones(1, 6, 4), "beta": ones(1, 6, 4)}
    fw.comba(**x)
    with error():
        fw.comba(**x | eval(f"dict({wrong})"))


def test_gradients_of_combas_gradients():
    x = token_inputs(p=K, g=0, beta=0)
    x = {name: t[:1, :3].requires_grad_() for name, t in x.items()}

    def outputs(*values):
        named = dict(zip(x, values, strict=True))
        return fw.comba(**named, backend="loop")[0]

    assert torch.autograd.gradgradcheck(outputs, (*x.values(),))
