"""The chunk form's gradients against autograd of the loop."""

import pytest
import torch
from support.inputs import RULES, assert_same, member_inputs

from fastweights.checks import relative_error
from fastweights.reference import chunkwise, chunkwise_backward, steps

C = 32
EXACT = 1e-13
WIDTHS = ("none", "head", "channel")
NAMES = ("q", "k", "v", "g", "beta", "erase_key", "initial_state")

gates = pytest.mark.parametrize("gate", WIDTHS)
rules = pytest.mark.parametrize("rule", RULES)


def inputs(gate, rule, **options):
    """q, k, v, g [B, T, H, 1 or K], beta, erase_key or None, initial state."""
    options = {"B": 2, "T": 37, "H": 2, "HV": 2} | options
    x = member_inputs(gate, rule, **options)
    if gate == "head":
        x["g"] = x["g"][..., None]
    return {name: x.get(name) for name in NAMES}


def autograd(function, *arguments):
    """Random gradients of the results, and what they give the arguments."""
    leaves = [
        x if x is None else x.detach().requires_grad_() for x in arguments
    ]
    torch.manual_seed(7)
    results = [y for y in function(*leaves) if y is not None]
    given = [torch.randn_like(y) for y in results]
    wanted = [x for x in leaves if x is not None]
    grads = iter(
        torch.autograd.grad(results, wanted, given, materialize_grads=True)
    )
    return given, [x if x is None else next(grads) for x in leaves]


def loop(q, k, v, g, beta, erase_key, S, *, scale=0.3):
    g = torch.zeros_like(q[..., :1]) if g is None else g
    tokens = {"q": scale * q, "k": k, "v": v, "g": g}
    tokens |= {"beta": beta} if beta is not None else {}
    tokens |= {"erase_key": erase_key} if erase_key is not None else {}

    def step(S, *at_t):
        return steps.recurrence(S, **dict(zip(tokens, at_t, strict=True)))

    return steps.scan(step, S, *tokens.values())


def whole(x, do, dS, *, chunk_size=16, scale=0.3, **saved):
    *tokens, S = x
    return chunkwise_backward.chunkwise_backward(
        *tokens,
        do=do,
        dS=dS,
        scale=scale,
        initial_state=S,
        chunk_size=chunk_size,
        **saved,
    )


@pytest.mark.parametrize("T", [1, 16, 37, 64, 100])
@gates
@rules
def test_chunkwise_is_autograd_of_the_loop(rule, gate, T):
    x = inputs(gate, rule, T=T).values()
    (do, dS), ref = autograd(loop, *x)
    for chunk_size in (8, 16, 24, 64):
        assert_same(whole(x, do, dS, chunk_size=chunk_size), ref, EXACT)


@rules
def test_scores_and_inverse_may_be_kept_or_computed_again(rule):
    *tokens, S = x = inputs("channel", rule).values()
    (do, dS), _ = autograd(loop, *x)
    _, _, Aqk, P = chunkwise.chunkwise_forward(
        *tokens, scale=0.3, initial_state=S, chunk_size=16
    )
    kept = whole(x, do, dS, Aqk=Aqk, P=P)
    assert_same(kept, whole(x, do, dS), 0.0)


def assert_close_by_chunk(x, ref, tolerance):
    for t in range(0, x.shape[1], C):
        error = relative_error(x[:, t : t + C], ref[:, t : t + C])
        assert error <= tolerance, f"tokens from {t}: {error:.1e}"


@pytest.mark.parametrize("strength", [0.0, -1e-3, -5.0, -10.0, -20.0])
@pytest.mark.parametrize("gate", WIDTHS[1:])
@rules
def test_constant_gates_keep_their_gradient_in_fp32(rule, gate, strength):
    x = inputs(gate, rule, T=150, K=16, V=12, strength=strength).values()
    (do, dS), ref = autograd(loop, *x)
    narrow = [t if t is None else t.float() for t in x]
    grads = whole(narrow, do.float(), dS.float(), chunk_size=C)
    assert_same(grads, ref, 1e-5)
    assert_close_by_chunk(grads[3], ref[3], 1e-5)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@gates
def test_identical_keys_and_every_beta(gate, beta):
    x = inputs(gate, "delta", T=70, strength=-0.01)
    x["k"] = x["k"][:, :1].expand_as(x["k"])
    x["beta"] = torch.full_like(x["beta"], beta)
    (do, dS), ref = autograd(loop, *x.values())
    assert_same(whole(x.values(), do, dS, chunk_size=C), ref, 1e-12)


@gates
@rules
def test_a_single_chunk_after_an_empty_state(rule, gate):
    x = inputs(gate, rule, T=20)
    S = torch.zeros_like(x.pop("initial_state"))
    (do,), ref = autograd(lambda *x: loop(*x, S)[:1], *x.values())
    grads = whole([*x.values(), None], do, None, chunk_size=20)
    assert_same(grads[:6], ref, EXACT)
    assert grads[6] is None
