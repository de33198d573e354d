"""Lists that are lists, for readers who have pages read to them.

docutils makes references entries of no list, and Sphinx a signature that is
long a list of definitions without terms.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

TAGS = {
    "<dl>": "",
    "</dl>": "",
    "<dd>": '<span class="parameter">',
    "</dd>": "</span>",
}


class References(SphinxPostTransform):
    """Make the bibliography a list of paragraphs: its labels name nobody."""

    default_priority = 200  # after links to it are resolved
    formats = ("html",)

    def run(self, **kwargs: object) -> None:
        found = list(self.document.findall(nodes.citation))
        if not found:
            return
        items = nodes.bullet_list(classes=["references"])
        for citation in found:
            items += nodes.list_item("", *citation[1:], ids=citation["ids"])
        found[0].parent.replace_self(items)


def signatures(
    app: Sphinx, page: str, template: str, context: dict[str, Any], *_: Any
) -> None:
    """Write the lines of a signature as lines."""
    context["body"] = re.sub(
        r'<dt class="sig .*?</dt>',
        lambda x: re.sub("</?d[ld]>", lambda tag: TAGS[tag[0]], x[0]),
        context.get("body", ""),
        flags=re.S,
    )


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(References)
    app.connect("html-page-context", signatures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
