"""Every stage under its launch settings, and under those next to them.

``python -m fastweights.bench tune``: what :mod:`.settings` decides by a rule
that was found on one GPU, measured again on another; with ``--write`` into
the table that comes before the rule.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.runtime.errors import OutOfResources

from fastweights.kernels import launch, settings
from fastweights.kernels.call import Call
from fastweights.kernels.tile import narrowest

Stages = dict[str, Callable[[], object]]


def stages(x: Call) -> Stages:
    """The stages of one forward and backward, each by itself."""
    do = torch.randn_like(x.v)
    chunked, Aqk, R = launch.intra(x)
    exits, maps = launch.segments(x, chunked, R)
    saved = launch.kept(x, chunked, Aqk, R, exits, maps)
    chunked, Aqk, R, exits, maps = launch.found_again(x, saved)
    h, errors = launch.chunk_states(x, chunked, R, exits)
    dv, dbeta, dh, _ = launch.scan_backward(
        x, chunked, Aqk, R, errors, do, None, maps
    )
    found: Stages = {
        "intra": lambda: launch.intra(x),
        "segments": lambda: launch.segments(x, chunked, R),
        "scan": lambda: launch.scan(x, chunked, Aqk, R, exits),
        "chunk_states": lambda: launch.chunk_states(x, chunked, R, exits),
        "scan_backward": lambda: launch.scan_backward(
            x, chunked, Aqk, R, errors, do, None, maps
        ),
        "intra_backward": lambda: launch.intra_backward(
            x, chunked, do, errors, dv, h, dh, dbeta
        ),
    }
    if x.segments == 1:
        del found["segments"]
    if x.beta is None and x.gate_width == 0:
        del found["intra"]
    return found


def neighbours(
    options: dict[str, int],
    narrow: int,
    widest: dict[str, int],
    stages: int = 3,
) -> Iterator[dict[str, int]]:
    """``options`` themselves, then with one of them changed.

    Tiles of ``narrow`` columns or twice that, but no more than ``widest``
    has for their name; 4 or 8 warps; at most as many ``stages``; at most 168
    registers, or any number.
    """
    yield options
    choices: dict[str, Iterable[int]] = {
        "BK": (narrow, 2 * narrow),
        "BV": (narrow, 2 * narrow),
        "num_warps": (4, 8),
        "num_stages": range(1, stages + 1),
    }
    for name, values in choices.items():
        for value in values:
            tile = name in ("BK", "BV")
            if name not in options or (tile and value > widest.get(name, 0)):
                continue
            if value != options[name]:
                yield options | {name: value}
    free = {name: n for name, n in options.items() if name != "maxnreg"}
    yield free if "maxnreg" in options else options | {"maxnreg": 168}


@contextmanager
def using(x: Call, stage: str, changed: dict[str, int]) -> Iterator[None]:
    """``changed`` in place of the stage's own launch settings."""
    table = {settings.gpu_name(x.device): {name_of(x, stage): changed}}
    with mock.patch.object(settings, "launch_table", lambda: table):
        yield


def name_of(x: Call, stage: str) -> str:
    """The launch as the table calls it."""
    return settings.launch_name(
        stage,
        x.K,
        x.q.dtype,
        gate=x.gate_width,
        delta=x.beta is not None,
        chunk_size=x.chunk_size,
    )


def tune(
    x: Call, timeit: Callable[[Callable[[], object]], float]
) -> Iterator[dict[str, Any]]:
    """Rows of a stage, settings, seconds, and whether they are in use.

    Settings that need more shared memory than there is are left out, and so
    are, with a warning, such as change a result by a hundredth.
    """
    narrow = narrowest(x.q.dtype)
    # On 10.x nothing is loaded ahead: see settings.launch_options.
    most = 1 if settings.properties(x.device).capability[0] == 10 else 3
    for stage, fn in stages(x).items():
        constants = x.constants(stage)
        own = {name: constants[name] for name in OPTIONS if name in constants}
        widest = {"BV": x.V}
        if stage.startswith("intra"):
            widest["BK"] = x.K  # a scan takes all keys at once
        expected = tree_leaves(fn())
        for options in neighbours(own, narrow, widest, most):
            with using(x, stage, options):
                try:
                    error = difference(tree_leaves(fn()), expected)
                    seconds = timeit(fn)
                except OutOfResources:
                    continue
            if not error < 1e-2:
                warnings.warn(
                    f"{name_of(x, stage)} {options}: off by {error:.1e}",
                    stacklevel=2,
                )
                continue
            row = {"stage": stage, "launch": name_of(x, stage), **options}
            yield row | {"own": options == own, "seconds": seconds}


OPTIONS = ("BK", "BV", "num_warps", "num_stages", "maxnreg")


def difference(found: list[Any], expected: list[Any]) -> float:
    """The largest relative error of the tensors in two results."""
    errors = [
        ((a.double() - b.double()).norm() / b.double().norm()).item()
        for a, b in zip(found, expected, strict=True)
        if isinstance(b, Tensor) and b.double().norm() > 0
    ]
    return max(errors, default=0.0)


def best(
    rows: Iterable[dict[str, Any]], least: float = 0.02
) -> dict[str, dict[str, int]]:
    """For each launch in rows of :func:`tune`, the settings to use.

    The fastest, over all members and shapes together, if they save more than
    ``least`` of the time of its own; else its own. Settings that some shape
    has no time of, its own too, are not among them.
    """
    times: dict[str, dict[tuple, dict[tuple, float]]] = {}
    own: dict[str, tuple] = {}
    for row in rows:
        options = tuple((n, row[n]) for n in OPTIONS if n in row)
        seconds = times.setdefault(row["launch"], {}).setdefault(options, {})
        seconds[row["member"], row["shape"]] = row["seconds"]
        if row["own"]:
            own[row["launch"]] = options
    chosen = {}
    for name, found in times.items():
        places = {place for seconds in found.values() for place in seconds}
        total = {
            options: sum(seconds.values())
            for options, seconds in found.items()
            if seconds.keys() == places
        }
        if not total:
            continue
        fastest = min(total, key=total.__getitem__)
        before = total.get(own.get(name, ()), float("inf"))
        if total[fastest] > (1 - least) * before:
            fastest = own[name]
        chosen[name] = dict(fastest)
    return chosen


def write(rows: Iterable[dict[str, Any]], gpu: str, file: Path) -> None:
    """Put the :func:`best` settings of this GPU into the table."""
    table = settings.read_table(file)
    table[gpu] = table.get(gpu, {}) | best(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    settings.launch_table.cache_clear()
