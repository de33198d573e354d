"""A step of training, which a GPU captures once and then repeats.

A step of so small a model is a few hundred launches that take the GPU less
time than the host. As a CUDA graph it is one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.layers import parameter_groups
from fastweights.models import LanguageModel
from fastweights_lab.experiments.grid import STEPS, Trial
from fastweights_lab.tasks import IGNORE, Batch, Task
from fastweights_lab.tasks.task import Draws

EAGER = 2
"""Steps of each task before one is captured: kernels get compiled in them."""


class TrainingStep:
    """``step(i)`` takes step i of a trial: [loss in nats, accuracy], fp32.

    Steps are taken in their order, from 0 on. On a GPU what it returns holds
    until the next step, and the current stream must not be the default one.

    Args:
        trial: says the tasks, the optimizer and its learning rates.
        model: the model that learns.
    """

    def __init__(self, trial: Trial, model: LanguageModel) -> None:
        self.trial, self.model = trial, model
        device = self.device = model.embedding.weight.device
        on_gpu = device.type == "cuda"
        self.rates = [trial.learning_rate(i) for i in range(trial.steps)]
        # A graph takes no arguments: it reads its rate from here.
        self.lr = torch.tensor(trial.lr, device=device)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, trial.weight_decay),
            lr=self.lr if on_gpu else trial.lr,
            betas=(0.9, 0.95),
            fused=on_gpu,
            capturable=on_gpu,
        )
        kind = _Captured if on_gpu else _Eager
        self.tasks = [kind(self, task) for task in trial.train]

    def __call__(self, i: int) -> Float[Tensor, " 2"]:
        rate = self.rates[i]
        if self.device.type == "cuda":
            self.lr.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        return self.tasks[i % len(self.tasks)](self.trial.seed * STEPS + i)

    def learn(self, batch: Batch, questions: int) -> Float[Tensor, " 2"]:
        """One step, from sequences to weights, which waits for no device."""
        self.optimizer.zero_grad()
        targets = batch.targets.flatten()
        there = (targets != IGNORE).nonzero_static(size=questions)[:, 0]
        x = self.model.hidden(batch.tokens, return_states=False)[0].flatten(
            0, 1
        )
        logits = self.model.logits(x.index_select(0, there))
        targets = targets.index_select(0, there)
        loss = F.cross_entropy(logits, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.trial.clip)
        self.optimizer.step()
        right = (logits.argmax(-1) == targets).float().mean()
        return torch.stack([loss.detach(), right])


class _Eager:
    """Steps on one of the tasks, each with new sequences."""

    questions = 0
    """Questions of a batch: as many for every seed."""

    def __init__(self, step: TrainingStep, task: Task) -> None:
        self.step, self.task = step, task

    def __call__(self, seed: int) -> Float[Tensor, " 2"]:
        trial, device = self.step.trial, self.step.device
        batch = self.task.batch(trial.rows, seed, device)
        if not self.questions:
            self.questions = int((batch.targets != IGNORE).sum())
        return self.step.learn(batch, self.questions)


class _Captured(_Eager):
    """Steps on one task, captured; sequences are drawn in the graph."""

    def __init__(self, step: TrainingStep, task: Task) -> None:
        super().__init__(step, task)
        self.taken = 0
        self.draws = Draws(0, step.device)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.draws.generator)
        self.found: Tensor | None = None

    def __call__(self, seed: int) -> Float[Tensor, " 2"]:
        self.taken += 1
        if self.taken <= EAGER:
            return super().__call__(seed)
        self.draws.generator.manual_seed(seed)
        if self.found is None:
            with _nothing_collected():
                self.graph.capture_begin(capture_error_mode="thread_local")
                try:
                    batch = self.task.draw(self.step.trial.rows, self.draws)
                    self.found = self.step.learn(batch, self.questions)
                finally:
                    self.graph.capture_end()
        self.graph.replay()
        return self.found


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """No graph of a run that is over is destroyed: a recording would fail."""
    wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if wanted:
            gc.enable()
