"""Where a chapter can be run: its notebook, beside the page and in Colab.

The notebooks are generated before the site; a page without one gets no link.
"""

import posixpath
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder

_BRANCH = "gh-pages"


def _notebook(app: Sphinx, docname: str) -> Path | None:
    path = Path(app.config.book_notebooks, f"{docname}.ipynb")
    return path if path.is_file() else None


def colab_url(repository: str, docname: str) -> str:
    """Colab opens a notebook of the published branch by its address."""
    project = repository.removeprefix("https://github.com/").strip("/")
    return (
        f"https://colab.research.google.com/github/{project}"
        f"/blob/{_BRANCH}/notebooks/{docname}.ipynb"
    )


def add_links(
    app: Sphinx,
    pagename: str,
    templatename: str,
    context: dict[str, Any],
    doctree: nodes.document | None,
) -> None:
    """Put the two links under the chapter's title."""
    if not doctree or not _notebook(app, pagename):
        return
    folder = posixpath.relpath(".", posixpath.dirname(pagename) or ".")
    local = posixpath.normpath(f"{folder}/notebooks/{pagename}.ipynb")
    colab = colab_url(app.config.book_repository, pagename)
    links = (
        '</h1>\n<p class="run-links">'
        f'<a href="{local}" download>Notebook</a>'
        f'<a href="{colab}">Open in Colab</a></p>'
    )
    context["body"] = context["body"].replace("</h1>", links, 1)


def copy_notebooks(app: Sphinx, error: Exception | None) -> None:
    """Publish the notebooks with the pages."""
    if error or not isinstance(app.builder, StandaloneHTMLBuilder):
        return
    for docname in app.env.found_docs:
        if notebook := _notebook(app, docname):
            target = Path(app.outdir, "notebooks", f"{docname}.ipynb")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(notebook, target)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("book_notebooks", "", "html", [str])
    app.add_config_value("book_repository", "", "html", [str])
    app.connect("html-page-context", add_links)
    app.connect("build-finished", copy_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
