"""What a token of generating costs: ``fastweights bench generate``.

A language model of 400 million parameters (24 blocks of width 1,024 with 8
heads of 128, a vocabulary of 32,000) in bf16 goes on from prompts of one
length; on a CPU the trainer's of 0.4 million in fp32. "seconds" is that of
one more token of all rows: of a call for many tokens less one for 8. "first"
is the whole call's for one token, reading the prompts included. The floor has
all weights but the embedding's read once, states read and written, keys and
values read, at the rate of a copy. "state" is the bytes of one sequence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from fastweights.models import LanguageModel, ModelConfig
from fastweights_lab.bench.timing import DEVICE, DTYPE, ON_GPU, Row, ceilings

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
SIZES: dict[str, Any] = (
    {"vocabulary": 32000, "dim": 1024, "num_layers": 24, "num_heads": 8}
    if ON_GPU
    else {"vocabulary": 257, "dim": 128, "num_layers": 2, "num_heads": 2}
)


def rows(names: list[str]) -> Iterator[Row]:
    """Rows of these kinds of model, by batch and length of the prompts."""
    copy = next(ceilings())
    rate = copy["moved"] / copy["seconds"]
    for name in names or PATTERNS:
        torch.manual_seed(0)
        config = ModelConfig(pattern=PATTERNS[name], **SIZES)
        model = LanguageModel(config, device=torch.device(DEVICE), dtype=DTYPE)
        weights = sum(p.nbytes for p in model.parameters())
        weights -= model.embedding.weight.nbytes
        for B, T in SHAPES:
            _call(model, B, T, TOKENS)  # kernels are compiled, once
            first, few, many = (
                min(_call(model, B, T, n) for _ in range(3))
                for n in (1, FEW, FEW + TOKENS)
            )
            moved = weights + B * _state_traffic(model, T)
            yield {
                "kind": name,
                "B": B,
                "T": T,
                "first": first,
                "state": model.state_bytes(T),
                "seconds": (many - few) / TOKENS,
                "moved": moved,
                "floor": moved / rate,
            }


def _call(model: LanguageModel, B: int, T: int, tokens: int) -> float:
    """Seconds of a call of generate for so many tokens of B rows."""
    prompts = torch.randint(model.config.vocabulary, (B, T), device=DEVICE)
    if ON_GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(prompts, tokens)
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _state_traffic(model: LanguageModel, T: int) -> int:
    """Bytes that a token reads and writes of a sequence's state."""
    grows = model.state_bytes(2 * T) - model.state_bytes(T)
    return 2 * (model.state_bytes(T) - grows) + grows
