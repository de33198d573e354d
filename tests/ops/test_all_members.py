"""What is wrong is named as the caller has it, whichever member is called."""

import functools
import inspect
import re

import pytest
import torch

import fastweights as fw
from fastweights import arguments
from fastweights.ops.members import shape_of
from fastweights.serving import mlstm_step

SIZES = {"B": 2, "T": 6, "H": 2, "HV": 4, "_": 4, "K": 3, "V": 5}


def parameters_of(function):
    return inspect.signature(function, eval_str=True).parameters


MEMBERS = {
    function.__name__: function
    for function in map(vars(fw).get, fw.__all__)
    if inspect.isfunction(function) and function != fw.linear_recurrence
    if {"q", "initial_state"} <= parameters_of(function).keys()
}
MEMBERS["normalised"] = functools.partial(fw.linear_attention, normalize=True)

EACH_MEMBER = pytest.mark.parametrize("name", MEMBERS)


def member_arguments(name, dtype):
    """Each tensor that the member takes, of the shape that it is annotated
    with."""
    torch.manual_seed(0)
    x = {}
    for key, parameter in parameters_of(MEMBERS[name]).items():
        if parameter.kind == parameter.POSITIONAL_OR_KEYWORD:
            sizes = shape_of(parameter.annotation)[1:-1].split(", ")
            shape = [SIZES[size] for size in sizes]
            x[key] = -torch.rand(shape).to(dtype)
    return x | {"initial_state": MEMBERS[name](**x)[1]}


def changed(given, change):
    """(which, given with one tensor changed), for each tensor of a pair."""
    if not isinstance(given, tuple):
        return [change(given)]
    first, second = given
    return [(change(first), second), (first, change(second))]


def test_all_members_are_here():
    assert {"comba", "gated_deltanet2", "mlstm", "kda"} < MEMBERS.keys()
    assert len(MEMBERS) == 12


@EACH_MEMBER
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str
)
def test_a_wrong_dtype_is_named(name, dtype):
    """Or taken, and then there are results."""
    x = member_arguments(name, dtype)
    for key, given in x.items():
        for other in (*arguments.DTYPES, torch.int64, torch.complex64):
            for wrong in changed(given, lambda t, to=other: t.to(to)):
                named = key if key not in "qkv" else "|".join(x)
                try:
                    o, _ = MEMBERS[name](**x | {key: wrong})
                except TypeError as error:
                    assert re.match(rf"({named})(\[.\])?: got ", str(error))
                else:
                    assert other in arguments.DTYPES
                    assert o.dtype == dtype and o.isfinite().all()


@EACH_MEMBER
def test_a_wrong_shape_is_named(name):
    x = member_arguments(name, torch.float32)
    for key, given in x.items():
        named = key if key not in "qkv" else "|".join(x)
        for dim in range(2 if key == "initial_state" else x[key].dim()):
            for change in (
                lambda t, i=dim: t.narrow(i, 0, 1),
                lambda t, i=dim: t.narrow(i, 0, 0),
                lambda t, i=dim: torch.cat([t, t], i),
                lambda t, i=dim: t.select(i, 0),
                lambda t, i=dim: t.unsqueeze(i),
            ):
                for wrong in changed(given, change):
                    with pytest.raises(
                        ValueError, match=rf"^({named})(\[.\])?: got shape"
                    ):
                        MEMBERS[name](**x | {key: wrong})


@EACH_MEMBER
def test_a_number_that_is_none_is_named(name, monkeypatch):
    monkeypatch.setattr(arguments, "CHECKS_VALUES", True)
    x = member_arguments(name, torch.float32)
    MEMBERS[name](**x)

    def with_nan(t):
        t = t.clone()
        t.view(-1)[-1] = torch.nan
        return t

    for key, given in x.items():
        for wrong in changed(given, with_nan):
            with pytest.raises(ValueError, match=rf"^{key}(\[.\])?: got nan"):
                MEMBERS[name](**x | {key: wrong})


@pytest.mark.parametrize("step", [False, True])
def test_a_gate_without_end_is_named(step, monkeypatch):
    monkeypatch.setattr(arguments, "CHECKS_VALUES", True)
    x = member_arguments("mlstm", torch.float32)
    state, m = x.pop("initial_state")
    memory, call = "initial_state", fw.mlstm
    if step:
        memory, call = "state", mlstm_step
    call(**x, **{memory: (state, m)})
    i = torch.full_like(x["i"], torch.inf)
    with pytest.raises(ValueError, match=r"^i: got inf at \[0, 0, 0\], need"):
        call(**x | {"i": i}, **{memory: (state, m)})
    with pytest.raises(ValueError, match=rf"^{memory}\[1\]: got inf at"):
        call(**x, **{memory: (state, m + torch.inf)})


def test_combas_p_may_be_wider_than_its_q():
    x = member_arguments("comba", torch.bfloat16)
    wide = x | {"p": torch.rand(x["p"].shape)}
    narrow = wide | {"p": wide["p"].bfloat16()}
    for got, want in zip(fw.comba(**wide), fw.comba(**narrow), strict=True):
        assert got.equal(want)
