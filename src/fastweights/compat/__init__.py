"""fastweights where others are expected.

:mod:`fastweights.compat.fla` has flash-linear-attention's functions,
:mod:`fastweights.compat.causal_conv1d` that package's, and
:func:`accelerate` puts both into transformers' models;
:mod:`fastweights.compat.hub` hands them to the package ``kernels``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from fastweights.compat import fla
from fastweights.compat.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_update,
)

Table = dict[str, tuple[Callable, tuple[str, ...]]]

# What transformers' modeling files call a function, ours, and the arguments
# that they pass it without a name.
QKV = ("query", "key", "value", "g", "beta")
GATED_DELTANET: Table = {
    "torch_chunk_gated_delta_rule": (fla.chunk_gated_delta_rule, QKV),
    "torch_recurrent_gated_delta_rule": (
        fla.fused_recurrent_gated_delta_rule,
        QKV,
    ),
}
KDA: Table = {
    "chunk_kimi_delta_attention": (fla.chunk_kda, QKV),
    "recurrent_kimi_delta_attention": (fla.fused_recurrent_kda, QKV),
}
CONVOLUTION: Table = {
    "causal_conv1d_fn": (
        causal_conv1d_fn,
        ("hidden_states", "weight", "bias"),
    ),
    "causal_conv1d_update": (
        causal_conv1d_update,
        ("hidden_states", "conv_state", "weight", "bias", "activation"),
    ),
}
MODELS = {
    f"transformers.models.{model}.modeling_{model}": table | CONVOLUTION
    for table, models in (
        (GATED_DELTANET, "olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next"),
        (GATED_DELTANET, "qwen4_exp"),
        (KDA, "bailing_hybrid glm5_next kimi_linear"),
    )
    for model in models.split()
}
KNOWN = "5.23"  # the transformers whose internals these are

_active: Acceleration | None = None


class Acceleration:
    """What :func:`accelerate` has replaced, until ``undo()``.

    replaced: of each modeling module the names that are ours now. It grows
    as transformers imports more of them. As a context manager it undoes at
    the end of the block.
    """

    def __init__(self) -> None:
        self.replaced: dict[str, tuple[str, ...]] = {}
        self._before: list[tuple[ModuleType, dict[str, Any]]] = []
        self._finder = _Finder(self._replace)

    def __repr__(self) -> str:
        names = sum(map(len, self.replaced.values()))
        return f"<{names} names in {len(self.replaced)} modules replaced>"

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Give every module its own functions back; twice is harmless."""
        global _active
        if _active is self:
            _active = None
            sys.meta_path.remove(self._finder)
        for module, before in self._before:
            vars(module).update(before)
        self._before.clear()
        self.replaced.clear()

    def _install(self) -> None:
        global _active
        _active = self
        sys.meta_path.insert(0, self._finder)
        try:
            for name in MODELS.keys() & sys.modules.keys():
                self._replace(sys.modules[name])
        except ImportError:
            self.undo()
            raise

    def _replace(self, module: ModuleType) -> None:
        """Put ours into a modeling module, whose functions are checked."""
        if _active is not self:  # undone while the module was imported
            return
        table = MODELS[module.__name__]
        before: dict[str, Any] = {}
        for name, (_, arguments) in table.items():
            own = before[name] = getattr(module, name, None)
            # With the package kernels installed it is a torch.nn.Module.
            call = getattr(own, "forward", own)
            names = tuple(inspect.signature(call).parameters) if call else ()
            if names[: len(arguments)] != arguments:
                raise _unknown(f"{module.__name__}.{name}{names}")
        self._before.append((module, before))
        for name, (function, _) in table.items():
            setattr(module, name, _served(function, before[name]))
        self.replaced[module.__name__] = tuple(table)


class _Finder:
    """Sees transformers' modeling modules imported, and calls back then."""

    def __init__(self, after: Callable[[ModuleType], None]) -> None:
        self.after = after

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MODELS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.after(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _served(ours: Callable, own: Callable) -> Callable:
    """Ours, given those of a modeling file's arguments that it names.

    torch.export gets transformers' own, which has no operators of ours.
    """
    names = frozenset(inspect.signature(ours).parameters)

    @functools.wraps(ours)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_exporting():
            return own(*arguments, **keywords)
        keywords = {name: x for name, x in keywords.items() if name in names}
        return ours(*arguments, **keywords)

    return call


def _unknown(lack: str) -> ImportError:
    version = sys.modules["transformers"].__version__
    return ImportError(
        f"fastweights.accelerate: got transformers {version} with {lack}, "
        f"need what transformers {KNOWN} has"
    )


def accelerate() -> Acceleration:
    """Let transformers' models run on this library: one line, any time.

    Gated DeltaNet, Kimi Delta Attention and the short convolution before
    them become ours in Qwen3-Next, Qwen3.5 (dense and mixture), Qwen4-exp,
    OLMo-Hybrid, Kimi Linear, GLM-5-next and Bailing hybrid (Ling), for
    models that exist and for those made later, in place of
    flash-linear-attention and causal_conv1d too where these are installed.

    The offsets cu_seq_lens_q of packed documents reach all of them, where
    position_ids alone do not say that a document ends; GLM-5-next's own
    sparse attention looks past the ends all the same. A model that was
    compiled is compiled anew. Kernels from the hub (use_kernels=True) stay
    unused. Mamba-2 models keep theirs.

    Returns:
        a handle: ``replaced`` says which names in which modules, ``undo()``
        gives them back, as the end of a ``with`` block does. While one is in
        force, another call replaces nothing, and its undo() nothing either.

    Raises:
        ImportError: transformers is not installed, or its internals are not
            those of 5.23; then also later, as it imports a model.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(
            "fastweights.accelerate: got no transformers, need it "
            "installed: pip install transformers"
        )
    try:
        hub = importlib.import_module("transformers.integrations.hub_kernels")
        hub.use_kernel_func_from_hub_with_fallback  # noqa: B018
    except (ImportError, AttributeError) as error:
        importlib.import_module("transformers")
        raise _unknown(f"this: {error}") from error
    handle = Acceleration()
    if _active is None:
        handle._install()
    return handle
