"""What make does, on a Python that only says what it was asked."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "book"), str(ROOT / "book" / "extensions")]

import conf  # noqa: E402  (it lies in book/)

MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
TARGETS = " ".join(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.M)).split()
MAKES = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "OTHER"}
MAKES |= {"VIRTUAL_ENV", "CONDA_PREFIX"}


MODULES = ["node_modules", "__pycache__"]


def make(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A run of make that knows nothing of the one that runs the tests."""
    return subprocess.run(
        ["make", *arguments],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k not in MAKES},
        capture_output=True,
        text=True,
    )


needs_make = pytest.mark.skipif(not shutil.which("make"), reason="needs make")


@needs_make
def test_make_help_lists_every_target() -> None:
    said = make("help", cwd=ROOT).stdout
    listed = re.findall(r"^  make ([\w-]+)\s+\S", said, re.M)
    assert sorted(listed) == sorted(TARGETS)


# A Python that says what it is called with, and has all that is needed.
PYTHON = """\
#!/bin/sh
case "$*" in
*" versions") cat versions ;;
*book/environment.py) ;;
*scripts*) dirname "$0" ;;
*) echo "$(printf "<%s>" "$0" "$PYTHONPATH" "$@")" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Enough of the project for make, in folders with spaces.

    "my env" and "sp ace/.venv" are environments; nothing has to be made.
    """
    clone = tmp_path / "sp ace"
    shutil.copytree(ROOT / "book", clone / "book", ignore=lambda *_: MODULES)
    for name in ["Makefile", "pyproject.toml", "constraints.txt", "README.md"]:
        shutil.copy(ROOT / name, clone)
    for env in [tmp_path / "my env", clone / ".venv", clone / "build/other"]:
        (env / "bin").mkdir(parents=True)
        for name in ("python", "typos"):
            (env / "bin" / name).write_text(PYTHON)
            (env / "bin" / name).chmod(0o755)
    (clone / "versions").write_text("Python 3.11.7, torch 2.13.0\n")
    for name in [
        "src/fastweights_lab/notebook/film/film.css",
        "src/fastweights.egg-info/SOURCES.txt",
        ".venv/ready",
        "book/node_modules/.package-lock.json",
        "build/grammar",
        "build/oldest_triton/.made",
    ]:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).touch()
    return clone


@needs_make
@pytest.mark.parametrize("active", [False, True], ids=["own", "active"])
def test_make_uses_whole_paths_and_the_library_of_its_clone(clone, active):
    """Also with an environment that has another clone's library."""
    env, words = ".venv", []
    if active:
        env = f"{clone.parent}/my env"
        words.append(f"VIRTUAL_ENV={env}")
    for target in ("test-all", "book", "mutants"):
        ran = make(target, *words, cwd=clone)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        calls = [x for x in ran.stdout.split("\n") if x.startswith("<")]
        begin = f"<{env}/bin/python>", f"<{env}/bin/typos>"
        assert calls and all(x.startswith(begin) for x in calls)
        pythonpath = {re.findall("<.*?>", x)[1] for x in calls}
        assert pythonpath - {"<src>", "<build/oldest_triton:src>"} == {
            f"<{clone}/src>"
        }
        if target == "test-all":
            cells = f"<nb_execution_cache_path={clone}/build/test/cells>"
            assert any(cells in x for x in calls)


@needs_make
def test_another_python_tests_the_library_and_no_more(clone):
    ran = make("test", f"OTHER={clone}/build/other/bin/python", cwd=clone)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    calls = [x for x in ran.stdout.split("\n") if x.startswith("<")]
    others = [
        x for x in calls if x.partition(">")[0].endswith("other/bin/python")
    ]
    beside, library, kernels = others
    assert "<beside><build/other><.venv/bin/python>" in beside
    assert "<pytest>" in library and "<tests>" in library
    assert "<pytest>" in kernels and "<not full>" in kernels
    assert "<tests/book/test_site.py>" in calls[-1] and calls[-1] not in others


def test_another_python_has_the_packages_of_the_first(tmp_path):
    def make_beside(python: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "book" / "environment.py")]
        return subprocess.run(
            [*command, "beside", str(tmp_path / "an other"), python],
            capture_output=True,
            text=True,
        )

    assert make_beside(sys.executable).returncode == 0
    code = "import sys, numpy; print(sys.prefix, numpy.__file__)"
    other = tmp_path / "an other" / "bin" / "python"
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    said = subprocess.check_output([other, "-c", code], env=kept, text=True)
    assert said == f"{tmp_path / 'an other'} {numpy.__file__}\n"
    older = tmp_path / "older"
    older.write_text("#!/bin/sh\necho 3.9; echo /packages\n")
    older.chmod(0o755)
    assert f"{older} is Python 3.9" in make_beside(str(older)).stderr


@needs_make
def test_what_the_book_is_built_from_builds_it_again(clone):
    assert make("build/environment", cwd=clone).returncode == 0
    for name in ["build/notebooks.made", "build/book"]:
        (clone / name).touch()

    def is_built() -> bool:
        return not make("-q", "build/book", cwd=clone).returncode

    later = (clone / "build/book").stat().st_mtime + 2
    assert is_built()
    os.utime(clone / "src/fastweights.egg-info/SOURCES.txt", (later, later))
    assert is_built()
    style = clone / "src/fastweights_lab/notebook/film/film.css"
    os.utime(style, (later, later))
    assert not is_built()
    os.utime(style, (0, 0))
    (clone / "versions").write_text("Python 3.11.2, torch 2.13.0\n")
    assert not is_built()


def test_the_cells_cache_is_named_after_all_that_their_output_shows(
    clone, monkeypatch
):
    names = [conf.sources_digest(clone)]
    for path in ["fastweights.egg-info/SOURCES.txt", "fastweights_lab/a.pyc"]:
        (clone / "src" / path).write_text("written by a tool")
        assert conf.sources_digest(clone) == names[0]
    (clone / "src/fastweights_lab/notebook/film/film.css").write_text("b { }")
    names.append(conf.sources_digest(clone))
    (clone / "src/fastweights_lab/new").write_bytes(b"\xff")
    names.append(conf.sources_digest(clone))
    monkeypatch.setattr("platform.python_version", lambda: "3.11")
    names.append(conf.sources_digest(clone))
    monkeypatch.setattr("environment.version", lambda name: "0")
    names.append(conf.sources_digest(clone))
    assert len(set(names)) == len(names)


@needs_make
@pytest.mark.parametrize("version", ["3.10.13", "3.15.0"])
def test_a_python_that_does_not_fit_gives_one_clear_line(
    clone, tmp_path, version
):
    other = tmp_path / "a python"
    other.write_text(
        f'#!/bin/sh\ntest "$1" = --version && exec echo "Python {version}"\n'
        f'exec "{sys.executable}" -c "import sys; sys.version_info = '
        f'({version.replace(".", ", ")}); exec(sys.argv[-1])" "$2"\n'
    )
    other.chmod(0o755)
    (clone / ".venv/ready").unlink()
    for command, line in [
        (f"PYTHON={other}", f"needed; {other} is Python {version}"),
        ("PYTHON=", "none was found"),
    ]:
        ran = make(".venv/ready", command, cwd=clone)
        assert ran.returncode
        assert line in ran.stdout and ran.stdout.count("\n") == 1
