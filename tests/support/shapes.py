"""The shapes that the library's annotations promise, checked in each call.

Once a function has returned, its arguments and its result have to be of the
shapes and dtypes of its signature, an axis of one name having one size. A
call that the function refuses is its own matter, and a compiler sees the
function as it is.
"""

import builtins
import functools
import inspect
import re
from collections import defaultdict
from importlib.machinery import SourceFileLoader
from types import FunctionType
from typing import Any, get_type_hints

import torch
from beartype.door import is_bearable
from jaxtyping import AnnotationError, jaxtyped


def checked(function):
    """The function, raising where a shape is not as its signature says."""
    # A name that only type checkers import is any type.
    names = vars(builtins) | inspect.unwrap(function).__globals__
    hints = get_type_hints(function, None, defaultdict(lambda: Any, names))
    shapes = [x for x in hints.items() if "jaxtyping." in repr(x[1])]
    if not shapes:
        return function
    # An axis N+1 comes after those that say what N is.
    shapes.sort(key=lambda x: bool(re.search(r"\w[-+*/]", repr(x[1]))))
    signature = inspect.signature(function)

    def check(result, *args, **kwargs):
        values = signature.bind(*args, **kwargs).arguments
        values["return"] = result
        with jaxtyped("context"):
            for name, hint in shapes:
                if name in values and not fits(values[name], hint):
                    raise AssertionError(
                        f"{function.__module__}.{function.__qualname__}: "
                        f"{name} is {shape(values[name])}, not {hint}"
                    )

    @functools.wraps(function)
    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        if not torch.compiler.is_compiling():
            check(result, *args, **kwargs)
        return result

    return call


def fits(value, hint):
    try:
        return is_bearable(value, hint)
    except AnnotationError:  # of an axis N+1 where nothing says what N is
        return True


def shape(value):
    """What a message says of a value."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return tuple(map(shape, value)) if isinstance(value, tuple) else value


def wrap(owner, module):
    """Check the functions of a module, and those of its classes."""
    for name, value in list(vars(owner).items()):
        if getattr(value, "__module__", None) == module:
            # Not a dataclass's __init__: in a call a pool's LayerState has
            # fields of the call's rows beside those of the pool's.
            if isinstance(value, FunctionType) and (
                value.__code__.co_filename != "<string>"
            ):
                setattr(owner, name, checked(value))
            elif isinstance(value, type):
                wrap(value, module)


def check():
    """Check every module of the library that is imported from now on."""
    run = SourceFileLoader.exec_module

    def exec_module(loader, module):
        run(loader, module)
        if module.__name__.partition(".")[0] == "fastweights":
            wrap(module, module.__name__)

    SourceFileLoader.exec_module = exec_module
