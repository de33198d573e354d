"""How long networks as fast weights take.

    fastweights bench deep [NAME ...] [--ttt-video-dit FOLDER]

ttt         TTT-Linear's fast weights, heads of 64 and of 128, B 1 and 8
lact        LaCT's, chunks of 2048, under torch.compile
mesa        MesaNet's, heads of 64 and of 128, B 1 and 8
layers      whole layers of width 2048, in one graph each: TTT-Linear,
            LaCT, MesaNet, TTT-MLP and Titans, the last two without
            torch.compile before PyTorch 2.13, which has no scan for them

--ttt-video-dit names a clone of test-time-training/ttt-video-dit, in which
TTT's authors train TTT-Linear by Triton kernels of their own: it is timed on
the same tokens.

At T 4096, forward (as in training, which keeps what the backward needs) and
forward with backward, beside the floor: the more of what
``fastweights_lab.bench.cost`` counts, at the rates of this machine's copies
and products of matrices, which are measured first. A layer's floor is that
of its fast weights and of its projections together. "of_ceiling" is the
share of the rate of products that a call reaches.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastweights import checks, deep, private
from fastweights.layers import (
    TTTMLP,
    LaCT,
    MesaNet,
    TitansMemory,
    TTTLinear,
)
from fastweights_lab.bench import cost as costs
from fastweights_lab.bench.cost import Cost
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
CHUNK = 2048 if ON_GPU else 32
LACT_HEADS = 4
SCANNED = ("TTTMLP", "TitansMemory")  # step by step, without a kernel
TO: Any = {"device": DEVICE, "dtype": DTYPE}


def rates() -> tuple[list[Row], tuple[float, float]]:
    """This machine's ceilings, and from them FLOPs and bytes per second."""
    rows = [*ceilings()]
    copy, product = rows
    flops = product["flops"] / product["seconds"]
    return rows, (flops, copy["moved"] / copy["seconds"])


def timed(
    row: Row,
    call: Callable[[], tuple[Tensor, object]],
    inputs: list[Tensor],
    of: Callable[..., Cost],
    best: tuple[float, float],
) -> Iterator[Row]:
    """Forward, and forward with backward, beside their floors.

    ``of(training=)`` is what a pass costs. "first" is what the first call
    took, compiling it.
    """
    for t in inputs:
        t.requires_grad_()
    start = time.perf_counter()
    dy = torch.randn_like(call()[0])

    def both() -> object:
        return torch.autograd.grad(call()[0], inputs, dy)

    both()
    first = synchronised() - start
    start = synchronised()
    both()
    slow = synchronised() - start > 1
    for training, fn in ((False, call), (True, both)):
        repeats = 6 if ON_GPU and not slow else 2
        seconds = timeit(fn, repeats=repeats, warmup=1 - slow)
        cost = of(training=training)
        yield {
            **row,
            "pass": "forward+backward" if training else "forward",
            "first": round(first, 1),
            "of_ceiling": round(cost.flops / seconds / best[0], 3),
            "seconds": seconds,
            "floor": cost.seconds(*best),
            "flops": cost.flops,
        }


def synchronised() -> float:
    """The time when all that was launched is done."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def ttt(best: tuple[float, float], clone: Path | None = None) -> Iterator[Row]:
    """TTT-Linear's fast weights, by whatever backend "auto" is here.

    And by the kernels of its authors, if there is a ``clone``.
    """
    for B in BATCHES:
        for H, K in HEADS:
            torch.manual_seed(0)
            q, k, v = torch.randn(3, B, T, H, K, **TO) / K**0.5
            rate = torch.rand(B, T, H, device=DEVICE) / K
            W = 0.02 * torch.randn(H, K, K, device=DEVICE)
            b = torch.zeros(H, K, device=DEVICE)
            norm = torch.ones_like(b), torch.zeros_like(b)
            rows = 1 / torch.arange(1, 17, device=DEVICE)
            x = [q, k, v, rate, W, b, *norm, rows]
            call = functools.partial(
                deep.ttt, q, k, v, rate, [(W, b)], norm, rows
            )
            row = {"what": "ttt-linear", "B": B, "T": T, "H": H, "K": K}
            of = functools.partial(costs.ttt, B, T, H, K)
            yield from timed(row, call, x, of, best)
            if clone:
                o, C = call()[0].detach(), len(rows)
                for group in GROUPS:
                    more = {"peer": clone.name, "checkpoint_group_size": group}
                    theirs, y = by_authors(clone, x, group)
                    # They read a mini-batch when all of it is written, we
                    # each token when those up to it are: the last is alike.
                    read = theirs()[0].flatten(2, 3).transpose(1, 2)
                    last = slice(C - 1, None, C)
                    checks.close(read[:, last], o[:, last], 2e-2)
                    yield from timed(row | more, theirs, y, of, best)


GROUPS = (4, 16, 64)
"""Mini-batches between the weights that the authors' backward starts from."""


def by_authors(
    clone: Path, x: list[Tensor], group: int
) -> tuple[Callable[[], tuple[Tensor, None]], list[Tensor]]:
    """The authors' forward of our tokens, and what has gradients in it.

    Their q, k and v lie mini-batch by mini-batch, [B, H, T / C, C, K], and
    rates are a matrix per mini-batch, of which they take the last row.
    """
    sys.path.insert(0, str(clone))
    authors = importlib.import_module("ttt.models.ssm.linear_triton")
    q, k, v, rate, W, b, weight, bias, rows = (t.detach() for t in x)
    C = len(rows)
    q, k, v = (
        t.unflatten(1, (-1, C)).permute(0, 3, 1, 2, 4).contiguous()
        for t in (q, k, v)
    )
    rate = rate.unflatten(1, (-1, C)).permute(0, 3, 1, 2)  # [B, H, T / C, C]
    eta = (rows[:, None] * rate[..., None, :]).to(q.dtype).contiguous()
    start = (W.expand(len(q), *W.shape), b[:, None].expand(len(q), -1, 1, -1))
    y = [weight, bias, *(t.contiguous() for t in start), q, v, k, eta]
    return lambda: (authors.TritonLinear.apply(*y, group), None), y


