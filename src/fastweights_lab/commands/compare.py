"""Train one language model with other layers in it, on the same text.

    fastweights compare all --json text.jsonl

trains the model of 20 million parameters on CPython 3.12.3's library, with
each variant, several runs side by side on one GPU. First, with seed 0, gates
that start as published or slow, each with a higher and higher learning rate
until one is worse than another below it: the second half of the held-out files
chooses. Then the other seeds, as was chosen. All are judged on the first half.
Stopped at any point it goes on from there. ``--dry`` says what would run.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fastweights.arguments import check_sizes
from fastweights_lab.experiments.comparison import (
    KINDS,
    LARGE,
    RATES,
    SMALL,
    VARIANTS,
    Job,
    choose_start,
    settings_of,
    stages,
    starts,
    still_falls,
)
from fastweights_lab.experiments.workers import run_jobs
from fastweights_lab.records import Record, append, matching, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is trained, how often and for how long."""
    option = parser.add_argument
    option(
        "names",
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join(VARIANTS)}; all: {', '.join(KINDS)}",
    )
    option("--json", type=Path, help="file of the results, a line each")
    option("--seeds", type=int, default=5)
    option("--lr", type=float, nargs="+", default=RATES)
    option("--steps", type=int, help="in place of the size's")
    option("--small", action="store_true", help="for a CPU")
    option("--workers", type=int, default=6, help="at once")
    option("--dry", action="store_true", help="run nothing")


def run(args: argparse.Namespace) -> None:
    """Train what is asked for and not there yet.

    Raises:
        ValueError: an option does not fit.
        WorkerDied: a run did.
    """
    base = SMALL if args.small else LARGE
    names = KINDS if args.names == ["all"] else args.names
    runs: list[Record] = []

    def go(wanted: list[Job]) -> None:
        settings = [asdict(settings_of(*job)) for job in wanted]
        found = zip(wanted, matching(settings, runs), strict=True)
        left = [job for job, run in found if run is None]
        for name, seed, of in left:
            print(f"to run: {name}, seed {seed}, lr {of.lr}")
        if args.dry:
            return

        def tell(i: int, step: int, loss: float) -> None:
            if step % 200 == 0:
                print(f"{left[i][:2]}: {step} {loss:.3f}", flush=True)

        for _, run in run_jobs(stages, left, "cpu", args.workers, tell):
            print(_line(run), flush=True)
            runs.append(run)
            if args.json:
                append(args.json, run)

    check_sizes(seeds=args.seeds, workers=args.workers)
    if args.steps is not None:
        base = replace(base, steps=args.steps)
    if args.json:
        runs += read(args.json)
    for lr in sorted(args.lr):
        go(
            [
                (variant, 0, replace(base, lr=lr))
                for name in names
                for variant in starts(name)
                if still_falls(runs, variant)
            ]
        )
    best = [choose_start(runs, name) for name in names]
    go(
        [
            (variant, seed, replace(base, lr=lr))
            for seed in range(1, args.seeds)
            for variant, lr in filter(None, best)
        ]
    )


def _line(run: dict[str, Any]) -> str:
    tokens = run["settings"]["tokens"] * (run["settings"]["steps"] - 1)
    return (
        f"{run['variant']}, seed {run['seed']}, lr {run['settings']['lr']}: "
        f"{run['bits per byte']:.3f} bits per byte ({run['repeated']:.3f} "
        f"repeated, {run['new']:.3f} new), {tokens / run['seconds'] / 1e3:.0f}"
        f" k tokens/s, first step {run['first step']:.0f} s"
    )
