"""What an empty line does to a model's memories, in chapter 10's third race.

    fastweights bench calls --json h200_calls.json

trains the race's DeltaNet and Gated DeltaNet (``fastweights experiments
calls``) from five seeds, at the recorded learning rates, and reads test
programs. For each model there is a row with its accuracy, as it is and with
the empty line's write left out in some heads, and a row per head with its
write strengths and, letter by letter, the cosines of its vectors with the
empty line's key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweights.models import LanguageModel
from fastweights_lab import experiments
from fastweights_lab.bench.timing import DEVICE, Row
from fastweights_lab.experiments.grid import Trial
from fastweights_lab.experiments.learned_gates import recurrence_inputs
from fastweights_lab.experiments.registry import EXPERIMENTS
from fastweights_lab.experiments.trial import Stages, answers, trained
from fastweights_lab.experiments.workers import run_jobs
from fastweights_lab.tasks import Batch, Calls
from fastweights_lab.tasks.programs import ASSIGN, LETTERS, PRINT

VARIANTS = ("delta", "gated delta")
TEST, ROWS = "8 calls of 36", 64
STREAMS = 10
BEHIND = 4
"""Tokens from an empty line on whose writes are looked at."""


def trials() -> list[Trial]:
    """The recorded race's trials of these variants, at their best rates."""
    rates = {
        name: runs[0]["settings"]["lr"]
        for (name, *_), runs in experiments.best(
            experiments.recorded("calls")
        ).items()
    }
    every = EXPERIMENTS["calls"].only(VARIANTS).trials("calls")
    return [trial for trial in every if trial.lr == rates[trial.variant]]


def rows() -> Iterator[Row]:
    """A row per model, and one per head."""
    jobs, workers = trials(), 1 if DEVICE == "cpu" else 2
    streams = 1 if DEVICE == "cpu" else STREAMS // workers
    for _, found in run_jobs(
        stages, jobs, DEVICE, workers, lambda *_: None, streams
    ):
        yield from found["rows"]


def stages(trial: Trial, device: str, **unused: Any) -> Stages:
    """A model before its first step and after its last one."""
    task: Any = trial.tests[TEST]
    batch = task.batch(ROWS, seed=2**31, device=DEVICE)
    at, on = Places(batch.tokens, task), torch.device(DEVICE)
    torch.manual_seed(trial.seed)
    untrained = LanguageModel(trial.model_config, device=on)
    new = heads(untrained, batch, at)
    model = yield from trained(trial, device)
    of = {"variant": trial.variant, "seed": trial.seed}
    found: list[Row] = [
        {**of, "lr": trial.lr, **without_writes(model, batch, at)}
    ]
    for before, after in zip(new, heads(model, batch, at), strict=True):
        found.append({**of, **after, "before": before})
    return {"rows": found}


class Places:
    """Which token is what in a batch of programs of calls: [B, T] each."""

    def __init__(self, tokens: Int[Tensor, "B T"], task: Calls) -> None:
        block = len(ASSIGN) + len(PRINT)
        size = task.questions * block + 1
        at = torch.arange(tokens.shape[1], device=tokens.device)
        in_call, self.call = at % size, at // size
        in_block = in_call % block
        self.end = in_call == size - 1
        self.digit = ~self.end & (in_block == 2)
        self.newline = ~self.end & (in_block == 3)
        self.answer = ~self.end & (in_block == block - 1)
        back = {"digit": 2, "newline": 3, "answer": 2}
        self.letter = {
            name: tokens.roll(by, 1) - ord("a") for name, by in back.items()
        }


