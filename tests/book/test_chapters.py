"""The chapters keep their promises; and each rule notices when one breaks."""

import functools
import re
import runpy
import sys
from pathlib import Path

import chapter_answers as exercises
import pytest
import reading_time
from support import chapter_rules as rules

from fastweights import checks

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book"))

from notebooks import script  # noqa: E402

CHAPTERS = sorted((ROOT / "chapters").glob("*_*.md"))
SAMPLE = ROOT / "tests" / "book" / "sample_book" / "01_first.md"

read = functools.cache(rules.Chapter)  # of those of the book, which stay
chapters = pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)


@chapters
@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_chapter_keeps(path, rule):
    assert list(rule(read(path))) == []


@chapters
def test_chapter_has_exercises(path):
    if path.stem[0].isdigit():
        assert list(rules.exercises_suffice(read(path))) == []


@chapters
def test_chapter_shows_the_library_instead_of_retyping_it(path):
    assert list(rules.nothing_is_retyped(read(path), ROOT / "src")) == []


@chapters
def test_chapter_states_how_long_it_takes_to_read(path):
    assert reading_time.problem(path.read_text("utf-8")) == ""


@pytest.mark.script
@chapters
def test_chapter_runs_as_a_script_and_its_answers_hold(path, tmp_path):
    file = tmp_path / f"{path.stem}.py"
    file.write_text(script(path))
    chapter = rules.Chapter(path)
    answers = exercises.read_answers(exercises.ANSWERS / f"{path.stem}.py")
    found = exercises.run(file, chapter, answers)
    assert exercises.problems(chapter, answers, found) == []


# The rules themselves, on a sample with one thing broken at a time


@pytest.fixture
def sample(tmp_path):
    """A copy of the sample chapter in which ``old`` became ``new``."""

    def edited(old: str = "", new: str = "") -> Path:
        path = tmp_path / SAMPLE.name
        text = SAMPLE.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        return path

    return edited


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_sample_keeps(sample, rule):
    assert list(rule(rules.Chapter(sample()))) == []


# A rule and what it says, of a chapter with this replaced by that.
BROKEN = """\
equations_are_checked: eq-mean has no cell
-[check:eq-mean]
+[gpu]
equations_are_checked: check:eq-gone names no equation
-[check:eq-mean]
+[check:eq-mean, check:eq-gone]
equations_are_checked: state is neither
-:label: def-state
+:label: state
checks_assert: asserts nothing
-close((weights * values).sum(), torch.tensor(7.0), 1e-12,
+print((weights * values).sum(), torch.tensor(7.0), 1e-12,
lines_fit: 98 columns
-    return ...
+    return ...  # WIDE
lines_fit: 82 columns
-# a listing, not a cell
+# WIDE
exercises_are_complete: has no label
-:label: ex-sum
exercises_are_complete: no cell tagged exercise-stub
-[exercise-stub]
+[gpu]
exercises_are_complete: has 0 checks
-@exercise
+@staticmethod
exercises_are_complete: not folded
-:tags: [hide-input]
-
-@exercise
+:tags: [gpu]
+
+@exercise
exercises_are_complete: not called on the stub
-check_sum(total)
+print(total)
exercises_are_complete: no solution with a cell
-[solution]
+[gpu]
exercises_are_complete: does not call check_sum
-    return sum(x)
-
-
-check_sum(total)
+    return sum(x)
exercises_suffice: 1 exercises, needs four
figures_have_alt: without alt
-draw(fig, alt="a rising line")
+draw(fig)
figures_have_alt: without alt
-alt="a rising line"
+alt=" "
imports_are_public: _VARIABLE is private
-from fastweights_lab.notebook.plotting import draw
+from fastweights_lab.notebook.plotting import _VARIABLE, draw
imports_are_public: _is_stub is private
-@exercise
+checks._is_stub(1)
+
+@exercise
"""


@pytest.mark.parametrize("case", re.split(r"\n(?=\w)", BROKEN))
def test_rule_notices(sample, case):
    title, *lines = case.replace("WIDE", 80 * "x").splitlines()
    rule, problem = title.split(": ", 1)
    old, new = (
        "\n".join(line[1:] for line in lines if line[0] == sign)
        for sign in "-+"
    )
    found = list(getattr(rules, rule)(rules.Chapter(sample(old, new))))
    assert any(problem in line for line in found), found


LIBRARY = '''
def add(state, k, v):
    """Adds."""
    for i in range(3):
        kv: float = k * v
        state = state + kv
    return state
'''


@pytest.mark.parametrize(
    ("body", "repeats"),
    [
        ("for j in range(3):\n  w = a * b\n  c = c + w\n return c", True),
        ("for j in range(3):\n  w = a + b\n  c = c + w\n return c", False),
        ("return c + a * b", False),
    ],
    ids=["renamed", "different", "short"],
)
def test_retyping_is_noticed(sample, tmp_path, body, repeats):
    src = tmp_path / "src"
    src.mkdir()
    (src / "steps.py").write_text(LIBRARY)
    path = sample("@exercise", f"def mine(c, a, b):\n {body}\n\n\n@exercise")
    found = list(rules.nothing_is_retyped(rules.Chapter(path), src))
    assert bool(found) == repeats
    assert not found or "mine repeats steps.py, add" in found[0]


