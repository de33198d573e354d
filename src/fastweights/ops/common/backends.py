"""Which backend computes, and the record of those that did.

Device, dtype and versions decide what "auto" means. Where a GPU does not get
the kernels, a warning says why.
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
from fastweights.arguments import MAX_KERNEL_K

Backend = Literal["auto", "triton", "torch", "loop"]
BACKENDS = get_args(Backend)
KernelOrTorch = Literal["auto", "triton", "torch"]
"""Backends of what has no loop in PyTorch."""
KERNEL_OR_TORCH = get_args(KernelOrTorch)
DEEP_KERNEL_CAPABILITIES = (9, 10)
"""Major compute capabilities whose registers suffice for deep memories."""


@torch_internals.constant_in_graphs
def resolve_backend(
    backend: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> str:
    """The backend that runs when ``backend`` is asked for.

    "auto" is "triton" where its kernels run on tensors of this device and
    dtype, else "torch", which says why if the GPU is the reason. For a
    recurrence whose keys have more than 256 channels "auto" is "torch".

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
    if backend not in ("auto", "triton"):
        check_backend(backend)
        return backend
    if backend == "auto" and (device.type != "cuda" or dtype == torch.float64):
        return "torch"
    return _triton_unless(_missing_for_triton(device, dtype), backend)


def recurrence_backend(backend: str, q: Tensor) -> str:
    """The backend that runs on q [.., K]: kernels have K <= MAX_KERNEL_K."""
    chosen, K = resolve_backend(backend, q.device, q.dtype), q.shape[-1]
    if chosen != "triton" or K <= MAX_KERNEL_K:
        return chosen
    return _triton_unless(f"K <= {MAX_KERNEL_K}, not {K}", backend)


@torch_internals.constant_in_graphs
def deep_backend(
    backend: str, device: torch.device, dtype: torch.dtype, missing: str = ""
) -> str:
    """The backend that runs for a memory that is a network.

    ``missing`` is what its kernel needs and these tokens do not have, "" if
    nothing. "auto" is "triton" where that is faster: in half precision on
    Hopper and on Blackwell's data centre GPU. On others, and in fp32, it
    would keep kilobytes per thread outside of the registers
    (tests/compile/test_ttt.py), or not find room for its matrices.
    """
    check_backend(backend, KERNEL_OR_TORCH)
    if missing and backend != "triton":
        return "torch"
    if missing:
        return _triton_unless(missing, backend)
    chosen = resolve_backend(backend, device, dtype)
    if chosen != "triton" or backend == "triton":
        return chosen
    major, _ = torch.cuda.get_device_capability(device)
    faster = dtype != torch.float32 and major in DEEP_KERNEL_CAPABILITIES
    return "triton" if faster else "torch"


def check_backend(backend: str, names: tuple[str, ...] = BACKENDS) -> None:
    """Raise ValueError unless the backend has one of these names."""
    if backend not in names:
        raise ValueError(f"backend: got {backend!r}, need one of {names}")


@torch_internals.constant_in_graphs
def _triton_unless(missing: str, backend: str) -> str:
    """Choose "triton" if it lacks nothing, else "torch", or raise."""
    if not missing:
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend: got 'triton', which needs {missing}")
    _warn_once(missing)
    return "torch"


@functools.cache
def _missing_for_triton(device: torch.device, dtype: torch.dtype) -> str:
    """Name what the kernels lack here; "" if they run."""
    if dtype == torch.float64:
        return "tensors in float32, float16 or bfloat16, not float64"
    if not importlib.util.find_spec("triton"):
        return "the package triton, which is not installed"
    if device.type == "cuda":
        missing = _missing_on_gpu(device)
        if not missing:
            torch_internals.warn_untested()
        return missing
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


def _missing_on_gpu(device: torch.device) -> str:
    """Name what a GPU lacks: CUDA, Ampere or later, a right Triton; or "".

    On Blackwell's 10.x (not 12.x, which has other products) Triton below 3.8
    compiles loops in which a product reads the accumulator of another to a
    race: two runs differ (triton issues 9871 and 10590).
    """
    if torch.version.hip:
        return "a CUDA build of PyTorch, not ROCm's"
    capability, name = _capability(device), torch.cuda.get_device_name(device)
    gpu = f"{name} has {capability[0]}.{capability[1]}"
    if capability < (8, 0):
        return f"a GPU of compute capability 8.0 or higher (Ampere); {gpu}"
    if capability[0] == 10:
        triton = importlib.import_module("triton")
        if torch_internals.version_of(triton) < (3, 8):
            return (
                "Triton 3.8 or newer on a GPU of compute capability 10.x, "
                f"where {triton.__version__} compiles a race; {gpu}"
            )
    return ""


def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU that this machine has."""
    try:
        return torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"device: got {device}, need one that is there; {error}"
        ) from error


@functools.cache
def _warn_once(missing: str) -> None:
    """Say once why a GPU does not get the kernels."""
    warnings.warn(
        f"fastweights runs as PyTorch here: its kernels need {missing}",
        stacklevel=2,
    )


def max_head_size(q: Tensor, K: int) -> int:
    """The most channels of a head in a kernel: K, in fp32 half of it."""
    return K // 2 if q.dtype == torch.float32 else K


_records: dict[int, list[str]] = {}
"""The open records, by their id."""


@contextmanager
def record_backends() -> Iterator[list[str]]:
    """A list of what runs while it is open.

        with record_backends() as ran:
            o, state = fw.mamba2(q, k, v, g)
        print(ran)                              # ["torch forward"], say

    Yields:
        backend and pass of each operator, such as "torch backward", of all
        threads: a backward on a GPU is in one of PyTorch's own. Passes are
        forward and backward, decode (:func:`fastweights.decode_step`),
        fused_step (a layer's, of a few tokens) and solve (MesaNet's); "graph
        step" is a model's, as a CUDA graph. Where GatedDeltaNet, say, has no
        fused_step, hooks, adapters or autocast are in its way.
    """
    ran: list[str] = []
    _records[id(ran)] = ran
    try:
        yield ran
    finally:
        del _records[id(ran)]


def record_run(what: str) -> None:
    """Tell the open records what runs."""
    for ran in [*_records.values()]:
        ran.append(what)
