"""The API reference: from docstrings, linked to chapters and back.

A page lists names, each with the sections of chapters that derive it:

    .. entries:: fastweights

       kda  09_gated_delta#in-kimi-delta-attention-only-one-order-is-left

autodoc makes the entries. What it is told here is how docstrings are written:
as plain text, with indented examples, and fields under ``Args:`` and so on.
A chapter links to the entry of a name where it first says the name.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

from docutils import nodes
from notebook_builder import commit
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.roles import XRefRole
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).resolve().parents[2]
PAGES = "api/"
KINDS = ("class", "data", "function")  # not methods and modules
FIELDS = ("Args:", "Returns:", "Raises:", "Yields:", "Numerics:", "Stability:")
MARKUP = re.compile(r"(``.+?``|:\w+:`[^`]+`|(?<!\S)\*\w+\*(?!\w))", re.S)
# What a chapter may mean by a name: it has a module, an underscore or both
# kinds of letters. `retention` alone may be any of several, or a variable.
TELLING = re.compile(r"\w+\.|[a-z0-9]+_\w+$|[A-Z]\w*[a-z]\w*$")

_commit = functools.cache(functools.partial(commit, ROOT))


def found(name: str) -> Any:
    """The object of a dotted name, or a module or builtin.

    Raises:
        ImportError: there is none.
    """
    owner, _, last = name.rpartition(".")
    try:
        return getattr(found(owner) if owner else builtins, last)
    except AttributeError:
        return importlib.import_module(name)


class Entries(SphinxDirective):
    """Names of a module, one a line, each with sections of chapters."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        if self.env.app.builder.format != "html":
            return []
        lines = []
        for name, *sections in filter(None, map(str.split, self.content)):
            name = f"{self.arguments[0]}.{name}"
            links = ", ".join(f":section:`{x}`" for x in sections)
            lines += [*directive(name), ""]
            lines += [f"   Derived in {links}.", ""] if sections else []
        return self.parse_text_to_nodes("\n".join(lines))


def directive(name: str) -> tuple[str, str]:
    """What documents an object: autodoc's directive, and its option."""
    x = found(name)
    if inspect.isclass(x):
        return f".. autoclass:: {name}", "   :members:"
    if inspect.isroutine(x):
        return f".. autofunction:: {name}", ""
    return f".. autodata:: {name}", "   :no-value:"


def process_signature(
    app: Sphinx, what: str, name: str, x: Any, options: Any, *parts: str | None
) -> tuple[str | None, ...]:
    """Write a default that is made anew each time so that it can be read."""
    return tuple(part and part.replace("<factory>", "...") for part in parts)


def process_docstring(
    app: Sphinx, what: str, name: str, x: Any, options: Any, lines: list[str]
) -> None:
    """Replace the lines of a docstring by reStructuredText."""
    lines[:] = "\n".join(as_rst("\n".join(lines))).split("\n")


def as_rst(text: str) -> Iterator[str]:
    """A docstring as reStructuredText, a paragraph at a time."""
    for part in re.split(r"\n\s*\n(?! )", text.strip("\n")):
        head, _, body = part.partition("\n")
        if head in FIELDS:
            body = escaped(dedent(body))
            if head in ("Args:", "Raises:"):
                body = re.sub(r"(?m)^(\S[\w\\*, .]*): ", r"\1\n    ", body)
            yield f":{head}\n    " + body.replace("\n", "\n    ")
        else:
            said, *code = re.split(r"\n\s*\n(?= {4})", part, maxsplit=1)
            yield escaped(said)
            for block in code:
                yield f"\n.. code-block:: {language(block)}\n\n{block}"
        yield ""


def escaped(text: str) -> str:
    """A docstring's text: its markup is literals, roles and *emphasis*."""
    parts = MARKUP.split(text)
    parts[::2] = [re.sub(r"([*|`\\]|_\b)", r"\\\1", x) for x in parts[::2]]
    return "".join(parts)


def language(code: str) -> str:
    """What a block of a docstring is: Python, or an equation (text)."""
    try:
        compile(dedent(code), "", "exec")
    except SyntaxError:
        return "text"
    return "text" if re.search(r"\^|W_\w", code) else "python"


