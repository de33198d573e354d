"""fastweights where others are expected.

:mod:`fastweights.compat.fla` has flash-linear-attention's functions,
:mod:`fastweights.compat.mamba_ssm` and :mod:`fastweights.compat.causal_conv1d`
those of these packages, and :func:`patch_transformers` puts them all into
transformers' models, which :mod:`fastweights.compat.transformers` lists.
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

from fastweights import torch_internals
from fastweights.compat.transformers import MODELS, one_document

__all__ = ["TransformersPatch", "patch_transformers"]

KNOWN_VERSIONS = "5.23 and 5.24"  # whose internals MODELS is about

_active: TransformersPatch | None = None


class TransformersPatch:
    """The replacements that :func:`patch_transformers` made, for ``undo()``.

    replaced: of each modeling module the names that are ours now. It grows
    as transformers imports more of them. As a context manager it undoes at
    the end of the block.
    """

    def __init__(self) -> None:
        self.replaced: dict[str, tuple[str, ...]] = {}
        self._before: list[tuple[Any, str, Any]] = []

    def __repr__(self) -> str:
        names = sum(map(len, self.replaced.values()))
        return f"<{names} names in {len(self.replaced)} modules replaced>"

    def __enter__(self) -> TransformersPatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Give every module its own functions back; twice is harmless."""
        global _active
        if _active is self:
            _active = None
            sys.meta_path.remove(self)
        for owner, name, before in self._before:
            setattr(owner, name, before)
        self._recompile()
        self._before.clear()
        self.replaced.clear()

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Answer sys.meta_path: transformers' own loader, then _replace."""
        if name not in MODELS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._replace(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _install(self) -> None:
        global _active
        _active = self
        sys.meta_path.insert(0, self)
        try:
            for name in MODELS.keys() & sys.modules.keys():
                self._replace(sys.modules[name])
        except ImportError:
            self.undo()
            raise
        self._recompile()

    def _recompile(self) -> None:
        """Forget compiled models, which do not watch their classes."""
        if any(isinstance(x, type) for x, _, _ in self._before):
            torch_internals.forget_graphs()

    def _replace(self, module: ModuleType) -> None:
        """Put ours into a modeling module, whose functions are checked."""
        if _active is not self:  # undone while the module was imported
            return
        found = []
        for name, (ours, arguments) in MODELS[module.__name__].items():
            part, _, last = name.rpartition(".")  # a class's, or a function
            owner = getattr(module, part, None) if part else module
            own = getattr(owner, last, None)
            # With the package kernels installed it is a torch.nn.Module.
            call = getattr(own, "forward", own)
            names = tuple(inspect.signature(call).parameters) if call else ()
            if own is None or names[: len(arguments)] != arguments:
                raise _version_error(f"{module.__name__}.{name}{names}")
            new = ours(own) if ours is one_document else _adapted(ours, own)
            found.append((owner, last, own, new))
        for owner, last, own, new in found:
            self._before.append((owner, last, own))
            setattr(owner, last, new)
        self.replaced[module.__name__] = tuple(MODELS[module.__name__])


def _adapted(ours: Callable, theirs: Callable) -> Callable:
    """Our function, which gets the modeling file's arguments that it names.

    torch.export gets transformers' own, which has no operators of ours.
    """
    # Of transformers' own functions a chunk may have any size.
    names = frozenset(inspect.signature(ours).parameters) - {"chunk_size"}

    @functools.wraps(ours)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_exporting():
            return theirs(*arguments, **keywords)
        keywords = {name: x for name, x in keywords.items() if name in names}
        return ours(*arguments, **keywords)

    return call


def _version_error(missing: str) -> ImportError:
    version = sys.modules["transformers"].__version__
    return ImportError(
        f"fastweights.patch_transformers: got transformers {version} with "
        f"{missing}, need what transformers {KNOWN_VERSIONS} has"
    )


def patch_transformers() -> TransformersPatch:
    """Let transformers' models run on this library: one line, any time.

    These parts of models, of those that exist and those made later, become
    ours, also where the packages that they would use are installed
    (flash-linear-attention, mamba_ssm, causal_conv1d):

    * Gated DeltaNet of Qwen3-Next, Qwen3.5 (dense and mixture), Qwen4-exp,
      OLMo-Hybrid and LARA-mini; Kimi Delta Attention of Kimi Linear,
      GLM-5-next and Bailing hybrid (Ling);
    * the scan of Mamba-2, Bamba, Falcon-H1, Granite-MoE-hybrid, Nemotron-H
      and Zamba2; that of Mamba, Falcon-Mamba, Jamba and Zamba; MiniMax's
      lightning attention;
    * the short convolutions of all of these but MiniMax, and of LFM2 (dense
      and mixture), LFM3, Inkling, Inkling2 and Inkling2-loop, with any
      activation.

    Packed documents stay apart if cu_seq_lens_q or seq_idx says where they
    end (position_ids alone do not). Mamba, Mamba2ForCausalLM, Falcon-Mamba,
    Jamba, Zamba and the Inklings drop both, and refuse them from now on.
    Other attention than flash attention looks past the ends in GLM-5-next
    and Granite-MoE-hybrid, which warn. A model that was compiled is compiled
    anew. Kernels from the hub (use_kernels=True) stay unused.

    Returns:
        a handle: ``replaced`` says which names in which modules, ``undo()``
        gives them back, as the end of a ``with`` block does. While one is in
        force, another call replaces nothing, and its undo() nothing either.

    Raises:
        ImportError: transformers is not installed, or its internals are not
            those of 5.23 or 5.24; then also later, as it imports a model.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(
            "fastweights.patch_transformers: got no transformers, need it "
            "installed: pip install transformers"
        )
    try:
        hub = importlib.import_module("transformers.integrations.hub_kernels")
        hub.use_kernel_func_from_hub_with_fallback  # noqa: B018
    except (ImportError, AttributeError) as error:
        importlib.import_module("transformers")
        raise _version_error(f"this: {error}") from error
    handle = TransformersPatch()
    if _active is None:
        handle._install()
    return handle
