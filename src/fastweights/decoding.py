"""decode_step: the recurrence for a few new tokens, its state in place."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    check_arguments,
    check_kinds,
    check_rows,
    check_states,
    check_tensors,
    check_values,
)
from fastweights.ops import (
    Backend,
    autocast,
    backend_for,
    check_name,
    ran,
    without_autocast,
)
from fastweights.reference.backend import advance, wide, widen
from fastweights.registration import past_dispatcher

MAX_TOKENS = 16

NARROW = (torch.bfloat16,)
"""What else a state may be kept in than fp32.

A call rounds it once, to 8 bits, and that adds up over what a state holds.
One token per call, keys of unit length, K = V = 64, a gate per head: outputs
are off by 0.4 % where half is forgotten in 10 tokens, by 1.4 % in 100 and by
5 % in 1,000, and with the delta rule, which corrects its own errors, by 0.4,
1.1 and 1.5 %. While nothing is written, a gate that takes less than one part
in 512, a half-life of 355 tokens or more, forgets nothing at all.
"""


def decode_step(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    *,
    state: Float[Tensor, "N HV K V"],
    g: Float[Tensor, " ..."] | None = None,
    beta: Float[Tensor, "B T HV"] | None = None,
    rows: Int[Tensor, " B"] | None = None,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Float[Tensor, "B T HV V"]:
    """:func:`linear_recurrence` for 1 to 16 new tokens of each sequence.

    What continues a member, with the scale that it was called with (phi is
    its feature map, if it has one; logits are fp32; retnet_decay is what
    retention takes unless it is given a g, with dtype=torch.float64 if q is
    that). g and beta go by name: members differ in which of them they have.

        linear_attention     phi(q), phi(k), v
        retention            q, k, v, g=retnet_decay(HV)
        gated_retention      q, k, v, g=logsigmoid(logits) / temperature
        mamba2, gla          q, k, v, g=g
        deltanet             q, k, v, beta=beta
        gated_deltanet, kda  q, k, v, g=g, beta=beta

    mlstm, linear_attention with normalize and selective_scan do more than the
    recurrence: :mod:`fastweights.serving` has their steps.

    Args:
        q, k, v, g, beta, scale: as in linear_recurrence, T <= 16.
        state: [B, HV, K, V] fp32 (fp64 if q is), the state before the first
            of the tokens. It is updated in place, to the one after the
            last; it need not be contiguous, and may come from
            torch.inference_mode. In bf16 it has half the bytes, and is
            rounded once per call: :data:`NARROW` says what that costs.
        rows: [B] int32 or int64, for a state [N, HV, K, V] that is a pool:
            sequence b has row rows[b] of it, and the other rows stay as they
            are. No two sequences may have the same row, which is checked
            on a CPU. One whose row is none of 0 to N - 1 (-1, say, where a
            batch is filled up) reads and writes no state; its outputs are 0.
        backend: as in linear_recurrence. "triton" is one kernel that reads
            and writes the state once; "chunkwise" and "loop" are both the
            loop over tokens in PyTorch.

    Returns:
        o [B, T, HV, V] in v's dtype. Arithmetic is in fp32 (fp64 if q is),
        under autocast too, which rounds q, k and v on their way in and
        nothing else. No gradients.

    Raises:
        TypeError: an argument is of the wrong type or dtype, or g or beta
            came without its name.
        ValueError: a shape, value or device does not fit, or a gradient is
            needed; the message names the argument, what it got and what it
            needs.
    """
    q, k, v = autocast(q, k, v)
    _check(q, k, v, g, beta, state, rows, scale, backend)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    tensors = (q, k, v, g, beta, state, rows)
    if torch.compiler.is_compiling():
        return OPERATOR(*tensors, scale, backend)
    step = past_dispatcher(OPERATOR, _decode, tensors)
    if state.is_inference():
        # Only there may it be changed; what is returned goes anywhere.
        with torch.inference_mode():
            o = step(*tensors, scale, backend)
        return o if torch.is_inference_mode_enabled() else o.clone()
    o = step(*tensors, scale, backend)
    if step is _decode:
        # As the operator does: a graph that has saved it must notice.
        torch.autograd.graph.increment_version(state)
    return o


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    rows: Tensor | None,
    scale: float | None,
    backend: Backend,
) -> None:
    """Raise for the first argument that does not fit the others."""
    if state is None:
        raise TypeError("state: got NoneType, need a Tensor")
    own = state if rows is None else None
    fp64 = isinstance(q, Tensor) and q.dtype == torch.float64
    narrow = () if fp64 else NARROW
    check_arguments(
        *(q, k, v, g, beta, scale, own, None, None),
        state_name="state",
        state_dtypes=narrow,
    )
    if rows is not None:
        check_tensors({"state": state, "rows": rows})
        whole = (torch.int32, torch.int64)
        check_kinds({"q": q, "rows": rows}, {"q": (q.dtype,), "rows": whole})
        N = state.shape[0] if state.dim() else 0
        check_rows(rows, q.shape[0], N, none=True)
        shape = (max(N, 1), v.shape[2], q.shape[3], v.shape[3])
        check_states(q, {"state": state}, {"state": shape}, narrow)
    if q.shape[1] > MAX_TOKENS:
        raise ValueError(
            f"q: got shape {list(q.shape)}, need [B, T, H, K] with "
            f"T <= {MAX_TOKENS}; for more tokens there is linear_recurrence"
        )
    if not state.is_contiguous() and _overlaps(state):
        raise ValueError(
            f"state: got strides {list(state.stride())}, need a tensor whose "
            "elements share no memory, such as its clone()"
        )
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state}
    for name, x in tensors.items():
        if x is not None and torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{name}: got a tensor that requires a gradient, need one "
                "that does not, or torch.no_grad(): decode_step has none"
            )
    check_name(backend)
    check_values(q, k, v, g, beta, state, None, state_name="state")


def _overlaps(x: Tensor) -> bool:
    """Whether elements share memory, or it takes more to say that none do.

    None do if each stride steps over all that smaller ones reach.
    """
    shape = zip(x.shape, x.stride(), strict=True)
    dims = [(size, stride) for size, stride in shape if size > 1]
    for size, stride in dims:
        reach = sum([(n - 1) * step for n, step in dims if step <= stride])
        if size * stride <= reach:
            return True
    return False


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    rows: Tensor | None,
    scale: float,
    backend: Backend,
) -> Tensor:
    """The outputs; ``state`` becomes the one after the last token."""
    if backend_for(backend, q) == "triton":
        from fastweights.kernels.decode import decode

        ran("triton decode")
        return decode(q, k, v, g, beta, state, rows, scale)
    ran("loop forward")
    if g is not None and g.dim() == 1:
        g = g.expand(v.shape[:3])
    with without_autocast(q):
        x = widen(q, k, v, g, beta)
        if rows is None:
            if state.dtype not in NARROW:
                return advance(state, *x, scale=scale).to(v.dtype)
            S = state.to(wide(q.dtype))
            o = advance(S, *x, scale=scale).to(v.dtype)
            state.copy_(S)
            return o
        at = rows.to(torch.int64)
        there = (at >= 0) & (at < state.shape[0])
        at = at[there]
        o = torch.zeros_like(v)
        if not len(at):
            return o
        some = state[at].to(wide(q.dtype))
        own: list[Any] = [None if t is None else t[there] for t in x]
        o[there] = advance(some, *own, scale=scale).to(v.dtype)
        state[at] = some.to(state.dtype)
    return o


OPERATOR = torch.library.custom_op(
    "fastweights::decode_step",
    _decode,
    mutates_args=("state",),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, "
    "Tensor(a!) state, Tensor? rows, float scale, str backend) -> Tensor",
)


@OPERATOR.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return v.new_empty(v.shape)
