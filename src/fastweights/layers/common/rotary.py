"""Positions as angles, by which queries and keys turn."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.dtypes import upcast


def rotary(
    x: Float[Tensor, "B T H D"],
    position: Int[Tensor, "#B T"],
    theta: float = 1e4,
    fraction: float = 1.0,
) -> Float[Tensor, "B T H D"]:
    """Rotary position embedding (Su et al. 2021), pairs half a head apart.

    Channels j and j + R / 2 turn by position * theta^(-2 j / R), for the
    first R = fraction * D channels; the others stay. It is computed in
    fp32, and returned in x's dtype.
    """
    R = int(x.shape[-1] * fraction) // 2 * 2
    a, b = upcast(x[..., :R]).chunk(2, -1)
    j = torch.arange(0, R, 2, device=x.device, dtype=a.dtype)
    angle = position[..., None].to(a.dtype) * theta ** (-j / R)
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    turned = turned.to(x.dtype)
    return turned if x.shape[-1] == R else torch.cat([turned, x[..., R:]], -1)
