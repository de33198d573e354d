"""The built site: its links, its alternatives to sight, its independence.

`make test` builds it first, into build/test/html.
"""

import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup, Tag
from support.colours import contrast

from fastweights_lab.notebook.plotting import PALETTE

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book"))

import conf  # noqa: E402
import picture as readme  # noqa: E402

SITE = Path(os.environ.get("FASTWEIGHTS_SITE", ROOT / "build/test/html"))
PAGES = sorted(
    page
    for folder in (SITE, SITE / "api")
    for page in folder.glob("*.html")
    if not page.name.startswith("_")
)
CHAPTERS = [p for p in PAGES if re.match(r"\d\d_", p.name)]
STATIC = SITE / "_static"

pytestmark = pytest.mark.skipif(
    not PAGES, reason=f"no site in {SITE}: `make test` builds it"
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
each_entry_page = pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p.parent.name == "api"],
    ids=lambda p: p.stem,
)
each_chapter = pytest.mark.parametrize("page", CHAPTERS, ids=lambda p: p.stem)

# Hosts that scripts of the theme and of MiniSearch name and never ask:
# licences, namespaces, sources.
NAMED_ONLY = {
    "cdn.jsdelivr.net",
    "clipboardjs.com",
    "developer.mozilla.org",
    "github.com",
    "pydata-sphinx-theme.readthedocs.io",
    "stevehanov.ca",
    "www.apache.org",
    "www.w3.org",
}


@functools.cache
def soup(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text("utf-8"), "html.parser")


@functools.cache
def anchors(page: Path) -> set[str]:
    return {str(tag["id"]) for tag in soup(page).find_all(id=True)}


def test_the_readmes_picture_is_the_books():
    committed = readme.PICTURE.read_text("utf-8")
    assert committed == readme.picture(SITE), "run: python book/picture.py"


