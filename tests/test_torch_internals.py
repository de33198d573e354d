"""What is not documented may be gone: the slow way round gives the same."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.inputs import member_inputs, results

import fastweights as fw
from fastweights import torch_internals
from fastweights.layers.common.plain_modules import is_plain_product

NAMES = (
    ("torch.utils._python_dispatch", "_get_current_dispatch_mode"),
    ("torch._C", "_are_functorch_transforms_active"),
    ("torch.autograd", "_profiler_enabled"),
    ("torch.jit", "is_tracing"),
)


@pytest.fixture
def without(monkeypatch):
    """torch_internals.py as it would be had a release dropped a name."""

    def drop(module, name):
        with monkeypatch.context() as gone:  # PyTorch needs it again
            gone.delattr(f"{module}.{name}")
            importlib.reload(torch_internals)

    yield drop
    importlib.reload(torch_internals)


def step():
    return results(fw.linear_recurrence, member_inputs("head", "delta", T=20))


@pytest.mark.parametrize("module, name", NAMES, ids=[n for _, n in NAMES])
def test_a_name_may_be_gone(module, name, without):
    """Calls go by the dispatcher, since anything might be looking."""
    expected = step()
    assert not torch_internals.is_watched()
    without(module, name)
    assert torch_internals.is_watched()
    found = step()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_the_level_of_forward_mode_may_be_gone(monkeypatch):
    expected = step()
    without_level = SimpleNamespace()
    monkeypatch.setattr(torch_internals, "forward_ad", without_level)
    assert torch_internals.under_transform() and torch_internals.is_watched()
    found = step()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_hooks_of_all_modules_may_be_untold(without):
    """Then every module is called, whoever looks."""
    linear = torch.nn.Linear(3, 3, bias=False)
    assert is_plain_product(linear, torch.zeros(1, 3))
    without("torch.nn.modules.module", "_has_any_global_hook")
    assert not is_plain_product(linear, torch.zeros(1, 3))


def test_they_all_stand_in_one_file():
    src = Path(torch_internals.__file__).parent
    names = [name for _, name in NAMES if name.startswith("_")]
    names += ["_has_any_global_hook"]
    names += ["_current_level", "_cdata", "AsyncCompileMode", "FutureKernel"]
    names += [r"torch\._[a-zA-Z]", r"triton\._[a-z]", r"knobs\."]
    # pytrees and TorchDispatchMode are used by many, if not documented
    names += [r"torch\.\w+\._(?!_|pytree|python_dispatch)\w"]
    pattern = re.compile("|".join(names))
    found = [
        f"{file.relative_to(src)}: {line.strip()}"
        for file in src.rglob("*.py")
        if file != Path(torch_internals.__file__)
        for line in file.read_text().splitlines()
        if pattern.search(line)
    ]
    assert not found


def test_graphs_are_left_whole_where_there_is_such_a_setting(monkeypatch):
    config = SimpleNamespace(optimize_ddp=True)
    monkeypatch.setattr(torch_internals, "_found", lambda *_: config)
    torch_internals.leave_graphs_whole()
    assert config.optimize_ddp is False
    monkeypatch.setattr(torch_internals, "_found", lambda *_: None)
    torch_internals.leave_graphs_whole()


@pytest.mark.parametrize("by_one", [True, False])
def test_zeros_of_several_dtypes(by_one, monkeypatch):
    if not by_one:
        monkeypatch.setattr(torch_internals, "_foreach_zero", None)
    some = [torch.ones(3), torch.ones(2, 2).long(), torch.ones(4, 3)[:, 1]]
    torch_internals.set_to_zero(some)
    assert not any(x.any() for x in some)
