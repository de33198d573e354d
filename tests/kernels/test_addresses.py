"""Calls by addresses: the bits of those that hand the kernels tensors."""

import ctypes
import itertools

import pytest
import torch
from support.inputs import GATES, RULES, member_inputs, results
from support.pairwise import all_but

import fastweights as fw
from fastweights.kernels.recurrence import backend, schedule, stages
from fastweights.kernels.recurrence.schedule import (
    Schedule,
    TensorSpec,
    regroup,
)


class ByAddress:
    """A launch of compiled code, which is given addresses, interpreted."""

    def __init__(self, launch):
        self.launch = launch

    def __getitem__(self, grid):
        def run(*values):
            arguments = map(at_address, self.launch.arguments, values)
            self.launch.kernel[grid](*arguments)

        return run


def at_address(x, value):
    if isinstance(x, tuple):
        return regroup(x, map(at_address, x, value))
    return start_of(x.dtype, value) if isinstance(x, TensorSpec) else value


def start_of(dtype, address):
    """A tensor that begins at an address; kernels know no end of it."""
    data = (ctypes.c_byte * dtype.itemsize).from_address(address)
    return torch.frombuffer(data, dtype=dtype)


@pytest.fixture
def by_schedule(monkeypatch):
    """Calls go by addresses, to launches that Triton's interpreter makes."""

    def load(schedule, shared):
        schedule.kernels = [ByAddress(x) for x in schedule.launches]

    def begin():
        stages.forward_schedule.cache_clear()
        stages.backward_schedule.cache_clear()
        monkeypatch.setattr(schedule, "INTERPRETED", False)
        monkeypatch.setattr(backend, "compile_together", lambda *_: None)
        monkeypatch.setattr(
            schedule, "launch_with_descriptors", schedule.launch_all
        )
        monkeypatch.setattr(Schedule, "load", load)

    yield begin
    stages.forward_schedule.cache_clear()
    stages.backward_schedule.cache_clear()


@pytest.mark.parametrize(
    "gate, rule",
    all_but(
        [("none", "additive"), ("head", "delta"), ("channel", "delta")],
        itertools.product(GATES, RULES),
    ),
)
def test_a_schedule_is_the_call(
    gate, rule, by_schedule, empty_is_nan, set_segments
):
    """The same bits, on other data and with another scale too."""
    set_segments(3)
    calls = []
    for seed, (dtype, V, use, lengths) in enumerate(
        (
            (torch.float32, 33, "o", None),
            (torch.float16, 65, "both", None),
            (torch.float32, 33, "state", [0, 9, 9, 33]),
        )
    ):
        N = 1 if lengths is None else len(lengths) - 1
        sizes = {"T": 33, "HV": 1, "K": 20, "V": V, "N": N}
        x = member_inputs(gate, rule, dtype=dtype, seed=seed, **sizes)
        options = {"scale": 0.3 + seed, "chunk_size": 16, "backend": "triton"}
        if use == "o":
            x["v"] = x["v"].repeat_interleave(2, 1)[:, ::2]
        if lengths is not None:
            options["cu_seqlens"] = torch.tensor(lengths)
        calls.append((x, {"use": use, **options}))

    def run():
        return [
            results(fw.linear_recurrence, x, **options) for x, options in calls
        ]

    expected = run()
    by_schedule()
    for found, ref in zip(run(), expected, strict=True):
        assert found.keys() == ref.keys()
        for name in ref:
            assert torch.equal(found[name], ref[name]), name
    assert stages.forward_schedule.cache_info().currsize == 3
