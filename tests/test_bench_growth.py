"""The program that doubles sizes: each case runs, and says what it found."""

import pytest
import torch

from fastweights import bench, bench_growth
from fastweights.bench_growth import CASES


@pytest.mark.parametrize("name", CASES)
def test_a_case_at_its_smallest_size(name):
    case = CASES[name]
    run, plain = case.made(case.sizes[0])
    run()
    if plain is not None:
        plain()


def test_what_is_printed(monkeypatch, capsys):
    """The exponent and the ratio of the seconds that were measured."""
    monkeypatch.setattr(bench_growth, "seconds", lambda run: run())
    case = bench_growth.Case(
        1, (2, 4, 8), lambda n: (lambda: float(n * n), lambda: 16.0)
    )
    monkeypatch.setattr(bench_growth, "CASES", {"a": case, "b": case})
    threads = torch.get_num_threads()
    bench.main(["growth", "a"])
    torch.set_num_threads(threads)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("case=a  ms=[4000.0, 16000.0, 64000.0]  ")
    assert "exponent=2.0  expected=1  times the plain one=4.0" in line
