"""How long a call takes, and what this machine allows at best.

On a CUDA device in bf16; on a CPU in fp32 and small.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

Row = dict[str, Any]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
CACHE_BYTES = 2**28  # more than any GPU's L2
FILL_RATE = 4e12  # bytes a second, of the fastest memory there is


def timeit(
    fn: Callable[[], object],
    *,
    device: str = DEVICE,
    repeats: int = 20,
    warmup: int = 3,
) -> float:
    """Median seconds of ``fn()``, after ``warmup`` calls.

    On a GPU, between events. Large fills before each call empty the L2
    cache of inputs, and last while the host queues the call's kernels, so
    that neither is part of the time: there are as many as that takes.
    """
    for _ in range(warmup):
        fn()
    if device == "cpu":
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            fn()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    queued = time.perf_counter() - start
    fills = 1 + int(2 * queued * FILL_RATE / CACHE_BYTES)
    pairs = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        for _ in range(min(fills, 100)):
            cache.zero_()
        begin.record()
        fn()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3


def now() -> float:
    """The time, in seconds, at which the device has done all."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def elapsed(call: Callable[..., object], *given: object) -> float:
    """Seconds of one call, until the device has done all."""
    start = now()
    call(*given)
    return now() - start


def host_seconds(fn: Callable[[], object]) -> float | None:
    """Median of 51: seconds until ``fn()`` returns, the GPU's work queued.

    Each call finds the queue empty: the host never waits for the GPU.
    """
    if not ON_GPU:
        return None
    seconds = []
    for _ in range(51):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(seconds)


def ceilings() -> Iterator[Row]:
    """Bytes moved (read and written) and operations, with their times."""
    size = 2**32 if ON_GPU else 2**26
    x, y = torch.randint(256, (2, size), dtype=torch.uint8, device=DEVICE)
    row = {"what": "copy", "moved": 2 * size}
    yield row | {"seconds": timeit(functools.partial(x.copy_, y))}
    n = 8192 if ON_GPU else 1024
    a, b = torch.randn(2, n, n, device=DEVICE, dtype=DTYPE)
    row = {"what": "matmul", "n": n, "flops": 2 * n**3}
    yield row | {"seconds": timeit(functools.partial(torch.matmul, a, b))}
