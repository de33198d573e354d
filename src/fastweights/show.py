"""Show the library's own source in a chapter: nothing is retyped."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent


def source(obj: Callable[..., Any] | type) -> str:
    """The source text of a function, class or Triton kernel, dedented."""
    raw = getattr(obj, "fn", obj)  # a triton.jit function wraps its own
    return textwrap.dedent(inspect.getsource(raw)).rstrip()


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
        raw = getattr(obj, "fn", obj)
        path = Path(inspect.getsourcefile(raw) or "")
        where = path.relative_to(_ROOT).as_posix()
        if where != previous:
            text += f"# fastweights/{where}\n\n"
            previous = where
        text += source(obj) + "\n\n\n"
    text = text.rstrip()
    if notebook() is None:
        print(text)
        return
    from IPython.display import Markdown, display

    display(Markdown(f"```python\n{text}\n```"))


def notebook() -> Any:
    """IPython's shell, or None: a program without one has not imported it."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()
