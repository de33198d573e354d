"""Whose weights are used past the module's call."""

import pytest
import torch
from torch import nn

from fastweights.layers.common.plain_modules import is_plain_product


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Around(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


def product(kind=nn.Linear, bias=False):
    return kind(3, 2, bias=bias)


def hooked(register):
    module = product()
    getattr(module, register)(lambda *arguments: None)
    return module


def replaced():
    module = product()
    module.forward = lambda x: x
    return module


OTHERS = {
    "bias": lambda: product(bias=True),
    "forward": lambda: product(Doubled),
    "call": lambda: product(Around),
    "object": replaced,
    "hook": lambda: hooked("register_forward_hook"),
    "before": lambda: hooked("register_forward_pre_hook"),
    "backward": lambda: hooked("register_full_backward_hook"),
    "before backward": lambda: hooked("register_full_backward_pre_hook"),
}


def test_an_untouched_linear_is_a_product():
    assert is_plain_product(product(), torch.zeros(1, 3))
    assert not is_plain_product(product(), torch.zeros(1, 3, device="meta"))


@pytest.mark.parametrize("other", OTHERS)
def test_what_does_more_is_called(other):
    assert not is_plain_product(OTHERS[other](), torch.zeros(1, 3))
