"""Rows of a pool of states: which of them a batch's sequences have."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from fastweights.arguments import (
    INDEX_DTYPES,
    check_dtypes,
    check_rows,
    check_states,
    check_tensors,
)

Rows = Int[Tensor, " B"]


def check_rows_of_states(
    q: Tensor,
    states: dict[str, Tensor],
    rows: Rows | None,
    *shapes: tuple[int, ...],
    extra_dtypes: tuple[torch.dtype, ...] = (),
) -> None:
    """Raise unless states have rows of these shapes.

    The first may also have one of the ``extra_dtypes``.
    """
    check_tensors(**states)
    N = q.shape[0]
    if rows is not None:
        first = next(iter(states.values()))
        N = first.shape[0] if first.dim() else 0
        check_rows(rows, q.shape[0], N, allow_no_row=True)
        check_dtypes(
            {"q": q, "rows": rows}, {"q": (q.dtype,), "rows": INDEX_DTYPES}
        )
    for (name, state), shape in zip(states.items(), shapes, strict=False):
        check_states(q, {name: state}, {name: (N, *shape)}, extra_dtypes)
        extra_dtypes = ()


def clamp_rows(rows: Rows, pool: Tensor) -> Rows:
    """The rows, clamped to those that the pool has."""
    return rows.to(torch.int64).clamp(0, pool.shape[0] - 1)


def rows_to_write(
    rows: Rows, pool: Tensor
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"], Tensor]:
    """Find the rows to write, the sequence that writes each, and whether any.

    A sequence without a row writes what the first one that has a row does,
    into the same place: nothing depends on which of the two comes last.
    """
    inside = (rows >= 0) & (rows < pool.shape[0])
    first = inside.int().argmax()
    source = torch.arange(rows.shape[0], device=rows.device)
    source = source.where(inside, first)
    return clamp_rows(rows, pool)[source], source, inside.any()


def write_rows(pool: Tensor, new: Tensor, rows: Rows | None) -> None:
    """Write ``new`` into these rows of the pool, except rows outside of it.

    A pool that comes from torch.inference_mode may change there only.
    """
    if not torch.compiler.is_compiling() and pool.is_inference():
        with torch.inference_mode():
            _write_rows(pool, new, rows)
    else:
        _write_rows(pool, new, rows)


def _write_rows(pool: Tensor, new: Tensor, rows: Rows | None) -> None:
    if rows is None:
        pool.copy_(new)
        return
    target, source, exists = rows_to_write(rows, pool)
    pool.index_put_((target,), new[source].where(exists, pool[target]))
