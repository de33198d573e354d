"""What comes from PyTorch and Triton undocumented, and the tested versions.

A later release may drop any of these names. Without it the library still
runs, by the slow way round that stands beside it here. Importing this module
does not import Triton.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context
from typing import Any

import torch
from torch.autograd import forward_ad

# The oldest and the newest release with which all tests are run. Triton 3.6's
# interpreter takes numpy below 2.4.
TESTED = {"torch": ((2, 11), (2, 15)), "triton": ((3, 6), (3, 9))}


def _found(module: str, name: str) -> Any:
    """The attribute of a module that has this name; None if there is none."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


_dispatch_mode: Callable | None = _found(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode"
)
_dispatch_modes: Callable | None = _found(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack"
)
_transforms_active: Callable | None = _found(
    "torch._C", "_are_functorch_transforms_active"
)
_is_tracing: Callable | None = _found("torch.jit", "is_tracing")
_profiler_enabled: Callable | None = _found(
    "torch.autograd", "_profiler_enabled"
)
_has_any_global_hook: Callable | None = _found(
    "torch.nn.modules.module", "_has_any_global_hook"
)
_foreach_zero: Callable | None = _found("torch", "_foreach_zero_")
SCAN: Callable | None = _found("torch._higher_order_ops.scan", "scan")
"""A loop that torch.compile keeps as one, with gradients; a prototype.

None before PyTorch 2.13: of 2.11 some gradients are wrong, silently, and
others an error (tests/deep/test_chunk_loop.py).
"""
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    SCAN = None
_CAN_TELL = None not in (
    _dispatch_mode,
    _transforms_active,
    _is_tracing,
    _profiler_enabled,
)


def in_torch_func() -> bool:
    """Whether a transform of torch.func is at work.

    False where PyTorch does not say: it then refuses the transform itself,
    since our autograd.Function has no rule for one.
    """
    return _transforms_active is not None and _transforms_active()


def under_transform() -> bool:
    """Whether torch.func or forward-mode autograd may be at work."""
    # The level is -1 outside of any; True where PyTorch does not tell.
    return in_torch_func() or getattr(forward_ad, "_current_level", 0) >= 0


def is_watched() -> bool:
    """Whether anything may look at the operators that are called.

    What is_traced tells, or the profiler may. True where PyTorch does not
    tell: calls then go by its dispatcher, 50 us each.
    """
    return is_traced() or _profiler_enabled()  # type: ignore[misc]


def set_to_zero(tensors: list[torch.Tensor]) -> None:
    """Fill tensors with zeros: on a GPU by a launch per dtype."""
    for dtype in {x.dtype for x in tensors}:
        alike = [x for x in tensors if x.dtype == dtype]
        if _foreach_zero is not None:
            _foreach_zero(alike)
        else:
            for x in alike:
                x.zero_()


def is_traced() -> bool:
    """Whether a tensor may be without numbers, or a call be run again.

    Under a mode (fake tensors, a FLOP counter, selective checkpointing), a
    transform, a trace or torch.compile. True where PyTorch does not tell.
    """
    return (
        torch.compiler.is_compiling()
        or not _CAN_TELL
        or _dispatch_mode() is not None  # type: ignore[misc]
        or under_transform()
        or _is_tracing()  # type: ignore[misc]
    )


def has_global_hooks() -> bool:
    """Whether a hook of all modules is there, or PyTorch does not tell."""
    return _has_any_global_hook is None or bool(_has_any_global_hook())


def load_compiler() -> None:
    """Import what PyTorch imports before the first operation under a mode.

    It looks at PyTorch's functions then, and refuses to start if two names
    that may not be one have one function.
    """
    importlib.import_module("torch._dynamo")


def dispatch_modes() -> list[Any]:
    """The modes that look at operators; none where PyTorch does not tell."""
    return [] if _dispatch_modes is None else _dispatch_modes()


def leave_graphs_whole() -> None:
    """Have torch.compile not cut a model's graph where DDP's buckets end.

    A graph that was cut does not survive activation checkpointing. Where
    PyTorch has no such setting, nothing is done.
    """
    config = _found("torch._dynamo", "config")
    if hasattr(config, "optimize_ddp"):
        config.optimize_ddp = False


def expect_at_least_one(number: Any) -> None:
    """Tell a graph that a number it does not know is 1 or more."""
    if torch.compiler.is_compiling():
        torch._check(number >= 1)


def forget_graphs() -> None:
    """Have compiled functions be compiled again, if any has been."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose answer torch.compile takes as it traces.

    What torch.compiler.assume_constant_result does, which imports a compiler
    for it; where PyTorch does not know the mark, it traces the function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _LauncherPool(ThreadPoolExecutor):
    """Threads that make, with each kernel, what launches it.

    For that Triton 3.6 runs a C compiler, a quarter of a second for each, and
    would run it only as the kernel is loaded. It keeps what is made in files.
    """

    def submit(self, compile: Callable[[], Any]) -> Any:  # type: ignore
        return super().submit(self._kernel_and_launcher, compile)

    @staticmethod
    def _kernel_and_launcher(compile: Callable[[], Any]) -> Any:
        kernel = compile()
        with suppress(Exception):
            driver = _found("triton.runtime", "driver")
            driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel


def compile_each(compile: Callable[[Any], Any], kernels: list[Any]) -> None:
    """Call ``compile``, which compiles a Triton kernel, on all of them.

    Several threads compile where Triton has a mode for that. It is entered in
    a context of its own: whatever interrupts it, the mode is gone afterwards,
    and does not meet one that the caller has entered. What cannot be compiled
    is left out.
    """
    mode = _found("triton", "AsyncCompileMode")
    if mode is None:
        return

    def together() -> None:
        with _LauncherPool() as pool, mode(pool, ignore_errors=True):
            for kernel in kernels:
                with suppress(Exception):
                    compile(kernel)

    Context().run(together)


def finished_kernel(compile: Callable[[], Any]) -> Any:
    """The kernel that ``compile`` returns, though a thread compiles it still.

    Raises what the compiler raised.
    """
    kernel = compile()
    if not hasattr(kernel, "finalize_compile"):  # it is there
        return kernel
    try:
        return kernel.result()
    except AttributeError:
        # Of Triton 3.9, which forgets an error as soon as one thread has it.
        return compile()


def shared_bytes(kernel: Any) -> int:
    """Bytes of shared memory that a program of a compiled kernel takes.

    0 where Triton does not say; it then raises OutOfResources itself.
    """
    return getattr(getattr(kernel, "metadata", None), "shared", 0)


def version_of(package: Any) -> tuple[int, int]:
    """A package's major and minor version."""
    major, minor = re.findall(r"\d+", package.__version__)[:2]
    return int(major), int(minor)


@functools.cache
def warn_untested() -> None:
    """Warn, once, of a PyTorch or a Triton outside of TESTED, by name."""
    for name, (oldest, newest) in TESTED.items():
        package = importlib.import_module(name)
        if not oldest <= version_of(package) <= newest:
            low, high = (".".join(map(str, v)) for v in (oldest, newest))
            warnings.warn(
                f"fastweights: {name} {package.__version__} is outside the "
                f"versions its kernels are tested with, {low} to {high}",
                stacklevel=2,
            )
