"""What chapters use to draw: one palette, figures that follow the theme.

A figure is drawn once and shown as inline SVG whose colours are CSS
variables (``var(--fw-q, #2f88c4)``). On the book's site they take the value
of the reader's theme; elsewhere the fallback, which reads on white and on
black, is used.
"""

from __future__ import annotations

import hashlib
import io
import re
from typing import TYPE_CHECKING, Any

from fastweights.checks import notebook
from fastweights_lab.records import timed_rows

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

QUERY, KEY, VALUE, STATE, INK, GRID = (
    PALETTE[name]["any"] for name in PALETTE
)

_VARIABLE = {PALETTE[name]["any"]: name.lower() for name in PALETTE}


def style() -> None:
    """Set matplotlib's settings to the book's: quiet axes, our palette.

    What a matplotlibrc sets, but for the backend, is put back to
    matplotlib's own defaults first.
    """
    import matplotlib as mpl
    from cycler import cycler

    mpl.rcdefaults()
    mpl.rcParams.update(
        {
            "axes.edgecolor": INK,
            "axes.grid": True,
            "axes.labelcolor": INK,
            "axes.prop_cycle": cycler(color=[QUERY, KEY, VALUE, STATE, INK]),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlecolor": INK,
            "axes.titlesize": "medium",
            "figure.constrained_layout.use": True,
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "figure.figsize": (5.4, 3.4),  # on a phone it shrinks by a third
            "font.size": 10,
            "grid.color": GRID,
            "grid.linewidth": 0.6,
            "hatch.color": INK,
            "legend.frameon": False,
            "legend.labelcolor": INK,
            "lines.linewidth": 1.8,
            "svg.fonttype": "none",
            "svg.hashsalt": "fastweights",
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )


def to_svg(fig: Figure, alt: str) -> str:
    """The figure as one inline ``<svg>`` element that follows the theme.

    ``alt`` becomes its accessible name; it must say what the figure shows.
    Ids begin with a name made from the content, so that no two figures of a
    page share one.
    """
    if not alt.strip():
        raise ValueError("alt: got an empty string, need a description")
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, name in _VARIABLE.items():
        svg = svg.replace(colour, f"var(--fw-{name}, {colour})")
    name = f"f{hashlib.sha256((alt + svg).encode()).hexdigest()[:7]}"
    svg = shortened(svg, name)
    label = alt.replace("&", "&amp;").replace('"', "&quot;")
    label = label.replace("<", "&lt;")
    head = f'<svg class="fw-figure" role="img" aria-label="{label}" '
    if len(columns := panels(fig)) > 1:
        head += f'data-panels="{columns}" '
    size = re.search(r'width="([\d.]+)pt"', svg)
    width = float(size.group(1)) * 4 / 3 if size else 640
    svg = re.sub(r'width="[\d.]+pt"|height="[\d.]+pt"', "", svg, count=2)
    style = (
        f'style="width: 100%; max-width: {width:.0f}px; height: auto; '
        "font-family: 'DejaVu Sans', Verdana, sans-serif\" "
    )
    return svg.replace("<svg ", head + style, 1)


def panels(fig: Figure) -> list[list[int]]:
    """Where columns of panels begin and end, in points, of a drawn figure.

    On a phone they stand below each other, unless they share something: a
    legend, or the labels of an axis. Then there are none.
    """
    ticked = [ax for ax in fig.axes if ax.axison and len(ax.get_yticks())]
    named = {
        any(x.get_visible() and x.get_text() for x in ax.get_yticklabels())
        for ax in ticked
    }
    if fig.legends or fig.texts or len(named) > 1:
        return []
    columns: list[list[int]] = []
    for ax in fig.axes:
        if (box := ax.get_tightbbox()) is None:
            continue
        start, end = (int(72 * x / fig.dpi) for x in (box.x0, box.x1 + 1))
        for column in columns:
            if start < column[1] and column[0] < end:
                column[:] = min(start, column[0]), max(end, column[1])
                break
        else:
            columns.append([start, end])
    return columns


def shortened(svg: str, name: str) -> str:
    """The same picture in a third of the bytes; ids begin with ``name``.

    Only what is referred to keeps an id, styles are classes, and coordinates
    have five digits.
    """
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r' transform="rotate\(-0 .*?\)"', "", svg)
    svg = re.sub(
        r"<[^>]+>",
        lambda tag: re.sub(
            r"\d+\.\d{2,}", lambda x: f"{float(x[0]):.5g}", tag[0]
        ),
        svg,
    )
    used = dict.fromkeys(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    short = {long: f"{name}-{n}" for n, long in enumerate(used)}
    svg = re.sub(
        r' id="(.*?)"',
        lambda x: f' id="{short[x[1]]}"' if x[1] in short else "",
        svg,
    )
    svg = re.sub(
        r'(href="|url\()#([^")]+)', lambda x: f"{x[1]}#{short[x[2]]}", svg
    )
    styles = dict.fromkeys(re.findall(r' style="(.*?)"', svg))
    classes = {style: f"{name}{n}" for n, style in enumerate(styles)}
    svg = re.sub(r' style="(.*?)"', lambda x: f' class="{classes[x[1]]}"', svg)
    rules = "".join(f".{c}{{{style}}}" for style, c in classes.items())
    rules = re.sub(r"font-family: 'DejaVu Sans'[^;}]*(; )?", "", rules)
    svg = re.sub(r'\s*\n\s*(?=[<"zMLCQ])|(?<=>)\s*\n\s*', "", svg)
    while (fewer := re.sub(r"<g>([^g]*?)</g>|<g/>", r"\1", svg)) != svg:
        svg = fewer
    return svg.replace("<style", f"<style>{rules}</style><style", 1)


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
    if notebook() is not None:
        from IPython.display import HTML, display

        display(HTML(text))


def against_floor(record: dict[str, Any], shape: str = "train") -> Figure:
    """Each member's time in multiples of the floor, beside its peer's.

    ``record`` is one of :func:`fastweights_lab.records.load`'s, of the case
    ``members``: forward on the left, forward with backward on the right,
    where nothing is forgotten.
    """
    import matplotlib.pyplot as plt

    rows = timed_rows(record, shape)
    members = list(dict.fromkeys(row["member"] for row in rows))
    fig, axes = plt.subplots(1, 2, figsize=(7.0, 3.4), sharey=True)
    marks = {"fastweights": (QUERY, "o"), "fla": (KEY, "s")}
    for ax, what in zip(axes, ("forward", "forward+backward"), strict=True):
        for who, (colour, marker) in marks.items():
            chosen = [
                (row["seconds"] / row["floor"], members.index(row["member"]))
                for row in rows
                if (row["who"], row["what"]) == (who, what)
            ]
            if chosen:
                times, at = zip(*chosen, strict=True)
                label = "FLA" if who == "fla" else who
                ax.plot(times, at, marker, color=colour, label=label)
        ax.set(title=what.replace("+", " + "), xlim=(0, None))
        ax.set_xlabel("times the floor")
        ax.axvline(1, color=INK)
    axes[0].set_yticks(
        range(len(members)), [m.replace("_", " ") for m in members]
    )
    axes[0].invert_yaxis()
    if any(row["who"] == "fla" for row in rows):
        axes[1].legend()
    return fig
