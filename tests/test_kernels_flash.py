"""Softmax attention tile by tile, against its definition in fp64."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from kernel_judge import BUDGET, PRODUCTS, compiled, interpreted, needs_memory

from fastweights.checks import relative_error
from fastweights.kernels.flash import flash_attention

pytestmark = pytest.mark.usefixtures("poison")
LENGTHS = (1, 63, 64, 65, 130)
WIDTHS = ((60, 60), (64, 64), (100, 128), (128, 60))
HEADS = ((2, 2), (4, 2), (3, 1))
NAMES = ("o", "dq", "dk", "dv")


def pairwise_cases():
    """Every length with every width; heads and dtypes take turns."""
    cases = []
    for i, T in enumerate(LENGTHS):
        for j, (K, V) in enumerate(WIDTHS):
            HQ, H = HEADS[(i + j) % 3]
            dtype = (torch.float32, torch.float16)[(i + j // 2) % 2]
            name = f"T{T}-K{K}-V{V}-HQ{HQ}-H{H}-{str(dtype)[6:]}"
            shape = 1, T, HQ, H, K, V
            cases.append(pytest.param(shape, dtype, id=name))
    for dtype in (torch.float32, torch.float16):
        name = f"wide-{str(dtype)[6:]}"
        cases.append(pytest.param((2, 65, 2, 1, 256, 160), dtype, id=name))
    return cases


def inputs(shape, dtype, device="cpu"):
    """Random q, k, v, and a gradient of o."""
    B, T, HQ, H, K, V = shape
    torch.manual_seed(0)
    widths = (HQ, K), (H, K), (H, V), (HQ, V)
    return [torch.randn(B, T, *x, device=device).to(dtype) for x in widths]


def definition(q, k, v, scale):
    """Every score, masked, in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = scale * torch.einsum("bihk,bjhk->bhij", q, k)
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    weights = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
    return torch.einsum("bhij,bjhv->bihv", weights, v)


def with_gradients(function, tensors, **options):
    """o, dq, dk and dv."""
    *qkv, do = tensors
    qkv = [x.detach().requires_grad_() for x in qkv]
    o = function(*qkv, **options)
    return o, *torch.autograd.grad(o, qkv, do.to(o.dtype))


def judge(tensors, *, tol, gradients_tol=None, scale=0.2, ref=definition):
    """Outputs and gradients are within their tolerance of the definition."""
    results = with_gradients(flash_attention, tensors, scale=scale)
    exact = with_gradients(ref, tensors, scale=scale)
    errors = {}
    for name, x, y in zip(NAMES, results, exact, strict=True):
        assert x.dtype == tensors[0].dtype
        errors[name] = relative_error(x, y)
    assert errors["o"] <= tol, errors
    assert max(errors.values()) <= (gradients_tol or tol), errors
    return errors


def gradients_budget(dtype):
    return BUDGET[dtype] if dtype == torch.float32 else 8e-3


@interpreted
@pytest.mark.parametrize("shape, dtype", pairwise_cases())
def test_definition(shape, dtype):
    judge(
        inputs(shape, dtype),
        tol=BUDGET[dtype],
        gradients_tol=gradients_budget(dtype),
    )


@interpreted
def test_scale():
    """K**-0.5 unless given; negative is allowed, and 0 is the mean."""
    q, k, v, do = inputs((1, 65, 2, 1, 64, 64), torch.float32)
    o = flash_attention(q, k, v)
    assert relative_error(o, definition(q, k, v, 0.125)) < 1e-5
    for scale in (-0.5, 0.0):
        judge((q, k, v, do), tol=1e-4, scale=scale)


@interpreted
@pytest.mark.parametrize("dtype, tol", [("float32", 1e-3), ("float16", 8e-3)])
def test_large_scores(dtype, tol):
    """A largest score that comes late, and one that comes first.

    exp(1000) is past any number. fp32 has scores of 1000 to 6e-5, and the
    weights with them.
    """
    q, k, v, do = inputs((1, 130, 2, 2, 64, 64), getattr(torch, dtype))
    late = torch.arange(130) >= 66
    q[..., 0] = 1000.0
    k[:, :, 0, 0] = late * 2.0 - 1
    k[:, :, 1, 0] = 1 - late * 2.0
    judge((q, k, v, do), tol=tol, gradients_tol=tol, scale=1.0)


