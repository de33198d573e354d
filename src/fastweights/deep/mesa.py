"""MesaNet: weights that are the optimum so far (von Oswald et al. 2025)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights import torch_internals
from fastweights.arguments import (
    RecurrenceOperands,
    RecurrenceOptions,
    check_dtypes,
    check_packed,
    check_sequences,
    check_sizes,
    check_tensors,
    is_readable,
)
from fastweights.deep.network_arguments import (
    check_network_inputs,
    check_shapes,
    check_state,
)
from fastweights.dtypes import DTYPES, compute_dtype, without_autocast
from fastweights.ops.common.backends import KernelOrTorch
from fastweights.ops.common.batch_invariance import is_batch_invariant
from fastweights.ops.common.flops import register_flop_formulas
from fastweights.ops.mesa import SOLVE, kernel_takes
from fastweights.ops.recurrence import linear_recurrence
from fastweights.ops.recurrence_operator import RECURRENCE
from fastweights.packing import tail_mask
from fastweights.ranks.group import refuse_ranks


def mesa(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    ridge: Float[Tensor, "H K"],
    *,
    solver_steps: int = 30,
    initial_state: Float[Tensor, "N H K K+V"] | None = None,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    backend: KernelOrTorch = "auto",
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "N H K K+V"]]:
    """The matrix that fits all decayed tokens best, read by q.

        H_t = e^{g_t} H_{t-1} + beta_t k_t k_t^T
        G_t = e^{g_t} G_{t-1} + beta_t k_t v_t^T
        o_t = G_t^T (H_t + Diag(ridge))^{-1} q_t

    S_t = (H_t + Diag(ridge))^{-1} G_t is where the decayed
    squared errors plus sum_d ridge_d |S_d|^2 / 2 are least. The equations are
    solved by conjugate gradients, of all tokens together: a product with
    every token's H_t is gated linear attention whose values are its keys.

    Gradients are those of the exact solution: the backward solves the same
    equations for the gradient that comes in, and keeps no iteration.

    Args:
        q, k, v: [B, T, H, K] both and [B, T, H, V], of one dtype; computed in
            fp32 (fp64 if they are), but for the kernel's products.
        g, beta: [B, T, H], log decay and weight of each token.
        ridge: [H, K], > 0.
        solver_steps: of conjugate gradients. Rounding apart K are enough, and
            far fewer where ridge is not small beside H.
        initial_state: [N, H, K, K + V], H beside G, in fp32.
        cu_seqlens: [N + 1], where packed sequences begin and end; B is 1
            then. Tokens after the last one have outputs and gradients of 0.
        backend: "triton" (a kernel for all steps, and products in q's dtype:
            K <= 128, 64 in fp32, CUDA), "torch" (PyTorch) or "auto" (on
            compute capability 9.x and 10.x the kernel in half precision,
            else steps of PyTorch).

    Returns:
        o [B, T, H, V], in q's dtype, and the state [N, H, K, K + V] after
        each sequence's last token.

    Raises:
        TypeError, ValueError: a dtype, device or shape does not fit; the
            message names the argument, what it got and what it needs.
    """
    refuse_ranks("mesa")
    check_network_inputs(q, k, v, {"g": g, "beta": beta})
    check_sizes(solver_steps=solver_steps)
    check_packed(q, cu_seqlens)
    check_tensors(ridge=ridge)
    check_dtypes({"q": q, "ridge": ridge}, {"q": DTYPES, "ridge": DTYPES})
    dtype, full, K = q.dtype, compute_dtype(q.dtype), q.shape[-1]
    H, V = v.shape[2:]
    N = check_sequences("q", q, "[1, T, H, K]", cu_seqlens)
    check_shapes(ridge=(ridge, (H, K)))
    if is_readable(ridge) and (wrong := (ridge <= 0) | ridge.isinf()).any():
        got = ridge[wrong][0].item()
        raise ValueError(f"ridge: got {got}, need finite numbers > 0")
    check_state(q, initial_state, N, H, K, K + V, after=None)
    solver = Solver(
        solver_steps, backend, kernel_takes(backend, q), dtype != full
    )
    # Products are in q's dtype beside the kernel, else in fp32.
    products = dtype if solver.by_kernel else full
    if cu_seqlens is not None:
        after = tail_mask(cu_seqlens, q.shape[1])[:, None]
        g, beta = g.masked_fill(after, 0), beta.masked_fill(after, 0)
        q, k, v = (x.masked_fill(after[..., None], 0) for x in (q, k, v))
    with without_autocast(q):
        q, k, v, g, beta = (
            x.to(full).contiguous() for x in (q, k, v, g, beta)
        )
        ridge, S0 = ridge.to(full).contiguous(), initial_state
        S0 = None if S0 is None else S0.to(full)
        weighted = beta[..., None] * k
        H0 = None if S0 is None else S0[..., :K].contiguous()
        matrices = (k, beta, g, ridge, H0, cu_seqlens)
        with torch.no_grad():
            x = solve(q, solver, *matrices)

        def read(x: Tensor, values: Tensor, S0: Tensor | None):
            o, state = linear_recurrence(
                x.to(products),
                weighted.to(products),
                values.to(products),
                g,
                scale=1.0,
                initial_state=S0,
                cu_seqlens=cu_seqlens,
                backend=backend,
            )
            return o.to(full), state

        # One more correction, which is 0 up to rounding: its gradients are
        # those of the solution by q, and by all that is in the product.
        Hx, _ = read(x, k, H0)
        x = x + _Solve.apply(q - Hx - ridge * x, solver, *matrices)
        o, state = read(x, torch.cat([k, v], -1), S0)
        return o[..., K:].to(dtype), state


class Solver(NamedTuple):
    """The number of steps of a solve, and the function that takes them."""

    steps: int
    backend: KernelOrTorch
    by_kernel: bool
    half: bool  # whether tokens came in half precision


class _Solve(torch.autograd.Function):
    """Apply the matrices' inverses to a residual, as if it were 0."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, solver: Solver, *matrices: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(*matrices)
        ctx.solver = solver
        return torch.zeros_like(residual)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        """The matrices are symmetric: the same equations once more."""
        matrices = ctx.saved_tensors  # checkpointing lets them be read once
        dx = solve(dx.contiguous(), ctx.solver, *matrices)
        return dx, None, *[None] * len(matrices)


