"""A call by its plan: the bits of the launches that it would make at once."""

import ctypes
import itertools

import pytest
import torch

pytest.importorskip("triton")

from crossed import all_but
from inputs import GATES, RULES, member, results
from kernel_judge import interpreted

import fastweights as fw
from fastweights.kernels import backend
from fastweights.kernels.plan import Plan


def tensor_at(address, like):
    """The tensor of this shape and dtype at an address."""
    if like.numel() == 0:
        return torch.empty_like(like, device="cpu")
    data = (ctypes.c_byte * (like.numel() * like.itemsize)).from_address
    return torch.frombuffer(data(address), dtype=like.dtype).view(like.shape)


@pytest.fixture
def by_plan(monkeypatch):
    """Calls go by their plans, whose launches Triton's interpreter makes."""

    def load(plan, shared):
        def by_address(launch):
            def run(*values):
                arguments = [
                    tensor_at(value, like)
                    if isinstance(like, torch.Tensor)
                    else value
                    for value, like in zip(
                        values, launch.arguments, strict=False
                    )
                ]
                constants = values[len(arguments) :]
                names = launch.kernel.arg_names[len(arguments) :]
                assert constants == tuple(launch.constants[n] for n in names)
                grid = (launch.programs,)
                launch.kernel[grid](*arguments, **launch.constants)

            return run

        plan.runs = [by_address(launch) for launch in plan.launches]

    def begin():
        monkeypatch.setattr(backend, "INTERPRETED", False)
        monkeypatch.setattr(backend, "compile_together", lambda *_: None)
        monkeypatch.setattr(Plan, "load", load)

    yield begin
    backend.planned.cache_clear()


@interpreted
@pytest.mark.parametrize(
    "gate, rule",
    all_but(
        [("none", "additive"), ("scalar", "delta"), ("vector", "delta")],
        itertools.product(GATES, RULES),
    ),
)
def test_a_plan_is_the_call(gate, rule, by_plan, poison, cut):
    """The same bits, on other data and with another scale too."""
    cut(3, 2)
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
        x = member(gate, rule, dtype=dtype, seed=seed, **sizes)
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
    by_plan()
    for found, ref in zip(run(), expected, strict=True):
        assert found.keys() == ref.keys()
        for name in ref:
            assert torch.equal(found[name], ref[name]), name
    assert backend.planned.cache_info().hits > 0
