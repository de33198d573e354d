"""How the book looks: what Sphinx reads before it builds the site."""

import hashlib
import sys
import tomllib
from pathlib import Path

BOOK = Path(__file__).resolve().parent
ROOT = BOOK.parent
sys.path[:0] = [str(BOOK), str(BOOK / "extensions")]

from environment import versions  # noqa: E402  (it lies beside this file)


def sources_digest(root: Path = ROOT) -> str:
    """One short name for the library as the chapters would import it now.

    The execution cache sees only the text of the cells. Naming its folder
    after the library, the Python and the packages that compute makes a
    change in any of them run every chapter again.
    """
    digest = hashlib.sha256(versions().encode())
    for file in sorted([root / "constraints.txt", *(root / "src").rglob("*")]):
        made = file.suffix == ".pyc" or file.parent.suffix == ".egg-info"
        if file.is_file() and not made:
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


_METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
_REPOSITORY = _METADATA["project"]["urls"]["Repository"]
_OWNER, _NAME = _REPOSITORY.split("/")[-2:]

project = "Fast Weights"
author = "the Fast Weights authors"
copyright = "the Fast Weights authors · text CC BY 4.0 · code MIT"
release = _METADATA["project"]["version"]
language = "en"

extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_exercise",
    "sphinx_proof",
    "sphinxcontrib.bibtex",
    "assets",
    "capabilities",
    "checked",
    "api_entries",
    "equations",
    "folds",
    "lists",
    "parts",
    "run_links",
    "sections",
    "standing",
]
exclude_patterns = ["**.ipynb_checkpoints"]
templates_path = ["_templates"]

# Text
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
bibtex_bibfiles = ["references.bib"]
bibtex_reference_style = "author_year"

# Numbers: one counter a chapter for equations, theorems, exercises, figures
numfig = True
numfig_secnum_depth = 1
math_numfig = True
math_number_all = False
proof_minimal_theme = True

# Code: run, cached until the cells or the library change
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "cells" / sources_digest())
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_execution_show_tb = True
nb_merge_streams = True
copybutton_exclude = ".linenos, .gp, .go"

# The reference: entries from docstrings, shapes in their signatures
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 60

# Equations: MathML, made when a page is built
html_math_renderer = "mathml"
myst_update_mathjax = False
_TEMML = BOOK / "node_modules" / "temml"

# Pages
html_theme = "sphinx_book_theme"
html_title = "Fast Weights"
html_baseurl = f"https://{_OWNER}.github.io/{_NAME}/"
html_additional_pages = {"404": "404.html"}
html_static_path = [
    "_static",
    str(ROOT / "build" / "static" / "palette.css"),
    str(_TEMML / "dist" / "Temml-STIX2.css"),
    str(_TEMML / "contrib" / "copy-tex" / "copy-tex.min.js"),
]
html_css_files = ["palette.css", "book.css"]
html_js_files = ["search.js", ("book.js", {"defer": "defer"})]
html_use_index = html_domain_indices = False
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {
    "**": [
        "navbar-logo.html",
        "search-button-field.html",
        "sbt-sidebar-nav.html",
    ]
}
html_secnumber_suffix = "\u2002"
html_favicon = "_static/mark.svg"
html_theme_options = {
    "navbar_persistent": [],
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "toc_title": "On this page",
    "use_download_button": False,
    "use_fullscreen_button": False,
    "repository_url": _REPOSITORY,
    "path_to_docs": "chapters",
    "use_edit_page_button": True,
    "use_issues_button": True,
    "use_repository_button": True,
    "footer_content_items": ["edition.html", "copyright.html"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "search_as_you_type": True,
    "search_bar_text": "Search the book",
}

# Read by the book's own extensions
book_repository = _REPOSITORY
book_notebooks = str(ROOT / "build" / "notebooks")
book_palette = html_static_path[1]
book_minisearch = str(
    BOOK / "node_modules" / "minisearch" / "dist" / "umd" / "index.js"
)
