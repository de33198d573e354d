"""Small models on small tasks: ``python -m fastweights.experiments NAME``.

An experiment is a grid of runs, and each run a line of JSON in a file:

    grid = EXPERIMENTS["overwriting"].quickly()
    records = [run(trial) for trial in grid.trials("overwriting")]
    print(summary(records))
"""

from fastweights.experiments.grid import Grid, Variant
from fastweights.experiments.recording import recorded
from fastweights.experiments.records import Record, append, matching, read
from fastweights.experiments.registry import EXPERIMENTS
from fastweights.experiments.softmax import ConvolvedSoftmax
from fastweights.experiments.step import Step
from fastweights.experiments.table import at_edge, best, summary
from fastweights.experiments.trial import Trial, accuracy, run

__all__ = [
    "EXPERIMENTS",
    "ConvolvedSoftmax",
    "Grid",
    "Record",
    "Step",
    "Trial",
    "Variant",
    "accuracy",
    "append",
    "at_edge",
    "best",
    "matching",
    "read",
    "recorded",
    "run",
    "summary",
]
