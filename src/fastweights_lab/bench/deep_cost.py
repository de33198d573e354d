"""What networks as fast weights cost at least: FLOPs, and bytes of memory.

Per call of B sequences of T tokens with H heads of K, forward, and in
``training`` with the backward. FLOPs are those of the products of matrices
in :mod:`fastweights.deep`, two per multiplication and addition, triangles as
squares; a backward has two products for each of the forward. Bytes are those
of q, k, v, o in bf16 and of the rates in fp32, and of their gradients:
weights stay where they are used, and nothing is kept for a backward. No call
is faster than either allows; a chain of chunks, each of which waits for the
one before, may have to be slower.
"""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """The cost of a call: FLOPs and bytes moved."""

    flops: int
    moved: int

    def seconds(
        self, flops_per_second: float, bytes_per_second: float
    ) -> float:
        """The least seconds that it takes, at these rates."""
        times = self.flops / flops_per_second, self.moved / bytes_per_second
        return max(times)


def tokens(K: int, rates: int, training: bool) -> int:
    """Bytes per token and head: q, k, v, o of K, and so many rates.

    The backward reads them again, with the gradient of o in place of o, and
    writes the gradients of q, k, v and of the rates.
    """
    once = 8 * K + 4 * rates
    more = 6 * K + 4 * rates
    return once + training * (once + more)


def ttt(
    B: int, T: int, H: int, K: int, C: int = 16, *, training: bool = False
) -> Cost:
    """TTT-Linear: errors, answers and gradients of W, scores, and weighing."""
    flops = 2 * (3 * K * K + 2 * C * K) * (3 if training else 1)
    return Cost(B * T * H * flops, B * T * H * tokens(K, 1, training))


def lact(
    B: int,
    T: int,
    H: int,
    K: int,
    hidden: int,
    C: int = 2048,
    *,
    training: bool = False,
) -> Cost:
    """LaCT: reads, gradients, and Newton-Schulz once per complete chunk.

    Its five steps' products, of three matrices, are on the shorter side.
    """
    short, long = sorted((K, hidden))
    muon = 3 * 5 * 2 * (2 * short * short * long + short**3)
    flops = T * 9 * 2 * K * hidden + T // C * muon
    flops *= 3 if training else 1
    return Cost(B * H * flops, B * T * H * tokens(K, 3, training))


def mesa(
    B: int,
    T: int,
    H: int,
    K: int,
    C: int = 64,
    *,
    steps: int = 30,
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
    return Cost(B * T * H * flops, B * T * H * tokens(K, 2, training))
