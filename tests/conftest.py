"""Skips what needs a missing GPU; fixtures that many tests use."""

import os
import tempfile
from importlib.util import find_spec

import pytest
import torch

if find_spec("beartype"):  # a borrowed GPU's machine may lack it
    from support import shapes

    shapes.check()

# Inductor's cache does not see that an operator of ours has changed.
_compiled = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled.name

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    from support.interpreter import speed_up_interpreter

    speed_up_interpreter()


# So that -k finds a model's cases, where parameters are a gate and a rule.
MEMBER_NAMES = {
    ("none", "additive"): "linear_attention",
    ("fixed", "additive"): "retention",
    ("head", "additive"): "mamba2",
    ("channel", "additive"): "gla",
    ("none", "delta"): "deltanet",
    ("head", "delta"): "gated_deltanet",
    ("channel", "delta"): "kda",
    ("head", "erase"): "comba",
    ("channel", "erase"): "gated_deltanet2",
}


def pytest_itemcollected(item):
    given = getattr(getattr(item, "callspec", None), "params", {})
    name = MEMBER_NAMES.get((given.get("gate"), given.get("rule")))
    item.extra_keyword_matches.update([name] if name else [])


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter):
    """The worst error of each result, of tests that recorded theirs."""
    worst = {}
    for report in terminalreporter.getreports("passed"):
        for label, errors in report.user_properties:
            row = worst.setdefault(label, {})
            for name, error in errors.items():
                row[name] = max(error, row.get(name, 0.0))
    for label, row in sorted(worst.items()):
        cells = " ".join(f"{name} {row[name]:.1e}" for name in row)
        terminalreporter.write_line(f"worst errors, {label}: {cells}")


@pytest.fixture
def set_matmul_precision():
    """Sets how fp32 is multiplied, until the test ends."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def empty_is_nan(monkeypatch):
    """Uninitialised memory holds NaN, so that an unwritten element shows."""

    def filled(empty):
        def call(*args, **kwargs):
            x = empty(*args, **kwargs)
            if x.is_floating_point():
                x.detach().fill_(float("nan"))
            # of a buffer every byte, so that all floats in it are NaN
            elif x.dtype == torch.uint8:
                x.fill_(255)
            return x

        return call

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


@pytest.fixture
def set_segments(monkeypatch):
    """Cut every call's rows into so many segments, if they have the chunks.

    Rows: each of a batch, or all packed sequences together.
    """
    from fastweights.kernels.recurrence import settings

    def set_segments(S):
        monkeypatch.setattr(
            settings, "segment_chunks", lambda _, __, chunks: -(-chunks // S)
        )
        settings.lengths_of.cache_clear()

    yield set_segments
    settings.lengths_of.cache_clear()
