"""Runs in a file, one line of JSON each, written as they end."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from fastweights.experiments.trial import Trial

Record = dict[str, Any]
"""What :func:`fastweights.experiments.run` returns."""


def read(file: Path) -> list[Record]:
    """The runs in it; none if it is not there.

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
            record["settings"]["experiment"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"out: got {file}, line {number} of which is no run of an "
                "experiment"
            ) from None
        found.append(record)
    return found


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


def finite(x: Any) -> Any:
    """The value as JSON can hold it: None for what is no finite number."""
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def last_byte(file: BinaryIO, end: int) -> bytes:
    """The byte before this place."""
    file.seek(end - 1)
    return file.read(1)


def matching(
    trials: Iterable[Trial], records: Iterable[Record]
) -> list[Record | None]:
    """Each trial's run, or None if there is none with its settings."""
    there = {_key(record["settings"]): record for record in records}
    return [there.get(_key(trial.settings())) for trial in trials]


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)
