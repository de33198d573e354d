"""What things cost: ``python -m fastweights_lab.bench CASE [--json FILE]``.

members     every member, forward and backward, in multiples of the floor
            (:mod:`fastweights_lab.bench.speed`); --peer fla: beside its own
ceilings    the rates of this machine: a copy, and a matrix product
crossover   forward of softmax and of linear attention, by sequence length
chunks      forward of linear attention and of the delta rule, by chunk size
decode      one more token: softmax over its cache, linear over its state
cpu         every member on one thread of a processor
deep        networks as fast weights
layer       where the time of a Gated DeltaNet layer goes
trained     the operators on what trained models give them
growth      each size doubled by itself, beside the plainest program

On a CUDA device in bf16 and at the sizes of a real layer; on a CPU in fp32
and small. ``CASE --help`` says more. The book's recorded runs are read with
:func:`fastweights_lab.records.load`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fastweights_lab.bench import (
    cpu as bench_cpu,
)
from fastweights_lab.bench import (
    deep as bench_deep,
)
from fastweights_lab.bench import (
    growth as bench_growth,
)
from fastweights_lab.bench import (
    layer as bench_layer,
)
from fastweights_lab.bench import (
    speed,
    timing,
)
from fastweights_lab.bench import (
    trained as bench_trained,
)
from fastweights_lab.bench.timing import DTYPE, Row
from fastweights_lab.records import Record, machine, package_version

PROGRAM = "python -m fastweights_lab.bench"
CASES: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "members": lambda asked: speed.members(
        asked.members,
        asked.shapes,
        asked.gates,
        peers=asked.peer,
        first=not asked.no_first,
    ),
    "ceilings": lambda _: timing.ceilings(),
    "crossover": lambda _: speed.crossover(),
    "chunks": lambda _: speed.chunks(),
    "decode": lambda _: speed.decode(),
    "cpu": lambda asked: bench_cpu.rows(
        asked.members, asked.cases, asked.seconds
    ),
    "deep": lambda asked: bench_deep.rows(asked.names, asked.ttt_video_dit),
    "layer": lambda _: bench_layer.rows(),
    "trained": lambda _: bench_trained.rows(),
    "growth": lambda asked: bench_growth.rows(asked.names),
}
ONE_THREAD = ("cpu", "growth")


def parser() -> argparse.ArgumentParser:
    """Every case with its options."""
    style: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    what = argparse.ArgumentParser(PROGRAM, description=__doc__, **style)
    cases = what.add_subparsers(dest="case", required=True, metavar="CASE")
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    about = {
        "members": speed.__doc__,
        "cpu": bench_cpu.__doc__,
        "deep": bench_deep.__doc__,
        "layer": bench_layer.__doc__,
        "trained": bench_trained.__doc__,
        "growth": bench_growth.__doc__,
    }
    option = {}
    for name in CASES:
        case = cases.add_parser(name, description=about.get(name), **style)
        case.add_argument("--json", type=Path, help="write the record here")
        option[name] = case.add_argument
    for name in ("members", "cpu"):
        option[name](
            "--members",
            choices=speed.MEMBERS,
            default=[*speed.MEMBERS],
            help=f"of {', '.join(speed.MEMBERS)}; all by default",
            **several,
        )
    option["members"](
        "--shapes",
        choices=[*speed.SHAPES, speed.DECODE],
        default=["train", "long", speed.DECODE],
        help=f"of {', '.join(speed.SHAPES)} and {speed.DECODE}; "
        "train, long and decode by default; without a GPU one small shape "
        "in place of all but decode",
        **several,
    )
    option["members"](
        "--gates",
        choices=speed.GATES,
        default=[*speed.GATES],
        help="mild, kept (g = -1e-3: nothing may be skipped), strong (half "
        "forgotten at every step), model (as published layers start); all "
        "by default",
        **several,
    )
    option["members"](
        "--peer",
        choices=speed.PEERS,
        default=[],
        help=f"time these beside, of {', '.join(speed.PEERS)}",
        **several,
    )
    option["members"](
        "--no-first",
        action="store_true",
        help="leave out the first call, which compiles on an empty cache",
    )
    option["cpu"](
        "--cases",
        choices=bench_cpu.CASES,
        default=[*bench_cpu.CASES],
        help=f"of {', '.join(bench_cpu.CASES)}; all by default",
        **several,
    )
    option["cpu"](
        "--seconds", type=float, default=2.0, help="spent on each; 2 if left"
    )
    option["deep"](
        "names",
        nargs="*",
        metavar="NAME",
        choices=[[], *bench_deep.CASES],
        help=f"of {', '.join(bench_deep.CASES)}; all by default",
    )
    option["deep"](
        "--ttt-video-dit",
        type=Path,
        metavar="FOLDER",
        help="time its TTT-Linear beside ours",
    )
    option["growth"](
        "names", nargs="*", metavar="NAME", help="parts of cases' names"
    )
    return what


def run(rows: Iterator[Row], record: Record, file: Path | None) -> None:
    """Take each row, as it comes, to the terminal and the record."""
    record["rows"] = []
    for row in rows:
        print(_line(row), flush=True)
        record["rows"].append(row)
        if file:
            file.write_text(json.dumps(record, indent=1) + "\n")


def _line(row: Row) -> str:
    """A row for the terminal, its seconds as milliseconds and rates."""
    seconds = row["seconds"]
    words = [f"{x}={y}" for x, y in row.items() if x not in _MEASURES]
    words.append(f"{1e3 * seconds:.3f} ms")
    if "floor" in row:
        words.append(f"{seconds / row['floor']:.2f} x floor")
    if "moved" in row:
        words.append(f"{row['moved'] / seconds / 1e12:.3f} TB/s")
    if "flops" in row:
        words.append(f"{row['flops'] / seconds / 1e12:.1f} TFLOP/s")
    if row.get("peak") is not None:
        words.append(f"{row['peak'] / 2**20:.0f} MiB")
    if row.get("host") is not None:
        words.append(f"host {1e6 * row['host']:.0f} us")
    return "  ".join(words)


_MEASURES = ("seconds", "floor", "moved", "flops", "peak", "host")


def main(words: Sequence[str] | None = None) -> None:
    """The program; its record names no folder of this machine."""
    given = [*(sys.argv[1:] if words is None else words)]
    asked = parser().parse_args(given)
    of_cpu = asked.case in ONE_THREAD
    if of_cpu:
        torch.set_num_threads(1)
    if asked.json:
        at = next(i for i, x in enumerate(given) if x.startswith("--json"))
        del given[at : at + 1 + ("=" not in given[at])]
    record: Record = {
        "command": f"{PROGRAM} {shlex.join(Path(x).name for x in given)}",
        **machine("cpu" if of_cpu else None),
        "dtype": str(torch.float32 if of_cpu else DTYPE)[6:],
    }
    if asked.case == "members" and asked.peer:
        record["peers"] = speed.peer_versions(asked.peer)
    if asked.case == "cpu":
        record["transformers"] = package_version("transformers")
        record["shapes"] = bench_cpu.CASES
    run(CASES[asked.case](asked), record, asked.json)


if __name__ == "__main__":
    main()
