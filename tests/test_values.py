"""FASTWEIGHTS_CHECK=1: values that fit no layer are named, and where."""

import importlib
import re

import pytest
import torch
from inputs import member
from torch._subclasses import FakeTensorMode

import fastweights as fw
from fastweights import arguments

NAN = float("nan")
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setattr(arguments, "CHECKED", True)


def inputs(gate="scalar", **sizes):
    return member(gate, "delta", T=6, H=1, HV=2, K=3, V=5, **sizes)


def step(q, k, v, g, beta, initial_state):
    fw.decode_step(q, k, v, g=g, beta=beta, state=initial_state)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("function", [fw.linear_recurrence, step])
@pytest.mark.parametrize("name", NAMES)
def test_nan_is_named_where_it_is(name, function):
    x = inputs()
    at = [n - 1 for n in x[name].shape]
    x[name][tuple(at)] = NAN
    if function is step and name == "initial_state":
        name = "state"
    message = f"{name}: got nan at {at}, need numbers"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        function(**x)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("gate", ["fixed", "scalar", "vector"])
def test_a_decay_above_one(gate):
    x = inputs(gate)
    at = [n - 1 for n in x["g"].shape]
    x["g"][tuple(at)] = 0.5
    message = f"g: got 0.5 at {at}, need g <= 0, the log of a decay"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        fw.linear_recurrence(**x)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_diverges(dtype):
    """Unit keys may have beta = 2, however both are rounded."""
    x = inputs(dtype=dtype)
    x["beta"].fill_(2.0)
    fw.linear_recurrence(**x)
    x["beta"][0, 3, 1] = 2.5
    message = "beta: got 2.5 at [0, 3, 1], need beta |k|^2 <= 2"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        fw.linear_recurrence(**x)
    x["beta"].fill_(1.0)
    x["k"] *= 2
    with pytest.raises(ValueError, match=r"^beta: got 1\.0 at \[0, 0, 0\]"):
        fw.linear_recurrence(**x)


@pytest.mark.usefixtures("checked")
def test_offsets():
    x = {name: t for name, t in inputs().items() if name != "initial_state"}
    tensors = (*(x[name] for name in NAMES[:5]), None)
    with pytest.raises(ValueError, match=r"^cu_seqlens: got \[0, 9\]"):
        arguments.check_values(*tensors, torch.tensor([0, 9]))


@pytest.mark.usefixtures("checked")
def test_what_has_no_values_passes():
    x = {name: t.to("meta") for name, t in inputs().items()}
    assert fw.linear_recurrence(**x)[0].is_meta
    with FakeTensorMode() as mode:
        x = {name: mode.from_tensor(t) for name, t in inputs().items()}
        fw.linear_recurrence(**x)


def test_right_values_pass_and_change_nothing(monkeypatch):
    x = inputs("vector")
    expected = fw.linear_recurrence(**x)
    monkeypatch.setattr(arguments, "CHECKED", True)
    for got, ref in zip(fw.linear_recurrence(**x), expected, strict=True):
        assert got.equal(ref)


@pytest.mark.parametrize(
    ("value", "checked"), [(None, False), ("0", False), ("1", True)]
)
def test_the_environment_decides(value, checked, monkeypatch):
    """Off, wrong values raise nothing."""
    monkeypatch.delenv("FASTWEIGHTS_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("FASTWEIGHTS_CHECK", value)
    x = inputs()
    x["g"].fill_(0.1)
    try:
        importlib.reload(arguments)
        assert checked == arguments.CHECKED
        if checked:
            with pytest.raises(ValueError, match=r"^g: got 0\.1"):
                fw.linear_recurrence(**x)
        else:
            fw.linear_recurrence(**x)
    finally:
        monkeypatch.undo()
        importlib.reload(arguments)
