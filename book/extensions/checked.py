"""Ties equations to the code that checks them, and names folded cells.

A code cell tagged `check:LABEL` gets a caption that links to the equation,
and the equation a small mark that links back to the cell. Only pages get
them: a notebook is made from the same chapter without.
"""

from typing import Any

from docutils import nodes
from folded import holds
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx_proof.nodes import proof_node

_TAG = "check:"
PROMPTS = {
    "exercise": "Check of this exercise",
    "figure": "Code of this figure",
    "film": "Code of this film",
    "imports": "Imports",
    "code": "Code",
}
_REPEATED = {"proof-content", "exercise-content", "solution-content"}


def _prompt(cell: nodes.container, labels: list[str]) -> str:
    """What a folded cell holds, in the reader's words."""
    source = cell[0].astext()
    held, whole = holds(source), cell["hide_mode"] == "all"
    if whole and held == "figure":
        return "Figure"
    listed = "\nshow(" in f"\n{source}"
    if (labels or (whole and not listed)) and held != "exercise":
        return "Check"
    return PROMPTS[held]


def _caption(labels: list[str], docname: str) -> nodes.paragraph:
    caption = nodes.paragraph("", "checks ", classes=["checks"])
    for place, label in enumerate(labels):
        caption += nodes.Text(", " if place else "")
        caption += addnodes.pending_xref(
            "",
            nodes.literal(text=label),
            refdomain="math",
            reftype="eq",
            reftarget=label,
            refdoc=docname,
            refwarn=True,
            refexplicit=False,
        )
        caption["ids"].append(f"check-{label}")
    return caption


def _mark(label: str) -> nodes.paragraph:
    link = nodes.reference(
        "",
        "checked",
        internal=True,
        refuri=f"#check-{label}",
        reftitle="the code that checks this equation",
    )
    return nodes.paragraph("", "", link, classes=["checked"])


class Checks(SphinxPostTransform):
    """Caption the checks of one page and mark what they check."""

    default_priority = 5  # before references are resolved, and cells folded
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        unmarked = {
            equation["label"]: equation
            for equation in self.document.findall(nodes.math_block)
            if equation.get("label")
        }
        for cell in list(self.document.findall(nodes.container)):
            if cell.get("nb_element") != "cell_code":
                continue
            tags = cell.get("cell_metadata", {}).get("tags", [])
            labels = [t.removeprefix(_TAG) for t in tags if _TAG in t]
            if cell.get("hide_mode"):
                cell["prompt_show"] = _prompt(cell, labels)
            if labels:
                caption = _caption(labels, self.env.docname)
                caption.source, caption.line = cell.source, cell.line
                if cell.get("hide_mode") == "all":
                    cell.insert(1, caption)  # below the code, folded with it
                else:
                    cell.parent.insert(cell.parent.index(cell), caption)
            for label in labels:
                if equation := unmarked.pop(label, None):
                    place = equation.parent.index(equation) + 1
                    equation.parent.insert(place, _mark(label))


class Statements(SphinxPostTransform):
    """Set 'Proof.' apart, and drop ids that every statement repeats."""

    default_priority = 5
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        for proof in self.document.findall(proof_node):
            body = proof[0]
            body["classes"] = ["proof", "argument"]
            body["ids"] = []
            first = body[0]
            if first.astext().startswith("Proof. "):
                rest = first[0].astext().removeprefix("Proof. ")
                first[0:1] = [
                    nodes.emphasis(text="Proof."),
                    nodes.Text(f" {rest}"),
                ]
        for section in self.document.findall(nodes.section):
            section["ids"] = [
                name for name in section["ids"] if name not in _REPEATED
            ]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(Checks)
    app.add_post_transform(Statements)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
