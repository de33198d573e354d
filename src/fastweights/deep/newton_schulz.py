"""Orthogonalising a gradient, as the optimiser Muon does (Jordan 2024)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

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


def newton_schulz(
    G: Float[Tensor, "*lead K N"],
    coefficients: tuple[tuple[float, float, float], ...] = LACT,
    eps: float = 1e-7,
) -> Float[Tensor, "*lead K N"]:
    """U V^T of G = U Sigma V^T, roughly: its singular values become about 1.

    Each step is an odd polynomial, X <- (a + b X X^T + c (X X^T)^2) X, which
    changes the singular values, s <- a s + b s^3 + c s^5, and leaves the
    singular vectors alone. Beforehand G is divided by its Frobenius norm
    plus eps. Products are on the shorter side, in G's dtype.
    """
    tall = G.shape[-2] > G.shape[-1]
    X = G.mT if tall else G
    norm = X.square().sum((-2, -1), keepdim=True)
    # The root of 0 has no gradient: an empty G stays 0, with gradients too.
    norm = norm.where(norm > 0, 1.0).sqrt()
    X = X / (norm + eps)
    one = torch.eye(X.shape[-2], dtype=X.dtype, device=X.device)
    for a, b, c in coefficients:
        A = X @ X.mT
        X = (a * one + b * A + c * (A @ A)) @ X
    return X.mT if tall else X