@torch.no_grad()
def heads(
    model: LanguageModel, batch: Batch, at: Places
) -> list[dict[str, Any]]:
    """Each head's write strengths and cosines with the empty line's key.

    ``strength``: mean beta at an assignment's digit and at its newline, at
    the end of a line that prints, at an empty line and at the tokens behind.
    ``cosine``: of the empty line's key, per letter, with the keys of
    assignments before it in its call ("digit", "newline"), and with the
    queries of prints behind it, in the next call ("answer"). ``halvings``: of
    the state at an empty line.
    """
    found = []
    for layer, x in recurrence_inputs(model, batch.tokens):
        q, k = (F.normalize(x[name].double(), dim=-1) for name in "qk")
        ends = k[:, at.end]  # [B, calls, H, K]
        own = (k * ends[:, at.call]).sum(-1)  # [B, T, H]
        later = at.call > 0
        before = (q * ends[:, at.call - 1]).sum(-1)
        beta = x["beta"].double()
        for head in range(k.shape[2]):
            place = at.end.nonzero()[:-1, 0]  # a call comes behind each
            row: dict[str, Any] = {
                "layer": layer,
                "head": head,
                "strength": {
                    name: _digits(beta[:, getattr(at, name), head].mean())
                    for name in ("digit", "newline", "answer")
                }
                | {
                    f"empty line + {i}": _digits(
                        beta[:, place + i, head].mean()
                    )
                    for i in range(BEHIND)
                },
                "cosine": {
                    "digit": by_letter(
                        own[..., head], at.letter["digit"], at.digit
                    ),
                    "newline": by_letter(
                        own[..., head], at.letter["newline"], at.newline
                    ),
                    "answer": by_letter(
                        before[..., head],
                        at.letter["answer"],
                        at.answer & later,
                    ),
                },
            }
            if "g" in x:
                g = x["g"].double()[:, at.end, head] / -math.log(2)
                row["halvings"] = _digits(g.mean())
            found.append(row)
    return found


def by_letter(
    x: Float[Tensor, "B T"],
    letters: Int[Tensor, "B T"],
    where: Bool[Tensor, " T"],
) -> list[float]:
    """The mean of x at these places, for each letter of the alphabet."""
    x, letters = x[:, where].flatten(), letters[:, where].flatten()
    return [_digits(x[letters == i].mean()) for i in range(LETTERS)]


@torch.no_grad()
def without_writes(
    model: LanguageModel, batch: Batch, at: Places
) -> dict[str, Any]:
    """Accuracy per kind, as it is and with some writes left out.

    ``left out``: of the empty lines, in one head or in all, and there of
    more tokens behind them.
    """
    layers: list[Any] = [block.layer for block in model.blocks]
    H = layers[0].b_proj.out_features
    every = [(i, h) for i in range(len(layers)) for h in range(H)]
    cases = {f"layer {i}, head {h}": ([(i, h)], 1) for i, h in every}
    cases |= {f"all heads, {n} tokens": (every, n) for n in (1, 2, 4)}
    return {
        "accuracy": accuracy(model, batch),
        "left out": {
            name: accuracy(model, batch, at.end, *case)
            for name, case in cases.items()
        },
    }


def accuracy(
    model: LanguageModel,
    batch: Batch,
    end: Bool[Tensor, " T"] | None = None,
    which: Sequence[tuple[int, int]] = (),
    tokens: int = 1,
) -> dict[str, float]:
    """Share of right answers per kind, without some heads' writes."""
    hooks = []
    if end is not None:
        off = torch.stack([end.roll(i) for i in range(tokens)]).any(0)
        layers: list[Any] = [block.layer for block in model.blocks]
        for i, of in enumerate(layers):
            some = [h for layer, h in which if layer == i]

            def refuse(_: Any, __: Any, out: Tensor, some=some) -> Tensor:
                out = out.clone()
                for head in some:
                    out[:, off, head] = -1e4  # beta is its sigmoid
                return out

            hooks.append(of.b_proj.register_forward_hook(refuse))
    try:
        logits, targets, groups = answers(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    hits = (logits.argmax(-1) == targets).double()
    return {
        kind: _digits(hits[groups == i].mean())
        for i, kind in enumerate(Calls.kinds)
        if (groups == i).any()
    }


def _digits(x: Tensor) -> float:
    return float(f"{x.item():.4g}")
