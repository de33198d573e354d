"""A chapter as Sphinx resolved it, written as a notebook's Markdown.

Sphinx has numbered everything and resolved every reference by the time this
runs, so that a notebook says what the page says. Each kind of node that the
chapters may use has its method; any other is an error that names file and
line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docutils import nodes
from inline_markdown import Inline, node_name
from sphinx.builders import Builder
from sphinx.locale import admonitionlabels

_STATEMENTS = {"algorithm", "definition", "lemma", "proposition", "theorem"}
_FOLDED = {"dropdown", "toggle"}
_LINE_START = re.compile(r"^(\s*)(?=(?:#{1,6}|[-+>]|=+|-+)(?:\s|$))", re.M)
_NUMBERED = re.compile(r"^(\s*\d+)([.)])(?=\s)", re.M)


@dataclass
class Heading:
    """A section's title: a new cell begins here."""

    text: str


@dataclass
class Code:
    """The next code cell; ``exercise`` is the last one before it."""

    node: nodes.container
    exercise: str


@dataclass
class Solution:
    """Begins (with its title) or, with an empty one, ends a solution."""

    title: str


Piece = str | Heading | Code | Solution


def is_cell(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.container)
        and node.get("nb_element") == "cell_code"
    )


def quote(text: str) -> str:
    """``text`` as a block quotation."""
    return re.sub(r"^", "> ", text, flags=re.M).replace("> \n", ">\n")


def details(summary: str, text: str) -> str:
    """``text`` folded under ``summary``, which is HTML."""
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"


