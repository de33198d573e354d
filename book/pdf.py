"""Print the built site as one PDF, by Chromium: `make pdf`.

All pages become one document in the browser, in the order of the site's menu,
so that links between them are links in the PDF. It is printed until the
contents say where headings stand, which is twice.
"""

import argparse
import base64
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import conf
from browser import CHROMIUM, Browser, Tab
from pikepdf import ObjectStreamMode, Page, Pdf

STYLE = """
@page {
  font: 9pt serif;
  margin: 25mm 28mm;
  size: A4;
  @bottom-right { content: counter(page); }
}
@page title { @bottom-right { content: ""; } }
html { font-size: 13.5px; }
.bd-main { display: block; }
.bd-main .bd-article { break-before: page; padding: 0; }
.bd-main .title-page { break-before: auto; page: title; padding-top: 25vh; }
.bd-main .title-page img { height: 4rem; margin-bottom: 4rem; }
.contents a { text-decoration: none !important; }
.contents p { display: flex; gap: 1rem; margin: 0 0 0 1.5rem; }
.contents p.chapter { font-weight: 600; margin: 0.75rem 0 0; }
.contents a { flex: 1; }
"""

EDITION = f"""<p>{conf.author}</p>
<p>Version {conf.release} · <a href="{conf.html_baseurl}">{conf.html_baseurl}
</a></p>"""

# The order of the book is that of the site's menu.
MENU = """[...document.querySelectorAll("nav.bd-links a")]
  .map((x) => x.getAttribute("href").replace(/^#$/, "index.html"))"""

BEGIN = """(title, style) => {
  document.documentElement.dataset.theme = "light";
  document.title = title;
  document.body.replaceChildren();
  document.body.className = "bd-main";
  const sheet = `<style id="sheet">${style}</style>`;
  document.head.insertAdjacentHTML("beforeend", sheet);
}"""

# Takes a page in. Its ids get its name, since some are on other pages too;
# what it links to and is not in the document is on the published site.
GATHER = """(page, text, pages, published) => {
  const root = new URL(".", location).href;
  const target = (href) => {
    const url = new URL(href, new URL(page, location)).href;
    if (!url.startsWith(root)) return href;
    const [path, place = ""] = url.slice(root.length).split("#");
    return pages.includes(path)
      ? `#${path}:${place}`
      : published + url.slice(root.length);
  };
  const parsed = new DOMParser().parseFromString(text, "text/html");
  const article = parsed.querySelector("article");
  article.querySelectorAll(".headerlink, .run-links, script")
    .forEach((x) => x.remove());
  article.querySelectorAll(".checked a") // checks are not printed
    .forEach((x) => x.replaceWith(x.textContent));
  for (const x of [article, ...article.querySelectorAll("*")])
    for (const a of x.attributes)
      if (a.name === "id") a.value = `${page}:${a.value}`;
      else if (a.name.endsWith("href")) a.value = target(a.value);
      else if (a.name === "src") a.value = new URL(a.value, root + page);
      else a.value = a.value.replaceAll("url(#", `url(#${page}:`);
  article.id = `${page}:`;
  document.body.append(article);

  // Solutions go to its end, and each is linked with its exercise.
  const end = document.createElement("section");
  end.id = `${page}:all-solutions`;
  end.innerHTML = "<h2>Solutions</h2>";
  let exercise;
  for (const x of article.querySelectorAll(".exercise, .solution"))
    if (x.matches(".exercise")) exercise = x;
    else {
      const there = `<p><a href="#${x.id}">Solution</a></p>`;
      x.insertAdjacentHTML("beforebegin", there);
      const title = x.querySelector("summary");
      title.innerHTML = `<a href="#${exercise.id}">${title.innerHTML}</a>`;
      x.open = true;
      end.append(x);
    }
  if (exercise) article.append(end);
}"""

# What a closed fold holds is not printed: a link to it leads to the fold.
FOLDS = """() => {
  const shut = "details:not([open])";
  for (const a of document.querySelectorAll('a[href^="#"]')) {
    const place = decodeURIComponent(a.hash.slice(1));
    let fold = document.getElementById(place)?.closest(shut);
    for (let x = fold; x; x = x.parentElement.closest(shut)) fold = x;
    if (!fold) continue;
    fold.id ||= `fold-of-${place}`;
    a.setAttribute("href", `#${fold.id}`);
  }
}"""

# The title page says what the first page begins with; the contents are links,
# whose numbers come later.
FRONT = """(edition) => {
  const first = document.querySelector("article");
  const title = document.createElement("article");
  const contents = document.createElement("article");
  title.className = "bd-article title-page";
  title.innerHTML = `<img src="_static/mark.svg" alt="">${edition}`;
  title.firstChild.after(first.querySelector("h1"), first.querySelector("p"));
  first.insertAdjacentHTML("afterbegin", "<h1>Preface</h1>");
  contents.className = "bd-article contents";
  contents.innerHTML = "<h1>Contents</h1>";
  for (const x of document.querySelectorAll("article h1, article h2")) {
    const line = document.createElement("p");
    line.className = x.localName === "h1" ? "chapter" : "";
    line.innerHTML = `<a href="#${x.closest("[id]").id}">${x.innerHTML}</a>`;
    contents.append(line);
  }
  document.body.prepend(title, contents);
  [...document.body.children].slice(1).forEach((x, i) => {
    const foot = JSON.stringify(x.querySelector("h1").textContent);
    const page = `@page part${i} { @bottom-left { content: ${foot}; } }`;
    document.getElementById("sheet").append(page);
    x.style.page = `part${i}`;
  });
}"""

LISTED = """[...document.querySelectorAll(".contents a")]
  .map((x) => decodeURIComponent(x.hash.slice(1)))"""
NUMBER = """(numbers) => document.querySelectorAll(".contents p")
  .forEach((x, i) => x.replaceChildren(x.firstChild, numbers[i]))"""


def call(tab: Tab, function: str, *arguments: object) -> None:
    """Call a function of the page."""
    tab.run(f"({function})(...{json.dumps(arguments)})")


def printed(tab: Tab) -> Pdf:
    """The document in the tab as it stands."""
    made = tab.call(
        "Page.printToPDF",
        generateDocumentOutline=True,
        preferCSSPageSize=True,
        printBackground=True,
    )
    return Pdf.open(io.BytesIO(base64.b64decode(made["data"])))


def number(pdf: Pdf, place: str) -> int:
    """The page on which an id stands, from 1."""
    return Page(pdf.Root.Dests[f"/{place}"][0]).index + 1


def book(site: Path, pages: Sequence[str] = ()) -> Pdf:
    """The pages of a site, all of its menu unless some are named."""
    browser = Browser()
    try:
        tab = Tab(browser)
        tab.open((site / "index.html").as_uri())
        pages = pages or tab.run(MENU)
        call(tab, BEGIN, conf.project, STYLE)
        for page in pages:
            text = (site / page).read_text("utf-8")
            call(tab, GATHER, page, text, pages, conf.html_baseurl)
        call(tab, FOLDS)
        call(tab, FRONT, EDITION)
        places, told = tab.run(LISTED), []
        while True:
            made = printed(tab)
            numbers = [number(made, place) for place in places]
            if told == numbers:
                return made
            call(tab, NUMBER, told := numbers)
    finally:
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path, help="the folder of the built site")
    parser.add_argument("out", type=Path, help="the PDF to write")
    asked = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("no Chromium, which prints the PDF: apt-get install chromium")
    # As the browser writes it, it is twice as large.
    packed = ObjectStreamMode.generate
    book(asked.site.resolve()).save(asked.out, object_stream_mode=packed)
