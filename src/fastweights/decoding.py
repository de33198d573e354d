"""decode_step: the recurrence for a few new tokens, its state in place."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fastweights import values
from fastweights.arguments import check_arguments
from fastweights.ops import (
    Backend,
    autocast,
    check_name,
    choose_backend,
    past_dispatcher,
    ran,
    without_autocast,
)
from fastweights.reference.backend import advance, widen

MAX_TOKENS = 16


def decode_step(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    *,
    state: Float[Tensor, "B HV K V"],
    g: Float[Tensor, " ..."] | None = None,
    beta: Float[Tensor, "B T HV"] | None = None,
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

    mlstm and linear_attention with normalize do more than the recurrence:
    call them with T = 1 and what they returned as initial_state.

    Args:
        q, k, v, g, beta, scale: as in linear_recurrence, T <= 16.
        state: [B, HV, K, V] fp32 (fp64 if q is), the state before the first
            of the tokens. It is updated in place, to the one after the
            last; it need not be contiguous, and may come from
            torch.inference_mode.
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
    _check(q, k, v, g, beta, state, scale, backend)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    tensors = (q, k, v, g, beta, state)
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
    scale: float | None,
    backend: Backend,
) -> None:
    """Raise for the first argument that does not fit the others."""
    if state is None:
        raise TypeError("state: got NoneType, need a Tensor")
    check_arguments(
        q, k, v, g, beta, scale, state, None, None, state_name="state"
    )
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
    if values.CHECKED:
        values.check_values(q, k, v, g, beta, state, None, state_name="state")


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
    scale: float,
    backend: Backend,
) -> Tensor:
    """The outputs; ``state`` becomes the one after the last token."""
    if choose_backend(backend, q.device, q.dtype) == "triton":
        from fastweights.kernels.decode import decode

        ran("triton decode")
        return decode(q, k, v, g, beta, state, scale)
    ran("loop forward")
    if g is not None and g.dim() == 1:
        g = g.expand(v.shape[:3])
    with without_autocast(q):
        o = advance(state, *widen(q, k, v, g, beta), scale=scale)
    return o.to(v.dtype)


OPERATOR = torch.library.custom_op(
    "fastweights::decode_step",
    _decode,
    mutates_args=("state",),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, "
    "Tensor(a!) state, float scale, str backend) -> Tensor",
)


@OPERATOR.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return v.new_empty(v.shape)
