"""The built site as Chromium shows it: wide and narrow, light, dark, printed.

`make test` builds it first, into build/test/html. Where there is no Chromium
these are skipped.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book"))

from browser import CHROMIUM, Browser, Tab  # noqa: E402

SITE = Path(os.environ.get("FASTWEIGHTS_SITE", ROOT / "build/test/html"))
# The page for wrong addresses has the style of the published site.
PAGES = sorted({*SITE.glob("*.html"), *SITE.glob("api/*.html")})
PAGES = [page for page in PAGES if page.name != "404.html"]
CHAPTERS = [p for p in PAGES if re.match(r"\d\d_", p.name)]
AXE = ROOT / "book" / "node_modules" / "axe-core" / "axe.min.js"

pytestmark = [
    pytest.mark.skipif(
        not PAGES, reason=f"no site in {SITE}: `make test` builds it"
    ),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium: apt-get install chromium"
    ),
]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)

THEME = "document.documentElement.dataset.theme"
# The colours of everything on the page.
LOOK = """[...document.body.querySelectorAll("*")].map((element) => {
  const { color, backgroundColor, fill } = getComputedStyle(element);
  return `${element.tagName} ${color} ${backgroundColor} ${fill}`;
})"""
# Titles, and solutions, that take no place.
UNPRINTED = """[...document.querySelectorAll(
  ".bd-article h1, .bd-article h1 .section-number, .solution > :last-child"
)].filter((x) => !x.checkVisibility({ contentVisibilityAuto: true })
  || !x.offsetHeight).map((x) => x.outerHTML.slice(0, 100))"""
# What can be scrolled sideways and has no shadow where more is hidden.
UNTOLD = """[...document.querySelectorAll("article *")].filter((x) => {
  const { overflowX, backgroundAttachment } = getComputedStyle(x);
  return x.scrollWidth > x.clientWidth + 1
    && /auto|scroll/.test(overflowX)
    && !backgroundAttachment.includes("local");
}).map((x) => x.outerHTML.slice(0, 100))"""
CUT = """[...document.querySelectorAll("article :is(svg.fw-figure, img)")]
  .filter((x) => x.getBoundingClientRect().right > innerWidth)
  .map((x) => x.outerHTML.slice(0, 100))"""
# Films that do not fit on the screen below the page's header.
TALL = """[...document.querySelectorAll(".fw-film-live")]
  .map((x) => x.offsetHeight).filter((tall) => tall > innerHeight - 56)"""
# Films that, where nothing moves, do not open at their first still's token.
LATE = """[...document.querySelectorAll(".fw-film")]
  .map((x) => [x.querySelector("output").textContent, x.dataset.opens])
  .filter(([shown, opens]) => !shown.startsWith(`${opens} of `))"""
# Stops of the keyboard whose focus cannot be seen.
UNSEEN = """[...document.querySelectorAll(
  "a[href], button, input, summary, [tabindex='0']"
)].filter((x) => {
  if (!x.checkVisibility()) return false;
  x.focus({ focusVisible: true, preventScroll: true });
  const shown = x.labels?.[0] ?? x; // a tab's button is its label
  const { outlineStyle, opacity } = getComputedStyle(shown);
  return document.activeElement === x
    && (outlineStyle === "none" || opacity === "0");
}).map((x) => x.outerHTML.slice(0, 100))"""
# Drawings, code and equations are most of a page's elements and each one
# thing to axe. That the code's colours can be read is in test_site.
BARE = """(selector) => document.querySelectorAll(selector)
  .forEach((x) => x.replaceChildren())"""
JUDGED = """(options) => axe
  .run(options)
  .then(({ violations }) => violations
    .filter(({ impact }) => ["serious", "critical"].includes(impact))
    .flatMap(({ id, nodes }) => nodes.map((x) => `${id}: ${x.html}`)))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A phone."""
    tab = Tab(browser, "Log", "Network", "Runtime")
    tab.size(390, 844)
    tab.media("screen")
    yield tab
    tab.close()


def find_violations(tab: Tab, theme: str, **options: Any) -> list[str]:
    """What axe finds serious or critical."""
    tab.run(f"{THEME} = '{theme}'")
    options |= {"resultTypes": ["violations"]}
    return tab.run(f"({JUDGED})({json.dumps(options)})")


@each_page
def test_a_page(page: Path, tab: Tab, subtests: pytest.Subtests) -> None:
    """All that is asked of every page, in one visit."""
    tab.open(page.as_uri())
    tab.run(f"{THEME} = 'light'")
    with subtests.test("console"):
        said = [x["entry"] for x in tab.seen("Log.entryAdded")]
        assert not [x["text"] for x in said if x["level"] == "error"]
        assert not tab.seen("Runtime.exceptionThrown")
    with subtests.test("on a phone"):
        assert tab.run("document.documentElement.scrollWidth") == 390
        assert not tab.run(UNTOLD)
        assert not tab.run(CUT)
        assert not tab.run(TALL)
        assert not tab.run(LATE)
    tab.run(f"({BARE})('svg.fw-figure')")
    tab.size(1300, 1000)
    with subtests.test("focus can be seen"):
        assert not tab.run(UNSEEN)
    with subtests.test("printed from dark as from light, unfolded"):
        tab.media("print")
        light = tab.run(LOOK)
        assert not tab.run(UNPRINTED)
        tab.run(f"{THEME} = 'dark'")
        tab.run("dispatchEvent(new Event('beforeprint'))")
        assert tab.run(LOOK) == light
        tab.run("dispatchEvent(new Event('afterprint'))")
        assert tab.run(THEME) == "dark"
        tab.media("screen")
    with subtests.test("axe"):
        tab.run(f"({BARE})('pre, math')")
        tab.run(AXE.read_text("utf-8"))
        assert not find_violations(tab, "light")
        assert not find_violations(tab, "dark", runOnly=["color-contrast"])


def test_equations_need_no_script(tab: Tab) -> None:
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    tab.open(CHAPTERS[0].as_uri())
    assert tab.run("""document.querySelectorAll(".equation").length > 9
      && [...document.querySelectorAll(".equation")]
        .every(({ firstChild: x }) => x.localName === "math"
          && x.getBoundingClientRect().height > 9)""")


def test_what_a_reader_does(tab: Tab) -> None:
    """Folds, panels that stack, and the menu of colours."""
    tab.open(CHAPTERS[0].as_uri())
    assert tab.run("document.querySelectorAll('[data-panels]').length > 2")
    solution = "document.querySelector('.solution')"
    tab.run(f"{solution}.scrollIntoView()")
    at = tab.run(f"""(({{ left, top }}) => ({{ x: left + 80, y: top + 10 }}))(
        {solution}.firstChild.getBoundingClientRect())""")
    before = tab.run("location.href")
    for kind in ("mousePressed", "mouseReleased"):
        mouse = {"type": kind, "button": "left", "clickCount": 1}
        tab.call("Input.dispatchMouseEvent", **mouse, **at)
    assert tab.run(f"{solution}.open")
    assert tab.run("location.href") == before
    menu = "document.querySelector('.theme-switch-button')"
    tab.run(f"{menu}.click(), {menu}.focus()")
    tab.run("document.querySelector('[data-mode=dark].dropdown-item').click()")
    assert tab.run(THEME) == "dark"
    assert tab.run(f"document.activeElement === {menu}")


# Types a query, and reads where the first that is found leads.
FOUND = """(async () => {
  document.querySelector(".search-button__button").click();
  const field = document.querySelector("#pst-search-dialog input");
  field.value = "UT transform";
  field.dispatchEvent(new KeyboardEvent("keyup"));
  while (!document.querySelector("#search-results a"))
    await new Promise((done) => setTimeout(done, 50));
  return document.querySelector("#search-results a").href;
})()"""
MARKED = "[...CSS.highlights.get('found')].map((x) => `${x}`.toLowerCase())"


def test_the_search_opens_a_section_and_marks_its_words(tab: Tab) -> None:
    """From a file too, where nothing can be fetched."""
    tab.open((SITE / "index.html").as_uri())
    tab.open(tab.run(FOUND))
    assert {*tab.run(MARKED)} >= {"ut", "transform"}
    time.sleep(0.5)
    name = "one-triangular-system-gives-all-new-values"
    section = f"document.getElementById('{name}')"
    assert 0 <= tab.run(f"{section}.getBoundingClientRect().top") < 200
