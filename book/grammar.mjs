// The grammar of the book's prose, by harper.js, offline:
//
//   node book/grammar.mjs FILE.md ...
//
// prints FILE:LINE: RULE: what is wrong, and fails if anything is. What is no
// prose (front matter, code, mathematics, directives, tables, HTML) is blanked
// out, each character by another, so that lines stay where they are. The words
// that harper does not know and the book uses stand in book/words.txt.
import { readFileSync } from "node:fs";
import { Dialect, LocalLinter } from "harper.js";
import { binaryInlined } from "harper.js/binaryInlined";

// Rules that are off: each is right elsewhere and wrong here.
const OFF = [
  "AWhile", // "a while ago"
  "AdjectiveDoubleDegree", // "one more number per token"
  "CompoundNouns", // "one step per token" is no stepper
  "CondenseAllThe", // "all of the past"
  "DisjointPrefixes", // "non-empty"
  "DiscourseMarkers", // "Hence" needs no comma
  "Everyone", // "every one of its seeds"
  "ExpandControl", // Ctrl-C is a key
  "ExpandMemoryShorthands", // units: KiB, MB
  "ExpandTimeShorthands", // units: ms
  "HowTo", // "that is how chapter 8 does it"
  "LitotesDirectPositive", // "not impossible" is not "possible"
  "LongSentences", // no error; the style sheet asks for short ones
  "MassNouns", // "a running sum", "one might expect"
  "MissingPreposition", // "it is worth its price"
  "MissingTo", // "have mean zero", "need be"
  "MoreBetter", // "one more number per token"
  "OneOfTheSingular", // "one of the two"
  "OrthographicConsistency", // FLOPs
  "Overall", // "the sum over all tokens"
  "OxfordComma", // the book does without where nothing is unclear
  "QuantifierNumeralConflict", // "some ten million bytes"
  "SentenceCapitalization", // items of lists; what follows an equation
  "SplitWords", // softmax
];

// What harper takes for faults, and where it is wrong: rule and phrase.
const PASS = [
  ["AnA", "a FLOP"],
  ["HavePronoun", "has you compute"],
  ["InDetail", "differs in details"],
  ["ModalBeAdjective", "What can erasing do"],
  ["ItsContraction", "further from its mean"],
  ["ReasonForDoing", "no reason of meaning"],
  ["TheirToTheyre", "and their two directions are"],
  ["SingleBe", "delta rule's is"],
  ["ThatThan", "the closer that comes"],
  ["ThereIsAgreement", "what counts there is instructions"],
];

// A rule of the book's own: "one gate a head" is one "per head".
const COUNTED =
  "one|two|three|four|five|six|eight|ten|no|twice|FLOPs|[KMG]i?B|\\d+|" +
  "(?:byte|decay|error|gate|head|key|number|product|row|step|token|value)s?";
const UNIT =
  "channel|chunk|(?:\\w+ )?head|key|layer|query|row|sequence|step|token";
const ARTICLE =
  "['’]s|\\s+(?:can|could|erases|has|is|may|must|of|was|will)\\b";
const A_FOR_PER = new RegExp(
  `\\b(?:${COUNTED})\\s+an?\\s+(?:${UNIT})\\b(?!${ARTICLE})`,
  "gi",
);

// Directives whose inside is no prose.
const CODE = /^\{(code-cell|math|bibliography|toctree|figure|image|raw)\b/;

const blank = (text) => text.replace(/[^\n]/g, " ");
// Code is no word for harper: it judges nothing across it.
const code = (text) =>
  text.length < 3 ? text : "`" + text.slice(1, -1).replace(/[^\n]/g, "x") + "`";

export function prose(text) {
  const lines = text.split("\n");
  const fences = []; // of those open: whether their inside is prose
  let front = lines[0] === "---";
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    const inside = fences.at(-1);
    const fence = /^\s*(`{3,}|:{3,})(.*)$/.exec(line);
    if (front) {
      front = i === 0 || line !== "---";
      lines[i] = blank(line);
    } else if (fence) {
      if (inside && fence[1] === inside.mark && !fence[2].trim()) fences.pop();
      else if (!inside || inside.prose) {
        const name = fence[2].trim();
        const reads = name.startsWith("{") && !CODE.test(name);
        fences.push({ mark: fence[1], prose: reads });
      }
      lines[i] = blank(line);
    } else if (inside && !inside.prose) lines[i] = blank(line);
    else if (/^(:[\w-]+:|\||<|#|\+\+\+|\(.*\)=|%)/.test(line.trim())) {
      lines[i] = blank(line);
    }
  }
  return lines
    .join("\n")
    .replace(/\$\$[^$]*\$\$/g, blank)
    .replace(/\{[\w:-]+\}`[^`]*`/g, code)
    .replace(/`[^`]+`/g, code)
    .replace(/!\[[^\]]*\]\([^)]*\)/g, blank)
    .replace(/(?<![\\$`])\$[^$`]+\$/g, code)
    .replace(/<[^>\n]+>/g, blank)
    // Chapter 2's, `x`'s, FLOP/s, and a letter that stands for itself.
    .replace(/\b\d+['’]s\b|(?<!\*)\*\w( \w)?\*(?!\*)|\w+\/s\b/g, code)
    .replace(/`['’]s\b/g, "xx`")
    .replace(/\[[^\]]*\]\([^)]*\)(['’]s)?/g, code);
}

const words = readFileSync(new URL("words.txt", import.meta.url), "utf-8")
  .split("\n")
  .flatMap((line) => line.replace(/#.*/, "").split(/\s+/))
  .filter(Boolean)
  .flatMap((word) => [word, `${word}'s`]);

const linter = new LocalLinter({
  binary: binaryInlined,
  dialect: Dialect.British,
});
await linter.importWords(words);
const config = await linter.getLintConfig();
for (const rule of OFF) {
  if (!(rule in config)) throw new Error(`harper has no rule ${rule}`);
  config[rule] = false;
}
await linter.setLintConfig(config);

let faults = 0;
for (const file of process.argv.slice(2)) {
  const text = prose(readFileSync(file, "utf-8"));
  const found = await linter.organizedLints(text, { language: "markdown" });
  const tell = (rule, word, start, message) => {
    const line = text.slice(0, start).split("\n").length;
    const end = start + word.length;
    const around = text.slice(Math.max(0, start - 40), end + 40);
    const shown = around.replace(/\s+/g, " ").trim();
    if (!PASS.some(([r, phrase]) => r === rule && shown.includes(phrase))) {
      console.log(`${file}:${line}: ${rule}: ${word}: ${message} [${shown}]`);
      faults += 1;
    }
  };
  for (const match of text.matchAll(A_FOR_PER)) {
    tell("AForPer", match[0], match.index, "write 'per' for 'a'");
  }
  for (const [rule, lints] of Object.entries(found)) {
    for (const lint of lints) {
      const { start } = lint.span();
      tell(rule, lint.get_problem_text(), start, lint.message());
    }
  }
}
process.exitCode = faults ? 1 : 0;
