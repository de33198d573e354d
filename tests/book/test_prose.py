"""The words of the book: its grammar, by harper, and 'per' for 'a'."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

BOOK = Path(__file__).resolve().parents[2] / "book"
needs_harper = pytest.mark.skipif(
    not shutil.which("node") or not (BOOK / "node_modules/harper.js").is_dir(),
    reason="needs node, and harper.js in book/node_modules",
)

CHAPTER = """---
name: an wrong word
---

# An heading is no sentence

A chapter's `code an` and $an$ keys: DeltaNet's softmax. He an test.

```{code-cell} python3
# an comment
```

```{note}
In 2's words an note says so.
```

| an table | is none |

{eq}`an-label` is a equation.

With $C = 1$ a step has one gate a head and 128 bytes
a key head, two gates of a head, and a decay a head can have.
"""


@needs_harper
def test_harper_reads_the_prose_and_nothing_else(tmp_path):
    file = tmp_path / "chapter.md"
    file.write_text(CHAPTER)
    ran = subprocess.run(
        ["node", str(BOOK / "grammar.mjs"), str(file)],
        capture_output=True,
        text=True,
    )
    lines = re.findall(r"chapter\.md:(\d+): AnA: (\w+)", ran.stdout)
    assert sorted(lines) == [("14", "an"), ("19", "a"), ("7", "an")]
    lines = re.findall(r"chapter\.md:(\d+): AForPer: (\w+)", ran.stdout)
    assert lines == [("21", "gate"), ("21", "bytes")]
    assert "SpellCheck" not in ran.stdout
    assert ran.returncode == 1, ran.stderr
    right = CHAPTER.replace(" an ", " the ").replace("a eq", "an eq")
    right = right.replace("gate a", "gate per").replace("\na key", "\nper key")
    file.write_text(right)
    command = ["node", str(BOOK / "grammar.mjs"), str(file)]
    assert subprocess.run(command).returncode == 0


def test_each_word_of_the_list_stands_once():
    lines = (BOOK / "words.txt").read_text("utf-8").splitlines()
    words = [w for line in lines for w in line.partition("#")[0].split()]
    assert words and len(words) == len(set(words))
