"""The film's element on the page, and what it refuses."""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from jaxtyping import Float
from torch import Tensor

from fastweights_lab.notebook import plotting
from fastweights_lab.notebook.film.still import draw, told

MAX_T, MAX_WIDTH = 64, 16
PANELS = (
    "Each panel: the token's value v above the state S, its key k beside it; "
    "a cell with a minus is negative. Below, a bar per token: how much "
    "of its value the state answers to its key; at 1 all of it, below 0 its "
    "opposite."
)
LINES = (
    " The line across a bar is what decay alone has left; the difference "
    "comes from the other tokens."
)
DIGITS = 4  # significant ones, of the numbers that the page carries


def to_html(
    k: Float[Tensor, "T K"],
    v: Float[Tensor, "T V"],
    g: Float[Tensor, " T"] | Float[Tensor, "T K"] | None = None,
    beta: Float[Tensor, " T"] | None = None,
    *,
    alt: str,
    caption: str = "",
    decay_slider: bool = True,
    moments: Sequence[int],
) -> str:
    """The film as one ``<figure>`` that needs no other file.

    k is [T, K] and v [T, V], with T at most 64, K and V at most 16. g is
    None, [T] or [T, K]: the natural log of the decay that token t applies
    before it writes. beta is None (the additive rule) or [T] (the delta
    rule). ``alt`` says what the film shows, to who cannot see it, and the
    tokens of the stills and what the state knows after each are told behind
    it; ``caption`` is plain text below it. With ``decay_slider`` the reader
    may put one constant decay in the place of g. The states after the tokens
    ``moments``, which count from 1, stand on paper, and wherever no script
    runs; with one the film opens at the first of them. A button shows the
    formula of the last step, and the library's call that makes the state on
    screen.

    Numbers are carried to 4 significant digits. The id of the element is
    made from its content: the same film twice on a page has the same id.

    Raises ValueError for what is too large, a number that is not finite, an
    empty ``alt``, and one that says "after token 3" if no still stands there.
    """
    _check(k, v, g, beta, alt, moments)
    given = {"k": k, "v": v, "g": g, "beta": beta}
    rounded = {name: _rounded(x) for name, x in given.items()}
    data = json.dumps(rounded, separators=(",", ":"))
    names = ("film_code.js", "film.js", "film.css")
    call, code, looks = (_resource(name) for name in names)
    words = f"{alt.strip()} {told(k, v, g, beta, moments)}"
    still = draw(k, v, g, beta, words, moments)
    lines = "" if beta is not None else LINES
    texts = [data, str(decay_slider), alt, caption, still]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    name = f"fw-film-{digest[:12]}"
    # Two films may have one still, and then its ids.
    ids = r'(\bid="|href="#|url\(#)f[0-9a-f]{7}-'
    still = re.sub(ids, rf"\g<1>{name}-", still)
    still = re.sub(r' d="[^"]*"', lambda d: _shorter(d[0]), still)
    label = html.escape(alt)
    below = f"<figcaption>{html.escape(caption)}</figcaption>\n"
    return (
        f'<figure class="fw-film" id="{name}" '
        f'data-film="{html.escape(data)}" '
        f'data-decay="{str(decay_slider).lower()}" '
        f'data-opens="{moments[0]}">\n'
        f"<style>{_colours()}\n{looks}\n</style>\n"
        f'<div class="fw-film-still">{still.strip()}\n'
        f"<p>{PANELS}{lines}</p></div>\n"
        f'<div class="fw-film-live" role="group" aria-label="{label}" '
        'tabindex="0" hidden></div>\n'
        f"{below if caption else ''}"
        f"<script>\n(function () {{\n{call}\n\n{code}\n\n"
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
    moments: Sequence[int],
) -> None:
    (T, K), V = k.shape, v.shape[1]
    if T > MAX_T or max(K, V) > MAX_WIDTH:
        raise ValueError(
            f"k, v: got T {T}, K {K} and V {V}, need T <= {MAX_T}, and K and "
            f"V <= {MAX_WIDTH}"
        )
    for name, x in {"k": k, "v": v, "g": g, "beta": beta}.items():
        if x is not None and not x.isfinite().all():
            raise ValueError(f"{name}: got inf or nan, need finite numbers")
    if not alt.strip():
        raise ValueError("alt: got an empty string, need a description")
    if not moments or not all(1 <= t <= T for t in moments):
        raise ValueError(f"moments: got {moments}, need tokens from 1 to {T}")
    for found in re.findall(r"\bafter tokens? ([\d, and]*\d)", alt):
        if not {*map(int, re.findall(r"\d+", found))} <= {*moments}:
            raise ValueError(
                f"alt: got {found.strip()!r}, need tokens of the stills, "
                f"which stand after {moments}"
            )


def _resource(name: str) -> str:
    file = resources.files("fastweights_lab.notebook.film") / name
    return file.read_text("utf-8").strip()


def _rounded(x: Tensor | None) -> Any:
    """The tensor as lists of numbers of 4 significant digits."""
    if x is None:
        return None
    if x.dim() > 1:
        return [_rounded(row) for row in x]
    numbers = x.detach().double().tolist()
    return [float(f"{n:.{DIGITS}g}") + 0.0 for n in numbers]  # no -0.0


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
