"""What the four models of chapter 10's square write.

    fastweights bench continued --json h200_continued.json

trains linear attention, decay, DeltaNet and Gated DeltaNet at once, each in a
process, as ``fastweights compare`` trains them with seed 0. Each then goes on
from the same places in held-out files, and each byte of what really stands
there is priced. A row per model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fastweights.models import LanguageModel
from fastweights_lab.bench.timing import DEVICE, ON_GPU, Row
from fastweights_lab.experiments import comparison
from fastweights_lab.experiments.trial import Stages
from fastweights_lab.experiments.workers import run_jobs
from fastweights_lab.text import corpus
from fastweights_lab.text.training import Training

BASE = (
    comparison.LARGE
    if ON_GPU
    else replace(comparison.SMALL, steps=20, length=512)
)
MODELS = ("linear", "decay", "delta", "gated delta")
PLACES = (
    (12, "    def getByteStream(self):\n"),
    (11, "    def setDocumentLocator(self, locator):\n"),
    (1, "def find(elem, path, namespaces=None):\n"),
)
"""Held-out files, and lines in them after which the models go on."""
NEW = 160
TEMPERATURE, TOP_P = 0.8, 0.95


def rows() -> Iterator[Row]:
    """What each model writes, and what the text costs it."""
    runs, jobs = comparison.load(), []
    for name in MODELS:
        variant, lr = comparison.choose_start(runs, name) or (name, BASE.lr)
        jobs.append((variant, 0, replace(BASE, lr=lr)))
    workers = len(jobs) if ON_GPU else 1
    for _, row in run_jobs(stages, jobs, DEVICE, workers, lambda *_: None):
        yield row


def stages(job: comparison.Job, device: str, **unused: Any) -> Stages:
    """A model, from its first step to what it writes."""
    torch.compiler.reset()
    yield
    variant, number, base = job
    run = Training(comparison.settings_of(variant, number, base))
    for _ in range(run.settings.steps):
        run.step()
    # A copy, since to compile a step that writes takes longer than to write.
    plain = LanguageModel(run.model.config, device=run.device)
    plain.load_state_dict(run.model.state_dict())
    run.model = plain
    files = run.text.held_out
    half = files[: -(-len(files) // 2)]
    tested = corpus.Stream.of(half, run.tokenizer)
    return {
        "variant": variant,
        "seed": number,
        "lr": run.settings.lr,
        "bits per byte": run.evaluate(tested)["bits per byte"],
        "continued": [continue_line(run, *place) for place in PLACES],
    }


@torch.no_grad()
def continue_line(run: Training, file: int, line: str) -> dict[str, Any]:
    """What the model writes after a line, and what it pays for the text."""
    text = run.text.held_out[file]
    at = text.index(line.encode()) + len(line)
    known = text[max(0, at - run.settings.length + NEW) : at]
    true = text[at : at + NEW]
    prompt = run.tokenizer.encode(known)
    whole = run.tokenizer.encode(known + true)[None].to(run.device)
    dice = torch.Generator(run.device).manual_seed(run.settings.seed)
    with run.autocast():
        losses = run.model.token_losses(whole[:, :-1], whole[:, 1:])[0]
        (drawn,) = run.model.generate(
            prompt,
            NEW,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            generator=dice,
        )
        (likeliest,) = run.model.generate(prompt, NEW)
    bits = losses[-len(true) :].double() / math.log(2)
    return {
        "file": file,
        "at": at,
        "known": known[-400:].decode(),
        "true": true.decode(),
        "bits": [round(x, 2) for x in bits.tolist()],
        "drawn": run.tokenizer.decode(drawn),
        "likeliest": run.tokenizer.decode(likeliest),
    }
