"""Memories that look for a combination of traits."""

import json
import math

import pytest
import torch

import fastweights as fw
from fastweights.deep import networks, optimisers
from fastweights.fast_weights import learn, online_learner, sgd, squared_error
from fastweights_lab import records
from fastweights_lab.experiments import hidden_habits


@pytest.fixture
def text():
    k, v, _ = hidden_habits.drawn(2, 24, source=torch.manual_seed(0), traits=6)
    return k.double(), v.double()


def start(forgets=False):
    slow = hidden_habits.network_start(torch.manual_seed(1), 6, forgets)
    return [x[0].double() for x in slow]


def test_two_traits_decide_a_value() -> None:
    k, v, habits = hidden_habits.drawn(
        20, 300, source=torch.Generator().manual_seed(3), traits=6
    )
    torch.testing.assert_close(k.norm(dim=-1), torch.ones(20, 300))
    assert v.unique().tolist() == [-1, 1]
    assert (v.mean() - hidden_habits.USUAL).abs() < 0.02
    for keys, values, habit in zip(k, v, habits, strict=True):
        found = keys[values == 1]  # two traits are the same in all of them
        same = (found == found[0]).all(0).nonzero().flatten()
        assert same.tolist() == habit.sort().values.tolist()


def test_a_text_has_a_new_habit_from_some_function_on() -> None:
    old_k, old_v, old = hidden_habits.drawn(
        50, 64, source=torch.manual_seed(0), traits=6
    )
    for at in (None, 32):
        k, v, habits = hidden_habits.drawn_to_change(
            50, 64, source=torch.manual_seed(0), traits=6, at=at
        )
        assert torch.equal(k, old_k) and torch.equal(habits[:, 0], old)
        assert not torch.equal(habits[:, 1], old)
        first = [
            (row.nonzero().flatten().tolist() or [64])[0] for row in v != old_v
        ]
        assert min(first) == 32 if at else min(first) < 16 < 40 < max(first)


def test_agreement_is_the_covariance_over_habits() -> None:
    source = torch.Generator().manual_seed(4)
    pair, _, _ = hidden_habits.drawn(2, source=source, traits=6)
    v, _ = hidden_habits.new_habit(pair.expand(100_000, 2, 6), source)
    got = hidden_habits.agreement(pair, pair)
    torch.testing.assert_close(got, torch.cov(v.T), rtol=0, atol=0.01)


@pytest.mark.parametrize("chunk", [1, 5, 24])
def test_the_network_is_the_library_s(text, chunk) -> None:
    k, v = text
    slow = start()
    slow[4] = torch.full_like(slow[4], 0.1).log()
    W1, b1, W2, b2 = (x.expand(2, *x.shape[1:])[:, None] for x in slow[:4])
    first = (W1, b1[..., 0, :]), (W2, b2[..., 0, :])
    learner = online_learner(
        networks.network(torch.tanh),
        squared_error,
        optimisers.stale(sgd, chunk),
        read="before",
    )
    at = k[:, :, None]
    rate = torch.full((2, 24, 1), 0.1, dtype=k.dtype)
    want, _ = learn(learner, (first, None), at, at, v[..., None, None], rate)
    # read="before" answers with the weights before the token's own step; the
    # guesses of a chunk are all made at the chunk's first weights
    got, _ = hidden_habits.network(slow, k, v, chunk)
    begins = torch.arange(0, 24, chunk)
    torch.testing.assert_close(got[:, begins], want[:, begins, 0, 0])


@pytest.mark.parametrize("chunk", [1, 8])
def test_weights_go_a_part_of_the_way_back(text, chunk) -> None:
    parts = [(x[:, :chunk], x[:, chunk : 2 * chunk]) for x in text]
    (k, later_k), (v, later_v) = parts
    *first, logs, forgetting = start(forgets=True)
    logs = torch.full_like(logs, 0.05).log()
    _, once = hidden_habits.network([*first, logs], k, v, chunk)
    _, twice = hidden_habits.network([*once, logs], later_k, later_v, chunk)
    _, got = hidden_habits.network(
        [*first, logs, forgetting],
        torch.cat([k, later_k], 1),
        torch.cat([v, later_v], 1),
        chunk,
    )
    lost = 1 - math.exp(-chunk / 300)
    for w0, w1, w2, w in zip(first, once, twice, got, strict=True):
        torch.testing.assert_close(
            w, w2 - lost * (w1 - w0), rtol=1e-4, atol=1e-6
        )


def test_the_triangular_solve_is_the_delta_rule(text) -> None:
    k, v = text
    got = hidden_habits.by_matrix(k, v, 0.4) - hidden_habits.USUAL
    v = v - hidden_habits.USUAL
    at = k[:, :, None]
    rate = torch.full((2, 24, 1), 0.4, dtype=k.dtype)
    after, _ = fw.deltanet(at, at, v[..., None, None], rate, scale=1.0)
    # after its step a token's error is 1 - rate of its guess's
    error = (v - after[..., 0, 0]) / (1 - 0.4)
    torch.testing.assert_close(got, v - error)


def test_the_best_fit_is_a_fit_to_each_prefix(text) -> None:
    k, v = text
    overlaps = k @ k.mT + 0.1 * torch.eye(24, dtype=k.dtype)
    got = hidden_habits.best_fit(overlaps, v)
    for t in range(24):
        weights = torch.linalg.solve(overlaps[:, :t, :t], v[:, :t, None])
        want = overlaps[:, t, None, :t] @ weights
        torch.testing.assert_close(got[:, t], want[:, 0, 0])


def test_attention_averages_the_values_so_far(text) -> None:
    k, v = text
    got = hidden_habits.by_softmax(k, v, 3.0)
    assert (got[:, 0] == hidden_habits.USUAL).all()
    for t in range(1, 24):
        weights = (3 * k[:, :t] @ k[:, t, :, None]).softmax(1)[..., 0]
        torch.testing.assert_close(got[:, t], (weights * v[:, :t]).sum(1))


def test_training_helps() -> None:
    def draw(*shape, source):
        return hidden_habits.drawn(*shape, source=source, traits=6)

    slow = hidden_habits.network_start(torch.manual_seed(0), 6)
    after = hidden_habits.trained(slow, draw, (3, 4, 32), 20)
    k, v, _ = draw(16, 32, source=torch.manual_seed(2))
    errors = [
        hidden_habits.errors(hidden_habits.network(weights, k, v)[0], v).mean()
        for weights in (slow, after)
    ]
    assert errors[1] < errors[0]


def test_the_program_prints_a_record(monkeypatch, capsys) -> None:
    monkeypatch.setattr(hidden_habits, "FUNCTIONS", 32)
    monkeypatch.setattr(hidden_habits, "TEXTS", 2)
    monkeypatch.setattr("sys.argv", ["hidden_habits", "--steps", "1"])
    hidden_habits.main()
    found = json.loads(capsys.readouterr().out)
    shipped = records.load("hidden_habits")
    assert list(found) == list(shipped) == list(hidden_habits.TRAININGS)
    for name in found:
        shapes = [
            [torch.tensor(x).shape for x in rows]
            for rows in (found[name], shipped[name])
        ]
        assert shapes[0] == shapes[1]
