"""Run the tests of what a change touches.

    python tools/touched.py [--interpreted] [COMMIT]

A change is what differs from COMMIT, HEAD unless given, and what git does
not know yet; if nothing does, the last commit. Without git, or without that
commit's parent, no test is chosen. A module's tests are those of its name or
its folder's (test_recurrence_packs), and those that import it, a chapter's its
rules and answers; the API reference of the site is made of docstrings.
With --interpreted, those that Triton's interpreter runs.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
# Minutes each, in full; of these, what goes through all the stages.
SAMPLES = {
    "kernels/test_recurrence.py": "each_stage",
    "kernels/test_recurrence_gates.py": "gates_that_open",
    "kernels/test_recurrence_packs.py": "segments",
    "kernels/test_decode.py": "one-token or half_precision",
    "compile/test_recurrence.py": "products_in_bf16 and 90",
    "compile/test_decode.py": "registers_in_bf16 and 90",
}


def changed(commit: str) -> list[str]:
    """Paths of what the change touches, from the root."""

    def git(*words: str) -> list[str]:
        command = ["git", "-C", str(ROOT), *words]
        run = subprocess.run(
            command, capture_output=True, text=True, check=True
        )
        return run.stdout.split("\0")[:-1]

    found = git("diff", "-z", "--name-only", commit)
    found += git("ls-files", "-z", "--others", "--exclude-standard")
    return found or git("diff", "-z", "--name-only", f"{commit}~", commit)


@functools.cache
def imported(file: Path) -> set[str]:
    """Modules of the library, and helpers, that a test imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def found_for(path: str) -> Iterator[Path]:
    """The test files of one changed file."""
    file = Path(path)
    if file.suffix == ".rst" or path.startswith("src/fastweights/"):
        yield TESTS / "book/test_api.py"
    if file.suffix == ".rst":
        return
    if file.parts[0] == "chapters" or path.startswith("tests/book/answers"):
        yield TESTS / "book/test_chapters.py"
    elif path.startswith("src/") and file.suffix == ".py":
        module = ".".join(file.with_suffix("").parts[1:])
        folder = f"test_{file.parent.name}"
        names = f"test_{file.stem}", folder
        for test in TESTS.rglob("test_*.py"):
            named = test.stem in names or test.stem.startswith(f"{folder}_")
            if named or module in imported(test):
                yield test
    elif file.parts[0] == "tests" and file.suffix == ".py":
        for test in TESTS.rglob("test_*.py"):
            if test == ROOT / file or f"support.{file.stem}" in imported(test):
                yield test


def chosen(paths: list[str], *, interpreted: bool) -> list[str]:
    """Arguments for pytest; none if no test is touched."""
    files = {test for path in paths for test in found_for(path)}
    built = TESTS / "book"
    files -= {built / "test_site.py", built / "test_answers.py"}
    files = {
        test
        for test in files
        if test.is_file() and (test.parent.name == "kernels") == interpreted
    }
    if not files:
        return []
    chapters = [Path(x).stem for x in paths if Path(x).stem[:2].isdigit()]
    samples = dict(SAMPLES)
    if chapters:
        samples["book/test_chapters.py"] = " or ".join(sorted({*chapters}))
    names = []
    for path in sorted(str(x.relative_to(TESTS)) for x in files):
        words = path.split("/")
        if path in samples:
            words.append(f"({samples[path]})")
        names.append(f"({' and '.join(words)})")
    return [
        "-m",
        "not gpu and not full",
        "-k",
        " or ".join(names),
        *sorted(str(x.relative_to(ROOT)) for x in files),
    ]


def main(words: list[str]) -> int:
    interpreted = "--interpreted" in words
    commit = next((x for x in words if not x.startswith("-")), "HEAD")
    try:
        paths = changed(commit)
    except (OSError, subprocess.CalledProcessError):
        print(f"    no git, or no history to {commit}: `make test` runs all")
        return 0
    arguments = chosen(paths, interpreted=interpreted)
    if not arguments:
        print("    none is touched")
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto"]
    command += ["--maxprocesses", "8", "--dist", "worksteal"]
    return subprocess.run([*command, *arguments], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
