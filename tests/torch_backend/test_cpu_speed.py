"""What PyTorch's backend does on a CPU, counted instead of timed."""

import pytest
import torch
from support.inputs import Largest

import fastweights as fw
from fastweights.arguments import RecurrenceOperands, RecurrenceOptions
from fastweights.checks import Footprint, relative_error
from fastweights.ops import decode
from fastweights.reference import chunkwise
from fastweights.torch_backend import recurrence as torch_recurrence
from fastweights_lab.bench import speed

members = pytest.mark.parametrize(
    "member", [name for name in speed.MEMBERS if hasattr(fw, name)]
)

OPTIONS = RecurrenceOptions(scale=0.3)


def small(member, B, T, H, D):
    shape = speed.Shape(B, T, H, H, D, D)
    return speed.inputs(member, shape, "mild", "cpu", torch.float32)


def arguments(member, B, T, H, D):
    """q, k, v, g, beta and erase_key, as a backend gets them."""
    x = small(member, B, T, H, D)
    if "g" in x and x["g"].dim() == 1:
        x["g"] = x["g"].expand(B, T, H)
    return [*map(x.get, ("q", "k", "v", "g", "beta", "erase_key"))]


@members
def test_one_token_is_one_step(member):
    """Nothing is larger than the state: one token is not padded to 64."""
    x = arguments(member, 1, 1, 2, 8)
    with Footprint() as seen:
        _, _, saved = torch_recurrence.forward(RecurrenceOperands(*x), OPTIONS)
    assert seen.largest == 2 * 8 * 8
    assert not any(x.numel() for x in saved)
    assert seen.calls <= 26


@members
def test_a_decoded_token_takes_few_operations(member):
    """The loop of linear_recurrence and a copy of the state took 45 to 64."""
    x = arguments(member, 1, 1, 2, 8)
    state = torch.zeros(1, 2, 8, 8)
    with Footprint() as seen:
        decode._decode(*x, state, None, None, 0.3, "auto")
    assert seen.calls <= 23


@pytest.mark.parametrize("T", [3, 20, 37])
def test_no_chunk_is_longer_than_its_sequence(T):
    x = arguments("gated_deltanet", 1, T, 2, 8)
    with Footprint() as seen:
        torch_recurrence.forward(RecurrenceOperands(*x), OPTIONS)
    # Scores of queries and of keys; both side by side; the state
    assert seen.largest == max(2 * 2 * T * T, 2 * 2 * T * 8, 2 * 8 * 8)


def count(seen, *names):
    return sum(seen.calls[name] for name in names)


def test_a_chunk_is_exponentiated_once_and_inverted_by_substitution():
    """Both score matrices share their decays: 64 numbers of 64, not 128."""
    q, k = torch.randn(2, 1, 1, 1, 64, 8)
    g, beta = -torch.rand(2, 1, 1, 1, 64, 1)
    e = -beta * k
    with Largest() as seen:
        chunkwise.intra(q, k, g, e)
    assert count(seen, "exp", "exp_", "exp2", "exp2_") == 1
    assert count(seen, "bmm", "mm") == 1
    with Largest() as seen:
        chunkwise.intra(q, k, None, e)
    assert count(seen, "exp", "exp_", "exp2", "exp2_") == 0


@members
def test_a_training_step_of_one_chunk(member):
    """No product reads a state that is empty, or passes its gradient on."""
    x = arguments(member, 2, 32, 2, 8)
    with Largest() as seen:
        o, _, saved = torch_recurrence.forward(RecurrenceOperands(*x), OPTIONS)
        torch_recurrence.backward(
            o, None, RecurrenceOperands(*x), saved, OPTIONS
        )
    gate, delta = speed.MEMBERS[member]
    products = 11 if delta else 7
    products += 3 * (gate == "channel")  # two strips of rows
    assert count(seen, "bmm", "mm") == products


@members
def test_rows_computed_apart_are_the_rows_computed_together(
    member, monkeypatch
):
    x = small(member, 5, 70, 2, 8)
    results = []
    for entries in (1, 2**20):
        monkeypatch.setattr(torch_recurrence, "SCORES_IN_CACHE", entries)
        leaves = {n: t.double().requires_grad_() for n, t in x.items()}
        o, state = getattr(fw, member)(**leaves)
        loss = o.square().sum() + state.sum()
        grads = torch.autograd.grad(loss, [*leaves.values()])
        results.append((o, state, *grads))
    for y, ref in zip(*results, strict=True):
        assert relative_error(y, ref) < 1e-13
