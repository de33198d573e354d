"""Steps beyond the family, each against a formula of another kind."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fastweights as fw
from fastweights.checks import relative_error
from fastweights.deep.newton_schulz import newton_schulz
from fastweights.fast_weights import (
    linear_model,
    momentum_sgd,
    online_learner,
    squared_error,
)
from fastweights.reference import beyond, steps

B, T, H, K, V = 2, 11, 2, 4, 3
DOUBLE = {"dtype": torch.float64}


def draw(*sizes):
    """Tensors [B, T, H, n]; where n is 0 [B, T, H] with numbers in (0, 1)."""
    torch.manual_seed(0)
    return [
        torch.randn(B, T, H, n, **DOUBLE)
        if n
        else torch.rand(B, T, H, **DOUBLE)
        for n in sizes
    ]


def start(*shape):
    return torch.randn(B, H, *(shape or (K, V)), **DOUBLE)


def test_rwkv7():
    """The paper's matrices, which are the transposes of these."""
    q, k, v, g, kappa, a = draw(K, K, V, K, K, K)
    g, a, kappa = -g.square(), a.sigmoid(), F.normalize(kappa, dim=-1)
    S0 = start()
    o, S = steps.scan(beyond.rwkv7, S0, q, k, v, g, kappa, a)
    G = g.exp().diag_embed() - kappa[..., :, None] * (kappa * a)[..., None, :]
    writes = v[..., :, None] * k[..., None, :]
    state = S0.mT
    for t in range(T):
        state = state @ G[:, t] + writes[:, t]
        answer = torch.einsum("bhvk,bhk->bhv", state, q[:, t])
        assert relative_error(o[:, t], answer) < 1e-12
    assert relative_error(S, state.mT) < 1e-12


def test_delta_product_is_deltanet_with_more_tokens():
    n = 3
    q, g = draw(K, 0)
    k = F.normalize(torch.randn(B, T, n, H, K, **DOUBLE), dim=-1)
    v = torch.randn(B, T, n, H, V, **DOUBLE)
    beta, S0 = 2 * torch.rand(B, T, n, H, **DOUBLE), start()
    micro = k.transpose(2, 3), v.transpose(2, 3), -g, beta.transpose(2, 3)
    o, S = steps.scan(beyond.delta_product, S0, q, *micro)
    gates = torch.stack([-g, 0 * g, 0 * g], 2).flatten(1, 2)
    want, last = fw.gated_deltanet(
        q.repeat_interleave(n, 1),
        *(x.flatten(1, 2) for x in (k, v)),
        gates,
        beta.flatten(1, 2),
        scale=1.0,
        initial_state=S0,
    )
    assert relative_error(o, want[:, n - 1 :: n]) < 1e-12
    assert relative_error(S, last) < 1e-12


def test_mamba3_is_two_runs_of_mamba2():
    """One of the tokens, one of the tokens before them, their sum read."""
    q, k, v, dt, g, share = draw(K, K, V, 0, 0, 0)
    g = -g
    empty = start() * 0, start(K) * 0, start(V) * 0
    o, (S, *last) = steps.scan(beyond.mamba3, empty, q, k, v, dt, g, share)
    new = (share * dt)[..., None] * v
    # Token t writes once more with the next one: shifted by a place.
    old_k, old_v = (F.pad(x, (0, 0, 0, 0, 1, -1)) for x in (k, v))
    old_v = ((1 - share) * dt * g.exp())[..., None] * old_v
    runs = [
        fw.linear_recurrence(q, *kv, g, scale=1.0)
        for kv in ((k, new), (old_k, old_v))
    ]
    assert relative_error(o, runs[0][0] + runs[1][0]) < 1e-12
    assert relative_error(S, runs[0][1] + runs[1][1]) < 1e-12
    assert last[0].equal(k[:, -1]) and last[1].equal(v[:, -1])
    one = torch.ones_like(share)
    o, _ = steps.scan(beyond.mamba3, empty, q, k, v, dt, g, one)
    want, _ = fw.linear_recurrence(q, k, dt[..., None] * v, g, scale=1.0)
    assert relative_error(o, want) < 1e-12


def level(t, s):
    """The Fenwick tree's bucket of token s, seen from token t, by its bits."""
    end = t
    while end:
        bit = end & -end
        if end - bit <= s < end:
            return bit.bit_length()
        end -= bit
    return 0


