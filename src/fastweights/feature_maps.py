"""Feature maps phi with phi(q) . phi(k) in place of exp(q . k).

Each takes [..., K] to [..., features] and is applied to q and to k alike,
before the recurrence. The random ones are Modules that hold their projection,
drawn from an explicit generator, so that queries and keys meet the same
features; ``.to()`` moves it, and ``state_dict()`` has it.

    phi = PositiveRandom(random_directions(64, 16))
    o, state = fw.linear_attention(q, k, v, feature_map=phi)    # K = 16
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.arguments import check_integers, check_tensors, refuse_shape
from fastweights.dtypes import upcast

__all__ = [
    "PositiveRandom",
    "RandomFeatures",
    "RandomFourier",
    "elu1",
    "identity",
    "random_directions",
    "relu",
    "softmax",
]

Input = Float[Tensor, "*lead K"]
Features = Float[Tensor, "*lead features"]


def identity(x: Input) -> Features:
    """x itself: similarity q . k, of either sign.

    Args:
        x: [..., K], of any dtype.

    Returns:
        x.
    """
    return x


def elu1(x: Input) -> Features:
    """elu(x) + 1, positive everywhere (Katharopoulos et al. 2020, eq. 7).

    Args:
        x: [..., K], of any floating dtype.

    Returns:
        [..., K] in x's dtype.

    Raises:
        TypeError: x is no tensor.
    """
    check_tensors(x=x)
    # F.elu(x) + 1 rounds to 0 below about -6.2 in bf16, -17 in fp32.
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def relu(x: Input) -> Features:
    """max(x, 0): non-negative, and zero for a whole orthant.

    Args:
        x: [..., K], of any floating dtype.

    Returns:
        [..., K] in x's dtype.

    Raises:
        TypeError: x is no tensor.
    """
    check_tensors(x=x)
    return F.relu(x)


def softmax(x: Input) -> Features:
    """Softmax over the channels of each vector.

    Shen et al. 2021 apply it to queries; their keys take the softmax over
    positions, which is no map of one token.

    Args:
        x: [..., K], of any floating dtype.

    Returns:
        [..., K] in x's dtype.

    Raises:
        TypeError: x is no tensor.
    """
    check_tensors(x=x)
    return torch.softmax(x, dim=-1)


def random_directions(
    num_features: int,
    dim: int,
    *,
    orthogonal: bool = True,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "R K"]:
    """Gaussian directions for random features.

    Args:
        num_features: how many, R.
        dim: their width K.
        orthogonal: whether blocks of dim directions are orthogonal to one
            another, while each stays N(0, I) (Choromanski et al. 2021,
            section 2.4).
        generator: what draws them; PyTorch's own if None.
        dtype: theirs.

    Returns:
        [R, K] in ``dtype``, on the CPU.

    Raises:
        TypeError: num_features or dim is no integer.
        ValueError: one of them is below 1.
    """
    sizes = {"num_features": num_features, "dim": dim}
    check_integers(**sizes)
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: got {size}, need at least 1")
    rows = torch.randn(num_features, dim, generator=generator, dtype=dtype)
    if not orthogonal:
        return rows
    lengths = rows.norm(dim=-1, keepdim=True)
    blocks = []
    for _ in range(math.ceil(num_features / dim)):
        square = torch.randn(dim, dim, generator=generator, dtype=dtype)
        Q, R = torch.linalg.qr(square)
        blocks.append(Q * R.diagonal().sign())  # uniform over rotations
    return torch.cat(blocks)[:num_features] * lengths


class RandomFeatures(nn.Module):
    """A feature map with random directions: a buffer, [R, K].

    It takes x [..., K] of any floating dtype, and computes in fp32 (fp64 if
    x is): an exponential's error is its argument's, and x's dtype may have no
    room for it.

    Args:
        directions: [R, K], of a floating dtype: :func:`random_directions`.

    Raises:
        TypeError: directions or x is no tensor.
        ValueError: directions have not two dimensions, or x another width.
    """

    directions: Float[Tensor, "R K"]

    def __init__(self, directions: Float[Tensor, "R K"]) -> None:
        check_tensors(directions=directions)
        if directions.dim() != 2 or min(directions.shape) < 1:
            need = "[R, K] with R, K >= 1"
            refuse_shape("directions", directions, need)
        super().__init__()
        self.register_buffer("directions", directions)

    def widened(self, x: Input) -> tuple[Input, Float[Tensor, "R K"]]:
        """x in the dtype that it is computed in, and directions like it."""
        check_tensors(x=x)
        K = self.directions.shape[1]
        if x.dim() < 1 or x.shape[-1] != K:
            refuse_shape("x", x, f"[..., {K}], as wide as the directions")
        x = upcast(x)
        return x, self.directions.to(x)


class RandomFourier(RandomFeatures):
    """Trigonometric features of the exponential kernel.

    phi(x) = e^{|x|^2/2} R^{-1/2} [cos(w_r . x), sin(w_r . x)], so that
    phi(q) . phi(k) has mean exp(q . k) (Rahimi and Recht 2007; as attention,
    Peng et al. 2021). A term cos(w_r . (q - k)) is negative almost half the
    time when q and k are far apart: small similarities drown in noise.

    Args:
        directions: [R, K]; the result has 2 R channels.
    """

    def forward(self, x: Input) -> Features:
        z, w = self.widened(x)
        angle = z @ w.T
        size = (0.5 * z.square().sum(-1, keepdim=True)).exp()
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1)
        return (size * waves / math.sqrt(w.shape[0])).to(x.dtype)


class PositiveRandom(RandomFeatures):
    """Performer's positive features of the exponential kernel.

    phi(x) = R^{-1/2} exp(w_r . x - |x|^2 / 2), so that phi(q) . phi(k) has
    mean exp(q . k) and every term is positive (Choromanski et al. 2021,
    lemma 1). The longer q + k is, the larger is their relative error.

    Args:
        directions: [R, K]; the result has R channels.
    """

    def forward(self, x: Input) -> Features:
        z, w = self.widened(x)
        size = 0.5 * z.square().sum(-1, keepdim=True)
        found = (z @ w.T - size).exp() / math.sqrt(w.shape[0])
        return found.to(x.dtype)
