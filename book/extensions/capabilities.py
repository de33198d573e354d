"""Two tables of what operators and layers do, asked of the library itself.

An operator is asked by its signature, and a layer by running it on two tokens
and by making a pool of its states.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_type_hints

import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import fastweights
from fastweights import deep
from fastweights.models import LAYERS, LanguageModel, ModelConfig, StatePool

OPERATORS = ("operator", "packed by", "grouped heads", "computed by")
LAYER = (
    "layer",
    "grouped heads",
    "state",
    "S in bf16",
    "operator",
    "computed by",
)


def taken(x: Any, *names: str) -> str:
    """Those of the names that are parameters, as literals; "no" if none."""
    parameters = inspect.signature(x).parameters
    return ", ".join(f"``{n}``" for n in names if n in parameters) or "no"


def operators() -> dict[str, Any]:
    """The public operators by name: what takes an initial state."""
    return {
        f"{module.__name__}.{name}": x
        for module in (fastweights, deep)
        for name, x in inspect.getmembers(module, inspect.isroutine)
        if name in module.__all__ and taken(x, "initial_state") != "no"
    }


def computed(x: Any) -> str:
    """What computes an operator."""
    return "PyTorch" if taken(x, "backend") == "no" else "Triton, PyTorch"


def of_operators() -> Iterator[tuple[str, ...]]:
    """A row of each operator."""
    for name, x in operators().items():
        v = get_type_hints(inspect.unwrap(x)).get("v")
        yield (
            f":func:`~{name}`",
            taken(x, "cu_seqlens", "lengths"),
            "yes" if "HV" in getattr(v, "dim_str", "") else "no",
            computed(x),
        )


def of_layers() -> Iterator[tuple[str, ...]]:
    """A row of each kind of layer that a model may have."""
    sizes = {"vocab_size": 2, "dim": 16, "num_layers": 1, "num_heads": 2}
    for kind, layer in LAYERS.items():
        model = LanguageModel(ModelConfig(pattern=(kind,), **sizes))
        (this,) = (x for x in model.modules() if type(x) is layer)
        with called(operators()) as names:
            _, state = this(torch.zeros(1, 2, 16))
        fields = state.tensors()
        yield (
            f":class:`~fastweights.layers.{layer.__name__}`",
            taken(layer, "num_v_heads", "num_kv_heads", "num_groups"),
            ", ".join(fields),
            ("yes" if narrows(model) else "no") if "S" in fields else "",
            f":func:`~{names[0]}`" if names else "",
            computed(operators()[names[0]]) if names else "PyTorch",
        )


@contextmanager
def called(functions: dict[str, Any]) -> Iterator[list[str]]:
    """The names of those functions that are called, in the block."""
    codes = {inspect.unwrap(x).__code__: name for name, x in functions.items()}
    names: list[str] = []

    def see(frame: Any, event: str, _: Any) -> None:
        name = codes.get(frame.f_code) if event == "call" else None
        if name and name not in names:
            names.append(name)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        yield names
    finally:
        sys.setprofile(before)


def narrows(model: LanguageModel) -> bool:
    """Whether a pool of the model's states may have S in bf16."""
    try:
        StatePool(model, 1, 1, state_dtype=torch.bfloat16)
    except ValueError:
        return False
    return True


class Capabilities(SphinxDirective):
    """A table of what there is: of ``operators`` or of ``layers``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        if self.env.app.builder.format != "html":
            return []
        self.env.note_reread()  # the library is no dependency of a page
        head, rows = {
            "operators": (OPERATORS, of_operators),
            "layers": (LAYER, of_layers),
        }[self.arguments[0]]
        lines = [".. list-table::", "   :header-rows: 1", ""]
        for row in (head, *rows()):
            lines += [f"   * - {row[0]}", *(f"     - {x}" for x in row[1:])]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("capabilities", Capabilities)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
