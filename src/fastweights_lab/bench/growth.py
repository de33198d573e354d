"""How cost grows: a size doubled by itself, beside the plainest program.

    fastweights bench growth [NAME ...]

For every case the exponents of a doubling, ours and that of the plainest
PyTorch program for the same, and how many times as long ours takes. A program
grows as it should if its exponent is at most 0.3 above the plain program's
own, measured in the same run: that has fixed costs and caches too, so that a
number on paper (1 for what is linear) would judge the machine. On a CPU with
one thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from timeit import Timer
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastweights as fw
from fastweights.layers import LaCT, SoftmaxAttention, TitansMemory, TTTLinear
from fastweights.models import LanguageModel, ModelConfig, linear_cross_entropy
from fastweights_lab.bench.timing import Row
from fastweights_lab.text import corpus

Run = Callable[[], Any]
SLACK = 0.3


def seconds(run: Run) -> float:
    """Processor time of a run, in the quickest of 20 hundredths of a second.

    Other work on the machine disturbs it least.
    """
    timer = Timer(run, timer=time.thread_time)
    number = max(1, timer.autorange()[0] // 20)  # a fifth of a second's
    return min(timer.repeat(20, number)) / number


def offsets(*lengths: int) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0))


def packed(T: int, length: int, made: Callable[..., Run]) -> tuple[Run, Run]:
    """A pack of short documents; beside it the same rows as a batch."""
    B = T // length
    cu_seqlens = offsets(*[length] * B)
    return made(1, T, cu_seqlens=cu_seqlens), made(B, length)


def recurrence(B: int, T: int, **options: Any) -> Run:
    """Gated delta, forward and backward."""
    torch.manual_seed(0)
    x = [torch.randn(B, T, 2, 32, requires_grad=True) for _ in range(3)]
    g, beta = -torch.rand(B, T, 2), torch.rand(B, T, 2)

    def run() -> None:
        q, k, v = x
        k = F.normalize(k, dim=-1)
        o, _ = fw.gated_deltanet(q, k, v, g, beta, **options)
        o.sum().backward()

    return run


def scan(B: int, T: int, **options: Any) -> Run:
    """Mamba's scan, likewise."""
    torch.manual_seed(0)
    x = [torch.rand(B, T, n, requires_grad=True) for n in (32, 32, 8, 8)]
    A = -torch.rand(32, 8)

    def run() -> None:
        y, _ = fw.selective_scan(x[0], x[1], A, *x[2:], **options)
        y.sum().backward()

    return run


def uneven(layer: torch.nn.Module, T: int) -> tuple[Run, Run]:
    """A document of T / 2 tokens and T / 2 of one; as two batches.

    In training: without gradients a softmax layer makes a state too, with
    room for the longest document in each row, T^2 / 4 tokens. Softmax takes
    some 5 times as long as the plain one: a call for each document.
    """
    x = torch.randn(1, T, 64)
    packed = offsets(T // 2, *[1] * (T // 2))

    def run() -> None:
        layer(x, None, packed)[0].sum().backward()

    def plain() -> None:
        for batch in (x[:, : T // 2], x[0, T // 2 :, None]):
            layer(batch)[0].sum().backward()

    return run, plain


def loss(V: int) -> tuple[Run, Run]:
    """The loss of 8 rows, over a vocabulary."""
    x = torch.randn(8, 64, requires_grad=True)
    w = torch.randn(V, 64, requires_grad=True)
    targets = torch.randint(V, (8,))
    return (
        lambda: linear_cross_entropy(x, w, targets).backward(),
        lambda: F.cross_entropy(x @ w.T, targets).backward(),
    )


def decoded(capacity: int) -> tuple[Run, Run]:
    """Eight tokens of one sequence, in room for ``capacity``."""
    torch.manual_seed(0)
    m = LanguageModel(ModelConfig(64, 64, 2, ("softmax",), num_heads=2))
    token = torch.zeros(1, 1, dtype=torch.int64)

    def made(capacity: int) -> Run:
        states = m.preallocate_states(1, capacity)

        @torch.no_grad()
        def run() -> None:
            for state in states:
                state.num_read.zero_()  # type: ignore[union-attr]
                state.read_at_most = 0  # type: ignore[union-attr]
            after = states
            for _ in range(8):
                _, after = m(token, after)

        return run

    return made(capacity), made(8)


def batch(length: int) -> tuple[Run, Run]:
    """256 tokens of four documents of so many bytes; beside it a slice.

    Which takes two microseconds, and knows no documents in another order.
    """
    stream = corpus.Stream.of([b"a" * length] * 4, corpus.ByteTokenizer())
    batches = corpus.Packed(stream, 256)
    return lambda: batches.batch(1), lambda: stream.tokens[256:512].long()


def one_token(layer: torch.nn.Module, D: int) -> tuple[Run, Run]:
    """One more token of a layer; beside the products of its projections.

    Those read no memory. LaCT writes twice what its state holds, a window of
    2,048 tokens above all, which moves by one; Titans and TTT, whose weights
    change with every token, write theirs, old and new, seven times.
    """
    x = torch.randn(1, 1, D)
    with torch.no_grad():
        _, state = layer(torch.randn(1, 3, D))
    matrices = [p for p in layer.parameters() if p.dim() == 2]

    @torch.no_grad()
    def run() -> None:
        layer(x, state)

    @torch.no_grad()
    def plain() -> None:
        for w in matrices:
            torch.zeros(1, w.shape[1]) @ w.T

    return run, plain


CASES: dict[str, tuple[int, Callable[[int], tuple[Run, Run]]]] = {
    "delta_documents_of_1": (1024, lambda T: packed(T, 1, recurrence)),
    "delta_documents_of_32": (2048, lambda T: packed(T, 32, recurrence)),
    "scan_documents_of_2": (1024, lambda T: packed(T, 2, scan)),
    "softmax_uneven": (512, lambda T: uneven(SoftmaxAttention(64, 2), T)),
    "ttt_linear_uneven": (256, lambda T: uneven(TTTLinear(64, 2), T)),
    "titans_uneven": (128, lambda T: uneven(TitansMemory(64, 2, 32), T)),
    "lact_uneven": (128, lambda T: uneven(LaCT(64, 2, chunk_size=64), T)),
    "loss_vocabulary": (16384, loss),
    "softmax_capacity": (65536, decoded),
    "packed_batch": (2**21, batch),
    "ttt_linear_width": (512, lambda D: one_token(TTTLinear(D, 4), D)),
    "lact_width": (512, lambda D: one_token(LaCT(D, 4), D)),
    "titans_width": (512, lambda D: one_token(TitansMemory(D, 4, D // 4), D)),
}
"""By name: the size that is doubled, and what makes ours and the plain one."""


def rows(names: Sequence[str] = ()) -> Iterator[Row]:
    """A row for each of these cases; without names for all."""
    for name in names or CASES:
        size, made = CASES[name]
        (x, plain_x), (y, plain_y) = (
            map(seconds, made(n)) for n in (size, 2 * size)
        )
        ours, plain = math.log2(y / x), math.log2(plain_y / plain_x)
        yield {
            "case": name,
            "size": 2 * size,
            "exponent": round(ours, 2),
            "plain exponent": round(plain, 2),
            "as it should": ours <= plain + SLACK,
            "times the plain one": round(y / plain_y, 1),
            "seconds": y,
        }
