"""One sequence on several GPUs, beside as many tokens on one.

    torchrun --nproc-per-node 2 -m fastweights_lab.bench.ranks ranks.json

Each rank of :func:`fastweights.context_parallel` has a long sequence's next
65,536 tokens. "alone" is the time of one GPU with as many, "ranks" that of
the slowest rank, both forward + backward and in one run; for operators, and
for a training step of the model of 400 million parameters. "error" is how far
outputs and gradients are from those of one GPU that has the whole sequence.
Without a GPU it runs small, with gloo.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fastweights as fw
from fastweights.checks import relative_error
from fastweights.models import LanguageModel, ModelConfig
from fastweights_lab.bench import generate, speed
from fastweights_lab.bench.timing import DEVICE, DTYPE, ON_GPU, Row, timeit
from fastweights_lab.records import machine

SHAPE = speed.SHAPES["long"] if ON_GPU else speed.ON_CPU
MEMBERS = ("gated_deltanet", "kda")
GATES = ("mild", "bounded")


def both(member: str, x: dict[str, Tensor], do: Tensor) -> list[Tensor]:
    """The outputs, and the gradients of all inputs."""
    leaves = {name: of.detach().requires_grad_() for name, of in x.items()}
    o, _ = getattr(fw, member)(**leaves)
    return [o.detach(), *torch.autograd.grad(o, [*leaves.values()], do)]


def slowest(seconds: float) -> float:
    """The longest of all ranks'."""
    found = torch.tensor(seconds, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def pair(call: Callable[[], object], mesh: Any) -> Row:
    """Seconds of a call on each rank alone, and of all ranks together."""
    row = {"alone": slowest(timeit(call, repeats=5))}
    with fw.context_parallel(mesh):
        row["ranks"] = slowest(timeit(call, repeats=5))
    return row


def operators(mesh: Any) -> Iterator[Row]:
    """Every member at every gate."""
    rank, size = mesh.get_local_rank(), mesh.size()
    for member in MEMBERS:
        for gate in GATES:
            long = SHAPE._replace(T=size * SHAPE.T)
            x = speed.inputs(member, long, gate)
            do = torch.randn_like(x["v"])
            want = [t.chunk(size, 1)[rank] for t in both(member, x, do)]
            x = {n: t.chunk(size, 1)[rank].clone() for n, t in x.items()}
            do = do.chunk(size, 1)[rank].clone()
            with fw.context_parallel(mesh):
                found = both(member, x, do)
            errors = map(relative_error, found, want)
            error = slowest(max(errors))
            times = pair(functools.partial(both, member, x, do), mesh)
            yield {"what": member, "gate": gate, "error": error, **times}


def model(mesh: Any) -> Row:
    """A training step's forward and backward, blocks computed again."""
    torch.manual_seed(0)
    config = ModelConfig(pattern=("gated_deltanet",), **generate.SIZES)
    m = LanguageModel(config, checkpoint=True).to(DEVICE, DTYPE)
    tokens = torch.randint(m.config.vocabulary, (1, SHAPE.T + 1)).to(DEVICE)

    def step() -> None:
        m(tokens[:, :-1], targets=tokens[:, 1:]).backward()
        m.zero_grad()

    return {"what": "model", "gate": None, "error": None, **pair(step, mesh)}


def main() -> None:
    """Measure, and write the record to the file that is named."""
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    if ON_GPU:
        torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    rows = []
    for row in (*operators(mesh), model(mesh)):
        rows.append({"tokens": SHAPE.T, **row})
        if dist.get_rank() == 0:
            print(row, flush=True)
    if dist.get_rank() == 0:
        command = " ".join(["torchrun", *sys.argv])
        record = {**machine(), "ranks": mesh.size(), "command": command}
        text = json.dumps({**record, "rows": rows}, indent=1)
        Path(sys.argv[1]).write_text(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
