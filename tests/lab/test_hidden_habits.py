"""Memories that look for a combination of traits."""

import itertools
import json

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


def start():
    slow = hidden_habits.network_start(torch.manual_seed(1), 6)
    return [x[0].double() for x in slow]


def test_two_habits_decide_a_value() -> None:
    k, v, habits = hidden_habits.drawn(
        20, 300, source=torch.Generator().manual_seed(3), traits=6
    )
    torch.testing.assert_close(k.norm(dim=-1), torch.ones(20, 300))
    assert v.unique().tolist() == [-1, 0, 1] and v.mean().abs() < 0.02
    assert (v.square().mean() - hidden_habits.SQUARE).abs() < 0.02
    for keys, values, pairs in zip(k, v, habits, strict=True):
        for value, pair in zip((1, -1), pairs, strict=True):
            found = keys[values == value]  # two traits are alike in all
            alike = (found == found[0]).all(0).nonzero().flatten()
            assert alike.tolist() == pair.sort().values.tolist()
            other = keys[values == 0][:, pair] == found[0, pair]
            assert 0.02 < other.all(-1).float().mean() < 0.2  # both fit


def test_habits_of_three_traits() -> None:
    k, v, habits = hidden_habits.drawn(
        20, 300, source=torch.Generator().manual_seed(3), traits=8, size=3
    )
    assert habits.shape == (20, 2, 3)
    assert (v.square().mean() - hidden_habits.THREE_SQUARE).abs() < 0.02
    for keys, values, three in zip(k, v, habits[:, 0], strict=True):
        found = keys[values == 1][:, three]
        assert (found == found[0]).all()


def test_exactly_one_of_two_traits_decides_a_value() -> None:
    source = torch.Generator().manual_seed(3)
    k, v, habits = hidden_habits.drawn_odd(20, 300, source=source, traits=6)
    assert (v.square().mean() - hidden_habits.ODD_SQUARE).abs() < 0.02
    for keys, values, (one, other) in zip(k > 0, v, habits, strict=True):
        first, second = (
            keys[:, two[0]] != keys[:, two[1]] for two in (one, other)
        )
        assert torch.equal(values, first.float() - second.float())


def test_agreement_is_the_covariance_over_habits() -> None:
    source = torch.Generator().manual_seed(4)
    pair, _, _ = hidden_habits.drawn(2, source=source, traits=6)
    v, _ = hidden_habits.new_habits(pair.expand(100_000, 2, 6), source)
    got = hidden_habits.agreement(pair, pair)
    torch.testing.assert_close(got, torch.cov(v.T), rtol=0, atol=0.01)


def test_habits_count_as_found_when_errors_are_small() -> None:
    assert hidden_habits.needed(torch.tensor([0.5, 0.2, 0.09, 0.2])) == 48


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


@pytest.mark.parametrize("units", [0, 3])
def test_ttt_s_memories_are_the_library_s(units, monkeypatch) -> None:
    monkeypatch.setattr(hidden_habits, "TTT_CHUNK", 5)
    k, v, _ = hidden_habits.drawn(2, 24, source=torch.manual_seed(0), traits=6)
    k, v = k.double(), v.double()
    slow = hidden_habits.ttt_start(torch.manual_seed(1), 6, units)
    *tensors, logs = ((x + 0.1).double() for x in slow)
    logs[:] = torch.tensor([2.0, 0.1]).log()[:, None, None]
    learner = online_learner(
        networks.network(),
        squared_error,
        optimisers.summed(sgd, 5),
    )
    of_one = [x[0].expand(2, *x.shape[2:])[:, None] for x in tensors]
    first = tuple(zip(of_one[::2], of_one[1::2], strict=True))
    at = 2 * k[:, :, None]
    rate = torch.full((2, 24, 1), 0.1, dtype=k.dtype)
    want, _ = learn(
        learner,
        (first, None),
        at.roll(-1, 1),  # asked by the key that comes next
        at,
        v[..., None, None],
        rate,
        torch.ones_like(rate),
    )
    got = hidden_habits.ttt([*tensors, logs], k, v)[0]
    torch.testing.assert_close(got[:, 1:], want[:, :-1, 0, 0])
    start = networks.network()(first, at[:, 0])
    torch.testing.assert_close(got[:, :1], start[..., 0])


