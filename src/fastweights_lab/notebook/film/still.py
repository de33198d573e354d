"""Moments of a film side by side, for paper and where no script runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastweights_lab.notebook import plotting
from fastweights_lab.notebook.film.states import (
    doubles,
    lines,
    shares,
    states,
)

TALL = 0.35  # the bars' height, as a part of a panel's width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import PathPatch


def draw(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    alt: str,
    times: Sequence[int],
) -> str:
    """The film after the tokens `times`, side by side, as inline SVG.

    Each panel has the state with its key and value, and below them the bars.
    The other arguments are those of `page.to_html`, which has checked them.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    K, V = k.shape[1], v.shape[1]
    heights = shares(k, v, g, beta)
    marks = lines(k, g) if beta is None else None
    matrices = states(k, v, g, beta)
    k, v = doubles(k, v)
    full = float(matrices.abs().max()) or 1.0
    with mpl.rc_context():
        plotting.style()
        columns = min(4, len(times))
        rows = -(-len(times) // columns)
        bottom = K + 0.8 + TALL * (V + 1.8)  # of the bars, in cells
        height = 0.3 + 1.8 * (bottom + 2.8) / (V + 1.8)
        fig = Figure(figsize=(1.8 * columns, rows * height))
        panels = fig.subplots(rows, columns, squeeze=False).flatten()
        for ax in panels:
            ax.axis("off")
        for t, ax in zip(times, panels, strict=False):
            ax.set(
                aspect="equal", xlim=(-1.7, V + 0.1), ylim=(bottom + 1, -1.7)
            )
            ax.set_title(f"after token {t}", fontsize=9)
            letter = min(9, 130 / (V + 1.8))
            _cells(ax, matrices[t - 1] / full, 0, 0, plotting.STATE)
            key = k[t - 1, :, None] / (k.abs().max() or 1)
            _cells(ax, key, -1.5, 0, plotting.KEY)
            value = v[t - 1, None] / (v.abs().max() or 1)
            _cells(ax, value, 0, -1.5, plotting.VALUE)
            for x, y, text, colour in [
                (-1, -0.4, "k", plotting.KEY),
                (-0.5, -1, "v", plotting.VALUE),
            ]:
                ax.text(
                    x,
                    y,
                    f"$\\boldsymbol{{{text}}}$",
                    color=colour,
                    ha="center",
                    va="center",
                    fontsize=letter,
                )
            own = None if marks is None else marks[t - 1]
            _bars(ax, heights, t, own, (K + 0.8, bottom), V)
        return plotting.to_svg(fig, alt)


def told(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    times: Sequence[int],
) -> str:
    """The stills in words: which tokens they follow, and what is known then.

    A value counts as known if the answer to its key has more than half of
    it.
    """
    known = shares(k, v, g, beta) > 0.5
    rows = [(known[t - 1].nonzero()[:, 0] + 1).tolist() for t in times]
    several = "s" if len(times) > 1 else ""
    values = "; ".join(_listed(row) for row in rows)
    return (
        f"Still{several} after token{several} {_listed(times, runs=False)}. "
        f"Values of which the state then answers more than half: {values}."
    )


def _listed(numbers: Sequence[int], runs: bool = True) -> str:
    """[1, 2, 3, 5] as "1 to 3 and 5", or without runs as it stands."""
    words: list[str] = []
    for _, group in groupby(enumerate(numbers), lambda x: x[1] - x[0]):
        found = [str(n) for _, n in group]
        long = runs and len(found) > 2
        words += [f"{found[0]} to {found[-1]}"] if long else found
    if len(words) < 2:
        return words[0] if words else "none"
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _bars(
    ax: Axes,
    shares: Tensor,
    t: int,
    lines: Tensor | None,
    place: tuple[float, float],
    width: int,
) -> None:
    """The bars after token t, and the line across each, below the state."""
    top, bottom = place
    high = min(2.0, max(1.0, float(shares.max())))
    low = max(-1.0, min(0.0, float(shares.min())))

    def height(x: float) -> float:
        inside = min(high, max(low, x))
        return bottom - (bottom - top) * (inside - low) / (high - low)

    letter = min(7, 100 / (width + 1.8))
    for level in (0, 1):
        y = height(level)
        ax.plot([0, width], [y, y], ":", color=plotting.GRID, lw=0.8)
        ax.text(-0.2, y, str(level), ha="right", va="center", fontsize=letter)
    T = len(shares)
    step = width / T
    for j in range(t):
        share = float(shares[t - 1, j])
        negative = share < 0
        ax.fill_between(
            [(j + 0.14) * step, (j + 0.86) * step],
            height(0),
            height(share),
            color=plotting.INK if negative else plotting.VALUE,
            lw=0,
        )
        if lines is not None:
            y = height(float(lines[j]))
            across = [(j + 0.02) * step, (j + 0.98) * step]
            ax.plot(across, [y, y], color=plotting.INK, lw=1.2)
    for j in sorted({0, t - 1}):
        x = (j + 0.5) * step
        ax.text(
            x,
            bottom + 0.15,
            str(j + 1),
            ha="center",
            va="top",
            fontsize=letter,
        )


def _cells(ax: Axes, x: Tensor, left: float, top: float, colour: str) -> None:
    """The matrix x, in [-1, 1], as cells; negative ones have a minus cut.

    Their opacity is the root of |x|; those that are as strong, to a
    twentieth, are one path.
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    rows, columns = x.shape
    right, bottom = left + columns, top + rows
    ends = [[(left + j, top), (left + j, bottom)] for j in range(columns + 1)]
    ends += [[(left, top + i), (right, top + i)] for i in range(rows + 1)]
    lines = Path(
        [point for pair in ends for point in pair],
        [Path.MOVETO, Path.LINETO] * len(ends),
    )
    style = {"facecolor": "none", "edgecolor": plotting.GRID, "lw": 0.5}
    ax.add_patch(PathPatch(lines, clip_on=False, **style))
    strengths = (20 * x.sign() * x.abs().sqrt()).round().int()
    for strength in sorted(set(strengths.flatten().tolist()) - {0}):
        cells = (strengths == strength).nonzero().tolist()
        corners = [(left + j, top + i) for i, j in cells]
        negative = strength < 0
        ax.add_patch(
            _squares(
                corners,
                cut=negative,
                clip_on=False,
                facecolor=plotting.INK if negative else colour,
                alpha=min(1.0, abs(strength) / 20),
                lw=0,
            )
        )


def _squares(
    corners: list[tuple[float, float]], *, cut: bool, **style: Any
) -> PathPatch:
    """One path: a unit square at each corner, or one with a minus cut out."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    square = [(0.06, 0.06), (0.94, 0.06), (0.94, 0.94), (0.06, 0.94)]
    minus = [(0.25, 0.4), (0.25, 0.6), (0.75, 0.6), (0.75, 0.4)]
    shapes = [square, minus] if cut else [square]
    points = [
        (left + x, top + y)
        for left, top in corners
        for shape in shapes
        for x, y in [*shape, shape[0]]
    ]
    codes = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY]
    count = len(corners) * len(shapes)
    return PathPatch(Path(points, codes * count), **style)
