"""The operators' speed on what trained models give them."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fastweights as fw
from fastweights_lab import records
from fastweights_lab.bench import gates, speed, trained
from fastweights_lab.bench.trained import (
    DRAWN,
    MODELS,
    beyond,
    record_inputs,
    sequences,
)
from fastweights_lab.experiments import comparison
from fastweights_lab.program import main

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def numbered(windows, T, heads):
    """Each number says which window, token and head it is of."""
    at = torch.arange(windows * T * heads).reshape(windows, T, heads)
    return {"q": at[..., None].expand(-1, -1, -1, 3), "g": at}


def test_sequences_join_windows_and_draw_heads():
    x = numbered(windows=5, T=8, heads=6)
    shape = speed.Shape(2, 16, 4, 4, 3, 3)
    found = sequences(x, shape, draw=0)
    assert found["q"].shape == (2, 16, 4, 3) and found["g"].shape == (2, 16, 4)
    assert torch.equal(found["q"][..., 1], found["g"])
    for row in range(2):
        heads = found["g"][row] % 6
        assert torch.equal(heads, heads[:1].expand(16, 4))
        assert len({*heads[0].tolist()}) == 4
        tokens = found["g"][row, :, 0] // 6
        assert torch.equal(tokens, torch.arange(16) + 16 * row)
    assert not torch.equal(found["g"], sequences(x, shape, draw=1)["g"])
    assert torch.equal(found["g"], sequences(x, shape, draw=0)["g"])


def test_what_is_beyond_one_product():
    g = torch.full((1, 128, 2, 128), -160.5 / 64 * math.log(2))
    assert beyond(g) == (1, 1)
    g[:, :, 0, 1:] = -1e-3  # a channel in one of its two tiles
    g[:, :64] = 0  # and only in the second chunk
    assert beyond(g) == (0.5 * (1 + 128) / 256, 0.5 * 3 / 4)
    one_per_head = g[:, :, :, 0]
    assert beyond(one_per_head) == (0.5, 0.5)
    assert beyond(0.99 * one_per_head) == (0, 0)


@pytest.fixture
def little(tmp_path):
    """Settings of a run of one step."""
    (tmp_path / "text.py").write_text("def f(x):\n    return x + 1\n" * 400)
    return replace(
        comparison.SMALL,
        corpus=(str(tmp_path / "text.py"),),
        length=64,
        tokens=64,
        steps=1,
    )


def test_gates_of_a_model_with_a_lower_bound(little):
    g = record_inputs("KDA", little, 2, least=-0.25)["g"]
    assert -0.25 < g.min() < g.max() < 0
    assert record_inputs("KDA", little, 2)["g"].min() < -0.25


def test_where_in_a_text_heads_forget(little, monkeypatch, tmp_path):
    for name, value in (("BASE", little), ("END", 100), ("LENGTH", 40)):
        monkeypatch.setattr(gates, name, value)
    file = tmp_path / "gates.json"
    main("bench", "gates", "--json", str(file))
    said, *heads = json.loads(file.read_text("utf-8"))["rows"]
    assert len(said["text"]) == 40 and "return x" in said["text"]
    assert said["bits per byte"] > 1
    assert [(row["layer"], row["head"]) for row in heads] == [
        (layer, head)
        for layer in range(little.num_layers)
        for head in range(little.num_heads)
    ]
    for row in heads:
        assert len(row["halvings"]) == 40 and min(row["halvings"]) >= 0


def test_a_run_times_every_member_on_both_passes(little, monkeypatch):
    monkeypatch.setattr(trained, "BASE", little)
    monkeypatch.setattr(trained, "DRAWS", 1)
    monkeypatch.setattr(trained, "timeit", lambda fn: fn() and 1.0)
    monkeypatch.setattr(trained, "ON_GPU", False)
    small = speed.Shape(1, 128, 2, 2, 32, 32)
    monkeypatch.setattr(trained, "SMALL", small)

    def kda(*, safe_gate=False, **x):
        return fw.kda(**x)

    def takes(who, member, shape, gate):
        return who == "fla" or gate in ("bounded", "safe")

    monkeypatch.setattr(speed, "peer_functions", lambda *_: {"kda": kda})
    monkeypatch.setattr(speed, "peer_takes", takes)
    rows = [*trained.rows(peer=["fla", "nvidia"])]
    assert {
        (r["member"], r["gate"], r["what"], r.get("peer")) for r in rows
    } == {
        (member, gate, what, who)
        for member in MODELS
        for gate in (*DRAWN, "trained 0", "safe 0")
        if member == "kda" or gate != "safe 0"
        for what in ("forward", "forward+backward")
        for who in (None, "fla", "nvidia")
        if not who or (member == "kda" and takes(who, "", "", gate.split()[0]))
    }


def test_the_table_of_the_readme():
    seconds = {}
    for row in records.load("h200_trained")["rows"]:
        if row["what"] == "forward+backward" and "peer" not in row:
            call = row["member"], row["shape"], row["gate"].split()[0]
            seconds.setdefault(call, []).append(row["seconds"])
    for member in MODELS:
        cells = [
            f"{1e3 * statistics.median(seconds[member, shape, gate]):.2f}"
            for shape in ("train", "long")
            for gate in ("mild", "trained")
        ]
        assert f"| `{member}` | {' | '.join(cells)} |\n" in README


def test_what_the_readme_says_of_peers_at_trained_gates():
    seconds = {}
    for row in records.load("h200_trained")["rows"]:
        if row["what"] == "forward+backward":
            call = row["member"], row["shape"], row["gate"].split()[0]
            whose = seconds.setdefault(call, {})
            whose.setdefault(row.get("peer"), []).append(row["seconds"])

    def over_ours(peer, member, gate):
        for shape in ("train", "long"):
            of = seconds[member, shape, gate]
            yield statistics.median(of[peer]) / statistics.median(of[None])

    fla = [
        ratio
        for member in MODELS
        for ratio in over_ours("fla", member, "trained")
    ]
    words = f"{min(fla):.1f} to {max(fla):.1f} times with the trained ones"
    assert words in README
    less = [100 * (1 - x) for x in over_ours("nvidia", "kda", "bounded")]
    assert f"by {min(less):.0f} to {max(less):.0f} % where all" in README
    train, long = over_ours("nvidia", "kda", "safe")
    assert f"theirs take {train:.2f} and {long:.1f} times as long" in README
