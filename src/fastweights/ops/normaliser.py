"""The normaliser of an output: the recurrence on values that are all 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    RecurrenceOperands,
    check_numbers,
    check_recurrence_arguments,
    check_states,
)
from fastweights.dtypes import (
    cast_for_autocast,
    compute_dtype,
    without_autocast,
)
from fastweights.ops.common.backends import Backend, recurrence_backend
from fastweights.ops.common.rows import Rows, check_rows_of_states
from fastweights.ops.decode import (
    decode_step,
    narrow_dtypes,
    refuse_gradients,
)
from fastweights.ops.recurrence_on_ranks import recurrence_over_ranks
from fastweights.ops.recurrence_operator import local_recurrence
from fastweights.packing import num_sequences
from fastweights.ranks.group import Ranks, min_tokens, refuse_ranks

Values = Float[Tensor, "B T HV V"]
Ones = Float[Tensor, "B T HV 1"]
StateAndNormaliser = Float[Tensor, "N HV K V+1"]


def features(
    feature_map: Callable[[Tensor], Tensor] | None, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """q and k, or what a feature map makes of each."""
    if feature_map is None:
        return q, k
    if not callable(feature_map):
        got = type(feature_map).__name__
        raise TypeError(f"feature_map: got {got}, need a function or None")
    return feature_map(q), feature_map(k)


def recurrence_with_normaliser(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Values,
    one: Ones,
    g: Float[Tensor, "B T HV"] | None,
    *,
    initial_state: StateAndNormaliser | None = None,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    scale: float | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
    ranks: Ranks | None = None,
) -> tuple[Values, Ones, StateAndNormaliser]:
    """The additive rule on v and on ``one``: o, the normaliser z, the state.

    ``one`` is a value of 1, weighted as v is, and has the state's last column,
    from which z is read. z is a sum that may cancel, and a divisor: it is
    computed and returned in fp32 (fp64 if q is), as ``one`` must be.

    PyTorch's backends compute in fp32 anyway; there v and o are as exact.
    The kernels multiply in q's dtype. If that is fp16 or bf16 they run once
    for o, in q's dtype (fp16's numbers end at 65504), and once more for z,
    on copies of q and k in fp32: 8 K bytes per token and key head, which a
    backward keeps.

    q and k are as autocast has them, v is in q's dtype or fp32, and the
    others are those of :func:`fastweights.linear_recurrence`. Sequences are
    here as a whole, unless ``ranks`` share them.
    """

    def run(
        q: Tensor, k: Tensor, v: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        operands = RecurrenceOperands(
            q, k, v, g, None, None, state, cu_seqlens
        )
        if ranks is None:
            return local_recurrence(operands, scale, chunk_size, backend)
        options: Any = (scale, chunk_size, backend)
        return recurrence_over_ranks(ranks, operands, *options)

    by_kernels = recurrence_backend(backend, q) == "triton"
    wide_qk = q.to(compute_dtype(q.dtype)), k.to(compute_dtype(q.dtype))
    with without_autocast(q):
        if q.dtype == one.dtype or not by_kernels:
            both = torch.cat([v.to(one.dtype), one], -1)
            o, state = run(*wide_qk, both, initial_state)
            return o[..., :-1], o[..., -1:], state
        S = n = None
        if initial_state is not None:
            S, n = initial_state.split([v.shape[-1], 1], -1)
        o, S = run(q, k, v.to(q.dtype), S)
        z, n = run(*wide_qk, one, n)
    return o, z, torch.cat([S, n], -1)


def check_normalised(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    states: dict[str, Tensor],
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    **others: Any,
) -> None:
    """Raise for the first argument that does not fit the others.

    ``states`` are what the caller has under these names: none, the state
    [N, HV, K, V + 1], or that and a number per head, [N, HV].
    """
    check_recurrence_arguments(
        RecurrenceOperands(q, k, v, g, cu_seqlens=cu_seqlens),
        scale=scale,
        chunk_size=chunk_size,
        min_tokens=min_tokens(),
    )
    N = num_sequences(q, cu_seqlens)
    HV, V = v.shape[2:]
    shapes = ((N, HV, q.shape[3], V + 1), (N, HV))
    check_states(q, states, dict(zip(states, shapes, strict=False)))


def linear_attention_step(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Values,
    *,
    state: StateAndNormaliser,
    feature_map: Callable[[Tensor], Tensor] | None = None,
    rows: Rows | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Values:
    """Normalised linear attention for 1 to 16 new tokens of each sequence.

    Continues ``fastweights.linear_attention(..., normalize=True)``, whose
    state it takes. (Without normalize, decode_step continues it.)

    Args:
        q, k, v, feature_map, eps, scale: as in linear_attention, T <= 16.
        state: [N, HV, K, V + 1] fp32 (fp64 if q is), or bf16; updated in
            place.
        rows, backend: as in decode_step.

    Returns:
        o [B, T, HV, V] in v's dtype. Arithmetic is in fp32 (fp64 if q is).

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, value or device does not fit, there are more than
            16 tokens, or a gradient is needed.
    """
    q, k = features(feature_map, q, k)
    check_numbers(">= 0", eps=eps)
    refuse_ranks("linear_attention_step")
    q, k, v = cast_for_autocast(q, k, v)
    check_normalised_step(q, k, v, None, {"state": state}, rows, scale)
    one = torch.ones_like(v[..., :1])
    options = {"scale": scale, "backend": backend}
    o, z = normalised_step(q, k, v, one, state, rows, **options)
    return (o / (z + eps)).to(v.dtype)


def normalised_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    one: Tensor,
    state: Tensor,
    rows: Rows | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """A step of v and of ``one``, the state's last column: o and z.

    z is a sum that may cancel, and a divisor: it is in fp32 (fp64 if q is).
    """
    dtype = compute_dtype(q.dtype)
    both = torch.cat([v.to(dtype), one.to(dtype)], -1)
    with without_autocast(q):
        o = decode_step(
            q.to(dtype), k.to(dtype), both, state=state, rows=rows, **options
        )
    return o[..., :-1], o[..., -1:]


def check_normalised_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    states: dict[str, Tensor],
    rows: Rows | None,
    scale: float | None,
) -> None:
    """Raise for the first argument that does not fit the others."""
    check_normalised(q, k, v, g, {}, scale=scale)
    HV, V = v.shape[2:]
    shapes = (HV, q.shape[3], V + 1), (HV,)
    check_rows_of_states(
        q, states, rows, *shapes, extra_dtypes=narrow_dtypes(q)
    )
    refuse_gradients(q=q, k=k, v=v, g=g, **states)
