"""Break the library one line at a time: the unit tests must notice.

    python tools/mutants.py [--record] [name ...]

Each mutant is one replacement in a copy of src; the tests named beside it
run against that copy, first the one that noticed when faults/noticed.json
was written (--record writes it). Prints which test caught it, and fails if
one lives.

faults/*.txt list them: after an empty line a file and the tests of most of
its mutants; then, for each, "= name", tests of its own if it has some, and
as in a diff but of any part of a line: what is replaced where it stands
first (-) and by what (+).
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "tools" / "faults"


def read() -> dict[str, tuple[str, str, str, str]]:
    """The file, what is replaced, what replaces it and the tests, by name."""
    mutants = {}
    for path in sorted(FAULTS.glob("*.txt")):
        for part in path.read_text("utf-8").split("\n\n")[1:]:
            head, *faults = re.split(r"^= ", part.rstrip("\n"), flags=re.M)
            file, usual = head.split()
            for fault in faults:
                title, *lines = fault.rstrip("\n").split("\n")
                name, *tests = title.split()
                old, new = (
                    "\n".join(line[1:] for line in lines if line[0] == sign)
                    for sign in "-+"
                )
                mutants[name] = (file, old, new, *(tests or [usual]))
    return mutants


MUTANTS = read()
NOTICED = FAULTS / "noticed.json"
# Each is the copy of one process that has imported what the library needs.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["beartype", "hypothesis", "jaxtyping", "pytest", "torch"]
)


def caught_by(
    file: str, old: str, new: str, tests: str, *, first: str = ""
) -> str:
    """The first test that fails on the mutant, or "" if none does.

    ``first`` is tried before the others.
    """
    with tempfile.TemporaryDirectory() as copy:
        src = Path(copy) / "src"
        shutil.copytree(ROOT / "src", src)
        text = (src / file).read_text()
        if old not in text:
            return f"STALE: {file} has no {old!r}"
        (src / file).write_text(text.replace(old, new, 1))
        for some in (first, tests) if first else (tests,):
            if found := failure(src, some):
                return found
    return ""


def failure(src: Path, tests: str) -> str:
    """The first of these tests that fails with this library, or ""."""
    said = src.parent / "said"
    run = PROCESSES.Process(target=judge, args=(src, tests, said))
    run.start()
    run.join()
    if run.exitcode < 0:  # it wrote where it must not, say
        return f"the process, by signal {-run.exitcode}"
    if run.exitcode == 4:  # there is no such test any more
        return ""
    failed = ("FAILED", "ERROR")
    lines = [x for x in said.read_text().splitlines() if x.startswith(failed)]
    return lines[0].split(" - ")[0].split("tests/")[-1] if lines else ""


def judge(src: Path, tests: str, said: Path) -> None:
    """Run the tests, in a process that has not seen the library yet."""
    os.environ |= {"PYTHONPATH": str(src), "OMP_NUM_THREADS": "1"}
    if tests.startswith("kernels/"):
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(src))
    os.chdir(src.parent)
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    options = "-x -q --no-header --tb=no -rfE -m"
    options = [*options.split(), "not full", "-p", "no:cacheprovider"]
    file = str(ROOT / "tests" / tests)
    sys.exit(pytest.main([*options, "-p", "no:nbval", file]))


def main(names: list[str], record: bool) -> int:
    """Two at a time on two cores: each is a process of its own."""
    names = names or [*MUTANTS]
    noticed = json.loads(NOTICED.read_text())
    passed = 0

    def caught(name: str) -> str:
        return caught_by(*MUTANTS[name], first=noticed.get(name, ""))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tests = pool.map(caught, names)
        for name, test in zip(names, tests, strict=True):
            print(f"{name:36} {test or 'ALIVE'}", flush=True)
            passed += bool(test) and not test.startswith("STALE")
            if record and "::" in test:
                noticed = {**noticed, name: test}
                kept = {k: noticed[k] for k in MUTANTS if k in noticed}
                NOTICED.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{passed} passed, {len(names) - passed} failed")
    return len(names) - passed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    sys.exit(main(arguments.names, arguments.record))
