"""The recorded runs that ship with the laboratory, in one small file.

    runs = recorded("overwriting")
    print(summary(runs))

``fastweights experiments --record FILE --out FOLDER`` writes the
file from a folder of runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastweights.models.files import write_whole
from fastweights_lab.records import Record, load


def recorded(experiment: str) -> list[Record]:
    """An experiment's recorded runs, as :func:`run` returned them.

    But for this: accuracies have four decimals, seconds one.

    Raises:
        ValueError: there are none of this experiment.
    """
    there = load("recall")
    if experiment not in there:
        raise ValueError(
            f"experiment: got {experiment!r}, need one of {', '.join(there)}"
        )
    return unpack(there[experiment])


def pack(records: Sequence[Record]) -> dict[str, Any]:
    """Runs of one experiment, with what they have in common said once."""
    short = [_short(record) for record in records]
    settings = [record.pop("settings") for record in short]
    same, rest = _common(short)
    same_settings, rest_settings = _common(settings)
    runs = [
        {"settings": of, **record}
        for of, record in zip(rest_settings, rest, strict=True)
    ]
    return {"settings": same_settings, "all": same, "runs": runs}


def unpack(found: Mapping[str, Any]) -> list[Record]:
    """The runs that were packed."""
    return [
        {
            **found["all"],
            **run,
            "settings": {**found["settings"], **run["settings"]},
        }
        for run in found["runs"]
    ]


def write(file: Path, experiments: Mapping[str, Sequence[Record]]) -> None:
    """Every experiment's runs, a line of JSON for each, in one step."""
    parts = []
    for name, records in experiments.items():
        found = pack(records)
        lines = ",\n".join(json.dumps(run) for run in found.pop("runs"))
        head = json.dumps(found)[:-1]
        parts.append(f'{json.dumps(name)}: {head}, "runs": [\n{lines}\n]}}')
    text = "{\n" + ",\n".join(parts) + "\n}\n"
    write_whole(file, lambda beside: beside.write_text(text, "utf-8"))


def _common(
    records: Sequence[Record],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What all of them have, and what each has besides."""
    first = records[0]
    same = {
        key: value
        for key, value in first.items()
        if all(record.get(key) == value for record in records)
    }
    rest = [
        {key: value for key, value in record.items() if key not in same}
        for record in records
    ]
    return same, rest


def _short(record: Record) -> Record:
    return {
        **record,
        "accuracy": {
            test: {kind: round(share, 4) for kind, share in kinds.items()}
            for test, kinds in record["accuracy"].items()
        },
        "validation": round(record["validation"], 4),
        "seconds": round(record["seconds"], 1),
    }
