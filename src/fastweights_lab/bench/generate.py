"""What a token of generating costs: ``fastweights bench generate``.

A language model of 400 million parameters (24 blocks of width 1,024 with 8
heads of 128, a vocabulary of 32,000) in bf16 goes on from prompts of one
length; on a CPU the trainer's of 0.4 million in fp32. "seconds" is that of
one more token of all rows: of a call for many tokens less one for 8. "first"
is the whole call's for one token, reading the prompts included, which alone
takes "prefill": both by turns, since they are the host's for the most part.
"warm" is that of the first call of a process, whose kernels are in Triton's
cache. The floor has all weights but the embedding's read once,
states read and written, keys and values read, at the rate of a copy. "state"
is the bytes of one sequence. "how" is "fused", as generate has it; once also
"recorded", the layers' own modules in a CUDA graph, and "python" without it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from fastweights.models import LanguageModel, ModelConfig, decoding
from fastweights.models import model as models
from fastweights_lab.bench.timing import (
    DEVICE,
    DTYPE,
    ON_GPU,
    Row,
    ceilings,
    elapsed,
)

PATTERNS = {
    "gated_deltanet": ("gated_deltanet",),
    "kda": ("kda",),
    "mamba2": ("mamba2",),
    "hybrid": 3 * ("gated_deltanet",) + ("softmax",),
    "softmax": ("softmax",),
}
SHAPES = (
    [(1, 128), (8, 128), (64, 128), (1, 4096), (64, 4096), (1, 16384)]
    if ON_GPU
    else [(1, 16), (8, 16)]
)
TOKENS = 128 if ON_GPU else 32
FEW = 8
BATCHES = (1, 64) if ON_GPU else (1,)
# What a step was before, by what never holds then.
BEFORE = {
    "python": [(models, "fits_fused_step"), (decoding, "is_capturable")],
    "recorded": [(models, "fits_fused_step")],
}
SIZES: dict[str, Any] = (
    {"vocab_size": 32000, "dim": 1024, "num_layers": 24, "num_heads": 8}
    if ON_GPU
    else {"vocab_size": 257, "dim": 128, "num_layers": 2, "num_heads": 2}
)


def rows(names: list[str]) -> Iterator[Row]:
    """Rows of these kinds of model, by batch and length of the prompts."""
    copy = next(ceilings())
    rate = copy["moved"] / copy["seconds"]
    for name in names or PATTERNS:
        model = make_model(name)
        cases = [("fused", B, T) for B, T in SHAPES]
        if name == "gated_deltanet":
            T = SHAPES[0][1]
            cases += [(how, B, T) for how in BEFORE for B in BATCHES]
        for how, B, T in cases:
            with contextlib.ExitStack() as stack:
                for module, function in BEFORE.get(how, []):
                    never = mock.patch.object(module, function, _never)
                    stack.enter_context(never)
                row = _row(model, B, T)
            row |= {"kind": name, "how": how, "floor": row["moved"] / rate}
            if (how, B, T) == cases[0]:
                row["warm"] = warm_seconds(name)
            yield row


def make_model(name: str) -> LanguageModel:
    """The model of this kind."""
    torch.manual_seed(0)
    config = ModelConfig(pattern=PATTERNS[name], **SIZES)
    return LanguageModel(config, device=torch.device(DEVICE), dtype=DTYPE)


_WARM = """
import torch
from fastweights_lab.bench import generate, timing
model = generate.make_model({name!r})
prompts = torch.zeros(generate.SHAPES[0], dtype=torch.int64)
print(timing.elapsed(model.generate, prompts, generate.TOKENS))
"""


def warm_seconds(name: str) -> float:
    """Seconds of the first call of a process, its kernels compiled before."""
    code = [sys.executable, "-c", _WARM.format(name=name)]
    return float(subprocess.check_output(code, text=True).split()[-1])


def _never(*_: object) -> bool:
    return False


def _row(model: LanguageModel, B: int, T: int) -> Row:
    prompts = torch.randint(model.config.vocab_size, (B, T), device=DEVICE)
    elapsed(model.generate, prompts, TOKENS)  # kernels are compiled, once
    reading, write = torch.no_grad()(model.hidden), model.generate
    turns = [
        (
            *(elapsed(write, prompts, n) for n in (1, FEW, FEW + TOKENS)),
            elapsed(reading, prompts),
        )
        for _ in range(10)
    ]
    first, few, many, read = map(min, zip(*turns, strict=True))
    weights = sum(p.nbytes for p in model.parameters())
    weights -= model.embedding.weight.nbytes
    return {
        "B": B,
        "T": T,
        "first": first,
        "prefill": read,
        "state": model.state_bytes(T),
        "seconds": (many - few) / TOKENS,
        "moved": weights + B * _state_traffic(model, T),
    }


def _state_traffic(model: LanguageModel, T: int) -> int:
    """Bytes that a token reads and writes of a sequence's state."""
    grows = model.state_bytes(2 * T) - model.state_bytes(T)
    return 2 * (model.state_bytes(T) - grows) + grows
