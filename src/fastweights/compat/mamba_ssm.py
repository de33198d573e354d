"""mamba_ssm's functions by name, computed by this library.

Mamba-2's chunk scan, Mamba's selective scan, and the step of both. Each
takes what the function of that name takes in mamba_ssm 2.3, in that order
and layout; what is not supported is refused by name. cu_seq_lens_q is one
more name for offsets, the one that transformers gives them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    check_dims,
    check_flags,
    check_packed,
    check_shapes,
    check_tensors,
    refuse_shape,
)
from fastweights.compat.packed import offsets_of
from fastweights.dtypes import compute_dtype
from fastweights.ops.common.registration import needs_gradient
from fastweights.ops.decode import decode_step
from fastweights.ops.recurrence import linear_recurrence
from fastweights.ops.selective import selective_scan, selective_step

__all__ = [
    "mamba_chunk_scan_combined",
    "selective_scan_fn",
    "selective_state_update",
]


def mamba_chunk_scan_combined(
    x: Float[Tensor, "B T H P"],
    dt: Float[Tensor, "B T H"],
    A: Float[Tensor, " H"],
    B: Float[Tensor, "B T G N"],
    C: Float[Tensor, "B T G N"],
    chunk_size: int | None = None,
    D: Float[Tensor, " H *P"] | None = None,
    z: Float[Tensor, "B T H P"] | None = None,
    dt_bias: Float[Tensor, " H"] | None = None,
    initial_states: Float[Tensor, "B H P N"] | None = None,
    seq_idx: Int[Tensor, "B T"] | None = None,
    cu_seqlens: Int[Tensor, " S+1"] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    *,
    cu_seq_lens_q: Int[Tensor, " S+1"] | None = None,
) -> (
    Float[Tensor, "B T H P"]
    | tuple[Float[Tensor, "B T H P"], Float[Tensor, "B H P N"]]
):
    """Mamba-2: y_t = (S_t C_t + D x_t) silu(z_t), one state S_t per head,

    S_t = e^{dt_t A} S_{t-1} + dt_t x_t B_t^T.

    Args:
        x, dt, A, B, C, D, z, dt_bias: any floating dtype; G divides H.
        dt_softplus, dt_limit: dt is dt + dt_bias, with dt_softplus the
            softplus of that, and clamped to dt_limit, in fp32 (fp64 if x is).
        chunk_size: a hint, not needed.
        initial_states: zeros if None.
        seq_idx, cu_seqlens, cu_seq_lens_q: where packed documents end, the
            number of each token's or, for B = 1, offsets.
        return_final_states: whether to return the state after the last
            token of each row too.
        return_varlen_states: not supported, False.

    Returns:
        y in x's dtype, with return_final_states the pair of it and the
        states in fp32 (fp64 if x is).

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is wrong or
            not supported; the message names it.
    """
    check_flags(
        dt_softplus=dt_softplus,
        return_final_states=return_final_states,
        return_varlen_states=return_varlen_states,
    )
    if return_varlen_states:
        raise NotImplementedError(
            "return_varlen_states: got True, need False: only rows' last "
            "states"
        )
    check_dims("[B, T, H, P]", x=x)
    check_tensors(B=B)
    rows, T, H, P = x.shape
    if B.dim() != 4 or B.shape[:2] != x.shape[:2] or H % max(B.shape[2], 1):
        need = f"[{rows}, {T}, G, N] with G a divisor of {H}"
        refuse_shape("B", B, need)
    first = (rows, H, P, B.shape[3])
    check_shapes(
        dt=(dt, (rows, T, H)),
        A=(A, (H,)),
        C=(C, B.shape),
        z=(z, x.shape),
        dt_bias=(dt_bias, (H,)),
        initial_states=(initial_states, first),
    )
    if D is not None:
        check_tensors(D=D)
        if D.shape not in ((H,), (H, P)):
            refuse_shape("D", D, f"[{H}] or [{H}, {P}]")
        D = D[:, None] if D.dim() == 1 else D
    full = compute_dtype(x.dtype)
    dt = _step_sizes(dt, dt_bias, dt_softplus, full)
    low, high = dt_limit
    if not low <= high:
        raise ValueError(f"dt_limit: got {dt_limit}, need a least, a most")
    if low > 0 or high < math.inf:
        dt = dt.clamp(low, high)
    check_packed(x, cu_seqlens)
    offsets, last = offsets_of(x, cu_seqlens, cu_seq_lens_q, seq_idx)
    if offsets is not None and initial_states is not None:
        raise ValueError(
            "initial_states: got states beside packed documents, need None"
        )
    # q, k, v and g of the recurrence; rows of documents are one row.
    dtype = _common_dtype(x, B, C)
    v = (dt[..., None] * x).to(dtype)
    tokens = [C.to(dtype), B.to(dtype), v, dt * A.to(full)]
    if last is not None:
        tokens = [t.flatten(0, 1)[None] for t in tokens]
    state = initial_states
    if state is not None:
        state = state.to(full).mT.contiguous()
    y, state = linear_recurrence(
        *tokens, scale=1.0, initial_state=state, cu_seqlens=offsets
    )
    y = _skip_and_gate(y.reshape(x.shape), x, D, z, full)
    if not return_final_states:
        return y
    if last is not None:
        state = state[last]
    elif offsets is not None:
        state = state[-1:]  # the row's: its last document's
    return y, state.mT.contiguous()


def selective_state_update(
    state: Float[Tensor, "rows *H P N"],
    x: Float[Tensor, "B *H P"],
    dt: Float[Tensor, "B *H P"],
    A: Float[Tensor, "*H P N"],
    B: Float[Tensor, "B *G N"],
    C: Float[Tensor, "B *G N"],
    D: Float[Tensor, "*H P"] | None = None,
    z: Float[Tensor, "B *H P"] | None = None,
    dt_bias: Float[Tensor, "*H P"] | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B *H P"]:
    """Either scan for one more token, the state in place.

    Args:
        state: of any floating dtype; it is rounded to it.
        x, dt, A, B, C, D, z, dt_bias, dt_softplus: those of
            :func:`mamba_chunk_scan_combined` with H heads of P channels, of
            :func:`selective_scan_fn` without H. Mamba-2's dt, A and dt_bias,
            which are one number per head, are expanded and not copied.
        state_batch_indices: [B] int32 or int64, for a state that is a pool:
            row b has state[state_batch_indices[b]]. Not with gradients.

    Returns:
        y in x's dtype. All arithmetic is in fp32 (fp64 if x is).

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, value or device does not fit; the message names
            the argument, what it got and what it needs.
    """
    check_flags(dt_softplus=dt_softplus)
    rows = state_batch_indices
    given = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C}
    check_tensors(**given)
    if x.dim() not in (2, 3):
        refuse_shape("x", x, "[B, P] or [B, H, P]")
    own, N = x.shape[1:], A.shape[-1]
    pool = x.shape[:1] if rows is None else state.shape[:1]
    check_shapes(
        dt=(dt, x.shape),
        A=(A, (*own, N)),
        z=(z, x.shape),
        D=(D, own),
        dt_bias=(dt_bias, own),
        state=(state, (*pool, *own, N)),
    )
    gradient = needs_gradient(*given.values(), D, z, dt_bias)
    if gradient and rows is not None:
        raise ValueError(
            "state_batch_indices: got rows where a gradient is asked for, "
            "need torch.no_grad()"
        )
    full = compute_dtype(x.dtype)
    B, C = B[:, None].to(full), C[:, None].to(full)
    has_heads = x.dim() == 3 and _is_expanded(A, 2) and _is_expanded(dt, 1)
    if has_heads and (dt_bias is None or _is_expanded(dt_bias, 1)):
        bias = None if dt_bias is None else dt_bias[:, 0]
        step = _step_sizes(dt[:, None, :, 0], bias, dt_softplus, full)
        v, g = step[..., None] * x[:, None], step * A[:, 0, 0].to(full)
        S = state.to(full)
        if gradient:
            first = S.mT.contiguous()
            y, S = linear_recurrence(
                C, B, v, g, scale=1.0, initial_state=first
            )
            S = S.mT
        else:
            y = decode_step(C, B, v, g=g, state=S.mT, rows=rows, scale=1.0)
        y = _skip_and_gate(y[:, 0], x, D, z, full)
    else:  # each channel has a step and a decay of its own
        S = state.flatten(1, -2).to(full, copy=True)
        u, step = (t.flatten(1)[:, None].to(full) for t in (x, dt))
        tokens = (u, step, A.flatten(0, -2).to(full), B, C)
        if z is not None:
            z = z.flatten(1)[:, None].to(full)
        D, dt_bias = (
            t if t is None else t.flatten().to(full) for t in (D, dt_bias)
        )
        options: Any = {"D": D, "z": z, "dt_bias": dt_bias}
        options["dt_softplus"] = dt_softplus
        if gradient:
            y, S = selective_scan(*tokens, **options, initial_state=S)
        else:
            y = selective_step(*tokens, **options, state=S, rows=rows)
        y, S = y.to(x.dtype).view_as(x), S.view_as(state)
    if S is not state:
        state.copy_(S)
    return y


def selective_scan_fn(
    u: Float[Tensor, "B D T"],
    delta: Float[Tensor, "B D T"],
    A: Float[Tensor, "D N"],
    B: Float[Tensor, "B *G N T"],
    C: Float[Tensor, "B *G N T"],
    D: Float[Tensor, " D"] | None = None,
    z: Float[Tensor, "B D T"] | None = None,
    delta_bias: Float[Tensor, " D"] | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> (
    Float[Tensor, "B D T"]
    | tuple[Float[Tensor, "B D T"], Float[Tensor, "B D N"]]
):
    """:func:`fastweights.selective_scan` in Mamba's own layout.

    Args:
        u, delta, A, B, C, D, z, delta_bias, delta_softplus: x, dt, A, B, C, D,
            z, dt_bias and dt_softplus there, of any floating dtypes; B and C
            that no token has for itself, [D, N], are not supported.
        return_last_state: whether to return the last state too.

    Returns:
        y in u's dtype, with return_last_state the pair of it and the state
        in fp32 (fp64 if u is).

    Raises:
        TypeError, ValueError, NotImplementedError: as
            :func:`fastweights.selective_scan`, by its names.
    """
    check_flags(return_last_state=return_last_state)
    check_tensors(u=u, delta=delta, A=A, B=B, C=C)
    for name, t in (("B", B), ("C", C)):
        if t.dim() not in (3, 4):
            refuse_shape(name, t, "[B, N, T] or [B, G, N, T]")
    full, dtype = compute_dtype(u.dtype), _common_dtype(u, B, C)

    def fitting(t: Any) -> Any:
        fits = t is None or t.dtype in (dtype, full)
        return t if fits else t.to(full)

    z = fitting(z)
    y, state = selective_scan(
        u.to(dtype).mT,
        fitting(delta).mT,
        fitting(A),
        B.to(dtype).movedim(-1, 1),
        C.to(dtype).movedim(-1, 1),
        fitting(D),
        z=None if z is None else z.mT,
        dt_bias=fitting(delta_bias),
        dt_softplus=delta_softplus,
    )
    y = y.to(u.dtype).mT
    return (y, state) if return_last_state else y


def _common_dtype(x: Tensor, B: Tensor, C: Tensor) -> torch.dtype:
    """The widest of their dtypes, as far as x's arithmetic has it."""
    dtypes = (x.dtype, B.dtype, C.dtype)
    if compute_dtype(x.dtype) in dtypes:
        return compute_dtype(x.dtype)
    return x.dtype


def _step_sizes(
    dt: Tensor, bias: Tensor | None, softplus: bool, full: torch.dtype
) -> Tensor:
    dt = dt.to(full)
    dt = dt if bias is None else dt + bias.to(full)
    return F.softplus(dt) if softplus else dt


def _skip_and_gate(
    y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None, full: torch.dtype
) -> Tensor:
    """(y + D x) silu(z), in x's dtype; D as broadcast to x [..., H, P]."""
    if D is not None:
        y = y.to(full) + D.to(full) * x.to(full)
    if z is not None:
        y = y.to(full) * F.silu(z.to(full))
    return y.to(x.dtype)


def _is_expanded(t: Tensor, dims: int) -> bool:
    """Whether its last dimensions repeat one number."""
    return all(
        [t.shape[-i] == 1 or t.stride(-i) == 0 for i in range(1, dims + 1)]
    )
