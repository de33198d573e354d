"""NVIDIA's kernels of KDA for Hopper, from CUDA files of their own, as a peer.

The wheel of nvidia-cudnn-frontend 1.32 has both FILES, in the folder
cudnn/linear_attention/hopper/cuda_kernels. They are built here with NVRTC and
launched by themselves: the package's graphs take 150 us of a call. Besides
the files it takes cuda-bindings and the headers of CUDA 13 (the packages
nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl). K = V = 128, as
many heads of keys as of values, bf16, and gates of at least -5.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

D, LEAST = 128, -5.0  # keys and values of a head; what g is at least
CHUNK = 64  # of the backward; the forward has chunks of 16
PIECES = 264  # programs of the forward: twice the multiprocessors
FILES = ("kda_fused_sm90.cu", "kda_bwd_sm90.cu")
# Bytes of shared memory of each kernel: as the files are built, and as they
# are launched.
FUSED, PREPARE, SCAN, BACK = 94464, 220160, 198144, 230656
DEFINES = {
    FILES[0]: {
        "KDA_FUSED_SMEM_BYTES": FUSED,
        "KDA_FUSED_FLAGS": 0,
        "KDA_FUSED_GQA": 0,
    },
    FILES[1]: {
        "KDA_BWD_CHECK_CONSTANTS": 1,
        "KDA_BWD_BT": CHUNK,
        "KDA_BWD_DH": D,
        "KDA_BWD_PNT": 512,
        "KDA_BWD_BNT": 512,
        "KDA_BWD_SMEM_PREP": PREPARE,
        "KDA_BWD_SMEM_SCAN": SCAN,
        "KDA_BWD_SMEM_BWD": BACK,
    },
}
WHOLE = ("true", "false")  # whether all chunks of one sequence are whole
KERNELS = {
    FILES[0]: {"kda_fused": FUSED},
    FILES[1]: {"k_meta": 0}
    | {f"k_prep<{x}>": PREPARE for x in WHOLE}
    | {f"k_scan_t<16, 128, true, {x}>": SCAN for x in WHOLE}
    | {f"k_scan_t<32, 256, true, {x}>": SCAN for x in WHOLE}
    | {"k_scan_t<32, 256, false, false>": SCAN}
    | {f"k_bwd<{x}>": BACK for x in WHOLE},
}
Launch = Callable[..., None]


def functions(folder: Path | None) -> dict[str, Callable[..., Any]]:
    """KDA by the files in a folder; without them nothing, and a message."""
    lack = f"need --peer-path, a folder with {' and '.join(FILES)}"
    if folder is not None:
        absent = [x for x in FILES if not (folder / x).is_file()]
        if not absent:
            return {"kda": functools.partial(kda, load_kernels(folder))}
        lack = f"{folder} has no {' and no '.join(absent)}"
    print(f"nvidia is left out: {lack}", file=sys.stderr)
    return {}


@functools.cache
def load_kernels(folder: Path) -> Launch:
    """Build the files: what launches their kernels, by name."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    most = driver.CUfunction_attribute
    most = most.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    torch.zeros(1, device="cuda")  # makes a context
    kernels = {}
    for file in FILES:
        code, names = build_kernels(folder / file)
        module = value_of(driver.cuModuleLoadData(code))
        for name, shared in KERNELS[file].items():
            kernel = value_of(driver.cuModuleGetFunction(module, names[name]))
            value_of(driver.cuFuncSetAttribute(kernel, most, shared))
            kernels[name] = kernel, shared

    def launch(
        name: str, grid: tuple[int, int], threads: int, *arguments: Any
    ) -> None:
        kernel, shared = kernels[name]
        given = tuple(zip(*map(as_argument, arguments), strict=True))
        stream = torch.cuda.current_stream().cuda_stream
        size = (*grid, 1, threads, 1, 1, shared)
        value_of(driver.cuLaunchKernel(kernel, *size, stream, given, 0))

    return launch


