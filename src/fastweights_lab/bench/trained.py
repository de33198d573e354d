"""The operators' speed on what trained models give them.

    fastweights bench trained --json h200_trained.json

trains chapter 10's models with a gate that starts as published
(``fastweights_lab.experiments.comparison.LARGE``, seed 0), and times the
operator on their queries, keys, values, gates and write strengths, beside the
drawn ones of ``fastweights_lab.bench.speed``; with ``--peer``, whose rows name
it, other people's operators too. KDA is trained twice, as "safe" with gates of
at least -5, as Kimi Linear has them.
A model has 24 heads: a sequence takes as many of them as the shape has, at
random, each through one held-out window after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import fastweights as fw
from fastweights.layers.common.gates import Decay
from fastweights_lab.bench import speed
from fastweights_lab.bench.timing import DTYPE, ON_GPU, Row, timeit
from fastweights_lab.experiments import comparison
from fastweights_lab.experiments.learned_gates import (
    ONE_PRODUCT,
    recurrence_inputs,
)
from fastweights_lab.text import corpus
from fastweights_lab.text.training import Settings, Training

MODELS = {"kda": "KDA", "gated_deltanet": "gated delta", "mamba2": "decay"}
RATES = {"KDA": 4e-3, "gated delta": 8e-3, "decay": 4e-3}
BASE = comparison.LARGE if ON_GPU else replace(comparison.SMALL, steps=20)
SHAPES = ("train", "long")
SMALL = speed.Shape(1, 512, 2, 2, 32, 32)  # without a GPU
DRAWS = 3  # of the heads
DRAWN = ("mild", "model", *speed.SIGMOIDS)


def trained_model(
    variant: str, base: Settings, least: float | None = None
) -> Training:
    """A model after its last step; its gates are at least ``least``."""
    settings = replace(base, lr=RATES[variant])
    run = Training(comparison.settings_of(variant, 0, settings))
    for module in run.model.modules():
        if isinstance(module, Decay) and least is not None:
            module.lower_bound = least
            module.reset_parameters()
    for _ in range(run.settings.steps):
        run.step()
    return run


def record_inputs(
    variant: str, base: Settings, windows: int, least: float | None = None
) -> dict[str, Tensor]:
    """Record what a trained model's recurrences are given, row per head.

    q, k, v [windows, T, heads, D], g and beta, the heads of all layers; g is
    at least ``least``.
    """
    run = trained_model(variant, base, least)
    tokens = corpus.first_windows(
        run.held_out, run.settings.length, windows
    ).tokens
    with run.autocast():
        layers = [inputs for _, inputs in recurrence_inputs(run.model, tokens)]
    x = {name: torch.cat([of[name] for of in layers], 2) for name in layers[0]}
    return {**x, **{name: x[name].to(DTYPE) for name in "qkv"}}


def sequences(
    x: dict[str, Tensor], shape: speed.Shape, draw: int
) -> dict[str, Tensor]:
    """Inputs of a shape: heads drawn per sequence, windows joined."""
    T, heads = x["q"].shape[1:3]
    n = shape.T // T
    dice = torch.Generator().manual_seed(draw)
    chosen = [
        torch.randperm(heads, generator=dice)[: shape.H]
        for _ in range(shape.B)
    ]
    return {
        name: torch.stack(
            [
                of[n * i : n * (i + 1), :, some.to(of.device)].flatten(0, 1)
                for i, some in enumerate(chosen)
            ]
        )
        for name, of in x.items()
    }


def beyond(g: Tensor) -> tuple[float, float]:
    """The parts of chunks, and of tiles, that have more than one product.

    Of heads or channels, and of tiles of 64 channels, per chunk of 64.
    """
    g = g.reshape(*g.shape[:3], -1)
    bits = g.unflatten(1, (-1, 64)).sum(2) / -math.log(2)
    far = (bits > ONE_PRODUCT).double()
    tiles = far.unflatten(-1, (-1, min(64, far.shape[-1]))).amax(-1)
    return far.mean().item(), tiles.mean().item()


def rows(
    peer: Sequence[str] = (), peer_path: Path | None = None
) -> Iterator[Row]:
    """Each member's seconds by shape, gates and pass."""
    rivals = {who: speed.peer_functions(who, peer_path) for who in peer}
    shapes = {where: speed.SHAPES[where] for where in SHAPES}
    if not ON_GPU:
        shapes = {"small": SMALL}
    for member, variant in MODELS.items():
        need = max(shape.B * shape.T for shape in shapes.values())
        windows = need // BASE.length
        models = {"trained": record_inputs(variant, BASE, windows)}
        if member == "kda":
            models["safe"] = record_inputs(variant, BASE, windows, -5.0)
        for where, shape in shapes.items():
            cases = {gate: speed.inputs(member, shape, gate) for gate in DRAWN}
            cases |= {
                f"{name} {draw}": sequences(model, shape, draw)
                for name, model in models.items()
                for draw in range(DRAWS)
            }
            for gate, x in cases.items():
                channels, tiles = beyond(x["g"])
                functions = {"": getattr(fw, member)}
                kind = gate.split()[0]
                functions |= speed.peers_for(rivals, member, shape, kind)
                for who, function in functions.items():
                    for what, fn in speed.passes(function, x).items():
                        yield {
                            "member": member,
                            "shape": where,
                            "gate": gate,
                            "what": what,
                            "beyond": channels,
                            "tiles beyond": tiles,
                            **({"peer": who} if who else {}),
                            "seconds": timeit(fn),
                        }
