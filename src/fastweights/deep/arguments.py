"""What networks as fast weights refuse, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastweights.arguments import (
    DTYPES,
    check_integers,
    check_kinds,
    check_tensors,
    wrong_shape,
)
from fastweights.reference.backend import wide

WHOLE = (torch.int32, torch.int64)


def check_tokens(
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
    rows = {"position": position, "lengths": lengths}
    given = {name: x for name, x in rows.items() if x is not None}
    check_tensors(tokens | given)
    dtypes: dict[str, tuple[torch.dtype, ...]] = {"q": DTYPES}
    dtypes |= dict.fromkeys(("k", "v"), (q.dtype,))
    dtypes |= dict.fromkeys(rates, (wide(q.dtype), q.dtype))
    check_kinds(tokens | given, dtypes | dict.fromkeys(given, WHOLE))
    if q.dim() != 4 or any(n < 1 for n in q.shape):
        wrong_shape("q", q, "[B, T, H, K] with B, T, H, K >= 1")
    if k.shape != q.shape:
        wrong_shape("k", k, f"q's, {list(q.shape)}")
    B, T, H, _ = q.shape
    if v.dim() != 4 or v.shape[:3] != (B, T, H):
        wrong_shape("v", v, f"[{B}, {T}, {H}, V]")
    for name, x in rates.items():
        want = (B, T, H, matrices) if name == "rates" else (B, T, H)
        if x.shape != want:
            wrong_shape(name, x, f"{list(want)}")
    for name, x in given.items():
        if x.shape != (B,):
            wrong_shape(name, x, f"[{B}]")


def check_layers(
    start: Sequence[tuple[Tensor, Tensor]], heads: int, K: int, V: int
) -> None:
    """Raise unless the layers lead from K to V, one set per head."""
    if not start:
        raise ValueError("start: got no layer, need (W, b) for each")
    width = K
    for i, (W, b) in enumerate(start):
        check_tensors({f"start[{i}][0]": W, f"start[{i}][1]": b})
        out = V if i == len(start) - 1 else W.shape[-1]
        check_shapes(
            {f"start[{i}][0]": (W, (heads, width, out))}
            | {f"start[{i}][1]": (b, (heads, out))}
        )
        width = out


def check_chunk(chunk_size: int) -> None:
    """Raise unless it is an integer >= 1."""
    check_integers({"chunk_size": chunk_size})
    if chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}, need >= 1")


def check_shapes(
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]],
) -> None:
    """Raise for the first tensor, by name, that has not the shape beside it.

    What is None has no shape to check.
    """
    for name, (x, shape) in expected.items():
        if x is not None and tuple(x.shape) != shape:
            wrong_shape(name, x, f"{list(shape)}")
