"""Equations as MathML, made of their TeX by Temml when a page is built."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from docutils import nodes
from macros import MACROS
from sphinx.application import Sphinx
from sphinx.locale import _
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

_PROGRAM = Path(__file__).resolve().parents[1] / "equations.mjs"
_logger = logging.getLogger(__name__)

Equation = tuple[str, bool]  # its TeX, and whether it is displayed
Typeset = tuple[str | None, str | None]  # MathML, why there is none

_made: dict[Equation, Typeset] = {}


def typeset(
    equations: list[Equation], macros: dict[str, str]
) -> list[Typeset]:
    """The MathML of equations, by one process of node."""
    made = subprocess.run(
        ["node", str(_PROGRAM)],
        input=json.dumps({"macros": macros, "equations": equations}),
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    ).stdout
    return [(mathml, error) for mathml, error in json.loads(made)]


def _equation(node: nodes.math | nodes.math_block) -> Equation:
    tex, displayed = node.astext().strip(), isinstance(node, nodes.math_block)
    if r"\\" in tex and r"\begin" not in tex:
        tex = rf"\begin{{split}}{tex}\end{{split}}"  # as Sphinx has it
    return tex, displayed


def _typeset_new(equations: Iterable[Equation]) -> None:
    if new := list({x: None for x in equations if x not in _made}):
        _made.update(zip(new, typeset(new, MACROS), strict=True))


def typeset_page(app: Sphinx, document: nodes.document, docname: str) -> None:
    """Typeset all equations of a page at once: node takes long to start."""
    if app.builder.format == "html":
        kinds = (nodes.math, nodes.math_block)
        found = document.findall(lambda node: isinstance(node, kinds))
        _typeset_new(map(_equation, found))


def _mathml(node: nodes.math | nodes.math_block) -> str:
    equation = _equation(node)
    _typeset_new([equation])  # one of a title in the contents, say
    mathml, error = _made[equation]
    if error:
        _logger.warning("%s: %s", error, node.astext(), location=node)
    return mathml or ""


def _visit_math(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(_mathml(node))
    raise nodes.SkipNode


def _visit_math_block(writer: HTML5Translator, node: nodes.math_block) -> None:
    """A block: the equation, which may scroll, and beside it its number."""
    writer.body.append(writer.starttag(node, "div", CLASS="math"))
    writer.body.append(f'<div class="equation">{_mathml(node)}</div>')
    if node["number"]:
        number = get_node_equation_number(writer, node)
        writer.body.append(f'<span class="eqno">({number})')
        writer.add_permalink_ref(node, _("Link to this equation"))
        writer.body.append("</span>")
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer(
        "mathml", (_visit_math, None), (_visit_math_block, None)
    )
    app.connect("doctree-resolved", typeset_page)
    app.add_css_file("Temml-STIX2.css")
    app.add_js_file("copy-tex.min.js", loading_method="defer")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
