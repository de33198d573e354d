"""Triton's interpreter, several times faster, with the same numbers.

Most of its time goes into what need not be done so often:

* A reduction or scan with a function of ours calls it for one number after
  the other. Here it combines whole slices, in the same order.
* Each call of a function in a kernel searches all of ``triton.language``
  for what the interpreter replaces. Here that happens once per launch.
* Each tile makes a dictionary to look up its numpy dtype, and objects for
  each size of its shape. Here all share one, and those of a shape.
* Two tiles of one shape are broadcast to a third type. Here they are left.
* Each call of a builtin copies its arguments, and asks whether it is inside
  of a kernel. Here it is.
* Sums and products of int32 are computed in int64 too, for an assertion
  that is made in debug mode only. Here they are not.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import interpreter_semantic

own_dtype = interpreter._get_np_dtype
own_patch = interpreter._patch_lang
own_launch = interpreter.GridExecutor.__call__
own_broadcast = interpreter_semantic.broadcast_impl_value
own_cast = interpreter_semantic.cast
own_block = tl.block_type.__init__
SCALAR = tl.tuple([]), tl.constexpr(1)
_replaced: set[frozenset[str]] = set()  # in the launch that runs
_dtypes: dict[str, np.dtype] = {}


def np_dtype(dtype: tl.dtype) -> np.dtype:
    """The numpy dtype that holds numbers, or pointers, of this dtype."""
    scalar = dtype.scalar
    if isinstance(scalar, tl.pointer_type):
        return np.dtype(np.uint64)
    if scalar.name not in _dtypes:
        _dtypes[scalar.name] = own_dtype(scalar)
    return _dtypes[scalar.name]


@functools.cache
def _seen(module: str) -> frozenset[str]:
    """Under which of its names a module has the language."""
    return frozenset(
        value.__name__
        for value in vars(sys.modules[module]).values()
        if inspect.ismodule(value) and value in (tl, tl.core)
    )


def patch_lang(function: Any) -> interpreter._LangPatchScope:
    """Replace what the function's module sees of the language, if it is not.

    What the launch's first call replaces stays so until the launch ends.
    """
    seen = _seen(function.__module__)
    if seen in _replaced:
        return interpreter._LangPatchScope()
    _replaced.add(seen)
    return own_patch(function)


@functools.cache
def sizes(*shape: int) -> dict[str, Any]:
    """What a block type of this shape has, whatever its elements are.

    ``sizes`` are the shape and the number of elements as a tile has them.
    """
    block = object.__new__(tl.block_type)
    own_block(block, tl.int1, [*shape])
    tile = tl.tuple([tl.constexpr(n) for n in shape])
    return {
        "shape": block.shape,
        "numel": block.numel,
        "sizes": (tile, tl.constexpr(block.numel)),
    }


def block(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    """Make a block type of what others of its shape have."""
    shape = getattr(shape, "values", shape)
    shape = [
        n if type(n) is int else tl.core._unwrap_if_constexpr(n) for n in shape
    ]
    vars(self).update(sizes(*shape))
    self.element_ty = element_ty
    self.name = f"<{shape}, {element_ty}>"


def tile(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """Make a tile, or a scalar, of what others of its shape have."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = type.sizes if type.is_block() else SCALAR


def broadcast(semantic: Any, lhs: tl.tensor, rhs: tl.tensor) -> Any:
    """The two in one shape: themselves, if they have the same one."""
    if lhs.shape is rhs.shape:
        return lhs, rhs
    return own_broadcast(lhs, rhs)


def cast(semantic: Any, x: tl.tensor, to: tl.dtype, *rounding: Any) -> Any:
    """The tile in another dtype: itself, if that is its own."""
    return x if x.dtype is to.scalar else own_cast(x, to, *rounding)


def patch_attr(
    obj: Any, name: str, member: Any, builder: Any, scope: Any
) -> None:
    """Replace a builtin by one that knows that it is inside of a kernel."""
    function = inspect.unwrap(member)

    def new_member(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, new_member)


def launch(grid: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:
    """Run the kernel for every program of the grid."""
    _replaced.clear()
    try:
        own_launch(grid, *args, **kwargs)
    finally:
        _replaced.clear()


def _combined(
    operation: interpreter.ReduceScanOpInterface,
    tiles: tuple[tl.tensor, ...],
    axis: int,
) -> Iterator[list[np.ndarray]]:
    """The first slice of each tile, of the first two, and so on."""
    dtypes = [tile.dtype for tile in tiles]
    data = [np.moveaxis(tile.handle.data, axis, 0) for tile in tiles]
    total: list[np.ndarray] = []
    for slices in zip(*data, strict=True):
        if not total:
            total = [np.asarray(x) for x in slices]
        else:
            both = [
                operation.to_tensor(np.asarray(x), dtype)
                for x, dtype in zip(
                    [*total, *slices], [*dtypes, *dtypes], strict=True
                )
            ]
            found = operation.combine_fn.fn(*both)
            found = found if isinstance(found, tuple) else (found,)
            total = [
                x.handle.data.astype(y.dtype).reshape(y.shape)
                for x, y in zip(found, total, strict=True)
            ]
        yield total


def reduce(
    operation: interpreter.ReduceOps, tiles: tuple[tl.tensor, ...]
) -> list[tl.tensor]:
    """Reduce along the operation's axis."""
    *_, total = _combined(operation, tiles, operation.axis)
    if operation.keep_dims:
        total = [np.expand_dims(x, operation.axis) for x in total]
    return [
        operation.to_tensor(x, tile.dtype)
        for x, tile in zip(total, tiles, strict=True)
    ]


def scan(
    operation: interpreter.ScanOps, tiles: tuple[tl.tensor, ...]
) -> list[tl.tensor]:
    """Scan along the operation's axis, forwards."""
    each = [*_combined(operation, tiles, operation.axis)]
    return [
        operation.to_tensor(np.stack(slices, operation.axis), tile.dtype)
        for slices, tile in zip(zip(*each, strict=True), tiles, strict=True)
    ]


def unasserted() -> interpreter.InterpreterOptions:
    """The options, without the sums whose overflow would not be asserted."""
    options = interpreter.interpreter_builder.options
    return dataclasses.replace(options, sanitize_overflow=options.debug)


# Whose attribute each takes the place of.
FASTER: list[tuple[Any, str, Any]] = [
    (interpreter, "_get_np_dtype", np_dtype),
    (interpreter, "_patch_lang", patch_lang),
    (interpreter, "_patch_attr", patch_attr),
    (interpreter.GridExecutor, "__call__", launch),
    (tl.block_type, "__init__", block),
    (tl.tensor, "__init__", tile),
    (type(interpreter_semantic), "cast", cast),
    (type(interpreter_semantic), "broadcast_impl_value", broadcast),
    (interpreter.ReduceOps, "generic_reduce", reduce),
    (interpreter.ScanOps, "generic_scan", scan),
    (interpreter.interpreter_builder, "options", unasserted()),
]
OWN = [(owner, name, getattr(owner, name)) for owner, name, _ in FASTER]


def speed_up_interpreter() -> None:
    """Put what is here in the place of Triton's own."""
    for owner, name, faster in FASTER:
        setattr(owner, name, faster)
