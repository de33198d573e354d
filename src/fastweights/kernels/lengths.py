"""What follows from a call's lengths: slots, segments, ranges."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from fastweights.kernels.settings import Kind, launch_options, scan_values

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
    NS: IntLike  # segments per sequence
    NR: IntLike  # ranges per sequence
    tokens: IntLike  # B T
    slots: IntLike  # one per chunk of a sequence: tile.first_slot
    segments: IntLike  # NS N
    ranges: IntLike  # NR N
    borders: IntLike  # (NS - 1) N: between two segments
    pieces: IntLike  # of all segments but the last: compose.piece_at
    mapped: IntLike  # those of them that have a map: not a sequence's first


@functools.lru_cache(maxsize=4096)
def lengths_of(
    kind: Kind, B: IntLike, T: IntLike, N: IntLike, packed: bool
) -> Lengths:
    """The lengths of a call of N sequences, ``packed`` or of T tokens each."""
    C = kind.chunk_size
    slots = -(-B * T // C) + N if packed else B * -(-T // C)
    BV = scan_values(kind)
    programs = N * kind.HV * -(-kind.V // BV)
    NS = num_segments(programs, B * T // (N * C), kind.gpu.multiprocessors)
    NR = larger(NS - 1, 1)
    if kind.delta:
        maps = N * kind.HV * -(-kind.K // BV)
        NR = smaller(NR, num_ranges(programs, maps, maps_at_once(kind)))
    # The borders of ranges on top of those of segments, but if they are the
    # same.
    P = NS - 1 + (NR - 1) * smaller(NS - 1 - NR, 1)
    return Lengths(
        B,
        T,
        N,
        NS,
        NR,
        tokens=B * T,
        slots=slots,
        segments=NS * N,
        ranges=NR * N,
        borders=(NS - 1) * N,
        pieces=P * N,
        mapped=larger(P - 1, 0) * N,
    )


def larger(a: IntLike, b: IntLike) -> IntLike:
    """torch.sym_max, which takes a microsecond, where one is a symbol."""
    return max(a, b) if type(a) is type(b) is int else torch.sym_max(a, b)


def smaller(a: IntLike, b: IntLike) -> IntLike:
    """Likewise torch.sym_min."""
    return min(a, b) if type(a) is type(b) is int else torch.sym_min(a, b)


def num_segments(
    programs: IntLike, chunks: IntLike, multiprocessors: int
) -> IntLike:
    """Into how many segments a scan cuts each sequence.

    As many as let two programs of ``scan_values``, or one of twice those,
    run on every multiprocessor, where uncut there would be ``programs`` of
    them; but none of fewer than SEGMENT_CHUNKS of the ``chunks`` of a
    sequence, on average.
    """
    number = smaller(2 * multiprocessors // programs, chunks // SEGMENT_CHUNKS)
    return larger(number, 1)


@functools.lru_cache(maxsize=4096)
def maps_at_once(kind: Kind) -> int:
    """How many programs of the delta rule's maps, of scan_values each, run.

    Three on a multiprocessor of those whose registers are bounded; else two,
    or one of twice as many values.
    """
    bounded = "maxnreg" in launch_options("segments", kind)
    return kind.gpu.multiprocessors * (3 if bounded else 2)


def num_ranges(programs: IntLike, maps: IntLike, at_once: int) -> IntLike:
    """Into how many ranges the first pass of the delta rule cuts a sequence.

    As many as run ``at_once``, or one: a second round takes as long as the
    first, however few it is of. A range has ``programs`` for its values and
    ``maps`` for M, the first range next to none of these.
    """
    return larger((at_once + maps) // (programs + maps), 1)