@pytest.fixture
def names_of(tmp_path, monkeypatch):
    """Runs a chapter in this process, with a log of attempts of its own."""
    monkeypatch.setattr(checks, "exercise_log", [])
    monkeypatch.delenv("FASTWEIGHTS_STRICT", raising=False)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)

    def run(path):
        file = tmp_path / "chapter.py"
        file.write_text(script(path))
        return runpy.run_path(str(file))

    return run


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("", "", None),
        ("return ...", "return x.sum()", "the stub does not fail"),
        ("return sum(x)", "return max(x)", "the solution does not pass"),
        ("check_sum(total)\n```\n\nAny", "```\n\nAny", "does not pass"),
    ],
    ids=["right", "stub that passes", "wrong solution", "solution unchecked"],
)
def test_answers_are_run(sample, names_of, old, new, problem):
    path = sample(old, new)
    chapter = rules.Chapter(path)
    found = exercises.report(names_of(path), [])
    problems = list(exercises.answers_hold(chapter, found.attempts))
    assert (problem is None and not problems) or problem in problems[0]


ANSWERED = """\
# %% ex-sum passes
def total(x):
    return x.sum()


# %% ex-sum not yet: differs|error
def total(x):
    return 0 * x.sum()
"""


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("", "", None),
        ("return x.sum()", "return 2 * x.sum()", "does not pass"),
        ("return 0 * x.sum()", "return x.sum()", "passes, where"),
        ("differs|error", "no such reason", "says "),
        ("# %% ex-sum passes", "# %% ex-sum not yet: x", "no right answer"),
        ("not yet: differs|error", "passes", "no wrong answer"),
    ],
    ids=["right", "refused", "evaded", "reason", "no-right", "no-wrong"],
)
def test_answers_are_judged(sample, names_of, tmp_path, old, new, problem):
    path, given = sample(), tmp_path / "answers.py"
    given.write_text(ANSWERED.replace(old, new))
    chapter, answers = rules.Chapter(path), exercises.read_answers(given)
    assert len(answers) == 2
    asked = exercises.questions(chapter, answers)
    found = exercises.report(names_of(path), asked)
    problems = exercises.problems(chapter, answers, found)
    assert any(problem in x for x in problems) if problem else not problems


def test_a_process_of_its_own_reports_the_same(sample, names_of, tmp_path):
    path, given = sample(), tmp_path / "answers.py"
    given.write_text(ANSWERED)
    chapter, answers = rules.Chapter(path), exercises.read_answers(given)
    names = names_of(path)  # which writes chapter.py
    found = exercises.run(tmp_path / "chapter.py", chapter, answers)
    asked = exercises.questions(chapter, answers)
    ref = exercises.report(names, asked)
    assert found == ref and len(found.attempts) == 2


def test_a_failing_chapter_is_an_error(sample, tmp_path):
    path = sample("torch.tensor(7.0)", "torch.tensor(8.0)")
    file = tmp_path / "chapter.py"
    file.write_text(script(path))
    with pytest.raises(AssertionError, match="relative error"):
        exercises.run(file)


PAGE = """---
kernelspec: python
---

# A title

{head}

## The picture

{body}

## Exercises

{body}
"""
CELL = "```{{code-cell}} python3\n{tags}{lines}```\n"


@pytest.mark.parametrize(
    "body, takes",
    [
        ("two words\n" * 1100, 10),
        ("It's `a b` $x + y$ {ref}`ex-a` well-known.\n" * 440, 10),
        ("```{math}\n:label: eq-a\n" + "x \\\\\n" * 40 + "```\n", 10),
        ("$$\n\\begin{aligned}\n" + "x\n" * 40 + "$$\n", 10),
        (CELL.format(tags="", lines="x = 1\n\n" * 300), 10),
        (CELL.format(tags=":tags: [hide-input]\n", lines="x\n" * 300), 0),
        (
            CELL.format(
                tags="---\ntags: [hide-cell]\n---\n", lines=300 * "x\n"
            ),
            0,
        ),
    ],
    ids=["words", "inline", "math", "dollars", "code", "folded", "head"],
)
def test_reading_time_is_counted(body, takes):
    page = PAGE.format(head="", body=body)
    assert abs(reading_time.minutes(page) - takes) < 0.1


@pytest.mark.parametrize(
    "head, says",
    [
        (reading_time.FORM, 25),
        ("**Reading takes** about 35\nminutes, exercises apart.", 35),
        ("**To read it** takes about 30 minutes", 30),
        ("**Reading it** takes about 30 minutes, **running it** one", 30),
        ("Reading takes about 45 minutes, twenty more with the last "
         "section, which", 65),
        ("**To run it** takes about 2 minutes", None),
    ],
)  # fmt: skip
def test_reading_time_is_read(head, says):
    assert reading_time.stated(PAGE.format(head=head, body="")) == says
    assert reading_time.stated(PAGE.format(head="", body=head)) is None


@pytest.mark.parametrize(
    "number, wrong", [(8, False), (12, False), (7, True), (13, True)]
)
def test_a_wrong_reading_time_is_noticed(number, wrong):
    head = f"**Reading** takes about {number} minutes."
    page = PAGE.format(head=head, body="word " * 2190)
    assert bool(reading_time.problem(page)) == wrong
    assert "states no minutes" in reading_time.problem("# A title\n")


def test_every_chapter_of_the_site_is_found():
    names = {path.stem for path in CHAPTERS}
    index = (ROOT / "chapters" / "index.md").read_text()
    assert names
    assert all(name in index for name in names)
