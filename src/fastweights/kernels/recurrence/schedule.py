"""A schedule: what a forward or backward launches, whatever its lengths.

Which kernels a call launches, and on what, follows from its dtypes, its
widths and which arguments it has. To find that takes Python hundreds of
microseconds, so it is done once per kind of call. Each call then multiplies:
a :class:`TensorSpec` says how many rows each tensor has, a
:class:`RuntimeNumber` what each grid and number is, in proportion to one of
the call's :class:`fastweights.kernels.recurrence.settings.Lengths`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastweights import torch_internals
from fastweights.kernels.recurrence.settings import IntLike, Lengths
from fastweights.kernels.recurrence.state_passing import (
    ExchangeLaunches,
    StateExchange,
)
from fastweights.kernels.tile import INTERPRETED

ALIGNMENT = 128  # bytes, of each tensor in a buffer: a line of the L2 cache


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that every call has, of as many rows as the named length says.

    With "tokens" the first dimensions are B and T. Two specs of the same name
    in a schedule are the same memory.
    """

    name: str
    length: str
    row: tuple[int, ...]
    dtype: torch.dtype

    @property
    def lines(self) -> RuntimeNumber:
        """The number of lines of ALIGNMENT bytes that it has in a buffer."""
        size = prod(self.row) * self.dtype.itemsize
        return RuntimeNumber(self.length, size, ALIGNMENT)

    @staticmethod
    def data_ptr() -> int:
        """An address that 16 divides: to Triton's compiler it is a tensor."""
        return 0

    def shape(self, lengths: Lengths) -> tuple[IntLike, ...]:
        if self.length == "tokens":
            return *lengths[:2], *self.row
        return getattr(lengths, self.length), *self.row

    def empty(self, q: Tensor, shape: tuple[IntLike, ...]) -> Tensor:
        return q.new_empty(shape, dtype=self.dtype)

    def view(self, buffer: Tensor, start: int, lengths: Lengths) -> Tensor:
        """The tensor whose first byte is byte ``start`` of a buffer."""
        shape = self.shape(lengths)
        end = start + prod(shape) * self.dtype.itemsize
        return buffer[start:end].view(self.dtype).view(shape)


