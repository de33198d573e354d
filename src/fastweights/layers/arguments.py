"""What the layers refuse: sizes, options and inputs that do not fit."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from fastweights.arguments import (
    check_number,
    check_sizes,
    check_tensors,
    wrong_shape,
)
from fastweights.layers.state import LayerState, Offsets, leave_inference


def whole(name: str, size: float) -> int:
    """A size that was computed, as the integer >= 1 that it has to be."""
    if not math.isclose(size, round(size), rel_tol=1e-6) or size < 1:
        raise ValueError(f"{name}: got {size}, need an integer >= 1")
    return round(size)


def scaled(name: str, factor: float, num_heads: int = 1, **size: int) -> int:
    """factor * size / num_heads, the integer >= 1 that it has to be.

    V = scaled("expand_v", expand_v, num_heads, dim=dim)
    """
    check_number(name, factor, "> 0")
    ((of, x),) = size.items()
    per_head = " / num_heads" if num_heads != 1 else ""
    return whole(f"{name} * {of}{per_head}", factor * x / num_heads)


def head_size(head_dim: int | None, dim: int, num_heads: int) -> int:
    """head_dim, or dim / num_heads if it is None."""
    if head_dim is None:
        return whole("dim / num_heads", dim / num_heads)
    check_sizes(head_dim=head_dim)
    return head_dim


def value_heads(num_v_heads: int | None, num_heads: int) -> int:
    """num_v_heads, a multiple of num_heads; num_heads if it is None."""
    if num_v_heads is None:
        return num_heads
    check_sizes(num_v_heads=num_v_heads)
    if num_v_heads % num_heads:
        raise ValueError(
            f"num_v_heads: got {num_v_heads}, need a multiple of "
            f"num_heads = {num_heads}"
        )
    return num_v_heads


def check_range(name: str, bounds: tuple[float, float]) -> None:
    """Raise unless 0 < bounds[0] <= bounds[1] < infinity."""
    pair = isinstance(bounds, tuple | list) and len(bounds) == 2
    if not pair or not all(isinstance(x, numbers.Real) for x in bounds):
        raise TypeError(f"{name}: got {bounds!r}, need two real numbers")
    if not 0 < bounds[0] <= bounds[1] < math.inf:
        raise ValueError(
            f"{name}: got {bounds}, need (lower, upper) with "
            "0 < lower <= upper"
        )


def check_one_of(name: str, value: object, choices: tuple) -> None:
    """Raise unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, need one of {choices}")


def check_input(
    x: Tensor,
    dim: int,
    state: LayerState | None,
    cu_seqlens: Offsets | None,
    *needs: str,
) -> None:
    """Raise unless x is [B, T, dim] and the state fits it.

    ``needs`` are the fields that a state of this layer has; it has one row
    per sequence.
    """
    check_tensors({"x": x})
    if x.dim() != 3 or x.shape[-1] != dim or min(x.shape) < 1:
        wrong_shape("x", x, f"[B, T, {dim}] with B, T >= 1")
    rows = len(x)
    if cu_seqlens is not None:
        check_tensors({"cu_seqlens": cu_seqlens})
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
            wrong_shape("cu_seqlens", cu_seqlens, "[N + 1] with N >= 1")
        if rows != 1:
            wrong_shape("x", x, f"[1, T, {dim}] because cu_seqlens is given")
        rows = len(cu_seqlens) - 1
    if state is None:
        return
    if not isinstance(state, LayerState):
        kind = type(state).__name__
        raise TypeError(f"state: got {kind}, need a LayerState or None")
    leave_inference(state)
    tensors = state.tensors()
    if set(tensors) != set(needs):
        raise ValueError(
            f"state: got one with {sorted(tensors)}, need {sorted(needs)}: "
            "is it the state of another layer?"
        )
    if state.rows is not None:
        if torch.is_grad_enabled():
            raise ValueError(
                "state: got rows of a pool, need torch.no_grad() for them"
            )
        if state.rows.shape != (rows,):
            wrong_shape("state: rows", state.rows, f"[{rows}]")
        return
    for name, tensor in tensors.items():
        if len(tensor) != rows:
            raise ValueError(
                f"state: got {name} of shape {list(tensor.shape)}, need "
                f"{rows} rows, one per sequence"
            )
