"""One language model with other layers in it, trained on the same text.

``fastweights compare`` trains every variant on a GPU. Chapter 10 trains the
same ones at a size for its reader's CPU:

    found = train("delta", 0, SMALL)
    found["bits per byte"]
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from fastweights_lab.experiments.learned_gates import measure_gates
from fastweights_lab.experiments.planted_lines import measure_recall
from fastweights_lab.experiments.trial import Stages
from fastweights_lab.records import Record, read, shipped
from fastweights_lab.text import corpus
from fastweights_lab.text.training import Settings, Training

Progress = Callable[[int, float], None]
Job = tuple[str, int, Settings]
"""A variant, a seed, and everything else."""


def _recurrence(**options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return ("recurrence",), {"recurrence": options}


SLOW = {"A_range": (0.01, 0.16)}
HYBRID = ("recurrence", "recurrence", "softmax")

VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "linear": _recurrence(rule="additive", decay=None),
    "decay": _recurrence(rule="additive"),
    "delta": _recurrence(decay=None),
    "gated delta": _recurrence(),
    "KDA": _recurrence(decay="channel"),
    "softmax": (("softmax",), {}),
    "hybrid": (HYBRID, {}),
    "decay, slow": _recurrence(rule="additive", **SLOW),
    "gated delta, slow": _recurrence(**SLOW),
    "KDA, slow": _recurrence(decay="channel", **SLOW),
    "hybrid, slow": (HYBRID, {"recurrence": SLOW}),
    "Gated DeltaNet-2": (("gated_deltanet2",), {}),
    "Gated DeltaNet-2, slow": (
        ("gated_deltanet2",),
        {"gated_deltanet2": SLOW},
    ),
    "gated delta, constant": _recurrence(decay="constant"),
}
"""Each one's pattern of layers and their options.

