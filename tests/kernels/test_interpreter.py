"""The faster interpreter of the tests computes what Triton's own does."""

import numpy as np
import pytest
import torch
import triton.language as tl
from support.inputs import member_inputs, results

import fastweights as fw
from fastweights.kernels.selective import compose
from fastweights.kernels.tile import add_pairs


@pytest.fixture
def own(monkeypatch):
    """Calls a function with Triton's own interpreter."""
    from support.interpreter import OWN

    def call(function):
        with monkeypatch.context() as patch:
            for owner, name, value in OWN:
                patch.setattr(owner, name, value)
            return function()

    return call


@pytest.fixture
def launched():
    """What the interpreter replaces during a launch is replaced."""
    from support.interpreter import own_patch

    scope = own_patch(compose.fn)
    yield
    scope.restore()


def tiles():
    """Two of different dtypes, [2, 4, 8]."""
    from triton.runtime.interpreter import TensorHandle

    rng = np.random.default_rng(0)
    return tuple(
        tl.tensor(
            TensorHandle(rng.normal(size=(2, 4, 8)).astype(name), dtype),
            tl.block_type(dtype, [2, 4, 8]),
        )
        for name, dtype in (("f4", tl.float32), ("f2", tl.float16))
    )


def assert_agree(found, ref):
    for x, y in zip(found, ref, strict=True):
        assert x.dtype == y.dtype and x.type == y.type
        assert np.array_equal(x.handle.data, y.handle.data)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("combine", [add_pairs, compose], ids=["sum", "map"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("keep", [True, False])
def test_reductions_are_tritons(own, combine, axis, keep):
    from triton.runtime.interpreter import ReduceOps

    def reduced():
        return ReduceOps(axis, combine, keep).apply(tiles())

    assert_agree(reduced(), own(reduced))


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("reverse", [True, False])
def test_scans_are_tritons(own, axis, reverse):
    from triton.runtime.interpreter import ScanOps

    def scanned():
        return ScanOps(axis, compose, reverse).apply(tiles())

    assert_agree(scanned(), own(scanned))


def test_whole_calls(own):
    """Tile by tile the same, so bit for bit; of the family and of Mamba."""
    x = member_inputs("channel", "delta", T=20, K=16, dtype=torch.float32)
    torch.manual_seed(0)
    shapes = {"x": (1, 5, 3), "dt": (1, 5, 3), "B": (1, 5, 4), "C": (1, 5, 4)}
    y = {name: torch.randn(shape) for name, shape in shapes.items()}
    y["A"] = -torch.rand(3, 4)

    def run():
        found = results(fw.linear_recurrence, x, backend="triton")
        scanned = results(fw.selective_scan, y, backend="triton")
        return [*found.values(), *scanned.values()]

    for found, ref in zip(run(), own(run), strict=True):
        assert torch.equal(found, ref)
