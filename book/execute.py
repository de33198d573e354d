"""Run the chapters, several at once, and keep what they print for the site.

    python book/execute.py [--cells FOLDER] [--fresh] [--then FILE]
        [CHAPTER ...]

Each runs in a Jupyter kernel of its own, from its first cell to its last.
Sphinx finds the results in the cache, and runs nothing itself. Ctrl-C ends
the kernels; the chapters that have run to their end stay cached. --then names
a Python file whose ``after(chapter, names)`` is called in the same kernel
when the last cell has run, with the chapter's path and what its cells
defined; nothing of that is cached.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

import psutil
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import single_nb_execution
from myst_nb.core.read import myst_nb_reader_plugin
from nbformat.v4 import new_code_cell

BOOK = Path(__file__).resolve().parent
sys.path.insert(0, str(BOOK))

import conf  # noqa: E402  (it lies beside this file)

# What --then adds to a chapter, for as long as it runs.
LAST = "import runpy; runpy.run_path({then!r})['after']({path!r}, globals())"


def execute(
    chapters: list[Path], cells: Path, then: Path | None = None
) -> list[str]:
    """Run those that the cache does not have; how the failed ones failed."""
    cache = get_cache(cells)
    waiting = {}
    for path in chapters:
        notebook = myst_nb_reader_plugin(str(path))
        try:
            cache.match_cache_notebook(notebook)
        except KeyError:
            waiting[path] = notebook
            if then is not None:
                last = LAST.format(then=str(then), path=str(path))
                notebook.cells.append(new_code_cell(last))
    failures = []
    pool = ThreadPoolExecutor(os.cpu_count())
    running = {
        pool.submit(
            single_nb_execution,
            notebook,
            cwd=str(path.parent),
            timeout=conf.nb_execution_timeout,
            allow_errors=False,
            meta_override=True,
            coalesce_streams=True,  # the site would part a line where one ends
        ): path
        for path, notebook in waiting.items()
    }
    try:
        for future in as_completed(running):
            path = running[future]
            try:
                result = future.result()
            except Exception as error:  # a kernel that died, say
                failures.append(f"{path.name}: {error!r}")
                continue
            if result.err is not None:
                failures.append(f"{path.name}:\n{result.exc_string}")
                continue
            if then is not None:
                waiting[path].cells.pop()
            data = {"execution_seconds": result.time}
            bundle = CacheBundleIn(waiting[path], str(path), data=data)
            cache.cache_notebook_bundle(
                bundle, check_validity=False, overwrite=True
            )
            print(f"    {path.stem}: {result.time:.0f} s", flush=True)
    finally:
        end(pool, list(running))
    return failures


def end(pool: ThreadPoolExecutor, running: list[Future]) -> None:
    """Leave no kernel running: whoever waits for one sees that it died."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C
    pool.shutdown(wait=False, cancel_futures=True)
    while any(future.running() for future in running):
        for kernel in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                kernel.kill()
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("chapters", nargs="*", type=Path)
    parser.add_argument(
        "--cells", type=Path, default=Path(conf.nb_execution_cache_path)
    )
    parser.add_argument(
        "--fresh", action="store_true", help="run them all, cached or not"
    )
    parser.add_argument(
        "--then", type=Path, metavar="FILE", help="what to call after each"
    )
    arguments = parser.parse_args()
    if arguments.fresh:
        shutil.rmtree(arguments.cells, ignore_errors=True)
    folder = BOOK.parent / "chapters"
    # The last chapters take longest: they are not left for the end.
    chapters = arguments.chapters or [
        *sorted(folder.glob("*_*.md"), reverse=True),
        folder / "index.md",
    ]
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as home:
            # Without it each kernel warns that it listens on a port.
            profile = Path(home) / "profile_default"
            profile.mkdir()
            settings = profile / "ipython_kernel_config.py"
            settings.write_text("c.IPKernelApp.log_level = 'ERROR'\n")
            os.environ["IPYTHONDIR"] = home
            # As many kernels as cores: with several threads each, they wait
            # for one another, and a chapter of 40 s took 12 minutes.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            failures = execute(
                [x.resolve() for x in chapters],
                arguments.cells,
                arguments.then and arguments.then.resolve(),
            )
    except KeyboardInterrupt:
        print("    stopped; what ran to its end is kept", flush=True)
        # At an ordinary exit nbclient would ask for kernels that are gone.
        os._exit(128 + signal.SIGINT)
    print("\n".join(failures), file=sys.stderr, end="\n" * bool(failures))
    print(f"    {time.perf_counter() - start:.0f} s in all")
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())
