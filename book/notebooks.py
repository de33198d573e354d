"""Write the chapters as notebooks for Jupyter and Colab, or as scripts.

    python book/notebooks.py --out build/notebooks --scripts build/scripts

Sphinx, configured as for the site, numbers everything and resolves every
reference, so that a notebook says what the page says. Each of its warnings
is an error here.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from myst_nb.core.read import MystMetadataParsingError
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.docutils import docutils_namespace, patch_docutils
from sphinx.util.tags import Tags

BOOK = Path(__file__).resolve().parent
sys.path[:0] = [str(BOOK), str(BOOK / "extensions")]

from inline_markdown import MarkupError  # noqa: E402
from notebook_builder import CHAPTER  # noqa: E402


def notebooks(
    chapters: Path, confdir: Path = BOOK, **settings: Any
) -> dict[str, nbformat.NotebookNode]:
    """The notebook of every chapter in the folder ``chapters``.

    ``settings`` override those of ``confdir/conf.py``. Raises
    :class:`MarkupError`, with file and line, for whatever cannot be written.
    """
    config = Config.read(confdir, overrides={}, tags=Tags())
    settings = {
        "extensions": [*config.extensions, "notebook_builder"],
        "nb_execution_mode": "off",
        "nitpicky": True,
        "show_warning_types": True,
        **settings,
    }
    warnings = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as build,
        patch_docutils(confdir),
        docutils_namespace(),
    ):
        app = Sphinx(
            chapters,
            confdir,
            build,
            Path(build, "doctrees"),
            "notebook",
            confoverrides=settings,
            status=None,
            warning=warnings,
            freshenv=True,
        )
        problems = []
        try:
            app.build(force_all=True)
        except MarkupError as error:
            problems.append(str(error))
        except MystMetadataParsingError as error:
            problems.append(f"{app.env.doc2path(app.env.docname)}: {error}")
    if said := warnings.getvalue().strip():
        problems.append(re.sub(r"\x1b\[[\d;]*m", "", said))
    if problems:
        raise MarkupError("\n".join(problems))
    return dict(sorted(app.builder.notebooks.items()))


def script(chapter: Path) -> str:
    """All code cells of ``chapter`` as one Python script."""
    cells = jupytext.read(chapter, fmt="md:myst").cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    return "\n\n".join(code) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--chapters", type=Path, default=BOOK.parent / "chapters"
    )
    parser.add_argument("--confdir", type=Path, default=BOOK)
    parser.add_argument("--out", type=Path, help="folder for the notebooks")
    parser.add_argument("--scripts", type=Path, help="folder for the scripts")
    arguments = parser.parse_args(argv)
    written: dict[Path, str] = {}
    try:
        if arguments.out or not arguments.scripts:
            out = arguments.out or BOOK.parent / "build" / "notebooks"
            found = notebooks(arguments.chapters, arguments.confdir)
            for name, content in found.items():
                text = nbformat.writes(content, version=4)
                written[out / f"{name}.ipynb"] = text + "\n"
    except MarkupError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.scripts:
        for chapter in sorted(arguments.chapters.glob("*.md")):
            if CHAPTER.fullmatch(chapter.stem):
                path = arguments.scripts / f"{chapter.stem}.py"
                written[path] = script(chapter)
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
