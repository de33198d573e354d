"""DeltaNet's forward in the six versions of chapter 15, and the library's.

On the shapes "train" and "long" of ``speed``. Rows have the floor's bytes
and FLOPs, as those of ``members``, and the outputs' error against the loop
over tokens in fp64. Rows with ``stages`` or ``number`` are of a version that
was launched otherwise: so many stages of loads, or segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import fastweights as fw
from fastweights.checks import relative_error
from fastweights_lab.bench import speed
from fastweights_lab.bench.timing import ON_GPU, Row, ceilings, timeit

OTHERWISE: dict[str, tuple[str, tuple[int, ...]]] = {
    "ahead": ("stages", (1, 2)),
    "strips": ("stages", (1, 3)),
    "segments": ("number", (2, 4, 16)),
}
"""By version: an option, and what else than usual it is."""


@torch.no_grad()
def rows() -> Iterator[Row]:
    """The ceilings, then each version on each shape."""
    from fastweights_lab.lessons.delta import VERSIONS

    functions = VERSIONS | {"library": fw.deltanet}
    copy, matmul = ceilings()
    yield from (copy, matmul)
    for where in ("train", "long") if ON_GPU else ("small",):
        shape = speed.SHAPES.get(where, speed.ON_CPU)
        x = speed.inputs("deltanet", shape, speed.GATES[0])
        q, k, v, beta = x.values()
        given = {"scale": shape.K**-0.5}
        exact: dict[str, Any] = {
            name: tensor.double() for name, tensor in x.items()
        }
        judge, _ = fw.deltanet(**exact, **given, backend="loop")
        moved, flops = speed.work("deltanet", shape)
        floor = max(
            moved * copy["seconds"] / copy["moved"],
            flops * matmul["seconds"] / matmul["flops"],
        )
        calls: list[tuple[Row, partial]] = [
            ({"version": name}, partial(version, q, k, v, beta, **given))
            for name, version in functions.items()
        ]
        for name, (option, values) in OTHERWISE.items():
            for n in values:
                told = {option: n}
                call = partial(VERSIONS[name], q, k, v, beta, **given, **told)
                calls.append(({"version": name, **told}, call))
        for row, call in calls:
            o, _ = call()
            yield {
                "shape": where,
                **row,
                "error": relative_error(o, judge),
                "seconds": timeit(call),
                "floor": floor,
                "moved": moved,
                "flops": flops,
            }
