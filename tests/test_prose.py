"""The book's words: 'per' where 'a' would stand for it, and its grammar."""

import re
import shutil
import subprocess

import prose
import pytest

BOOK = prose.ROOT / "book"
TEXTS = prose.TEXTS
needs_harper = pytest.mark.skipif(
    not shutil.which("node") or not (BOOK / "node_modules/harper.js").is_dir(),
    reason="needs node, and harper.js in book/node_modules",
)


def name(path):
    return path.relative_to(prose.ROOT).as_posix()


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_a_does_not_stand_for_per(path):
    found = prose.a_for_per(prose.words_of(path))
    said = [f"{name(path)}:{line}: ...{text}..." for line, text in found]
    assert not said, "write 'per', or list the phrase in prose.ARTICLES"


@pytest.mark.parametrize(
    "text",
    [
        "one gate a head",
        "a gate a key channel",
        "128 bytes a row, rounded up",
        "costs $2CKV$ a chunk, and",
        "two value heads a key head",
        "g: [T] a head and step",
        "some 12 KiB a token",
        "Tokens a chunk where the caller",
    ],
)
def test_what_is_found(text):
    assert len(prose.a_for_per([(1, text)])) == 1
    first, last = text.split(" a ", 1)
    assert prose.a_for_per([(3, first), (4, f"# a {last}")])[0][0] == 4


@pytest.mark.parametrize(
    "text",
    [
        "the state of a head",
        "two steps, a token later",
        "LaCT reads a chunk",
        "half a step against it",
        "with $C = 1$ a step multiplies",
        "in step 3, a chunk from step 4 on",
        "$k$ times a row",
        "the keys a step erases",
        "per token a head can be a clock",
        "overflows once a channel has decayed",
        "as a token is read",
        "with $C = 64$ a chunk of tokens",
        "of two gates a head's own is fixed",
        "The tile and head a program owns",
        "one gate per head",
    ],
)
def test_an_article_is_none_of_them(text):
    assert prose.a_for_per([(1, text)]) == []


def test_python_has_words_in_comments_and_strings_alone(tmp_path):
    file = tmp_path / "a.py"
    file.write_text('x = one  # two\n"""three\nfour"""\ny = f"five {six}"\n')
    words = dict(prose.words_of(file))
    assert "two" in words[1] and "one" not in words[1]
    assert "three" in words[2] and "four" in words[3] and "five" in words[4]


@pytest.mark.parametrize("phrase", prose.ARTICLES)
def test_each_phrase_that_is_let_pass_is_still_there(phrase):
    text = " ".join(
        word
        for path in TEXTS
        for _, line in prose.words_of(path)
        for word in line.split()
    )
    assert phrase in text


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
    assert "SpellCheck" not in ran.stdout
    assert ran.returncode == 1, ran.stderr
    file.write_text(CHAPTER.replace(" an ", " the ").replace("a eq", "an eq"))
    command = ["node", str(BOOK / "grammar.mjs"), str(file)]
    assert subprocess.run(command).returncode == 0


def test_each_word_of_the_list_stands_once():
    lines = (BOOK / "words.txt").read_text("utf-8").splitlines()
    words = [w for line in lines for w in line.partition("#")[0].split()]
    assert words and len(words) == len(set(words))
