"""The kernels on packs with tokens after the last sequence."""

import pytest
import torch
from support.operator_cases import EACH_OPERATOR, OPERATORS, check_tail

from fastweights.kernels.tail import clear_tail


@pytest.mark.parametrize(
    ("name", "segments"),
    [*((name, 1) for name in OPERATORS), ("gated_deltanet", 2), ("kda", 2)],
)
def test_they_leave_it_at_zero(name, segments, set_segments):
    set_segments(segments)
    check_tail(
        name,
        [0, 5, 5, 70],
        T=140,
        dtype=torch.float32,
        backend="triton",
        tolerance=1e-5,
    )


def test_what_is_cleared():
    """Rows from the last offset on, of every width and dtype."""
    tensors = [
        torch.ones(1, 150, 3, 67),
        torch.ones(1, 150, dtype=torch.float16),
    ]
    clear_tail(torch.tensor([0, 3, 77]), None, *tensors)
    for x in tensors:
        assert (x[:, :77] == 1).all() and (x[:, 77:] == 0).all()
    clear_tail(None, *tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@EACH_OPERATOR
def test_they_leave_it_at_zero_on_a_gpu(name, dtype):
    check_tail(
        name,
        [0, 500, 500, 900],
        T=2000,
        dtype=dtype,
        device="cuda",
        backend="triton",
        tolerance=2e-2 if dtype == torch.float16 else 1e-3,
    )
