"""What a page says of itself: description, address, picture, date.

For search engines, for those who are sent a link, and for citing.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from docutils import nodes
from matplotlib.patches import FancyBboxPatch
from sections import plain
from sphinx.application import Sphinx

BOOK = Path(__file__).resolve().parents[1]
CARD = "card.png"


def description(document: nodes.document, length: int = 180) -> str:
    """How a page begins, up to the end of a clause or a word."""
    text = plain(next(iter(document.findall(nodes.section)), document))
    if len(text) <= length:
        return text
    ends = [m.start() for m in re.finditer(r"[.;:] ", text[:length])]
    if ends:
        return f"{text[: ends[-1]]}."
    return f"{text[:length].rsplit(' ', 1)[0]} …"


def changed(file: str) -> str | None:
    """The day of a file's last commit, none in an unpacked archive."""
    if not (BOOK.parent / ".git").exists():
        return None
    said = subprocess.run(
        ["git", "log", "-1", "--format=%cs", "--", file],
        cwd=BOOK.parent,
        capture_output=True,
        text=True,
    )
    return said.stdout.strip() or None


def present(
    app: Sphinx,
    pagename: str,
    templatename: str,
    context: dict[str, Any],
    doctree: nodes.document | None,
) -> None:
    """Give the page's template what it puts into the head and the foot."""
    context["card"] = f"{app.config.html_baseurl}_static/{CARD}"
    if doctree:
        context["description"] = description(doctree)
        context["last_updated"] = changed(app.env.doc2path(pagename))
    if pagename == "404":  # it is shown at any address
        base = f'<base href="{app.config.html_baseurl}"/>'
        context["metatags"] = context.get("metatags", "") + base


def draw_card(target: Path) -> None:
    """The book's mark and title, as a link's picture."""
    mark = (BOOK / "_static" / "mark.svg").read_text("utf-8")
    sides = r'x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"'
    fig = plt.figure(figsize=(12, 6.3), dpi=100, facecolor="#fdfcfa")
    ax = fig.add_axes((0, 0, 1, 1), xlim=(-9, 83), ylim=(40.15, -8.15))
    ax.axis("off")
    for *box, colour in re.findall(sides + r'.*fill="(\S+)"', mark):
        x, y, width, height = map(int, box)
        style = "round,pad=-0.5,rounding_size=1"
        grown = (x - 0.5, y - 0.5), width + 1, height + 1
        ax.add_patch(FancyBboxPatch(*grown, boxstyle=style, color=colour))
    ink = {"family": "STIXGeneral", "color": "#23252a"}
    ax.text(38, 16, "Fast Weights", size=64, va="baseline", **ink)
    words = "Linear attention,\nfrom softmax to test-time training"
    ax.text(38, 20, words, size=26, va="top", **ink)
    fig.savefig(target)
    plt.close(fig)


def publish(app: Sphinx, error: Exception | None) -> None:
    """Write the picture, and the addresses of all pages."""
    if error or app.builder.name != "html":
        return
    draw_card(Path(app.outdir, "_static", CARD))
    pages = "".join(
        f"<url><loc>{app.config.html_baseurl}{page}.html</loc></url>\n"
        for page in sorted(app.env.found_docs)
    )
    space = "http://www.sitemaps.org/schemas/sitemap/0.9"
    text = f'<urlset xmlns="{space}">\n{pages}</urlset>\n'
    Path(app.outdir, "sitemap.xml").write_text(text, "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", present)
    app.connect("build-finished", publish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
