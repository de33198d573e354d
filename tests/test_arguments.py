"""The checks of arguments that operators, layers and models share."""

import numpy as np
import pytest
import torch
from refused import refused
from torch._subclasses import FakeTensorMode

from fastweights import arguments


@refused("""
check_sizes(dim=True)
    TypeError: dim: got bool, need an int
check_sizes(dim=0)
    ValueError: dim: got 0, need an integer >= 1
check_flags(gate="no")
    TypeError: gate: got 'no', need True or False
check_flags(gate=torch.ones(()))
    TypeError: gate: got Tensor, need True or False
check_number("eps", float("inf"), "> 0")
    ValueError: eps: got inf, need a finite number
check_number("eps", float("nan"), "any")
    ValueError: eps: got nan, need a finite number
check_number("eps", True, "> 0")
    TypeError: eps: got bool, need a real number
check_dtype("fp32")
    TypeError: dtype: got 'fp32', need one of (torch.float64, torch.float32,
    torch.float16, torch.bfloat16)
check_dtype(torch.int64)
    TypeError: dtype: got torch.int64, need one of (torch.float64,
    torch.float32, torch.float16, torch.bfloat16)
""")
def test_a_value_of_another_kind(wrong, error):
    with error():
        eval(wrong, vars(arguments) | globals())


def test_what_fits():
    arguments.check_sizes(dim=np.int64(3), heads=1)
    arguments.check_flags(gate=True, bias=False)
    arguments.check_number("eps", np.float32(1.0), "> 0")
    arguments.check_number("start", -2, "any")
    arguments.check_dtype(None)
    arguments.check_dtype(torch.bfloat16)


@pytest.mark.parametrize(
    ("offsets", "kind", "need"),
    [
        ([0.0, 5.0], TypeError, "need torch.int32 or torch.int64"),
        ([5], ValueError, r"need \[N \+ 1\]"),
        ([1, 5], ValueError, "start at 0"),
        ([0, 4, 3, 5], ValueError, "never decrease"),
        ([0, 6], ValueError, "end at T = 5 or before"),
    ],
)
def test_offsets_that_do_not_fit_a_pack(offsets, kind, need):
    x = torch.zeros(1, 5, 2)
    with pytest.raises(kind, match=f"^cu_seqlens: got .*{need}"):
        arguments.check_packed(x, torch.tensor(offsets))


@pytest.mark.parametrize(
    ("rows", "kind", "need"),
    [
        ([0.0, 1.0], TypeError, "need torch.int32 or torch.int64"),
        ([0], ValueError, r"need \[2\]"),
        ([0, 3], ValueError, "need rows of the pool, 0 to 2"),
        ([-1, 0], ValueError, "need rows of the pool, 0 to 2"),
        ([1, 1], ValueError, "need each row once"),
    ],
)
def test_rows_that_are_not_in_a_pool(rows, kind, need):
    with pytest.raises(kind, match=f"^rows: got .*{need}"):
        arguments.check_rows(torch.tensor(rows), 2, 3)


def test_values_are_not_read_where_they_are_traced():
    with FakeTensorMode():
        offsets = torch.zeros(3, dtype=torch.int32)
        arguments.check_packed(torch.zeros(1, 5, 2), offsets)
        arguments.check_rows(offsets, 3, 2)
