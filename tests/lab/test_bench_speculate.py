"""What drafts are worth on source code: a small run."""

import json

import pytest

from fastweights_lab.program import main


def test_a_small_run(tmp_path):
    path = tmp_path / "record.json"
    main("bench", "speculate", "--steps", "20", "--json", str(path))
    plain, looked, *drawn = json.loads(path.read_text())["rows"]
    assert plain["confirmed"] == drawn[0]["confirmed"] == 1
    # After 20 steps its likeliest byte is a space, and then another.
    assert looked["confirmed"] == 8
    assert 1 <= drawn[1]["confirmed"] < 2
    assert all(row["seconds"] > 0 for row in (plain, looked, *drawn))
    assert plain["bits_per_byte"] == pytest.approx(3.9, abs=0.3)
