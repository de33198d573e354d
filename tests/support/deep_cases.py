"""Mechanisms of fastweights.deep: by chunks, and token by token as learners.

Each case draws its inputs by name and has two functions of them: what the
library computes, and the same as an online learner. Both return outputs and
all that the state says, as tensors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from fastweights import deep
from fastweights.deep.networks import network, normed, swiglu
from fastweights.deep.optimisers import (
    muon,
    newton,
    projected,
    stale,
    summed,
    to_norms_of,
)
from fastweights.fast_weights import (
    inner_product,
    learn,
    linear_model,
    momentum_sgd,
    online_learner,
    sgd,
    squared_error,
)

B, H, K, V, C = 2, 2, 4, 3, 5
DOUBLE = {"dtype": torch.float64}
# What is not there once per token.
WEIGHTS = (
    "W1",
    "b1",
    "W2",
    "b2",
    "W3",
    "gamma",
    "bias",
    "step_scale",
    "ridge",
)


class Case(NamedTuple):
    draw: Callable[[int], dict[str, torch.Tensor]]
    chunked: Callable[..., Any]
    learner: Callable[..., Any]


def per_token(T: int, **sizes: int) -> dict[str, torch.Tensor]:
    """Named after their last dimensions; sizes of 0 are rates in (0, 1)."""
    return {
        name: torch.randn(B, T, H, n, **DOUBLE)
        if n
        else torch.rand(B, T, H, **DOUBLE)
        for name, n in sizes.items()
    }


def per_head(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {
        name: 0.7 * torch.randn(H, *shape, **DOUBLE)
        for name, shape in shapes.items()
    }


def per_sequence(start):
    """The first weights, once per sequence."""
    return tree_map(lambda W: W.expand(B, *W.shape), start)


def zeros(start):
    return tree_map(torch.zeros_like, per_sequence(start))


def network_layers(x):
    found = [(x["W1"], x["b1"])]
    return [*found, (x["W2"], x["b2"])] if "W2" in x else found


def ttt(depth: int) -> Case:
    def draw(T):
        hidden = 6
        shapes = {"W1": (K, K), "b1": (K,)}
        if depth == 2:
            shapes = {"W1": (K, hidden), "b1": (hidden,)}
            shapes |= {"W2": (hidden, K), "b2": (K,)}
        x = per_token(T, q=K, k=K, v=K, rate=0)
        x |= per_head(**shapes, gamma=(K,), bias=(K,))
        return x | {"step_scale": 0.2 + torch.rand(C, **DOUBLE)}

    def chunked(x, **options):
        norm = x["gamma"], x["bias"]
        tokens = (x[name] for name in ("q", "k", "v", "rate"))
        return deep.ttt(
            *tokens, network_layers(x), norm, x["step_scale"], **options
        )

    def learner(x):
        T, start = x["q"].shape[1], tuple(network_layers(x))
        model = normed(network(), x["gamma"], x["bias"])
        step = online_learner(model, squared_error, summed(sgd, C))
        row = x["step_scale"][torch.arange(T) % C][:, None].expand(B, T, H)
        given = x["q"], x["k"], x["v"] - x["k"], x["rate"], row
        o, state = learn(step, (per_sequence(start), None), *given)
        return x["q"] + o, state

    return Case(draw, chunked, learner)


def titans(depth: int, norm: bool = False) -> Case:
    def draw(T):
        hidden = 6
        shapes = {"W1": (K, V), "b1": (V,)}
        if depth == 2:
            shapes = {"W1": (K, hidden), "b1": (hidden,)}
            shapes |= {"W2": (hidden, V), "b2": (V,)}
        if norm:
            shapes |= {"gamma": (V,), "bias": (V,)}
        x = per_token(T, q=K, k=K, v=V, rate=0, momentum=0, g=0)
        x |= {"rate": 0.1 * x["rate"], "g": -x["g"]}
        return x | per_head(**shapes)

    def chunked(x, **options):
        names = ("q", "k", "v", "rate", "momentum", "g")
        behind = (x["gamma"], x["bias"]) if norm else None
        tokens = (x[name] for name in names)
        return deep.titans(
            *tokens, network_layers(x), behind, chunk_size=C, **options
        )

    def learner(x):
        model = network()
        if norm:
            model = normed(model, x["gamma"], x["bias"])
        step = online_learner(model, squared_error, stale(momentum_sgd, C))
        start = tuple(network_layers(x))
        names = ("q", "k", "v", "rate", "momentum", "g")
        state = per_sequence(start), zeros(start)
        return learn(step, state, *(x[name] for name in names))

    return Case(draw, chunked, learner)


def prenormed(optimiser, project):
    """Of (kept, used): used is ``project`` of what the optimiser makes."""

    def step(params, gradient, memory, *rates):
        kept, memory = optimiser(
            params[0], lambda _: gradient(params)[1], memory, *rates
        )
        return (kept, project(kept)), memory

    return step


def lact(with_muon: bool, momentum: bool, prenorm: bool = False) -> Case:
    def draw(T):
        x = per_token(T, q=K, k=K, v=V, rate=0, rate1=0, rate2=0)
        if momentum:
            x |= per_token(T, momentum=0)
        return x | per_head(W1=(K, 6), W2=(6, V), W3=(K, 6))

    def start(x):
        return x["W1"], x["W2"], x["W3"]

    def chunked(x, **options):
        rates = torch.stack([x["rate"], x["rate1"], x["rate2"]], -1)
        given = x["q"], x["k"], x["v"], rates, start(x), x.get("momentum")
        options = {"muon": with_muon, "prenorm": prenorm, **options}
        return deep.lact(*given, chunk_size=C, **options)

    def plain(params, gradient, memory, momentum):
        one = torch.ones_like(momentum)
        none = torch.zeros_like(momentum)
        return momentum_sgd(params, gradient, memory, one, momentum, none)

    def learner(x):
        first = per_sequence(start(x))
        wrap = prenormed if prenorm else projected
        step = wrap(muon if with_muon else plain, to_norms_of(first))
        step = online_learner(
            (lambda w, x: swiglu(w[1], x)) if prenorm else swiglu,
            inner_product,
            summed(step, C, every="chunk"),
            read="before",
        )
        mean = torch.zeros_like(x["rate"])
        if momentum:
            parts = x["momentum"].split(C, 1)
            means = (m.mean(1, keepdim=True).expand_as(m) for m in parts)
            mean = torch.cat([*means], 1)
        rates = x["rate"], x["rate1"], x["rate2"]
        memory = zeros(start(x))
        if prenorm:
            first, rates = (first, first), (rates, rates)
        given = x["q"], x["k"], x["v"], rates, mean
        return learn(step, (first, memory), *given)

    return Case(draw, chunked, learner)


def mesa() -> Case:
    names = ("q", "k", "v", "g", "beta")

    def draw(T):
        x = per_token(T, q=K, k=K, v=V, g=0, beta=0)
        ridge = 0.25 + torch.rand(H, K, **DOUBLE)
        return x | {"g": -0.3 * x["g"], "ridge": ridge}

    def chunked(x, **options):
        tokens = (x[name] for name in names)
        return deep.mesa(*tokens, x["ridge"], solver_steps=12, **options)

    def learner(x):
        step = online_learner(linear_model, squared_error, newton)
        start = torch.zeros(H, K, V, **DOUBLE), torch.zeros(H, K, K, **DOUBLE)
        T = x["q"].shape[1]
        ridge = x["ridge"].expand(B, T, H, K)
        given = x["q"], x["k"], x["v"], x["beta"], x["g"], ridge
        return learn(step, per_sequence(start), *given)

    return Case(draw, chunked, learner)


DEEP_CASES = {
    "ttt-linear": ttt(1),
    "ttt-mlp": ttt(2),
    "titans-linear": titans(1),
    "titans-mlp": titans(2),
    "titans-norm": titans(2, norm=True),
    "lact": lact(True, True),
    "lact-plain": lact(False, False),
    "lact-momentum": lact(False, True),
    "lact-prenorm": lact(True, True, prenorm=True),
    "mesa": mesa(),
}


def deep_inputs(name: str, T: int, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return DEEP_CASES[name].draw(T)
