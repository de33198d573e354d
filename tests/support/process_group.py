"""Processes of a gloo group that run one case after the other.

They are forked from a server that has imported everything once.
"""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from unittest.mock import patch

import torch
import torch.distributed as dist

SECONDS = 120
"""What a case may take on a busy machine; no rank waits longer for others."""


class ProcessGroup:
    """``size`` processes; ``run`` calls a function of (rank, ...) on each."""

    def __init__(self, size):
        self.size, self.processes = size, []

    def start(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["support.rank_cases"])
        # Python 3.11's server has a path of its own, and imports in vain.
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        with patch.dict(os.environ, path):
            forkserver.ensure_running()
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, theirs = zip(
            *(context.Pipe() for _ in range(self.size)), strict=True
        )
        self.processes = [
            context.Process(
                target=serve,
                args=(rank, self.size, f"{self.folder.name}/store", pipe),
                daemon=True,
            )
            for rank, pipe in enumerate(theirs)
        ]
        for process in self.processes:
            process.start()

    def run(self, function, *arguments):
        """What each rank returns; what the first one raises, with its place.

        The others are then ended, and the next call begins a new group.
        """
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results, end = {}, time.monotonic() + SECONDS
        while len(results) < self.size:
            left = [p for p in self.pipes if p not in results]
            ready = wait(left, end - time.monotonic())
            if not ready:
                self.stop()
                raise TimeoutError(f"{self.size - len(results)} ranks wait")
            for pipe in ready:
                try:
                    results[pipe], failed = pipe.recv()
                except EOFError:
                    results[pipe] = failed = "a rank ended"
                if failed:
                    rank = self.pipes.index(pipe)
                    self.stop()
                    raise AssertionError(f"rank {rank}: {failed}")
        return [results[pipe] for pipe in self.pipes]

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()
        if self.processes:
            self.folder.cleanup()
        self.processes = []


def serve(rank, size, store, pipe):
    """Run what comes until nothing does."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SECONDS),
    )
    with suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send((function(rank, *arguments), None))
            except Exception:
                pipe.send((None, traceback.format_exc()))
