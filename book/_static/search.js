// Search by MiniSearch over the book's places: sections, exercises, entries of
// the API. Both are loaded when someone first searches, as scripts, because a
// page that was opened from a file may fetch nothing. The theme calls
// performSearch as a reader types, and shows #search-results.
const Search = {
  // What places.js has, unzipped and indexed.
  async open(packed) {
    const bytes = Uint8Array.from(atob(packed), (x) => x.charCodeAt(0));
    const unzip = new DecompressionStream("gzip");
    const stream = new Blob([bytes]).stream().pipeThrough(unzip);
    this.places = await new Response(stream).json();
    this.index = new MiniSearch({
      fields: ["title", "chapter", "text", "names"],
      tokenize: this.words,
      processTerm: (word) => word,
    });
    this.places.forEach((place, id) => {
      this.index.add({ ...place, id });
      place.phrases = [place.title, place.text].map(this.phrase);
    });
  },

  // Its words, in the singular.
  words(text) {
    const words = text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
    return words.map((word) => word.replace(/(?<=..[^s])s$/, ""));
  },
  phrase: (text) => ` ${Search.words(text).join(" ")} `,

  // The places of a query, best first: those with all its words, if any.
  find(query) {
    query = query.replace(/\bfw\./g, "");
    const phrase = this.phrase(query);
    const options = {
      boost: { title: 3, chapter: 0.5, names: 0.3 },
      prefix: (word) => word.length > 2,
      fuzzy: (word) => (word.length > 4 ? 0.2 : false),
      weights: { prefix: 0.3, fuzzy: 0.1 },
      bm25: { k: 2, b: 0, d: 0.5 }, // a long section is as good
      boostDocument: (n) => {
        const { page, id, phrases } = this.places[n];
        const boost = phrases[1].includes(phrase) ? 2 : 1;
        return this.aside.test(`${page} ${id}`) ? boost / 2 : boost;
      },
    };
    const all = this.index.search(query, { ...options, combineWith: "AND" });
    const found = all.length ? all : this.index.search(query, options);
    const titled = ({ id }) => {
      const title = this.places[id].phrases[0];
      return title === phrase ? 2 : Number(title.includes(phrase));
    };
    // What is called so, then titles with it in the book's order, then texts.
    found.sort((a, b) => {
      const score = titled(a) === 1 ? 0 : b.score - a.score;
      return titled(b) - titled(a) || score || a.id - b.id;
    });
    return found.map(({ id }) => this.places[id]);
  },
  aside: /^api.(?!op)|bibliography| ex-| further-/,

  // A query's words in a text, and longer ones that begin so.
  pattern(query) {
    const letter = "[\\p{L}\\p{N}]";
    const words = this.words(query).map((word) =>
      word.length > 3 ? `${word}${letter}*` : `${word}s?(?!${letter})`,
    );
    return new RegExp(`(?<!${letter})(${words.join("|")})`, "giu");
  },

  // Some words around the first of them.
  excerpt(text, pattern) {
    const from = Math.max(text.search(pattern) - 60, 0);
    const rest = text.slice(text.lastIndexOf(" ", from) + 1);
    const long = rest.length > 170;
    const end = long ? rest.lastIndexOf(" ", 160) : rest.length;
    return (from ? "… " : "") + rest.slice(0, end) + (long ? " …" : "");
  },

  async performSearch(query) {
    if (!this.words(query).length) return;
    const root = document.documentElement.dataset.content_root;
    this.opened ??= this.load(`${root}_static/minisearch.js`)
      .then(() => this.load(`${root}_static/places.js`))
      .then(() => this.open(PLACES));
    await this.opened;
    const pattern = this.pattern(query);
    const found = this.find(query);
    const words = encodeURIComponent(query);
    const items = found.slice(0, 30).map((place) => {
      const { page, id, chapter, title, text } = place;
      const link = this.element("a", this.element("strong", title));
      if (!chapter.endsWith(title)) link.append(` ${chapter}`);
      link.href = `${root}${page}.html?q=${words}#${id}`;
      const parts = this.excerpt(text, pattern)
        .split(pattern) // and the words between them
        .map((part, n) => (n % 2 ? this.element("mark", part) : part));
      return this.element("li", link, this.element("p", ...parts));
    });
    const count = this.element("p", `places: ${found.length}`);
    count.role = "status";
    const box = document.getElementById("search-results");
    box.replaceChildren(count, this.element("ol", ...items));
  },

  element(tag, ...content) {
    const element = document.createElement(tag);
    element.append(...content);
    return element;
  },

  load: (address) =>
    new Promise((resolve, reject) => {
      const script = document.createElement("script");
      Object.assign(script, { onload: resolve, onerror: reject });
      script.src = address;
      document.head.append(script);
    }),

  // Mark on a page that was found what was searched for.
  mark(query) {
    const article = document.querySelector("article");
    const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
    const ranges = [];
    while (walker.nextNode()) {
      const node = walker.currentNode;
      for (const hit of node.data.matchAll(this.pattern(query))) {
        const range = new Range();
        range.setStart(node, hit.index);
        range.setEnd(node, hit.index + hit[0].length);
        ranges.push(range);
      }
    }
    CSS.highlights?.set("found", new Highlight(...ranges));
  },
};

globalThis.document?.addEventListener("DOMContentLoaded", () => {
  const query = new URLSearchParams(location.search).get("q");
  if (query) Search.mark(query);
  const form = document.querySelector("#pst-search-dialog form");
  form.addEventListener("submit", (event) => {
    event.preventDefault(); // Enter opens the first
    document.querySelector("#search-results a")?.click();
  });
});
