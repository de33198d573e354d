"""A Sphinx builder that writes each chapter as a notebook.

Jupytext reads the code cells, ``to_markdown`` writes what Sphinx resolved.
Markup that no notebook can hold and a lost code cell are errors.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import jupytext
import nbformat
from docutils import nodes
from folded import holds
from inline_markdown import MarkupError, where
from macros import SYMBOLS
from run_links import colab_url
from sphinx.application import Sphinx
from sphinx.builders import Builder
from sphinx_book_theme.directives import Margin
from to_markdown import (
    Code,
    Heading,
    Solution,
    Writer,
    details,
    is_cell,
)

from fastweights.torch_internals import TESTED

CELL = re.compile(r"^[ >]*[`:~]{3,}\{code-cell\}", re.M)
CHAPTER = re.compile(r"(\d\d|appendix|before)_\w+")
FOLDED = {"hide-cell", "hide-input", "remove-input", "solution"}
TAGS = FOLDED | {"exercise-stub", "gpu"}

# For Colab and for JupyterLab: fold a cell's source, not its output.
HIDDEN = {"cellView": "form", "jupyter": {"source_hidden": True}}

BOOK = Path(__file__).resolve().parent
ROOT = BOOK.parent

RESIDUE = re.compile(
    r"^\s*(?:> )*:::|`{3,}\{|\{[\w:-]+\}`"
    rf"|\\(?:{'|'.join(SYMBOLS)})(?![A-Za-z])",
    re.M,
)
CODE = re.compile(
    r"^(\s*(?:> )*)(`{3,})(?!\{).*?^\1\2$|(`+)[^`]+\3", re.M | re.S
)


def first_cell(repository: str) -> str:
    """Installs the library as it is in this clone, where it is missing."""
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    given = {
        "REPOSITORY@COMMIT": f"{repository}@{commit(ROOT)}",
        '"TORCH"': repr(TESTED["torch"][0]),
        '"TRITON"': repr(TESTED["triton"][0]),
        "PIN": re.search(r"^triton==(.*)", pins, re.M)[1],
    }
    text = (BOOK / "first_cell.py").read_text("utf-8").strip()
    for name, value in given.items():
        text = text.replace(name, value)
    return text


def commit(clone: Path) -> str:
    """Its commit; "main" where there is none, as in an unpacked archive."""
    if not (clone / ".git").exists():  # it may lie in another clone
        return "main"
    try:
        said = subprocess.run(
            ["git", "-C", str(clone), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "main"
    return said.stdout.strip()


class NotebookBuilder(Builder):
    """Resolves every chapter's references to addresses on the site."""

    name = "notebook"
    format = "markdown"
    supported_image_types: ClassVar = [
        "image/svg+xml",
        "image/png",
        "image/jpeg",
    ]

    def init(self) -> None:
        self.site = self.config.html_baseurl
        self.notebooks: dict[str, nbformat.NotebookNode] = {}

    def get_outdated_docs(self) -> set[str]:
        return self.env.found_docs

    def get_target_uri(self, docname: str, typ: str | None = None) -> str:
        return f"{self.site}{docname}.html"

    def get_relative_uri(
        self, from_: str, to: str, typ: str | None = None
    ) -> str:
        return self.get_target_uri(to, typ)

    def write_doc(self, docname: str, doctree: nodes.document) -> None:
        if CHAPTER.fullmatch(docname):
            self.notebooks[docname] = notebook(self, docname, doctree)


def notebook(
    builder: Builder, docname: str, doctree: nodes.document
) -> nbformat.NotebookNode:
    """The notebook of one chapter."""
    path = str(builder.env.doc2path(docname))
    sources = [
        cell
        for cell in jupytext.read(path, fmt="md:myst").cells
        if cell.cell_type == "code"
    ]
    _no_cell_is_lost(path, [cell.source for cell in sources])
    found = sum(is_cell(node) for node in doctree.findall(nodes.container))
    if found != len(sources):
        raise MarkupError(
            f"{path}: {len(sources)} code cells, of which {found} on the page"
        )
    writer = Writer(builder, docname, doctree)
    cells = [("code", first_cell(builder.config.book_repository), HIDDEN)]
    cells += _cells(writer, iter(sources), _links(builder, docname))
    written = sum(kind == "code" for kind, _, _ in cells)
    if written != len(sources) + 1:
        raise MarkupError(f"{path}: {written} code cells written")
    result = nbformat.v4.new_notebook(metadata=_metadata(docname))
    result.cells = _with_ids(cells)
    for cell in result.cells:
        if cell.cell_type == "markdown":
            text = CODE.sub("", cell.source)
            if residue := RESIDUE.search(text):
                line = text[: residue.start()].count("\n")
                raise MarkupError(
                    f"{path}: MyST survives: {text.splitlines()[line]!r}"
                )
    nbformat.validate(result)
    return result