def test_the_triangular_solve_is_the_delta_rule(text) -> None:
    k, v = text
    got = hidden_habits.delta_rule(k, v, 0.4)
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


@pytest.mark.parametrize("odd", [False, True])
def test_a_programmer_averages_over_all_habits_that_fit(text, odd) -> None:
    k, _ = (x[0] for x in text)
    one, other = k.new_tensor([[0, 3], [4, 1]]).long()
    v = hidden_habits.exactly_one(k, torch.stack([one, other]))
    if not odd:
        there = k > 0
        v = there[:, one].all(1).double() - there[:, other].all(1).double()
    sides = ((1,),) if odd else itertools.product((True, False), repeat=2)
    fits = []
    for (x, y), side in itertools.product(
        itertools.combinations(range(6), 2), list(sides)
    ):
        there = k[:, [x, y]] > 0
        fit = (
            there.sum(1) == 1 if odd else (there == k.new_tensor(side)).all(1)
        )
        fits.append(((x, y), fit.double()))
    values = torch.stack(
        [
            a - b
            for (x, a), (y, b) in itertools.product(fits, fits)
            if not {*x} & {*y}
        ]
    )
    got = hidden_habits.by_programmer(k, v, odd)
    for t in range(24):
        so_far = (values[:, :t] == v[:t]).all(1)
        torch.testing.assert_close(got[t], values[so_far, t].mean().float())


def test_attention_averages_the_values_so_far(text) -> None:
    k, v = text
    got = hidden_habits.by_softmax(k, v, 3.0)
    assert (got[:, 0] == 0).all()
    for t in range(1, 24):
        weights = (3 * k[:, :t] @ k[:, t, :, None]).softmax(1)[..., 0]
        torch.testing.assert_close(got[:, t], (weights * v[:, :t]).sum(1))


def test_training_helps() -> None:
    def draw(*shape, source):
        return hidden_habits.drawn(*shape, source=source, traits=6)

    slow = hidden_habits.network_start(torch.manual_seed(0), 6)
    after = hidden_habits.train(slow, draw, (3, 4, 32), 20)
    k, v, _ = draw(16, 32, source=torch.manual_seed(2))
    errors = [
        hidden_habits.errors(hidden_habits.network(weights, k, v)[0], v).mean()
        for weights in (slow, after)
    ]
    assert errors[1] < errors[0]


def test_the_program_prints_a_record(monkeypatch, capsys) -> None:
    monkeypatch.setattr(hidden_habits, "FUNCTIONS", 32)
    monkeypatch.setattr(hidden_habits, "TEXTS", 2)
    monkeypatch.setattr(hidden_habits, "LISTS", {12: 128})
    short = {
        name: x._replace(functions=32)
        for name, x in hidden_habits.TRAININGS.items()
    }
    monkeypatch.setattr(hidden_habits, "TRAININGS", short)
    monkeypatch.setattr("sys.argv", ["hidden_habits", "--steps", "1"])
    hidden_habits.main()
    found = json.loads(capsys.readouterr().out)
    shipped = records.load("hidden_habits")
    others = ["the list", "a programmer"]
    assert list(found) == list(shipped) == [*short, *others]
    assert found.pop("the list") == shipped.pop("the list")[:1]
    shipped_errors = shipped.pop("a programmer")
    for kind, errors in found.pop("a programmer").items():
        assert len(errors) == 1 and len(shipped_errors[kind]) == 4
        assert len(errors[0]) == len(shipped_errors[kind][0]) == 4
    for name in found:
        shapes = [
            [torch.tensor(x).shape for x in rows]
            for rows in (found[name], shipped[name])
        ]
        assert shapes[0] == shapes[1]
