"""Which runs an experiment is made of: data in, trials out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fastweights.arguments import check_numbers, check_sizes
from fastweights.models import LAYERS, ModelConfig
from fastweights.models.config import argument_names
from fastweights_lab.experiments import convolved_layers  # noqa: F401
from fastweights_lab.tasks import Task
from fastweights_lab.text.training import Schedule

STEPS = 2**19
"""Steps that a run may have at most; their seeds are numbered so."""


Options = Mapping[str, Mapping[str, Any]]
"""More arguments of the layers, per kind."""


@dataclass(frozen=True)
class Variant:
    """Layers, and what they need set otherwise than the grid's trials."""

    pattern: tuple[str, ...]
    options: Options = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial(Schedule):
    """A run's settings, named as in the trainer's ``Settings``.

    Args:
        experiment, variant: what it is part of, and its name there.
        train: tasks, one per step, in turn.
        tests: tasks that it is tested on, by name.
        pattern, options: layers, as :class:`~fastweights.models.ModelConfig`
            has them.
        mlp_ratio: width of the MLPs over dim; 0: there are none.
        rows: sequences per step.
        test_rows: those of each test, and of the validation per task.

    Raises:
        ValueError, TypeError: one does not fit; the message names it.
    """

    experiment: str
    variant: str
    train: tuple[Task, ...]
    tests: Mapping[str, Task]
    pattern: tuple[str, ...] = ("recurrence",)
    options: Options = field(default_factory=dict)
    num_layers: int = 1
    dim: int = 64
    num_heads: int = 1
    head_dim: int = 16
    mlp_ratio: float = 0.0
    rows: int = 64
    steps: int = 1000
    lr: float = 3e-3
    warmup: int = 50
    final_lr: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    test_rows: int = 256

    def __post_init__(self) -> None:
        check_sizes(rows=self.rows, steps=self.steps, test_rows=self.test_rows)
        check_numbers("> 0", lr=self.lr)
        if self.steps > STEPS:
            raise ValueError(f"steps: got {self.steps}, need <= {STEPS}")
        if not 0 <= self.seed < 4096:
            raise ValueError(f"seed: got {self.seed}, need 0 to 4095")
        if not self.train or not self.tests:
            raise ValueError("train, tests: got none, need a task each")
        _ = self.model_config

    @property
    def model_config(self) -> ModelConfig:
        """The model's settings, with room for the tokens of all the tasks."""
        every = [*self.train, *self.tests.values()]
        takes_it = any(
            "head_dim" in argument_names(x)
            for x in self.pattern
            if x in LAYERS
        )
        return ModelConfig(
            vocab_size=max(task.vocabulary for task in every),
            dim=self.dim,
            num_layers=self.num_layers,
            pattern=self.pattern,
            num_heads=self.num_heads,
            head_dim=self.head_dim if takes_it else None,
            options=self.options,
            mlp_ratio=self.mlp_ratio or 1.0,
            mlp_multiple=1,
            types_without_mlp=() if self.mlp_ratio else self.pattern,
            tie_embeddings=True,
        )

    def settings(self) -> dict[str, Any]:
        """The settings, as JSON holds them."""
        found = {
            **asdict(self),
            "train": [task.settings() for task in self.train],
            "tests": {k: task.settings() for k, task in self.tests.items()},
        }
        return json.loads(json.dumps(found))


@dataclass(frozen=True)
class Grid:
    """Every variant at every size, with every learning rate and seed.

    Args:
        about: the question.
        train, tests: tasks, as in :class:`Trial`.
        variants: what is compared, by name.
        settings: of all trials, by their names in :class:`Trial`.
        sizes: heads, and size K = V of a head.
        lrs: learning rates: the best one counts, per variant and size.
        seeds: of the parameters and of the sequences trained on.
        quick: what the quick version has otherwise: any of these, and
            ``only``, names of variants; see :meth:`quickly`.
    """

    about: str
    train: tuple[Task, ...]
    tests: Mapping[str, Task]
    variants: Mapping[str, Variant]
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((1, 16),)
    lrs: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    seeds: tuple[int, ...] = (0, 1, 2)
    quick: Mapping[str, Any] = field(default_factory=dict)

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
