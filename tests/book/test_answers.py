"""Each chapter's stubs, solutions and answers, where the site's cells ran.

`make test` executes the chapters first, with chapter_answers.py after each;
book/test_chapters.py runs one as a script, for `make check`.
"""

import json

import chapter_answers as exercises
import pytest
from support.chapter_rules import Chapter

CHAPTERS = sorted((exercises.ROOT / "chapters").glob("*_*.md"))

pytestmark = pytest.mark.skipif(
    not exercises.REPORTS.is_dir(),
    reason=f"no reports in {exercises.REPORTS}: `make test` writes them",
)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_answers_hold(path):
    chapter = Chapter(path)
    answers = exercises.read_answers(exercises.ANSWERS / f"{path.stem}.py")
    written = (exercises.REPORTS / f"{path.stem}.json").read_text()
    found = exercises.Report(*json.loads(written))
    assert exercises.problems(chapter, answers, found) == []