def build_kernels(path: Path) -> tuple[bytes, dict[str, bytes]]:
    """Machine code of a file, and by which names it has the kernels."""
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    headers = find_spec("nvidia.cu13")
    places = (headers and headers.submodule_search_locations) or ()
    options = ["--gpu-architecture=sm_90a", "-std=c++17", "-default-device"]
    options += ["--use_fast_math", "-DNDEBUG"]
    for place in places:
        options += [f"-I{place}/include", f"-I{place}/include/cccl"]
    options += [f"-D{name}={x}" for name, x in DEFINES[path.name].items()]
    program = value_of(
        nvrtc.nvrtcCreateProgram(
            path.read_bytes(), path.name.encode(), 0, [], []
        )
    )
    names = {name: name.encode() for name in KERNELS[path.name]}
    templates = [name for name in names if "<" in name]
    for name in templates:
        value_of(nvrtc.nvrtcAddNameExpression(program, names[name]))
    flags = [x.encode() for x in options]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if int(error):
        log = b" " * value_of(nvrtc.nvrtcGetProgramLogSize(program))
        value_of(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{path.name}: {log.decode()}")
    for name in templates:
        names[name] = value_of(nvrtc.nvrtcGetLoweredName(program, names[name]))
    code = b" " * value_of(nvrtc.nvrtcGetCUBINSize(program))
    value_of(nvrtc.nvrtcGetCUBIN(program, code))
    return code, names


def value_of(result: Iterable[Any]) -> Any:
    """What a call of cuda.bindings gives beside the error that it raises."""
    error, *values = result
    if int(error):
        raise RuntimeError(repr(error))
    return values[0] if values else None


def as_argument(x: Any) -> tuple[Any, type]:
    """A kernel's argument as cuda.bindings takes it, with its type."""
    if x is None or isinstance(x, Tensor):
        return 0 if x is None else x.data_ptr(), ctypes.c_void_p
    types = {bool: ctypes.c_bool, int: ctypes.c_int, float: ctypes.c_float}
    return x, types[type(x)]


def kda(
    launch: Launch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor]:
    """As :func:`fastweights.kda`, all sequences of a batch end to end."""
    T = q.shape[1]
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, q.shape[0] * T + 1, T, device=q.device)
    inputs = (q, k, v, g.float(), beta.float())
    tokens = (x.contiguous().flatten(0, 1) for x in inputs)
    o, state = Recurrence.apply(launch, *tokens, cu_seqlens.int())
    return o.view(v.shape), state


class Recurrence(torch.autograd.Function):
    """Their forward, and their backward, which keeps nothing of it."""

    @staticmethod
    def forward(ctx: Any, launch: Launch, *inputs: Tensor) -> Any:
        q, offsets = inputs[0], inputs[-1]
        (T, H, _), N = q.shape, len(offsets) - 1
        first = torch.zeros(N, H, D, D, device=q.device)
        o, last = torch.empty_like(q), torch.empty_like(first)
        pieces = max(1, min(PIECES // (N * H), -(-T // (16 * N))))
        numbers = (N, H, pieces, None, None, LEAST, D**-0.5, H)
        results = (first, o, last)
        launch("kda_fused", (H, N * pieces), 128, *inputs, *results, *numbers)
        ctx.launch = launch
        ctx.save_for_backward(*inputs, first)
        return o, last

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        *inputs, offsets, first = ctx.saved_tensors
        (T, H, _), N, launch = inputs[0].shape, len(offsets) - 1, ctx.launch
        do, dlast = (x.contiguous() for x in incoming)
        grads = [torch.empty_like(x) for x in inputs]
        chunks = -(-T // CHUNK) + N - 1
        make = inputs[0].new_empty

        def rooms(number: int, *size: int, **options: Any) -> list[Tensor]:
            return [make(size, **options) for _ in range(number)]

        starts, lengths = rooms(2, chunks, dtype=torch.int32)
        first_chunk, num_chunks = rooms(2, N + 1, dtype=torch.int32)
        (decay,) = rooms(1, chunks, H, D, dtype=torch.float32)
        (scores,) = rooms(1, chunks, H, CHUNK, CHUNK)
        w, u, keys, dv, new, dnew = rooms(6, T, H, D)
        h, dh, maps = rooms(3, chunks, H, D, D)
        one = N == 1
        whole = "true" if one and T % CHUNK == 0 else "false"
        spans, of_sequences = (starts, lengths), (first_chunk, num_chunks)
        if not one:
            numbers = (offsets, N, chunks)
            launch("k_meta", (1, 1), 32, *numbers, *spans, *of_sequences)
        made = (scores, w, u, keys, maps, decay, dv)
        numbers = (T, H, one)
        launch(
            *(f"k_prep<{whole}>", (chunks, H), 512),
            *(*inputs, do, *spans, *made, *numbers),
        )
        columns, threads = (16, 128) if one and H == 8 else (32, 256)
        of = f"{columns}, {threads}, {str(one).lower()}, {whole}"
        launch(
            *(f"k_scan_t<{of}>", (256 // columns, N * H), threads),
            *(w, u, keys, maps, dv, do, decay, first, dlast),
            *(*spans, *of_sequences, h, dh, new, dnew),
            *(torch.empty_like(first), T, H),
        )
        launch(
            *(f"k_bwd<{whole}>", (chunks, H), 512),
            *(*inputs, do, scores, new, dnew, h, dh, *spans),
            *(*grads, *numbers),
        )
        return None, *grads, None
