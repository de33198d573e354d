"""The shapes that annotations promise, checked in each call of the tests.

Once a function has returned, its arguments and its result have to be of the
shapes and dtypes of its signature, an axis of one name having one size. A
call that the function refuses is its own matter, a compiler sees the function
as it is, and shapes that were right are not looked at again.
"""

import builtins
import functools
import inspect
import re
import sys
from collections import defaultdict
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import FunctionType
from typing import Any, get_type_hints

import torch
from beartype.door import is_bearable
from jaxtyping import AnnotationError, jaxtyped

PROMISED = {}
RIGHT = set()


def check():
    """Check every module of ours that is imported from now on."""
    run = SourceFileLoader.exec_module

    def exec_module(loader, module):
        run(loader, module)
        if module.__name__.startswith("fastweights"):
            wrap(module, module.__name__)
            keep_sources()

    SourceFileLoader.exec_module = exec_module


def wrap(owner, module):
    """Check the functions of a module, and those of its classes."""
    for name, value in list(vars(owner).items()):
        if getattr(value, "__module__", None) == module:
            if isinstance(value, type):
                wrap(value, module)
            # Not a dataclass's __init__: in a call a pool's LayerState has
            # fields of the call's rows beside those of the pool's.
            elif isinstance(value, FunctionType) and (
                value.__code__.co_filename != "<string>"
            ):
                setattr(owner, name, checked(value))


def keep_sources():
    """Modules are still untouched where a class's forward is checked now."""
    plain = sys.modules.get("fastweights.layers.common.plain_modules")
    forwards = getattr(plain, "SOURCE_FORWARDS", {})
    for kind, forward in forwards.items():
        if inspect.unwrap(kind.forward) is forward:
            forwards[kind] = kind.forward


def checked(function):
    """The function, raising where a shape is not as its signature says."""
    # A name that only type checkers import is any type.
    names = vars(builtins) | inspect.unwrap(function).__globals__
    hints = get_type_hints(function, None, defaultdict(lambda: Any, names))
    shapes = [x for x in hints.items() if "jaxtyping." in repr(x[1])]
    # An axis N+1 comes after those that say what N is.
    shapes.sort(key=lambda x: bool(re.search(r"\w[-+]", repr(x[1]))))
    PROMISED[function] = shapes  # not a cell, which compilers would look into

    @functools.wraps(function)
    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        if not torch.compiler.is_compiling():
            look(function, result, args, kwargs)
        return result

    return call if shapes else function


def look(function, result, args, kwargs):
    """Raise unless a call's shapes are the promised ones, or were before."""
    key = function, *kwargs, sizes((result, *args, *kwargs.values()))
    try:
        if key in RIGHT:
            return
    except TypeError:  # a trace's sizes, which may be any
        return
    values = inspect.signature(function).bind(*args, **kwargs).arguments
    values["return"] = result
    with jaxtyped("context"):
        for name, hint in PROMISED[function]:
            # Unless nothing says what the N of an axis N+1 is.
            with suppress(AnnotationError):
                assert name not in values or is_bearable(values[name], hint), (
                    f"{function.__module__}.{function.__qualname__}: {name} "
                    f"is {sizes(values[name])}, not {hint}"
                )
    RIGHT.add(key)


def sizes(value):
    """A value's dtype and shape, its parts', or its type."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    if isinstance(value, tuple | list):
        return tuple(map(sizes, value))
    return type(value)
