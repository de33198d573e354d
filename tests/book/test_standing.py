"""What a page says of itself, before a site is built."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "book"), str(ROOT / "book" / "extensions")]

pytest.importorskip("sphinx")
import standing  # noqa: E402
from docutils import nodes  # noqa: E402
from docutils.utils import new_document  # noqa: E402


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A state forgets.", "A state forgets."),
        ("It forgets; it writes on and on.", "It forgets."),
        ("It forgets and writes on and on", "It forgets and writes on …"),
    ],
    ids=["whole", "clause", "word"],
)
def test_a_description_ends_where_a_clause_or_a_word_does(text, said):
    document = new_document("")
    title = nodes.title(text="Decay")
    document += nodes.section("", title, nodes.paragraph(text=text))
    assert standing.description(document, length=25) == said


def test_an_unpacked_archive_has_no_day(monkeypatch, tmp_path):
    assert standing.changed("README.md") or not (ROOT / ".git").exists()
    monkeypatch.setattr(standing, "BOOK", tmp_path / "book")
    assert standing.changed("README.md") is None
