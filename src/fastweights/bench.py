"""What things cost: ``python -m fastweights.bench [CASE] [--json FILE]``.

members     every member, forward and backward, in multiples of the floor
            (:mod:`fastweights.speed`); with --peer fla beside its own
ceilings    the rates of this machine: a copy, and a matrix product
crossover   forward of softmax and of linear attention, by sequence length
chunks      forward of linear attention and of the delta rule, by chunk size
decode      one more token: softmax over its cache, linear over its state

On a CUDA device in bf16 and at the sizes of a real layer; on a CPU in fp32
and small. The book's recorded runs are read with :func:`load`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastweights as fw
from fastweights import speed
from fastweights.timing import (
    DEVICE,
    DTYPE,
    ON_GPU,
    Row,
    ceilings,
    package_version,
    timeit,
)


def load(name: str) -> dict[str, Any]:
    """A recorded run that ships with the library, by its file's name."""
    file = resources.files("fastweights") / "data" / f"{name}.json"
    return json.loads(file.read_text())


def timed_rows(record: dict[str, Any], shape: str) -> list[Row]:
    """The members' rows of a shape, with the gates that forget least.

    ``record`` is of the case ``members``, as :func:`load` returns it.

    Raises:
        ValueError: there is no such shape in it.
    """
    found = [row for row in record["rows"] if "gate" in row]
    rows = [row for row in found if row["shape"] == shape]
    if not rows:
        shapes = sorted({row["shape"] for row in found})
        raise ValueError(f"shape: got {shape!r}, need one of {shapes}")
    kept = {row["member"] for row in rows if row["gate"] == "kept"}
    return [r for r in rows if r["gate"] == "kept" or r["member"] not in kept]


def crossover() -> Iterator[Row]:
    """Forward time by sequence length T, at a constant B T.

    Every T then does the same linear work on a full GPU: linear attention
    is a level line, and softmax attention climbs through it.
    """
    H = 16 if ON_GPU else 2
    tokens = 65536 if ON_GPU else 8192
    lengths = range(8, 17) if ON_GPU else range(9, 14)
    for D in (64, 128) if ON_GPU else (64,):
        for T in (2**i for i in lengths):
            B = tokens // T
            shape = {"B": B, "T": T, "H": H, "D": D}
            yield from _timed(_forms(*_inputs(**shape)), shape)