def is_external(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def resources(page: Path) -> Iterator[str]:
    """Every address that a browser loads by itself with the page."""
    for tag in soup(page).find_all(True):
        if tag.name == "link" and "canonical" not in tag.get("rel", []):
            yield tag.get("href", "")
        if tag.name == "use":
            yield tag.get("xlink:href", "")
        if tag.name != "a":
            yield tag.get("src", "")
            yield tag.get("data", "") if tag.name == "object" else ""
            yield from re.split(r"\s+", tag.get("srcset", ""))
        yield from css_addresses(tag.get("style", ""))
        if tag.name == "style":
            yield from css_addresses(tag.text)


def css_addresses(css: str) -> Iterator[str]:
    for pattern in [r"url\(['\"]?(?!data:)([^'\")]*)", r"@import ['\"](.*?)"]:
        yield from re.findall(pattern, css)


@each_page
def test_a_page_asks_no_other_host(page: Path) -> None:
    assert not [a for a in resources(page) if is_external(a)]
    for script in soup(page).find_all("script", src=False):
        assert not re.search(r"(fetch|import|open)\(['\"]http", script.text)


def test_style_sheets_ask_no_other_host() -> None:
    sheets = list(SITE.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        found = css_addresses(sheet.read_text("utf-8"))
        assert not [a for a in found if is_external(a)], sheet


def test_scripts_name_no_unknown_host() -> None:
    found = {
        host
        for script in SITE.rglob("*.js")
        for host in re.findall(
            r"https?://([\w.-]+\.[a-z]{2,})", script.read_text("utf-8")
        )
    }
    assert found <= NAMED_ONLY


def files_of(page: Path) -> set[Path]:
    """The files that a browser loads for a page, itself and fonts included."""
    files = {page}
    for address in resources(page):
        path = unquote(urlsplit(address).path)
        if path and not path.endswith(".html"):  # the next page, say
            files.add((page.parent / path).resolve())
    for sheet in [x for x in files if x.suffix == ".css"]:
        for address in filter(None, css_addresses(sheet.read_text("utf-8"))):
            files.add((sheet.parent / address).resolve())
    return files


@each_page
def test_what_a_page_loads_is_there(page: Path) -> None:
    assert not [file for file in files_of(page) if not file.is_file()]


@each_page
def test_a_page_is_light(page: Path) -> None:
    files = files_of(page)
    assert len(files) <= 20
    most = 500_000 if page.stem == "index" else 1_000_000
    weights = {file.name: file.stat().st_size for file in files}
    assert sum(weights.values()) <= most, weights


def test_the_sheet_has_what_scripts_and_figures_use() -> None:
    sheet = (STATIC / "styles.css").read_text("utf-8")
    for used in [
        "--fw-grid:",
        ".fa-magnifying-glass",
        "html[data-theme=dark]",
    ]:
        assert used.replace('"', "") in sheet.replace('"', ""), used
    icons = re.findall(r"@font-face *{font-display[^}]*url\((.{20})", sheet)
    assert len(icons) == 3
    assert set(icons) == {"data:font/woff2;base"}


@each_page
def test_a_page_says_what_it_is(page: Path) -> None:
    """To who is sent a link to it, and to who wants to cite or mend it."""
    found = {
        tag.get("name", tag.get("property")): str(tag["content"])
        for tag in soup(page).select("meta[name], meta[property]")
    }
    address = conf.html_baseurl + page.relative_to(SITE).as_posix()
    assert soup(page).select_one("link[rel=canonical]")["href"] == address
    picture = SITE / found["og:image"].removeprefix(conf.html_baseurl)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size < 50_000
    assert found["og:title"]
    foot = soup(page).select_one("footer.bd-footer-content")
    assert f"Version {conf.release}" in foot.text
    assert foot.select('a[href$="#cite"]')
    if page.name != "404.html":
        said = found["description"]
        assert 20 < len(said) < 200 and "\\" not in said
        assert found["og:description"] == said
        assert soup(page).select_one('a[href*="/issues/new"]')
        edit = str(soup(page).select_one('a[href*="/edit/main/"]')["href"])
        assert (ROOT / edit.split("/edit/main/")[1]).is_file()


def test_the_sitemap_has_every_page() -> None:
    listed = re.findall("<loc>(.*?)<", (SITE / "sitemap.xml").read_text())
    pages = [page.relative_to(SITE).as_posix() for page in PAGES]
    assert sorted(listed) == sorted(
        conf.html_baseurl + page for page in pages if page != "404.html"
    )


def test_no_page_serves_from_any_address() -> None:
    """Its addresses are the site's own, wherever the server shows it."""
    (base,) = soup(SITE / "404.html").select("base")
    assert base["href"] == conf.html_baseurl


def test_chapters_are_numbered_through_the_parts() -> None:
    numbers = [
        x.select_one("h1 .section-number").text for x in map(soup, CHAPTERS)
    ]
    assert [*map(int, numbers)] == [int(page.name[:2]) for page in CHAPTERS]


@each_page
def test_every_internal_link_resolves(page: Path) -> None:
    broken = []
    for link in soup(page).find_all("a", href=True):
        address = urlsplit(str(link["href"]))
        if address.scheme or address.netloc:
            continue
        target = page.parent / unquote(address.path or page.name)
        if not target.is_file() or (
            address.fragment
            and target.suffix == ".html"
            and unquote(address.fragment) not in anchors(target)
        ):
            broken.append(link["href"])
    assert not broken


@each_page
def test_an_id_is_given_once(page: Path) -> None:
    ids = [str(tag["id"]) for tag in soup(page).find_all(id=True)]
    assert sorted(set(ids)) == sorted(ids)


@each_page
def test_pictures_have_words(page: Path) -> None:
    for picture in soup(page).find_all(["img", "svg", "canvas"]):
        if picture.find_parent("svg") or picture.get("aria-hidden"):
            continue
        assert picture.get("alt") or picture.get("aria-label"), picture


@each_page
def test_one_search_bar(page: Path) -> None:
    bars = soup(page).select(".search-button-field")
    assert len(bars) == 1
    assert len(soup(page).select("input[type=search]")) == 1


@each_chapter
def test_every_reference_is_resolved_and_linked(page: Path) -> None:
    article = soup(page).select_one("article")
    assert not [x for x in article.select(".xref") if not x.find_parent("a")]
    kinds = "Theorem|Proposition|Lemma|Definition|Algorithm|Exercise|Figure"
    numbered = re.compile(rf"\b({kinds})\s\d+\.\d+")
    for text in article.find_all(string=numbered):
        assert is_title(text.parent) or text.find_parent("a"), text


def is_title(tag: Tag) -> bool:
    classes = {"admonition-title", "caption-number", "caption"}
    return any(classes & set(t.get("class", [])) for t in [tag, *tag.parents])


@each_chapter
def test_numbers_are_the_chapters(page: Path) -> None:
    number = str(int(page.stem[:2]))
    found = [tag.text.strip("()#¶\n ") for tag in soup(page).select(".eqno")]
    assert found == [f"{number}.{n}" for n in range(1, len(found) + 1)]


@each_chapter
def test_every_fact_links_to_its_check(page: Path) -> None:
    facts = soup(page).select('div.math[id^="equation-eq-"]')
    source = (ROOT / "chapters" / f"{page.stem}.md").read_text("utf-8")
    assert len(facts) == len(re.findall("^:label: eq-", source, re.M))
    for fact in facts:
        mark = fact.find_next_sibling()
        assert mark and "checked" in mark.get("class", []), fact["id"]


@each_chapter
def test_code_fits_the_column(page: Path) -> None:
    for block in soup(page).select("article pre"):
        if block.find_parent(class_="cell_output") and not block.find_parent(
            class_="highlight-python"
        ):
            continue
        wide = [x for x in block.text.split("\n") if len(x) > 79]
        assert not wide


@each_chapter
def test_a_chapter_links_to_its_notebook(page: Path) -> None:
    local, colab = soup(page).select(".run-links a")
    assert local["href"] == f"notebooks/{page.stem}.ipynb"
    assert str(colab["href"]).endswith(
        f"/blob/gh-pages/notebooks/{page.stem}.ipynb"
    )


def test_a_signature_shows_shapes() -> None:
    page = soup(SITE / "api" / "operators.html")
    (signature,) = page.select(r"dt#fastweights\.kda")
    assert 'q: Float[Tensor, "B T H K"],' in signature.text
    assert "jaxtyping" not in page.text


@each_entry_page
def test_an_entry_is_whole(page: Path) -> None:
    """A link to the source, a sentence at least; chapters by number."""
    for entry in soup(page).select("dl.py"):
        name = entry.dt["id"]
        assert len(entry.find("dd", recursive=False).text.split()) > 1, name
        kind = {"method", "property", "attribute", "data"} & {*entry["class"]}
        assert kind or entry.dt.select('a[href*="/blob/"] .viewcode-link'), (
            name
        )
    for text in soup(page).find_all(string=re.compile("Derived in")):
        for link in text.find_next_siblings("a"):
            assert re.match(r"(\d+(\.\d+)+|Appendix [A-Z]:) \w", link.text), (
                link
            )


@each_chapter
def test_a_chapter_links_to_a_name_where_it_first_says_it(page: Path) -> None:
    names: dict[str, list[bool]] = {}
    for code in soup(page).select("article code.literal"):
        if code.find_parent(re.compile(r"h\d")):
            continue
        if name := re.fullmatch(r"fw\.(\w+)", code.text):
            linked = code.find_parent("a") is not None
            names.setdefault(name[1], []).append(linked)
    assert all(
        found == [True] + [False] * (len(found) - 1)
        for found in names.values()
    ), names


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_contrasts_with_its_ground(theme: str) -> None:
    css = (STATIC / "book.css").read_text("utf-8")
    own = dict(
        re.findall(
            r"--fw-(\w+): (#[0-9a-f]{6});",
            re.search(rf'{theme}"\] \{{(.*?)\}}', css, re.S)[1],
        )
    )
    inks = {n: own[n] for n in ["text", "quiet", "gold"]}
    inks |= {n: c[theme] for n, c in PALETTE.items() if n != "grid"}
    code = (STATIC / "pygments.css").read_text("utf-8")
    rule = rf'html\[data-theme="{theme}"\] \.highlight (\.\w+) \{{ color: '
    inks |= dict(re.findall(rule + r"(#[0-9a-fA-F]{6})", code))
    assert len(inks) > 20
    faint = {
        (name, ground): round(contrast(colour, own[ground]), 2)
        for name, colour in inks.items()
        for ground in ["paper", "wash"]
        if contrast(colour, own[ground]) < 4.5
    }
    assert not faint
