"""Equations are MathML when the page arrives, drawn with the book's font."""

import os
import re
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from fontTools.ttLib import TTFont

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT / folder) for folder in ("book", "book/extensions", "tools")
]

from equations import typeset  # noqa: E402  (it lies in book/)
from macros import MACROS  # noqa: E402
from math_font import ALWAYS, FONT, characters  # noqa: E402

SITE = Path(os.environ.get("FASTWEIGHTS_SITE", ROOT / "build/test/html"))
needs_site = pytest.mark.skipif(
    not SITE.is_dir(), reason=f"no site in {SITE}: `make test` builds it"
)


def mathml(tex: str, displayed: bool = False) -> str:
    ((made, error),) = typeset([(tex, displayed)], MACROS)
    assert error is None
    return made


def row(tex: str) -> str:
    """What stands in MathML for TeX, spaces as in TeX."""
    made = re.sub(r"<annotation.*?</annotation>", "", mathml(tex))
    made = re.sub(r'<mspace width="([\d.]+)em"></mspace>', r" \1 ", made)
    return re.sub(r"<[^>]+>", "", made)


@pytest.mark.parametrize("tex", [r"a^{}^{\top}", r"\nothing", r"\left( a"])
def test_what_cannot_be_typeset_is_told(tex):
    (_, first), (made, error) = typeset([("a", False), (tex, False)], {})
    assert first is None and made is None
    assert error


def test_a_symbol_follows_the_theme():
    assert '<mi class="fw-q">𝒒</mi>' in mathml(r"\q_t")


def test_an_equation_carries_its_tex():
    tex = r"\q_t^\tr\k_j < 1"
    page = BeautifulSoup(mathml(tex), "html.parser")
    assert page.annotation.text == tex
    assert page.annotation["encoding"] == "application/x-tex"


def test_an_operator_in_a_script_has_no_space():
    tight = '<mo lspace="0" rspace="0">−</mo>'
    assert tight in mathml("S_{t-1}")
    assert tight not in mathml("t-1")


@pytest.mark.parametrize(
    ("tex", "text"),
    [
        (r"P\diag(x)", "P 0.1667 diag\u2061(x)"),
        (r"C^2\log_2 C", "C2 0.1667 log2\u2061 0.1667 C"),
        (r"\bigl(a\bigr)\diag(x)", "(a) 0.1667 diag\u2061(x)"),
        (r"(\diag(x)", "(diag\u2061(x)"),
        (r"a=\diag(x)", "a=diag\u2061(x)"),
        (
            r"\begin{pmatrix}1\end{pmatrix}\begin{pmatrix}2\end{pmatrix}",
            "(1) 0.1667 (2)",
        ),
    ],
)
def test_thin_spaces_are_those_of_tex(tex, text):
    assert row(tex) == text


def test_a_line_that_begins_with_plus_goes_on_with_a_sum():
    lines = r"\begin{aligned} a &= b \\ &+ c \end{aligned}"
    assert '<mo form="infix" stretchy="false">+</mo>' in mathml(lines)


@needs_site
def test_the_font_has_what_equations_need():
    """tools/math_font.py makes it anew."""
    has = {chr(c) for c in TTFont(FONT).getBestCmap()}
    assert ALWAYS | characters(SITE) <= has


@needs_site
def test_no_page_waits_for_a_script():
    for page in SITE.glob("[0-9][0-9]_*.html"):
        text = page.read_text("utf-8")
        assert text.count("<math") > 20, page
        assert not re.search(r"\\\(|\\\[|mathjax", text, re.I), page
