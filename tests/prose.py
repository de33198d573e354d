"""The words of the book: chapters, README, and what src says in its text.

    python tests/prose.py

lists where 'a' stands for 'per', and fails if it does anywhere.
"""

import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted((ROOT / "chapters").glob("*.md"))
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TEXTS = [*CHAPTERS, ROOT / "README.md", *SOURCES]

# What may be counted or measured, and so much of it 'a' token.
COUNTED = (
    r"one|two|three|four|five|six|seven|eight|nine|ten|sixteen|no|"
    r"twice|\d+(?:[.,]\d+)*|(?:\w+ )?gates?|(?:log )?decays?|rates?|"
    r"products?|heads?|tokens?|bytes?|FLOPs?|[MGT]B|KiB|MiB|exponentials?|"
    r"steps?|numbers?|chunks?|kept|ms|us|errors?|rows?|states?|columns?|"
    r"keys?|queries|values?|entries|entry|elements?|programs?|kernels?|"
    r"scores?|scales?|norms?|weights?|parameters?|vectors?|matrix|matrices|"
    r"terms?|writes|reflections?|slots?|positions?|pairs?|strips?|"
    r"(?:three|four|\d+) times|loads?|stores?|warps?|threads?|"
    r"blocks?|logits?|biases|bias|"
    r"maps?|sums?|updates?|width|memory|work|constants?|factors?|halves|"
    r"instructions?|passes|lines?|questions?|digits?|bits?|strengths?"
)
UNITS = (
    "head|token|chunk|channel|step|pair|row|layer|sequence|key|query|"
    "program|segment"
)
# What a clause goes on with: "the keys a step erases", "a head can".
VERBS = "can|could|may|might|must|will|has|had|is|was|needs|erases|sums"
A_FOR_PER = re.compile(
    rf"(?:\b(?:{COUNTED})|\$[^$=<>]+\$|\]) "
    rf"(an? (?:(?:key|value|query|key-value) )?(?:{UNITS}))\b"
    rf"(?!'s| of\b| (?:{VERBS})\b)",
    re.IGNORECASE,
)

# Phrases in which it is an article, as they stand, with a word around it.
ARTICLES = (
    "10 A layer, a model",
    "head a program owns",
    "however few tokens a sequence has",
)


def words_of(path: Path) -> list[tuple[int, str]]:
    """The lines that people read: all of a text, comments and strings of
    Python, each with the number of its line."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        return list(enumerate(text.splitlines(), 1))
    lines = []
    kinds = {tokenize.COMMENT, tokenize.STRING}
    kinds.add(getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            first = token.start[0]
            lines += enumerate(token.string.splitlines(), first)
    return lines


def a_for_per(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Where 'a' stands for 'per': the line, and the phrase in its words.

    A phrase may run over the end of a line.
    """
    text, starts = "", []
    for number, line in lines:
        line = re.sub(r"^[\s#>*]+|\s+$", "", line)
        starts.append((len(text), number))
        text += line + " "
    found = []
    for match in A_FOR_PER.finditer(text):
        around = text[max(0, match.start() - 40) : match.end() + 25]
        if any(phrase in around for phrase in ARTICLES):
            continue
        number = max(n for n in starts if n[0] <= match.start(1))[1]
        found.append((number, around.strip()))
    return found


def faults() -> list[str]:
    """Of all texts, one line each."""
    return [
        f"{path.relative_to(ROOT)}:{number}: 'a' for 'per': {text}"
        for path in TEXTS
        for number, text in a_for_per(words_of(path))
    ]


if __name__ == "__main__":
    found = faults()
    print("".join(f"{fault}\n" for fault in found), end="")
    sys.exit(bool(found))
