"""What happens at an empty line, in chapter 10's third race.

    fastweights bench calls --json h200_calls.json

trains the race's models (``fastweights experiments calls``) at the recorded
learning rate, and lets them read test programs of twice as many calls. Beside
them DeltaNet is trained on programs of as many calls as these. Each head has a
row with the cosines of names' keys and the empty line's and, if it has a gate,
with what the gate keeps at the line and elsewhere. Each model has rows with
its errors, call by call: as it is, without the writes at empty lines and the
next two bytes, without all but a few of these, without as many writes
elsewhere, and with gates that keep everything at empty lines and behind them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    ROWS_AT_ONCE,
    TESTS,
    Stages,
    answers,
    train_trial,
)
from fastweights_lab.experiments.workers import run_jobs
from fastweights_lab.tasks import Calls
from fastweights_lab.tasks.programs import ASSIGN, LETTERS, PRINT

TEST, ROWS = "8 calls of 36", 256
CALLS = 16
STREAMS = 10

NOT_HINDERED = {
    "unwritten": 0,
    "unforgotten": 0,
    "before": 0,
    "left": 0,
}
LONG = "delta, 16 calls"
"""DeltaNet, trained on programs of CALLS calls."""

HINDERED: dict[str, tuple[dict[str, int], ...]] = {
    "delta": (
        {},
        {"unwritten": 3},
        {"unwritten": 3, "before": 6},
        {"unwritten": 3, "left": 1},
        {"unwritten": 3, "left": 2},
        {"unwritten": 3, "left": 4},
        {"unwritten": 3, "left": 8},
    ),
    LONG: ({}, {"unwritten": 3}, {"unwritten": 3, "left": 1}),
    "gated delta": (
        {},
        {"unwritten": 3},
        {"unforgotten": 3},
        {"unwritten": 3, "unforgotten": 3},
    ),
}
"""By variant, how many bytes write nothing and how many forget nothing.

