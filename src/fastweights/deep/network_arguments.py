"""What networks as fast weights refuse, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastweights.arguments import (
    INDEX_DTYPES,
    check_dtypes,
    check_shapes,
    check_tensors,
    is_readable,
    refuse_shape,
)
from fastweights.dtypes import DTYPES, compute_dtype


def check_network_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: dict[str, Tensor],
    position: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    matrices: int | None = None,
) -> None:
    """Raise for the first of these that does not fit q [B, T, H, K].

    ``rates`` are [B, T, H], or [B, T, H, matrices] if named "rates".
    """
    tokens = {"q": q, "k": k, "v": v, **rates}
    given = {"position": position, "lengths": lengths}
    counts = {name: x for name, x in given.items() if x is not None}
    check_tensors(**tokens, **counts)
    dtypes: dict[str, tuple[torch.dtype, ...]] = {"q": DTYPES}
    dtypes |= dict.fromkeys(("k", "v"), (q.dtype,))
    dtypes |= dict.fromkeys(rates, (compute_dtype(q.dtype), q.dtype))
    check_dtypes(tokens | counts, dtypes | dict.fromkeys(counts, INDEX_DTYPES))
    if q.dim() != 4 or any(n < 1 for n in q.shape):
        refuse_shape("q", q, "[B, T, H, K] with B, T, H, K >= 1")
    if k.shape != q.shape:
        refuse_shape("k", k, f"q's, {list(q.shape)}")
    B, T, H, _ = q.shape
    if v.dim() != 4 or v.shape[:3] != (B, T, H):
        refuse_shape("v", v, f"[{B}, {T}, {H}, V]")
    for name, x in rates.items():
        expected = (B, T, H, matrices) if name == "rates" else (B, T, H)
        if x.shape != expected:
            refuse_shape(name, x, f"{list(expected)}")
    for name, x in counts.items():
        if x.shape != (B,):
            refuse_shape(name, x, f"[{B}]")
        if is_readable(x):
            values, limit = x.tolist(), T if name == "lengths" else math.inf
            if not all(0 <= n <= limit for n in values):
                need = f"0 to T = {T}" if name == "lengths" else ">= 0"
                raise ValueError(f"{name}: got {values}, need {need}")


def check_state(
    q: Tensor, initial_state: Tensor | None, *shape: int, after: Tensor | None
) -> None:
    """Raise unless a state has this shape, or is None before any token.

    In any floating point dtype; ``after`` are the tokens read before it.
    """
    if initial_state is not None:
        check_shapes(initial_state=(initial_state, shape))
        tensors = {"q": q, "initial_state": initial_state}
        check_dtypes(tensors, dict.fromkeys(tensors, DTYPES))
    elif after is not None and is_readable(after) and after.any():
        raise ValueError(
            "initial_state: got None, need the state after position = "
            f"{after.tolist()} tokens"
        )


def check_weight_and_bias(
    name: str, pair: Sequence[Tensor], shape: tuple[int, ...] | None = None
) -> None:
    """Raise unless a pair is a weight and a bias, both of this shape."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        got = len(pair) if hasattr(pair, "__len__") else type(pair).__name__
        raise TypeError(f"{name}: got {got}, need a pair of tensors")
    named = {f"{name}[{i}]": x for i, x in enumerate(pair)}
    check_tensors(**named)
    if shape is not None:
        check_shapes(**{key: (x, shape) for key, x in named.items()})


def check_layers(
    start: Sequence[tuple[Tensor, Tensor]], H: int, K: int, V: int
) -> None:
    """Raise unless the layers lead from K to V, one set per head."""
    if not start:
        raise ValueError("start: got no layer, need (W, b) for each")
    width = K
    for i, layer in enumerate(start):
        check_weight_and_bias(f"start[{i}]", layer)
        W, b = layer
        out = V if i == len(start) - 1 else W.shape[-1]
        check_shapes(
            **{f"start[{i}][0]": (W, (H, width, out))}
            | {f"start[{i}][1]": (b, (H, out))}
        )
        width = out
