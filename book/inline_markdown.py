"""Text in a line, from a resolved doctree: as Markdown, and as HTML."""

from __future__ import annotations

import base64
import html
import mimetypes
import re
from pathlib import Path
from typing import NoReturn

from docutils import nodes
from macros import expand


class MarkupError(Exception):
    """Something in a chapter that a notebook cannot hold."""


def where(node: nodes.Node) -> str:
    """The file and line of ``node``, or of what it stands in."""
    while node.line is None and node.parent is not None:
        node = node.parent
    return f"{node.source or node.get('source', '?')}:{node.line}"


class Inline:
    """Writes inline nodes; pictures are read from ``srcdir``."""

    def __init__(self, srcdir: Path) -> None:
        self.srcdir = srcdir
        self.cited: list[str] = []  # footnotes, since they were last taken

    def inline(self, parent: nodes.Element) -> str:
        return "".join(self.inline_of(node) for node in parent.children)

    def inline_of(self, node: nodes.Node) -> str:
        """One inline node as Markdown."""
        match node:
            case nodes.Text():
                return _escape(node.astext())
            case nodes.math():
                return f"${self.tex(' '.join(node.astext().split()))}$"
            case nodes.emphasis():
                return f"*{self.inline(node)}*"
            case nodes.strong():
                return f"**{self.inline(node)}**"
            case nodes.literal() if "xref" in node["classes"]:
                return self.inline(node)
            case nodes.literal():
                return _code(node.astext())
            case nodes.footnote_reference():
                self.cited.append(node["refid"])
                return f"<sup>{node.astext()}</sup>"
            case nodes.image():
                return self._picture(node)
            case nodes.reference():
                return self._link(node)
            case nodes.target() | nodes.comment():
                return ""
            case nodes.inline():
                return self.inline(node)
        if node_name(node) == "number_reference":
            return self._link(node)
        self.fail(node, f"'{node_name(node)}' is no markup of a chapter")

    def _link(self, node: nodes.Element) -> str:
        text = self.inline(node)
        if not text.strip():
            self.fail(node, "a reference without text")
        uri = node.get("refuri", "")
        # What stands in the same notebook needs no way to the site.
        return f"[{text}]({uri})" if uri.startswith("http") else text

    def _picture(self, node: nodes.image) -> str:
        alt = node.get("alt", "").strip()
        if not alt:
            self.fail(node, "an image without alt text")
        uri = node["uri"]
        if "://" not in uri:
            kind = mimetypes.guess_type(uri)[0]
            data = base64.b64encode((self.srcdir / uri).read_bytes())
            uri = f"data:{kind};base64,{data.decode()}"
        return f"![{_escape(alt)}]({uri})"

    def plain(self, node: nodes.Node) -> str:
        """Inline text for HTML, where Markdown is not read."""
        match node:
            case nodes.Text():
                return html.escape(node.astext(), quote=False)
            case nodes.math():
                return f"${self.tex(node.astext())}$"
            case nodes.literal():
                return f"<code>{html.escape(node.astext())}</code>"
        return "".join(self.plain(child) for child in node.children)

    def tex(self, tex: str) -> str:
        # Without a space a < could begin a tag.
        return expand(re.sub(r"<(?=[A-Za-z/!?])", "< ", tex))

    def fail(self, node: nodes.Node, what: str) -> NoReturn:
        raise MarkupError(f"{where(node)}: {what}")


def node_name(node: nodes.Node) -> str:
    return type(node).__name__


def _escape(text: str) -> str:
    """Text whose characters Markdown would otherwise read as marks."""
    text = re.sub(r"([\\`*$]|~(?=~)|\](?=\())", r"\\\1", text)
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _code(text: str) -> str:
    ticks = "`" * (
        1 + max((len(run) for run in re.findall("`+", text)), default=0)
    )
    space = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{ticks}{space}{text}{space}{ticks}"
