"""What a call's lengths decide, by themselves: segments and borders."""

import torch

from fastweights.kernels.gpu import gpu_of
from fastweights.kernels.recurrence.settings import (
    CallKind,
    lengths_of,
    segment_chunks,
)


def test_how_many_segments():
    """Two programs per multiprocessor, none under five chunks.

    Of the delta rule as many as have their maps at once: three programs on a
    multiprocessor; else two, or two rounds of them for eight chunks or more.
    """
    gpu, half = gpu_of(torch.device("cpu")), torch.bfloat16  # an H200

    def segments(heads, chunks=10**6, *, rows=1, gate=1, delta=False, V=128):
        kind = CallKind(gpu, half, 1, heads, 128, V, gate, delta, 64, "tf32")
        return -(-chunks // segment_chunks(kind, rows, chunks))

    assert [segments(n) for n in (1, 16, 44, 66)] == [132, 8, 3, 2]
    assert [segments(n) for n in (67, 132, 10**6)] == [1] * 3
    assert [segments(8, rows=n) for n in (1, 2, 4, 8, 9)] == [16, 8, 4, 2, 1]
    found = [segments(16, n) for n in (1, 9, 10, 15, 16, 39, 40, 65)]
    assert found == [1, 1, 2, 3, 3, 7, 7, 8]
    # Of 396 programs for the maps, four per head and two for their values;
    # of 528.
    assert [segments(n, delta=True) for n in (16, 32, 66)] == [7, 4, 2]
    assert [segments(16, delta=True, V=n) for n in (64, 256)] == [9, 4]
    assert [segments(n, delta=True, gate=128) for n in (16, 32)] == [8, 4]
    short = {"chunks": 32, "delta": True}
    assert [segments(n, **short) for n in (4, 12, 16)] == [6, 6, 6]
    found = [segments(n, **short, gate=128) for n in (4, 12, 16)]
    assert found == [6, 6, 5]
    assert segments(12, **short, gate=128, V=100) == 4


def test_how_many_borders():
    """Of a batch one per whole segment; of a pack as many as can be."""
    gpu = gpu_of(torch.device("cpu"))
    kind = CallKind(gpu, torch.bfloat16, 1, 16, 128, 128, 0, False, 64, "tf32")
    of = lengths_of.__wrapped__
    x = of(kind, 2, 65536, 2, False)
    assert (x.L, x.segments, x.borders) == (257, 8, 6)
    x = of(kind, 1, 65536, 5, True)
    assert (x.L, x.segments, x.borders) == (129, 13, 7)
    x = of(kind, 1, 8 * 129 * 64, 5, True, True)
    assert (x.L, x.segments, x.borders) == (128, 14, 8)
    x = of(kind, 3, 65536, 3, False, True)
    assert (x.L, x.segments, x.borders) == (128, 24, 24)
    assert of(kind, 1, 511, 3, True).borders == 0
    assert of(kind, 8, 4096, 8, False).borders == 0
