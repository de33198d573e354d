"""Ranks of a gloo group, as processes on this machine, for a notebook.

    ranks = Ranks(4)
    found = ranks.run(function, q.chunk(4, 1), k.chunk(4, 1))

calls ``function(q, k)`` on each rank with its own part, and returns what each
of them returned. A function of the notebook travels with all that it names:
other functions of the notebook, modules, and what can be pickled. This is for
Linux and macOS.
"""

from __future__ import annotations

import importlib
import io
import marshal
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Ranks"]

SECONDS = 60
"""How long a rank waits for others, and a notebook for a rank."""


class Ranks:
    """``size`` processes, which end when this one does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.start()

    def start(self) -> None:
        """Start the processes, without waiting until they are ready."""
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Any] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        environment = {
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        store = f"{self.folder.name}/store"
        for rank in range(self.size):
            here, there = Pipe()
            place = there.fileno(), rank, self.size, store
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, place)],
                env=environment,
                pass_fds=[there.fileno()],
                start_new_session=True,  # an interrupt is for the notebook
            )
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def stop(self) -> None:
        """End the processes."""
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.wait()
            pipe.close()
        self.folder.cleanup()

    def run(
        self, function: Callable[..., Any], *arguments: Sequence[Any]
    ) -> list[Any]:
        """What the function returns on each rank, called on all at once.

        Args:
            function: asks dist.get_rank() where it is.
            arguments: each a sequence of one for every rank.

        Raises:
            RuntimeError: what a rank raised, or that it ended or waited too
                long. New processes then take the place of all.
        """
        messages = [
            dumps((function, own))
            for _, *own in zip(self.pipes, *arguments, strict=True)
        ]
        results: dict[Any, Any] = {}
        try:
            for pipe, message in zip(self.pipes, messages, strict=True):
                pipe.send_bytes(message)
            while left := [x for x in self.pipes if x not in results]:
                for pipe in wait(left, SECONDS) or left[:1]:
                    results[pipe], failed = answer_of(pipe)
                    if failed:
                        rank = self.pipes.index(pipe)
                        raise RuntimeError(f"rank {rank}: {failed}")
        except BaseException:  # the others may be waiting for a collective
            self.stop()
            self.start()
            raise
        return [results[pipe] for pipe in self.pipes]


def answer_of(pipe: Any) -> tuple[Any, str | None]:
    """What a rank returned, and how it failed."""
    if not pipe.poll():
        return None, "it waits for others"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None, "it ended"


def serve(descriptor: str, rank: str, size: str, store: str) -> None:
    """Do, on one rank, what is sent, until the notebook ends."""
    pipe = Connection(int(descriptor))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, int(size)),
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=SECONDS),
    )
    while True:
        try:
            function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        found: tuple[Any, str | None]
        try:
            found = function(*arguments), None
        except Exception as error:
            found = None, f"{type(error).__name__}: {error}"
        pipe.send_bytes(dumps(found))


class _Pickler(pickle.Pickler):
    """Takes modules, and functions that no other process can import."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, ModuleType):
            return importlib.import_module, (thing.__name__,)
        if isinstance(thing, FunctionType) and thing.__module__ == "__main__":
            if thing.__closure__:
                raise TypeError(
                    f"{thing.__name__}: got a function with variables of one "
                    "around it, need them as arguments"
                )
            names = {
                name: thing.__globals__[name]
                for name in named(thing.__code__)
                if name in thing.__globals__
            }
            state = names, thing.__defaults__, thing.__kwdefaults__
            code = marshal.dumps(thing.__code__)
            return new_function, (code,), state, None, None, complete
        return NotImplemented


def named(code: CodeType) -> Iterator[str]:
    """The names in a function's code, and in that of functions inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from named(constant)


def new_function(code: bytes) -> FunctionType:
    """A function of this code, without what it names."""
    space = {"__builtins__": __builtins__, "__name__": "__main__"}
    return FunctionType(marshal.loads(code), space)


def complete(function: FunctionType, state: tuple[Any, ...]) -> None:
    """Give a function what it names, and its defaults."""
    names, function.__defaults__, function.__kwdefaults__ = state
    function.__globals__.update(names)


def dumps(thing: Any) -> bytes:
    """``thing`` as bytes for another process of the same Python."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(thing)
    return buffer.getvalue()


if __name__ == "__main__":
    from fastweights_lab.notebook import ranks  # whose functions travel

    ranks.serve(*sys.argv[1:])
