"""What networks as fast weights cost at least: FLOPs, and bytes of memory.

Per call of B sequences of T tokens, forward, and forward with backward.
FLOPs are those of the products of matrices in :mod:`fastweights.deep`, two
per multiplication and addition, triangles as squares; a backward has two
products for each of the forward. Bytes are those of q, k, v, o and of the
rates, and of their gradients: weights stay where they are used, and nothing
is kept for a backward. No call is faster than either allows; a chain of
chunks, each of which waits for the one before, may have to be slower.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple


class Cost(NamedTuple):
    """The cost of a call: FLOPs and bytes moved."""

    flops: int
    moved: int

    def seconds(self, flops_per_second: float, bytes_per_second: float):
        """The least seconds that it takes, at these rates."""
        times = self.flops / flops_per_second, self.moved / bytes_per_second
        return max(times)

    def __add__(self, other: tuple) -> Cost:
        """The cost of both calls, one after the other."""
        flops, moved = other
        return Cost(self.flops + flops, self.moved + moved)


def tokens(K: int, V: int, rates: int, size: int, training: bool) -> int:
    """Bytes per token and head: q, k, v, o of ``size`` bytes, rates of 4.

    The backward reads them again, with the gradient of o in place of o, and
    writes the gradients of q, k, v and of the rates.
    """
    once = size * (2 * K + 2 * V) + 4 * rates
    more = size * (2 * K + V) + 4 * rates
    return once + training * (once + more)


def network(widths: list[int], C: int, reads: int = 1) -> int:
    """Forward FLOPs per token and head of a chunk's dual form.

    Layers of these widths at k, their errors, ``reads`` times their answers
    to q (TTT 1; Titans 2, by the weights and by the momentum), the sums of
    their gradients; and scores and what they weigh.
    """
    pairs = [*itertools.pairwise(widths)]
    weights = sum(K * N for K, N in pairs)
    back = weights - widths[0] * widths[1]  # errors do not go to k
    scores = sum(C * (K + N) for K, N in pairs)
    return 2 * ((2 + reads) * weights + back + scores)


def ttt(
    B: int,
    T: int,
    H: int,
    K: int,
    C: int = 16,
    *,
    hidden: int | None = None,
    size: int = 2,
    training: bool = False,
) -> Cost:
    """TTT-Linear, or TTT-MLP with a hidden layer of ``hidden`` units."""
    widths = [K, K] if hidden is None else [K, hidden, K]
    flops = network(widths, C) * (3 if training else 1)
    return Cost(B * T * H * flops, B * T * H * tokens(K, K, 1, size, training))


def titans(
    B: int,
    T: int,
    H: int,
    K: int,
    hidden: int,
    C: int = 16,
    *,
    size: int = 2,
    training: bool = False,
) -> Cost:
    """Titans' memory of two layers; S is summed like the weights."""
    weights = 2 * K * hidden
    flops = network([K, hidden, K], C, reads=2) + 2 * (weights + C * C)
    flops *= 3 if training else 1
    return Cost(B * T * H * flops, B * T * H * tokens(K, K, 3, size, training))


def lact(
    B: int,
    T: int,
    H: int,
    K: int,
    hidden: int,
    C: int = 2048,
    *,
    steps: int = 5,
    size: int = 2,
    training: bool = False,
) -> Cost:
    """LaCT: reads, gradients, and Newton-Schulz once per complete chunk.

    Its products, of three matrices, are on the shorter side.
    """
    short, long = sorted((K, hidden))
    muon = 3 * steps * 2 * (2 * short * short * long + short**3)
    flops = T * 9 * 2 * K * hidden + T // C * muon
    flops *= 3 if training else 1
    return Cost(B * H * flops, B * T * H * tokens(K, K, 3, size, training))


def mesa(
    B: int,
    T: int,
    H: int,
    K: int,
    C: int = 64,
    *,
    steps: int = 30,
    size: int = 2,
    training: bool = False,
) -> Cost:
    """MesaNet: conjugate gradients on products in chunks, twice in training.

    The matrices that enter the chunks are summed once each time. And two
    products that are read, with the gradients of both.
    """
    state = 2 * K * K
    product = 2 * 2 * C * K + state
    wide = 2 * 3 * C * K + 2 * (state + state)  # of values 2 K wide
    solve, read = steps * product + state, product + state + wide
    flops = solve + read
    if training:
        flops += solve + 2 * read
    return Cost(B * T * H * flops, B * T * H * tokens(K, K, 2, size, training))
