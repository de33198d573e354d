"""Tasks that show what a state can hold: seeded sequences on any device.

    task = OverwritingRecall(pairs=8)
    batch = task.batch(rows=64, seed=0)
    logits = model(batch.tokens)[0]
    F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

| task | what it asks |
|---|---|
| :class:`AssociativeRecall` | the value of a key (zoology's MQAR) |
| :class:`OverwritingRecall` | the last of several values of a key |
| :class:`RepeatedRecall` | the value of a key, after several readings |
| :class:`Needles` | one fact from far back, and many local ones |
| :class:`Scope` | the value of a key, unless a reset came between |
| :class:`Sections` | the last of two values, unless a reset came between |
| :class:`Reassignment` | what a program prints, variables reassigned |
| :class:`Calls` | the same, where nothing outlives a call |
| :class:`StateTracking` | the running product of a group's elements |
"""

from fastweights_lab.tasks.needles import Needles
from fastweights_lab.tasks.programs import Calls, Reassignment
from fastweights_lab.tasks.recall import (
    AssociativeRecall,
    OverwritingRecall,
    RepeatedRecall,
)
from fastweights_lab.tasks.scope import Scope, Sections
from fastweights_lab.tasks.states import StateTracking
from fastweights_lab.tasks.task import ASK, IGNORE, Batch, Task

__all__ = [
    "ASK",
    "IGNORE",
    "AssociativeRecall",
    "Batch",
    "Calls",
    "Needles",
    "OverwritingRecall",
    "Reassignment",
    "RepeatedRecall",
    "Scope",
    "Sections",
    "StateTracking",
    "Task",
]
