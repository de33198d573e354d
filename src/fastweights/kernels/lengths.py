"""What follows from a call's lengths: slots, segments, borders."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from fastweights.kernels.settings import Kind, constants, scan_values

SEGMENT_CHUNKS = 8  # of a segment, at least: below, its map does not pay
IntLike = Any  # int, or SymInt where shapes are symbols


class Lengths(NamedTuple):
    """A call's lengths, and the numbers of things that follow from them.

    Every tensor between the kernels, every grid and every number that a
    kernel is given is a multiple of one of these (``plan.Room``,
    ``plan.Count``).
    """

    B: IntLike
    T: IntLike  # tokens per batch entry
    N: IntLike  # sequences
    L: IntLike  # chunks per segment
    tokens: IntLike  # B T
    slots: IntLike  # one per chunk of a sequence: tile.first_slot
    segments: IntLike  # likewise one per segment
    borders: IntLike  # between two segments of a sequence: compose.border_of


@functools.lru_cache(maxsize=4096)
def lengths_of(
    kind: Kind, B: IntLike, T: IntLike, N: IntLike, packed: bool
) -> Lengths:
    """The lengths of a call of N sequences, ``packed`` or of T tokens each."""
    C, chunks = kind.chunk_size, -(-T // kind.chunk_size)
    L = segment_chunks(kind, 1 if packed else B, chunks)
    segments = -(-T // (L * C)) + N if packed else B * -(-chunks // L)
    return Lengths(
        B,
        T,
        N,
        L,
        tokens=B * T,
        slots=chunks + N if packed else B * chunks,
        segments=segments,
        borders=(T - 1) // (L * C) if packed else segments - B,
    )


def segment_chunks(kind: Kind, rows: IntLike, chunks: IntLike) -> IntLike:
    """Chunks per segment, for ``rows`` rows of ``chunks`` chunks each.

    So many segments that two programs of ``scan_values``, or one of twice
    those, run on every multiprocessor, as far as a segment has
    SEGMENT_CHUNKS; and that the delta rule's maps, of which the first
    segment needs none, are found in one round, or in two where their programs
    are large (maps_at_once). Packed sequences are one row: how long each of
    them is, only the device knows.
    """
    BV, ints = scan_values(kind), type(rows) is type(chunks) is int
    # Those of symbols take a microsecond each.
    smaller, larger = (min, max) if ints else (torch.sym_min, torch.sym_max)
    programs = rows * kind.HV * -(-kind.V // BV)
    number = 2 * kind.gpu.multiprocessors // programs
    if kind.delta:
        maps = rows * kind.HV * -(-kind.K // BV)
        at_once = maps_at_once(kind) // (programs + maps)
        number = smaller(number, 1 + at_once)
    number = larger(smaller(number, chunks // SEGMENT_CHUNKS), 1)
    return -(-chunks // number)


@functools.lru_cache(maxsize=4096)
def maps_at_once(kind: Kind) -> int:
    """How many programs of the delta rule's maps, of scan_values each, run.

    Three on a multiprocessor of those whose registers are bounded; else two,
    or one of twice as many values, and then two rounds of them.
    """
    _, options = constants("segments", kind)
    bounded = "maxnreg" in options
    return kind.gpu.multiprocessors * (3 if bounded else 4)
