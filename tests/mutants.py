"""Break the library one line at a time: the unit tests must notice.

    python tests/mutants.py [name ...]

Each mutant is one replacement in a copy of src; the tests named beside it
run against that copy. Prints which test caught it, and fails if one lives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults import calls, family, layers, members, selective

ROOT = Path(__file__).resolve().parent.parent
PARTS = (family, members, calls, selective, layers)
TESTS = {k: v for part in PARTS for k, v in part.TESTS.items()}
MUTANTS = {k: v for part in PARTS for k, v in part.MUTANTS.items()}


def caught_by(file: str, old: str, new: str, tests: str = "") -> str:
    """The first test that fails on the mutant, or "" if none does."""
    with tempfile.TemporaryDirectory() as copy:
        src = Path(copy) / "src"
        shutil.copytree(ROOT / "src", src)
        text = (src / file).read_text()
        if old not in text:
            return f"STALE: {file} has no {old!r}"
        (src / file).write_text(text.replace(old, new, 1))
        tests = tests or TESTS[file]
        kernels = tests.startswith("test_kernels")
        settings = {"PYTHONPATH": str(src), "OMP_NUM_THREADS": "1"}
        settings |= {"TRITON_INTERPRET": "1"} if kernels else {}
        options = "-x -q --no-header --tb=no -rfE -p no:cacheprovider"
        command = [sys.executable, "-m", "pytest", *options.split()]
        run = subprocess.run(
            [*command, "-m", "not full", ROOT / "tests" / tests],
            cwd=copy,
            env=os.environ | settings,
            capture_output=True,
            text=True,
        )
    if run.returncode < 0:  # it wrote where it must not, say
        return f"the process, by signal {-run.returncode}"
    failed = ("FAILED", "ERROR")
    lines = [x for x in run.stdout.splitlines() if x.startswith(failed)]
    return lines[0].split(" - ")[0].split("/")[-1] if lines else ""


def main(names: list[str]) -> int:
    """Two at a time on two cores: each is a process of its own."""
    names = names or [*MUTANTS]
    passed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tests = pool.map(lambda name: caught_by(*MUTANTS[name]), names)
        for name, test in zip(names, tests, strict=True):
            print(f"{name:36} {test or 'ALIVE'}", flush=True)
            passed += bool(test) and not test.startswith("STALE")
    print(f"{passed} passed, {len(names) - passed} failed")
    return len(names) - passed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
