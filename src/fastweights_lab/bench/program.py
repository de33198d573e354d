"""What things cost: ``fastweights bench CASE [--json FILE]``.

members     every member, forward and backward, in multiples of the floor
            (fastweights_lab/bench/speed.py); --peer fla: beside its own
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
``fastweights_lab.records.load``.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from fastweights_lab.bench import (
    cpu,
    deep,
    growth,
    layer,
    speed,
    timing,
    trained,
)
from fastweights_lab.bench.timing import DTYPE, Row
from fastweights_lab.records import Record, machine, package_version

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
    "cpu": lambda asked: cpu.rows(asked.members, asked.cases, asked.seconds),
    "deep": lambda asked: deep.rows(asked.names, asked.ttt_video_dit),
    "layer": lambda _: layer.rows(),
    "trained": lambda _: trained.rows(),
    "growth": lambda asked: growth.rows(asked.names),
}
ONE_THREAD = ("cpu", "growth")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the cases, each with its options."""
    cases = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    about = {"members": speed, "cpu": cpu, "deep": deep, "layer": layer}
    about |= {"trained": trained, "growth": growth}
    option = {}
    for name in CASES:
        text = about[name].__doc__ if name in about else None
        case = cases.add_parser(name, description=text)
        case.add_argument("--json", type=Path, help="write the record here")
        option[name] = case.add_argument

    def several(
        case: str,
        name: str,
        of: Iterable[str],
        more: str = "; all by default",
        default: Iterable[str] | None = None,
    ) -> None:
        option[case](
            name,
            nargs="+",
            metavar="NAME",
            choices=of,
            default=[*(of if default is None else default)],
            help=f"of {', '.join(of)}{more}",
        )

    several("members", "--members", speed.MEMBERS)
    several(
        "members",
        "--shapes",
        [*speed.SHAPES, speed.DECODE],
        "; train, long and decode by default; without a GPU one small shape "
        "in place of all but decode",
        default=["train", "long", speed.DECODE],
    )
    several(
        "members",
        "--gates",
        speed.GATES,
        ": half forgotten in some 14 tokens, next to nothing (g = -1e-3), "
        "half at every step, as published layers start; all by default",
    )
    several("members", "--peer", speed.PEERS, "; timed beside", default=[])
    option["members"](
        "--no-first",
        action="store_true",
        help="leave out the first call, which compiles on an empty cache",
    )
    several("cpu", "--members", speed.MEMBERS)
    several("cpu", "--cases", cpu.CASES)
    option["cpu"](
        "--seconds", type=float, default=2.0, help="spent on each; 2 if left"
    )
    option["deep"](
        "names",
        nargs="*",
        metavar="NAME",
        choices=[[], *deep.CASES],
        help=f"of {', '.join(deep.CASES)}; all by default",
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


def kept(rows: Iterator[Row], record: Record, file: Path | None) -> None:
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


def run(asked: argparse.Namespace) -> None:
    """Run a case; its record names no folder of this machine."""
    of_cpu = asked.case in ONE_THREAD
    if of_cpu:
        torch.set_num_threads(1)
    given = asked.words
    if asked.json:
        at = next(i for i, x in enumerate(given) if x.startswith("--json"))
        del given[at : at + 1 + ("=" not in given[at])]
    record: Record = {
        "command": shlex.join(["fastweights", *(Path(x).name for x in given)]),
        **machine("cpu" if of_cpu else None),
        "dtype": str(torch.float32 if of_cpu else DTYPE)[6:],
    }
    if asked.case == "members" and asked.peer:
        record["peers"] = speed.peer_versions(asked.peer)
    if asked.case == "cpu":
        record["transformers"] = package_version("transformers")
        record["shapes"] = cpu.CASES
    kept(CASES[asked.case](asked), record, asked.json)
