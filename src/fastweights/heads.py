"""q, k and v by heads: cut out of channels, repeated, of unit length."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from fastweights.dtypes import upcast


class HeadLayout(NamedTuple):
    """Numbers and sizes of the heads: those of q and k, and those of v."""

    H: int
    HV: int
    K: int
    V: int


NO_HEADS = HeadLayout(H=0, HV=1, K=0, V=0)  # channels that are not cut

HeadStates = Float[Tensor, "N HV K V"]
"""The recurrence's states: a matrix per sequence and head of v."""


def split_heads(
    x: Float[Tensor, "B T C"], layout: HeadLayout
) -> tuple[
    Float[Tensor, "B T H K"],
    Float[Tensor, "B T H K"],
    Float[Tensor, "B T HV V"],
]:
    """Views of x's channels as q, k and v, one behind the other."""
    H, HV, K, V = layout
    q, k, v = x.split((H * K, H * K, HV * V), dim=-1)
    q, k = (t.unflatten(-1, (H, K)) for t in (q, k))
    return q, k, v.unflatten(-1, (HV, V))


def empty_heads(
    x: Float[Tensor, "B T C"], layout: HeadLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v to be filled; without heads v in x's shape alone."""
    (B, T, _), (H, HV, K, V) = x.shape, layout
    if not H:
        return x.new_empty(0), x.new_empty(0), x.new_empty(x.shape)
    q, k = (x.new_empty(B, T, H, K) for _ in "qk")
    return q, k, x.new_empty(B, T, HV, V)


def state_shape(q: Tensor, v: Tensor) -> tuple[int, int, int]:
    """[HV, K, V], of the state of each sequence."""
    return v.shape[2], q.shape[3], v.shape[3]


def per_value_head(
    x: Float[Tensor, "B T H K"], HV: int
) -> Float[Tensor, "B T HV K"]:
    """x, each head repeated for the value heads that share it."""
    groups = HV // x.shape[2]
    return x if groups == 1 else x.repeat_interleave(groups, dim=2)


def l2norm(x: Float[Tensor, "*rows K"], eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|^2 + eps) along the last dimension, in fp32 inside."""
    y = upcast(x)
    return (y * (y.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
