"""What serving costs beside a full batch: a small run."""

import json

from fastweights_lab.bench import serve
from fastweights_lab.program import main


def test_a_small_run(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "REQUESTS", 6)
    monkeypatch.setattr(serve, "ROWS", 2)
    path = tmp_path / "record.json"
    main("bench", "serve", "gated_deltanet", "--json", str(path))
    [row] = json.loads(path.read_text())["rows"]
    share = (row["read"] + row["write"]) / row["seconds"]
    assert abs(row["share"] - share) < 0.01 and row["write"] > 0
    assert 6 * 4 <= row["new"] <= 6 * 32 < 6 * 64 >= row["prompts"]
