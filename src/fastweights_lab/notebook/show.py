"""Show the library's own source in a chapter: nothing is retyped."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastweights.checks import notebook

__all__ = ["show", "source"]

_SOURCES = Path(__file__).parents[2]


def show(*objects: Callable[..., Any] | type) -> None:
    """Display the source of each object under the name of its file.

    In a notebook the text is highlighted Python; without IPython it is
    printed.
    """
    if not objects:
        raise TypeError("show: got no objects, need at least one")
    text = ""
    previous = None
    for obj in objects:
        path = Path(inspect.getsourcefile(_raw(obj)) or "")
        where = path.relative_to(_SOURCES).as_posix()
        if where != previous:
            text += f"# {where}\n\n"
            previous = where
        text += source(obj) + "\n\n\n"
    text = text.rstrip()
    if notebook() is None:
        print(text)
        return
    from IPython.display import Markdown, display

    display(Markdown(f"```python\n{text}\n```"))


def source(obj: Any) -> str:
    """The source text of a function, class or Triton kernel, dedented."""
    return textwrap.dedent(inspect.getsource(_raw(obj))).rstrip()


def _raw(obj: Any) -> Any:
    """The function that ``triton.jit`` or a decorator wraps, or obj."""
    return inspect.unwrap(getattr(obj, "fn", obj))
