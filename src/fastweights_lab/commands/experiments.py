"""Run experiments: ``fastweights experiments overwriting``.

Every run of an experiment's grid trains a small model and tests it, and
adds a line of JSON to OUT/NAME.jsonl. Runs that are there already, with the
same settings, are not run again: stopped at any point, the same command goes
on from there. At the end there is a table. On a GPU a few workers with many
streams each are fastest: a step is a CUDA graph there, and those of one
process run side by side.

    fastweights experiments                       what there is
    fastweights experiments sections --quick
    fastweights experiments needles --workers 3 --streams 10
    fastweights experiments needles --dry         what is done
    fastweights experiments --record FILE         all of it, short
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from fastweights.arguments import check_sizes
from fastweights_lab.experiments.grid import Grid, Trial
from fastweights_lab.experiments.recall_record import write
from fastweights_lab.experiments.registry import EXPERIMENTS
from fastweights_lab.experiments.table import at_edge, summary
from fastweights_lab.experiments.trial import stages
from fastweights_lab.experiments.workers import run_jobs
from fastweights_lab.program import ended
from fastweights_lab.records import Record, append, matching, read
from fastweights_lab.text.training import Progress, chosen_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the names of experiments, and what changes their grids."""
    option = parser.add_argument
    option("names", nargs="*", metavar="NAME", help="experiments")
    option("--quick", action="store_true", help="what a chapter runs live")
    option("--out", type=Path, default=Path("experiments"), metavar="FOLDER")
    option("--only", nargs="+", metavar="VARIANT", help="these variants")
    option("--seeds", nargs="+", type=int, metavar="N")
    option("--lrs", nargs="+", type=float, metavar="RATE")
    option("--steps", type=int, metavar="N", help="of every run")
    option("--device", default="auto", help="cpu, cuda, ..")
    option(
        "--workers",
        type=int,
        metavar="N",
        help="runs at once (default: 1 per core, on a GPU 8 at most)",
    )
    option(
        "--streams",
        type=int,
        default=1,
        metavar="N",
        help="runs that take turns in each worker, for a GPU",
    )
    option("--dry", action="store_true", help="run nothing, show the table")
    option(
        "--record",
        type=Path,
        metavar="FILE",
        help="run nothing: write the runs of all whole grids, or of those "
        "named, to this file, which the library reads as its data/recall.json",
    )


def chosen_grid(name: str, args: argparse.Namespace) -> Grid:
    """An experiment's grid as the options change it.

    Raises:
        ValueError: there is no such experiment or variant.
    """
    if name not in EXPERIMENTS:
        raise ValueError(
            f"name: got {name!r}, need one of {', '.join(EXPERIMENTS)}"
        )
    grid = EXPERIMENTS[name]
    if args.quick:
        grid = grid.quickly()
    if args.only:
        of_all = EXPERIMENTS[name].only(tuple(args.only))
        grid = replace(grid, variants=of_all.variants)
    if args.seeds:
        grid = replace(grid, seeds=tuple(args.seeds))
    if args.lrs:
        grid = replace(grid, lrs=tuple(args.lrs))
    if args.steps is not None:
        grid = replace(grid, settings={**grid.settings, "steps": args.steps})
    return grid


def run_missing(
    trials: Sequence[Trial], args: argparse.Namespace, device: torch.device
) -> None:
    """Run those that the folder does not hold yet, and show how far it is."""
    cores = os.cpu_count() or 1
    most = min(cores, 8) if device.type == "cuda" else cores
    workers = most if args.workers is None else args.workers
    check_sizes(workers=workers, streams=args.streams)
    names = dict.fromkeys(trial.experiment for trial in trials)
    there = [run for name in names for run in read(_file(args.out, name))]
    pairs = zip(trials, match_records(trials, there), strict=True)
    left = [trial for trial, run in pairs if run is None]
    done = [0] * len(left)
    steps = sum(trial.steps for trial in left)
    progress = Progress(steps)
    progress.say(
        f"{args.out}: {len(trials) - len(left)} runs, {len(left)} to go"
    )
    start = shown = time.monotonic()

    def tell(i: int, step: int, loss: float, accuracy: float) -> None:
        nonlocal shown
        done[i] = step
        if time.monotonic() - shown < (0.2 if progress.live else 10):
            return
        shown = time.monotonic()
        minutes = (shown - start) * (steps / sum(done) - 1) / 60
        text = f"{_name(left[i])}: {accuracy:.3f}, {minutes:.0f} min to go"
        progress.show(sum(done), text)

    runs = run_jobs(stages, left, str(device), workers, tell, args.streams)
    for i, run in runs:
        append(_file(args.out, left[i].experiment), run)
        found = f"{run['validation']:.3f} in {run['seconds']:.0f} s"
        progress.say(f"{_name(left[i])}: {found}")


def match_records(
    trials: Sequence[Trial], runs: Sequence[Record]
) -> list[Record | None]:
    """Each trial's run, or None if there is none with its settings."""
    return matching((trial.settings() for trial in trials), runs)


def _file(folder: Path, experiment: str) -> Path:
    return folder / f"{experiment}.jsonl"


def record(names: Sequence[str], folder: Path, file: Path) -> None:
    """Write the runs in a folder to the file that ships with the laboratory.

    Of an experiment whose grid is not done to its last run there is nothing
    in the file: half a grid would be read as a whole one.

    Raises:
        ValueError: no grid is done.
    """
    whole: dict[str, list[Record]] = {}
    for name in names:
        trials = EXPERIMENTS[name].trials(name)
        there = match_records(trials, read(_file(folder, name)))
        runs = [run for run in there if run]
        left = len(trials) - len(runs)
        print(f"{name}: {len(runs)} runs", end="")
        print(f", {left} to go: left out" if left else "")
        if not left:
            whole[name] = runs
            for (variant, heads, size), lr in at_edge(runs).items():
                where = f"{variant}, {heads} x {size}"
                print(f"  {where}: best at the end of the rates, {lr:g}")
    if not whole:
        raise ValueError(f"out: got {folder}, in which no grid is done")
    write(file, whole)


def _name(trial: Trial) -> str:
    size = f"{trial.num_heads} x {trial.head_dim}"
    which = f"{trial.experiment}: {trial.variant}, {size}"
    return f"{which}, lr {trial.lr:g}, seed {trial.seed}"


def run(args: argparse.Namespace) -> int | None:
    """Run what is asked for: 130 for Ctrl-C.

    Raises:
        ValueError: an option does not fit.
        WorkerDied: a run did.
    """
    if args.record is not None:
        for name in args.names:
            chosen_grid(name, args)
        record(args.names or [*EXPERIMENTS], args.out, args.record)
        return None
    if not args.names:
        for name, grid in EXPERIMENTS.items():
            print(f"{name:20} {len(grid.trials(name)):3} runs  {grid.about}")
        return None
    on = chosen_device(args.device)
    grids = {name: chosen_grid(name, args) for name in args.names}
    trials = {name: grid.trials(name) for name, grid in grids.items()}
    try:
        if not args.dry:
            run_missing([*chain.from_iterable(trials.values())], args, on)
    except KeyboardInterrupt:
        return ended("stopped; the same command goes on from here", 130)
    for name, some in trials.items():
        there = read(_file(args.out, name))
        runs = [run for run in match_records(some, there) if run]
        print(f"{name}: {grids[name].about}")
        print(f"{len(runs)} of {len(some)} runs\n{summary(runs)}\n")
    return None
