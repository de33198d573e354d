"""The chapters' runs can be stopped, and keep what has been done."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from jupyter_cache import get_cache

ROOT = Path(__file__).resolve().parents[2]
HEAD = "---\nkernelspec:\n  name: python3\n  display_name: x\n---\n# A\n"


@pytest.fixture
def begin(tmp_path):
    """Begin a run of chapters of one cell each, in a group of its own."""
    runs = []

    def begin(**cells: str) -> subprocess.Popen:
        for name, code in cells.items():
            text = f"{HEAD}\n```{{code-cell}} python3\n{code}\n```\n"
            (tmp_path / f"{name}.md").write_text(text)
        chapters = [tmp_path / f"{name}.md" for name in cells]
        command = [sys.executable, str(ROOT / "book" / "execute.py")]
        run = subprocess.Popen(
            [*command, "--cells", tmp_path / "cells", *chapters],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        runs.append(run)
        return run

    yield begin
    for run in runs:
        run.kill()


def kept(folder: Path) -> list[str]:
    records = get_cache(folder / "cells").list_cache_records()
    return sorted(Path(record.uri).stem for record in records)


def test_ctrl_c_ends_the_kernels_and_keeps_finished_chapters(begin, tmp_path):
    slow = "import time\ntime.sleep(100)"
    run = begin(a="1", b=slow, c=slow, d=slow)
    assert run.stdout.readline().startswith("    a: ")
    kernels = psutil.Process(run.pid).children(recursive=True)
    start = time.monotonic()
    for _ in range(2):
        os.killpg(run.pid, signal.SIGINT)
        time.sleep(0.3)
    said = "".join(run.communicate(timeout=60))
    assert time.monotonic() - start < 20
    assert run.returncode == 130
    assert "Traceback" not in said, said
    assert kept(tmp_path) == ["a"]
    assert not psutil.wait_procs(kernels, timeout=5)[1]


def test_a_kernel_that_dies_costs_no_other_chapter(begin, tmp_path):
    run = begin(a="import os\nos._exit(1)", b="1", c="1/0")
    _, said = run.communicate(timeout=100)
    assert run.returncode == 2
    assert "a.md: DeadKernelError" in said
    assert "c.md:" in said and "ZeroDivisionError" in said
    assert kept(tmp_path) == ["b"]


def test_a_line_that_came_in_parts_is_one(begin, tmp_path):
    part = "import time\nprint('a', end='', flush=True)\ntime.sleep(0.5)"
    assert begin(a=f"{part}\nprint('b')").wait(timeout=60) == 0
    cache = get_cache(tmp_path / "cells")
    (record,) = cache.list_cache_records()
    (cell,) = cache.get_cache_bundle(record.pk).nb.cells
    assert [output.text for output in cell.outputs] == ["ab\n"]
