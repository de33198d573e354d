"""Memories that look for a combination of traits."""

import json

import torch

from fastweights_lab import records
from fastweights_lab.experiments import hidden_habits, hidden_walls


def drawn(*shape, traits):
    source = torch.Generator().manual_seed(3)
    return hidden_habits.drawn(*shape, source=source, traits=traits)


def test_two_traits_decide_a_value() -> None:
    k, v = drawn(20, 300, traits=6)
    torch.testing.assert_close(k.norm(dim=-1), torch.ones(20, 300))
    assert v.unique().tolist() == [-1, 1]
    assert (v.mean() - hidden_habits.USUAL).abs() < 0.02
    for keys, values in zip(k, v, strict=True):
        found = keys[values == 1]  # two traits are the same in all of them
        assert ((found == found[0]).all(0)).sum() == 2


def test_agreement_is_the_covariance_over_habits() -> None:
    source = torch.Generator().manual_seed(4)
    pair = 2.0 * torch.randint(2, (2, 6), generator=source) - 1
    pair /= 6**0.5
    order = torch.rand(100_000, 6, generator=source).argsort(-1)[:, :2]
    wanted = 2 * torch.randint(2, (100_000, 2), generator=source) - 1
    v = 2.0 * ((pair[:, order] * wanted) > 0).all(-1) - 1  # [2, habits]
    want = torch.cov(v)
    got = hidden_habits.agreement(pair, pair)
    torch.testing.assert_close(got, want, rtol=0, atol=0.01)


def test_as_many_numbers_move_behind_a_frozen_matrix() -> None:
    for way in ("steps", "frozen"):
        W1, b1, W2, b2, _ = hidden_habits.network_start(
            torch.Generator(), 12, way
        )
        moving = [W2, b2] if way == "frozen" else [W1, b1, W2, b2]
        assert sum(x[0].numel() for x in moving) == 225
    assert hidden_habits.moving(16, 12) == hidden_walls.NUMBERS


def test_the_program_prints_a_record(monkeypatch, capsys) -> None:
    monkeypatch.setattr(hidden_habits, "TOKENS", 32)
    monkeypatch.setattr(hidden_walls, "TEXTS", 2)
    monkeypatch.setattr("sys.argv", ["hidden_habits", "12", "--steps", "1"])
    hidden_habits.main()
    found = json.loads(capsys.readouterr().out)
    shipped = records.load("hidden_habits")
    assert list(found) == ["12"]
    assert [int(n) for n in shipped] == list(hidden_habits.TRAITS)
    assert list(found["12"]) == list(shipped["12"])
