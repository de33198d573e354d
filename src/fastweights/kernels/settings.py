"""Launch settings: tile sizes, warps, stages, and into how many segments.

A rule, :func:`launch_options`, and before it a table by GPU and launch:
``data/launch.json``, which ships, and :func:`tuned_table`, which
``python -m fastweights.bench tune --write`` measures and writes.
"""

from __future__ import annotations

import functools
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

import fastweights as fw
from fastweights.kernels import dot_precision
from fastweights.kernels.tile import narrowest

IntLike = Any  # int, or SymInt where shapes are symbols
MARKS = 16  # entries of far that one program of a far kernel looks at
SEGMENT_CHUNKS = 8  # of a segment, at least: below, its map does not pay
LARGE = 200_000  # bytes of shared memory a program may have, from Hopper on


class GPU(NamedTuple):
    """What launch settings depend on."""

    shared: int  # bytes of shared memory that one program may have
    multiprocessors: int
    capability: tuple[int, int]


def launch_options(
    stage: str,
    K: int,
    V: int,
    dtype: torch.dtype,
    *,
    gate: int,
    delta: bool,
    shared: int,
    chunk_size: int,
    capability: tuple[int, int],
) -> dict[str, int]:
    """Tile sizes and launch settings of a stage, by rule.

    ``gate`` is the gate's width, 0, 1 or K. Measured on an H200 with
    K = V = 128 in bf16. There, with chunks of 64, no row of a tile is shorter
    than 128 bytes (``tile.narrowest``) but of those that compose_kernel turns
    to columns, for its products. A GPU that has less ``shared`` memory
    for one program, in bytes, keeps the operands of its products in
    registers: smaller tiles, more warps.

    On capability 10.x nothing is loaded ahead. There Triton may start a
    product before the one of the last iteration is done that it adds to, or
    whose sum it reads, as the scans do: two products into one sum (triton
    issue 10821), a sum that decays and is read (triton PR 10993), and below
    3.8 any that is read (issues 9871, 10590). All report that one stage is
    right; none of it has been run here, for want of such a GPU.
    """
    narrow = narrowest(dtype)
    large, power = shared > LARGE, triton.next_power_of_2(K)
    ahead = large and dtype != torch.float32 and K <= 128
    waits = capability[0] == 10  # for each product, in its own iteration
    if stage in ("intra", "intra_far"):
        BK = (64 if gate > 1 else narrow) if large else 32
        options = {"BK": BK, "num_warps": 4, "num_stages": 1}
        if ahead and gate <= 1:
            options["BK"] = max(narrow, power)
            options["maxnreg"] = 128  # four programs a multiprocessor
        return options
    if stage.startswith("intra_backward"):
        # In shorter chunks some products would be Hopper's, of 64 rows, and
        # some not, and both read rows under 128 bytes: see TUNING.md. With
        # key tiles of 32 none is.
        ahead &= chunk_size == 64 and stage != "intra_backward_far"
        short = chunk_size < 64 or not large
        options = {
            "BK": 32 if short else 64 if gate > 1 else narrow,
            "BV": narrow,
            "num_warps": 4 if ahead else 8,
            "num_stages": 2 if ahead and not waits else 1,
        }
        if stage == "intra_backward_far" and not large:
            # Left to itself ptxas 12.9 gives up: 32 registers on 8.0.
            options["maxnreg"] = 255
        return options
    if stage.startswith("compose"):  # fp32, whatever q's dtype
        # A state's few programs go from segment to segment, one after the
        # other: the fewer values, the shorter a step. Two programs share a
        # multiprocessor.
        options = {"BJ": 64, "BK": max(64, power), "BV": 16}
        options |= {"num_warps": 8, "num_stages": 1}
        return options | ({"maxnreg": 128} if large and K <= 128 else {})
    # A scan: 128 values and 8 warps, which share what they load of k, q and
    # R. Of two programs each hides what the other waits for: that is worth
    # more where three products depend on each other and the rest is little.
    BV = scan_values(dtype, shared)
    wide = ahead and K > 64 and -V % (2 * BV) < BV  # most of a tile is there
    if stage in ("segments", "scan") and delta and gate <= 1:
        wide = False
    num_stages = 3 if wide or stage == "segments" else 2
    if stage.startswith("scan") and delta and gate > 1:
        num_stages = 2  # no room for three
    options = {
        "BK": max(narrow, power),
        "BV": 2 * BV if wide else BV,
        "num_warps": 4 if large and K <= 128 and not wide else 8,
        "num_stages": num_stages if ahead and not waits else 1,
    }
    sizes = {"shared": shared, "chunk_size": chunk_size}
    tma = uses_tma(options, K, V, dtype, **sizes)
    if stage == "segments" and delta and gate <= 1 and tma:
        options |= {"num_stages": 2, "maxnreg": 168}  # three of them
    return options


def uses_tma(
    options: dict[str, int],
    K: int,
    V: int,
    dtype: torch.dtype,
    *,
    shared: int,
    chunk_size: int,
) -> bool:
    """Whether a scan loads its tiles by the tensor memory accelerator.

    On GPUs that have one, in half precision, where loads go ahead of the
    products, and no tile has columns of the next head.
    """
    ahead = shared > LARGE and options["num_stages"] > 1
    whole = options["BK"] == K and V % options["BV"] == 0
    return ahead and whole and dtype.itemsize == 2 and chunk_size == 64


Table = dict[str, dict[str, dict[str, int]]]


def tuned_table() -> Path:
    """Where this user's own settings are kept, one file per version.

    The file that FASTWEIGHTS_LAUNCH names; else one in the user's cache
    (XDG_CACHE_HOME, ~/.cache), outside the installed package.
    """
    if told := os.environ.get("FASTWEIGHTS_LAUNCH"):
        return Path(told)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fastweights" / f"launch-{fw.__version__}.json"


