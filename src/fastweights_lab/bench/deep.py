"""How long networks as fast weights take: ``fastweights bench deep``.

ttt     TTT-Linear's fast weights, heads of 64 and of 128, B 1 and 8
lact    LaCT's, chunks of 2048, under torch.compile
mesa    MesaNet's, heads of 64 and of 128, B 1 and 8

At T 4096, forward (as in training, which keeps what the backward needs) and
forward with backward, beside the floor: the more of what
``fastweights_lab.bench.deep_cost`` counts, at the rates of this machine's
copies and products of matrices, which are measured first. The record
``h200_deep`` also has ttt-video-dit's kernel, which an option called then.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights import deep
from fastweights_lab.bench import deep_cost
from fastweights_lab.bench.deep_cost import Cost
from fastweights_lab.bench.timing import (
    DEVICE,
    DTYPE,
    ON_GPU,
    Row,
    ceilings,
    timeit,
)

T, DIM = (4096, 2048) if ON_GPU else (64, 64)
BATCHES = (1, 8) if ON_GPU else (1,)
HEADS = ((32, 64), (16, 128)) if ON_GPU else ((2, 32),)
SIZES = [(B, H, K) for B in BATCHES for H, K in HEADS]
CHUNK = 2048 if ON_GPU else 32
LACT_HEADS = 4
TO: Any = {"device": DEVICE, "dtype": DTYPE}

Case = tuple[
    dict[str, int],
    Callable[[], tuple[Tensor, Any]],
    list[Tensor],
    Callable[..., Cost],
]
"""Sizes, a call, the tensors in it, and what it costs, by ``training=``."""


def ttt() -> Iterator[Case]:
    """TTT-Linear's fast weights, by whatever backend "auto" is here."""
    for B, H, K in SIZES:
        q, k, v = torch.randn(3, B, T, H, K, **TO) / K**0.5
        rate = torch.rand(B, T, H, device=DEVICE) / K
        W = 0.02 * torch.randn(H, K, K, device=DEVICE)
        b = torch.zeros(H, K, device=DEVICE)
        norm = torch.ones_like(b), torch.zeros_like(b)
        step_scale = 1 / torch.arange(1, 17, device=DEVICE)
        yield (
            {"B": B, "T": T, "H": H, "K": K},
            functools.partial(
                deep.ttt, q, k, v, rate, [(W, b)], norm, step_scale
            ),
            [q, k, v, rate, W, b, *norm, step_scale],
            functools.partial(deep_cost.ttt, B, T, H, K),
        )


def lact() -> Iterator[Case]:
    """LaCT's fast weights, momentum and Muon as in its language models."""
    B, H = BATCHES[-1], LACT_HEADS
    K = DIM // H
    q, k, v = torch.randn(3, B, T, H, K, **TO) / K**0.5
    rates = 1e-3 * torch.rand(B, T, H, 3, device=DEVICE)
    momentum = torch.rand(B, T, H, device=DEVICE)
    start = [torch.randn(H, K, K, device=DEVICE) / K**0.5 for _ in range(3)]
    run = torch.compile(deep.lact, fullgraph=True)
    yield (
        {"B": B, "T": T, "H": H, "K": K, "C": CHUNK},
        functools.partial(
            run, q, k, v, rates, start, momentum, chunk_size=CHUNK
        ),
        [q, k, v, rates, *start, momentum],
        functools.partial(deep_cost.lact, B, T, H, K, K, CHUNK),
    )


def mesa() -> Iterator[Case]:
    """MesaNet's optimum, by whatever backend "auto" is here."""
    for B, H, K in SIZES:
        q, k, v = torch.randn(3, B, T, H, K, **TO)
        q, k = (F.normalize(t, dim=-1) for t in (q, k))
        g = F.logsigmoid(torch.randn(B, T, H, device=DEVICE))
        beta = torch.rand(B, T, H, device=DEVICE)
        x = [q, k, v, g, beta, torch.ones(H, K, device=DEVICE)]
        torch.compiler.reset()
        run = torch.compile(deep.mesa, fullgraph=True)
        yield (
            {"B": B, "T": T, "H": H, "K": K},
            functools.partial(run, *x),
            x,
            functools.partial(deep_cost.mesa, B, T, H, K),
        )


CASES = {"ttt": ttt, "lact": lact, "mesa": mesa}


def rows(names: Sequence[str] = ()) -> Iterator[Row]:
    """The ceilings' rows, then those of the cases; without names of all."""
    copy, product = ceilings()
    yield from (copy, product)
    best = (
        product["flops"] / product["seconds"],
        copy["moved"] / copy["seconds"],
    )
    for name in names or CASES:
        torch.manual_seed(0)
        for sizes, call, inputs, of in CASES[name]():
            for what, seconds in time_passes(call, inputs).items():
                least = of(training="backward" in what)
                yield {
                    "what": "ttt-linear" if name == "ttt" else name,
                    **sizes,
                    "pass": what,
                    "seconds": seconds,
                    "floor": least.seconds(*best),
                    "flops": least.flops,
                }


def time_passes(
    call: Callable[[], tuple[Tensor, Any]], inputs: list[Tensor]
) -> dict[str, float]:
    """Seconds of a forward, and of one with its backward."""
    for t in inputs:
        t.requires_grad_()
    dy = torch.randn_like(call()[0])

    def both() -> object:
        return torch.autograd.grad(call()[0], inputs, dy)

    both()  # compiles
    start = synchronised()
    both()
    slow = synchronised() - start > 1
    repeats = 6 if ON_GPU and not slow else 2
    return {
        what: timeit(fn, repeats=repeats, warmup=1 - slow)
        for what, fn in (("forward", call), ("forward+backward", both))
    }


def synchronised() -> float:
    """The time when all that was launched is done."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()
