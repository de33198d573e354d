"""Which backend runs where, and what is said where kernels cannot."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import fastweights as fw
from fastweights import torch_internals
from fastweights.checks import relative_error
from fastweights.ops.common.backends import _missing_for_triton, _warn_once


def test_auto_is_torch_on_a_cpu():
    assert fw.resolve_backend() == fw.resolve_backend("auto") == "torch"
    assert fw.resolve_backend("loop") == "loop"


@pytest.fixture
def gpu(monkeypatch):
    """Makes this machine one with a GPU of some compute capability."""

    def forget():
        _warn_once.cache_clear()
        _missing_for_triton.cache_clear()
        torch_internals.warn_untested.cache_clear()

    def of(*capability):
        for name, value in (
            ("get_device_capability", capability),
            ("get_device_name", "Some GPU"),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda *_, x=value: x)

    forget()
    yield of
    forget()


RUN_ON = [(8, 0), (8, 9), (9, 0), (12, 0)]


@pytest.mark.parametrize(
    "capability, version",
    [
        *((x, "3.7.1") for x in RUN_ON),
        ((10, 0), "3.8.0"),
        ((10, 3), "3.9.0+g"),
    ],
)
def test_auto_is_triton_from_ampere_on(gpu, monkeypatch, capability, version):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    gpu(*capability)
    with warnings.catch_warnings(action="error"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert fw.resolve_backend("auto", "cuda", dtype) == "triton"
        assert fw.resolve_backend("auto", "cuda", torch.float64) == "torch"
        assert fw.resolve_backend("torch", "cuda") == "torch"


# A GPU, what is different there, and what the kernels need instead.
RACE = (
    "kernels need Triton 3.8 or newer on a GPU of compute capability 10.x, "
    "where 3.7.1 compiles a race; Some GPU has 10."
)
LACKS = {
    "older": ((7, 5), {}, r"8\.0 .*; Some GPU has 7\.5$"),
    "rocm": (
        (9, 4),  # its devices are called cuda, and have a capability
        {"torch.version.hip": "6.4"},
        "a CUDA build of PyTorch, not ROCm's",
    ),
    "race": ((10, 0), {"triton.__version__": "3.7.1"}, f"{RACE}0$"),
    "race-too": ((10, 3), {"triton.__version__": "3.7.1"}, f"{RACE}3$"),
    "no-triton": (
        (9, 0),
        {"importlib.util.find_spec": lambda name: None},
        "the package triton, which is not installed",
    ),
}


@pytest.mark.parametrize(
    "capability, changes, needs", LACKS.values(), ids=LACKS
)
def test_without_kernels_why_is_told_once(
    gpu, monkeypatch, capability, changes, needs
):
    pytest.importorskip("triton")
    gpu(*capability)
    for name, value in changes.items():
        monkeypatch.setattr(name, value)
    with pytest.warns(UserWarning, match=needs) as told:
        assert fw.resolve_backend("auto", "cuda") == "torch"
    assert len(told) == 1
    assert str(told[0].message).startswith("fastweights runs as PyTorch here:")
    with warnings.catch_warnings(action="error"):
        assert fw.resolve_backend("auto", "cuda") == "torch"
    needs = needs.removeprefix("kernels need ")
    with pytest.raises(ValueError, match=f"'triton', which needs .*{needs}"):
        fw.resolve_backend("triton", "cuda")


@pytest.mark.parametrize("function", ["linear_recurrence", "decode_step"])
def test_keys_wider_than_the_kernels_get_torch_and_are_told_once(
    gpu, monkeypatch, function
):
    pytest.importorskip("triton")
    gpu(9, 0)
    torch.manual_seed(0)
    q, k = F.normalize(torch.randn(2, 1, 3, 2, 320), dim=-1)
    v, beta = torch.randn(1, 3, 2, 5), torch.rand(1, 3, 2)
    g = -torch.rand(1, 3, 2, 320)
    want, _ = fw.linear_recurrence(q, k, v, g, beta, backend="loop")

    def run(**backend):
        if function == "decode_step":
            state, others = torch.zeros(1, 2, 320, 5), {"g": g, "beta": beta}
            return fw.decode_step(q, k, v, state=state, **others, **backend)
        return fw.linear_recurrence(q, k, v, g, beta, **backend)[0]

    choice = "fastweights.ops.common.backends.resolve_backend"
    monkeypatch.setattr(choice, lambda *_: "triton")
    reason = "kernels need K <= 256, not 320$"
    with pytest.warns(UserWarning, match=reason):
        assert relative_error(run(), want) <= 1e-6
    with warnings.catch_warnings(action="error"):
        assert relative_error(run(), want) <= 1e-6
    with pytest.raises(ValueError, match="'triton', which needs K <= 256"):
        run(backend="triton")


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0"])
def test_an_untested_version_is_named(gpu, monkeypatch, version):
    """Once, and the kernels run."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    gpu(9, 0)
    told = f"triton {version} is outside .* tested with, 3.6 to 3.9$"
    with pytest.warns(UserWarning, match=told):
        assert fw.resolve_backend("auto", "cuda") == "triton"
    with warnings.catch_warnings(action="error"):
        assert fw.resolve_backend("auto", "cuda", torch.float16) == "triton"


@pytest.mark.parametrize("error", [AssertionError, RuntimeError])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_device_that_is_not_here_is_refused(
    gpu, monkeypatch, backend, error
):
    """PyTorch says so in one of these, which name no argument."""
    pytest.importorskip("triton")

    def missing(device):
        raise error("no CUDA here")

    monkeypatch.setattr(torch.cuda, "get_device_capability", missing)
    message = "^device: got cuda:7, need one that is there; no CUDA here$"
    with pytest.raises(ValueError, match=message):
        fw.resolve_backend(backend, "cuda:7")
