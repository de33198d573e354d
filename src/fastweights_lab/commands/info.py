"""What is here, and which backend operators take: ``fastweights info``.

The device and the versions; then, for every operator of ``fastweights`` and
of ``fastweights.deep`` and for every dtype, what the backend "auto" is on
this device, with the reason where it is not "triton". Heads wider than an
operator's kernel takes go by PyTorch everywhere.
"""

from __future__ import annotations

import argparse
import inspect
from collections import defaultdict
from collections.abc import Callable
from itertools import groupby

import torch

import fastweights as fw
from fastweights import deep
from fastweights.ops.common.backends import deep_backend
from fastweights_lab.records import machine
from fastweights_lab.text.training import chosen_device

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the device that is asked about."""
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, ..; cuda if it is there"
    )


def run(args: argparse.Namespace) -> None:
    """Print what is here.

    Raises:
        ValueError: there is no such device.
    """
    device = chosen_device(args.device)
    here = machine(device)
    del here["date"]
    for name, value in here.items():
        print(f"{name:11} {value or 'none'}")
    alike = defaultdict(list)
    for name, operator in operators().items():
        found = tuple(backend(operator, device, dtype) for dtype in DTYPES)
        alike[found].append(name)
    for found, names in alike.items():
        print(f"\n{', '.join(names)}")
        of_each = zip(found, DTYPES, strict=True)
        for (runs, why), some in groupby(of_each, lambda one: one[0]):
            dtypes = ", ".join(str(dtype)[6:] for _, dtype in some)
            print(f"    {runs} in {dtypes}{why and f': {why}'}")


def operators() -> dict[str, Callable]:
    """The public operators, by name: what goes on from a state."""
    return {
        prefix + name: getattr(module, name)
        for prefix, module in (("", fw), ("deep.", deep))
        for name in module.__all__
        if callable(getattr(module, name))
        and {"state", "initial_state"}
        & {*inspect.signature(getattr(module, name)).parameters}
    }


def backend(
    operator: Callable, device: torch.device, dtype: torch.dtype
) -> tuple[str, str]:
    """What computes an operator there, and why not a kernel of its own."""
    if "backend" not in inspect.signature(operator).parameters:
        return "PyTorch", "it has no kernel of its own"
    try:
        fw.resolve_backend("triton", device, dtype)
    except ValueError as error:
        return "torch", f"triton {str(error).partition('which ')[2]}"
    if device.type != "cuda":
        return "torch", "Triton's interpreter runs if asked for by name"
    if operator not in (deep.ttt, deep.mesa):
        return "triton", ""
    chosen = deep_backend("auto", device, dtype)
    why = "" if chosen == "triton" else "its kernel would not be faster here"
    return chosen, why
