"""Bits that do not depend on what else is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_open = 0  # how many contexts, of all threads


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Give each sequence the bits that it has alone.

        with fw.batch_invariant():
            o, state = fw.mamba2(q, k, v, g, cu_seqlens=offsets)

    The kernels cut long sequences into segments, which a GPU computes side
    by side, and the more there is to compute the fewer of them: results differ
    by rounding. In this context segments have 8192 tokens. Outputs, states and
    gradients of :func:`linear_recurrence` and of the members are the same bits
    whatever else is in the batch or in the pack. By the kernels they are also
    the same if a sequence is computed in several calls that end at multiples
    of 8192 tokens, each from the state of the one before, and if ranks of
    :func:`context_parallel` share a batch and each has the same multiple of
    8192 tokens: then the maps of all segments travel. The backward of a call
    is as its forward was, wherever it runs.

    It holds for one device, version and chunk_size. It is not for gradients
    that add up sequences or ranks (of g [HV]), nor for backend "loop", nor
    for other ranks of :func:`context_parallel`. An output is not quite free
    of what comes later: all tokens of a chunk are rounded as its gates say,
    so that a sequence that ends inside of a chunk may differ there from the
    beginning of a longer one. Of :func:`mlstm`, :func:`selective_scan`, the
    networks of :mod:`fastweights.deep` and PyTorch's own products nothing is
    said. Many sequences longer than 8192 tokens take longer, up to 1.8 times.

    Yields:
        Nothing. The context is that of all threads.
    """
    global _open
    _open += 1
    try:
        yield
    finally:
        _open -= 1


def is_batch_invariant() -> bool:
    """Whether a :func:`batch_invariant` is open."""
    return _open > 0