def solve(
    b: Float[Tensor, "B T H K"],
    solver: Solver,
    k: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    g: Float[Tensor, "B T H"],
    ridge: Float[Tensor, "H K"],
    H0: Float[Tensor, "N H K K"] | None,
    cu_seqlens: Int[Tensor, " N+1"] | None,
) -> Float[Tensor, "B T H K"]:
    """(H_t + Diag(ridge)) x_t = b_t for every t, by conjugate gradients.

    It has no gradients. Rows that are done stay: a quotient of 0 and 0 counts
    as 0. A single token's matrices are written down; those of many are not,
    and a product with them is linear attention.
    """
    if not torch.compiler.is_compiling() and torch_internals.is_watched():
        register_flop_formulas()  # of FLOPs, past whom the operators go below
    H: Tensor | None = None
    if b.shape[1] == 1 and H0 is not None and cu_seqlens is None:
        kept = g[:, 0, :, None, None].exp() * H0
        k_0 = k[:, 0, :, :, None]
        H = kept + beta[:, 0, :, None, None] * k_0 * k_0.mT
    elif solver.by_kernel:
        return SOLVE(
            b, k, g, beta, ridge, H0, cu_seqlens, solver.steps, solver.half
        )
    weighted = beta[..., None] * k

    def product(x: Tensor) -> Tensor:
        if H is not None:
            return torch.einsum("bhkj,bthk->bthj", H, x)
        operands = RecurrenceOperands(
            x, weighted, k, g, None, None, H0, cu_seqlens
        )
        options = RecurrenceOptions(
            scale=1.0,
            backend=solver.backend,
            batch_invariant=is_batch_invariant(),
        )
        return RECURRENCE.forward(*operands, *options)[0]

    x, r, p = torch.zeros_like(b), b, b
    size = (r * r).sum(-1, keepdim=True)
    tiny = torch.finfo(b.dtype).tiny
    for _ in range(solver.steps):
        Ap = product(p) + ridge * p
        step = size / (p * Ap).sum(-1, keepdim=True).clamp_min(tiny)
        x, r = x + step * p, r - step * Ap
        size, before = (r * r).sum(-1, keepdim=True), size
        p = r + size / before.clamp_min(tiny) * p
    return x