The first five are the same layer with another recurrence, Gated DeltaNet-2 is
its own. "slow" are gates that start by keeping a hundred times as long as the
published ones; a "constant" gate learns how long a head keeps what it holds,
and no token changes it.
"""

KINDS = (
    "linear",
    "decay",
    "delta",
    "gated delta",
    "KDA",
    "Gated DeltaNet-2",
    "softmax",
    "hybrid",
)
"""Those that are compared."""

LARGE = Settings(
    length=2048,
    tokens=32768,
    num_layers=6,
    dim=512,
    num_heads=4,
    mlp_ratio=8 / 3,
    steps=800,
    lr=2e-3,
    warmup=80,
    eval_windows=64,
    device="cuda",
    compile=True,
)
"""20 million parameters, 26 million tokens: half a minute of an H200."""

SMALL = Settings(
    length=128,
    tokens=1024,
    num_layers=2,
    dim=64,
    num_heads=2,
    steps=300,
    lr=6e-3,
    eval_windows=64,
    device="cpu",
)
"""0.16 million parameters: some ten seconds of a laptop."""

RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
PROMPT = "def "
PLANTED = (16, 64, 256, 1024, 4096)  # bytes back, at most LONG windows
LONG = 4  # evaluated on windows this many times as long as those trained on


def settings_of(variant: str, seed: int, base: Settings) -> Settings:
    """The settings of one run.

    Raises:
        ValueError: there is no such variant.
    """
    if variant not in VARIANTS:
        raise ValueError(
            f"variant: got {variant!r}, need one of {', '.join(VARIANTS)}"
        )
    pattern, options = VARIANTS[variant]
    return replace(
        base, pattern=pattern, options=json.dumps(options), seed=seed
    )


def train(
    variant: str,
    seed: int = 0,
    base: Settings = SMALL,
    *,
    every: int = 20,
    sample: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """One run, from its first step to its last, and what came of it.

    Args:
        variant: one of :data:`VARIANTS`.
        seed: of the parameters and of the batches.
        base: everything else.
        every: steps between two entries of ``losses``.
        sample: whether it writes text at the end.
        progress: is told the step and the loss at each of them.

    Returns:
        variant, seed, settings, parameters, ``state bytes`` after a window,
        ``flops`` of a forward per token, ``losses`` as pairs (step, nats per
        token), what :meth:`Training.evaluate` finds, ``by position`` (see
        :func:`by_position`), ``planted`` (see :func:`recalled`), the gates,
        strengths and keys ``at the start`` and ``learned`` (see
        :func:`learned`), the text that it writes ``after`` its last step, and
        seconds of the steps but the first. A run whose gradient is no number
        any more ends there, finds nan and writes nothing.
    """
    run = Training(settings_of(variant, seed, base))
    files = run.text.held_out
    half = -(-len(files) // 2)
    run.held_out = corpus.Stream.of(files[:half], run.tokenizer)
    development = corpus.Stream.of(files[half:] or files, run.tokenizer)
    length, losses = run.settings.length, []
    at_the_start = inside(run)
    start = since = time.perf_counter()
    for step in range(run.settings.steps):
        try:
            loss = run.step()
        except FloatingPointError:
            losses.append((step, math.nan))
            break
        if step % every == 0 or step == run.settings.steps - 1:
            losses.append((step, loss.item()))
            if progress is not None:
                progress(*losses[-1])
        if step == 0:
            since = time.perf_counter()
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    end = time.perf_counter()
    if math.isnan(losses[-1][1]):  # and so shall be all that is found
        sample = False
        for p in run.model.parameters():
            p.detach().fill_(math.nan)
    with run.autocast():
        planted = [
            measure_recall(run.model, run.held_out, distance)
            for distance in PLANTED
            if distance < LONG * length
        ]
    return {
        "variant": variant,
        "seed": seed,
        **run.record(),
        "state bytes": run.model.state_bytes(length),
        "flops": run.model.flops_per_token(length),
        "losses": losses,
        **run.evaluate(),
        "development": run.evaluate(development)["bits per byte"],
        "by position": by_position(run, LONG * length),
        "planted": planted,
        "at the start": at_the_start,
        "learned": inside(run),
        "after": run.sample(PROMPT, 400) if sample else None,
        "seconds": end - since,
        "first step": since - start,
    }


def by_position(run: Training, length: int) -> list[tuple[int, float]]:
    """Bits per byte by where in a window a token stands, held-out text.

    Pairs (position, bits), for positions 0, 64, 128, 256, ...: each stands
    for the tokens from there to the next one. Windows have ``length`` tokens
    and do not overlap.
    """
    batch = corpus.first_windows(run.held_out, length, 64)
    length = batch.tokens.shape[1]
    pairs = (x.to(run.device).split(4) for x in (batch.tokens, batch.targets))
    with run.autocast():
        found = [run.model.token_losses(*x) for x in zip(*pairs, strict=True)]
    bits = torch.cat(found).cpu().double().mean(0) / math.log(2)
    bits = bits * run.held_out.tokens_per_byte
    edges = [0] + [2**i for i in range(6, 40) if 2**i < length]
    ends = [*edges[1:], length]
    return [
        (a, bits[a:b].mean().item()) for a, b in zip(edges, ends, strict=True)
    ]


def inside(run: Training, windows: int = 16) -> list[dict[str, Any]]:
    """What the recurrences do with held-out windows."""
    batch = corpus.first_windows(run.held_out, run.settings.length, windows)
    with run.autocast():
        return measure_gates(run.model, batch.tokens)


def load() -> list[Record]:
    """The runs of ``fastweights compare all``, recorded on an H200."""
    return read(shipped() / "text_plot.jsonl")


def starts(variant: str) -> tuple[str, ...]:
    """The variant, and itself with gates that start slow if it has gates."""
    slow = f"{variant}, slow"
    return (variant, slow) if slow in VARIANTS else (variant,)


def choose_start(
    runs: Iterable[dict[str, Any]], variant: str
) -> tuple[str, float] | None:
    """The start of the gates and the rate that did best on development text.

    Among the runs with seed 0; one that diverged counts only where there is
    no other. None if there are no runs.
    """
    names = starts(variant)
    tried = [r for r in runs if r["variant"] in names and r["seed"] == 0]
    if not tried:
        return None
    best = min(tried, key=_development_bits)
    return best["variant"], best["settings"]["lr"]


def chosen_runs(
    runs: Iterable[dict[str, Any]], variant: str
) -> list[dict[str, Any]]:
    """A variant's runs from :func:`choose_start`'s choice, by their seeds."""
    runs = list(runs)
    choice = choose_start(runs, variant)
    found = [r for r in runs if (r["variant"], r["settings"]["lr"]) == choice]
    return sorted(found, key=lambda run: run["seed"])


def still_falls(runs: Iterable[dict[str, Any]], variant: str) -> bool:
    """Whether the highest rate tried with seed 0 is the best one so far."""
    tried = [r for r in runs if r["variant"] == variant and r["seed"] == 0]
    if not tried:
        return True
    highest = max(tried, key=lambda run: run["settings"]["lr"])
    return min(tried, key=_development_bits) is highest


def _development_bits(run: dict[str, Any]) -> float:
    value = run["development"]  # nan is None in a file
    return math.inf if value is None or math.isnan(value) else value


def stages(job: Job, _: str, *, progress: Progress) -> Stages:
    """:func:`train` as one of several jobs; seed 0 writes text."""
    torch.compiler.reset()  # which keeps few graphs of one class of models
    yield
    return train(*job, sample=job[1] == 0, progress=progress)
