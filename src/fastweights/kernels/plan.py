"""The launches of a call, found once for all calls of its sizes.

Which kernels a call launches, on what, and in which memory follows from the
shapes and dtypes of its arguments, and takes hundreds of microseconds of
Python to find. So a call is traced once, on tensors without data
(:class:`fastweights.kernels.call.Call`), and its launches are repeated on
addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastweights import private

Sizes = tuple[tuple[torch.Size, torch.dtype] | None, ...]
ALIGNMENT = 128  # bytes, of each tensor in a buffer: a line of the L2 cache


class Launch(NamedTuple):
    """A kernel, its number of programs, and the arguments it is given."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def compile(self) -> Any:
        """The kernel for such arguments, or what Triton has of it by now."""
        return self.kernel.warmup(
            *self.arguments, grid=(self.programs,), **self.constants
        )

    def fitting(self, shared: int) -> Any:
        """The compiled kernel, in at most so many bytes of shared memory.

        How many it takes is the compiler's to say, and differs by its
        version: where the launch's own stages do not fit, fewer are taken,
        which load less ahead and change nothing else.

        Raises:
            RuntimeError: it does not compile, or does not fit with one
                stage; by the kernel's name, and from the compiler's error.
        """
        launch, name = self, self.kernel.__name__
        while True:
            try:
                kernel = private.compiled(launch.compile)
            except Exception as error:
                raise RuntimeError(
                    f"{name} does not compile: {error}"
                ) from error
            taken = private.shared_bytes(kernel)
            if taken <= shared:
                return kernel
            stages = launch.constants.get("num_stages", 1)
            if stages == 1:
                raise RuntimeError(
                    f"{name} takes {taken} bytes of shared memory, and the "
                    f'GPU has {shared}; backend="chunkwise" needs none'
                )
            fewer = launch.constants | {"num_stages": stages - 1}
            launch = launch._replace(constants=fewer)


def sizes(tensors: Iterable[Tensor | None]) -> Sizes:
    return tuple([None if t is None else (t.shape, t.dtype) for t in tensors])


def nowhere(of: Sizes) -> list[Any]:
    """Tensors of these sizes, without data."""
    return [
        None if x is None else torch.empty(x[0], dtype=x[1], device="meta")
        for x in of
    ]


def buffers(tensors: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """Each tensor as a buffer of its own, empty where it is None."""
    return [[] if t is None else [t] for t in tensors]


def places(tensors: Sequence[Tensor]) -> list[Any]:
    """Where each begins in a buffer of them all; at last, the buffer's bytes.

    SymInts where shapes are symbols.
    """
    lines = [-(-t.numel() * t.itemsize // ALIGNMENT) for t in tensors]
    return [ALIGNMENT * n for n in accumulate(lines, initial=0)]


def compile_together(*plans: Plan) -> None:
    """Compile all that these plans launch and is not compiled yet, at once.

    One kernel at a time, as they are met, takes a few times as long. What
    cannot be compiled raises where it is loaded.
    """
    launches = [launch for plan in plans for launch in plan.launches]
    private.compile_each(Launch.compile, launches)


class Plan:
    """Launches, to repeat on other data.

    Args:
        launches: in their order, on tensors without data.
        given: the buffers that a call hands over, each with the tensors that
            are in it; none for an argument that is None.
        results: the tensors that it returns.
        kept: the tensors in one more buffer that it returns, if it does.
        scale: the argument in place of which each call has its own.

    All other tensors between launches share a buffer that is freed after
    the last one.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        given: Sequence[Sequence[Tensor]],
        results: Sequence[Tensor],
        kept: Sequence[Tensor] | None,
        scale: float,
    ) -> None:
        self.launches = launches
        self.returned = [(tuple(t.shape), t.dtype) for t in results]
        buffers = [*given, *([t] for t in results)]
        if kept is not None:
            buffers.append(kept)
            self.returned.append(((places(kept)[-1],), torch.uint8))
        found = {private.storage_of(t) for buffer in buffers for t in buffer}
        between = {
            private.storage_of(t): t
            for launch in launches
            for t in launch.arguments
            if isinstance(t, Tensor) and private.storage_of(t) not in found
        }
        buffers.append([*between.values()])
        self.between = places(buffers[-1])[-1]

        # What launches take: None, a call's scale, addresses, and numbers
        # that are the same for all calls.
        self.addresses: list[tuple[int, int]] = []  # buffer, and where in it
        indices: dict[int, int] = {}
        for i, buffer in enumerate(buffers):
            for t, place in zip(buffer, places(buffer), strict=False):
                indices[private.storage_of(t)] = 2 + len(self.addresses)
                self.addresses.append((i, place))
        self.numbers: list[Any] = []

        def index(x: Any) -> int:
            if isinstance(x, Tensor):
                assert x.storage_offset() == 0, "a launch takes whole buffers"
                return indices[private.storage_of(x)]
            if x is None or x is scale:
                return int(x is scale)
            self.numbers.append(x)
            return 1 + len(self.addresses) + len(self.numbers)

        self.takes: list[Callable[[list[Any]], tuple[Any, ...]]] = []
        for launch in launches:
            names = launch.kernel.arg_names[len(launch.arguments) :]
            constants = [launch.constants[name] for name in names]
            takes = map(index, (*launch.arguments, *constants))
            self.takes.append(itemgetter(*takes))
        self.tma = any(launch.constants.get("TMA") for launch in launches)
        self.runs: list[Callable[..., None]] = []  # once they are loaded

    def load(self, shared: int) -> None:
        """Load its kernels, into so many bytes of shared memory a program.

        Compiled if they are not yet, or awaited if some thread compiles them.
        What cannot be compiled raises, and may be compiled again.
        """
        self.runs = [
            launch.fitting(shared)[launch.programs, 1, 1]
            for launch in self.launches
        ]

    def __call__(
        self, given: Sequence[Tensor | None], scale: float
    ) -> list[Tensor]:
        """Its results for these tensors, the first of which is not None."""
        q = given[0]
        assert q is not None
        made = [
            q.new_empty(shape, dtype=dtype) for shape, dtype in self.returned
        ]
        buffers = [*given, *made]
        if self.between:
            buffers.append(q.new_empty(self.between, dtype=torch.uint8))
        starts = [0 if t is None else t.data_ptr() for t in buffers]
        values = [None, scale]
        values += [starts[i] + place for i, place in self.addresses]
        values += self.numbers
        if self.tma:
            with_scratch(self.launch, values)
        else:
            self.launch(values)
        return made

    def launch(self, values: list[Any]) -> None:
        for run, takes in zip(self.runs, self.takes, strict=True):
            run(*takes(values))


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Bytes on the GPU, until what runs on the current stream is done."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def with_scratch(
    launch: Callable[..., Any], *arguments: Any, **constants: Any
) -> Any:
    """Run ``launch`` where a kernel that makes descriptors has memory for it.

    Triton's allocator is a context variable: ours is set in a copy of the
    context, so that the caller's stays.
    """
    context = copy_context()
    context.run(triton.set_allocator, _allocate)
    return context.run(launch, *arguments, **constants)
