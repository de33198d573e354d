"""Several runs at once, each in a process, told to one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, cast

import torch

from fastweights_lab.experiments.trial import Stages, a_stream, run_stages
from fastweights_lab.records import Record

Run = Callable[..., Stages]
"""``run(job, device, progress=)``: a job's stages; found by its name."""

Tell = Callable[..., None]
"""Is told which job, and what its ``progress`` was told."""


class WorkerDied(ChildProcessError):
    """A process ended before its run did."""


def run_jobs(
    run: Run,
    jobs: Sequence[Any],
    device: str,
    workers: int,
    tell: Tell,
    streams: int = 1,
) -> Iterator[tuple[int, Record]]:
    """Run all jobs: yields which one ended, and what came of it.

    One worker with one stream runs them in this process, in their order.
    Else they run in processes of their own, each with one thread and with
    so many runs that take turns, and end in any order; these processes end
    when this one does, or when the iterator is closed.

    Raises:
        WorkerDied: a process did; what it printed says why.
    """
    if workers == streams == 1:
        for i, job in enumerate(jobs):
            going = run(job, device, progress=partial(tell, i))
            yield i, run_stages(going, device)
        return
    context = get_context("spawn")
    waiting = list(enumerate(jobs))[::-1]
    running: dict[Connection, SpawnProcess] = {}
    try:
        for _ in range(min(workers, len(jobs))):
            here, there = context.Pipe()
            process = context.Process(
                target=_work, args=(there, run, device, streams)
            )
            process.start()
            there.close()
            running[here] = process
        for here in [*running] * streams:
            if waiting:
                here.send(waiting.pop())
        left = len(jobs)
        while left:
            for ready in wait([*running]):
                here = cast(Connection, ready)
                try:
                    done, about = here.recv()
                except EOFError:
                    running[here].join()
                    raise WorkerDied(
                        "workers: one died in a run (exit code "
                        f"{running[here].exitcode}); the same command goes on"
                    ) from None
                if not done:
                    tell(*about)
                    continue
                if waiting:
                    here.send(waiting.pop())
                left -= 1
                yield about
    finally:
        for process in running.values():
            process.terminate()
            process.join()


def _work(pipe: Connection, run: Run, device: str, streams: int) -> None:
    """What a process does: the jobs that come, while somebody listens."""
    torch.set_num_threads(1)
    # Streams that share one of the (8) queues to a GPU wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

    def tell(*about: Any) -> None:
        pipe.send((False, about))

    free = [a_stream(device) for _ in range(streams)]
    running: list[tuple[int, Stages, AbstractContextManager]] = []
    try:
        while True:
            while free and (not running or pipe.poll()):
                i, job = pipe.recv()
                going = run(job, device, progress=partial(tell, i))
                running.append((i, going, free.pop()))
            i, going, stream = running.pop(0)
            try:
                with stream:
                    next(going)
                running.append((i, going, stream))
            except StopIteration as end:
                free.append(stream)
                pipe.send((True, (i, end.value)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
