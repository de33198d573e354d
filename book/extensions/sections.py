"""What the search knows: the places of the book, as plain text.

A place has an address: a section, an exercise, an entry of the API. What it
holds is its own text, without the places in it, and the names in its code.
Sphinx writes only the pages that changed, so each page's places are kept.
"""

import base64
import gzip
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from folds import fold
from markupsafe import Markup
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx_exercise.nodes import exercise_enumerable_node

_LEAVES = (nodes.Text, nodes.literal_block, nodes.math)
_SKIPPED = (
    addnodes.desc_signature,
    fold,
    nodes.Invisible,
    nodes.image,
    nodes.math_block,
    nodes.raw,
    nodes.title,
)
_CODE = ("bash", "ipython3", "python")

# Sphinx's own search, and how it marks what was found.
_REPLACED = ("language_data.js", "searchtools.js", "sphinx_highlight.js")


def address(node: nodes.Node) -> str:
    """The id of a place, empty if a node is none."""
    if isinstance(node, addnodes.desc):
        node = node[0]
    elif not isinstance(node, (nodes.section, exercise_enumerable_node)):
        return ""
    return next(iter(node["ids"]), "")


def leaves(node: nodes.Element) -> Iterator[nodes.Node]:
    """What a reader reads in a place before the places in it."""
    for child in node.children:
        if isinstance(child, _LEAVES):
            yield child
        elif not isinstance(child, _SKIPPED) and not address(child):
            if {"checked", "checks"}.isdisjoint(child["classes"]):
                yield from leaves(child)
            if not isinstance(child, nodes.Inline):
                yield nodes.Text(" ")


def formula(tex: str) -> str:
    """A short formula as a reader would type it, a longer one as dots."""
    typed = re.sub(r"\\(?=[A-Za-z](?![A-Za-z]))|[{}\s]", "", tex)
    return "…" if "\\" in typed else typed


def plain(node: nodes.Element) -> str:
    """The words of a place in one line."""
    parts = []
    for leaf in leaves(node):
        if isinstance(leaf, nodes.math):
            parts.append(formula(leaf.astext()))
        elif isinstance(leaf, nodes.Text):
            parts.append(leaf.astext().replace("\0", ""))
    return " ".join("".join(parts).split())


def names(node: nodes.Element) -> str:
    """The names in the code of a place that is not folded."""
    code = [
        leaf.astext()
        for leaf in leaves(node)
        if isinstance(leaf, nodes.literal_block) and leaf["language"] in _CODE
    ]
    return " ".join(sorted({*re.findall(r"[A-Za-z_]\w{2,}", " ".join(code))}))


def title(place: nodes.Element) -> str:
    if isinstance(place, addnodes.desc):
        return str(place[0]["fullname"])
    return plain(place[0]).removeprefix("(").removesuffix(")")


def places(document: nodes.document) -> Iterator[dict[str, str]]:
    """What search.js reads of each place of a page."""
    for node in document.findall(address):
        if isinstance(node, nodes.Element):
            yield {
                "id": address(node),
                "title": title(node),
                "text": plain(node),
                "names": names(node),
            }


def keep_places(
    app: Sphinx,
    pagename: str,
    templatename: str,
    context: dict[str, Any],
    doctree: nodes.document | None,
) -> None:
    """Keep what a page that is written has to find."""
    context["script_files"][:] = [  # the builder's own list
        script
        for script in context["script_files"]
        if Path(str(script.filename)).name not in _REPLACED
    ]
    if doctree:
        page = {
            "page": pagename,
            "chapter": Markup(context["title"]).striptags(),
        }
        found = [page | place for place in places(doctree)]
        kept = Path(app.doctreedir, f"{pagename}.json")
        kept.write_text(json.dumps(found), "utf-8")


def write_places(app: Sphinx, error: Exception | None) -> None:
    """Put all pages' places beside the engine that searches them."""
    if error or app.builder.name != "html":
        return
    static = Path(app.outdir, "_static")
    shutil.copy(app.config.book_minisearch, static / "minisearch.js")
    found = [
        place
        for page in sorted(app.env.found_docs)
        for place in json.loads(
            Path(app.doctreedir, f"{page}.json").read_text("utf-8")
        )
    ]
    text = json.dumps(found, ensure_ascii=False).encode()
    packed = base64.b64encode(gzip.compress(text, mtime=0)).decode()
    (static / "places.js").write_text(f'const PLACES = "{packed}";\n')
    for name in _REPLACED:
        (static / name).unlink(missing_ok=True)


def leave_out_the_other(app: Sphinx) -> None:
    """No index of Sphinx's own, and no page that searches it."""
    app.builder.search = False


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("book_minisearch", "", "html", [str])
    app.connect("builder-inited", leave_out_the_other)
    app.connect("html-page-context", keep_places)
    app.connect("build-finished", write_places)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