def read_table(file: Path) -> Table:
    """A file of settings; nothing where there is none.

    Raises:
        ValueError: there is a file, and it is not such a table.
    """
    try:
        found = json.loads(file.read_text())
        named = [x.values() for x in found.values()]
        good = all(isinstance(x, dict) for of in named for x in of)
    except FileNotFoundError:
        return {}
    except (AttributeError, json.JSONDecodeError):
        good = False
    if not good:
        raise ValueError(
            f"{file}: got something else, need launch settings as "
            "'python -m fastweights.bench tune --write' writes them; "
            "write them again or remove the file"
        )
    return found


@functools.cache
def launch_table() -> Table:
    """What was measured: by GPU and launch_name, the settings to use."""
    resource = resources.files("fastweights") / "data" / "launch.json"
    table: Table = json.loads(resource.read_text())
    for gpu, tuned in read_table(tuned_table()).items():
        table[gpu] = table.get(gpu, {}) | tuned
    return table


def launch_name(
    stage: str,
    K: int,
    dtype: torch.dtype,
    *,
    gate: int,
    delta: bool,
    chunk_size: int,
) -> str:
    """A launch as the table calls it."""
    width = "channel" if gate > 1 else ("none", "head")[gate]
    rule = "delta" if delta else "additive"
    kind = str(dtype).removeprefix("torch.")
    return f"{stage} {kind} K={K} C={chunk_size} gate={width} {rule}"


@functools.cache
def gpu_name(device: torch.device) -> str:
    """As the table calls it; "" if it is none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def scan_values(dtype: torch.dtype, shared: int) -> int:
    """Value columns of a program of the scan, or half of them."""
    BV = narrowest(dtype)
    return BV if shared > LARGE else BV // 2


@functools.cache
def properties(device: torch.device) -> GPU:
    """Of a device that is no GPU an H200's."""
    if device.type != "cuda":
        return GPU(232_448, 132, (9, 0))
    found: Any = torch.cuda.get_device_properties(device)
    return GPU(
        found.shared_memory_per_block_optin,
        found.multi_processor_count,
        (found.major, found.minor),
    )


def num_segments(
    programs: IntLike, chunks: IntLike, device: torch.device
) -> IntLike:
    """Into how many segments a scan cuts each sequence.

    As many as let two programs of ``scan_values``, or one of twice those,
    run on every multiprocessor, where uncut there would be ``programs`` of
    them; but none of fewer than SEGMENT_CHUNKS of the ``chunks`` of a
    sequence, on average.
    """
    most = 2 * properties(device).multiprocessors // programs
    most = torch.sym_min(most, chunks // SEGMENT_CHUNKS)
    return torch.sym_max(most, 1)


@functools.cache
def maps_at_once(
    K: int,
    V: int,
    dtype: torch.dtype,
    gate: int,
    chunk_size: int,
    device: torch.device,
) -> int:
    """How many programs of the delta rule's maps, of scan_values each, run.

    Three on a multiprocessor of those whose registers are bounded; else two,
    or one of twice as many values.
    """
    gpu = properties(device)
    options = launch_options(
        "segments",
        K,
        V,
        dtype,
        gate=gate,
        delta=True,
        shared=gpu.shared,
        chunk_size=chunk_size,
        capability=gpu.capability,
    )
    return gpu.multiprocessors * (3 if "maxnreg" in options else 2)


def num_ranges(programs: IntLike, maps: IntLike, at_once: int) -> IntLike:
    """Into how many ranges the first pass of the delta rule cuts a sequence.

    As many as run ``at_once``, or one: a second round takes as long as the
    first, however few it is of. A range has ``programs`` for its values and
    ``maps`` for M, the first range next to none of these.
    """
    return torch.sym_max((at_once + maps) // (programs + maps), 1)


def constants(
    stage: str,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    gate: int,
    delta: bool,
    chunk_size: int,
    device: torch.device,
) -> dict[str, Any]:
    """Compile-time constants and launch settings of a stage's kernel."""
    if gate > 1 and not stage.startswith("intra"):
        H = HV  # intra's own q and k, a value head each
    shared, _, capability = properties(device)
    measured = launch_table().get(gpu_name(device), {})

    def options(stage: str) -> dict[str, int]:
        of: dict[str, Any] = {
            "gate": gate,
            "delta": delta,
            "chunk_size": chunk_size,
        }
        limits: dict[str, Any] = {"shared": shared, "capability": capability}
        rule = launch_options(stage, K, V, dtype, **limits, **of)
        found = measured.get(launch_name(stage, K, dtype, **of), rule)
        if stage.endswith("far"):  # what the other kernel leaves to it
            return found | {"BK": options(stage.removesuffix("_far"))["BK"]}
        return found

    if stage == "gate_backward":
        NK = triton.cdiv(K, options("intra_backward")["BK"])
        return {"HV": HV, "NK": NK, "BT": chunk_size, "num_warps": 1}
    if stage.startswith("compose"):
        found = {"HV": HV, "K": K, "V": V, "BT": chunk_size, **options(stage)}
        return {**found, "DELTA": delta, "BACK": stage.endswith("backward")}
    found = {"H": H, "HV": HV, "K": K, "BT": chunk_size}
    if stage.endswith("far"):
        found["LOOK"] = MARKS
    else:
        found["DG"] = gate
    if stage not in ("intra", "intra_far"):
        found["V"] = V
    found |= {"DELTA": delta, **options(stage)}
    if not stage.startswith("intra"):
        found["TMA"] = uses_tma(
            found, K, V, dtype, shared=shared, chunk_size=chunk_size
        )
    return {**found, "PRECISION": dot_precision(dtype, K)}
