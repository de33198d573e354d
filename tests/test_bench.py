"""The timing tool: what it measures, and what a record holds."""

import json
import time

import pytest
import torch

from fastweights import bench


def test_timeit_is_the_median():
    pauses = iter([0.0, 0.0, 0.0, 0.02, 0.02, 0.2])
    seconds = bench.timeit(
        lambda: time.sleep(next(pauses)), device="cpu", repeats=3
    )
    assert 0.02 <= seconds < 0.1


def test_record(monkeypatch, tmp_path, capsys):
    """A case's rows, with the machine and the command; printed and saved."""
    row = {"form": "softmax", "T": 256, "seconds": 1e-3}
    fast = row | {"moved": 2 * 10**9, "flops": 3 * 10**9}
    monkeypatch.setitem(bench.CASES, "decode", lambda: iter([row, fast]))
    path = tmp_path / "record.json"
    monkeypatch.setattr("sys.argv", ["bench", "decode", "--json", str(path)])
    bench.main()
    record = json.loads(path.read_text())
    assert record["command"] == "python -m fastweights.bench decode"
    assert record["torch"] == torch.__version__
    assert record["rows"] == [row, fast]
    printed = capsys.readouterr().out
    assert "form=softmax  T=256  1.000 ms\n" in printed
    assert "1.000 ms  2.000 TB/s  3.0 TFLOP/s" in printed


def test_unknown_case(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", "nothing"])
    with pytest.raises(SystemExit):
        bench.main()


RECORDS = ("ceilings", "crossover", "decode")


@pytest.mark.parametrize("case", RECORDS)
def test_recorded_run(case):
    record = bench.load(f"h200_{case}")
    assert record["command"].endswith(case)
    assert record["device"] == "NVIDIA H200" and record["commit"]
    assert all(row["seconds"] > 0 for row in record["rows"])
