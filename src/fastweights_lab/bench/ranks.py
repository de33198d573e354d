"""One sequence on several GPUs, beside as many tokens on one.

    torchrun --nproc-per-node 2 -m fastweights_lab.bench.ranks ranks.json

Each rank of :func:`fastweights.context_parallel` has a long sequence's next
65,536 tokens. "alone" is the time of one GPU with as many, "ranks" that of
the slowest rank, both forward + backward and in one run; for operators, and
for a training step of the model of 400 million parameters. "error" is how far
outputs and gradients are from those of one GPU that has the whole sequence.
Each step says when it is done, since the first of them compile for seconds.
Who waits for another rank a minute ends. Without a GPU it runs small, with
gloo.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fastweights as fw
from fastweights.models import LanguageModel, ModelConfig
from fastweights_lab.bench import generate, speed
from fastweights_lab.bench.timing import (
    CACHE_BYTES,
    DEVICE,
    DTYPE,
    ON_GPU,
    Row,
    timeit,
)
from fastweights_lab.records import machine

SHAPE = speed.SHAPES["long"] if ON_GPU else speed.ON_CPU
MEMBERS = ("gated_deltanet", "kda", "model")
GATES = ("mild", "bounded")
STARTED = time.perf_counter()


def say(what: str) -> None:
    """A line of rank 0, with the seconds since it began."""
    if os.environ["RANK"] == "0":
        print(f"{time.perf_counter() - STARTED:6.1f} s  {what}", flush=True)


def both(member: str, x: dict[str, Tensor], do: Tensor) -> list[Tensor]:
    """The outputs, and the gradients of all inputs."""
    leaves = {name: of.detach().requires_grad_() for name, of in x.items()}
    o, _ = getattr(fw, member)(**leaves)
    return [o.detach(), *torch.autograd.grad(o, [*leaves.values()], do)]


def slowest(number: float | Tensor) -> float:
    """The largest of all ranks'."""
    found = torch.as_tensor(number, dtype=torch.float64, device=DEVICE).clone()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def relative_error(x: Tensor, ref: Tensor) -> Tensor:
    """As fastweights.checks has it, but on the GPU, and in fp32."""
    return (x.float() - ref.float()).norm() / ref.float().norm()


def time_call(call: Callable[[], object], repeats: int = 7) -> float:
    """Median seconds on the slowest rank, from when all ranks are there.

    As timeit, but for that: a rank waits for the others in a call.
    """
    if not ON_GPU:
        return slowest(timeit(call, repeats=repeats))
    for _ in range(3):
        call()
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=DEVICE)
    here, pairs = torch.zeros(1, device=DEVICE), []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        for _ in range(100):  # while the host queues the call
            cache.zero_()
        dist.all_reduce(here)
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1e3 for a, b in pairs]
    return slowest(statistics.median(seconds))


def pair(call: Callable[[], object], mesh: Any) -> Row:
    """Seconds of a call on each rank alone, and of all ranks together."""
    row = {"alone": time_call(call)}
    say(f"alone {1e3 * row['alone']:.3f} ms")
    with fw.context_parallel(mesh):
        row["ranks"] = time_call(call)
    times = row["ranks"] / row["alone"]
    say(f"ranks {1e3 * row['ranks']:.3f} ms, {times:.3f} times as long")
    return row


def operator(mesh: Any, member: str, gate: str, shape: speed.Shape) -> Row:
    """A member, with gates of this kind."""
    rank, size = mesh.get_local_rank(), mesh.size()
    x = speed.inputs(member, shape._replace(T=size * shape.T), gate)
    do = torch.randn_like(x["v"])
    want = [t.chunk(size, 1)[rank].clone() for t in both(member, x, do)]
    slowest(0.0)
    say(f"{member}, {gate}: all tokens on each rank")
    x = {name: t.chunk(size, 1)[rank].clone() for name, t in x.items()}
    do = do.chunk(size, 1)[rank].clone()
    with fw.context_parallel(mesh):
        found = both(member, x, do)
    errors = [*map(relative_error, found, want)]
    error = slowest(torch.stack(errors).max())
    say(f"{member}, {gate}: error {error:.1e}")
    del want, found
    return {
        "error": error,
        **pair(functools.partial(both, member, x, do), mesh),
    }


def model(mesh: Any, T: int) -> Row:
    """A training step's forward and backward, blocks computed again."""
    torch.manual_seed(0)
    config = ModelConfig(pattern=("gated_deltanet",), **generate.SIZES)
    m = LanguageModel(config, recompute=True).to(DEVICE, DTYPE)
    tokens = torch.randint(m.config.vocab_size, (1, T + 1)).to(DEVICE)

    def step() -> None:
        m(tokens[:, :-1], targets=tokens[:, 1:]).backward()
        m.zero_grad()

    return {"error": None, **pair(step, mesh)}


def rows(args: argparse.Namespace, mesh: Any) -> Iterator[Row]:
    """Every member at every gate, and the model."""
    shape = SHAPE._replace(T=args.tokens)
    for what in args.members:
        row = {"tokens": shape.T, "what": what, "gate": None}
        if what == "model":
            yield row | model(mesh, shape.T)
            continue
        for gate in args.gates:
            yield row | {"gate": gate} | operator(mesh, what, gate, shape)


def main() -> None:
    """Measure, and write the record to the file that is named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="of the record")
    parser.add_argument("--members", nargs="+", choices=MEMBERS)
    parser.add_argument("--gates", nargs="+", choices=GATES)
    parser.add_argument(
        "--tokens", type=int, default=SHAPE.T, help="of a rank"
    )
    parser.set_defaults(members=MEMBERS, gates=GATES)
    args = parser.parse_args()
    say("begins")
    # Before the group, which else takes the first GPU on every rank.
    device = None
    if ON_GPU:
        device = torch.device(DEVICE, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if ON_GPU else "gloo",
        device_id=device,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    slowest(0.0)
    say(f"{mesh.size()} ranks talk")
    found = []
    for row in rows(args, mesh):
        found.append(row)
        say(json.dumps(row))
    if dist.get_rank() == 0:
        given = [x for x in sys.argv[1:] if x != str(args.path)]
        module = "fastweights_lab.bench.ranks", args.path.name
        start = "torchrun", "--nproc-per-node", str(mesh.size()), "-m"
        command = " ".join([*start, *module, *given])
        record = {**machine(), "ranks": mesh.size(), "command": command}
        text = json.dumps({**record, "rows": found}, indent=1)
        args.path.write_text(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
