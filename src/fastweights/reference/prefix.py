"""Prefix scans: all partial results of an associative operation, at once.

The operation that matters in this library is the composition of affine maps
of a state, S -> M S + B: any stretch of tokens is one, and two stretches
compose into one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor

Item = TypeVar("Item")
Affine = tuple[Tensor, Tensor]


def compose(first: Affine, then: Affine) -> Affine:
    """The map S -> M2 (M1 S + B1) + B2 of two maps S -> M S + B."""
    M1, B1 = first
    M2, B2 = then
    return M2 @ M1, M2 @ B1 + B2


def prefix_scan(
    combine: Callable[[Item, Item], Item], items: list[Item]
) -> list[Item]:
    """[a, b, c, ...] -> [a, ab, abc, ...] for an associative ``combine``.

    The calls that fill ``pairs`` do not need each other's results and could
    run at the same time: they are one round. Those that fill ``others`` are
    another. For n items that makes fewer than 2 n calls of ``combine``, in
    at most 2 log2(n) rounds.
    """
    if len(items) < 2:
        return items
    pairs = [
        combine(a, b) for a, b in zip(items[::2], items[1::2], strict=False)
    ]
    ends = prefix_scan(combine, pairs)  # the prefixes of even length
    others = [combine(e, x) for e, x in zip(ends, items[2::2], strict=False)]
    result = list(items)
    result[1::2] = ends
    result[2::2] = others
    return result


def scan_by_pairs_(
    a: Float[Tensor, "B L *entry"],
    b: Float[Tensor, "B L *entry"],
    *,
    reverse: bool = False,
) -> Float[Tensor, "B L *entry"]:
    """h_t = a_t h_{t-1} + b_t entry by entry, from h_0 = b_0 on, into b.

    :func:`prefix_scan` on whole tensors: in each round every second map
    takes in the one before it, these solve half the problem, and the others
    follow from them. Nothing is divided by a, which stays as it is. In
    ``reverse``, h_t = a_t h_{t+1} + b_t from the last token on.
    """
    L = b.shape[1]
    if L < 2:
        return b
    first, step = (L % 2, 1) if reverse else (1, -1)
    second = slice(first, L - (step > 0), 2)
    before = slice(first + step, L - (step < 0), 2)
    b[:, second].addcmul_(a[:, second], b[:, before])
    pairs = a[:, second] * a[:, before]
    scan_by_pairs_(pairs, b[:, second], reverse=reverse)
    first = (L + 1) % 2 if reverse else 2
    others = slice(first, L - 2 * (step > 0), 2)
    before = slice(first + step, L - 1, 2)
    b[:, others].addcmul_(a[:, others], b[:, before])
    return b
