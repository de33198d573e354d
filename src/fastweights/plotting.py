"""What chapters use to draw: one palette, figures that follow the theme.

A figure is drawn once and shown as inline SVG whose colours are CSS
variables (``var(--fw-q, #2f88c4)``). On the book's site they take the value
of the reader's theme; elsewhere the fallback, which reads on white and on
black, is used.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# One colour a symbol, everywhere in the book: text, equations, figures. The
# hues are Okabe and Ito's (safe for colour-blind readers), moved per theme
# until text in them has a contrast of 4.5:1; "any" reads on both.
PALETTE: dict[str, dict[str, str]] = {
    "q": {"light": "#0069a8", "dark": "#5cb8ee", "any": "#2f88c4"},
    "k": {"light": "#b84a00", "dark": "#ff9550", "any": "#d5652a"},
    "v": {"light": "#00795a", "dark": "#35cda0", "any": "#0f9671"},
    "S": {"light": "#9c3d78", "dark": "#e6a2cb", "any": "#bf6a9d"},
    "ink": {"light": "#4a4f57", "dark": "#c3c7ce", "any": "#7c8087"},
    "grid": {"light": "#d9dce1", "dark": "#3a3f47", "any": "#9a9ea6"},
}

Q, K, V, S, INK, GRID = (PALETTE[name]["any"] for name in PALETTE)

_VARIABLE = {PALETTE[name]["any"]: name.lower() for name in PALETTE}


def style() -> None:
    """Set matplotlib's defaults to the book's: quiet axes, our palette."""
    import matplotlib as mpl
    from cycler import cycler

    mpl.rcParams.update(
        {
            "axes.edgecolor": INK,
            "axes.grid": True,
            "axes.labelcolor": INK,
            "axes.prop_cycle": cycler(color=[Q, K, V, S, INK]),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlecolor": INK,
            "axes.titlesize": "medium",
            "figure.constrained_layout.use": True,
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "figure.figsize": (7.0, 3.4),
            "font.size": 10,
            "grid.color": GRID,
            "grid.linewidth": 0.6,
            "hatch.color": INK,
            "legend.frameon": False,
            "legend.labelcolor": INK,
            "lines.linewidth": 1.8,
            "svg.hashsalt": "fastweights",
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )


def to_svg(fig: Figure, alt: str) -> str:
    """The figure as one inline ``<svg>`` element that follows the theme.

    ``alt`` becomes its accessible name; it must say what the figure shows.
    """
    if not alt.strip():
        raise ValueError("alt: got an empty string, need a description")
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r" +$", "", svg[svg.index("<svg") :], flags=re.MULTILINE)
    for colour, name in _VARIABLE.items():
        svg = svg.replace(colour, f"var(--fw-{name}, {colour})")
    label = alt.replace("&", "&amp;").replace('"', "&quot;")
    label = label.replace("<", "&lt;")
    head = f'<svg class="fw-figure" role="img" aria-label="{label}" '
    size = re.search(r'width="([\d.]+)pt"', svg)
    width = float(size.group(1)) * 4 / 3 if size else 640
    svg = re.sub(r'width="[\d.]+pt"|height="[\d.]+pt"', "", svg, count=2)
    style = f'style="width: 100%; max-width: {width:.0f}px; height: auto" '
    return svg.replace("<svg ", head + style, 1)


def draw(fig: Figure, alt: str) -> None:
    """Show ``fig`` as inline SVG with the text alternative ``alt``.

    Outside IPython nothing is shown, and the figure is only closed.
    """
    import matplotlib.pyplot as plt

    svg = to_svg(fig, alt)
    plt.close(fig)
    show_html(svg)


def show_html(text: str) -> None:
    """Show ``text`` as a cell's HTML output; outside IPython nothing."""
    try:
        from IPython import get_ipython
        from IPython.display import HTML, display
    except ImportError:
        return
    if get_ipython() is not None:
        display(HTML(text))