def sign(app: Sphinx, document: nodes.document) -> None:
    """Write the shapes in signatures as they stand in source; link to it."""
    for text in document.findall(addnodes.desc_sig_literal_string):
        if shape := re.fullmatch(r"' ?(.*)'", text.astext()):
            text[:] = [nodes.Text(f'"{shape[1]}"')]
    for signature in document.findall(addnodes.desc_signature):
        if place := source(f"{signature['module']}.{signature['fullname']}"):
            address = f"{app.config.book_repository}/blob/{_commit()}/{place}"
            words = nodes.inline(text="source", classes=["viewcode-link"])
            signature += nodes.reference("", "", words, refuri=address)


def source(name: str) -> str | None:
    """The file and lines of an object; None for fields and properties."""
    try:
        x = inspect.unwrap(found(name))
        lines, first = inspect.getsourcelines(x)
    except (ImportError, TypeError):
        return None
    file = Path(inspect.getsourcefile(x)).relative_to(ROOT).as_posix()
    return f"{file}#L{first}-L{first + len(lines) - 1}"


# Links


def entry(env: BuildEnvironment, text: str) -> str | None:
    """The name of the entry that a text names; None if it names none."""
    objects = env.domains.python_domain.objects
    for prefix in ("", "fastweights.", "fastweights.reference."):
        if (name := prefix + text.removeprefix("fw.")) in objects:
            return name
    names = [
        name
        for name, x in objects.items()
        if name.endswith(f".{text}") and x.objtype in KINDS
    ]
    return names[0] if len(names) == 1 else None


def resolve(
    app: Sphinx,
    env: BuildEnvironment,
    node: addnodes.pending_xref,
    text: nodes.TextElement,
) -> nodes.Node | None:
    """What autodoc and ``:section:`` refer to; None if there is no such."""
    target = node["reftarget"]
    if node["reftype"] == "section":
        return section(app, env, node["refdoc"], target)
    if node.get("refdomain") != "py":
        return None
    if name := entry(env, target):
        return link(app, env, node["refdoc"], name, text)
    try:
        found(target)
    except ImportError:
        return text if "." not in target else None
    return text  # there is one, and it has no entry


def section(
    app: Sphinx, env: BuildEnvironment, docname: str, target: str
) -> nodes.Node | None:
    """A link to a section, by its number, or its appendix, and title."""
    chapter, _, name = target.partition("#")
    numbers = env.toc_secnumbers.get(chapter, {})
    for title in env.tocs.get(chapter, nodes.list_item()).findall(
        nodes.reference
    ):
        if name and title["anchorname"] == f"#{name}":
            page, _, _ = env.titles[chapter].astext().partition(":")
            number = ".".join(map(str, numbers.get(f"#{name}", [f"{page}:"])))
            said = nodes.inline(text=f"{number} {title.astext()}")
            return make_refnode(app.builder, docname, chapter, name, said)
    return None


def link(
    app: Sphinx,
    env: BuildEnvironment,
    docname: str,
    name: str,
    text: nodes.TextElement,
) -> nodes.Node:
    """A link to an entry."""
    x = env.domains.python_domain.objects[name]
    return make_refnode(app.builder, docname, x.docname, x.node_id, text, name)


class Named(SphinxPostTransform):
    """Link a page to each entry where its text first names it."""

    default_priority = 5
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        docname, seen = self.env.docname, set()
        if docname.startswith(PAGES):
            return
        for literal in list(self.document.findall(nodes.literal)):
            text = literal.astext()
            name = entry(self.env, text) if TELLING.match(text) else None
            around = (nodes.reference, nodes.title, addnodes.pending_xref)
            if (
                name is None
                or name in seen
                or any(isinstance(x, around) for x in parents(literal))
            ):
                continue
            seen.add(name)
            said = literal.deepcopy()
            literal.replace_self(link(self.app, self.env, docname, name, said))


def parents(node: nodes.Node) -> Iterator[nodes.Node]:
    """The nodes around a node, innermost first."""
    while node := node.parent:
        yield node


def setup(app: Sphinx) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.autodoc")
    app.add_directive("entries", Entries)
    app.add_role("section", XRefRole())
    app.add_post_transform(Named)
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("doctree-read", sign)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
