"""The chunk form's gradients, each stage against autograd of that stage."""

import pytest
import torch
from inputs import RULES, member

from fastweights.checks import relative_error
from fastweights.reference import chunkwise, chunkwise_backward, steps

C = 32
EXACT = 1e-13
WIDTHS = ("none", "scalar", "vector")
NAMES = ("q", "k", "v", "g", "beta", "initial_state")

gates = pytest.mark.parametrize("gate", WIDTHS)
rules = pytest.mark.parametrize("rule", RULES)


def inputs(gate, rule, **options):
    """q, k, v, g [B, T, H, 1 or K] or None, beta or None, initial state."""
    options = {"B": 2, "T": 37, "H": 2, "HV": 2} | options
    x = member(gate, rule, **options)
    if gate == "scalar":
        x["g"] = x["g"][..., None]
    return {name: x.get(name) for name in NAMES}


def chunks(gate, rule, size=C, **options):
    """The same in chunks, a state a sequence last."""
    *tokens, S = inputs(gate, rule, **options).values()
    if tokens[4] is not None:
        tokens[4] = tokens[4][..., None]
    cut = (x if x is None else chunkwise.to_chunks(x, size) for x in tokens)
    return *cut, S


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


def running(g):
    return None if g is None else g.cumsum(-2)


def same(x, ref, tolerance=EXACT):
    for i, (dx, dx_ref) in enumerate(zip(x, ref, strict=True)):
        assert (dx is None) == (dx_ref is None), i
        if dx is not None:
            error = relative_error(dx, dx_ref)
            assert error <= tolerance, f"result {i}: {error:.1e}"


@pytest.mark.parametrize("size", [16, 24, 64])
@pytest.mark.parametrize("gate", WIDTHS[1:])
def test_decayed_sums_are_the_defining_sums(gate, size):
    _, k, _, g, _, _ = chunks(gate, "delta", size, T=size)
    G = running(g)
    torch.manual_seed(0)
    A = torch.randn(2, 1, 2, size, size, dtype=torch.float64).tril(-1)
    rows, columns = torch.zeros_like(k), torch.zeros_like(k)
    for i in range(size):
        for j in range(i):
            decay = A[..., i, j, None] * (G[..., i, :] - G[..., j, :]).exp()
            rows[..., i, :] += decay * k[..., j, :]
            columns[..., j, :] += decay * k[..., i, :]
    same(chunkwise_backward.decayed_sums(A, k, k, G), [rows, columns])


def test_decayed_sums_hold_where_the_naive_split_overflows():
    torch.manual_seed(0)
    G = (-40 * torch.rand(1, 64, 8)).cumsum(-2)
    A, x = torch.randn(1, 64, 64).tril(-1), torch.randn(1, 64, 8)
    assert not (x * (-G).exp()).isfinite().all()
    narrow = chunkwise_backward.decayed_sums(A, x, x, G)
    wide = (t.double() for t in (A, x, x, G))
    same(narrow, chunkwise_backward.decayed_sums(*wide), 1e-4)


def intra_with_M(q, k, g, beta):
    """The stage as its backward sees it: M in the place of its inverse."""
    _, Aqk, _ = chunkwise.intra(q, k, g, beta)
    if beta is None:
        return Aqk, None
    G = running(g)
    return Aqk, beta * chunkwise.decayed_scores(k, k, G).tril(-1)


@pytest.mark.parametrize("size", [16, 24, 64])
@gates
@rules
def test_intra(rule, gate, size):
    q, k, _, g, beta, _ = chunks(gate, rule, size)
    (dAqk, *dM), ref = autograd(intra_with_M, q, k, g, beta)
    dM = dM[0] if dM else None
    G = running(g)
    grads = chunkwise_backward.through_scores(q, k, beta, G, dAqk, dM)
    same(grads, ref)


