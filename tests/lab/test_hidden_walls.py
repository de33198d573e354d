"""Memories that look for a wall, against loops and the library."""

import json
import math

import pytest
import torch

import fastweights as fw
from fastweights.deep import networks, optimisers
from fastweights.fast_weights import learn, online_learner, sgd, squared_error
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


def test_a_text_has_new_walls_from_a_random_token_on() -> None:
    k, v = hidden_walls.drawn_to_jump(50, 64, source=torch.manual_seed(0))
    old_k, old_v, _ = hidden_walls.drawn(50, 64, source=torch.manual_seed(0))
    assert torch.equal(k, old_k)
    first = [
        (row.nonzero().flatten().tolist() or [64])[0] for row in v != old_v
    ]
    assert min(first) < 16 and max(first) > 40
    assert set(v.unique().tolist()) == {-1, 0, 1}


@pytest.mark.parametrize("chunk", [1, 8])
def test_weights_go_a_part_of_the_way_back(text, chunk) -> None:
    parts = [(x[:, :chunk], x[:, chunk : 2 * chunk]) for x in text]
    (k, later_k), (v, later_v) = parts
    slow = hidden_walls.network_start(torch.manual_seed(1), "forgets")
    *first, logs, forgetting = (x[0].double() for x in slow)
    logs = torch.full_like(logs, 0.05).log()
    _, once = hidden_walls.network([*first, logs], k, v, chunk)
    _, twice = hidden_walls.network([*once, logs], later_k, later_v, chunk)
    _, got = hidden_walls.network(
        [*first, logs, forgetting],
        torch.cat([k, later_k], 1),
        torch.cat([v, later_v], 1),
        chunk,
        "forgets",
    )
    lost = 1 - math.exp(-chunk / 300)
    for w0, w1, w2, w in zip(first, once, twice, got, strict=True):
        torch.testing.assert_close(
            w, w2 - lost * (w1 - w0), rtol=1e-4, atol=1e-6
        )


def test_much_is_forgotten_where_errors_are_above_those_of_late() -> None:
    one, steady = torch.ones(2, 1, 1), torch.full((2, 1, 1), 0.3)
    kept, (short, long) = hidden_walls.surprised(
        torch.tensor([0.3, 4.0])[:, None, None], steady, steady
    )
    assert kept[0] > 0.999 > 0.7 > kept[1]
    torch.testing.assert_close(short[1], 0.3 + 15.7 / 16 * one[0])
    torch.testing.assert_close(long[1], 0.3 + 15.7 / 128 * one[0])
    # with the whole chunk's errors, in one step
    kept, (short, _) = hidden_walls.surprised(
        one.expand(2, 16, 1), steady, steady
    )
    torch.testing.assert_close(short, one)
    assert (kept < 1e-6).all()


def test_a_surprised_network_learns_as_before_while_nothing_jumps() -> None:
    record = records.load("hidden_walls")["steps"]
    start = [torch.tensor(x)[0] for x in record]
    k, v, _ = hidden_walls.tested(8)
    plain, _ = hidden_walls.network(start, k, v, 16)
    other, _ = hidden_walls.network(start, k, v, 16, "surprised")
    assert (plain - other).square().mean() < 0.02 * v.square().mean()
    k, v, _ = hidden_walls.jumped(8)
    plain, _ = hidden_walls.network(start, k, v, 16)
    other, _ = hidden_walls.network(start, k, v, 16, "surprised")
    before, after = (
        hidden_walls.errors(x, v, 128)[4:].mean() for x in (plain, other)
    )
    assert after < 0.85 * before


def test_the_triangular_solve_is_the_delta_rule(text) -> None:
    k, v = text
    got = hidden_walls.delta_rule(k, v, 0.4)
    at = k[:, :, None]
    rate = torch.full((2, 24, 1), 0.4, dtype=k.dtype)
    after, _ = fw.deltanet(at, at, v[..., None, None], rate, scale=1.0)
    # after its step a token's error is 1 - rate of its guess's
    error = (v - after[..., 0, 0]) / (1 - 0.4)
    torch.testing.assert_close(got, v - error)


def test_the_triangular_solve_forgets_like_a_loop(text) -> None:
    k, v = text
    got = hidden_walls.delta_rule(k, v, 0.4, 0.9)
    S = torch.zeros_like(k[:, 0])
    for t in range(24):
        guess = (S * k[:, t]).sum(-1)
        torch.testing.assert_close(got[:, t], guess)
        S = 0.9 * S + 0.4 * (v[:, t] - guess)[:, None] * k[:, t]


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
    monkeypatch.setattr(hidden_walls, "TOKENS", 128)
    monkeypatch.setattr(hidden_walls, "TEXTS", 2)
    names = ["Muon", "forgets", "chunks of 64"]
    monkeypatch.setattr("sys.argv", ["hidden_walls", *names, "--steps", "1"])
    hidden_walls.main()
    found = json.loads(capsys.readouterr().out)
    shipped = records.load("hidden_walls")
    assert list(found) == names
    assert list(shipped) == list(hidden_walls.TRAININGS)
    for name in found:
        shapes = [
            [torch.tensor(x).shape for x in rows]
            for rows in (found[name], shipped[name])
        ]
        assert shapes[0] == shapes[1]
