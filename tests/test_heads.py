"""q, k and v by heads."""

import torch
import torch.nn.functional as F

from fastweights.checks import relative_error
from fastweights.heads import (
    NO_HEADS,
    HeadLayout,
    empty_heads,
    l2norm,
    per_value_head,
    split_heads,
)


def test_channels_are_cut_into_heads_and_back():
    layout = HeadLayout(H=4, HV=8, K=5, V=7)
    x = torch.randn(2, 3, 2 * 4 * 5 + 8 * 7)
    parts = split_heads(x, layout)
    assert torch.equal(torch.cat([t.flatten(2) for t in parts], -1), x)
    rooms = empty_heads(x, layout)
    assert [t.shape for t in rooms] == [t.shape for t in parts]
    none, _, whole = empty_heads(x, NO_HEADS)
    assert none.numel() == 0 and whole.shape == x.shape


def test_value_heads_that_share_a_key_head_lie_side_by_side():
    x = torch.arange(3.0)[None, None, :, None]
    assert per_value_head(x, 6).flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert per_value_head(x, 3) is x


def test_l2norm_is_of_the_last_dimension_and_in_fp32_inside():
    x = 1e-4 * torch.randn(3, 4, 16)
    want = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert relative_error(l2norm(x), want) < 1e-6
    large = 300 * torch.randn(4, 16).half()  # whose squares overflow
    y = l2norm(large)
    assert y.dtype == torch.float16
    assert relative_error(y.float(), F.normalize(large.float(), dim=-1)) < 1e-3