@interpreted
def test_future_does_not_change_the_past():
    tensors = inputs((1, 130, 2, 1, 64, 64), torch.float32)
    before = flash_attention(*tensors[:3])
    for x in tensors:
        x[:, 70:] += 1e3
    after = flash_attention(*tensors[:3])
    assert torch.equal(after[:, :70], before[:, :70])
    assert not torch.equal(after[:, 70:], before[:, 70:])


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_behind_the_end_is_read(dtype):
    tensors = inputs((1, 130, 4, 2, 60, 60), dtype)
    poisoned = [x.clone() for x in tensors]
    for x in poisoned:
        x[:, 70:] = torch.nan
    views = [x[:, :70] for x in poisoned]
    assert all(x.is_contiguous() for x in views)
    results = with_gradients(flash_attention, views)
    copies = [x[:, :70].clone() for x in tensors]
    for x, y in zip(
        results, with_gradients(flash_attention, copies), strict=True
    ):
        assert torch.equal(x, y)


@interpreted
def test_non_contiguous():
    """Views with heads before tokens, and a gradient without strides."""
    q, k, v, do = inputs((2, 65, 4, 2, 64, 100), torch.float32)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not any(x.is_contiguous() for x in views)
    judge([*views, do], tol=1e-4)
    judge([q, k, v, torch.ones(1).expand_as(do)], tol=1e-4)


@interpreted
def test_some_gradients():
    q, k, v, do = inputs((1, 65, 2, 1, 64, 64), torch.float32)
    _, *gradients = with_gradients(flash_attention, (q, k, v, do))
    for i, gradient in enumerate(gradients):
        qkv = [
            x.clone().requires_grad_(i == j) for j, x in enumerate((q, k, v))
        ]
        flash_attention(*qkv).backward(do)
        assert torch.equal(qkv[i].grad, gradient)
        assert [x.grad is None for x in qkv].count(True) == 2


@interpreted
def test_no_second_derivative():
    q, k, v, _ = inputs((1, 5, 2, 1, 64, 64), torch.float32)
    q.requires_grad_()
    o = flash_attention(q, k, v)
    with pytest.raises(RuntimeError, match="flash_attention: got create_gr"):
        torch.autograd.grad(o.sum(), q, create_graph=True)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


WRONG = {
    "q-type": (TypeError, "q: got list, need a Tensor", {"q": [1.0]}),
    "v-type": (TypeError, "v: got NoneType, need a Tensor", {"v": None}),
    "q-dtype": (
        TypeError,
        r"q: got torch\.float64, need one of \(torch\.float32, ",
        {"q": zeros(2, 5, 4, 8, dtype=torch.float64)},
    ),
    "k-dtype": (
        TypeError,
        r"k: got torch\.float16, need torch\.float32",
        {"k": zeros(2, 5, 2, 8, dtype=torch.float16)},
    ),
    "q-rank": (
        ValueError,
        r"q: got shape \[2, 5, 8\], need \[B, T, heads, width\]",
        {"q": zeros(2, 5, 8)},
    ),
    "T-zero": (
        ValueError,
        r"q: got shape \[2, 0, 4, 8\], need .* each >= 1",
        {"q": zeros(2, 0, 4, 8)},
    ),
    "V-large": (
        ValueError,
        r"v: got shape \[2, 5, 2, 257\], need .* width <= 256",
        {"v": zeros(2, 5, 2, 257)},
    ),
    "k-length": (
        ValueError,
        r"k: got shape \[2, 6, 2, 8\], need \[2, 5, H, 8\]",
        {"k": zeros(2, 6, 2, 8)},
    ),
    "k-width": (
        ValueError,
        r"k: got shape \[2, 5, 2, 7\], need \[2, 5, H, 8\]",
        {"k": zeros(2, 5, 2, 7)},
    ),
    "k-heads": (
        ValueError,
        "k: got shape .* H a divisor of q's 4 heads",
        {"k": zeros(2, 5, 3, 8), "v": zeros(2, 5, 3, 8)},
    ),
    "v-heads": (
        ValueError,
        r"v: got shape \[2, 5, 4, 6\], need \[2, 5, 2, V\]",
        {"v": zeros(2, 5, 4, 6)},
    ),
    "scale": (
        TypeError,
        "scale: got str, need a real number or None",
        {"scale": "1"},
    ),
    "device": (
        ValueError,
        "v: got device meta, need q's, cpu",
        {"v": torch.zeros(2, 5, 2, 6, device="meta")},
    ),
}


