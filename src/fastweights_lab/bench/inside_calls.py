"""Names' keys beside the empty line's, in chapter 10's third race.

    fastweights bench calls --json h200_calls.json

trains the race's DeltaNet (``fastweights experiments calls``) from five
seeds, at the recorded learning rate, and lets it read test programs. Each
head has a row with the cosines of names' keys and the empty line's. Each
model has three rows with its accuracy: as it is, without the writes at empty
lines, and without these and the writes of the next two bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from fastweights.layers import LinearRecurrence
from fastweights.models import LanguageModel
from fastweights_lab import experiments
from fastweights_lab.bench.timing import DEVICE, Row
from fastweights_lab.experiments.grid import Trial
from fastweights_lab.experiments.learned_gates import recurrence_inputs
from fastweights_lab.experiments.registry import EXPERIMENTS
from fastweights_lab.experiments.trial import (
    TESTS,
    Stages,
    accuracy,
    trained,
)
from fastweights_lab.experiments.workers import run_jobs
from fastweights_lab.tasks import Calls
from fastweights_lab.tasks.programs import ASSIGN, LETTERS, PRINT

VARIANT = "delta"
TEST, ROWS = "8 calls of 36", 64
STREAMS = 10
UNWRITTEN = (0, 1, 3)
"""How many bytes write nothing, an empty line and what follows it.

The short convolution mixes the line into the next bytes. The third byte
behind it is the digit of an assignment, which has to be written.
"""


def trials() -> list[Trial]:
    """The recorded race's trials of DeltaNet, at its best rate."""
    found = experiments.best(experiments.recorded("calls"))
    (lr,) = {
        run["settings"]["lr"]
        for (name, *_), runs in found.items()
        if name == VARIANT
        for run in runs
    }
    every = EXPERIMENTS["calls"].only((VARIANT,)).trials("calls")
    return [trial for trial in every if trial.lr == lr]


def rows() -> Iterator[Row]:
    """Of each model a row per head, and its rows of accuracy."""
    jobs, workers = trials(), 1 if DEVICE == "cpu" else 2
    streams = 1 if DEVICE == "cpu" else STREAMS // workers
    for _, found in run_jobs(
        stages, jobs, DEVICE, workers, lambda *_: None, streams
    ):
        yield from found["rows"]


def stages(trial: Trial, device: str, **unused: Any) -> Stages:
    """Train a model, look at its keys, and leave out some of its writes."""
    model = yield from trained(trial, device)
    task: Any = trial.tests[TEST]
    tokens = task.batch(ROWS, seed=2**31, device=DEVICE).tokens
    of = {"variant": trial.variant, "seed": trial.seed, "lr": trial.lr}
    seed = TESTS + [*trial.tests].index(TEST)
    found = heads(model, tokens, task)
    for count in UNWRITTEN:
        with unwritten(model, task, count):
            right = accuracy(model, task, ROWS, seed)
        found.append({"unwritten": count, "accuracy": right})
    return {"rows": [{**of, **row} for row in found]}


@torch.no_grad()
def heads(
    model: LanguageModel, tokens: Int[Tensor, "B T"], task: Calls
) -> list[dict[str, Any]]:
    """For each head a ``cosine`` per letter of the alphabet.

    It is the mean over assignments to that letter, of the key at the end of
    the assignment and the key of the empty line that ends its call.
    """
    at, call, end = places(tokens.shape[1], task)
    at, end = at.to(tokens.device), end.to(tokens.device)
    letters = (tokens[:, at - len(ASSIGN) + 1] - ord("a")).flatten()
    found = []
    for layer, x in recurrence_inputs(model, tokens):
        k = F.normalize(x["k"].double(), dim=-1)
        cosines = (k[:, at] * k[:, end[call]]).sum(-1)  # [B, places, H]
        for head, of in enumerate(cosines.unbind(-1)):
            means = [of.flatten()[letters == i].mean() for i in range(LETTERS)]
            found.append(
                {
                    "layer": layer,
                    "head": head,
                    "cosine": [float(f"{x.item():.4g}") for x in means],
                }
            )
    return found


@contextmanager
def unwritten(model: LanguageModel, task: Calls, count: int) -> Iterator[None]:
    """A model that writes nothing at these bytes, in any head.

    Args:
        model: of DeltaNet's layers.
        task: what it reads.
        count: of bytes, from each empty line on.
    """

    def silence(_: Any, given: Any, logits: Tensor) -> Tensor:
        length = logits.shape[1]
        *_, end = places(length, task)
        where = torch.arange(length)[:, None] - end
        silent = ((where >= 0) & (where < count)).any(1)
        return logits.masked_fill(silent.to(logits.device)[:, None], -math.inf)

    hooks = [
        layer.b_proj.register_forward_hook(silence)
        for layer in model.modules()
        if isinstance(layer, LinearRecurrence) and layer.b_proj is not None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def places(
    length: int, task: Calls
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"], Int[Tensor, " calls"]]:
    """Where assignments end, in which calls, and where the calls end."""
    block = len(ASSIGN) + len(PRINT)
    size = task.questions * block + 1  # of a call, with its empty line
    where = torch.arange(length)
    ends = where % size == size - 1
    newline = ~ends & (where % size % block == len(ASSIGN) - 1)
    at = newline.nonzero()[:, 0]
    return at, at // size, ends.nonzero()[:, 0]
