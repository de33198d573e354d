"""The symbols of the book as TeX macros: one table for site and notebooks.

On the site a symbol's colour is a CSS class, so that it follows the theme.
A notebook has no stylesheet of ours and no macros: there each macro is
written out with the colour that reads on white and on black.
"""

from __future__ import annotations

import re

from fastweights_lab.notebook.plotting import PALETTE

# symbol -> (key in PALETTE or None, TeX)
SYMBOLS: dict[str, tuple[str | None, str]] = {
    "q": ("q", r"\boldsymbol q"),
    "k": ("k", r"\boldsymbol k"),
    "v": ("v", r"\boldsymbol v"),
    "Q": ("q", r"\boldsymbol Q"),
    "K": ("k", r"\boldsymbol K"),
    "V": ("v", r"\boldsymbol V"),
    "S": ("S", r"\boldsymbol S"),
    "o": (None, r"{\boldsymbol o}"),
    "O": (None, r"{\boldsymbol O}"),
    "R": (None, r"{\mathbb R}"),
    "tr": (None, r"\top"),
    "diag": (None, r"\operatorname{diag}"),
    "tril": (None, r"\operatorname{tril}"),
    "softmax": (None, r"\operatorname{softmax}"),
}

# As Temml takes them.
MACROS: dict[str, str] = {
    rf"\{name}": rf"{{\class{{fw-{colour.lower()}}}{{{tex}}}}}"
    if colour
    else tex
    for name, (colour, tex) in SYMBOLS.items()
}

# The inner braces suit TeX's \color (a switch), MathJax 2's (an argument)
# and KaTeX's alike; the outer ones take the sub- and superscripts.
_WRITTEN_OUT: dict[str, str] = {
    name: rf"{{\color{{{PALETTE[colour]['any']}}}{{{tex}}}}}"
    if colour
    else tex
    for name, (colour, tex) in SYMBOLS.items()
}

_MACRO = re.compile(r"\\\\|\\(" + "|".join(SYMBOLS) + r")(?![A-Za-z])")


def expand(tex: str) -> str:
    """``tex`` with each of the book's macros written out."""
    return _MACRO.sub(
        lambda m: _WRITTEN_OUT[m[1]] if m[1] else m[0],
        tex,
    )
