"""The operators as a local kernel repository, for the package ``kernels``.

    python -m fastweights.compat.hub FOLDER

writes a folder whose layers have the names by which transformers asks for
flash-linear-attention's and causal_conv1d's functions::

    from kernels import LocalLayerRepository, kernelize, use_kernel_mapping

    name = "chunk_gated_delta_rule"
    layer = LocalLayerRepository(Path(folder), layer_name=name)
    with use_kernel_mapping({name: {"cuda": layer}}):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)

They compute with the fastweights that is installed: such a folder can be
used, not published, since a kernel on the hub has to bring all its code.

Tried with kernels 0.17.2. transformers 5.23 itself wants 0.18.2 or newer,
which was not to be had. :func:`fastweights.accelerate` does without that
package, for all the operators of a model at once.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from fastweights.compat import fla
from fastweights.compat.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_update,
)

BACKENDS = ("cpu", "cuda")
CODE = '''"""fastweights' operators, those of the package that is installed."""

from fastweights.compat.hub import layers
'''

# What transformers calls the arguments, in its order; ours where they differ.
OURS = {"query": "q", "key": "k", "value": "v", "hidden_states": "x"}
STATE = "initial_state output_final_state use_qk_l2norm_in_kernel **others"
CHUNKED = f"query key value g beta chunk_size {STATE}"
RECURRENT = f"query key value g beta {STATE}"
FUNCTIONS: dict[Callable, str] = {
    fla.chunk_gated_delta_rule: CHUNKED,
    fla.fused_recurrent_gated_delta_rule: RECURRENT,
    fla.chunk_kda: CHUNKED,
    fla.fused_recurrent_kda: RECURRENT,
    causal_conv1d_fn: "hidden_states weight bias activation **others",
    causal_conv1d_update: "hidden_states conv_state weight bias activation",
}


def _layer(function: Callable, names: str) -> type[nn.Module]:
    """A layer whose forward is this function, given what it knows by name.

    ``kernels`` compares the forward's parameters with those of the function
    that it stands for, and refuses a layer with members of its own.
    """
    order = names.split()
    known = frozenset(inspect.signature(function).parameters)

    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        named = {**dict(zip(order, given, strict=False)), **named}
        named = {OURS.get(name, name): x for name, x in named.items()}
        return function(**{k: x for k, x in named.items() if k in known})

    usual, others = Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_KEYWORD
    parameters = [
        Parameter(name.lstrip("*"), others if "*" in name else usual)
        for name in ("self", *order)
    ]
    forward.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    members = {"can_torch_compile": True, "has_backward": True}
    return type(
        function.__name__, (nn.Module,), {"forward": forward, **members}
    )


layers = SimpleNamespace(
    **{f.__name__: _layer(f, names) for f, names in FUNCTIONS.items()}
)


def write(folder: Path) -> None:
    """The repository: a variant per backend, with its code and metadata."""
    release = version("fastweights")
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        variant.mkdir(parents=True, exist_ok=True)
        (variant / "__init__.py").write_text(CODE, "utf-8")
        metadata = {
            "id": re.sub(r"\W", "_", f"fastweights_{backend}_{release}"),
            "name": "fastweights",
            "version": 1,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": backend},
        }
        text = json.dumps(metadata, indent=1) + "\n"
        (variant / "metadata.json").write_text(text, "utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fastweights.compat.hub",
        description="Write a local kernel repository for the package kernels.",
    )
    parser.add_argument("folder", type=Path, help="where; made if missing")
    folder = parser.parse_args(arguments).folder
    if folder.exists() and not folder.is_dir():
        parser.error(f"FOLDER: got the file {folder}, need a folder")
    write(folder)
    print(f"{folder}: {', '.join(sorted(vars(layers)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
