"""The program that doubles sizes: each case runs, and says what it found."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastweights.layers import TTTMLP, LaCT, TitansMemory, TTTLinear
from fastweights_lab.bench import growth as bench_growth
from fastweights_lab.bench.growth import CASES
from fastweights_lab.program import main


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
    main("bench", "growth", "a")
    torch.set_num_threads(threads)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("case=a  ms=[4000.0, 16000.0, 64000.0]  ")
    assert "exponent=2.0  expected=1  times the plain one=4.0" in line


class Written(TorchDispatchMode):
    """Counts the bytes of what operators make, in place of noisy times."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and not function.is_view:
                self.nbytes += x.nbytes
        return found


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "most"),
    [(LaCT, 2.5), (TitansMemory, 7.5), (TTTLinear, 7.8), (TTTMLP, 7.5)],
)
def test_one_token_writes_a_state_so_often(kind, most):
    """Of a window nothing but the two copies that shift it."""
    layer = kind(256, 4)
    _, state = layer(torch.randn(1, 3, 256))
    with Written() as written:
        layer(torch.randn(1, 1, 256), state)
    assert written.nbytes <= most * state.nbytes
