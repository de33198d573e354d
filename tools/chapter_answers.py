"""The exercises of a chapter, answered after its last cell.

    python book/execute.py --then tools/chapter_answers.py
    python tools/chapter_answers.py SCRIPT ANSWERED REPORT

The first is what ``make test`` does, where each chapter runs anyway: the
report of each lies in build/test/answers, and tests/book/test_answers.py
judges it. The second runs a chapter's script, for :func:`run`.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.chapter_rules import Chapter  # noqa: E402

ANSWERS = ROOT / "tests" / "book" / "answers"
REPORTS = ROOT / "build" / "test" / "answers"


@dataclass
class Answer:
    """One answer to an exercise, and what its check is to say of it.

    reason is a pattern of what follows 'not yet: '; None: it passes.
    """

    label: str
    reason: str | None
    source: str


_ANSWER = re.compile(r"^# %% (ex-\S+) (?:passes|not yet: (.+))$", re.M)


def read_answers(path: Path) -> list[Answer]:
    """The answers in a file, each below its line ``# %% ex-label verdict``.

    The verdict is ``passes`` or ``not yet: pattern``.
    """
    _, *parts = _ANSWER.split(path.read_text("utf-8"))
    parts = [iter(parts)] * 3
    return [Answer(*part) for part in zip(*parts, strict=True)]


def questions(
    chapter: Chapter | None, answers: Sequence[Answer]
) -> list[tuple[str, str, str]]:
    """Of each answer its check, what that is called on, and the source."""
    return [(*asked(chapter, x.label), x.source) for x in answers]


def asked(chapter: Chapter, label: str) -> tuple[str, str]:
    """The name of an exercise's check, and what it is called on."""
    exercise = next(e for e in chapter.exercises if e.label == label)
    (name, cell), *_ = exercise.checks.items()
    call = next(call for called, call in cell.calls() if called == name)
    return name, ast.unparse(call.args[0])


class Report(NamedTuple):
    """What the checks of a chapter's exercises said.

    attempts: each attempt's name, its verdict, and whether the same check
    fails again when it is asked to raise. reasons: for each answer why it
    does not pass yet, or None.
    """

    attempts: list[list]
    reasons: list[str | None]


def report(
    names: dict[str, Any], questions: list[tuple[str, str, str]]
) -> Report:
    """Try each answer in the names of a chapter that has run.

    A question is the name of a check, what it is called on, and the source
    of an answer.
    """
    from fastweights.checks import exercise_log

    attempts = [
        [x.name, x.passed, why_not(x.check, x.candidate) is not None]
        for x in list(exercise_log)
    ]
    reasons = []
    for check, candidate, source in questions:
        own = dict(names)
        lines = source.splitlines(keepends=True)  # triton.jit reads them
        linecache.cache["answer"] = len(source), None, lines, "answer"
        exec(compile(source, "answer", "exec"), own)
        reasons.append(why_not(names[check], eval(candidate, own)))
    return Report(attempts, reasons)


def why_not(check: Any, candidate: Any) -> str | None:
    """Why the candidate does not pass the check yet, or None."""
    try:
        check.run(candidate)
    except Exception as error:
        return check.reason(candidate, error)
    return None


def after(path: str, names: dict[str, Any]) -> None:
    """Write the report of the chapter that has just run in this kernel."""
    chapter = Chapter(Path(path))
    answers = read_answers(ANSWERS / f"{chapter.path.stem}.py")
    REPORTS.mkdir(parents=True, exist_ok=True)
    found = report(names, questions(chapter, answers))
    file = REPORTS / f"{chapter.path.stem}.json"
    file.write_text(json.dumps(found))


def run(
    script: Path,
    chapter: Chapter | None = None,
    answers: Sequence[Answer] = (),
) -> Report:
    """Run a chapter's script in a process of its own, then the answers."""
    given, found = script.with_suffix(".answers"), script.with_suffix(".json")
    given.write_text(json.dumps(questions(chapter, answers)))
    environment = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    environment.pop("FASTWEIGHTS_STRICT", None)
    done = subprocess.run(
        [sys.executable, __file__, str(script), str(given), str(found)],
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return Report(*json.loads(found.read_text()))


def verdicts_are_right(
    answers: Sequence[Answer], reasons: Sequence[str | None]
) -> Iterator[str]:
    """Each answer passes or fails as its file says, and for that reason."""
    for answer, reason in zip(answers, reasons, strict=True):
        where = f"{answer.label}:\n{answer.source.strip()}\n"
        if answer.reason is None and reason is not None:
            yield f"{where}does not pass: {reason}"
        elif answer.reason is not None and reason is None:
            yield f"{where}passes, where 'not yet' was to be said"
        elif reason is not None and not re.search(answer.reason, reason):
            yield f"{where}says {reason!r}, not {answer.reason!r}"


def each_exercise_is_answered(
    chapter: Chapter, answers: Sequence[Answer]
) -> Iterator[str]:
    """Each exercise is given a wrong answer and one in another form."""
    for exercise in chapter.exercises:
        given = [a.reason for a in answers if a.label == exercise.label]
        where = f"{chapter.path.name}: {exercise.label}"
        if None not in given:
            yield f"{where} is given no right answer in another form"
        if not any(given):
            yield f"{where} is given no wrong answer"


def answers_hold(
    chapter: Chapter, attempts: Sequence[Sequence]
) -> Iterator[str]:
    """Every stub fails its check, every solution passes it, both twice.

    The verdict in the log is the reader's; the second is what the same
    check does when it is asked to raise.
    """
    for exercise in chapter.exercises:
        for check in exercise.checks:
            name = check.removeprefix("check_")
            own = [
                tuple(attempt[1:])
                for attempt in attempts
                if attempt[0] == name
            ]
            where = f"{chapter.path.name}: {exercise.label}"
            if not own:
                yield f"{where}: {check} was never called"
            elif own[0] != (False, True):
                yield f"{where}: the stub does not fail {check}"
            elif own[-1] != (True, False):
                yield f"{where}: the solution does not pass {check}"


def problems(
    chapter: Chapter, answers: Sequence[Answer], found: Report
) -> list[str]:
    """All that is wrong with a chapter's stubs, solutions and answers."""
    return [
        *answers_hold(chapter, found.attempts),
        *verdicts_are_right(answers, found.reasons),
        *each_exercise_is_answered(chapter, answers),
    ]


if __name__ == "__main__":
    script, given, found = sys.argv[1:]
    names = runpy.run_path(script, run_name="__main__")
    asked_of = json.loads(Path(given).read_text())
    Path(found).write_text(json.dumps(report(names, asked_of)))