def _no_cell_is_lost(path: str, sources: list[str]) -> None:
    """Inside another block a cell is no cell: neither reader reports it."""
    text = Path(path).read_text("utf-8")
    starts = [match.start() for match in CELL.finditer(text)]
    for start, end, source in zip_longest(
        starts, starts[1:], sources, fillvalue=None
    ):
        if source is None or source not in text[start:end]:
            line = text.count("\n", 0, start) + 1
            raise MarkupError(f"{path}:{line}: a code cell in another block")


def _links(builder: Builder, docname: str) -> str:
    colab = colab_url(builder.config.book_repository, docname)
    badge = "https://colab.research.google.com/assets/colab-badge.svg"
    return (
        f"[![Open in Colab]({badge})]({colab}) · "
        f"[this chapter on the book's site]({builder.get_target_uri(docname)})"
    )


def _cells(
    writer: Writer, sources: Iterator[Any], links: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Kind, source and metadata of every cell after the first."""
    text: list[str] = []
    solution, told = "", False

    def flush() -> Iterator[tuple[str, str, dict[str, Any]]]:
        nonlocal told
        blocks, told_now = text + writer.take_notes(), told
        text.clear()
        if solution and blocks:
            title = f"{solution}, continued" if told_now else solution
            blocks = [details(title, "\n\n".join(blocks))]
            told = True
        if blocks:
            yield "markdown", "\n\n".join(blocks), {}

    for piece in writer.pieces():
        if isinstance(piece, str):
            text.append(piece)
            continue
        if isinstance(piece, Heading):
            # A heading straight under another shares its cell.
            if not all(block.startswith("#") for block in text):
                yield from flush()
            text.append(piece.text)
            if links:
                text.append(links)
                yield from flush()
                links = ""
            continue
        yield from flush()
        if isinstance(piece, Solution):
            solution, told = piece.title, False
        else:
            if solution and not told:
                yield "markdown", f"**{solution}**", {}
                told = True
            yield _code_cell(writer, next(sources), piece)
    yield from flush()


def _code_cell(
    writer: Writer, cell: Any, piece: Code
) -> tuple[str, str, dict[str, Any]]:
    tags = cell.metadata.get("tags", [])
    checks = [tag[6:] for tag in tags if tag.startswith("check:")]
    unknown = {tag for tag in tags if not tag.startswith("check:")} - TAGS
    if unknown:
        raise MarkupError(f"{where(piece.node)}: unknown tag {min(unknown)!r}")
    metadata: dict[str, Any] = {"tags": tags} if tags else {}
    source = cell.source
    if FOLDED & set(tags):
        metadata |= HIDDEN
        title = _title(writer, source, tags, checks, piece)
        source = f"# @title {title}\n{source}"
    return "code", source, metadata


def _title(
    writer: Writer,
    source: str,
    tags: list[str],
    checks: list[str],
    piece: Code,
) -> str:
    """What a folded cell holds, in the reader's words."""
    if "solution" in tags:
        return f"Solution to {piece.exercise}"
    if checks:
        numbers = writer.numbers.get("displaymath", {})
        found = []
        for label in checks:
            number = numbers.get(nodes.make_id(f"equation-{label}"))
            if number is None:
                raise MarkupError(
                    f"{where(piece.node)}: no equation for the tag "
                    f"check:{label}"
                )
            found.append(number)
        names = [f"({'.'.join(map(str, number))})" for number in found]
        plural = "s" if len(names) > 1 else ""
        return f"Check of equation{plural} {', '.join(names)}"
    held = "check" if "hide-cell" in tags else holds(source)
    return f"Check of {piece.exercise}" if held == "exercise" else held.title()


def _with_ids(
    cells: list[tuple[str, str, dict[str, Any]]],
) -> list[nbformat.NotebookNode]:
    """Cells whose ids come from their text: a change elsewhere keeps them."""
    seen: dict[str, int] = {}
    result = []
    for kind, source, metadata in cells:
        digest = hashlib.sha256(f"{kind}\n{source}".encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        make = getattr(nbformat.v4, f"new_{kind}_cell")
        id_ = digest + (f"-{seen[digest]}" if seen[digest] > 1 else "")
        result.append(make(source, id=id_, metadata=metadata))
    return result


def _metadata(docname: str) -> dict[str, Any]:
    return {
        "accelerator": "GPU",
        "colab": {
            "name": f"{docname}.ipynb",
            "provenance": [],
            "toc_visible": True,
        },
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {
            "file_extension": ".py",
            "mimetype": "text/x-python",
            "name": "python",
            "pygments_lexer": "ipython3",
        },
    }


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_builder(NotebookBuilder)
    # The theme brings {margin}, but only to builders of HTML.
    app.add_directive("margin", Margin, override=True)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
