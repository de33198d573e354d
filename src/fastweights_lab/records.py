"""Records of runs: what ships with the laboratory, and files of one's own.

    rows = load("h200_members")["rows"]  # a bench's record, one of data/
    append(file, run)                    # one line of JSON, on the disk
    [run] = read(file)

A bench's record is one JSON object, with a row for each time. Runs of
experiments and of language models are lines of JSON, added as they end: a
program that was stopped goes on from there.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

import torch

import fastweights as fw

Record = dict[str, Any]


def load(name: str) -> dict[str, Any]:
    """A record that ships with the laboratory, by its file's name."""
    return json.loads((shipped() / f"{name}.json").read_text("utf-8"))


def shipped() -> Path:
    """The folder of the records that ship with the laboratory."""
    return Path(str(resources.files("fastweights_lab") / "data"))


def timed_rows(record: Record, shape: str) -> list[Record]:
    """The members' rows of a shape, with the gates that forget least.

    ``record`` is of the bench's case ``members``, as :func:`load` returns it.

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


def read(file: Path) -> list[Record]:
    """The runs in a file of JSON lines; none if it is not there.

    A last line without an end was being written when the program was killed,
    and is left out.

    Raises:
        ValueError: a line is no run.
    """
    if not file.is_file():
        return []
    *lines, _ = file.read_text("utf-8").split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record["settings"] = with_new_names(record["settings"])
            record["settings"]["seed"]
        except (AttributeError, ValueError, KeyError, TypeError):
            raise ValueError(
                f"out: got {file}, line {number} of which is no run"
            ) from None
        found.append(record)
    return found


NEW_NAMES = {
    "checkpoint": "recompute",
    "sequence_parallel": "context_parallel",
    "vocabulary": "vocab_size",
}


def with_new_names(settings: Record) -> Record:
    """A saved run's settings, by the names that they have now."""
    return {NEW_NAMES.get(name, name): x for name, x in settings.items()}


def append(file: Path, record: Record) -> None:
    """Add a run. It is on the disk when this returns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as out:
        whole = out.seek(0, os.SEEK_END)
        while whole and last_byte(out, whole) != b"\n":
            whole -= 1  # of a line that was cut off as it was written
        out.truncate(whole)
        out.write(json.dumps(finite(record)).encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())


def last_byte(file: BinaryIO, end: int) -> bytes:
    """The byte before this place."""
    file.seek(end - 1)
    return file.read(1)


def finite(x: Any) -> Any:
    """The value as JSON can hold it: None for what is no finite number."""
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def matching(
    wanted: Iterable[Record], records: Iterable[Record]
) -> list[Record | None]:
    """The run with each of these settings, or None if there is none."""
    there = {_key(record["settings"]): record for record in records}
    return [there.get(_key(settings)) for settings in wanted]


def _key(settings: Record) -> str:
    """Settings as text: equal for one run, read from a file or not."""
    return json.dumps(finite(settings), sort_keys=True)


def machine(device: torch.device | str | None = None) -> Record:
    """The device, the versions, the commit and the day that a record names.

    Without a ``device``, the GPU if there is one.
    """
    on_gpu = torch.cuda.is_available()
    on = torch.device(device or ("cuda" if on_gpu else "cpu"))
    name = torch.cuda.get_device_name(on) if on.type == "cuda" else processor()
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "fastweights": fw.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def processor() -> str:
    """The processor's name, as Linux has it; elsewhere its architecture."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [x.split(":")[1].strip() for x in lines if "model name" in x]
    return names[0] if names else platform.machine()


def package_version(package: str) -> str | None:
    """An installed package's version; None if it is not installed as one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
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
