"""One run: a small model learns tasks, and is tested on tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fastweights.models import LanguageModel
from fastweights_lab.experiments.captured_step import TrainingStep
from fastweights_lab.experiments.grid import Trial
from fastweights_lab.records import Record, machine
from fastweights_lab.tasks import IGNORE, Batch, Task
from fastweights_lab.text.training import chosen_device

ROWS_AT_ONCE = 64
VALIDATION, TESTS = 2**32 - 2**21, 2**32 - 2**20
"""The first seeds of sequences that no run trains on."""

Progress = Callable[[int, float, float], None]
Stages = Generator[None, None, Record]
"""A run with pauses, and its record."""


def run(trial: Trial, device: str = "auto", **options: Any) -> Record:
    """Train a model and test it.

    The parameters are drawn with the trial's seed, and so are the sequences
    of each step, which are new ones at every step. Validation and tests have
    sequences of their own, the same for all trials of an experiment.

    Args:
        trial: what to run.
        device: "cpu", "cuda", ..; "auto" is CUDA if there is one.
        options: ``progress``, which is told the steps done, and loss and
            accuracy of the last, every 20 steps or ``every``.

    Returns:
        ``settings``; ``accuracy`` per test and kind of question; ``chance``
        per test; ``validation``, the mean accuracy per kind of question on
        the tasks trained on; ``parameters``; ``state bytes`` after the
        first test's sequence; ``seconds``, and what
        :func:`fastweights_lab.records.machine` says.
    """
    return run_stages(stages(trial, device, **options), device)


def run_stages(going: Stages, device: str) -> Record:
    """Run stages that nothing else takes turns with, to their record."""
    with a_stream(device):
        while True:
            try:
                next(going)
            except StopIteration as end:
                return end.value


def stages(
    trial: Trial,
    device: str = "auto",
    *,
    progress: Progress | None = None,
    every: int = 20,
) -> Stages:
    """:func:`run`, with a pause before each point where it would wait.

    So one process can keep a GPU busy with several runs: each goes on in a
    stream of its own while the others wait.
    """
    on, start = chosen_device(device), time.perf_counter()
    model = yield from train_trial(
        trial, device, progress=progress, every=every
    )
    seen = [
        accuracy(model, task, trial.test_rows, VALIDATION + i)
        for i, task in enumerate(trial.train)
    ]
    shares = [share for kinds in seen for share in kinds.values()]
    first = next(iter(trial.tests.values()))
    return {
        "settings": trial.settings(),
        "accuracy": {
            name: accuracy(model, task, trial.test_rows, TESTS + i)
            for i, (name, task) in enumerate(trial.tests.items())
        },
        "chance": {name: task.chance for name, task in trial.tests.items()},
        "validation": sum(shares) / len(shares),
        "parameters": model.num_parameters,
        "state bytes": model.state_bytes(first.length),
        **machine(on),
        "seconds": time.perf_counter() - start,
    }


def train_trial(
    trial: Trial,
    device: str = "auto",
    *,
    progress: Progress | None = None,
    every: int = 20,
) -> Generator[None, None, LanguageModel]:
    """The model after its last step, with pauses as in :func:`stages`."""
    torch.manual_seed(trial.seed)
    model = LanguageModel(trial.model_config, device=chosen_device(device))
    step = TrainingStep(trial, model)
    for i in range(1, trial.steps + 1):
        found = step(i - 1)
        if i % every == 0 or i == trial.steps:
            yield
            if progress is not None:
                progress(i, *found.tolist())
    return model


def a_stream(device: str) -> AbstractContextManager[Any]:
    """A new stream, in which a step can be recorded; on a CPU nothing."""
    on = chosen_device(device)
    if on.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(on))


def answers(model: LanguageModel, batch: Batch) -> tuple[Tensor, ...]:
    """Logits, targets and groups where something is asked: [n V], [n], [n].

    Logits are made nowhere else.
    """
    there = batch.targets != IGNORE
    x = model.hidden(batch.tokens, return_states=False)[0][there]
    return model.logits(x), batch.targets[there], batch.groups[there]


@torch.no_grad()
def accuracy(
    model: LanguageModel, task: Task, rows: int, seed: int
) -> dict[str, float]:
    """Share of right answers, by kind of question.

    Of ``rows`` sequences, ROWS_AT_ONCE in one pass, a seed for each pass.
    Right is the one token with the largest logit; among logits that are no
    numbers there is none.
    """
    device = model.embedding.weight.device
    right = torch.zeros(len(task.kinds), device=device)
    count = torch.zeros_like(right)
    for i, done in enumerate(range(0, rows, ROWS_AT_ONCE)):
        number = min(ROWS_AT_ONCE, rows - done)
        batch = task.batch(number, seed + 1024 * i, device)
        logits, targets, groups = answers(model, batch)
        hits = (logits.argmax(-1) == targets) & ~logits.isnan().any(-1)
        hits = hits.float()
        right = right.index_add(0, groups, hits)
        count = count.index_add(0, groups, torch.ones_like(hits))
    found = zip(task.kinds, right.tolist(), count.tolist(), strict=True)
    return {kind: x / n for kind, x, n in found if n}