class Writer(Inline):
    """Writes the resolved doctree of the chapter ``docname``."""

    def __init__(
        self, builder: Builder, docname: str, doctree: nodes.document
    ) -> None:
        super().__init__(Path(builder.srcdir))
        self.env = builder.env
        self.docname = docname
        self.numbers = self.env.toc_fignumbers.get(docname, {})
        self.footnotes = {
            id_: note
            for note in doctree.findall(nodes.footnote)
            for id_ in note["ids"]
        }
        self.doctree = doctree
        self.exercise = ""

    # The chapter: headings, cells and what stands between them

    def pieces(self) -> Iterator[Piece]:
        """The chapter from top to bottom."""
        yield from self._flow(self.doctree)

    def _flow(self, parent: nodes.Element, depth: int = 0) -> Iterator[Piece]:
        for node in parent.children:
            if isinstance(node, nodes.section):
                yield from self._flow(node, depth + 1)
            elif isinstance(node, nodes.title) and depth:
                yield Heading(self._heading(node, depth))
            elif is_cell(node):
                yield Code(node, self.exercise)
            elif node_name(node) == "solution_node":
                yield Solution(self.plain(node[0]))
                yield from self._flow(node[1])
                yield Solution("")
            elif text := self.block(node):
                yield text
                if node_name(node) == "exercise_enumerable_node":
                    self.exercise = self._numbered(node, "exercise")

    def _heading(self, title: nodes.title, depth: int) -> str:
        top = depth == 1
        anchor = "" if top else "#" + title.parent["ids"][0]
        number = self.env.toc_secnumbers.get(self.docname, {}).get(anchor, ())
        suffix = self.env.config.html_secnumber_suffix
        prefix = ".".join(map(str, number)) + suffix if number else ""
        return "#" * depth + f" {prefix}{self.inline(title)}"

    def _numbered(self, node: nodes.Element, counter: str) -> str:
        """'Theorem 1.2', as the site has it."""
        kind = node.get("realtype", counter).title()
        return f"{kind} {self._number(node, counter)}"

    def _number(self, node: nodes.Element, counter: str) -> str:
        number = self.numbers.get(counter, {}).get(node["ids"][0])
        if number is None:
            self.fail(node, f"no {counter} number: is it in the toctree?")
        return ".".join(map(str, number))

    # Blocks

    def blocks(self, parent: nodes.Element, start: int = 0) -> str:
        """The children of ``parent`` as blocks inside another block."""
        texts = [
            self.block(node, nested=True) for node in parent.children[start:]
        ]
        return "\n\n".join(text for text in texts if text)

    def block(self, node: nodes.Node, nested: bool = False) -> str:
        """One block; ``nested`` in another, an equation takes one line."""
        if node_name(node) in _SILENT or "checked" in node.get("classes", ()):
            return ""
        method = getattr(self, f"_{node_name(node)}", None)
        if node_name(node) not in _BLOCKS or method is None:
            self.fail(node, f"'{node_name(node)}' is no markup of a chapter")
        if node_name(node) == "math_block":
            return self._math_block(node, nested)
        return method(node)

    def _paragraph(self, node: nodes.Element) -> str:
        text = _LINE_START.sub(r"\1\\", self.inline(node))
        return _NUMBERED.sub(r"\1\\\2", text)

    def _math_block(self, node: nodes.math_block, nested: bool) -> str:
        tex = node.astext().strip()
        if node.get("nowrap") or re.search(
            r"\\begin\{(align|gather|equation|multline)\*?\}", tex
        ):
            self.fail(node, "an equation takes aligned, not align")
        if re.search(r"(?<!\\)%", tex):
            self.fail(node, "a TeX comment in an equation")
        rows = [row.strip() for row in tex.split("\n\n") if row.strip()]
        rows = [
            rf"\begin{{aligned}}{chr(10)}{row}{chr(10)}\end{{aligned}}"
            if r"\\" in row and not row.startswith(r"\begin{aligned}")
            else row
            for row in rows
        ]
        tex = "\n\\\\\n".join(rows)
        if len(rows) > 1:
            tex = f"\\begin{{aligned}}\n{tex}\n\\end{{aligned}}"
        if node.get("label"):
            tex += rf" \tag{{{self._number(node, 'displaymath')}}}"
        tex = f"$$\n{self.tex(tex)}\n$$"
        return " ".join(tex.split()) if nested else tex

    def _literal_block(self, node: nodes.literal_block) -> str:
        text = node.astext().rstrip("\n")
        runs = re.findall(r"^\s*(`{3,})", text, re.M)
        fence = "`" * max([3, *(len(run) + 1 for run in runs)])
        language = node.get("language", "")
        language = "" if language in ("none", "default") else language
        return f"{fence}{language}\n{text}\n{fence}"

    def _bullet_list(self, node: nodes.Element) -> str:
        return self._items(node, lambda _: "- ")

    def _enumerated_list(self, node: nodes.Element) -> str:
        first = node.get("start", 1)
        return self._items(node, lambda place: f"{first + place}. ")

    def _items(self, node: nodes.Element, mark) -> str:
        items = []
        for place, item in enumerate(node.children):
            indent = " " * len(mark(place))
            text = re.sub(r"\n(?=[^\n])", "\n" + indent, self.blocks(item))
            items.append(mark(place) + text)
        loose = any("\n\n" in item for item in items)
        return ("\n\n" if loose else "\n").join(items)

    def _block_quote(self, node: nodes.Element) -> str:
        return quote(self.blocks(node))

    def _transition(self, node: nodes.Element) -> str:
        return "" if "footnotes" in node["classes"] else "---"

    def _table(self, node: nodes.table) -> str:
        rows = [
            [self._entry(entry) for entry in row.children]
            for row in node.findall(nodes.row)
        ]
        marks = {"text-left": ":--", "text-right": "--:"}
        marks["text-center"] = ":-:"
        head = next(iter(node.findall(nodes.row)))
        rows.insert(
            1,
            [
                next((marks[c] for c in entry["classes"] if c in marks), "---")
                for entry in head.children
            ],
        )
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def _entry(self, entry: nodes.entry) -> str:
        text = self.blocks(entry)
        if "\n\n" in text:
            self.fail(entry, "a table's cell holds one paragraph")
        text = re.sub(
            r"\$[^$]+\$",
            lambda m: m[0].replace(r"\|", r"\Vert ").replace("|", r"\vert "),
            " ".join(text.split()),
        )
        return re.sub(r"(?<!\\)\|", r"\\|", text)

    def _figure(self, node: nodes.figure) -> str:
        parts = []
        for child in node.children:
            if isinstance(child, nodes.caption):
                number = self._number(node, "figure")
                label = self.env.config.numfig_format["figure"] % number
                parts.append(f"*{label}* {self.inline(child)}")
            elif isinstance(child, nodes.legend):
                parts.append(self.blocks(child))
            else:
                parts.append(self.inline_of(child))
        return "\n\n".join(parts)

    # What stands aside

    def _admonition(self, node: nodes.Element) -> str:
        if isinstance(node[0], nodes.title):
            title, start = node[0], 1
            bold, summary = self.inline(title), self.plain(title)
        else:
            bold = summary = admonitionlabels[node_name(node)]
            start = 0
        body = self.blocks(node, start)
        if _FOLDED & set(node["classes"]):
            return details(summary, body)
        return quote(f"**{bold}**\n\n{body}")

    _note = _tip = _warning = _important = _admonition

    def _sidebar(self, node: nodes.sidebar) -> str:
        titled = isinstance(node[0], nodes.title)
        body = self.blocks(node, int(titled))
        if titled and (title := self.inline(node[0]).strip()):
            body = f"**{title}**\n\n{body}"
        return quote(body)

    def _container(self, node: nodes.container) -> str:
        if is_cell(node):
            self.fail(node, "a code cell inside another block")
        kind = node.get("design_component")
        if kind == "dropdown" and isinstance(node[0], nodes.rubric):
            return details(self.plain(node[0]), self.blocks(node, 1))
        if kind == "tab-set":
            return "\n\n".join(
                quote(f"**{self.inline(tab[0])}**\n\n{self.blocks(tab[1])}")
                for tab in node.children
            )
        if kind or node["classes"]:
            self.fail(node, f"'{kind or node['classes'][0]}' is no markup")
        return self.blocks(node)

    def _statement(self, node: nodes.Element) -> str:
        if node.get("realtype") not in _STATEMENTS:
            self.fail(node, f"'prf:{node.get('realtype')}' is no markup")
        label = self._numbered(node, node["countertype"])
        return self._titled(node, label)

    _theorem_node = _algorithm_node = _statement
    _definition_node = _lemma_node = _proposition_node = _statement

    def _exercise_enumerable_node(self, node: nodes.Element) -> str:
        return self._titled(node, self._numbered(node, "exercise"))

    def _titled(self, node: nodes.Element, label: str) -> str:
        title = self.inline(node[0]).strip()
        body = self.blocks(node[1])
        if _FOLDED & set(node["classes"]):
            return details(f"{label} {self.plain(node[0])}".strip(), body)
        return quote(f"**{f'{label} {title}'.strip()}**\n\n{body}")

    def _proof_node(self, node: nodes.Element) -> str:
        inner = node[0]
        body = re.sub(r"^Proof\. ", "", self.blocks(inner))
        if _FOLDED & set(inner["classes"]):
            return details("Proof", body)
        return quote(f"**Proof.** {body}")

    def take_notes(self) -> list[str]:
        """The footnotes cited since the last call, to stand in that cell."""
        notes = []
        while self.cited:
            note = self.footnotes[self.cited.pop(0)]
            label = f"<sup>{note[0].astext()}</sup>"
            notes.append(f"{label} {self.blocks(note, 1)}")
        return notes


_SILENT = {"target", "comment", "footnote", "index", "meta"}
_BLOCKS = {
    *("admonition", "block_quote", "bullet_list", "container"),
    *("enumerated_list", "exercise_enumerable_node", "figure", "important"),
    *("literal_block", "math_block", "note", "paragraph", "proof_node"),
    *("sidebar", "table", "tip", "transition", "warning"),
    *(f"{kind}_node" for kind in _STATEMENTS),
}
