"""Every stage under its launch settings, and under those next to them.

``python -m fastweights.bench tune``: what :mod:`.settings` decides by a rule
that was found on one GPU, measured again on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton.runtime.errors import OutOfResources

from fastweights.kernels import launch, settings
from fastweights.kernels.call import Call, Kind
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
    options: dict[str, int], narrow: int, widest: dict[str, int]
) -> Iterator[dict[str, int]]:
    """``options`` themselves, then with one of them changed.

    Tiles of ``narrow`` columns or twice that, but no more than ``widest``
    has for their name; 4 or 8 warps; one to three stages; at most 168
    registers, or any number.
    """
    yield options
    choices = {
        "BK": (narrow, 2 * narrow),
        "BV": (narrow, 2 * narrow),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3),
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
    """``changed`` in place of the stage's own launch settings.

    What a kernel leaves to the one for far chunks goes by its key tiles.
    """
    own = settings.launch_options

    def options(name: str, *args: Any, **kwargs: Any) -> dict[str, int]:
        if name == stage:
            return changed
        found = own(name, *args, **kwargs)
        if name == f"{stage}_far":
            found |= {"BK": changed["BK"]}
        return found

    with (
        mock.patch.object(settings, "launch_options", options),
        mock.patch.object(x, "kind", Kind()),
    ):
        yield


def tune(
    x: Call, timeit: Callable[[Callable[[], object]], float]
) -> Iterator[dict[str, Any]]:
    """Rows of a stage, settings, seconds, and whether they are in use.

    Settings that need more shared memory than there is are left out.
    """
    narrow = narrowest(x.q.dtype)
    for stage, fn in stages(x).items():
        constants = x.constants(stage)
        names = ("BK", "BV", "num_warps", "num_stages", "maxnreg")
        own = {name: constants[name] for name in names if name in constants}
        widest = {"BV": x.V}
        if stage.startswith("intra"):
            widest["BK"] = x.K  # a scan takes all keys at once
        for options in neighbours(own, narrow, widest):
            with using(x, stage, options):
                try:
                    seconds = timeit(fn)
                except OutOfResources:
                    continue
            row = {"stage": stage, **options, "own": options == own}
            yield row | {"seconds": seconds}
