"""The chunk form, stage by stage."""

import pytest
import torch
import torch.nn.functional as F
from inputs import GATES, RULES, member

from fastweights.checks import relative_error
from fastweights.reference import chunkwise, parallel, steps

C = 32


def running_gates(shape, strength, seed=0):
    torch.manual_seed(seed)
    g = strength * torch.rand(shape, dtype=torch.float64)
    return g, g.cumsum(-2)


@pytest.mark.parametrize("g", [-70.0, -100.0, -740.0, -1e6])
def test_a_decay_is_right_until_it_is_zero(g):
    """fp64's smallest number is e^-744."""
    q, k, v, state = torch.ones(4, 1, 1, 1, 1, dtype=torch.float64)
    gate = torch.full_like(q, g)
    _, last, *_ = chunkwise.chunkwise_forward(
        q, k, 0 * v, gate, None, scale=1.0, initial_state=state, chunk_size=16
    )
    torch.testing.assert_close(last, gate.exp(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 40])
def test_chunks_hold_the_tokens_in_order(T):
    x = torch.randn(2, T, 3, 5)
    chunks = chunkwise.to_chunks(x, 16)
    assert chunks.shape == (2, -(-T // 16), 3, 16, 5)
    for t in range(T):
        assert chunks[:, t // 16, :, t % 16].equal(x[:, t])
    assert chunks.movedim(3, 2).flatten(1, 2)[:, T:].eq(0).all()
    assert chunkwise.from_chunks(chunks, T).equal(x)


@pytest.mark.parametrize("strength", [0.0, -1e-3, -1.0, -20.0])
@pytest.mark.parametrize("width", ["scalar", "vector"])
@pytest.mark.parametrize("size", [16, 32, 64, 24])
def test_decayed_scores_are_the_defining_sum(size, width, strength):
    K = 7
    _, G = running_gates((2, 1, size, 1 if width == "scalar" else K), strength)
    x, k = torch.randn(2, 2, 1, size, K, dtype=torch.float64)
    ref = torch.zeros(2, 1, size, size, dtype=torch.float64)
    for i in range(size):
        for j in range(i + 1):
            decay = (G[..., i, :] - G[..., j, :]).exp()
            ref[..., i, j] = (x[..., i, :] * k[..., j, :] * decay).sum(-1)
    A = chunkwise.decayed_scores(x, k, G)
    torch.testing.assert_close(A, ref, rtol=1e-12, atol=1e-13)


def test_decayed_scores_hold_where_the_naive_split_overflows():
    _, G = running_gates((1, 64, 8), -40.0)
    x, k = torch.randn(2, 1, 64, 8)
    G = G.float()
    naive = (x * G.exp()) @ (k * (-G).exp()).mT
    assert not naive.tril().isfinite().all()
    A = chunkwise.decayed_scores(x, k, G)
    wide = chunkwise.decayed_scores(x.double(), k.double(), G.double())
    assert A.isfinite().all()
    torch.testing.assert_close(A.double(), wide, rtol=1e-4, atol=1e-5)


def test_decayed_scores_agree_with_the_parallel_form():
    x = member("vector", "additive", B=2, T=C, H=2, HV=2)
    q, k, g = (chunkwise.to_chunks(x[name], C) for name in ("q", "k", "g"))
    torch.testing.assert_close(
        chunkwise.decayed_scores(q, k, g.cumsum(-2))[:, 0],
        parallel.decayed_scores(x["q"], x["k"], x["g"]),
    )


INVERSES = pytest.mark.parametrize(
    "inverse", [chunkwise.unit_lower_inverse, chunkwise.inverse_by_blocks]
)


@INVERSES
@pytest.mark.parametrize("size", [1, 2, 5, 16, 31, 64])
def test_unit_lower_inverse_is_the_inverse(size, inverse):
    torch.manual_seed(0)
    M = torch.randn(3, size, size, dtype=torch.float64).tril(-1) / size**0.5
    P = inverse(M)
    eye = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(P, torch.linalg.inv(eye + M))
    assert P.triu(1).eq(0).all()
    assert P.diagonal(dim1=-2, dim2=-1).eq(1).all()


@INVERSES
def test_unit_lower_inverse_bears_keys_that_are_nearly_parallel(inverse):
    torch.manual_seed(0)
    k = F.normalize(torch.randn(64, 32) + 3 * torch.randn(32), dim=-1)
    M = 2 * (k @ k.T).tril(-1)
    assert (k @ k.T).mean() > 0.85
    P = inverse(M)
    ref = torch.linalg.inv(torch.eye(64).double() + M.double())
    assert (P - ref).norm() / ref.norm() < 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_intra_inverts_one_plus_beta_times_the_key_scores(rule):
    x = member("vector", rule, T=C, H=2, HV=2)
    q, k, g = (chunkwise.to_chunks(x[name], C) for name in ("q", "k", "g"))
    beta = x.get("beta")
    if beta is not None:
        beta = chunkwise.to_chunks(beta[..., None], C)
    G, Aqk, P = chunkwise.intra(q, k, g, beta)
    torch.testing.assert_close(G, g.cumsum(-2))
    torch.testing.assert_close(Aqk, chunkwise.decayed_scores(q, k, G))
    assert (P is None) == (beta is None)
    if P is not None:
        Akk = chunkwise.decayed_scores(k, k, G)
        eye = torch.eye(C, dtype=torch.float64)
        product = P @ (eye + beta * Akk.tril(-1))
        torch.testing.assert_close(product, eye.expand_as(product))


def test_intra_with_beta_zero_has_the_identity_for_inverse():
    x = member("scalar", "delta", T=C)
    k, g = (
        chunkwise.to_chunks(t, C) for t in (x["k"], x["g"][:, :, :1, None])
    )
    _, _, P = chunkwise.intra(k, k, g, torch.zeros_like(k[..., :1]))
    assert P.equal(torch.eye(C, dtype=torch.float64).expand_as(P))


def test_sum_after_is_what_a_chunk_still_decays_by():
    g, G = running_gates((2, 3, 8, 4), -1.0)
    torch.testing.assert_close(chunkwise.sum_after(g), G[..., -1:, :] - G)
    assert chunkwise.sum_after(g)[..., -1, :].eq(0).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", GATES[2:])
@pytest.mark.parametrize("chunk_size", [1, 8, 16, 64])
def test_chunkwise_is_the_loop(gate, rule, chunk_size):
    x = member(gate, rule, B=2, T=37, H=2, HV=2)
    if gate == "scalar":
        x["g"] = x["g"][..., None]
    state = x.pop("initial_state")
    tokens = [x[n] for n in ("q", "k", "v", "g", "beta") if n in x]
    o, S = chunkwise.chunkwise(
        **x, scale=0.5, initial_state=state, chunk_size=chunk_size
    )
    ref_o, ref_S = steps.scan(steps.recurrence, state, *tokens)
    torch.testing.assert_close((o, S), (0.5 * ref_o, ref_S))


@pytest.mark.parametrize("strength", [-10.0, -20.0])
@pytest.mark.parametrize("gate", GATES[2:])
def test_strong_gates_keep_their_gradient_in_fp32(gate, strength):
    x = member(gate, "delta", T=40, H=2, HV=2, strength=strength)
    if gate == "scalar":
        x["g"] = x["g"][..., None]
    grads = []
    for dtype in (torch.float32, torch.float64):
        y = {name: t.to(dtype) for name, t in x.items()}
        y["g"].requires_grad_()
        o, S = chunkwise.chunkwise(**y, scale=1.0, chunk_size=16)
        (o.sum() + S.sum()).backward()
        grads.append(y["g"].grad)
    for part in (slice(0, 16), slice(16, 32), slice(32, 40)):
        assert relative_error(grads[0][:, part], grads[1][:, part]) < 1e-4
