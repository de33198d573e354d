"""An annotation that lies is caught, in the library too."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from fastweights.reference import steps

shapes = pytest.importorskip("support.shapes", exc_type=ImportError)


def total(x: Float[Tensor, "T K"]) -> Float[Tensor, " T"]:
    return x.sum(0)


def test_an_annotation_that_lies_is_caught():
    call = shapes.checked(total)
    call(torch.ones(3, 3))
    with pytest.raises(AssertionError, match=r"total: return is .*\[2\]"):
        call(torch.ones(3, 2))


def test_the_library_is_checked():
    with pytest.raises(AssertionError, match=r"steps\.outer: v is .*\[1, 4\]"):
        steps.outer(torch.ones(2, 3), torch.ones(1, 4))
