"""The PDF that `make pdf` prints: here of three pages of the built site."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pikepdf import OutlineItem, Pdf

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(os.environ.get("FASTWEIGHTS_SITE", ROOT / "build/test/html"))
sys.path.insert(0, str(ROOT / "book"))

import pdf  # noqa: E402  (it lies in book/)

pytestmark = [
    pytest.mark.skipif(
        not SITE.is_dir(), reason=f"no site in {SITE}: `make test` builds it"
    ),
    pytest.mark.skipif(
        pdf.CHROMIUM is None, reason="no Chromium: apt-get install chromium"
    ),
]
FIRST, LAST = "01_softmax.html", "14_serving.html"


@pytest.fixture(scope="module")
def sample() -> tuple[Pdf, list[int]]:
    """The PDF, and what its contents say."""
    said = []
    call = pdf.call

    def told(tab: pdf.Tab, function: str, *arguments: object) -> None:
        if function == pdf.NUMBER:
            said[:] = arguments[0]
        call(tab, function, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pdf, "call", told)
        return pdf.book(SITE.resolve(), ["index.html", FIRST, LAST]), said


def bookmarks(made: Pdf) -> Iterator[tuple[OutlineItem, int]]:
    """Those of chapters and sections, with their pages."""
    with made.open_outline() as outline:
        _title, _contents, *chapters = outline.root
        for chapter in chapters:
            for item in (chapter, *chapter.children):
                page, *_ = item.destination
                yield " ".join(item.title.split()), pdf.Page(page).index + 1


def test_contents_and_bookmarks_lead_to_chapters_and_sections(sample) -> None:
    made, said = sample
    titles, pages = zip(*bookmarks(made), strict=True)
    assert said == list(pages)
    assert "1 Softmax attention and what it costs" in titles
    assert any(title.startswith("14.2 ") for title in titles)
    assert titles.count("Solutions") == 2 and titles[-1] == "Solutions"


def test_links_lead_into_the_book_or_to_the_web(sample) -> None:
    made, _ = sample
    links = [
        link
        for page in made.pages
        for link in page.get("/Annots", [])
        if link.Subtype == "/Link"
    ]
    within = {str(x.Dest) for x in links if "/Dest" in x}
    assert within <= set(made.Root.Dests)
    assert f"/{LAST}:" in within and f"/{LAST}:ex-pool" in within
    outside = {str(x.A.URI) for x in links if "/A" in x}
    assert all(x.startswith("https://") for x in outside)
    # What is not in the sample is on the site.
    assert f"{pdf.conf.html_baseurl}bibliography.html" in {
        x.split("#")[0] for x in outside
    }


def test_solutions_come_after_all_exercises_of_their_chapter(sample) -> None:
    made, _ = sample
    last = [
        max(
            pdf.number(made, place[1:])
            for place in made.Root.Dests
            if f"{FIRST}:{part}" in place
        )
        for part in ("ex-", "01_softmax-solution-")
    ]
    assert last == sorted(last)