def _inputs(B: int, T: int, H: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, unit k and v, drawn at random."""
    q, k, v = (
        torch.randn(B, T, H, D, device=DEVICE, dtype=DTYPE) for _ in "qkv"
    )
    return q, F.normalize(k, dim=-1), v


def _timed(forms: dict[str, Callable], shape: Row) -> Iterator[Row]:
    for form, fn in forms.items():
        seconds = timeit(fn, repeats=20 if ON_GPU else 3)
        yield {"form": form, **shape, "seconds": seconds}


def _forms(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int = 64
) -> dict[str, Callable]:
    """Causal attention in each form; the kernels only where they compile."""
    q_h, k_h, v_h = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    forms: dict[str, Callable] = {
        "softmax": lambda: F.scaled_dot_product_attention(
            q_h, k_h, v_h, is_causal=True
        ),
        "chunkwise": lambda: fw.linear_attention(
            q, k, v, backend="chunkwise", chunk_size=chunk_size
        ),
    }
    if ON_GPU:
        from fastweights.kernels.linear import scan
        from fastweights.kernels.prefix import parallel_scan

        for fn in (scan, parallel_scan):
            forms[fn.__name__] = functools.partial(
                fn, q, k, v, scale=scale, chunk_size=chunk_size
            )
    return forms


def chunks() -> Iterator[Row]:
    """Forward time by tokens per chunk, the GPU filled by B H sequences."""
    B, T, H = (8, 8192, 16) if ON_GPU else (1, 2048, 2)
    for D in (64, 128) if ON_GPU else (64,):
        q, k, v = _inputs(B, T, H, D)
        beta = torch.rand(B, T, H, device=DEVICE).to(DTYPE)
        for C in (16, 32, 64):
            forms = _forms(q, k, v, C)
            del forms["softmax"]
            forms["deltanet"] = functools.partial(
                fw.deltanet, q, k, v, beta, chunk_size=C
            )
            yield from _timed(forms, {"B": B, "T": T, "H": H, "D": D, "C": C})


def decode() -> Iterator[Row]:
    """Time of one new token after n, and the bytes kept for it."""
    B, H, D = (64, 16, 128) if ON_GPU else (4, 2, 64)
    lengths = [2**i for i in range(8, 17 if ON_GPU else 13)]
    shape = {"B": B, "H": H, "D": D}
    q, k, v = (
        torch.randn(B, H, 1, D, device=DEVICE, dtype=DTYPE) for _ in "qkv"
    )
    state = torch.zeros(B, H, D, D, device=DEVICE)

    def step() -> Tensor:
        state.addcmul_(k.mT.float(), v.float())
        return (q.float() @ state).to(DTYPE)

    kept = state.numel() * state.element_size()
    seconds = timeit(step)
    yield {"form": "linear", **shape, "kept": kept, "seconds": seconds}
    for n in lengths:
        keys, values = (
            torch.randn(B, H, n, D, device=DEVICE, dtype=DTYPE) for _ in "kv"
        )

        def attend(keys: Tensor = keys, values: Tensor = values) -> Tensor:
            keys[:, :, -1:], values[:, :, -1:] = k, v
            return F.scaled_dot_product_attention(q, keys, values)

        kept = 2 * keys.numel() * keys.element_size()
        row = {"form": "softmax", **shape, "n": n, "kept": kept}
        yield row | {"seconds": timeit(attend)}


CASES = {
    "ceilings": ceilings,
    "crossover": crossover,
    "chunks": chunks,
    "decode": decode,
}


def environment() -> dict[str, str | None]:
    """The machine, the versions and the day that a recorded run names."""
    name = torch.cuda.get_device_name() if ON_GPU else platform.machine()
    return {
        "device": name,
        "dtype": str(DTYPE).removeprefix("torch."),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "fastweights": fw.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _commit() -> str | None:
    """The git commit of the library's checkout, if it is one.

    A copy without its history can be told by FASTWEIGHTS_COMMIT.
    """
    if told := os.environ.get("FASTWEIGHTS_COMMIT"):
        return told
    command = ["git", "rev-parse", "HEAD"]
    try:
        run = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def run(
    case: Callable[[], Iterator[Row]],
    arguments: str,
    file: Path | None,
    program: str = "bench",
    **known: Any,
) -> list[Row]:
    """Run a case: each row, as it comes, to the terminal and the record.

    ``known`` is what the record says besides, of peers for instance.
    """
    command = f"python -m fastweights.{program} {arguments}".strip()
    record: dict[str, Any] = {"command": command, **environment(), **known}
    record["rows"] = []
    for row in case():
        print(_line(row), flush=True)
        record["rows"].append(row)
        if file:
            file.write_text(json.dumps(record, indent=1) + "\n")
    return record["rows"]


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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fastweights.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument(
        "case",
        nargs="?",
        default="members",
        choices=["members", *CASES],
    )
    parser.add_argument("--json", type=Path, help="write the record here")
    group = parser.add_argument_group("members")
    group.add_argument(
        "--members",
        choices=speed.MEMBERS,
        default=[*speed.MEMBERS],
        help=f"of {', '.join(speed.MEMBERS)}; all by default",
        **several,
    )
    group.add_argument(
        "--shapes",
        choices=[*speed.SHAPES, speed.DECODE],
        default=["train", "long", speed.DECODE],
        help=f"of {', '.join(speed.SHAPES)} and {speed.DECODE}; "
        "train, long and decode by default; without a GPU one small shape "
        "in place of all but decode",
        **several,
    )
    group.add_argument(
        "--gates",
        choices=speed.GATES,
        default=[*speed.GATES],
        help="mild, kept (g = -1e-3: nothing may be skipped), strong (half "
        "forgotten at every step), model (as published layers start); all "
        "by default",
        **several,
    )
    group.add_argument(
        "--peer",
        choices=speed.PEERS,
        default=[],
        help=f"time these beside, of {', '.join(speed.PEERS)}",
        **several,
    )
    group.add_argument(
        "--no-first",
        action="store_true",
        help="leave out the first call, which compiles on an empty cache",
    )
    arguments = parser.parse_args()
    case = CASES.get(
        arguments.case,
        functools.partial(
            speed.members,
            arguments.members,
            arguments.shapes,
            arguments.gates,
            peers=arguments.peer,
            first=not arguments.no_first,
        ),
    )
    given = [x for x in sys.argv[1:] if not x.startswith("--json=")]
    if "--json" in given:
        at = given.index("--json")
        del given[at : at + 2]
    known: dict[str, Any] = {}
    if arguments.peer:
        known["peers"] = speed.peer_versions(arguments.peer)
    run(case, shlex.join(given), arguments.json, **known)


if __name__ == "__main__":
    main()
