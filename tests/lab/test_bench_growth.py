"""The program that doubles a size: each case runs, and is judged."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastweights.layers import TTTMLP, LaCT, TitansMemory, TTTLinear
from fastweights_lab.bench import growth
from fastweights_lab.bench.growth import CASES
from fastweights_lab.program import main


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_two_programs(name):
    for run in CASES[name][1](64):
        run()


@pytest.mark.parametrize("power, judged", [(1.2, True), (1.4, False)])
def test_growth_is_judged_by_the_plain_programs(
    power, judged, monkeypatch, capsys
):
    monkeypatch.setattr(growth, "seconds", lambda run: run())
    case = (4, lambda n: (lambda: 3 * n**power, lambda: float(n)))
    monkeypatch.setitem(CASES, "loss_vocabulary", case)
    threads = torch.get_num_threads()
    main("bench", "growth", "loss_vocabulary")
    torch.set_num_threads(threads)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("case=loss_vocabulary  size=8  ")
    assert f"exponent={power}  plain exponent=1.0  as it should={judged}" in (
        line
    )
    assert f"times the plain one={3 * 8 ** (power - 1):.1f}" in line


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
