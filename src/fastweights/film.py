"""A film of a matrix state: the reader steps through what tokens do to it.

The state starts at zero. Token t turns it into

    S <- Diag(e^g) S + k v^T                          (additive), or
    S <- (I - beta k k^T) Diag(e^g) S + beta k v^T    (delta rule),

and the film shows S with the token's k and v, and below them, for each
earlier token j, the share of v_j in the answer to its key, S^T k_j / |k_j|^2:
1 where the state still answers v_j alone. The reader may put one constant
decay in the place of every gate. The arithmetic runs in the browser
(data/film.js); without a script, and on paper, a few moments of the film
stand side by side instead.

Shapes in this file: k [T, K]; v [T, V]; g, the natural log of a decay, [T]
or [T, K] (one a key channel); beta [T].
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastweights import plotting
from fastweights.arguments import check_tensors, wrong_shape
from fastweights.reference import steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import PathPatch

MAX_T = 64
MAX_WIDTH = 16
MAX_MOMENTS = 8
DIGITS = 4  # significant ones, of the numbers that the page carries

_STYLE = """
.fw-film {
  container-type: inline-size;
  color: var(--film-ink);
  font: 0.9375rem/1.45 var(--fw-sans, system-ui, sans-serif);
  margin: 1rem 0;
  max-width: 100%;
  text-align: left;
}
.fw-film-live[hidden] { display: none; }
.fw-film-live {
  align-items: start;
  display: grid;
  gap: 1rem 2rem;
  grid-template: "formula" "state" "answers" "panel" / minmax(0, 1fr);
}
.fw-film-state { grid-area: state; }
.fw-film-panel { grid-area: panel; }
.fw-film-answers { grid-area: answers; }
.fw-film :is(p, figcaption) { color: inherit; margin: 0; }
.fw-film-live p { font: inherit; text-wrap: wrap; }
.fw-film-live p.fw-film-note { font-size: 0.8125rem; }
.fw-film-live p.fw-film-formula {
  font-size: 1.0625rem;
  grid-area: formula;
  min-height: 1.6em;
}
.fw-film-live p.long { min-height: 3em; }
@container (min-width: 36rem) {
  .fw-film-live p.long { min-height: 1.6em; }
  .fw-film-live {
    grid-template:
      "formula formula" "state panel" "answers answers"
      / minmax(0, 7fr) minmax(0, 6fr);
  }
}
.fw-film :is(sub, sup) { font-size: 0.72em; line-height: 0; }
.fw-film b { font-style: italic; font-weight: 600; }
.fw-film b.k { color: var(--film-k); }
.fw-film b.v { color: var(--film-v); }
.fw-film b.s { color: var(--film-s); }
.fw-film-state svg { display: block; height: auto; width: 100%; }
.fw-film-state svg + p { margin-top: 0.5rem; }
.fw-film text { fill: var(--film-ink); font-family: inherit; }
.fw-film path { transition: fill-opacity 0.2s; }
.fw-film text.k, .fw-film path.k { fill: var(--film-k); }
.fw-film text.v, .fw-film path.v { fill: var(--film-v); }
.fw-film path.s { fill: var(--film-s); }
.fw-film path.fw-film-minus { fill: var(--film-ink); fill-rule: evenodd; }
.fw-film path.fw-film-cell {
  fill: none;
  pointer-events: all;
  stroke: var(--film-grid);
  stroke-width: 0.75;
}
.fw-film [data-row] { cursor: crosshair; }
.fw-film path.fw-film-chosen {
  fill: none;
  pointer-events: none;
  stroke: var(--film-text);
  stroke-width: 2.5;
}
.fw-film-name { font-size: 1.35em; font-style: italic; font-weight: 600; }
.fw-film-sub { font-size: 0.75em; font-style: normal; font-weight: 400; }
.fw-film-swatch {
  border: 1px solid;
  display: inline-block;
  font-size: 0.75em;
  line-height: 1;
  padding: 0 0.15em;
}
.fw-film-bars {
  border-left: 1px solid var(--film-grid);
  display: flex;
  height: 6.5rem;
  margin: 0.6rem 0 1.4rem 1.1rem;
  position: relative;
}
.fw-film-bars i { display: block; position: absolute; }
.fw-film-level {
  border-top: 1px dashed var(--film-grid);
  font: 0.75rem/0 var(--fw-sans, system-ui, sans-serif);
  left: 0;
  pointer-events: none;
  right: 0;
  text-indent: -0.9rem;
}
.fw-film-bars div { flex: 1; position: relative; }
.fw-film-bars span {
  bottom: -1.4rem;
  font-size: 0.75rem;
  left: -1rem;
  position: absolute;
  right: -1rem;
  text-align: center;
}
.fw-film-bar {
  background: var(--film-v);
  box-sizing: border-box;
  left: 14%;
  right: 14%;
  transition: height 0.2s, bottom 0.2s;
}
.fw-film-bar.minus { background: var(--film-ink); }
.fw-film-bar.over { border-top: 4px dotted var(--film-text); }
.fw-film-bar.minus.over {
  border-bottom: 4px dotted var(--film-text);
  border-top: 0;
}
.fw-film-tick {
  border-top: 2px solid var(--film-text);
  left: 4%;
  margin-bottom: -1px;
  right: 4%;
}
.fw-film-tick[hidden] { display: none !important; }
.fw-film-bars .later span { opacity: 0.45; }
.fw-film-bars .now span { font-weight: 700; text-decoration: underline; }
.fw-film-bars .chosen::after {
  border: 1px solid var(--film-text);
  content: "";
  inset: -2px 0;
  position: absolute;
}
.fw-film-panel { display: grid; gap: 0.6rem; }
.fw-film-panel label {
  display: flex;
  flex-wrap: wrap;
  gap: 0 0.75rem;
  justify-content: space-between;
  margin: 0;
}
.fw-film-panel output {
  display: inline;
  font-variant-numeric: tabular-nums;
  padding: 0;
}
.fw-film-panel input {
  accent-color: var(--film-s);
  flex: 1 0 100%;
  height: 2.75rem;
  margin: 0;
  min-width: 0;
  width: 100%;
}
.fw-film-buttons { display: flex; gap: 0.5rem; }
.fw-film-buttons button { flex: 1; }
.fw-film-panel button {
  background: none;
  border: 1px solid var(--film-ink);
  border-radius: 4px;
  color: inherit;
  cursor: pointer;
  font: inherit;
  min-height: 2.75rem;
  min-width: 2.75rem;
  padding: 0.25rem 0.5rem;
}
.fw-film-panel button:disabled { cursor: default; opacity: 0.45; }
.fw-film-panel button[aria-pressed="true"] { border-width: 3px; }
.fw-film-panel > button { justify-self: start; }
.fw-film-live p.fw-film-said { min-height: 4.4em; }
.fw-film :focus-visible {
  outline: 2px solid var(--film-text);
  outline-offset: 3px;
}
.fw-film figcaption { margin-top: 0.75rem; }
.fw-film-still { overflow-x: auto; }
@media screen {
  .fw-film-on .fw-film-still { display: none; }
}
@media print {
  .fw-film { break-inside: avoid; container-type: normal; }
  .fw-film .fw-film-live { display: none !important; }
}
@media (hover: none) {
  .fw-film-live p.fw-film-keys { display: none; }
}
@media (prefers-reduced-motion: reduce) {
  .fw-film * { transition: none !important; }
}
"""


def to_html(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    alt: str,
    caption: str = "",
    decay_slider: bool = True,
    moments: int = 4,
) -> str:
    """The film as one ``<figure>`` that needs no other file.

    k is [T, K] and v [T, V], with T at most 64, K and V at most 16. g is
    None, [T] or [T, K]: the natural log of the decay that token t applies
    before it writes. beta is None (the additive rule) or [T] (the delta
    rule). ``alt`` says what the film shows, to who cannot see it; ``caption``
    is plain text below it. With ``decay_slider`` the reader may put one
    constant decay in the place of g. ``moments`` (1 to 8) states stand on
    paper, and wherever no script runs.

    Numbers are carried to 4 significant digits. The id of the element is
    made from its content: the same film twice on a page has the same id.

    Raises TypeError for what is no floating-point tensor (``alt``,
    ``caption``: no string; ``decay_slider``: no bool; ``moments``: no int),
    ValueError for a wrong shape or size, a number that is not finite, and
    an empty ``alt``.
    """
    _check(k, v, g, beta, alt, caption, decay_slider, moments)
    given = {"k": k, "v": v, "g": g, "beta": beta}
    rounded = {name: _rounded(x) for name, x in given.items()}
    data = json.dumps(rounded, separators=(",", ":"))
    script = resources.files("fastweights") / "data" / "film.js"
    code = script.read_text("utf-8").strip()
    still = _still(k, v, g, beta, alt, moments)
    texts = [data, str(decay_slider), alt, caption, still]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    name = f"fw-film-{digest[:12]}"
    # What the still names, no other picture of the page may name.
    still = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", still)
    still = re.sub(r' d="[^"]*"', lambda d: _shorter(d[0]), still)
    label = html.escape(alt)
    below = f"<figcaption>{html.escape(caption)}</figcaption>\n"
    return (
        f'<figure class="fw-film" id="{name}" '
        f'data-film="{html.escape(data)}" '
        f'data-decay="{str(decay_slider).lower()}">\n'
        f"<style>{_colours()}{_STYLE}</style>\n"
        f'<div class="fw-film-still">{still.strip()}</div>\n'
        f'<div class="fw-film-live" role="group" aria-label="{label}" '
        'tabindex="0" hidden></div>\n'
        f"{below if caption else ''}"
        f"<script>\n(function () {{\n{code}\n\n"
        f'begin("{name}");\n}})();\n</script>\n'
        "</figure>"
    )


def show(*tensors: Any, **options: Any) -> None:
    """Show the film of `to_html`, which has the arguments and errors.

    Outside IPython nothing is shown.
    """
    plotting.show_html(to_html(*tensors, **options))


def _check(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    alt: str,
    caption: str,
    decay_slider: bool,
    moments: int,
) -> None:
    tensors = {"k": k, "v": v}
    optional = {"g": g, "beta": beta}
    tensors |= {name: x for name, x in optional.items() if x is not None}
    check_tensors(tensors)
    for name, x in tensors.items():
        if not x.is_floating_point():
            raise TypeError(f"{name}: got {x.dtype}, need floating point")
    for name, text in {"alt": alt, "caption": caption}.items():
        if not isinstance(text, str):
            raise TypeError(f"{name}: got {type(text).__name__}, need a str")
    if not isinstance(decay_slider, bool):
        kind = type(decay_slider).__name__
        raise TypeError(f"decay_slider: got {kind}, need a bool")
    if not isinstance(moments, int) or isinstance(moments, bool):
        raise TypeError(f"moments: got {type(moments).__name__}, need an int")

    if k.dim() != 2 or not 1 <= len(k) <= MAX_T or not _fits(k):
        need = f"[T, K] with 1 <= T <= {MAX_T} and 1 <= K <= {MAX_WIDTH}"
        wrong_shape("k", k, need)
    T, K = k.shape
    if v.dim() != 2 or len(v) != T or not _fits(v):
        wrong_shape("v", v, f"[{T}, V] with 1 <= V <= {MAX_WIDTH}")
    if g is not None and g.shape not in ((T,), (T, K)):
        wrong_shape("g", g, f"[{T}] or [{T}, {K}]")
    if beta is not None and beta.shape != (T,):
        wrong_shape("beta", beta, f"[{T}]")
    for name, x in tensors.items():
        if not x.isfinite().all():
            raise ValueError(f"{name}: got inf or nan, need finite numbers")
    if not alt.strip():
        raise ValueError("alt: got an empty string, need a description")
    if not 1 <= moments <= MAX_MOMENTS:
        raise ValueError(
            f"moments: got {moments}, need 1 <= moments <= {MAX_MOMENTS}"
        )


def _fits(x: Tensor) -> bool:
    return 1 <= x.shape[1] <= MAX_WIDTH


def _rounded(x: Tensor | None) -> list[float] | list[list[float]] | None:
    if x is None:
        return None
    flat = [
        float(f"{number:.{DIGITS}g}") + 0.0  # no -0.0
        for number in x.detach().double().flatten().tolist()
    ]
    if x.dim() == 1:
        return flat
    width = x.shape[1]
    return [flat[i : i + width] for i in range(0, len(flat), width)]


def _colours() -> str:
    """The film's colours: the page's where it has the book's variables."""
    lines = [
        f"  --film-{name.lower()}: var(--fw-{name.lower()}, {colour['any']});"
        for name, colour in plotting.PALETTE.items()
    ]
    ink = plotting.PALETTE["ink"]["any"]
    lines.append(f"  --film-text: var(--fw-text, {ink});")
    return "\n".join(["", ".fw-film {", *lines, "}"])


def _shorter(path: str) -> str:
    """An SVG path to the hundredth of a unit, without its line ends."""
    path = re.sub(r"\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", path)
    return re.sub(r"\s*\n\s*|(?<=[A-Za-z]) ", "", path)


def _still(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    alt: str,
    moments: int,
) -> str:
    """Moments of the film side by side, as inline SVG; the last is S_T."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    k, v = k.detach().double().cpu(), v.detach().double().cpu()
    g = None if g is None else g.detach().double().cpu()
    beta = None if beta is None else beta.detach().double().cpu()
    T, K = k.shape
    V = v.shape[1]
    S = k.new_zeros(K, V)
    states = []
    for t in range(T):
        gate = None if g is None else g[t].reshape(-1)
        rate = None if beta is None else beta[t]
        S, _ = steps.recurrence(S, k[t], k[t], v[t], gate, rate)
        states.append(S)
    full = max(float(S.abs().max()) for S in states) or 1.0
    at = torch.linspace(T / moments, T, moments).round().long().clamp(1)
    times = sorted(set(at.tolist()))
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
            _cells(ax, states[t - 1] / full, 0, 0, plotting.S)
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
