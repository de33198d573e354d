"""Show the library's own source in a chapter: nothing is retyped."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastweights.specialise import WIDTH, source, specialise

__all__ = ["notebook", "show", "source"]

_ROOT = Path(__file__).parent


def show(
    *objects: Callable[..., Any] | type,
    given: Mapping[str, Any] | None = None,
    docstring: bool | str = True,
    checks: bool = True,
) -> None:
    """Display the source of each object under the name of its file.

    In a notebook the text is highlighted Python; without IPython it is
    printed. ``given``, ``docstring`` and ``checks`` leave lines out, as
    :func:`fastweights.specialise.specialise` says: ``given={"g": None}``
    shows a function as it is without gates.
    """
    if not objects:
        raise TypeError("show: got no objects, need at least one")
    texts = specialise(
        *objects, given=given, docstring=docstring, checks=checks
    )
    about = _about(given or {})
    text = ""
    previous = None
    for obj, listing in zip(objects, texts, strict=True):
        raw = getattr(obj, "fn", obj)
        path = Path(inspect.getsourcefile(raw) or "")
        where = path.relative_to(_ROOT).as_posix()
        if where != previous:
            title = f"# fastweights/{where}"
            if about:
                wide = len(title) + len(about) + 2 > WIDTH
                title += f"\n# {about}" if wide else f", {about}"
            text += title + "\n\n"
            previous = where
        text += listing + "\n\n\n"
    text = text.rstrip()
    if notebook() is None:
        print(text)
        return
    from IPython.display import Markdown, display

    display(Markdown(f"```python\n{text}\n```"))


def _about(given: Mapping[str, Any]) -> str:
    """What the listing holds for: "for g = beta = None"."""
    names: dict[str, list[str]] = {}
    for name, value in given.items():
        names.setdefault(repr(value), []).append(name)
    said = [" = ".join([*same, value]) for value, same in names.items()]
    return f"for {' and '.join(said)}" if said else ""


def notebook() -> Any:
    """IPython's shell, or None: a program without one has not imported it."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()
