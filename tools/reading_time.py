"""How long a chapter takes to read, from what stands on its page.

    python tools/reading_time.py [CHAPTER.md ...]

lists the minutes counted beside those stated. 220 words take a minute, and so
do four lines of equations or thirty lines of code that are not folded. What
the library shows of itself is not counted, nor are the exercises and what
follows them.
"""

import re
import sys
from pathlib import Path

CHAPTERS = Path(__file__).resolve().parents[1] / "chapters"
WORDS, EQUATIONS, CODE = 220, 4, 30  # words and lines per minute
TOLERANCE = 0.25
FOLDED = re.compile(r"^:?tags: .*\b(hide|remove)-", re.M)
STATED = re.compile(
    r"\b(?:Reading|To read)(?: it)?(?: takes)?\**(?: takes)? about "
    r"(\d+) minutes(?:, (\w+) more with the last section)?"
)
MORE = {"five": 5, "ten": 10, "fifteen": 15, "twenty": 20, "thirty": 30}
FORM = "**Reading** takes about 25 minutes without the exercises"


def minutes(text: str) -> float:
    """The minutes counted, of the whole source of a chapter."""
    text = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.M | re.S)
    text = re.split(r"^## Exercises$", text, flags=re.M)[0]
    lines = {"math": 0, "code": 0}

    def taken(match: re.Match[str]) -> str:
        inside = match["cell"] or match["math"] or match["dollars"]
        rows = [row.strip() for row in inside.splitlines() if row.strip()]
        if match["cell"] is None:
            marks = r":label:|\\(begin|end)\b"
            lines["math"] += sum(not re.match(marks, row) for row in rows)
        elif not FOLDED.search(inside):
            lines["code"] += sum(not r.startswith(":tags:") for r in rows)
        return ""

    text = re.sub(
        r"^```\{code-cell\}[^\n]*\n(?P<cell>.*?)^```$"
        r"|^```\{math\}[^\n]*\n(?P<math>.*?)^```$"
        r"|^\$\$\n(?P<dollars>.*?)^\$\$$",
        taken,
        text,
        flags=re.M | re.S,
    )
    text = re.sub(r"^(```|:{3}|:[\w-]+:).*$", "", text, flags=re.M)
    text = re.sub(r"\{[\w:]+\}`[^`]*`|\$[^$]+\$|`[^`]+`", "x", text)
    words = len(re.findall(r"[^\W_]+(?:['’-][^\W_]+)*", text))
    return words / WORDS + lines["math"] / EQUATIONS + lines["code"] / CODE


def stated(text: str) -> int | None:
    """The minutes that the chapter's head states, with its last section."""
    found = STATED.search(re.sub(r"\s+", " ", text.partition("\n## ")[0]))
    return found and int(found[1]) + MORE.get(found[2], 0)


def problem(text: str) -> str:
    """What is wrong with the minutes stated; "" if nothing is."""
    says, takes = stated(text), minutes(text)
    if says is None:
        return f"states no minutes, say: {FORM} (it takes {takes:.0f})"
    if abs(says - takes) > TOLERANCE * takes:
        return f"states {says} minutes, takes about {takes:.0f}"
    return ""


if __name__ == "__main__":
    files = map(Path, sys.argv[1:] or sorted(CHAPTERS.glob("*_*.md")))
    for file in files:
        source = file.read_text("utf-8")
        print(f"{file.stem}: {minutes(source):.0f}, stated {stated(source)}")
