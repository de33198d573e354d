"""Engines, prompts, and the answers that requests have alone."""

import functools

import pytest
import torch

from fastweights.models.sampling import Sampling
from fastweights.serving import Engine
from support import model_cases

SIZES = {"vocab_size": 31, "dim": 16, "mlp_multiple": 16}
HYBRID = ("softmax", "gated_deltanet")


def make_served_model(pattern=HYBRID, **sizes):
    """A model whose next token depends on what it has read."""
    model = model_cases.make_model(pattern, **SIZES | sizes).double()
    model.norm.weight.data.fill_(30)
    return model


served_model = functools.cache(make_served_model)


def make_engine(model=None, **options):
    options = {
        "num_rows": 3,
        "tokens_per_row": 64,
        "max_prefill_tokens": 8,
    } | options
    return Engine(served_model() if model is None else model, **options)


def make_prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(31, (n,), generator=generator) for n in lengths]


@torch.no_grad()
def generate_alone(
    model, prompt, n, temperature=0.0, top_p=1.0, stop=(), seed=0, drawn=0
):
    """The answer, one token at a time, on states of its own."""
    draws = Sampling(
        torch.tensor([temperature], dtype=torch.float64),
        torch.tensor([top_p]),
        torch.tensor([seed]),
        torch.tensor([drawn]),
    )
    x, states, new = torch.as_tensor(prompt)[None], None, []
    for _ in range(n):
        logits, states = model(x, states)
        token = draws.draw(logits[:, -1], *logits[:, -1].max(-1))
        if int(token) in stop:
            break
        new.append(int(token))
        x = token[None]
    return new


def run_engine(engine, most=500):
    """The tokens that come, by request."""
    found = {}
    while engine.busy:
        for request, token in engine.step():
            found.setdefault(request, []).append(token)
        most -= 1
        assert most
    assert len(engine.pool.free) == engine.pool.num_rows
    return found


OPTIONS = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.8, "seed": 2**63 - 1},
    {"temperature": 1.3, "top_p": 0.5, "seed": 3, "stop": (4, 9)},
    {"stop": tuple(range(0, 31, 3))},
]
PROMPT_LENGTHS = (1, 5, 20, 9, 2, 30, 8)
PATTERNS = [
    HYBRID,
    ("gated_deltanet",),
    ("mamba2",),
    ("ttt_linear",),
    ("mlstm",),
    ("lact",),
]
GPU = pytest.mark.gpu


def record_prefills(engine):
    """How many tokens each piece of each call has that reads prompts."""
    sizes, read = [], engine.runner.prefill

    def counts(pieces):
        sizes.append([n for _, n in pieces])
        read(pieces)

    engine.runner.prefill = counts
    return sizes