@dataclass(frozen=True)
class RuntimeNumber:
    """A number that a call decides: ``times`` a length, over ``per``, up."""

    length: str
    times: int = 1
    per: int = 1

    def value(self, lengths: Lengths) -> IntLike:
        """The number in a call of such lengths."""
        return -(getattr(lengths, self.length) * -self.times // self.per)


SCALE = RuntimeNumber("scale")  # the number that no length decides


def buffer_offsets(
    lines: Iterable[RuntimeNumber], lengths: Lengths
) -> list[Any]:
    """Offsets of tensors of these sizes in one buffer; then its bytes."""
    numbers = [x.value(lengths) for x in lines]
    return [ALIGNMENT * n for n in accumulate(numbers, initial=0)]


def regroup(group: tuple, members: Iterable[Any]) -> Any:
    """Make of the members a group with the names that this one has, if any."""
    return getattr(type(group), "_make", tuple)(members)


def stand_in(x: Any) -> Any:
    """Replace an argument by what Triton takes to compile a kernel.

    A :class:`RuntimeNumber` is 2 there: for 1, and for what 16 divides, Triton
    compiles other kernels. The scale is 1.0.
    """
    if isinstance(x, tuple):
        return regroup(x, map(stand_in, x))
    if isinstance(x, RuntimeNumber):
        return 1.0 if x == SCALE else 2
    return x


def flatten(arguments: Iterable[Any]) -> list[Any]:
    """List the arguments, and instead of groups their members."""
    groups = (x if isinstance(x, tuple) else (x,) for x in arguments)
    return [x for group in groups for x in group]


def argument_key(x: Any) -> tuple[type, Any]:
    """The key of an argument in a schedule: its type, and a tensor's name.

    The type is in it since equal groups may differ in names, and 1 == True.
    """
    x = getattr(x, "name", x)
    return type(x), x


def allocate(
    specs: Sequence[TensorSpec], size: int, q: Tensor, lengths: Lengths
) -> list[Tensor]:
    """One buffer of ``size`` bytes; in Triton's interpreter a tensor each."""
    if INTERPRETED:
        return [x.empty(q, x.shape(lengths)) for x in specs]
    return [q.new_empty(size, dtype=torch.uint8)]


def tensor_views(
    specs: Sequence[TensorSpec],
    buffers: list[Tensor],
    starts: Sequence[int],
    lengths: Lengths,
) -> dict[str, Tensor]:
    """The tensors in what :func:`allocate` returned, by name."""
    names = [x.name for x in specs]
    if INTERPRETED:
        return dict(zip(names, buffers, strict=False))
    placed = zip(specs, starts, strict=False)
    return {x.name: x.view(buffers[0], i, lengths) for x, i in placed}


class Launch(NamedTuple):
    """A kernel, its number of programs, and its arguments, in order.

    Among them a :class:`TensorSpec` becomes an address, a
    :class:`RuntimeNumber` a number, and a tuple a group of either; all others
    are constants.
    """

    kernel: Any
    programs: RuntimeNumber
    arguments: tuple[Any, ...]
    options: dict[str, int]  # num_warps and the like

    def compile(self) -> Any:
        """Compile the kernel for such arguments, or return a future of it.

        Triton looks at a pointer's dtype and at whether 16 divides it, which
        it does here; and at the type of a number, where that is not 1 and 16
        does not divide it.
        """
        arguments = [stand_in(x) for x in self.arguments]
        return self.kernel.warmup(*arguments, grid=(1,), **self.options)

    def fitting_kernel(self, shared: int) -> Any:
        """The compiled kernel, in at most ``shared`` bytes of shared memory.

        How many it takes differs by the compiler's version. Where the
        launch's own stages do not fit, it has fewer, which load less ahead
        and change nothing else. A RuntimeError names a kernel that does not
        compile, or does not fit with one stage.
        """
        name, stages = self.kernel.__name__, self.options.get("num_stages", 1)
        try:
            kernel = torch_internals.finished_kernel(self.compile)
        except Exception as error:
            raise RuntimeError(f"{name} does not compile: {error}") from error
        size = torch_internals.shared_bytes(kernel)
        if size <= shared:
            return kernel
        if stages == 1:
            raise RuntimeError(
                f"{name} takes {size} bytes of shared memory, and the GPU "
                f'has {shared}; backend="torch" needs none'
            )
        options = self.options | {"num_stages": stages - 1}
        return self._replace(options=options).fitting_kernel(shared)


def compile_together(*schedules: Schedule) -> None:
    """Compile at once all kernels of these schedules that are not compiled.

    One kernel at a time, as they are met, takes a few times as long. What
    cannot be compiled raises where it is loaded.
    """
    launches = [launch for x in schedules for launch in x.launches]
    torch_internals.compile_each(Launch.compile, launches)


@dataclass
class Schedule:
    """The launches of one kind of call, and where their tensors lie.

    A call hands over the tensors of ``inputs``, q first. Each of its results
    has memory of its own; what is saved for the backward is in one buffer,
    which the forward makes and the backward is handed; all other tensors
    share one, ``scratch``, that is freed after the last launch.

    On ranks a call leaves the launches of ``exchange_span``, from the place of
    compose_kernel to that of add_arriving_kernel, to its ``exchange``.
    """

    launches: Sequence[Launch]
    inputs: Sequence[str]
    results: Sequence[TensorSpec]
    saved: Sequence[TensorSpec]
    exchange_span: tuple[int, int] | None = None
    kernels: list[Any] = field(default_factory=list)  # once they are loaded

    def __post_init__(self) -> None:
        arguments = [x for launch in self.launches for x in launch.arguments]
        arguments = [*{argument_key(x): x for x in arguments}.values()]
        groups = [x for x in arguments if isinstance(x, tuple)]
        members = {argument_key(x): x for x in flatten(arguments)}.values()
        numbers = [x for x in members if type(x) is RuntimeNumber]
        self.numbers = [x for x in numbers if x != SCALE]
        self.constants = [
            x for x in members if not isinstance(x, TensorSpec | RuntimeNumber)
        ]
        specs = {x.name: x for x in members if isinstance(x, TensorSpec)}
        names = [*self.inputs, *(x.name for x in self.results)]
        names += [x.name for x in self.saved]
        self.scratch = [x for x in specs.values() if x.name not in names]
        names += [x.name for x in self.scratch]
        # As __call__ has the values.
        order = [SCALE, *names, *self.numbers, *self.constants, *groups]
        self.num_values = len(order) - len(groups)
        indices = {argument_key(x): i for i, x in enumerate(order)}

        def select(group: tuple[Any, ...]) -> Callable[[list], tuple]:
            ids = [indices[argument_key(x)] for x in group]
            # The interpreter finds members by name, compiled code by place;
            # itemgetter makes no tuple of a single one.
            if INTERPRETED or len(ids) == 1:
                return lambda values: regroup(group, [values[i] for i in ids])
            return itemgetter(*ids)

        self.groups = [select(x) for x in groups]
        self.selectors = [select(x.arguments) for x in self.launches]
        buffers = self.saved, self.scratch
        self.lines = [[x.lines for x in specs] for specs in buffers]
        self.tma = any(getattr(x, "TMA", False) for x in self.constants)
        self.prepare_once = lru_cache(maxsize=256)(self.prepare)

    def load(self, shared: int) -> None:
        """Load its kernels; a program has ``shared`` bytes of shared memory.

        They are compiled if they are not yet, or awaited if some thread
        compiles them. What cannot be compiled raises, and may be tried again.
        """
        self.kernels = [
            x.kernel if INTERPRETED else x.fitting_kernel(shared)
            for x in self.launches
        ]

    def prepare(self, lengths: Lengths) -> tuple[list, ...]:
        """Launches, results' shapes, offsets in saved and scratch, numbers."""
        programs = [x.programs.value(lengths) for x in self.launches]
        launches = zip(self.kernels, programs, self.selectors, strict=True)
        runs = [(kernel[n, 1, 1], select) for kernel, n, select in launches]
        shapes = [(x, x.shape(lengths)) for x in self.results]
        offsets = [buffer_offsets(x, lengths) for x in self.lines]
        numbers = [x.value(lengths) for x in self.numbers]
        return runs, shapes, *offsets, [*numbers, *self.constants]

    def __call__(
        self,
        inputs: Sequence[Tensor | None],
        lengths: Lengths,
        scale: float,
        saved: list[Tensor] | None = None,
        exchange: StateExchange | None = None,
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Run all launches; return the results by name, and what is saved.

        The kernels are given addresses, but in Triton's interpreter tensors.
        """
        q = inputs[0]
        assert q is not None
        prepared = self.prepare_once(lengths)
        runs, shapes, saved_offsets, scratch_offsets, numbers = prepared
        results = {x.name: x.empty(q, shape) for x, shape in shapes}
        if saved is None:
            saved = allocate(self.saved, saved_offsets[-1], q, lengths)
        scratch = saved  # nothing of it, if nothing lies between
        if self.scratch:
            scratch = allocate(self.scratch, scratch_offsets[-1], q, lengths)
        given = [*inputs, *results.values()]
        if INTERPRETED:
            values = [scale, *given, *saved, *scratch[: len(self.scratch)]]
        else:
            saved_at, scratch_at = saved[0].data_ptr(), scratch[0].data_ptr()
            values = [scale]
            values += [0 if x is None else x.data_ptr() for x in given]
            values += [saved_at + x for x in saved_offsets[:-1]]
            values += [scratch_at + x for x in scratch_offsets[:-1]]
        values += numbers
        assert len(values) == self.num_values  # in the order of __post_init__
        values += [select(values) for select in self.groups]
        launch = launch_with_descriptors if self.tma else launch_all
        if exchange is None:
            launch(runs, values)
            return results, saved
        tensor_of = dict(zip(self.inputs, inputs, strict=True)) | results
        for buffer in (
            (self.saved, saved, saved_offsets),
            (self.scratch, scratch, scratch_offsets),
        ):
            tensor_of |= tensor_views(*buffer, lengths)
        self.launch_on_rank(launch, runs, values, tensor_of, exchange)
        return results, saved

    def launch_on_rank(
        self,
        launch: Callable[[list, list[Any]], None],
        runs: list,
        values: list[Any],
        tensor_of: dict[str, Any],
        exchange: StateExchange,
    ) -> None:
        """Launch all, some of them as the exchange asks for them."""
        assert self.exchange_span is not None
        compose, arriving = self.exchange_span
        states = self.launches[compose].arguments[0]

        def run_with(n: int, **tensors: Tensor) -> None:
            run, select = runs[n]
            group, *arguments = select(values)
            replaced = {
                name: x if INTERPRETED else x.data_ptr()
                for name, x in tensors.items()
            }
            run(regroup(states, group)._replace(**replaced), *arguments)

        launches = ExchangeLaunches(
            functools.partial(run_with, compose),
            functools.partial(launch, runs[compose + 1 : arriving], values),
            functools.partial(run_with, arriving),
        )
        tensors = regroup(states, [x and tensor_of[x.name] for x in states])
        launch(runs[:compose], values)
        exchange(tensors, launches)
        launch(runs[arriving + 1 :], values)


def launch_all(runs: list, values: list[Any]) -> None:
    """Launch kernels: the one place from which the family's are."""
    for run, select in runs:
        run(*select(values))


def _allocate_descriptors(
    size: int, alignment: int, stream: int | None
) -> Tensor:
    """Allocate bytes on the GPU, until what runs on its stream is done."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def launch_with_descriptors(runs: list, values: list[Any]) -> None:
    """:func:`launch_all`, with memory for the kernels that make descriptors.

    Triton's allocator is a context variable: ours is set in a copy of the
    context, so that the caller's stays.
    """
    context = copy_context()
    context.run(triton.set_allocator, _allocate_descriptors)
    context.run(launch_all, runs, values)
