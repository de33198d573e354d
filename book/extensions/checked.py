"""Ties equations to the code that checks them, and names folded cells.

A code cell tagged `check:LABEL` gets a caption that links to the equation,
and the equation a small mark that links back to the cell.
"""

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

_TAG = "check:"


def _cells(doctree: nodes.document) -> list[nodes.container]:
    return [
        cell
        for cell in doctree.findall(nodes.container)
        if cell.get("nb_element") == "cell_code"
    ]


def _tags(cell: nodes.container) -> list[str]:
    return cell.get("cell_metadata", {}).get("tags", [])


def _prompt(cell: nodes.container) -> str:
    """What a folded cell holds, in the reader's words."""
    source = "".join(
        block.astext()
        for part in cell.findall(nodes.container)
        if part.get("nb_element") == "cell_code_source"
        for block in part.findall(nodes.literal_block)
    )
    if "@exercise" in source:
        return "the check of this exercise"
    if any(tag.startswith(_TAG) for tag in _tags(cell)):
        return "the check"
    if "draw(" in source:
        return "the code of this figure"
    return "the code"


def _caption(cell: nodes.container, labels: list[str], docname: str) -> None:
    caption = nodes.paragraph(classes=["checks"])
    caption += nodes.inline(text="checks ")
    for place, label in enumerate(labels):
        if place:
            caption += nodes.Text(", ")
        link = addnodes.pending_xref(
            "",
            nodes.literal(text=label),
            refdomain="math",
            reftype="eq",
            reftarget=label,
            refdoc=docname,
            refwarn=True,
            refexplicit=False,
        )
        link.source, link.line = cell.source, cell.line
        caption += link
        cell["ids"].append(f"check-{label}")
    cell.insert(0, caption)


def _mark(equation: nodes.math_block, label: str) -> None:
    mark = nodes.container(classes=["checked"])
    mark += nodes.paragraph(
        "",
        "",
        nodes.reference(
            "",
            "checked",
            internal=True,
            refuri=f"#check-{label}",
            reftitle="the code that checks this equation",
        ),
    )
    equation.parent.insert(equation.parent.index(equation) + 1, mark)


def annotate(app: Sphinx, doctree: nodes.document) -> None:
    """Caption the checks of one document and mark what they check."""
    equations = {
        equation["label"]: equation
        for equation in doctree.findall(nodes.math_block)
        if equation.get("label")
    }
    marked = set()
    for cell in _cells(doctree):
        if cell.get("hide_mode"):
            name = _prompt(cell)
            cell["prompt_show"] = f"Show {name}"
            cell["prompt_hide"] = f"Hide {name}"
        labels = [
            tag.removeprefix(_TAG)
            for tag in _tags(cell)
            if tag.startswith(_TAG)
        ]
        if not labels:
            continue
        _caption(cell, labels, app.env.docname)
        for label in labels:
            if label in equations and label not in marked:
                _mark(equations[label], label)
                marked.add(label)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", annotate)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
