"""What an experiment found, as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import mean

from fastweights.experiments.records import Record

Place = tuple[str, int, int]


def best(records: Iterable[Record]) -> dict[Place, list[Record]]:
    """Of each variant and size the runs with its best learning rate.

    By variant, heads and size of a head; a run per seed, by seed. The best
    rate has the highest mean over its seeds of ``validation``, of those
    rates that were run with the most seeds: tests play no part in it.
    """
    runs: dict[Place, dict[float, list[Record]]] = defaultdict(dict)
    for record in records:
        of = record["settings"]
        place = (of["variant"], of["num_heads"], of["head_dim"])
        runs[place].setdefault(of["lr"], []).append(record)
    found = {}
    for place, by_lr in runs.items():
        chosen = max(by_lr.values(), key=_merit)
        found[place] = sorted(chosen, key=lambda r: r["settings"]["seed"])
    return found


def _merit(runs: list[Record]) -> tuple[int, float]:
    return len(runs), mean(run["validation"] for run in runs)


def summary(records: Iterable[Record]) -> str:
    """A block per test: mean accuracy, and that of every seed beside it."""
    chosen = best(records)
    if not chosen:
        return "no runs yet"
    first = next(iter(chosen.values()))[0]
    width = max(len(name) for name, _, _ in chosen)
    sizes = {place[1:] for place in chosen}
    out = []
    for test, kinds in first["accuracy"].items():
        of = first["settings"]["tests"][test]
        chance = first["chance"][test]
        out.append(f"{test}: {of['task']}, chance {chance:.3f}")
        for (name, heads, size), runs in chosen.items():
            cells = [
                _cell(kind, [run["accuracy"][test][kind] for run in runs])
                for kind in kinds
            ]
            what = f"{heads} x {size}  " if len(sizes) > 1 else ""
            rate = f"lr {runs[0]['settings']['lr']:g}"
            line = "   ".join(cells)
            out.append(f"  {name:{width}}  {what}{rate:9}  {line}")
    return "\n".join(out)


def _cell(kind: str, shares: list[float]) -> str:
    each = " ".join(f"{x:.3f}" for x in shares)
    return f"{kind} {mean(shares):.3f} ({each})"
