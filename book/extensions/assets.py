"""The site's one style sheet: the palette, and what pages use of others.

The theme and the extensions bring 550 KB of CSS and 225 KB of icons. A third
of the one and a hundredth of the other is used.
"""

import base64
import io
import json
import logging
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from docutils import nodes
from fontTools.subset import Options, Subsetter, load_font, save_font
from pygments.formatters import HtmlFormatter
from pygments.token import Name, Operator, Punctuation, Text, Whitespace
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.highlighting import PygmentsBridge

from fastweights_lab.notebook.plotting import PALETTE

SHEET = "_static/styles.css"
# What a page of the theme loads before any other.
THEME = ["_static/basic.css", "_static/styles/pydata-sphinx-theme.css"]
_PLAIN = {Name, Name.Namespace, Operator, Punctuation, Whitespace}
_PURGE = Path(__file__).resolve().parents[1] / "styles.mjs"


def palette_css() -> str:
    """The palette as CSS variables, a block a theme, and a class a symbol."""
    blocks = []
    for theme, selector in [
        ("light", ":root"),
        ("dark", 'html[data-theme="dark"]'),
    ]:
        lines = [
            f"  --fw-{name.lower()}: {colours[theme]};"
            for name, colours in PALETTE.items()
        ]
        blocks.append("\n".join([f"{selector} {{", *lines, "}"]))
    blocks += [
        f".fw-{name.lower()} {{ color: var(--fw-{name.lower()}); }}"
        for name in PALETTE
    ]
    return "\n".join(blocks) + "\n"


def write_palette(app: Sphinx, config: Config) -> None:
    """Make the generated file of `html_static_path`."""
    sheet = Path(config.book_palette)
    sheet.parent.mkdir(parents=True, exist_ok=True)
    sheet.write_text(palette_css(), encoding="utf-8")


def link_one_sheet(
    app: Sphinx,
    pagename: str,
    templatename: str,
    context: dict[str, Any],
    doctree: nodes.document | None,
) -> None:
    """Have a page load the one sheet instead of those that it is made of.

    And what works its tabs only if it has some.
    """
    sheets = sorted(context["css_files"], key=lambda sheet: sheet.priority)
    app.builder.book_sheets = [*THEME, *(str(x.filename) for x in sheets)]
    context["css_files"] = [SHEET]
    if "sd-tab-set" not in context.get("body", ""):
        context["script_files"] = [
            x for x in context["script_files"] if "design-tabs" not in str(x)
        ]


def write_sheet(app: Sphinx, error: Exception | None) -> None:
    """Make the one sheet when all pages are written."""
    if error or app.builder.format != "html":
        return
    site = Path(app.outdir)
    css = subprocess.run(
        ["node", str(_PURGE)],
        input=json.dumps(
            {"site": str(site), "sheets": app.builder.book_sheets}
        ),
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    ).stdout
    icons = "".join(
        chr(int(code, 16)) for code in re.findall(r'--fa:"\\(\w+)"', css)
    )
    css = re.sub(
        r'url\("(vendor/fontawesome/[^"]*)"\)',
        lambda x: f"url({with_only(icons, site / '_static' / x[1])})",
        css,
    )
    (site / SHEET).write_text(css, encoding="utf-8")


def with_only(characters: str, font: Path) -> str:
    """The font with these characters only, as a data URL."""
    options = Options(flavor="woff2")
    subset, loaded = Subsetter(options), load_font(str(font), options)
    subset.populate(text=characters)
    subset.subset(loaded)
    out = io.BytesIO()
    save_font(loaded, out, options)
    return (
        f"data:font/woff2;base64,{base64.b64encode(out.getvalue()).decode()}"
    )


class Highlighted(HtmlFormatter):
    """Code in which names and signs are text: four of five marks less."""

    def format(self, tokens: Iterable[tuple[Any, str]], out: Any) -> None:
        tokens = ((Text if k in _PLAIN else k, text) for k, text in tokens)
        super().format(tokens, out)


def setup(app: Sphinx) -> dict[str, bool]:
    logging.getLogger("fontTools").setLevel(logging.WARNING)
    PygmentsBridge.html_formatter = Highlighted
    app.add_config_value("book_palette", "", "html", [str])
    app.connect("config-inited", write_palette)
    app.connect("html-page-context", link_one_sheet, priority=900)
    app.connect("build-finished", write_sheet, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
