"""The book's torch.testing: check what a chapter claims and a reader answers.

    with Footprint() as touched:
        o, state = fw.linear_attention(q, k, v)
    print(touched.largest)                    # elements of a tensor, at most
    close(o, fw.linear_attention(q, k, v, backend="loop")[0], tol=1e-5)

Chapters and their readers use these, in notebooks and in programs.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import linecache
import math
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastweights import torch_internals

__all__ = [
    "Exercise",
    "Exponentials",
    "Footprint",
    "Products",
    "close",
    "count_events",
    "exercise",
    "forbid",
    "forbid_conversion",
    "no_autograd",
    "raises",
    "relative_error",
]


def relative_error(x: Tensor, ref: Tensor) -> float:
    """Root-mean-square of ``x - ref`` over that of ``ref``, in fp64.

    Args:
        x, ref: of one shape, in any dtypes, on any devices.

    Returns:
        The error; where ``ref`` is all zeros, the root-mean-square of ``x``
        itself. NaN in either makes it NaN, which is below no tolerance.

    Raises:
        ValueError: their shapes differ.
    """
    if x.shape != ref.shape:
        raise ValueError(
            f"x: got shape {tuple(x.shape)}, "
            f"need that of ref, {tuple(ref.shape)}"
        )
    x, ref = x.detach().double().cpu(), ref.detach().double().cpu()
    error = (x - ref).square().mean().sqrt()
    size = ref.square().mean().sqrt()
    return (error / size if size > 0 else error).item()


def close(x: Tensor, ref: Tensor, tol: float, label: str = "") -> None:
    """Assert that ``relative_error(x, ref) <= tol``, and print it.

    In a notebook a cell's calls are printed together when it ends, a line
    for each tolerance.

    Args:
        x, ref: of one shape, in any dtypes, on any devices.
        tol: the largest error that is allowed.
        label: what is printed before the numbers.

    Raises:
        AssertionError: the error is larger.
        ValueError: shapes differ.
    """
    error = relative_error(x, ref)
    name = f"{label}: " if label else ""
    message = f"{name}relative error {error:.1e}, allowed {tol:.0e}"
    if not error <= tol:
        raise AssertionError(message)
    shell = notebook()
    if shell is None:
        print(message)
        return
    if not _held:
        shell.events.register("post_run_cell", _print_held)
    _held.append((label, error, tol, message))


_held: list[tuple[str, float, float, str]] = []
"""What :func:`close` has found in the cell that runs."""

LINE = 79


def _print_held(*_: Any) -> None:
    """A line for each tolerance; a comparison on its own as it stands."""
    notebook().events.unregister("post_run_cell", _print_held)
    found = _held[:]
    _held.clear()
    for tol in dict.fromkeys(tol for _, _, tol, _ in found):
        those = [one for one in found if one[2] == tol]
        if len(those) == 1:
            print(those[0][3])
            continue
        largest = max(error for _, error, _, _ in those)
        text = f": relative errors up to {largest:.1e}, allowed {tol:.0e}"
        labels = "; ".join(dict.fromkeys(label for label, *_ in those))
        short = all(label for label, *_ in those)
        short = short and len(labels + text) <= LINE
        print((labels if short else f"{len(those)} comparisons") + text)


def raises(
    exception: type[Exception], function: Callable[..., Any], *args: Any
) -> None:
    """Assert that the call raises ``exception``; print what it said.

    Args:
        exception: what has to be raised.
        function: what is called, with ``args``.

    Raises:
        AssertionError: the call raises nothing.
    """
    try:
        function(*args)
    except exception as error:
        print(f"{exception.__name__}: {error}")
        return
    raise AssertionError(f"no {exception.__name__} was raised")


class _Watch(TorchDispatchMode):
    """Sees every operation inside the ``with`` block."""

    def see(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(func.overloadpacket.__name__, args, out)
        return out


class Footprint(_Watch):
    """Watch what the operations inside the ``with`` block touch.

    largest: elements of the largest tensor that an operation returned;
    peak: elements of all that operations returned and that was alive at
    once, views counted with what they are views of; total: elements of all
    tensors that operations took and returned; calls: how many operations
    there were; names: what they are called in ATen, such as "bmm"; dtypes:
    of the tensors they returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.peak = 0
        self.total = 0
        self.calls = 0
        self.names: set[str] = set()
        self.dtypes: set[torch.dtype] = set()
        self._alive: dict[int, int] = {}  # tensors, by where their data is
        self._elements = 0

    def see(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        self.calls += 1
        self.names.add(name)
        returned = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        taken = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        given = {x.untyped_storage().data_ptr() for x in taken}
        sizes = [x.numel() for x in returned]
        self.dtypes |= {x.dtype for x in returned}
        self.largest = max(self.largest, *sizes) if sizes else self.largest
        self.total += sum(sizes) + sum(x.numel() for x in taken)
        for x in returned:
            place = x.untyped_storage().data_ptr()
            if place not in given or place in self._alive:
                self._count(x, place)
        self.peak = max(self.peak, self._elements)

    def _count(self, x: Tensor, place: int) -> None:
        """Count what x is a view of, for as long as there is a view."""
        elements = x.untyped_storage().nbytes() // x.itemsize
        others = self._alive.get(place, 0)
        self._alive[place] = others + 1
        self._elements += 0 if others else elements

        def gone() -> None:
            self._alive[place] -= 1
            if not self._alive[place]:
                del self._alive[place]
                self._elements -= elements

        weakref.finalize(x, gone)


class Exponentials(_Watch):
    """Watch what is exponentiated inside the ``with`` block.

    count: how many numbers; largest: the greatest exponent, -inf at first;
    imitated: the operations that an exponential can be made of, whose
    exponents are not seen.
    """

    IMITATIONS = (
        "pow",
        "sigm",
        "tanh",
        "sinh",
        "cosh",
        "softmax",
        "softplus",
        "silu",
        "addexp",
        "sumexp",
        "ldexp",
        "matrix_exp",
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.largest = -math.inf
        self.imitated: set[str] = set()

    def see(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        if any(other in name for other in self.IMITATIONS):
            self.imitated.add(name)
        inverse = {"exp": torch.log, "exp2": torch.log2, "expm1": torch.log1p}
        if name.rstrip("_") in inverse and args[0].numel():
            # In place, the exponent is gone and its exponential there.
            undo = inverse[name[:-1]] if name.endswith("_") else torch.clone
            x = undo(args[0])
            self.count += x.numel()
            self.largest = max(self.largest, x.max().item())


@dataclass
class Attempt:
    """One call of an exercise's check: what was tried and how it went."""

    name: str
    passed: bool
    candidate: Any
    check: Exercise


exercise_log: list[Attempt] = []


class Exercise:
    """A check that tells a reader 'not yet' or 'passed'.

    Made by the decorator :func:`exercise`. Calling it with the reader's
    answer prints the verdict; with the environment variable
    ``FASTWEIGHTS_STRICT=1`` a failure raises as it does in :meth:`run`.

    Args:
        function: ``check_name(candidate)``, which asserts.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = function.__name__.removeprefix("check_")

    def run(self, candidate: Any) -> None:
        """Run the check on ``candidate``; a failure raises."""
        self.function(candidate)

    def reason(self, candidate: Any, error: Exception) -> str:
        """The message of a failure, after 'not yet: '."""
        if candidate is ... or _is_stub(candidate):
            return "the stub still has its ... in it"
        if type(error) is NotImplementedError and not str(error):
            return "not written"
        text = str(error)
        if isinstance(error, AssertionError):
            return text or "the answer differs from the reference"
        place = self._place(candidate, error)
        return f"{type(error).__name__}: {text}{place}"

    def _place(self, candidate: Any, error: Exception) -> str:
        """The line of the answer that failed, or of the check that used it."""
        name = getattr(candidate, "__qualname__", "the answer")
        check = self.function.__qualname__
        for words, whose in (
            (f"in {name}", name),
            (f"where the check uses {name}", check),
        ):
            for frame, number in reversed(
                [*traceback.walk_tb(error.__traceback__)]
            ):
                code = frame.f_code
                if f"{code.co_qualname}.".startswith(f"{whose}."):
                    line = linecache.getline(code.co_filename, number).strip()
                    return f", {words}" + (f": {line}" if line else "")
        return ""

    def __call__(self, candidate: Any) -> None:
        try:
            self.run(candidate)
        except Exception as error:
            exercise_log.append(Attempt(self.name, False, candidate, self))
            if os.environ.get("FASTWEIGHTS_STRICT") == "1":
                raise
            print(f"not yet: {self.reason(candidate, error)}")
        else:
            exercise_log.append(Attempt(self.name, True, candidate, self))
            print(f"passed: {self.name}")


def _is_stub(candidate: Any) -> bool:
    """Whether a function returns or assigns a bare ``...``."""
    if not inspect.isfunction(candidate):
        return False
    steps = list(dis.get_instructions(candidate))
    ends = ("RETURN_VALUE", "STORE_FAST")
    return any(
        step.argval is ... and (step.opname == "RETURN_CONST" or then in ends)
        for step, then in itertools.zip_longest(
            steps, [following.opname for following in steps[1:]]
        )
    )


def exercise(function: Callable[[Any], None]) -> Exercise:
    """Decorate a check as an exercise.

    Args:
        function: ``check_name(candidate)``, which asserts.

    Returns:
        the exercise, which is called with an answer.
    """
    return Exercise(function)


@contextmanager
def no_autograd() -> Iterator[None]:
    """Inside, to ask for a gradient of PyTorch raises an AssertionError.

    By ``torch.autograd.grad``, by ``backward``, by ``torch.func`` or by
    ``torch.autograd.forward_ad``, that is backward or forward.
    """

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(
            "automatic differentiation was asked for: write the gradients "
            "as formulas"
        )

    torch_internals.load_compiler()  # before two of its functions are one
    engine = torch.autograd
    places = [(engine, "grad"), (engine, "backward")]
    places += [(engine.forward_ad, "make_dual")]  # torch.func.jvp's as well
    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, refuse))
        stack.enter_context(torch.no_grad())
        yield


def forbid_conversion() -> AbstractContextManager[Any]:
    """Inside, to convert a tensor to NumPy or to a list is refused."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(
            "the tensors leave PyTorch: write it with PyTorch's operations"
        )

    names = ("numpy", "__array__", "__dlpack__", "tolist")
    refused: dict[str, Any] = dict.fromkeys(names, refuse)
    return mock.patch.multiple(torch.Tensor, **refused)


def by_library(*args: Any, **kwargs: Any) -> None:
    """Raise in place of a function that :func:`forbid` closes."""
    raise AssertionError("the library did it: write it yourself")


@contextmanager
def forbid(*functions: Callable[..., Any]) -> Iterator[None]:
    """Inside, to call one of them is refused, by any name, in any thread.

    Args:
        functions: plain ones, which refer to no variable of a function
            around them.
    """
    codes = [function.__code__ for function in functions]
    for function in functions:
        function.__code__ = by_library.__code__
    try:
        yield
    finally:
        for function, code in zip(functions, codes, strict=True):
            function.__code__ = code


def count_events(function: Callable[..., Any], *args: Any) -> int:
    """Count the steps of Python that a call takes.

    Args:
        function: what is called, with ``args``.

    Returns:
        calls, lines and returns, as ``sys.settrace`` counts them.
    """
    seen: list[str] = []
    before = sys.gettrace()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        seen.append(event)
        return trace

    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return len(seen)


class Products(Footprint):
    """A :class:`Footprint` that also lists the matrix products.

    sizes: of each, rows and columns of the result and the length of the sums,
    (m, n, inner); those of a batch are one entry.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int, int]] = []

    def see(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        super().see(name, args, out)
        if name in ("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_"):
            self.sizes.append((*out.shape[-2:], args[-1].shape[-2]))
        elif name in ("mv", "addmv", "dot"):
            self.sizes.append((out.numel(), 1, args[-1].numel()))


def notebook() -> Any:
    """IPython's shell, or None: a program without one has not imported it."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()
