"""A small case of each kernel, for NVIDIA's compute-sanitizer.

    python tools/sanitize.py   # once, so that all is compiled
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 \\
        compute-sanitizer --tool memcheck python tools/sanitize.py

and --tool racecheck (which reports writes of the selective scan against each
other: lanes that all hold the sum over the state store it, the same number,
in the same word of shared memory). ``recurrences`` or ``others`` after the
file's name is that part of it. Lengths that no chunk divides, an empty
sequence, heads that share keys, widths that no tile divides. Without its
cache of memory PyTorch allocates each tensor by itself, so that reading past
one shows.
"""

import itertools
import sys
from pathlib import Path

import torch

import fastweights as fw
from fastweights.deep import mesa
from fastweights.kernels.recurrence import settings
from fastweights.ops.convolution import convolve_heads
from fastweights_lab.lessons import delta, linear, prefix

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.inputs import GATES, RULES, member_inputs

# x, dt, A, B, C of the selective scan; with A > 0 it grows, but not for long
SCANNED = [(2, 50, 20), (2, 50, 20), (20, 5), (2, 50, 5), (2, 50, 5)]


def run(
    gate: str, rule: str, dtype: torch.dtype, strength: float | str
) -> None:
    lengths = torch.tensor([0, 170, 170, 300], device="cuda")
    kind = {"T": 300, "N": 3, "H": 1, "HV": 2, "K": 60, "V": 100}
    x = member_inputs(gate, rule, strength=strength, **kind)
    x = {name: t.cuda().float() for name, t in x.items()}
    narrow = {"q", "k", "v", "erase_key"} & x.keys()
    x |= {name: x[name].to(dtype) for name in narrow}
    x = {name: t.requires_grad_() for name, t in x.items()}
    o, state = fw.linear_recurrence(**x, cu_seqlens=lengths, backend="triton")
    torch.autograd.grad(o.float().sum() + state.sum(), [*x.values()])
    few = {n: t[:, :3].detach() if t.dim() > 1 else t for n, t in x.items()}
    few["state"] = few.pop("initial_state")[:1].detach().clone()
    with torch.no_grad():
        fw.decode_step(**few, backend="triton")


def recurrences(dtype: torch.dtype) -> None:
    # One segment and three; decays of bounded chunks, and of others.
    for gate, rule, segments, strength in itertools.product(
        GATES, RULES, (1, 3), (-0.01, "mixed")
    ):
        if gate == "none" and strength == "mixed":
            continue
        settings.segment_chunks = lambda *x, S=segments: -(-x[2] // S)
        settings.lengths_of.cache_clear()
        run(gate, rule, dtype, strength)
        torch.cuda.synchronize()
        print(dtype, gate, rule, segments, strength, flush=True)


def others(dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 1, 100, 1, 60, dtype=dtype, device="cuda")
    v = torch.randn(1, 100, 2, 100, dtype=dtype, device="cuda")
    linear.scan(q, k, v, scale=0.3)
    prefix.parallel_scan(q, k, v, scale=0.3)
    kind = {"dtype": dtype, "device": "cuda"}
    if dtype != torch.float32:
        beta = torch.rand(1, 100, 2, device="cuda")
        for version in delta.VERSIONS.values():
            version(q, k, v, beta, scale=0.3)
        whole = [torch.cat([x, x], dim=1)[:, :128] for x in (q, k, v, beta)]
        delta.segments(*whole, scale=0.3, number=2)
    x = [torch.rand(size, **kind) for size in SCANNED]
    x = [t.requires_grad_() for t in x]
    y, state = fw.selective_scan(*x, backend="triton")
    torch.autograd.grad(y.float().sum() + state.sum(), x)
    # Packed, in groups of 5 channels, an empty sequence among them.
    offsets = torch.tensor([0, 13, 13, 50], device="cuda")
    packed = [t[:1].detach() for t in x[:2]] + x[2:3]
    packed += [torch.rand(1, 50, 4, 5, **kind) for _ in range(2)]
    packed = [t.requires_grad_() for t in packed]
    y, state = fw.selective_scan(*packed, cu_seqlens=offsets, backend="triton")
    torch.autograd.grad(y.float().sum() + state.sum(), packed)
    # 2 heads of 5 channels, 1 of 9; a sequence without a token.
    x = [torch.rand(size, **kind) for size in ((1, 50, 29), (29, 4))]
    x += [torch.rand(29, **kind), torch.rand(3, 3, 29, **kind)]
    x = [t.requires_grad_() for t in x]
    *parts, state = convolve_heads(
        *x[:3],
        heads=(2, 1),
        sizes=(5, 9),
        initial_state=x[3],
        cu_seqlens=offsets,
        backend="triton",
    )
    loss = sum(t.float().sum() for t in (*parts, state))
    torch.autograd.grad(loss, x)
    x = [torch.rand(1, 50, 2, 20, **kind) for _ in range(3)]
    x += [-torch.rand(1, 50, 2, **kind), torch.rand(1, 50, 2, **kind)]
    x += [1 + torch.rand(2, 20, **kind)]
    x = [t.requires_grad_() for t in x]
    o, state = mesa(*x, solver_steps=3, cu_seqlens=offsets, backend="triton")
    torch.autograd.grad(o.float().sum() + state.sum(), x)
    torch.cuda.synchronize()


PARTS = {"recurrences": recurrences, "others": others}


def main(*names: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for name in names or PARTS:
            PARTS[name](dtype)
            print(dtype, name, "done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
