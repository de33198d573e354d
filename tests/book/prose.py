"""How much prose a chapter has, and how much of it is hedged.

    python tests/book/prose.py [CHAPTER.md ...]

Lists, per chapter, the words of its prose, its sentences, and the share of
them that hedge. Exercises, and what follows them, do not count, nor do code,
displayed equations and tables. ``-v`` prints the hedged sentences too.
"""

import re
import sys
from pathlib import Path

CHAPTERS = Path(__file__).resolve().parents[2] / "chapters"
HEDGE = re.compile(
    r"\b(perhaps|maybe|may|might|could|nearly|almost|roughly|hardly|mostly"
    r"|often|usually|generally|typically|sometimes|normally|apparently"
    r"|probably|seems?|unless|although|though|unlike|at least"
    r"|at most|(?<!add )up to|in part|not always|to first order)\b",
    re.I,
)
LEFT_OUT = re.compile(
    r"\A---\n.*?^---\n"  # the file's head
    r"|^(`{3,})\{(?:code-cell|dropdown|math|toctree)\}.*?^\1$"
    r"|^(`{3,})\w*\n.*?^\2$"  # listings
    r"|^\$\$\n.*?^\$\$$"
    r"|^(?:\||#|`{3,}|:{3}|:[\w-]+:|\().*?$",  # tables, titles, directives
    re.M | re.S,
)


def sentences(text: str) -> list[str]:
    """The sentences of a chapter's prose, from its whole source."""
    text = LEFT_OUT.sub("\n", text.partition("\n## Exercises\n")[0])
    text = re.sub(r"\{[\w:]+\}`[^`]*`|\$[^$]+\$|`[^`]+`", "x", text)
    parts = re.split(
        r"\n\s*\n|^\s*\* |(?<=[.?!:)])\*?\*?\s+(?=\W?[A-Z])", text, flags=re.M
    )
    return [" ".join(part.split()) for part in parts if words(part)]


def words(text: str) -> int:
    """How many words a text has; a formula is one."""
    return len(re.findall(r"[^\W_]+(?:['’-][^\W_]+)*", text))


if __name__ == "__main__":
    verbose = "-v" in sys.argv
    names = [name for name in sys.argv[1:] if name != "-v"]
    for file in map(Path, names or sorted(CHAPTERS.glob("*_*.md"))):
        found = sentences(file.read_text("utf-8"))
        hedged = [s for s in found if HEDGE.search(s)]
        print(
            f"{file.stem:22} {sum(map(words, found)):6,} words "
            f"{len(found):4} sentences {len(hedged) / len(found):4.0%} hedged"
        )
        if verbose:
            print(*(f"    {s}" for s in hedged), sep="\n")
