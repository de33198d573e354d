"""What an experiment found, as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import mean

from fastweights_lab.records import Record

Place = tuple[str, int, int]


def best(records: Iterable[Record]) -> dict[Place, list[Record]]:
    """The runs with the best learning rate, for each variant and size.

    By variant, heads and size of a head; a run per seed, by seed. The best
    rate has the highest mean over its seeds of ``validation``, of those
    rates that were run with the most seeds: tests play no part in it.
    """
    found = {}
    for place, by_lr in _by_rate(records).items():
        chosen = max(by_lr.values(), key=_merit)
        found[place] = sorted(chosen, key=lambda r: r["settings"]["seed"])
    return found


def at_edge(records: Iterable[Record]) -> dict[Place, float]:
    """Where the lowest or the highest of several learning rates is best.

    By variant, heads and size: that rate. One beyond it might have been
    better still. Not where another of the rates did as well.
    """
    found = {}
    for place, by_lr in _by_rate(records).items():
        merits = {lr: _merit(runs) for lr, runs in by_lr.items()}
        highest = max(merits.values())
        winners = [lr for lr, x in merits.items() if x == highest]
        if len(merits) > 1 and winners in ([min(merits)], [max(merits)]):
            found[place] = winners[0]
    return found


def _by_rate(
    records: Iterable[Record],
) -> dict[Place, dict[float, list[Record]]]:
    runs: dict[Place, dict[float, list[Record]]] = defaultdict(dict)
    for record in records:
        of = record["settings"]
        place = (of["variant"], of["num_heads"], of["head_dim"])
        runs[place].setdefault(of["lr"], []).append(record)
    return runs


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