@pytest.mark.parametrize("weighted", [True, False])
def test_log_linear_attention_is_a_masked_square(weighted):
    L = 5
    q, k, v, g, weights = draw(K, K, V, 0, L)
    weights = F.softplus(weights) if weighted else torch.ones_like(weights)
    empty = torch.zeros(B, H, L, K, V, **DOUBLE), 0
    o, (S, t) = steps.scan(beyond.log_linear, empty, q, k, v, -g, weights)
    assert t == T and S.shape == empty[0].shape
    if not weighted:
        want, _ = fw.linear_recurrence(q, k, v, -g, scale=1.0)
        assert relative_error(o, want) < 1e-12
        return
    scores = torch.einsum("bthk,bshk->bhts", q, k)
    for t in range(T):
        for s in range(T):
            far = (-g[:, s + 1 : t + 1]).sum(1).exp()
            here = weights[:, t, :, level(t, s) if s < t else 0]
            scores[:, :, t, s] *= far * here * (s <= t)
    want = torch.einsum("bhts,bshv->bthv", scores, v)
    assert relative_error(o, want) < 1e-12
    assert [level(6, s) for s in range(6)] == [3, 3, 3, 3, 2, 2]


def test_path_attention_is_products_of_matrices():
    q, k, v, w, beta = draw(K, K, V, K, 0)
    w, beta = F.normalize(w, dim=-1), 2 * beta
    empty = start(0, K), start(0, V)
    o, _ = steps.scan(beyond.path, empty, q, k, v, w, beta)
    eye = torch.eye(K, **DOUBLE)
    turn = eye - beta[..., None, None] * w[..., :, None] * w[..., None, :]
    for t in range(T):
        scores = []
        for s in range(t + 1):
            product = eye.expand(B, H, K, K)
            for i in range(s + 1, t + 1):
                product = turn[:, i] @ product
            turned = (product @ k[:, s, ..., None])[..., 0]
            scores.append((q[:, t] * turned).sum(-1))
        weights = torch.stack(scores, -1).softmax(-1)
        want = torch.einsum("bhs,bshv->bhv", weights, v[:, : t + 1])
        assert relative_error(o[:, t], want) < 1e-12


def empty_window():
    zero = 0 * start()
    return zero, zero, start(0, K), start(0, V), start(0)


@pytest.mark.parametrize("muon", [False, True])
def test_atlas_is_a_gradient_over_its_window(muon):
    q, k, v, strength, momentum, g, rate = draw(K, K, V, 0, 0, 0, 0)
    rate, window = 0.1 * rate, 3
    options = {"orthogonal": newton_schulz} if muon else {}
    step = partial(beyond.atlas, window=window, **options)
    rates = strength, momentum, -g, rate
    o, (last, *_) = steps.scan(step, empty_window(), q, k, v, *rates)
    S = M = torch.zeros(B, H, K, V, **DOUBLE)
    for t in range(T):
        at = slice(max(0, t - window + 1), t + 1)
        W = S.clone().requires_grad_()
        answers = torch.einsum("bhkv,bshk->bshv", W, k[:, at])
        errors = (answers - v[:, at]).square().sum(-1) / 2
        (slope,) = torch.autograd.grad((strength[:, at] * errors).sum(), W)
        M = momentum[:, t, :, None, None] * M + slope
        move = newton_schulz(M) if muon else M
        S = (-g[:, t]).exp()[..., None, None] * S
        S = S - rate[:, t, :, None, None] * move
    assert relative_error(last, S) < 1e-12
    answer = torch.einsum("bhkv,bhk->bhv", S, q[:, -1])
    assert relative_error(o[:, -1], answer) < 1e-12


def test_atlas_with_a_window_of_one_is_titans():
    q, k, v, strength, momentum, g = draw(K, K, V, 0, 0, 0)
    step = partial(beyond.atlas, window=1)
    one = torch.ones_like(g)
    rates = strength, momentum, -g, one
    o, _ = steps.scan(step, empty_window(), q, k, v, *rates)
    learner = online_learner(linear_model, squared_error, momentum_sgd)
    zero = torch.zeros(B, H, K, V, **DOUBLE)
    want, _ = steps.scan(
        learner, (zero, zero), q, k, v, strength, momentum, -g
    )
    assert relative_error(o, want) < 1e-12
