"""Linear attention in one launch, against the loop in fp64."""

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
from fastweights_lab.lessons.linear import scan

SHAPE = (2, 130, 2, 4, 64, 100)


@pytest.mark.parametrize("shape, dtype, chunk_size, initial", pairwise_cases())
def test_loop(shape, dtype, chunk_size, initial):
    tensors = inputs(shape, dtype, initial)
    judge(scan, tensors, tol=BUDGET[dtype], chunk_size=chunk_size)


def test_non_contiguous_views():
    q, k, v, state = inputs(SHAPE, torch.float32, initial=True)
    views = [x.mT.contiguous().mT for x in (q, k, v, state)]
    assert not any(x.is_contiguous() for x in views)
    judge(scan, views, tol=1e-4)
    batched = [
        x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)
    ]
    judge(scan, [*batched, state], tol=1e-4)


def test_split_sequence_carries_state():
    """Two halves joined by the state are the whole."""
    q, k, v, state = inputs(SHAPE, torch.float32, initial=True)
    o, S = scan(q, k, v, scale=1.0, initial_state=state)
    before = [x[:, :70] for x in (q, k, v)]
    after = [x[:, 70:] for x in (q, k, v)]
    o1, S1 = scan(*before, scale=1.0, initial_state=state)
    o2, S2 = scan(*after, scale=1.0, initial_state=S1)
    assert relative_error(torch.cat([o1, o2], dim=1), o) < 1e-6
    assert relative_error(S2, S) < 1e-6


def change(**changes):
    """Good arguments with some of them replaced."""
    q, k, v, state = inputs((2, 5, 2, 4, 8, 6), torch.float32, initial=True)
    arguments = {"q": q, "k": k, "v": v, "initial_state": state}
    return arguments | {"chunk_size": 64} | changes


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


WRONG = {
    "q-type": (TypeError, "q: got list", {"q": [1.0]}),
    "q-dtype": (
        TypeError,
        "q: got torch.float64",
        {"q": zeros(2, 5, 2, 8, dtype=torch.float64)},
    ),
    "k-dtype": (
        TypeError,
        "k: got torch.float16, need torch.float32",
        {"k": zeros(2, 5, 2, 8, dtype=torch.float16)},
    ),
    "state-dtype": (
        TypeError,
        "initial_state: got torch.float16, need torch.float32",
        {"initial_state": zeros(2, 4, 8, 6, dtype=torch.float16)},
    ),
    "q-rank": (ValueError, r"q: got shape \[2, 5, 8\]", {"q": zeros(2, 5, 8)}),
    "T-zero": (
        ValueError,
        r"q: got shape \[2, 0, 2, 8\], need .* B, T, H, K >= 1",
        {"q": zeros(2, 0, 2, 8), "k": zeros(2, 0, 2, 8)},
    ),
    "K-large": (
        ValueError,
        r"q: got shape \[2, 5, 2, 257\], need .* K <= 256",
        {"q": zeros(2, 5, 2, 257), "k": zeros(2, 5, 2, 257)},
    ),
    "k-shape": (ValueError, "k: got shape", {"k": zeros(2, 5, 2, 7)}),
    "v-length": (ValueError, "v: got shape", {"v": zeros(2, 6, 4, 6)}),
    "v-heads": (
        ValueError,
        "v: got shape .* multiple of q's 2 heads",
        {"v": zeros(2, 5, 3, 6)},
    ),
    "state-shape": (
        ValueError,
        r"initial_state: got shape .* need \[2, 4, 8, 6\]",
        {"initial_state": zeros(2, 4, 6, 8)},
    ),
    "chunk-size": (
        ValueError,
        "chunk_size: got 48, need one of",
        {"chunk_size": 48},
    ),
    "no-chunk-size": (
        TypeError,
        "chunk_size: got None, need an int",
        {"chunk_size": None},
    ),
    "device": (
        ValueError,
        "v: got device meta, need q's, cpu",
        {"v": torch.zeros(2, 5, 4, 6, device="meta")},
    ),
    "gradient": (
        ValueError,
        "k: got a tensor that requires a gradient",
        {"k": zeros(2, 5, 2, 8).requires_grad_()},
    ),
}


@pytest.mark.parametrize("error, message, changes", WRONG.values(), ids=WRONG)
def test_wrong_arguments(error, message, changes):
    with pytest.raises(error, match=message):
        scan(**change(**changes), scale=1.0)


@pytest.mark.parametrize("scale, name", [(None, "NoneType"), ("x", "str")])
def test_scale_is_a_number(scale, name):
    q, k, v, _ = inputs(SHAPE, torch.float32)
    with pytest.raises(TypeError, match=f"scale: got {name}, need"):
        scan(q, k, v, scale=scale)


def test_interpreter_refuses_bf16():
    q, k, v, _ = inputs(SHAPE, torch.bfloat16)
    with pytest.raises(TypeError, match=r"q: got torch\.bfloat16 in Triton's"):
        scan(q, k, v, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape, _, chunk_size, initial", pairwise_cases())
def test_loop_on_gpu(shape, _, chunk_size, initial):
    tensors = inputs(shape, torch.bfloat16, initial, "cuda")
    judge(scan, tensors, tol=5e-3, chunk_size=chunk_size)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    "dtype, precision, tol", PRODUCTS.values(), ids=PRODUCTS
)
def test_products_on_gpu(D, dtype, precision, tol, matmul_precision):
    matmul_precision(precision)
    tensors = inputs((2, 1000, 2, 4, D, D), dtype, True, "cuda")
    print(judge(scan, tensors, tol=tol))


@pytest.mark.gpu
def test_deterministic_on_gpu():
    q, k, v, _ = inputs(
        (4, 1000, 4, 8, 128, 128), torch.bfloat16, device="cuda"
    )
    first, second = (scan(q, k, v, scale=1.0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@needs_memory(40)
def test_token_offsets_past_2_31():
    """The last token of the last head, 2^31 elements from the first."""
    T, H, D = 2**17 + 100, 128, 128
    q, k, v, _ = inputs((1, T, H, H, D, D), torch.bfloat16, device="cuda")
    assert q.numel() > 2**31
    o, S = scan(q, k, v, scale=1.0)
    S_ref = k[0, :, -1].double().T @ v[0, :, -1].double()
    assert relative_error(S[0, -1], S_ref) < 5e-3
    assert relative_error(o[0, -1, -1], q[0, -1, -1].double() @ S_ref) < 5e-3


@pytest.mark.gpu
@needs_memory(40)
def test_state_offsets_past_2_31():
    q, k, v, _ = inputs(
        (1100, 2, 1, 16, 256, 512), torch.bfloat16, device="cuda"
    )
    o, S = scan(q, k, v, scale=1.0)
    assert S.numel() > 2**31
    o_ref, S_ref = loop(q[-1:], k[-1:], v[-1:], 1.0)
    assert relative_error(S[-1:], S_ref) < 5e-3
    assert relative_error(o[-1:], o_ref) < 5e-3
