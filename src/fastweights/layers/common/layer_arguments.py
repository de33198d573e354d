"""What the layers refuse: sizes, options and inputs that do not fit."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from fastweights.arguments import (
    check_packed,
    check_rows,
    check_tensors,
    refuse_shape,
)
from fastweights.dtypes import DTYPES, compute_dtype, under_autocast
from fastweights.layers.common.plain_modules import is_plain_product
from fastweights.layers.common.state import (
    LayerState,
    Offsets,
    leave_inference,
)
from fastweights.ops.decode import NARROW_STATE_DTYPES, check_num_accepted
from fastweights.ranks.group import current_ranks, token_offset_and_total
from fastweights.torch_internals import is_traced


def whole_number(name: str, size: float) -> int:
    """A computed size as an integer >= 1; raise if it is none."""
    if not math.isclose(size, round(size), rel_tol=1e-6) or size < 1:
        raise ValueError(f"{name}: got {size}, need an integer >= 1")
    return round(size)


def scaled_size(
    name: str, factor: float, num_heads: int = 1, **size: int
) -> int:
    """factor * size / num_heads as an integer >= 1; raise if it is none.

    V = scaled_size("v_factor", v_factor, num_heads, dim=dim)
    """
    ((base, x),) = size.items()
    per_head = " / num_heads" if num_heads != 1 else ""
    return whole_number(f"{name} * {base}{per_head}", factor * x / num_heads)


def head_size(head_dim: int | None, dim: int, num_heads: int) -> int:
    """head_dim, or dim / num_heads if it is None."""
    if head_dim is None:
        return whole_number("dim / num_heads", dim / num_heads)
    return head_dim


def check_even(name: str, size: int) -> None:
    """Raise unless the size is even."""
    if size % 2:
        raise ValueError(f"{name}: got {size}, need an even number")


def num_value_heads(num_v_heads: int | None, num_heads: int) -> int:
    """num_v_heads, a multiple of num_heads; num_heads if it is None."""
    if num_v_heads is None:
        return num_heads
    if num_v_heads % num_heads:
        raise ValueError(
            f"num_v_heads: got {num_v_heads}, need a multiple of "
            f"num_heads = {num_heads}"
        )
    return num_v_heads


def check_range(need: str, /, **given: tuple[float, float]) -> None:
    """Raise unless 0 < lower <= upper < infinity; lower may be 0 if ">= 0"."""
    ((name, bounds),) = given.items()
    pair = isinstance(bounds, tuple | list) and len(bounds) == 2
    if not pair or not all(isinstance(x, numbers.Real) for x in bounds):
        raise TypeError(f"{name}: got {bounds!r}, need two real numbers")
    (low, high), zero = bounds, need == ">= 0"
    least = low >= 0 if zero else low > 0
    if not (least and low <= high and 0 < high < math.inf):
        raise ValueError(
            f"{name}: got {bounds}, need (lower, upper) with "
            f"0 {'<=' if zero else '<'} lower <= upper"
        )


def check_one_of(choices: tuple, /, **values: object) -> None:
    """Raise unless each value is one of the choices."""
    for name, x in values.items():
        if x not in choices:
            raise ValueError(f"{name}: got {x!r}, need one of {choices}")


def check_input(
    x: Tensor, layer: Any, state: LayerState | None, cu_seqlens: Offsets | None
) -> None:
    """Raise unless x is [B, T, dim], of the layer's dtype, and the state fits.

    A state has one row per sequence.
    """
    check_tensors(x=x)
    dim: int = layer.dim
    if x.dtype not in DTYPES:
        raise TypeError(
            f"x: got {x.dtype}, need embeddings, [B, T, {dim}] of a floating "
            "point dtype; token ids go to a LanguageModel"
        )
    out = getattr(layer, "o_proj", None)
    if (
        out is not None
        and x.dtype is not getattr(getattr(out, "weight", None), "dtype", None)
        and not under_autocast(x)
        and is_plain_product(out, x)
    ):
        raise TypeError(
            f"x: got {x.dtype}, need the layer's, {out.weight.dtype}"
        )
    if x.dim() != 3 or x.shape[-1] != dim or any(n < 1 for n in x.shape):
        refuse_shape("x", x, f"[B, T, {dim}] with B, T >= 1")
    rows = x.shape[0]
    if cu_seqlens is not None:
        if rows != 1:
            refuse_shape("x", x, f"[1, T, {dim}] because cu_seqlens is given")
        _, total = token_offset_and_total(x.shape[1])
        check_packed(x, cu_seqlens, total=total)
        if cu_seqlens.device != x.device:
            raise ValueError(
                f"cu_seqlens: got device {cu_seqlens.device}, need x's, "
                f"{x.device}"
            )
        rows = cu_seqlens.shape[0] - 1
    if state is not None:
        _check_state(state, layer, x, rows, cu_seqlens is not None)


def _check_state(
    state: LayerState, layer: Any, x: Tensor, rows: int, packed: bool
) -> None:
    """Raise unless ``state`` is one of this layer, for this number of rows.

    The layer itself tells which fields it needs, and their shapes, if it can
    be asked. In a graph and under torch.func these are not checked.
    """
    if not isinstance(state, LayerState):
        got = type(state).__name__
        raise TypeError(f"state: got {got}, need a LayerState or None")
    leave_inference(state)
    if state.rows is not None:
        if torch.is_grad_enabled():
            raise ValueError(
                "state: got rows of a pool, need torch.no_grad() for them"
            )
        check_rows(state.rows, rows, name="state: rows")
    decodes = state.rows is not None or state.num_accepted is not None
    if decodes and current_ranks() is not None:
        raise ValueError(
            "state: got one of decoding, with rows or num_accepted, need one "
            "without them under context_parallel"
        )
    if state.num_accepted is not None:
        if packed or torch.is_grad_enabled():
            raise ValueError(
                "state: got num_accepted, of tokens to take in, need "
                f"{'no cu_seqlens' if packed else 'torch.no_grad()'} for it"
            )
        check_num_accepted("state: num_accepted", state.num_accepted, x=x)
    tensors = state.tensors()
    shapes: dict[str, tuple[int, ...]] = {}
    if not is_traced() and layer.can_be_remade:
        shapes = layer.row_shapes
        if tensors.keys() != shapes.keys():
            raise ValueError(
                f"state: got one with {sorted(tensors)}, need "
                f"{sorted(shapes)}: is it the state of another layer?"
            )
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        if state.rows is None and shape[0] != rows:
            raise ValueError(
                f"state: got {name} of shape {shape}, need {rows} rows, one "
                "per sequence"
            )
        if tensor.device != x.device:
            raise ValueError(
                f"state: got {name} on {tensor.device}, need x's, {x.device}"
            )
        needs: tuple[torch.dtype, ...] = DTYPES
        if name in ("S", "m"):
            needs = (
                compute_dtype(x.dtype),
                *(NARROW_STATE_DTYPES if name == "S" else ()),
            )
        elif name == "num_read":
            needs = (torch.int64,)
        if tensor.dtype not in needs:
            raise TypeError(
                f"state: got {name} in {tensor.dtype}, need {needs[0]}"
            )
        lead = ["N", "capacity"] if name in ("keys", "values") else ["N"]
        need = [*shapes.get(name, shape[1:])][len(lead) - 1 :]
        if shape[len(lead) :] != need:
            raise ValueError(
                f"state: got {name} of shape {shape}, need "
                f"[{', '.join(map(str, [*lead, *need]))}]: is it the state "
                "of another layer?"
            )
