"""What a CPU takes: ``fastweights bench cpu``.

Every member in four cases: one token from an empty state, one step of
decode_step, a forward, and a training step of many short sequences. Beside
them, where they can do the same: transformers' PyTorch functions, if that
package is installed, and for the training step ``one_chunk``, a single chunk
written down without a state and differentiated by autograd. All in fp32 on
one thread. Contenders take turns; a time is the least processor time of all
turns, which other work on the machine disturbs least.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import fastweights as fw
from fastweights_lab.bench import speed
from fastweights_lab.bench.speed import MEMBERS
from fastweights_lab.bench.timing import Row

Member = Callable[..., tuple[Tensor, Any]]

# case -> its shape: B, T, heads, and K = V
CASES = {
    "token": (1, 1, 4, 64),
    "step": (1, 1, 4, 64),
    "forward": (1, 1024, 4, 64),
    "train": (64, 64, 4, 32),
}


def inputs(member: str, case: str) -> dict[str, Tensor]:
    """A case's q, k, v, mild gates and beta, on the CPU in fp32."""
    B, T, H, D = CASES[case]
    shape = speed.Shape(B, T, H, H, D, D)
    return speed.inputs(member, shape, "mild", "cpu", torch.float32)


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
            what = "forward+backward" if case == "train" else "forward"
            calls = {
                who: speed.passes(function, x)[what]
                for who, function in contenders(member, case).items()
            }
            for who, least in least_seconds(calls, seconds).items():
                row = {"case": case, "member": member, "who": who}
                yield row | {"seconds": least}
