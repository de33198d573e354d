"""Orthogonalising a gradient, as the optimiser Muon does (Jordan 2024)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fastweights.arguments import (
    check_dtype,
    check_numbers,
    check_tensors,
    refuse_shape,
)
from fastweights.dtypes import DTYPES, compute_dtype

MUON = 5 * ((3.4445, -4.7750, 2.0315),)
"""Muon's steps: singular values land between 0.7 and 1.2."""

LACT = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""LaCT's: each step has coefficients of its own, and they land near 1."""

EPS = 1e-7
"""What LaCT's authors add to a gradient's norm: one far below it is small."""


def newton_schulz(
    G: Float[Tensor, "*lead K N"],
    coefficients: tuple[tuple[float, float, float], ...] = LACT,
    eps: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*lead K N"]:
    """U V^T of G = U Sigma V^T, roughly: its singular values become about 1.

    Each step is an odd polynomial, X <- (a + b X X^T + c (X X^T)^2) X, which
    changes the singular values, s <- a s + b s^3 + c s^5, and leaves the
    singular vectors alone. Beforehand G is divided by its Frobenius norm plus
    eps, in fp32 (fp64 if G is) whatever its entries' size: the square of 1e-5
    is below fp16's least number, that of 1e20 beyond fp32's largest. A G of 0
    stays 0.

    Args:
        G: matrices; products are on their shorter side.
        coefficients: (a, b, c) of each step.
        eps: added to the norm, >= 0.
        dtype: of the products; None: G's.

    Returns:
        [..., K, N] in G's dtype.

    Raises:
        TypeError, ValueError: G is no tensor of matrices of floating point
            numbers; a step has not three coefficients; eps is below 0.
    """
    check_tensors(G=G)
    if G.dtype not in DTYPES:
        raise TypeError(f"G: got {G.dtype}, need one of {DTYPES}")
    if G.dim() < 2:
        refuse_shape("G", G, "[..., K, N]")
    is_list = isinstance(coefficients, tuple | list)
    if not is_list or not all(len(step) == 3 for step in coefficients):
        raise ValueError(
            f"coefficients: got {coefficients}, need (a, b, c) for each step"
        )
    check_numbers(">= 0", eps=eps)
    check_dtype(dtype)
    tall = G.shape[-2] > G.shape[-1]
    X = (G.mT if tall else G).to(compute_dtype(G.dtype))
    largest = _or_one(X.detach().abs().amax((-2, -1), keepdim=True))
    X = X / largest
    # The root of 0 has no gradient: an empty G stays 0, with gradients too.
    norm = _or_one(X.square().sum((-2, -1), keepdim=True)).sqrt()
    X = (X / (norm + eps / largest)).to(G.dtype if dtype is None else dtype)
    one = torch.eye(X.shape[-2], dtype=X.dtype, device=X.device)
    for a, b, c in coefficients:
        A = X @ X.mT
        X = (a * one + b * A + c * (A @ A)) @ X
    return (X.mT if tall else X).to(G.dtype)


def _or_one(size: Tensor) -> Tensor:
    """The size, or 1 where it is 0."""
    return size.where(size != 0, 1.0)