@pytest.mark.parametrize("error, message, changes", WRONG.values(), ids=WRONG)
def test_wrong_arguments(error, message, changes):
    good = {
        "q": zeros(2, 5, 4, 8),
        "k": zeros(2, 5, 2, 8),
        "v": zeros(2, 5, 2, 6),
    }
    with pytest.raises(error, match=message):
        flash_attention(**(good | changes))


@interpreted
def test_interpreter_refuses_bf16():
    q, k, v, _ = inputs((1, 5, 2, 1, 8, 8), torch.bfloat16)
    with pytest.raises(TypeError, match=r"q: got torch\.bfloat16 in Triton's"):
        flash_attention(q, k, v)


@compiled
def test_cpu_tensors_are_refused():
    q, k, v, _ = inputs((1, 5, 2, 1, 8, 8), torch.float32)
    with pytest.raises(ValueError, match="q: got device cpu, need a CUDA"):
        flash_attention(q, k, v)


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("shape, _", pairwise_cases())
def test_definition_on_gpu(shape, _):
    tensors = inputs(shape, torch.bfloat16, "cuda")
    judge(tensors, tol=5e-3, gradients_tol=8e-3)


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    "dtype, precision, tol", PRODUCTS.values(), ids=PRODUCTS
)
def test_products_on_gpu(D, dtype, precision, tol, matmul_precision):
    matmul_precision(precision)
    tensors = inputs((2, 1000, 4, 2, D, D), dtype, "cuda")
    gradients_tol = tol if dtype == torch.float32 else 8e-3
    scale = D**-0.5
    print(judge(tensors, tol=tol, gradients_tol=gradients_tol, scale=scale))


@pytest.mark.gpu
@compiled
def test_torch_sdpa_on_gpu():
    """Heads are grouped as PyTorch groups them."""

    def sdpa(q, k, v, scale):
        qkv = [x.double().transpose(1, 2) for x in (q, k, v)]
        o = F.scaled_dot_product_attention(
            *qkv, is_causal=True, scale=scale, enable_gqa=True
        )
        return o.transpose(1, 2)

    tensors = inputs((2, 1000, 8, 2, 128, 128), torch.bfloat16, "cuda")
    judge(tensors, tol=5e-3, gradients_tol=8e-3, scale=0.1, ref=sdpa)


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("D", [64, 128, 256])
def test_deterministic_on_gpu(D):
    tensors = inputs((4, 1000, 8, 2, D, D), torch.bfloat16, "cuda")
    first = with_gradients(flash_attention, tensors)
    second = with_gradients(flash_attention, tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@compiled
@needs_memory(50)
def test_offsets_past_2_31():
    """The last sequence of many, whose elements lie past the 2^31st."""
    B, T = 1100, 128
    tensors = inputs((B, T, 128, 128, 128, 128), torch.bfloat16, "cuda")
    assert tensors[0].numel() > 2**31
    last = [x[-1:] for x in tensors]
    results = with_gradients(flash_attention, tensors, scale=0.1)
    for x, y in zip(
        results, with_gradients(definition, last, scale=0.1), strict=True
    ):
        assert relative_error(x[-1:], y) < 8e-3
