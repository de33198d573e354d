"""Chapters are numbered through the parts: Sphinx begins each toctree at 1."""

from unittest.mock import patch

from docutils import nodes
from sphinx.addnodes import toctree
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.environment.collectors.toctree import TocTreeCollector

_number = TocTreeCollector.assign_section_numbers


def number(collector: TocTreeCollector, env: BuildEnvironment) -> list[str]:
    """Number a page's numbered toctrees as if they were one."""
    read = env.get_doctree

    def joined(docname: str) -> nodes.document:
        document = read(docname)
        trees = document.findall(toctree)
        first, *others = [tree for tree in trees if tree.get("numbered")]
        for other in others:
            first["entries"] += other["entries"]
            other["numbered"] = 0
        return document

    with patch.object(env, "get_doctree", joined):
        return _number(collector, env)


def setup(app: Sphinx) -> dict[str, bool]:
    TocTreeCollector.assign_section_numbers = number
    return {"parallel_read_safe": True, "parallel_write_safe": True}
