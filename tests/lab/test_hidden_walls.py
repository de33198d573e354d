"""Memories that look for a wall, against loops and the library."""

import json

import pytest
import torch

import fastweights as fw
from fastweights.deep import networks, optimisers
from fastweights.fast_weights import (
    learn,
    online_learner,
    sgd,
    squared_error,
)
from fastweights_lab import records
from fastweights_lab.experiments import hidden_walls


@pytest.fixture
def text():
    k, v, _ = hidden_walls.drawn(2, 24, source=torch.manual_seed(0))
    return k.double(), v.double()


def test_a_wall_parts_the_keys() -> None:
    k, v, walls = hidden_walls.drawn(3, 5, 40, source=torch.manual_seed(0))
    assert k.shape == (3, 5, 40, hidden_walls.WIDTH)
    torch.testing.assert_close(k.norm(dim=-1), torch.ones(3, 5, 40))
    assert torch.equal(v, (k @ walls.mT).sign().mean(-1))
    assert v.unique().tolist() == [-1, 0, 1]


@pytest.mark.parametrize("chunk", [1, 5, 24])
def test_the_network_is_the_library_s(text, chunk) -> None:
    k, v = text
    slow = hidden_walls.network_start(torch.manual_seed(1))
    slow = [x[0].double() for x in slow]
    slow[4] = torch.full_like(slow[4], 0.1).log()
    W1, b1, W2, b2 = (x.expand(2, *x.shape[1:])[:, None] for x in slow[:4])
    start = (W1, b1[..., 0, :]), (W2, b2[..., 0, :])
    learner = online_learner(
        networks.network(torch.tanh),
        squared_error,
        optimisers.stale(sgd, chunk),
        read="before",
    )
    at = k[:, :, None]
    rate = torch.full((2, 24, 1), 0.1, dtype=k.dtype)
    want, _ = learn(learner, (start, None), at, at, v[..., None, None], rate)
    # read="before" answers with the weights before the token's own step; the
    # guesses of a chunk are all made at the chunk's first weights
    got, _ = hidden_walls.network(slow, k, v, chunk)
    first = torch.arange(0, 24, chunk)
    torch.testing.assert_close(got[:, first], want[:, first, 0, 0])


def test_muon_s_first_step_has_singular_values_of_one(text) -> None:
    k, v = (x[:, :16] for x in text)
    slow = hidden_walls.network_start(torch.manual_seed(1), "Muon")
    slow = [x[0].double() for x in slow]
    _, (W1, *_) = hidden_walls.network(slow, k, v, 16, "Muon")
    rate = slow[4][0, 0].exp()
    sizes = torch.linalg.svdvals((slow[0] - W1) / rate)
    assert sizes.min() > 0.8 and sizes.max() < 1.2


def test_behind_a_frozen_matrix_learns_the_delta_rule(text) -> None:
    k, v = text
    slow = hidden_walls.network_start(torch.manual_seed(1), "frozen")
    W1, b1, W2, b2, logs = (x[0].double() for x in slow)
    start = [W1, b1, 0 * W2, 0 * b2, torch.full_like(logs, 0.05).log()]
    got, last = hidden_walls.network(start, k, v, 1, "frozen")
    h = (k @ W1 + b1).tanh()
    features = torch.cat([h, torch.ones_like(h[..., :1])], -1)
    torch.testing.assert_close(got, hidden_walls.delta_rule(features, v, 0.05))
    for one, other in zip(last[:2], (W1, b1), strict=True):
        assert torch.equal(one, other.expand_as(one))


def test_the_walls_jump_in_the_middle() -> None:
    half = hidden_walls.TOKENS // 2
    k, v, _ = hidden_walls.tested(3)
    new_k, new_v, walls = hidden_walls.jumped(3)
    assert torch.equal(new_k[:, :half], k[:, :half])
    assert torch.equal(new_v[:, :half], v[:, :half])
    assert not torch.equal(new_k[:, half:], k[:, half:])
    later = (new_k[:, half:] @ walls.mT).sign().mean(-1)
    assert torch.equal(new_v[:, half:], later)


def test_the_triangular_solve_is_the_delta_rule(text) -> None:
    k, v = text
    got = hidden_walls.delta_rule(k, v, 0.4)
    at = k[:, :, None]
    rate = torch.full((2, 24, 1), 0.4, dtype=k.dtype)
    after, _ = fw.deltanet(at, at, v[..., None, None], rate, scale=1.0)
    # after its step a token's error is 1 - rate of its guess's
    error = (v - after[..., 0, 0]) / (1 - 0.4)
    torch.testing.assert_close(got, v - error)


def test_the_best_fit_is_a_fit_to_each_prefix(text) -> None:
    k, v = text
    overlaps = k @ k.mT + 0.1 * torch.eye(24, dtype=k.dtype)
    got = hidden_walls.best_fit(overlaps, v)
    for t in range(24):
        weights = torch.linalg.solve(overlaps[:, :t, :t], v[:, :t, None])
        want = overlaps[:, t, None, :t] @ weights
        torch.testing.assert_close(got[:, t], want[:, 0, 0])


def test_training_helps(monkeypatch) -> None:
    monkeypatch.setattr(hidden_walls, "TOKENS", 24)
    monkeypatch.setattr(hidden_walls, "TEXTS", 4)
    k, v, _ = hidden_walls.drawn(16, 24, source=torch.manual_seed(2))
    slow = hidden_walls.network_start(torch.manual_seed(0))

    def read(slow, k, v):
        return hidden_walls.network(slow, k, v, 8)[0]

    after = hidden_walls.trained(read, slow, 0.03, 20)
    errors = [
        hidden_walls.errors(read([x[0] for x in weights], k, v), v, 24)
        for weights in (slow, after)
    ]
    assert errors[1] < errors[0]


def test_the_program_prints_a_record(monkeypatch, capsys) -> None:
    monkeypatch.setattr(hidden_walls, "TOKENS", 64)
    monkeypatch.setattr(hidden_walls, "TEXTS", 2)
    monkeypatch.setattr("sys.argv", ["hidden_walls", "Muon", "--steps", "1"])
    hidden_walls.main()
    found = json.loads(capsys.readouterr().out)
    shipped = records.load("hidden_walls")
    assert found.keys() <= shipped.keys()
    for name in found:
        shapes = [
            [torch.tensor(x).shape for x in rows]
            for rows in (found[name], shipped[name])
        ]
        assert shapes[0] == shapes[1]
