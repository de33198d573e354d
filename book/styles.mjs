// Reads {site, sheets}: a folder, and its style sheets in order. Writes one
// sheet with the rules that some page or script of the site can use.
import { readdirSync, readFileSync } from "node:fs";
import { posix } from "node:path";
import { PurgeCSS } from "purgecss";

const { site, sheets } = JSON.parse(readFileSync(0));
const read = (name) => readFileSync(`${site}/${name}`, "utf8");

function sheet(name) {
  const folder = posix.dirname(name);
  return read(name).replace(
    /url\((["']?)(?!["']?(?:data:|#|https?:))(.*?)\1\)/g,
    (_, quote, path) =>
      `url("${posix.relative("_static", posix.join(folder, path))}")`,
  );
}

const WORD = /[\w:/-]+/g;
const CODE = /<(style|script)[^]*?<\/\1>|<[a-z][^>]*>/g;
// PurgeCSS drops rules for anything in a state, as :root, but not those for *.
const all = sheets
  .map(sheet)
  .join("\n")
  .replace(/(?<=^|[},]|\*\/)\s*(?=::?[a-z])/g, "*");
// Nor does it see that what stands in :not(:has()) need not be there.
const words = new Set(all.match(/:not\(:[^{},]*/g)?.join().match(WORD));
for (const name of readdirSync(site, { recursive: true })) {
  if (!/\.(html|js)$/.test(name) || /places|locales/.test(name)) continue;
  const text = read(name);
  const code = name.endsWith("html") ? text.match(CODE) : [text];
  for (const part of code ?? [])
    for (const word of part.match(WORD) ?? []) words.add(word);
}

const [{ css }] = await new PurgeCSS().purge({
  content: [{ raw: [...words].join(" "), extension: "html" }],
  css: [{ raw: all }],
  dynamicAttributes: ["data-theme", "data-mode"],
  keyframes: true,
  variables: true,
  safelist: { variables: [...words].filter((word) => word.startsWith("--")) },
});
process.stdout.write(
  css.replace(/\/\*[^]*?\*\//g, "").replace(/\s*\n\s*/g, " "),
);