@gates
def test_intra_through_the_inverse(gate):
    """With P's own gradient, dM = -tril(P^T dP P^T, -1)."""
    q, k, _, g, beta, _ = chunks(gate, "delta")
    (*dG, dAqk, dP), ref = autograd(chunkwise.intra, q, k, g, beta)
    G, _, P = chunkwise.intra(q, k, g, beta)
    dM = -(P.mT @ dP @ P.mT).tril(-1)
    dq, dk, dg, dbeta = chunkwise_backward.through_scores(
        q, k, beta, G, dAqk, dM
    )
    if dG:
        dg = dg + chunkwise_backward.reverse_cumsum(dG[0])
    same((dq, dk, dg, dbeta), ref)


def scan_of_M(q, k, v, g, beta, Aqk, M, S, *, scale):
    P = None if M is None else chunkwise.unit_lower_inverse(M.tril(-1))
    G = running(g)
    Aqk = Aqk.tril()
    return chunkwise.scan(q, k, v, g, beta, G, Aqk, P, S, scale=scale)


@gates
@rules
def test_scan(rule, gate):
    q, k, v, g, beta, S = chunks(gate, rule, T=75)
    Aqk, M = intra_with_M(q, k, g, beta)
    G, _, P = chunkwise.intra(q, k, g, beta)
    (do, dS), ref = autograd(
        lambda *x: scan_of_M(*x, scale=0.3), q, k, v, g, beta, Aqk, M, S
    )
    states, v_new = chunkwise_backward.chunk_states(k, v, g, beta, G, P, S)
    y, leaving, dS = chunkwise_backward.scan_backward(
        q, k, g, beta, G, Aqk, P, 0.3 * do, dS
    )
    grads = chunkwise_backward.through_states(
        q, k, v, g, beta, G, 0.3 * do, v_new, y, states, leaving
    )
    same((*grads, dS), ref)


@gates
@rules
def test_chunk_states_are_the_states_of_the_loop(rule, gate):
    q, k, v, g, beta, S = inputs(gate, rule, T=40).values()
    *tokens, _ = chunks(gate, rule, 16, T=40)
    G, _, P = chunkwise.intra(tokens[0], tokens[1], *tokens[3:])
    states, _ = chunkwise_backward.chunk_states(*tokens[1:], G, P, S)
    for n in range(3):
        before = (x if x is None else x[:, : 16 * n] for x in (k, v, g, beta))
        _, ref = loop(q[:, : 16 * n], *before, S) if n else (0, S)
        same([states[:, n]], [ref])


def loop(q, k, v, g, beta, S, *, scale=0.3):
    g = torch.zeros_like(q[..., :1]) if g is None else g
    tokens = [x for x in (scale * q, k, v, g, beta) if x is not None]
    return steps.scan(steps.recurrence, S, *tokens)


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
    for chunk_size in (8, 16, 64):
        same(whole(x, do, dS, chunk_size=chunk_size), ref)


@rules
def test_scores_and_inverse_may_be_kept_or_computed_again(rule):
    *tokens, S = x = inputs("vector", rule).values()
    (do, dS), _ = autograd(loop, *x)
    _, _, Aqk, P = chunkwise.chunkwise_forward(
        *tokens, scale=0.3, initial_state=S, chunk_size=16
    )
    kept = whole(x, do, dS, Aqk=Aqk, P=P)
    same(kept, whole(x, do, dS), 0.0)


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
    same(grads, ref, 1e-5)
    assert_close_by_chunk(grads[3], ref[3], 1e-5)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@gates
def test_identical_keys_and_every_beta(gate, beta):
    x = inputs(gate, "delta", T=70, strength=-0.01)
    x["k"] = x["k"][:, :1].expand_as(x["k"])
    x["beta"] = torch.full_like(x["beta"], beta)
    (do, dS), ref = autograd(loop, *x.values())
    same(whole(x.values(), do, dS, chunk_size=C), ref, 1e-12)


@gates
@rules
def test_a_single_chunk_after_an_empty_state(rule, gate):
    x = inputs(gate, rule, T=20)
    S = torch.zeros_like(x.pop("initial_state"))
    (do,), ref = autograd(lambda *x: loop(*x, S)[:1], *x.values())
    grads = whole([*x.values(), None], do, None, chunk_size=20)
    same(grads[:5], ref)
    assert grads[5] is None
