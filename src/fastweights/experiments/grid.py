"""Which runs an experiment is made of: data in, trials out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastweights.experiments.trial import Trial
from fastweights.tasks import Task


@dataclass(frozen=True)
class Variant:
    """Layers, and what they need set otherwise."""

    pattern: tuple[str, ...]
    """Kinds of layer."""

    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """More arguments of the layers, per kind."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a trial that differ from the grid's."""


@dataclass(frozen=True)
class Grid:
    """Every variant at every size, with every learning rate and seed."""

    about: str
    """The question."""

    train: tuple[Task, ...]
    """Tasks to train on, one per step, in turn."""

    tests: Mapping[str, Task]
    """Tasks to test on, by name."""

    variants: Mapping[str, Variant]
    """What is compared, by name."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all trials, by their names in :class:`Trial`."""

    sizes: tuple[tuple[int, int], ...] = ((1, 16),)
    """Heads, and size K = V of a head."""

    lrs: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    """Learning rates: the best one counts, per variant and size."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the parameters and of the sequences trained on."""

    quick: Mapping[str, Any] = field(default_factory=dict)
    """What the quick version has otherwise: any of these fields, and
    ``only``, names of variants; see :meth:`quickly`."""

    def quickly(self) -> Grid:
        """The part of it that a chapter runs while its reader waits."""
        changed = dict(self.quick)
        names = changed.pop("only", tuple(self.variants))
        settings = {**self.settings, **changed.pop("settings", {})}
        return replace(self.only(names), settings=settings, **changed)

    def trials(self, experiment: str) -> list[Trial]:
        """All runs, seed by seed: a whole comparison is there early."""
        return [
            Trial(
                **{
                    "experiment": experiment,
                    "variant": name,
                    "train": self.train,
                    "tests": self.tests,
                    "pattern": variant.pattern,
                    "options": variant.options,
                    "num_heads": heads,
                    "head_dim": size,
                    "lr": lr,
                    "seed": seed,
                    **self.settings,
                    **variant.settings,
                }
            )
            for seed in self.seeds
            for lr in self.lrs
            for heads, size in self.sizes
            for name, variant in self.variants.items()
        ]

    def only(self, names: tuple[str, ...]) -> Grid:
        """The grid with these variants alone.

        Raises:
            ValueError: there is no such variant.
        """
        for name in names:
            if name not in self.variants:
                raise ValueError(
                    f"only: got {name!r}, need one of "
                    f"{', '.join(self.variants)}"
                )
        variants = {name: self.variants[name] for name in names}
        return replace(self, variants=variants)
