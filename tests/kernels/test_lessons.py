"""Chapter 3's kernels: in one launch, and in parallel, against the loop."""

import pytest
import torch
import torch.nn.functional as F
from support.kernel_judge import BUDGET, DEVICES, PRODUCTS, needs_memory
from support.pairwise import parametrize_pairs
from support.refused import refused
from torch import zeros  # noqa: F401 (what is refused names it)

import fastweights as fw
from fastweights.checks import relative_error
from fastweights_lab.lessons import prefix
from fastweights_lab.lessons.linear import scan
from fastweights_lab.lessons.prefix import (
    chunk_outputs,
    chunk_states,
    parallel_scan,
    prefix_scan,
)

SHAPE = (2, 130, 2, 4, 64, 100)
SCANS = pytest.mark.parametrize("function", [scan, parallel_scan])
CASES = parametrize_pairs(
    T=[1, 63, 64, 65, 130],
    heads=[(2, 2), (2, 4), (1, 8)],
    widths=[(60, 100), (100, 16), (8, 60), (64, 130), (256, 20)],
    chunk_size=[16, 32, 64],
    dtype=[torch.float32, torch.float16],
    initial=[False, True],
)


def inputs(shape, dtype, initial=False, device="cpu"):
    """Random q, unit keys k, values v, and a state or None."""
    B, T, H, HV, K, V = shape
    torch.manual_seed(0)
    options = {"dtype": dtype, "device": device}
    q = torch.randn(B, T, H, K, **options)
    k = F.normalize(torch.randn(B, T, H, K, device=device), dim=-1).to(dtype)
    v = torch.randn(B, T, HV, V, **options)
    state = torch.randn(B, HV, K, V, device=device) if initial else None
    return q, k, v, state


def loop(q, k, v, scale, state=None):
    q, k, v = q.double(), k.double(), v.double()
    state = None if state is None else state.double()
    options = {"scale": scale, "initial_state": state, "backend": "loop"}
    return fw.linear_recurrence(q, k, v, **options)


def judge(function, tensors, *, tol, **options):
    """Outputs and state of ``function`` are within ``tol`` of the loop."""
    q, k, v, state = tensors
    o, S = function(q, k, v, scale=0.3, initial_state=state, **options)
    o_ref, S_ref = loop(q, k, v, 0.3, state)
    assert o.dtype == v.dtype and o.shape == v.shape
    assert S.dtype == torch.float32
    assert relative_error(o, o_ref) <= tol
    assert relative_error(S, S_ref) <= tol


@pytest.fixture
def wide_tiles(monkeypatch):
    """Fewer, wider programs: the interpreter's time goes by their number."""
    options = prefix.prefix_options(64) | {"BE": 4096}
    monkeypatch.setattr(prefix, "prefix_options", lambda rows: options)


@SCANS
@pytest.mark.usefixtures("wide_tiles")
@CASES
def test_the_lessons_kernels_are_the_loop(
    function, T, heads, widths, chunk_size, dtype, initial
):
    tensors = inputs((1, T, *heads, *widths), dtype, initial)
    judge(function, tensors, tol=BUDGET[dtype], chunk_size=chunk_size)


@SCANS
@pytest.mark.gpu
@CASES
def test_the_lessons_kernels_are_the_loop_on_a_gpu(
    function, T, heads, widths, chunk_size, dtype, initial
):
    shape = 1, 8 * T, *heads, *widths
    dtype = torch.bfloat16 if dtype == torch.float16 else dtype
    tensors = inputs(shape, dtype, initial, "cuda")
    judge(function, tensors, tol=BUDGET[dtype], chunk_size=chunk_size)


@SCANS
def test_non_contiguous_views(function):
    q, k, v, state = inputs(SHAPE, torch.float32, initial=True)
    views = [x.mT.contiguous().mT for x in (q, k, v, state)]
    assert not any(x.is_contiguous() for x in views)
    judge(function, views, tol=1e-6)
    _, S = function(*views[:3], scale=0.3, initial_state=views[3])
    assert S.is_contiguous()
    batched = [
        x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)
    ]
    judge(function, [*batched, state], tol=1e-6)


@DEVICES
@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 200, 1000])
def test_prefix_scan_is_a_running_sum(rows, device):
    x = torch.randn(1, 2, rows, 3, 50, device=device)
    sums = x.double().cumsum(dim=2)
    prefix_scan(x)
    assert relative_error(x, sums) < 1e-6


@pytest.mark.parametrize("initial", [False, True])
def test_the_states_and_outputs_of_chunks(initial):
    """What chunks add, what enters each of them, what each puts out."""
    q, k, v, state = inputs((2, 130, 1, 2, 64, 33), torch.float32, initial)
    states = chunk_states(k, v, initial_state=state, chunk_size=32)
    assert states.shape == (2, 2, 6, 64, 33)
    first = torch.zeros(2, 2, 64, 33) if state is None else state
    assert torch.equal(states[:, :, 0], first)
    added = torch.einsum("btk,bthv->bhkv", k[:, 32:64, 0], v[:, 32:64])
    assert relative_error(states[:, :, 2], added) < 1e-6

    prefix_scan(states)
    _, S = loop(q[:, :64], k[:, :64], v[:, :64], 1.0, state)
    assert relative_error(states[:, :, 2], S) < 1e-6

    o = chunk_outputs(q, k, v, states, scale=0.5, chunk_size=32)
    o_ref, _ = loop(q, k, v, 0.5, state)
    assert relative_error(o, o_ref) < 1e-6


