"""Chapter 15's six versions of DeltaNet, against the loop over tokens."""

import json

import pytest
import torch
import torch.nn.functional as F
from support.kernel_judge import BUDGET
from support.pairwise import parametrize_pairs
from support.refused import refused
from torch import zeros  # noqa: F401 (what is refused names it)

import fastweights as fw
from fastweights.checks import relative_error
from fastweights.kernels.gpu import GPU
from fastweights_lab.bench import lesson, speed
from fastweights_lab.lessons import delta
from fastweights_lab.program import main

VERSIONS = pytest.mark.parametrize("name", delta.VERSIONS)
KERNELS = pytest.mark.parametrize("name", [*delta.VERSIONS][1:])


def inputs(shape, dtype, device="cpu"):
    """q, unit keys, values, and strengths between 0 and 1."""
    B, T, H, HV, K, V = shape
    torch.manual_seed(0)
    q, k = F.normalize(torch.randn(2, B, T, H, K, device=device), dim=-1)
    v = torch.randn(B, T, HV, V, device=device)
    beta = torch.rand(B, T, HV, device=device)
    return q.to(dtype), k.to(dtype), v.to(dtype), beta


def judge(function, tensors, *, tol, **options):
    """Outputs and state of ``function`` are within ``tol`` of the loop."""
    exact = [x.double() for x in tensors]
    o_ref, S_ref = fw.deltanet(*exact, scale=0.3, backend="loop")
    o, S = function(*tensors, scale=0.3, **options)
    assert o.dtype == tensors[2].dtype and o.shape == tensors[2].shape
    assert S.dtype == torch.float32
    assert relative_error(o, o_ref) <= tol
    assert relative_error(S, S_ref) <= tol


@VERSIONS
@parametrize_pairs(
    T=[1, 64, 65, 128],
    heads=[(2, 2), (1, 2)],
    widths=[(16, 16), (60, 100), (128, 128)],
    dtype=[torch.float32, torch.float16],
)
def test_each_version_is_the_loop(name, T, heads, widths, dtype):
    tensors = inputs((1, T, *heads, *widths), dtype)
    judge(delta.VERSIONS[name], tensors, tol=BUDGET[dtype])


@VERSIONS
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("widths", [(64, 64), (60, 100), (128, 128)])
def test_each_version_is_the_loop_on_a_gpu(name, widths, dtype):
    tensors = inputs((2, 1024, 4, 8, *widths), dtype, "cuda")
    judge(delta.VERSIONS[name], tensors, tol=5e-3)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_any_number_of_segments_is_the_loop(number):
    """However many, and of several rows: each has its own first state."""
    tensors = inputs((2, 256, 1, 1, 16, 16), torch.float32)
    judge(delta.segments, tensors, tol=1e-6, number=number)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [2, 8, 16])
def test_any_number_of_segments_is_the_loop_on_a_gpu(number):
    tensors = inputs((2, 2048, 4, 4, 128, 128), torch.bfloat16, "cuda")
    judge(delta.segments, tensors, tol=5e-3, number=number)


def test_segments_of_whole_chunks():
    tensors = inputs((1, 192, 1, 1, 16, 16), torch.float32)
    with pytest.raises(ValueError, match="number: got 2 segments of 192"):
        delta.segments(*tensors, scale=1.0, number=2)


def test_segments_fill_the_machine():
    """Two programs per multiprocessor at most, in whole chunks."""

    def number(B, T, H):
        q = torch.empty(B, T, H, 128, device="meta")
        return delta.number_of_segments(q, q)

    assert number(8, 4096, 16) == 1
    assert number(1, 65536, 16) == 8
    assert number(1, 65536 + 128, 16) == 2
    assert number(1, 65537, 16) == 1


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_equal_keys(beta):
    """Then the entries of the inverse are 1 and -beta."""
    k = F.normalize(torch.ones(1, 64, 1, 16), dim=-1)
    P = delta.inverses(k, torch.full((1, 64, 1), beta))
    M = beta * torch.ones(64, 64).tril(-1)
    exact = torch.linalg.inv(torch.eye(64) + M)
    assert (P[0, :, 0] - exact).abs().max() < 1e-5


@KERNELS
def test_non_contiguous_views(name):
    tensors = inputs((2, 65, 2, 2, 16, 16), torch.float32)
    views = [x.mT.contiguous().mT for x in tensors]
    assert not any(x.is_contiguous() for x in views)
    judge(delta.VERSIONS[name], views, tol=1e-6)


@KERNELS
@refused("""
k=zeros(2, 5, 2, 7)
    ValueError: k: got shape [2, 5, 2, 7], need q's, [2, 5, 2, 8]
beta=zeros(2, 5, 2)
    ValueError: beta: got shape [2, 5, 2], need
beta=zeros(2, 5, 4, requires_grad=True)
    ValueError: beta: got a tensor that requires a gradient, need one that
    does not
{x: zeros(2, 5, 2, 200) for x in "qk"}
    ValueError: k: got a width of 200, need 128 at most
v=zeros(2, 5, 4, 200)
    ValueError: v: got a width of 200, need 128 at most
scale=None
    TypeError: scale: got NoneType, need a real number
""")
def test_wrong_arguments(name, wrong, error):
    q, k, v, beta = inputs((2, 5, 2, 4, 8, 6), torch.float32)
    x = {"q": q, "k": k, "v": v, "beta": beta, "scale": 1.0}
    x |= eval(f"dict({wrong})")
    with error():
        delta.VERSIONS[name](
            *(x[part] for part in ("q", "k", "v", "beta")), scale=x["scale"]
        )


def test_blackwell_is_refused(monkeypatch):
    there = GPU(232_448, 148, (10, 0))
    monkeypatch.setattr(delta, "gpu_of", lambda device: there)
    tensors = inputs((1, 64, 1, 1, 16, 16), torch.float32)
    with pytest.raises(ValueError, match="of compute capability 10"):
        delta.strips(*tensors, scale=1.0)


def test_bench(tmp_path, monkeypatch):
    """A row per version, all of them right; and how else they launch."""
    monkeypatch.setattr(speed, "ON_CPU", speed.Shape(1, 1024, 1, 1, 16, 16))
    monkeypatch.setattr(lesson, "timeit", lambda call: 1.0)
    path = tmp_path / "record.json"
    main("bench", "lesson", "--json", str(path))
    rows = json.loads(path.read_text())["rows"][2:]  # after the ceilings
    assert [r["version"] for r in rows[:7]] == [*delta.VERSIONS, "library"]
    assert all(r["error"] < 1e-5 for r in rows)
    others = [(r["version"], r.get("stages"), r.get("number")) for r in rows]
    assert ("ahead", 1, None) in others and ("segments", None, 4) in others