def lact(best: tuple[float, float]) -> Iterator[Row]:
    """LaCT's fast weights, momentum and Muon as in its language models."""
    B, H = BATCHES[-1], LACT_HEADS
    K = DIM // H
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, T, H, K, **TO) / K**0.5
    rates = 1e-3 * torch.rand(B, T, H, 3, device=DEVICE)
    momentum = torch.rand(B, T, H, device=DEVICE)
    start = [torch.randn(H, K, K, device=DEVICE) / K**0.5 for _ in range(3)]
    x = [q, k, v, rates, *start, momentum]
    run = torch.compile(deep.lact, fullgraph=True)
    call = functools.partial(
        run, q, k, v, rates, start, momentum, chunk_size=CHUNK
    )
    of = functools.partial(costs.lact, B, T, H, K, K, CHUNK)
    row = {"what": "lact", "B": B, "T": T, "H": H, "K": K, "C": CHUNK}
    yield from timed(row, call, x, of, best)


def mesa(best: tuple[float, float]) -> Iterator[Row]:
    """MesaNet's optimum, by whatever backend "auto" is here."""
    for B in BATCHES:
        for H, K in HEADS:
            torch.manual_seed(0)
            q, k, v = torch.randn(3, B, T, H, K, **TO)
            q, k = (F.normalize(t, dim=-1) for t in (q, k))
            g = F.logsigmoid(torch.randn(B, T, H, device=DEVICE))
            beta = torch.rand(B, T, H, device=DEVICE)
            ridge = torch.ones(H, K, device=DEVICE)
            x = [q, k, v, g, beta, ridge]
            of = functools.partial(costs.mesa, B, T, H, K)
            row = {"what": "mesa", "B": B, "T": T, "H": H, "K": K}
            torch.compiler.reset()
            run = torch.compile(deep.mesa, fullgraph=True)
            yield from timed(row, functools.partial(run, *x), x, of, best)


def layers(best: tuple[float, float]) -> Iterator[Row]:
    """Layers of one width; those that learn networks at the small batch."""
    H, K = HEADS[0]
    M, N = HEADS[-1]
    few, many = BATCHES[0], BATCHES[-1]
    width = DIM // LACT_HEADS
    a, LACT = functools.partial, LACT_HEADS
    cases: dict[str, tuple[int, Callable[..., nn.Module], Callable]] = {
        "TTTLinear": (many, a(TTTLinear, DIM, H), a(costs.ttt, many, T, H, K)),
        "LaCT": (
            many,
            a(LaCT, DIM, LACT, num_attention_heads=H, chunk_size=CHUNK),
            a(costs.lact, many, T, LACT, width, width, CHUNK),
        ),
        "MesaNet": (many, a(MesaNet, DIM, M, N), a(costs.mesa, many, T, M, N)),
        "TTTMLP": (
            few,
            a(TTTMLP, DIM, H),
            a(costs.ttt, few, T, H, K, hidden=4 * K),
        ),
        "TitansMemory": (
            few,
            a(TitansMemory, DIM, M, N),
            a(costs.titans, few, T, M, N, 4 * N),
        ),
    }
    for name, (B, make, fast) in cases.items():
        torch.compiler.reset()
        torch.manual_seed(0)
        layer = make(**TO)
        x = torch.randn(B, T, DIM, **TO)
        # Step after step written down, 256 would take an hour to compile.
        compiled = private.SCAN is not None or name not in SCANNED
        run = torch.compile(layer, fullgraph=True) if compiled else layer

        yield from timed(
            {"what": name, "compiled": compiled, "B": B, "T": T, "D": DIM},
            functools.partial(run, x),
            [x, *layer.parameters()],
            functools.partial(of_layer, fast, layer, B),
            best,
        )
        del layer, x, run


def of_layer(
    fast: Callable[..., Cost], layer: nn.Module, B: int, training: bool
) -> Cost:
    """A layer's cost: that of its fast weights, and of its linear maps.

    The latter are products, x, y, and the weights themselves; LaCT has
    softmax in a window besides.
    """
    linear = [m for m in layer.modules() if isinstance(m, nn.Linear)]
    weights = sum(m.weight.numel() for m in linear)
    size = linear[0].weight.element_size()
    times = 3 if training else 1
    flops = 2 * B * T * weights
    if isinstance(layer, LaCT):
        flops += 4 * B * T * CHUNK * DIM
    moved = size * (2 * B * T * DIM + weights)
    return fast(training=training) + Cost(times * flops, times * moved)


CASES: dict[str, Callable[..., Iterator[Row]]] = {
    "ttt": ttt,
    "lact": lact,
    "mesa": mesa,
    "layers": layers,
}


def rows(names: list[str], clone: Path | None = None) -> Iterator[Row]:
    """The ceilings' rows, then those of the cases; without names of all."""
    found, best = rates()
    yield from found
    for name in names or CASES:
        more = (clone,) if name == "ttt" else ()
        yield from CASES[name](best, *more)