They are an empty line and what follows it: the short convolution mixes the
line into the next bytes. The third byte behind it is the digit of an
assignment, which has to be written. Six bytes ``before`` stands "nt(", which
says nothing of a name. So many empty lines are ``left`` as they are, the last
ones before the last call.
"""

NEAR = 4
"""How many bytes, from an empty line on, have a mean gate of their own."""


def trials(variant: str = "delta") -> list[Trial]:
    """The recorded race's trials of a variant, at its best rate.

    Those of LONG are DeltaNet's, but for longer programs, a quarter as many.
    """
    raced = "delta" if variant == LONG else variant
    found = experiments.best(experiments.recorded("calls"))
    (lr,) = {
        run["settings"]["lr"]
        for (name, *_), runs in found.items()
        if name == raced
        for run in runs
    }
    every = EXPERIMENTS["calls"].only((raced,)).trials("calls")
    at_best = [trial for trial in every if trial.lr == lr]
    if variant != LONG:
        return at_best
    return [
        dataclasses.replace(
            trial,
            variant=LONG,
            rows=trial.rows // 4,
            train=tuple(
                dataclasses.replace(task, calls=CALLS)
                for task in trial.train
                if isinstance(task, Calls)
            ),
        )
        for trial in at_best
    ]


def rows(
    names: Sequence[str] = (), seeds: Sequence[int] = ()
) -> Iterator[Row]:
    """Of each model a row per head, and its rows of accuracy.

    Args:
        names: the models' variants; all of :data:`HINDERED` if empty.
        seeds: of the models; all five if empty.
    """
    jobs = [
        trial
        for variant in names or HINDERED
        for trial in trials(variant)
        if not seeds or trial.seed in seeds
    ]
    workers = 1 if DEVICE == "cpu" else 2
    streams = 1 if DEVICE == "cpu" else STREAMS // workers
    for _, found in run_jobs(
        stages, jobs, DEVICE, workers, lambda *_: None, streams
    ):
        yield from found["rows"]


def stages(trial: Trial, device: str, **unused: Any) -> Stages:
    """Train a model, look at its keys, and hinder it at empty lines."""
    model = yield from train_trial(trial, device)
    test: Any = trial.tests[TEST]
    task = dataclasses.replace(test, calls=CALLS)
    tokens = task.batch(ROWS_AT_ONCE, seed=2**31, device=DEVICE).tokens
    of = {"variant": trial.variant, "seed": trial.seed, "lr": trial.lr}
    found = heads(model, tokens, task)
    for hindrance in HINDERED[trial.variant]:
        with hinder(model, task, **hindrance):
            row = NOT_HINDERED | hindrance | by_call(model, task)
        if hindrance:
            del row["program"]  # once is enough
        found.append(row)
    return {"rows": [{**of, **row} for row in found]}


@torch.no_grad()
def by_call(model: LanguageModel, task: Calls) -> dict[str, Any]:
    """What a model says in each call of ROWS programs.

    Counts of answers and of wrong ones, on names that the call has set
    (``own``) and on others (``unset``). ``said`` has the answers to all
    questions of the first program, the ``program``.
    """
    totals: dict[str, list[Tensor]] = {}
    for i, done in enumerate(range(0, ROWS, ROWS_AT_ONCE)):
        number = min(ROWS_AT_ONCE, ROWS - done)
        batch = task.batch(number, TESTS + 1024 * i, DEVICE)
        logits, targets, groups = answers(model, batch)
        own, said = groups > 1, logits.argmax(-1)
        if i == 0:
            asked = task.calls * task.questions
            program, first = text_of(batch.tokens[0]), text_of(said[:asked])
        for name, x in (
            ("own", own),
            ("own wrong", own & (said != targets)),
            ("unset", ~own),
            ("unset wrong", ~own & (said != targets)),
        ):
            in_calls = x.view(-1, task.calls, task.questions).sum((0, 2))
            totals.setdefault(name, []).append(in_calls)
    found: dict[str, Any] = {"program": program, "said": first}
    for name, counts in totals.items():
        found[name] = torch.stack(counts).sum(0).tolist()
    return found


def text_of(tokens: Int[Tensor, " n"]) -> str:
    return bytes(tokens.tolist()).decode()


@torch.no_grad()
def heads(
    model: LanguageModel, tokens: Int[Tensor, "B T"], task: Calls
) -> list[dict[str, Any]]:
    """For each head a ``cosine`` per letter of the alphabet.

    It is the mean over assignments to that letter, of the key at the end of
    the assignment and the key of the empty line that ends its call.
    Where the head has a gate, ``kept`` is the mean of its decay at empty
    lines and at each of the three bytes behind, ``kept at line ends`` that at
    the ends of assignments, and ``kept elsewhere`` at all bytes but the first
    four.
    """
    at, call, end = places(tokens.shape[1], task)
    at, end = at.to(tokens.device), end.to(tokens.device)
    letters = (tokens[:, at - len(ASSIGN) + 1] - ord("a")).flatten()
    found = []
    for layer, x in recurrence_inputs(model, tokens):
        k = F.normalize(x["k"].double(), dim=-1)
        cosines = (k[:, at] * k[:, end[call]]).sum(-1)  # [B, places, H]
        kept = x["g"].double().exp().mean(0) if "g" in x else None  # [T, H]
        far = behind(tokens.shape[1], task)
        for head, of in enumerate(cosines.unbind(-1)):
            means = [of.flatten()[letters == i].mean() for i in range(LETTERS)]
            row = {
                "layer": layer,
                "head": head,
                "cosine": digits_of(means),
            }
            if kept is not None:
                by_place = kept[:, head].cpu()
                near = [by_place[far == i].mean() for i in range(NEAR)]
                row["kept"] = digits_of(near)
                away = [
                    by_place[at.cpu()].mean(),
                    by_place[far >= NEAR].mean(),
                ]
                ends, elsewhere = digits_of(away)
                row |= {"kept at line ends": ends, "kept elsewhere": elsewhere}
            found.append(row)
    return found


def digits_of(numbers: Iterable[Tensor]) -> list[float]:
    return [float(f"{x.item():.4g}") for x in numbers]


@contextmanager
def hinder(
    model: LanguageModel,
    task: Calls,
    unwritten: int = 0,
    unforgotten: int = 0,
    before: int = 0,
    left: int = 0,
) -> Iterator[None]:
    """A model that does less at empty lines, in each of its heads.

    Args:
        model: of layers of the delta rule.
        task: what it reads.
        unwritten: how many bytes write nothing, from each empty line on.
        unforgotten: at how many bytes the gate keeps everything.
        before: how many bytes ahead of the empty line this begins.
        left: how many empty lines before the last call are left as they are.
    """

    hooks = [
        module.register_forward_hook(_filled(task, count, before, left, value))
        for layer in model.modules()
        if isinstance(layer, LinearRecurrence)
        for module, count, value in (
            (layer.b_proj, unwritten, -math.inf),  # a strength of 0
            (layer.decay, unforgotten, 0.0),  # a log decay of 0
        )
        if module is not None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _filled(
    task: Calls, count: int, before: int, left: int, value: float
) -> Callable[..., Tensor]:
    """A hook that puts a value in ``count`` places at each empty line."""

    def fill(_: Any, given: Any, out: Tensor) -> Tensor:
        chosen = behind(out.shape[1] + before, task)[before:] < count
        *_, end = places(out.shape[1], task)
        chosen[end[-1 - left] :] = False  # the program ends with the last one
        return out.masked_fill(chosen.to(out.device)[:, None], value)

    return fill


def behind(length: int, task: Calls) -> Int[Tensor, " T"]:
    """How many bytes ago the last empty line was; ``length`` before any."""
    *_, end = places(length, task)
    since = torch.arange(length)[:, None] - end
    return since.masked_fill(since < 0, length).amin(1)


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
