"""The program that doubles sizes: each case runs, and says what it found."""

import pytest

from fastweights import bench_growth
from fastweights.bench_growth import CASES, main


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
    main(["a"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[0] == "a"
    assert line.endswith("exponent  2.00, expected 1     4.0 times")
