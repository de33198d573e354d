"""Several runs at once, each in a process, told to one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch

from fastweights.experiments.trial import Trial, run

Tell = Callable[[int, int, float, float], None]
"""Is told which trial, its steps done, its loss and its accuracy."""


class WorkerDied(RuntimeError):
    """A process ended before its run did."""


def each(
    trials: Sequence[Trial], device: str, workers: int, tell: Tell
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run them all: yields which one ended, and what came of it.

    One worker runs them in this process, in their order. More run in
    processes of their own, each with one thread, and end in any order; these
    processes end when this one does, or when the iterator is closed.

    Raises:
        WorkerDied: a process did; what it printed says why.
    """
    if workers == 1:
        for i, trial in enumerate(trials):
            yield i, run(trial, device, progress=_about(i, tell))
        return
    context = get_context("spawn")
    waiting = list(enumerate(trials))[::-1]
    running = {}
    try:
        for _ in range(min(workers, len(trials))):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, device))
            process.start()
            there.close()
            here.send(waiting.pop())
            running[here] = process
        while running:
            for ready in wait([*running]):
                here = cast(Connection, ready)
                try:
                    done, about = here.recv()
                except EOFError:
                    process = running.pop(here)
                    process.join()
                    raise WorkerDied(
                        "workers: one died in a run (exit code "
                        f"{process.exitcode}); the same command goes on"
                    ) from None
                if not done:
                    tell(*about)
                    continue
                if waiting:
                    here.send(waiting.pop())
                else:
                    here.send(None)
                    running.pop(here).join()
                yield about
    finally:
        for process in running.values():
            process.terminate()
            process.join()


def _about(i: int, tell: Tell) -> Callable[[int, float, float], None]:
    return lambda *figures: tell(i, *figures)


def _work(pipe: Connection, device: str) -> None:
    """What a process does: the trials that come, until None comes.

    Or until nobody listens any more.
    """
    torch.set_num_threads(1)

    def tell(*about: Any) -> None:
        pipe.send((False, about))

    try:
        while (given := pipe.recv()) is not None:
            i, trial = given
            record = run(trial, device, progress=_about(i, tell))
            pipe.send((True, (i, record)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
