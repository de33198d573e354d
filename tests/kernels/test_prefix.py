"""The parallel form: each stage against torch, the whole against the loop."""

import pytest
import torch
from kernel_judge import (
    BUDGET,
    PRODUCTS,
    inputs,
    judge,
    loop,
    needs_memory,
    pairwise_cases,
)

from fastweights.checks import relative_error
from fastweights_lab.lessons import prefix
from fastweights_lab.lessons.linear import scan
from fastweights_lab.lessons.prefix import (
    chunk_outputs,
    chunk_states,
    parallel_scan,
    prefix_scan,
)

SHAPE = (2, 130, 1, 2, 64, 33)


@pytest.fixture
def wide_tiles(monkeypatch):
    """Fewer, wider programs: the interpreter's time goes by their number."""
    options = prefix.prefix_options(64) | {"BE": 4096}
    monkeypatch.setattr(prefix, "prefix_options", lambda rows: options)


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("shape, dtype, chunk_size, initial", pairwise_cases())
def test_loop(shape, dtype, chunk_size, initial):
    tensors = inputs(shape, dtype, initial)
    judge(parallel_scan, tensors, tol=BUDGET[dtype], chunk_size=chunk_size)


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 200])
def test_prefix_scan_is_a_running_sum(rows):
    x = torch.randn(1, 2, rows, 3, 50)
    sums = x.double().cumsum(dim=2)
    prefix_scan(x)
    assert relative_error(x, sums) < 1e-6


@pytest.mark.parametrize("initial", [False, True])
def test_stages(initial):
    """What chunks add, what enters each of them, what each puts out."""
    q, k, v, state = inputs(SHAPE, torch.float32, initial)
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


def test_same_as_scan_on_non_contiguous_views():
    tensors = inputs(SHAPE, torch.float32, initial=True)
    q, k, v, state = (x.mT.contiguous().mT for x in tensors)
    arguments = {"scale": 0.3, "initial_state": state}
    o, S = parallel_scan(q, k, v, **arguments)
    o_ref, S_ref = scan(q, k, v, **arguments)
    assert relative_error(o, o_ref) < 1e-6
    assert relative_error(S, S_ref) < 1e-6
    assert S.is_contiguous()


def test_wrong_arguments():
    q, k, v, _ = inputs(SHAPE, torch.float32)
    with pytest.raises(ValueError, match="k: got shape"):
        parallel_scan(q, k[:, 1:], v, scale=1.0)
    with pytest.raises(ValueError, match="chunk_size: got 128"):
        parallel_scan(q, k, v, scale=1.0, chunk_size=128)


@pytest.mark.gpu
@pytest.mark.parametrize("shape, _, chunk_size, initial", pairwise_cases())
def test_loop_on_gpu(shape, _, chunk_size, initial):
    tensors = inputs(shape, torch.bfloat16, initial, "cuda")
    judge(parallel_scan, tensors, tol=5e-3, chunk_size=chunk_size)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    "dtype, precision, tol", PRODUCTS.values(), ids=PRODUCTS
)
def test_products_on_gpu(D, dtype, precision, tol, matmul_precision):
    matmul_precision(precision)
    tensors = inputs((2, 1000, 2, 4, D, D), dtype, True, "cuda")
    print(judge(parallel_scan, tensors, tol=tol))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000])
def test_prefix_scan_on_gpu(rows):
    x = torch.randn(2, 2, rows, 60, 50, device="cuda")
    sums = x.double().cumsum(dim=2)
    prefix_scan(x)
    assert relative_error(x, sums) < 1e-6


@pytest.mark.gpu
def test_deterministic_on_gpu():
    shape = (4, 1000, 4, 8, 128, 128)
    q, k, v, _ = inputs(shape, torch.bfloat16, device="cuda")
    first, second = (parallel_scan(q, k, v, scale=1.0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@needs_memory(60)
def test_offsets_past_2_31():
    """Tokens and states both: the last token of the last head."""
    T, H, D = 2**17 + 100, 128, 128
    q, k, v, _ = inputs((1, T, H, H, D, D), torch.bfloat16, device="cuda")
    assert q.numel() > 2**31 and T // 64 * H * D * D > 2**31
    o, S = parallel_scan(q, k, v, scale=1.0)
    S_ref = k[0, :, -1].double().T @ v[0, :, -1].double()
    assert relative_error(S[0, -1], S_ref) < 5e-3
    assert relative_error(o[0, -1, -1], q[0, -1, -1].double() @ S_ref) < 5e-3
