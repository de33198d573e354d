"""The family on one map: what acts on the old state, by what is stored."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from fastweights_lab.notebook.plotting import (
    GRID,
    INK,
    KEY,
    QUERY,
    STATE,
    VALUE,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is stored: where its column begins, and how its title is set.
STORED = {
    "every token": (0.0, "every\ntoken"),
    "several matrices": (0.9, "several\nmatrices"),
    "one matrix": (2.0, "one\nmatrix"),
    "a network": (3.5, "a\nnetwork"),
}
WIDTH = 4.5
ACTS = {
    "nothing": "keep",
    "a number": "forget",
    "a turn": "forget and turn",
    "a diagonal": "forget by channel",
    "a reflection": "correct or swap",
    "both": "forget, then correct",
}

# Layer, its chapter, what acts on the old state, what is stored. A network is
# corrected where its loss looks at what it answers, as a squared error does;
# LaCT's does not, but its weights are brought back to their norms, by unit.
LAYERS = (
    ("softmax", 1, "nothing", "every token"),
    ("PaTH", 13, "a reflection", "every token"),
    ("log-linear", 13, "a number", "several matrices"),
    ("MesaNet", 12, "a number", "several matrices"),
    ("linear attention", 2, "nothing", "one matrix"),
    ("RetNet", 4, "a number", "one matrix"),
    ("Mamba-2", 4, "a number", "one matrix"),
    ("Mamba-3", 13, "a turn", "one matrix"),
    ("GLA", 5, "a diagonal", "one matrix"),
    ("DeltaNet", 7, "a reflection", "one matrix"),
    ("TTT-Linear", 12, "a reflection", "one matrix"),
    ("DeltaProduct", 13, "a reflection", "one matrix"),
    ("Gated DeltaNet", 9, "both", "one matrix"),
    ("KDA", 9, "both", "one matrix"),
    ("Comba", 13, "both", "one matrix"),
    ("Gated DeltaNet-2", 13, "both", "one matrix"),
    ("RWKV-7", 13, "both", "one matrix"),
    ("LaCT", 12, "a diagonal", "a network"),
    ("TTT-MLP", 12, "a reflection", "a network"),
    ("TTT-E2E", 13, "a reflection", "a network"),
    ("Titans", 12, "both", "a network"),
    ("Atlas", 13, "both", "a network"),
)


def colour_of(chapter: int) -> str:
    """Softmax and sums, decays, corrections, networks, what came after."""
    for last, colour in ((3, INK), (5, VALUE), (9, STATE), (12, QUERY)):
        if chapter <= last:
            return colour
    return KEY


def family_map() -> Figure:
    """Each layer a circle with its chapter's number."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(4.6, 6.5))
    edges = [left for left, _ in STORED.values()]
    bottom = 0.0
    for acts, does in ACTS.items():
        title, most = f"{acts}: {does}", 1
        ax.text(
            0.03, bottom + 0.55, title, size=9, va="center", style="italic"
        )
        for stored, (left, _) in STORED.items():
            here = [
                (name, chapter)
                for name, chapter, *cell in LAYERS
                if cell == [acts, stored]
            ]
            most = max(most, len(here))
            for place, (name, chapter) in enumerate(here):
                x, y = left + 0.14, bottom + place + 1.5
                colour = colour_of(chapter)
                ax.plot(x, y, "o", mec=colour, mfc="none", ms=13, mew=1.5)
                number = ax.text(x, y, str(chapter), size=8, color=colour)
                number.set(ha="center", va="center_baseline")
                ax.text(x + 0.14, y, name, size=9, va="center_baseline")
        top, bottom = bottom + 1, bottom + most + 1.2
        ax.vlines(edges[1:], top, bottom, color=GRID, lw=0.8)
        ax.axhline(bottom, color=GRID, lw=0.8)
    ax.axhline(0, color=GRID, lw=0.8)
    ax.set(xlim=(0, WIDTH), ylim=(bottom, 0), yticks=[])
    ax.set_xticks(
        [(x + y) / 2 for x, y in pairwise([*edges, WIDTH])],
        [shown for _, shown in STORED.values()],
    )
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    return fig


def map_in_words() -> str:
    """What :func:`family_map` shows, for those who cannot see it."""
    cells: dict[tuple[str, str], list[str]] = {}
    for name, chapter, acts, stored in LAYERS:
        cells.setdefault((stored, acts), []).append(f"{name} ({chapter})")
    return (
        "A map of layers, each with its chapter, by what is stored and what "
        "acts on the old state. "
        + ". ".join(
            f"{stored.capitalize()}, {acts}: {', '.join(names)}"
            for (stored, acts), names in cells.items()
        )
        + "."
    )
