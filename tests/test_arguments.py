"""Checks of arguments, and of values where FASTWEIGHTS_CHECK=1 asks for it."""

import importlib
import re

import numpy as np
import pytest
import torch
from support.inputs import member_inputs
from support.refused import refused
from torch._subclasses import FakeTensorMode

import fastweights as fw
from fastweights import arguments

NAN = float("nan")
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


@refused("""
check_sizes(dim=True)
    TypeError: dim: got bool, need an int
check_sizes(dim=0)
    ValueError: dim: got 0, need an integer >= 1
check_flags(gate="no")
    TypeError: gate: got 'no', need True or False
check_flags(gate=torch.ones(()))
    TypeError: gate: got Tensor, need True or False
check_numbers("> 0", eps=float("inf"))
    ValueError: eps: got inf, need a finite number
check_numbers("any", eps=float("nan"))
    ValueError: eps: got nan, need a finite number
check_numbers("> 0", eps=True)
    TypeError: eps: got bool, need a real number
check_dtype("fp32")
    TypeError: dtype: got 'fp32', need one of (torch.float64, torch.float32,
    torch.float16, torch.bfloat16)
check_dtype(torch.int64)
    TypeError: dtype: got torch.int64, need one of (torch.float64,
    torch.float32, torch.float16, torch.bfloat16)
""")
def test_a_value_of_another_kind(wrong, error):
    with error():
        eval(wrong, vars(arguments) | globals())


def test_what_fits():
    arguments.check_sizes(dim=np.int64(3), heads=1)
    arguments.check_flags(gate=True, bias=False)
    arguments.check_numbers("> 0", eps=np.float32(1.0))
    arguments.check_numbers("any", start=-2)
    arguments.check_dtype(None)
    arguments.check_dtype(torch.bfloat16)


def test_a_rank_may_have_no_tokens_but_needs_a_head():
    x = torch.zeros(1, 0, 0, 3)
    operands = arguments.RecurrenceOperands(x, x, x)
    need = re.escape("need [B, T, H, K] with B, H, K >= 1")
    with pytest.raises(ValueError, match=need):
        arguments.check_recurrence_arguments(operands, min_tokens=0)


@pytest.mark.parametrize(
    ("rows", "kind", "need"),
    [
        ([0.0, 1.0], TypeError, "need torch.int32 or torch.int64"),
        ([0], ValueError, r"need \[2\]"),
        ([0, 3], ValueError, "need rows of the pool, 0 to 2"),
        ([-1, 0], ValueError, "need rows of the pool, 0 to 2"),
        ([1, 1], ValueError, "need each row once"),
    ],
)
def test_rows_that_are_not_in_a_pool(rows, kind, need):
    with pytest.raises(kind, match=f"^rows: got .*{need}"):
        arguments.check_rows(torch.tensor(rows), 2, 3)


def test_values_are_not_read_where_they_are_traced():
    with FakeTensorMode():
        offsets = torch.zeros(3, dtype=torch.int32)
        arguments.check_packed(torch.zeros(1, 5, 2), offsets)
        arguments.check_rows(offsets, 3, 2)


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setattr(arguments, "CHECKS_VALUES", True)


def inputs(gate="head", **sizes):
    return member_inputs(gate, "delta", T=6, H=1, HV=2, K=3, V=5, **sizes)


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
@pytest.mark.parametrize("gate", ["fixed", "head", "channel"])
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
def test_offsets_that_end_too_late():
    x = {name: t for name, t in inputs().items() if name != "initial_state"}
    with pytest.raises(ValueError, match=r"^cu_seqlens: got \[0, 9\]"):
        offsets = torch.tensor([0, 9])
        arguments.check_values_if_enabled(
            arguments.RecurrenceOperands(**x, cu_seqlens=offsets)
        )


@pytest.mark.usefixtures("checked")
def test_what_has_no_values_passes():
    x = {name: t.to("meta") for name, t in inputs().items()}
    assert fw.linear_recurrence(**x)[0].is_meta
    with FakeTensorMode() as mode:
        x = {name: mode.from_tensor(t) for name, t in inputs().items()}
        fw.linear_recurrence(**x)


def test_values_that_fit_pass_and_change_nothing(monkeypatch):
    x = inputs("channel")
    expected = fw.linear_recurrence(**x)
    monkeypatch.setattr(arguments, "CHECKS_VALUES", True)
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
        assert checked == arguments.CHECKS_VALUES
        if checked:
            with pytest.raises(ValueError, match=r"^g: got 0\.1"):
                fw.linear_recurrence(**x)
        else:
            fw.linear_recurrence(**x)
    finally:
        monkeypatch.undo()
        importlib.reload(arguments)
