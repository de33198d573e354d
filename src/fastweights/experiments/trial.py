"""One run: a small model learns tasks, and is tested on tasks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastweights.arguments import check_number, check_sizes
from fastweights.experiments import (  # noqa: F401 - kinds of layer
    convolved,
    softmax,
)
from fastweights.experiments.step import STEPS, Step
from fastweights.models import LanguageModel, ModelConfig
from fastweights.tasks import IGNORE, Batch, Task
from fastweights.training import chosen_device, machine

VALIDATION, TESTS = 2**32 - 2**21, 2**32 - 2**20
"""The first seeds of sequences that no run trains on."""

Progress = Callable[[int, float, float], None]


@dataclass(frozen=True)
class Trial:
    """A run's settings; named as in :class:`fastweights.training.Settings`.

    Raises:
        ValueError, TypeError: one does not fit; the message names it.
    """

    experiment: str
    """What it is part of."""

    variant: str
    """What its layers are called there."""

    train: tuple[Task, ...]
    """One per step, in turn."""

    tests: Mapping[str, Task]
    """What it is tested on, by name."""

    pattern: tuple[str, ...] = ("recurrence",)
    """Kinds of layer, as :class:`fastweights.models.ModelConfig` has them."""

    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """More arguments of the layers, per kind."""

    num_layers: int = 1
    dim: int = 64
    num_heads: int = 1
    head_dim: int = 16

    mlp_ratio: float = 0.0
    """Width of the MLPs over dim; 0: there are none."""

    rows: int = 64
    """Sequences per step."""

    steps: int = 1000
    lr: float = 3e-3
    warmup: int = 50
    final_lr: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    test_rows: int = 256
    """Sequences of each test, and of the validation per task trained on."""

    def __post_init__(self) -> None:
        check_sizes(rows=self.rows, steps=self.steps, test_rows=self.test_rows)
        for name, need in (
            ("lr", "> 0"),
            ("clip", "> 0"),
            ("warmup", ">= 0"),
            ("final_lr", ">= 0"),
            ("weight_decay", ">= 0"),
            ("mlp_ratio", ">= 0"),
        ):
            check_number(name, getattr(self, name), need)
        if self.steps > STEPS:
            raise ValueError(f"steps: got {self.steps}, need <= {STEPS}")
        if not 0 <= self.seed < 4096:
            raise ValueError(f"seed: got {self.seed}, need 0 to 4095")
        if not self.train or not self.tests:
            raise ValueError("train, tests: got none, need a task each")
        _ = self.model_config

    @property
    def model_config(self) -> ModelConfig:
        """The model's settings, with room for the tokens of all the tasks."""
        every = [*self.train, *self.tests.values()]
        return ModelConfig(
            vocabulary=max(task.vocabulary for task in every),
            dim=self.dim,
            num_layers=self.num_layers,
            pattern=self.pattern,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            options=self.options,
            mlp_ratio=self.mlp_ratio or 1.0,
            mlp_multiple=1,
            without_mlp=() if self.mlp_ratio else self.pattern,
            tie_embeddings=True,
        )

    def settings(self) -> dict[str, Any]:
        """The settings, as JSON holds them."""
        found = {
            **asdict(self),
            "train": [task.settings() for task in self.train],
            "tests": {k: task.settings() for k, task in self.tests.items()},
        }
        return json.loads(json.dumps(found))


def run(
    trial: Trial,
    device: str = "auto",
    *,
    progress: Progress | None = None,
    every: int = 20,
) -> dict[str, Any]:
    """Train a model and test it.

    The parameters are drawn with the trial's seed, and so are the sequences
    of each step, which are new ones at every step. Validation and tests have
    sequences of their own, the same for all trials of an experiment.

    Args:
        trial: what to run.
        device: "cpu", "cuda", ..; "auto" is CUDA if there is one.
        progress: told the steps done, and loss and accuracy of the last.
        every: steps between two of these, and between two points of the
            curve.

    Returns:
        ``settings``; ``accuracy`` per test and kind of question; ``chance``
        per test; ``validation``, the mean accuracy per kind of question on
        the tasks trained on; ``curve``, (steps, loss in nats, accuracy) of
        training batches; ``parameters``; ``state bytes`` after the
        first test's sequence; ``device``, ``versions``, ``seconds``.
    """
    going = stages(trial, device, progress=progress, every=every)
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
) -> Generator[None, None, dict[str, Any]]:
    """:func:`run`, with a pause before each point where it would wait.

    So one process can keep a GPU busy with several runs: each goes on in a
    stream of its own while the others wait.
    """
    on, start = chosen_device(device), time.perf_counter()
    torch.manual_seed(trial.seed)
    model = LanguageModel(trial.model_config, device=on)
    step = Step(trial, model)
    curve = []
    for i in range(1, trial.steps + 1):
        found = step(i - 1)
        if i % every == 0 or i == trial.steps:
            yield
            loss, right = found.tolist()
            curve.append((i, loss, right))
            if progress is not None:
                progress(*curve[-1])

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
        "curve": curve,
        "parameters": model.num_parameters,
        "state bytes": model.state_bytes(first.length),
        **machine(on),
        "seconds": time.perf_counter() - start,
    }


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
    x = model.hidden(batch.tokens, last=True)[0][there]
    return model.logits(x), batch.targets[there], batch.groups[there]


@torch.no_grad()
def accuracy(
    model: LanguageModel,
    task: Task,
    rows: int,
    seed: int,
    *,
    at_once: int = 64,
) -> dict[str, float]:
    """Share of right answers, by kind of question.

    Of ``rows`` sequences, ``at_once`` of them in one pass, a seed for each
    pass. Right is the one token with the largest logit; among logits that
    are no numbers there is none.
    """
    device = model.embedding.weight.device
    right = torch.zeros(len(task.kinds), device=device)
    count = torch.zeros_like(right)
    for i, done in enumerate(range(0, rows, at_once)):
        number = min(at_once, rows - done)
        batch = task.batch(number, seed + 1024 * i, device)
        logits, targets, groups = answers(model, batch)
        hits = (logits.argmax(-1) == targets) & ~logits.isnan().any(-1)
        hits = hits.float()
        right = right.index_add(0, groups, hits)
        count = count.index_add(0, groups, torch.ones_like(hits))
    found = zip(task.kinds, right.tolist(), count.tolist(), strict=True)
    return {kind: x / n for kind, x, n in found if n}
