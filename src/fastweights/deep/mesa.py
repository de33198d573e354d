"""MesaNet: weights that are the optimum so far (von Oswald et al. 2025)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.ops import linear_recurrence
from fastweights.reference.backend import wide

Product = Callable[[Tensor], Tensor]


def mesa(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    ridge: Float[Tensor, "H K"],
    *,
    steps: int = 30,
    initial_state: Float[Tensor, "N H K K+V"] | None = None,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "N H K K+V"]]:
    """The matrix that fits all decayed tokens best, read by q.

        H_t = e^{g_t} H_{t-1} + beta_t k_t k_t^T
        G_t = e^{g_t} G_{t-1} + beta_t k_t v_t^T
        o_t = G_t^T (H_t + Diag(ridge))^{-1} q_t

    (eqs. 6 and 7): S_t = (H_t + Diag(ridge))^{-1} G_t is where the decayed
    squared errors plus sum_d ridge_d |S_d|^2 / 2 are least. The equations are
    solved by conjugate gradients, of all tokens together: a product with
    every token's H_t is gated linear attention whose values are its keys.

    Gradients are those of the exact solution: the backward solves the same
    equations for the gradient that comes in, and keeps no iteration.

    Args:
        q, k, v: of one dtype; computed in fp32 (fp64 if they are).
        g, beta: log decay and weight of each token, per head.
        ridge: > 0, per head and key channel.
        steps: of conjugate gradients. Rounding apart K are enough, and far
            fewer where ridge is not small beside H.
        initial_state: [H | G], in fp32.
        cu_seqlens: where packed sequences begin and end; B is 1 then.

    Returns:
        o, in q's dtype, and the state after each sequence's last token.
    """
    dtype, full, K = q.dtype, wide(q.dtype), q.shape[-1]
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, g, beta = (x.to(full) for x in (q, k, v, g, beta))
        ridge = ridge.to(full)
        weighted = beta[..., None] * k
        S0 = initial_state

        def attend(x: Tensor, values: Tensor, S: Tensor | None) -> Any:
            return linear_recurrence(
                x,
                weighted,
                values,
                g,
                scale=1.0,
                initial_state=S,
                cu_seqlens=cu_seqlens,
            )

        H0 = None if S0 is None else S0[..., :K].contiguous()

        def product(x: Tensor) -> Tensor:
            """(H_t + Diag(ridge)) x_t."""
            return attend(x, k, H0)[0] + ridge * x

        with torch.no_grad():
            x = solve(product, q, steps)
        # One more correction, which is 0 up to rounding: its gradients are
        # those of the solution by q, and by all that is in the product.
        x = x + _Solve.apply(q - product(x), product, steps)
        o, state = attend(x, torch.cat([k, v], -1), S0)
        return o[..., K:].to(dtype), state


class _Solve(torch.autograd.Function):
    """The product's inverse on a residual, which it takes for 0."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, product: Product, steps: int
    ) -> Tensor:
        ctx.product, ctx.steps = product, steps
        return torch.zeros_like(residual)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        """The matrices are symmetric: the same equations."""
        with torch.no_grad():
            return solve(ctx.product, dx.contiguous(), ctx.steps), None, None


def solve(
    product: Product, b: Float[Tensor, "*rows K"], steps: int
) -> Float[Tensor, "*rows K"]:
    """A x = b by conjugate gradients, for many A that are product(x) = A x.

    Rows that are done stay: a quotient of 0 and 0 counts as 0.
    """
    x, r, p = torch.zeros_like(b), b, b
    size = (r * r).sum(-1, keepdim=True)
    tiny = torch.finfo(b.dtype).tiny
    for _ in range(steps):
        Ap = product(p)
        step = size / (p * Ap).sum(-1, keepdim=True).clamp_min(tiny)
        x, r = x + step * p, r - step * Ap
        size, before = (r * r).sum(-1, keepdim=True), size
        p = r + size / before.clamp_min(tiny) * p
    return x
