"""The README's picture is a figure of the book: take it from a built page.

    python book/picture.py [build/html]

writes book/_static/chunk.svg from chapter 3.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

BOOK = Path(__file__).resolve().parent
PAGE = "03_chunkwise.html"
PICTURE = BOOK / "_static" / "chunk.svg"


def picture(site: Path) -> str:
    """The square of scores, cut into chunks, as an SVG file of its own.

    Its colours stay CSS variables with fallbacks that read on white and on
    black: outside the site the fallbacks are used.
    """
    page = (site / PAGE).read_text("utf-8")
    found = re.search(
        r'<svg class="fw-figure"[^>]*aria-label="The lower triangle.*?</svg>',
        page,
        re.S,
    )
    if found is None:
        raise ValueError(f"site: {site / PAGE} lacks the triangle")
    return found[0].replace(' class="fw-figure"', "", 1) + "\n"


if __name__ == "__main__":
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "build/html")
    PICTURE.write_text(picture(site), "utf-8")
    print(PICTURE)
