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

from fastweights.arguments import check_tensors, wrong_shape
from fastweights_lab.notebook import plotting
from fastweights_lab.notebook.film.still import draw, moments_of, told

MAX_T = 64
MAX_WIDTH = 16
MAX_MOMENTS = 8
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
    moments: int | Sequence[int] = 4,
) -> str:
    """The film as one ``<figure>`` that needs no other file.

    k is [T, K] and v [T, V], with T at most 64, K and V at most 16. g is
    None, [T] or [T, K]: the natural log of the decay that token t applies
    before it writes. beta is None (the additive rule) or [T] (the delta
    rule). ``alt`` says what the film shows, to who cannot see it, and the
    tokens of the stills and what the state knows after each are told behind
    it; ``caption`` is plain text below it. With ``decay_slider`` the reader
    may put one constant decay in the place of g. ``moments`` states stand on
    paper, and wherever no script runs: so many (1 to 8) at equal distances,
    the last of them S_T, or those after the tokens given, which count from
    1. A button shows the call of the library that makes the state on screen.

    Numbers are carried to 4 significant digits. The id of the element is
    made from its content: the same film twice on a page has the same id.

    Raises TypeError for what is no floating-point tensor (``alt``,
    ``caption``: no string; ``decay_slider``: no bool; ``moments``: no ints),
    ValueError for a wrong shape or size, a number that is not finite,
    an empty ``alt``, and one that says "after token 3" if no still stands
    there.
    """
    _check(k, v, g, beta, alt, caption, decay_slider, moments)
    given = {"k": k, "v": v, "g": g, "beta": beta}
    rounded = {name: _rounded(x) for name, x in given.items()}
    data = json.dumps(rounded, separators=(",", ":"))
    names = ("film_code.js", "film.js", "film.css")
    call, code, looks = (_resource(name) for name in names)
    times = moments_of(len(k), moments)
    _check_words(alt, times)
    words = f"{alt.strip()} {told(k, v, g, beta, times)}"
    still = draw(k, v, g, beta, words, times)
    lines = "" if beta is not None else LINES
    texts = [data, str(decay_slider), alt, caption, still]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    name = f"fw-film-{digest[:12]}"
    # Two films may have one still, and then its ids.
    still = re.sub(r'(\bid="|href="#|url\(#)fw-\w{8}', rf"\g<1>{name}", still)
    still = re.sub(r' d="[^"]*"', lambda d: _shorter(d[0]), still)
    label = html.escape(alt)
    below = f"<figcaption>{html.escape(caption)}</figcaption>\n"
    return (
        f'<figure class="fw-film" id="{name}" '
        f'data-film="{html.escape(data)}" '
        f'data-decay="{str(decay_slider).lower()}">\n'
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
    caption: str,
    decay_slider: bool,
    moments: int | Sequence[int],
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
    _check_kinds(moments)

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
    tokens = [] if isinstance(moments, int) else list(moments)
    count = moments if isinstance(moments, int) else len(tokens)
    if not 1 <= count <= MAX_MOMENTS:
        raise ValueError(
            f"moments: got {moments}, need 1 <= moments <= {MAX_MOMENTS}"
        )
    if not all(1 <= t <= T for t in tokens):
        raise ValueError(f"moments: got {moments}, need tokens from 1 to {T}")


def _check_kinds(moments: Any) -> None:
    several = isinstance(moments, Sequence) and not isinstance(moments, str)
    for x in moments if several else [moments]:
        if not isinstance(x, int) or isinstance(x, bool):
            kind = type(x).__name__
            raise TypeError(f"moments: got {kind}, need an int, or ints")


def _check_words(alt: str, times: Sequence[int]) -> None:
    """What alt calls a still must be one."""
    for found in re.findall(r"\bafter tokens? ([\d, and]*\d)", alt):
        for token in map(int, re.findall(r"\d+", found)):
            if token not in times:
                raise ValueError(
                    f"alt: got {found.strip()!r}, need tokens of the stills, "
                    f"which stand after {times}"
                )


def _resource(name: str) -> str:
    file = resources.files("fastweights_lab.notebook.film") / name
    return file.read_text("utf-8").strip()


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
