"""What things cost: ``fastweights bench CASE [--json FILE]``.

members     every member, forward and backward, in multiples of the floor
            (fastweights_lab/bench/speed.py); --peer fla: beside its own
ceilings    the rates of this machine: a copy, and a matrix product
crossover   forward of softmax and of linear attention, by sequence length
chunks      forward of linear attention and of the delta rule, by chunk size
decode      one more token: softmax over its cache, linear over its state
deep        networks as fast weights
layer       where the time of a Gated DeltaNet layer goes
lesson      DeltaNet's forward in the six versions of chapter 15
trained     the operators on what trained models give them; --peer fla:
            beside its own
gates       where in a text the heads of a trained model forget
continued   what the four models of chapter 10's square write
calls       what happens at an empty line in chapter 10's third race, and
            the answers if it does not
generate    a token of a language model, and the first one
speculate   a token where drafts are looked up, on source code
serve       requests that come and go, beside a full batch
growth      each size doubled by itself, beside the plainest program

On a CUDA device in bf16 and at the sizes of a real layer; on a CPU in fp32
and small. ``CASE --help`` says more. The book's recorded runs are read with
``fastweights_lab.records.load``.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fastweights_lab.bench import (
    calls,
    continued,
    deep,
    gates,
    generate,
    growth,
    layer,
    lesson,
    nvidia_kda,
    serve,
    speculate,
    speed,
    timing,
    trained,
)
from fastweights_lab.bench.timing import DTYPE, Row
from fastweights_lab.records import Record, machine

CASES: dict[str, tuple[Callable[..., Iterator[Row]], str | None]] = {
    "members": (speed.members, speed.__doc__),
    "ceilings": (timing.ceilings, None),
    "crossover": (speed.crossover, None),
    "chunks": (speed.chunks, None),
    "decode": (speed.decode, None),
    "deep": (deep.rows, deep.__doc__),
    "layer": (layer.rows, layer.__doc__),
    "lesson": (lesson.rows, lesson.__doc__),
    "trained": (trained.rows, trained.__doc__),
    "gates": (gates.rows, gates.__doc__),
    "continued": (continued.rows, continued.__doc__),
    "calls": (calls.rows, calls.__doc__),
    "generate": (generate.rows, generate.__doc__),
    "speculate": (speculate.rows, speculate.__doc__),
    "serve": (serve.rows, serve.__doc__),
    "growth": (growth.rows, growth.__doc__),
}
"""By name: what yields a case's rows, given its options, and says of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the cases, each with its options."""
    cases = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    add = {}
    for name, (_, about) in CASES.items():
        add[name] = cases.add_parser(name, description=about).add_argument
        add[name]("--json", type=Path, help="write the record here")

    shapes, usual = [*speed.SHAPES, speed.DECODE], ["train", "long", "decode"]
    for option, of, default, more in (
        ("--members", [*speed.MEMBERS], [*speed.MEMBERS], "; all by default"),
        (
            "--shapes",
            shapes,
            usual,
            f"; {', '.join(usual)} by default; without a GPU one small shape "
            "in place of all but decode",
        ),
        (
            "--gates",
            [*speed.GATES, *speed.SIGMOIDS],
            [*speed.GATES],
            ": half forgotten in some 14 tokens, next to nothing (g = -1e-3), "
            "half at every step, as published layers start; all of these by "
            "default; -5 sigmoid of N(0, 1) and of 2 N(0, 1) - 5",
        ),
        ("--peer", [*speed.PEERS], [], "; timed beside"),
    ):
        for case in ("members", "trained")[: 1 + (option == "--peer")]:
            add[case](
                option,
                nargs="+",
                metavar="NAME",
                choices=of,
                default=default,
                help=f"of {', '.join(of)}{more}",
            )
    for case in ("members", "trained"):
        add[case](
            "--peer-path",
            type=Path,
            metavar="FOLDER",
            help=f"where the peer nvidia has {' and '.join(nvidia_kda.FILES)}",
        )
    add["members"](
        "--no-first",
        action="store_true",
        help="leave out the first call, which compiles on an empty cache",
    )
    add["speculate"](
        "--steps",
        type=int,
        default=speculate.STEPS,
        help=f"of training; {speculate.STEPS} by default",
    )
    add["calls"](
        "--seeds", type=int, nargs="+", default=[], help="all five by default"
    )
    for case, of in (
        ("calls", [*calls.HINDERED]),
        ("deep", [*deep.CASES]),
        ("generate", [*generate.PATTERNS]),
        ("serve", [*generate.PATTERNS]),
        ("growth", [*growth.CASES]),
    ):
        add[case](
            "names",
            nargs="*",
            metavar="NAME",
            choices=[[], *of],
            help=f"of {', '.join(of)}; all by default",
        )


def run(args: argparse.Namespace) -> None:
    """Run a case: each row, as it comes, to the terminal and the record.

    The record names no folder of this machine.
    """
    on_cpu = args.case == "growth"
    if on_cpu:
        torch.set_num_threads(1)
    given = args.words
    if args.json:
        at = next(i for i, x in enumerate(given) if x.startswith("--json"))
        del given[at : at + 1 + ("=" not in given[at])]
    record: Record = {
        "command": shlex.join(["fastweights", *(Path(x).name for x in given)]),
        **machine("cpu" if on_cpu else None),
        "dtype": str(torch.float32 if on_cpu else DTYPE)[6:],
    }
    if getattr(args, "peer", None):
        record["peers"] = speed.peer_versions(args.peer)
    record["rows"] = []
    rows, _ = CASES[args.case]
    ours = ("command", "words", "run", "case", "json")
    options = {k: x for k, x in vars(args).items() if k not in ours}
    for row in rows(**options):
        print(_line(row), flush=True)
        record["rows"].append(row)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")


def _line(row: Row) -> str:
    """A row for the terminal, its seconds as milliseconds and rates."""
    words = [f"{x}={y}" for x, y in row.items() if x not in _MEASURES]
    if "seconds" not in row:
        return "  ".join(words)
    seconds = row["seconds"]
    words.append(f"{1e3 * seconds:.3f} ms")
    if "floor" in row:
        words.append(f"{seconds / row['floor']:.2f} x floor")
    if "moved" in row:
        words.append(f"{row['moved'] / seconds / 1e12:.3f} TB/s")
    if "flops" in row:
        words.append(f"{row['flops'] / seconds / 1e12:.1f} TFLOP/s")
    if "first" in row:
        words.append(f"first {1e3 * row['first']:.1f} ms")
    if row.get("host") is not None:
        words.append(f"host {1e6 * row['host']:.0f} us")
    return "  ".join(words)


_MEASURES = ("seconds", "floor", "moved", "flops", "first", "host")