@SCANS
@refused("""
q=[1.0]
    TypeError: q: got list, need a Tensor
q=zeros(2, 5, 2, 8).double()
    TypeError: q: got torch.float64, need torch.float32, float16 or bfloat16
k=zeros(2, 5, 2, 8).half()
    TypeError: k: got torch.float16, need torch.float32
initial_state=zeros(2, 4, 8, 6).half()
    TypeError: initial_state: got torch.float16, need torch.float32
q=zeros(2, 5, 8)
    ValueError: q: got shape [2, 5, 8], need [B, T, H, K]
q=zeros(2, 0, 2, 8), k=zeros(2, 0, 2, 8)
    ValueError: q: got shape [2, 0, 2, 8], need [B, T, H, K] with B, T, H, K >=
q=zeros(2, 5, 2, 257), k=zeros(2, 5, 2, 257)
    ValueError: q: got shape [2, 5, 2, 257], need [B, T, H, K] with K <= 256
k=zeros(2, 5, 2, 7)
    ValueError: k: got shape [2, 5, 2, 7], need q's, [2, 5, 2, 8]
v=zeros(2, 6, 4, 6)
    ValueError: v: got shape [2, 6, 4, 6], need [2, 5, HV, V] with HV, V >= 1
v=zeros(2, 5, 3, 6)
    ValueError: v: got shape [2, 5, 3, 6], need [2, 5, HV, V] with HV a
    multiple of q's 2 heads
initial_state=zeros(2, 4, 6, 8)
    ValueError: initial_state: got shape [2, 4, 6, 8], need [2, 4, 8, 6]
chunk_size=48
    ValueError: chunk_size: got 48, need one of (16, 32, 64)
chunk_size=None
    TypeError: chunk_size: got None, need an int
v=zeros(2, 5, 4, 6, device="meta")
    ValueError: v: got device meta, need q's, cpu
k=zeros(2, 5, 2, 8, requires_grad=True)
    ValueError: k: got a tensor that requires a gradient, need one that does
scale=None
    TypeError: scale: got NoneType, need a real number
scale="x"
    TypeError: scale: got str, need a real number
{x: zeros(2, 5, 4, 8).bfloat16() for x in "qkv"}, initial_state=None
    TypeError: q: got torch.bfloat16 in Triton's interpreter
""")
def test_wrong_arguments(function, wrong, error):
    q, k, v, state = inputs((2, 5, 2, 4, 8, 6), torch.float32, initial=True)
    x = {"q": q, "k": k, "v": v, "initial_state": state, "scale": 1.0}
    with error():
        function(**x | {"chunk_size": 64} | eval(f"dict({wrong})"))


@SCANS
@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    "dtype, precision, tol", PRODUCTS.values(), ids=PRODUCTS
)
def test_products_on_gpu(
    function, D, dtype, precision, tol, set_matmul_precision
):
    set_matmul_precision(precision)
    tensors = inputs((2, 1000, 2, 4, D, D), dtype, True, "cuda")
    judge(function, tensors, tol=tol)


@SCANS
@pytest.mark.gpu
def test_deterministic_on_gpu(function):
    shape = (4, 1000, 4, 8, 128, 128)
    q, k, v, _ = inputs(shape, torch.bfloat16, device="cuda")
    first, second = (function(q, k, v, scale=1.0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@SCANS
@pytest.mark.gpu
@needs_memory(60)
def test_offsets_past_2_31(function):
    """Tokens and states: the last token of the last head."""
    T, H, D = 2**17 + 100, 128, 128
    q, k, v, _ = inputs((1, T, H, H, D, D), torch.bfloat16, device="cuda")
    assert q.numel() > 2**31 and T // 64 * H * D * D > 2**31
    o, S = function(q, k, v, scale=1.0)
    S_ref = k[0, :, -1].double().T @ v[0, :, -1].double()
    assert relative_error(S[0, -1], S_ref) < 5e-3
    assert relative_error(o[0, -1, -1], q[0, -1, -1].double() @ S_ref) < 5e-3


@pytest.mark.gpu
@needs_memory(40)
def test_state_offsets_past_2_31():
    shape = (1100, 2, 1, 16, 256, 512)
    q, k, v, _ = inputs(shape, torch.bfloat16, device="cuda")
    o, S = scan(q, k, v, scale=1.0)
    assert S.numel() > 2**31
    o_ref, S_ref = loop(q[-1:], k[-1:], v[-1:], 1.0)
    assert relative_error(S[-1:], S_ref) < 5e-3
    assert relative_error(o[-1:], o_ref) < 5e-3
