"""Moments of a film side by side, for paper and where no script runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastweights import plotting
from fastweights.film.states import states

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import PathPatch


def draw(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    alt: str,
    moments: int | Sequence[int],
) -> str:
    """Moments of the film as inline SVG: so many, or after given tokens.

    The arguments are those of `page.to_html`, which has checked them.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    T, K = k.shape
    V = v.shape[1]
    matrices = states(k, v, g, beta)
    k, v = k.detach().double().cpu(), v.detach().double().cpu()
    full = float(matrices.abs().max()) or 1.0
    if isinstance(moments, int):
        at = torch.linspace(T / moments, T, moments).round().long().clamp(1)
        moments = at.tolist()
    times = sorted(set(moments))
    with mpl.rc_context():
        plotting.style()
        columns = min(4, len(times))
        rows = -(-len(times) // columns)
        height = 0.3 + 1.8 * (K + 1.8) / (V + 1.8)
        fig = Figure(figsize=(1.8 * columns, rows * height))
        panels = fig.subplots(rows, columns, squeeze=False).flatten()
        for ax in panels:
            ax.axis("off")
        for t, ax in zip(times, panels, strict=False):
            ax.set(aspect="equal", xlim=(-1.7, V + 0.1), ylim=(K + 0.1, -1.7))
            ax.set_title(f"after token {t}", fontsize=9)
            letter = min(9, 130 / (V + 1.8))
            _cells(ax, matrices[t - 1] / full, 0, 0, plotting.S)
            key = k[t - 1, :, None] / (k.abs().max() or 1)
            _cells(ax, key, -1.5, 0, plotting.K)
            value = v[t - 1, None] / (v.abs().max() or 1)
            _cells(ax, value, 0, -1.5, plotting.V)
            for x, y, text, colour in [
                (-1, -0.4, "k", plotting.K),
                (-0.5, -1, "v", plotting.V),
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
        return plotting.to_svg(fig, alt)


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
