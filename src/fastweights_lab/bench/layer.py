"""Where a layer's time goes: ``fastweights bench layer``.

One Gated DeltaNet layer of width 2048 with 16 heads of 128, under
torch.compile in bf16, forward and backward. Its kernels are told apart by
their names, and what each took is the profiler's; those of the library have
the names of their functions, products those of cuBLAS.

How long the recurrence takes depends on the gates: heads whose chunks decay
below 2^-160 leave the kernels' fast path
(``fastweights.kernels.recurrence.gates``), and how many of the 16 do is a
matter of the draw. So there are several.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from fastweights.layers import GatedDeltaNet
from fastweights_lab.bench.timing import DEVICE, DTYPE, ON_GPU, Row, timeit

B, T, DIM, HEADS, HEAD_DIM = 8, 4096, 2048, 16, 128
SEEDS = range(5)
CALLS = 10  # that a profile is the mean of
# part -> what its kernels' names begin with, or contain; the first that fits
PARTS = {
    "convolution": r"convolution_",
    "output norm": r"norm_(fwd|bwd)_kernel",
    "recurrence": r"(intra|scan|gate|compose|add_arriving)_",
    "projections": r".*(nvjet|gemm|cutlass|cublas)",
    "rest": r"",
}


def part_of(kernel: str) -> str:
    """The part of a layer that a kernel of this name belongs to."""
    return next(part for part, x in PARTS.items() if re.match(x, kernel))


def by_part(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds of each part, from kernels' names and seconds."""
    total = dict.fromkeys(PARTS, 0.0)
    for name, seconds in kernels:
        total[part_of(name)] += seconds
    return total


def profile_kernels(fn: Callable[[], object]) -> list[tuple[str, float]]:
    """Name and seconds of every kernel of ``fn()``: a mean of CALLS calls."""
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as run:
        for _ in range(CALLS):
            fn()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return [
        (event.name, event.device_time / 1e6 / CALLS)
        for event in run.events()
        if event.device_type == on_gpu
    ]


def rows() -> Iterator[Row]:
    """Seconds of each part by draw of the gates, and of the whole layer.

    "all" is between events.

    Raises:
        SystemExit: there is no GPU.
    """
    if not ON_GPU:
        raise SystemExit("layer: got no CUDA device, need one")
    torch.manual_seed(0)
    device = torch.device(DEVICE)
    model = GatedDeltaNet(DIM, HEADS, HEAD_DIM, device=device, dtype=DTYPE)
    x, dy = torch.randn(2, B, T, DIM, device=device, dtype=DTYPE)
    x.requires_grad_()
    inputs = [x, *model.parameters()]
    run = torch.compile(lambda x: model(x)[0], fullgraph=True)

    def both() -> object:
        """Forward and backward, with nothing added to older gradients."""
        return torch.autograd.grad(run(x), inputs, dy)

    shape = {"B": B, "T": T, "H": HEADS, "D": HEAD_DIM}
    for seed in SEEDS:
        torch.manual_seed(seed)
        model.decay.reset_parameters()
        for part, seconds in by_part(profile_kernels(both)).items():
            yield {"seed": seed, "part": part, **shape, "seconds": seconds}
        yield {"seed": seed, "part": "all", **shape, "seconds": timeit(both)}
