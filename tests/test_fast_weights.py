"""Learners that are layers of the family, and learners that are not."""

import pytest
import torch
from support.inputs import member_inputs

import fastweights as fw
from fastweights.fast_weights import (
    decayed_sgd,
    inner_product,
    linear_model,
    momentum_sgd,
    online_learner,
    sgd,
    squared_error,
)
from fastweights.reference import steps

B, T, H, K, V = 2, 15, 2, 4, 3


def inputs(gate, rule):
    x = member_inputs(gate, rule, B=B, T=T, H=H, HV=H, K=K, V=V)
    rates = x.get("beta", torch.ones(B, T, H, dtype=torch.float64))
    return x, (x["q"], x["k"], x["v"], rates)


LAYERS = {
    "linear_attention": ("none", "additive", inner_product, sgd),
    "mamba2": ("head", "additive", inner_product, decayed_sgd),
    "deltanet": ("none", "delta", squared_error, sgd),
    "gated_deltanet": ("head", "delta", squared_error, decayed_sgd),
    "gla": ("channel", "additive", inner_product, decayed_sgd),
    "kda": ("channel", "delta", squared_error, decayed_sgd),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_a_learner(name):
    gate, rule, loss, optimiser = LAYERS[name]
    x, tokens = inputs(gate, rule)
    gates = [x["g"]] if "g" in x else []
    step = online_learner(linear_model, loss, optimiser)
    start = (x["initial_state"], None)
    o, (S, _) = steps.scan(step, start, *tokens, *gates)
    want = getattr(fw, name)(**x, scale=1.0, backend="loop")
    torch.testing.assert_close((o, S), want)


def test_gradients_pass_the_learner():
    x, tokens = inputs("head", "delta")
    step = online_learner(linear_model, squared_error, decayed_sgd)
    leaves = [t.clone().requires_grad_() for t in (*tokens, x["g"])]
    o, _ = steps.scan(step, (x["initial_state"], None), *leaves)
    found = torch.autograd.grad(o.square().sum(), leaves)
    names = ("q", "k", "v", "beta", "g")
    again = dict(zip(names, [t.clone() for t in leaves], strict=True))
    again = {n: t.detach().requires_grad_() for n, t in again.items()}
    o, _ = fw.gated_deltanet(
        **again, initial_state=x["initial_state"], scale=1.0, backend="loop"
    )
    want = torch.autograd.grad(o.square().sum(), [*again.values()])
    torch.testing.assert_close(found, want)


def test_momentum_is_two_running_sums():
    x, tokens = inputs("head", "delta")
    q, k, v, rate = tokens
    momentum = torch.rand(B, T, H, dtype=torch.float64)
    step = online_learner(linear_model, squared_error, momentum_sgd)
    S0 = x["initial_state"]
    start = (S0, torch.zeros_like(S0))
    o, (S, M) = steps.scan(step, start, *tokens, momentum, x["g"])
    for b in range(B):
        for h in range(H):
            W, R = S0[b, h], torch.zeros(K, V, dtype=torch.float64)
            for t in range(T):
                error = k[b, t, h] @ W - v[b, t, h]
                gradient = torch.outer(k[b, t, h], error)
                R = momentum[b, t, h] * R + rate[b, t, h] * gradient
                W = x["g"][b, t, h].exp() * W - R
                torch.testing.assert_close(o[b, t, h], q[b, t, h] @ W)
            torch.testing.assert_close(S[b, h], W)
            torch.testing.assert_close(M[b, h], R)


def test_momentum_zero_is_decay_of_the_old_weights():
    """e^g W - rate gradient(W): not Gated DeltaNet, whose order differs."""
    x, tokens = inputs("head", "delta")
    step = online_learner(linear_model, squared_error, momentum_sgd)
    start = (x["initial_state"], torch.zeros_like(x["initial_state"]))
    none = torch.zeros(B, T, H, dtype=torch.float64)
    o, _ = steps.scan(step, start, *tokens, none, x["g"])
    other, _ = fw.gated_deltanet(**x, scale=1.0)
    assert not torch.allclose(o, other)


def test_a_nest_of_weights_learns():
    """A model with a hidden layer: params is a dict."""
    torch.manual_seed(0)
    _, (q, k, v, rate) = inputs("none", "additive")
    params = {
        "W1": torch.randn(B, H, K, 6, dtype=torch.float64),
        "W2": torch.zeros(B, H, 6, V, dtype=torch.float64),
    }

    def model(params, x):
        hidden = torch.relu(linear_model(params["W1"], x))
        return linear_model(params["W2"], hidden)

    step = online_learner(model, squared_error, sgd)
    o, (last, _) = steps.scan(step, (params, None), q, k, v, 0.1 * rate)
    W1 = params["W1"][1, 0].clone().requires_grad_()
    W2 = params["W2"][1, 0].clone().requires_grad_()
    for t in range(T):
        error = torch.relu(k[1, t, 0] @ W1) @ W2 - v[1, t, 0]
        grads = torch.autograd.grad(error.square().sum() / 2, (W1, W2))
        with torch.no_grad():
            W1 -= 0.1 * grads[0]
            W2 -= 0.1 * grads[1]
    torch.testing.assert_close(last["W1"][1, 0], W1.detach())
    torch.testing.assert_close(last["W2"][1, 0], W2.detach())
    answer = torch.relu(q[1, -1, 0] @ W1) @ W2
    torch.testing.assert_close(o[1, -1, 0], answer.detach())
