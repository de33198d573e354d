"""What a CPU takes: ``python -m fastweights.bench_cpu [--json FILE]``.

Every member in four cases: one token from an empty state, one step of
decode_step, a forward, and a training step of many short sequences. Beside
them, where they can do the same: transformers' PyTorch functions, if that
package is installed, and for the training step ``one_chunk``, a single chunk
written down without a state and differentiated by autograd. All in fp32 on
one thread. Contenders take turns; a time is the least processor time of all
turns, which other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastweights as fw
from fastweights import bench
from fastweights.speed import MEMBERS
from fastweights.timing import Row, package_version

Member = Callable[..., tuple[Tensor, Any]]

# case -> its shape: B, T, heads, and K = V
CASES = {
    "token": (1, 1, 4, 64),
    "step": (1, 1, 4, 64),
    "forward": (1, 1024, 4, 64),
    "train": (64, 64, 4, 32),
}


def inputs(member: str, case: str) -> dict[str, Tensor]:
    """q, k of unit length, v normal, mild gates, beta uniform in (0, 1)."""
    torch.manual_seed(0)
    B, T, H, D = CASES[case]
    gate, delta = MEMBERS[member]
    q, k = F.normalize(torch.randn(2, B, T, H, D), dim=-1)
    x = {"q": q, "k": k, "v": torch.randn(B, T, H, D)}
    sizes = {"fixed": (H,), "head": (B, T, H), "channel": (B, T, H, D)}
    if gate is not None:
        x["g"] = F.logsigmoid(torch.randn(sizes[gate])) / 16
    if delta:
        x["beta"] = torch.rand(B, T, H)
    return x


def one_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
) -> tuple[Tensor, None]:
    """A sequence as one chunk after an empty state; g is None or per head."""
    B, T = q.shape[:2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores, overlaps = q.shape[-1] ** -0.5 * q @ k.mT, k @ k.mT
    if g is None:
        scores = scores.tril()
    else:
        G = g.expand(B, T, -1).transpose(1, 2).cumsum(-1)
        later = torch.ones(T, T, dtype=torch.bool).triu(1)
        D = G[..., :, None] - G[..., None, :]
        D = D.masked_fill(later, -math.inf).exp()
        scores, overlaps = scores * D, overlaps * D
    if beta is not None:
        b = beta.transpose(1, 2)[..., None]
        v = torch.linalg.solve_triangular(
            b * overlaps, b * v, upper=False, unitriangular=True
        )
    return (scores @ v).transpose(1, 2), None


def transformers_functions() -> dict[str, dict[str, Member]]:
    """transformers' chunk form and loop, by member; {} if not installed."""
    try:
        from transformers.models.kimi_linear import modeling_kimi_linear as b
        from transformers.models.qwen3_next import modeling_qwen3_next as a
    except ImportError:
        return {}

    def named(function: Callable, q: Tensor, k: Tensor, v: Tensor, **x: Any):
        x = {"initial_state": None, "output_final_state": True, **x}
        return function(query=q, key=k, value=v, **x)

    functions = {
        "gated_deltanet": (
            a.torch_chunk_gated_delta_rule,
            a.torch_recurrent_gated_delta_rule,
        ),
        "kda": (
            b.chunk_kimi_delta_attention,
            b.recurrent_kimi_delta_attention,
        ),
    }
    return {
        member: {
            "chunks": functools.partial(named, chunks),
            "step": functools.partial(named, step),
        }
        for member, (chunks, step) in functions.items()
    }


def contenders(member: str, case: str) -> dict[str, Member]:
    """Who can do a case of a member: by name, functions of the inputs."""
    B, _, H, D = CASES[case]
    state = torch.zeros(B, H, D, D)
    theirs = transformers_functions().get(member)
    found: dict[str, Member] = {"fastweights": getattr(fw, member)}
    if case == "step":

        def step(**x: Any) -> tuple[Tensor, Tensor]:
            return fw.decode_step(**x, state=state), state

        found["fastweights"] = step
    if theirs and case == "step":
        found["transformers"] = functools.partial(
            theirs["step"], initial_state=state
        )
    elif theirs:
        found["transformers"] = theirs["chunks"]
    if case == "train" and MEMBERS[member][0] != "channel":
        found["one_chunk"] = one_chunk
    return found


def call(function: Member, x: dict[str, Tensor], case: str) -> Callable:
    """What is timed: a call without gradients, or in "train" with them."""

    def forward() -> object:
        with torch.no_grad():
            return function(**x)

    def both() -> object:
        leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
        o, _ = function(**leaves)
        return torch.autograd.grad(o, [*leaves.values()], x["v"])

    return both if case == "train" else forward


def least_seconds(
    calls: dict[str, Callable], seconds: float
) -> dict[str, float]:
    """Least processor seconds of each call, which take turns."""
    for fn in calls.values():
        fn()
    least = dict.fromkeys(calls, math.inf)
    end, turns = time.perf_counter() + seconds, 0
    while turns < 5 or time.perf_counter() < end:
        for name, fn in calls.items():
            start = time.thread_time_ns()
            fn()
            least[name] = min(
                least[name], (time.thread_time_ns() - start) / 1e9
            )
        turns += 1
    return least


def rows(
    members: list[str], cases: list[str], seconds: float
) -> Iterator[Row]:
    """Times of each case and member: case, member, who and seconds."""
    for case in cases:
        for member in members:
            x = inputs(member, case)
            calls = {
                who: call(function, x, case)
                for who, function in contenders(member, case).items()
            }
            for who, least in least_seconds(calls, seconds).items():
                row = {"case": case, "member": member, "who": who}
                yield row | {"seconds": least}


def processor() -> str:
    """The processor's name, as Linux has it; elsewhere its architecture."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [x.split(":")[1].strip() for x in lines if "model name" in x]
    return names[0] if names else platform.machine()


def environment() -> dict[str, Any]:
    """The environment as a bench records it, for a CPU and one thread."""
    return bench.environment() | {
        "device": processor(),
        "dtype": "float32",
        "threads": 1,
        "transformers": package_version("transformers"),
        "shapes": CASES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fastweights.bench_cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument(
        "--members", choices=MEMBERS, default=[*MEMBERS], **several
    )
    parser.add_argument("--cases", choices=CASES, default=[*CASES], **several)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="spent on each; 2 if left"
    )
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    given = " ".join(sys.argv[1:])
    record: dict[str, Any] = {
        "command": f"python -m fastweights.bench_cpu {given}".strip(),
        **environment(),
        "rows": [],
    }
    for row in rows(arguments.members, arguments.cases, arguments.seconds):
        words = (row["case"], row["member"], row["who"])
        print(*words, f"{1e6 * row['seconds']:.0f} us", flush=True)
        record["rows"].append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
