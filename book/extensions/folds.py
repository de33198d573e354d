"""Folds: solutions and cells as <details>, each named by its own words.

The browser opens one for a reader who searches the page or follows a link
into it. Only pages get them; a notebook is made from the same chapter without.
"""

from docutils import nodes
from myst_nb.sphinx_ import HideCodeCellNode
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.writers.html5 import HTML5Translator
from sphinx_exercise.nodes import solution_node


class fold(nodes.General, nodes.Element):
    """A <details>; its first child is a summary."""


class summary(nodes.General, nodes.TextElement):
    """What a fold holds."""


class Folds(SphinxPostTransform):
    """Make folds of solutions, and of the cells that myst-nb hides."""

    default_priority = 200  # after both
    formats = ("html",)

    def run(self, **kwargs: object) -> None:
        for node in list(self.document.findall(solution_node)):
            title, *body = node.children
            for link in list(title.findall(nodes.reference)):
                link.replace_self(link.children)  # a click there unfolds
            said = summary("", "", *title.children)
            said["classes"] = ["admonition-title"]
            folded = fold("", said, *body, ids=node["ids"])
            folded["classes"] = ["admonition", "solution"]
            node.parent.replace(node, folded)
        # By their cells: myst-nb tells a whole cell's fold no parent.
        for cell in list(self.document.findall(nodes.container)):
            for place, node in enumerate(cell.children):
                if isinstance(node, HideCodeCellNode):
                    said = summary(text=node["prompt_show"])
                    folded = fold("", said, *node.children, classes=["code"])
                    cell[place] = folded


def visit(self: HTML5Translator, node: nodes.Element) -> None:
    tag = "details" if isinstance(node, fold) else "summary"
    self.body.append(self.starttag(node, tag, ""))
    self.context.append(f"</{tag}>\n")


def depart(self: HTML5Translator, node: nodes.Element) -> None:
    self.body.append(self.context.pop())


def setup(app: Sphinx) -> dict[str, bool]:
    for node in (fold, summary):
        app.add_node(node, html=(visit, depart))
    app.add_post_transform(Folds)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
