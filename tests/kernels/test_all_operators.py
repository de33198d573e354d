"""What holds for every operator by its kernels."""

import pytest
import torch
from support.kernel_judge import DEVICES
from support.operator_cases import (
    EACH_OPERATOR,
    OPERATORS,
    OpChecks,
    check_one_graph,
    operator_inputs,
    operator_results,
)


def by_kernels(name, x, **options):
    return operator_results(
        OPERATORS[name].call, x, backend="triton", **options
    )


@EACH_OPERATOR
def test_schemas_and_shapes(name):
    x = operator_inputs(name, 6, 2, torch.float32)
    with OpChecks():
        by_kernels(name, x, cu_seqlens=torch.tensor([0, 2, 6]))


@EACH_OPERATOR
def test_views_that_are_not_contiguous(name):
    x = operator_inputs(name, 20, 1, torch.float32)
    views = {
        key: t.movedim(-1, 0).contiguous().movedim(0, -1)
        for key, t in x.items()
    }
    assert not any(t.is_contiguous() for t in views.values() if t.dim() > 1)
    found, want = (by_kernels(name, y) for y in (views, x))
    torch.testing.assert_close(found, want)


@EACH_OPERATOR
def test_what_is_refused_on_the_host(name):
    """Offsets that are none, and bf16, which NumPy has not."""
    x, offsets = (
        operator_inputs(name, 6, 1, torch.float32),
        torch.tensor([0, 7]),
    )
    with pytest.raises(ValueError, match=r"cu_seqlens: got \[0, 7\]"):
        by_kernels(name, x, cu_seqlens=offsets)
    with pytest.raises(ValueError, match="backend: got 'triton'"):
        by_kernels(name, operator_inputs(name, 6, 1, torch.bfloat16))


@DEVICES
@pytest.mark.parametrize("name", ["selective_scan", "mesa"])
def test_one_graph(name, device):
    cases, compiler, rtol = [(6, []), (9, [])], "aot_eager", 0.0
    if device == "cuda":
        cases, compiler, rtol = [(65, []), (100, [])], "inductor", 1e-4
    options = {"dtype": torch.float32, "device": device, "backend": "triton"}
    check_one_graph(name, False, cases, compiler, rtol=rtol, **options)


@pytest.mark.gpu
@EACH_OPERATOR
def test_the_same_bits_again(name):
    x = operator_inputs(name, 1000, 1, torch.bfloat16, "cuda")
    first, second = (by_kernels(name, x) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
