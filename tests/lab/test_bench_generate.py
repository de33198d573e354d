"""What a token of generating costs: a small run, and the recorded one."""

import json
from pathlib import Path

import pytest

from fastweights_lab import records
from fastweights_lab.bench import generate
from fastweights_lab.program import main


def test_a_small_run(tmp_path, monkeypatch):
    """A linear state is read and written, a cache read; both by batch."""
    monkeypatch.setattr(generate, "TOKENS", 8)
    monkeypatch.setattr(generate, "SHAPES", [(1, 16), (2, 16)])
    path = tmp_path / "record.json"
    main("bench", "generate", "gated_deltanet", "softmax", "--json", str(path))
    one, two, *others = json.loads(path.read_text())["rows"]
    before, cache = others[:2], others[2:]
    assert [row["how"] for row in before] == ["python", "recorded"]
    assert two["moved"] - one["moved"] == 2 * one["state"]
    # Keys and values, and twice the position of the sequence.
    more = cache[1]["moved"] - cache[0]["moved"]
    assert more == cache[0]["state"] + 2 * 8
    assert all(row["first"] > 0 < row["floor"] for row in (one, *cache))
    assert one["warm"] > 0 and "warm" not in two


def fused():
    """Rows of generate as it is, not of what a token took before."""
    rows = records.load("h200_generate")["rows"]
    return [row for row in rows if row.get("how", "fused") == "fused"]


def test_what_the_readme_says_of_a_token():
    found = {(r["kind"], r["B"], r["T"]): r for r in fused()}

    def ms(kind, T, measure="seconds"):
        pair = (found[kind, B, T][measure] for B in (1, 64))
        return "{:.2f} and {:.2f} ms".format(*(1e3 * x for x in pair))

    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    own = [1e3 * found["gated_deltanet", B, 128]["seconds"] for B in (1, 64)]
    assert f"a token in {own[0]:.2f} ms on an H200" in text
    assert f"64 sequences theirs in {own[1]:.2f} ms" in text
    assert f"takes {ms('gated_deltanet', 128, 'floor')}" in text
    assert f"KDA takes {ms('kda', 128)}" in text
    assert f"attention {ms('hybrid', 4096)} with 4,096 tokens" in text


@pytest.mark.parametrize("kind, B", [("gated_deltanet", 1), ("kda", 1)])
def test_a_token_of_one_sequence_is_near_its_floor(kind, B):
    """Three times, which thirty launches per block are far from."""
    for row in fused():
        assert row["seconds"] > row["floor"]
        if (row["kind"], row["B"]) == (kind, B):
            assert row["seconds"] < 3.1 * row["floor"]
