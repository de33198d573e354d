"""Which backend computes, and the record of those that did.

"auto" is settled here, by device, dtype and versions; so is what is said where
a GPU does not get the kernels.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from fastweights import torch_internals
from fastweights.arguments import MAX_K

Backend = Literal["auto", "triton", "torch", "loop"]
BACKENDS = get_args(Backend)
KernelOrTorch = Literal["auto", "triton", "torch"]
"""Backends of what is no loop in PyTorch."""
KERNEL_OR_TORCH = get_args(KernelOrTorch)
NETWORK_GPUS = (9, 10)
"""Major compute capabilities whose registers suffice for networks' kernels."""


def choose_backend(
    backend: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> str:
    """The backend that runs when ``backend`` is asked for.

    "auto" is "triton" where its kernels run on tensors of this device and
    dtype, else "torch", which says why if the GPU is the reason.

    Args:
        backend: "auto", "triton", "torch" or "loop".
        device, dtype: of q, k and v.

    Returns:
        "triton", "torch" or "loop".

    Raises:
        ValueError: there is no such backend or GPU, or "triton" cannot run
            there.
    """
    device = torch.device(device)
    if backend == "auto" and device.type != "cuda":
        return "torch"
    if backend in ("auto", "triton"):
        refuse_fp64(backend, dtype, "q, k and v")
        if dtype == torch.float64:
            return "torch"
        lack = _lack_of_triton(device, dtype)
        if not lack:
            return "triton"
        if backend == "triton":
            raise ValueError(f"backend: got 'triton', which needs {lack}")
        _explain(lack)
        return "torch"
    check_backend(backend)
    return backend


def backend_for(asked: str, q: Tensor) -> str:
    """The backend that runs on q [.., K], of at most MAX_K in the kernels."""
    backend, K = choose_backend(asked, q.device, q.dtype), q.shape[-1]
    if backend != "triton" or K <= MAX_K:
        return backend
    lack = f"K <= {MAX_K}, not {K}"
    if asked == "triton":
        raise ValueError(f"backend: got 'triton', which needs {lack}")
    _explain(lack)
    return "torch"


@torch_internals.constant_in_graphs
def recurrence_kernels_run(
    asked: str, device: torch.device, dtype: torch.dtype, K: int
) -> bool:
    """Whether the recurrence's kernels do, where this backend is asked for."""
    return (
        asked != "loop"
        and K <= MAX_K
        and (choose_backend(asked, device, dtype) == "triton")
    )


def check_backend(backend: str, names: tuple[str, ...] = BACKENDS) -> None:
    """Raise ValueError unless the backend has one of these names."""
    if backend not in names:
        raise ValueError(f"backend: got {backend!r}, need one of {names}")


def refuse_fp64(backend: str, dtype: torch.dtype, tensors: str) -> None:
    """Raise ValueError if Triton is to compute with these tensors in fp64."""
    if backend == "triton" and dtype == torch.float64:
        raise ValueError(
            f"backend: got 'triton', which needs {tensors} in float32, "
            "float16 or bfloat16, not float64"
        )


@functools.cache
def _lack_of_triton(device: torch.device, dtype: torch.dtype) -> str:
    """What the kernels need and do not have here; "" if they run."""
    if not importlib.util.find_spec("triton"):
        return "the package triton, which is not installed"
    if device.type == "cuda":
        lack = _lack_of_gpu(device)
        if not lack:
            torch_internals.warn_untested()
        return lack
    from fastweights.kernels.tile import INTERPRETED

    if not INTERPRETED:
        return (
            f"tensors on a CUDA device, not {device.type}, or Triton's "
            "interpreter (TRITON_INTERPRET=1 before Triton's first import)"
        )
    if dtype == torch.bfloat16:
        return (
            "float32 or float16 in Triton's interpreter, which multiplies "
            "the bit patterns of bfloat16"
        )
    return ""


def _lack_of_gpu(device: torch.device) -> str:
    """What a GPU lacks: CUDA, of Ampere or later, with this Triton; or "".

    On Blackwell's 10.x (not 12.x, which has other products) Triton below 3.8
    compiles loops in which a product reads the accumulator of another to a
    race: two runs differ (triton issues 9871 and 10590).
    """
    if torch.version.hip:
        return "a CUDA build of PyTorch, not ROCm's"
    found, name = _capability(device), torch.cuda.get_device_name(device)
    has = f"{name} has {found[0]}.{found[1]}"
    if found < (8, 0):
        return f"a GPU of compute capability 8.0 or higher (Ampere); {has}"
    if found[0] == 10:
        triton = importlib.import_module("triton")
        if torch_internals.version_of(triton) < (3, 8):
            return (
                "Triton 3.8 or newer on a GPU of compute capability 10.x, "
                f"where {triton.__version__} compiles a race; {has}"
            )
    return ""


def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU that is there."""
    try:
        return torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"device: got {device}, need one that is there; {error}"
        ) from error


@functools.cache
def _explain(lack: str) -> None:
    """Say once why a GPU does not get the kernels."""
    warnings.warn(
        f"fastweights runs as PyTorch here: its kernels need {lack}",
        stacklevel=2,
    )


@torch_internals.constant_in_graphs
def kernel_or_torch_runs(
    asked: str, device: torch.device, dtype: torch.dtype, tensors: str
) -> bool:
    """Whether Triton computes what has one form in PyTorch.

    Raises:
        ValueError: "triton" cannot run there, or not in the dtype of the
            ``tensors`` of this name.
    """
    refuse_fp64(asked, dtype, tensors)
    return choose_backend(asked, device, dtype) == "triton"


@torch_internals.constant_in_graphs
def network_kernel_runs(
    backend: str, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether networks' kernels run there; for "auto", whether it is worth it.

    It is in half precision on Hopper and on Blackwell's data centre GPU. On
    others, and in fp32, it would keep kilobytes per thread outside of the
    registers (tests/compile/test_ttt.py), or not find room for its matrices.
    """
    if choose_backend(backend, device, dtype) != "triton":
        return False
    if backend == "triton":
        return True
    major, _ = torch.cuda.get_device_capability(device)
    return dtype != torch.float32 and major in NETWORK_GPUS


def network_by_kernel(backend: str, q: Tensor, fits: bool, need: str) -> bool:
    """Whether a network's kernel that ``fits`` these tokens computes them.

    Raises:
        ValueError: backend is none, or "triton" where the kernel cannot run;
            ``need`` says what it needs.
    """
    check_backend(backend, KERNEL_OR_TORCH)
    if backend == "triton" and not fits:
        raise ValueError(f"backend: got 'triton', which needs {need}")
    return fits and network_kernel_runs(backend, q.device, q.dtype)


def widest_head(q: Tensor, K: int) -> int:
    """The widest head of a kernel that takes K channels, and in fp32 half."""
    return K // 2 if q.dtype == torch.float32 else K


_records: list[list[str]] = []


@contextmanager
def record_backends() -> Iterator[list[str]]:
    """A list of what runs while it is open.

        with record_backends() as ran:
            o, state = fw.mamba2(q, k, v, g)
        print(ran)                              # ["torch forward"], say

    Yields:
        backend and pass of each operator, such as "torch backward".
    """
    _records.append([])
    try:
        yield _records[-1]
    finally:
        _records.pop()


def record_run(what: str) -> None:
    """Tell the open records what runs."""
    for record in _records:
        record.append(what)
