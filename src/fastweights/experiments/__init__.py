"""Small models on small tasks: ``python -m fastweights.experiments NAME``.

An experiment is a grid of runs, and each run a line of JSON in a file:

    grid = EXPERIMENTS["overwriting"].quickly()
    records = [run(trial) for trial in grid.trials("overwriting")]
    print(summary(records))
"""

from fastweights.experiments.convolved import ConvolvedSoftmax
from fastweights.experiments.grid import Grid, Trial, Variant
from fastweights.experiments.recording import recorded
from fastweights.experiments.registry import EXPERIMENTS
from fastweights.experiments.step import Step
from fastweights.experiments.table import at_edge, best, summary
from fastweights.experiments.trial import accuracy, run

__all__ = [
    "EXPERIMENTS",
    "ConvolvedSoftmax",
    "Grid",
    "Step",
    "Trial",
    "Variant",
    "accuracy",
    "at_edge",
    "best",
    "recorded",
    "run",
    "summary",
]
