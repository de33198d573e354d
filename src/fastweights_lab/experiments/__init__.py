"""Small models on small tasks: ``fastweights experiments NAME``.

An experiment is a grid of runs, and each run a line of JSON in a file:

    grid = EXPERIMENTS["overwriting"].quickly()
    records = [run(trial) for trial in grid.trials("overwriting")]
    print(summary(records))
"""

from fastweights_lab.experiments.captured_step import TrainingStep
from fastweights_lab.experiments.convolved_layers import ConvolvedSoftmax
from fastweights_lab.experiments.grid import Grid, Trial, Variant
from fastweights_lab.experiments.recall_record import recorded
from fastweights_lab.experiments.registry import EXPERIMENTS
from fastweights_lab.experiments.table import at_edge, best, summary
from fastweights_lab.experiments.trial import accuracy, run

__all__ = [
    "EXPERIMENTS",
    "ConvolvedSoftmax",
    "Grid",
    "TrainingStep",
    "Trial",
    "Variant",
    "accuracy",
    "at_edge",
    "best",
    "recorded",
    "run",
    "summary",
]
