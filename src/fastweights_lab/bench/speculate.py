"""Guesses ahead on source code: ``fastweights bench speculate``.

A model of 52 million parameters reads CPython's standard library, byte by
byte, for some steps: a minute on an H200. Then it goes on from modules that
it has not read, one at a time: without drafts, and with those that are looked
up in the text so far. "seconds" is that of a token, when all is recorded;
"confirmed" is the tokens of a pass. The likeliest bytes of a small model
repeat themselves, which is easily guessed: hence drawn ones, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from fastweights.models import LanguageModel
from fastweights.models.speculation import NgramLookup
from fastweights.models.streaming import stream
from fastweights_lab.bench.timing import DEVICE, DTYPE, ON_GPU, Row, now
from fastweights_lab.text import corpus
from fastweights_lab.text.training import Settings, Training

SETTINGS: dict[str, Any] = (
    {"dim": 768, "num_layers": 8, "num_heads": 6, "lr": 1e-3}
    | {"length": 1024, "tokens": 65536}
    if ON_GPU
    else {"length": 64, "tokens": 512}
)
STEPS = 400 if ON_GPU else 20
PROMPT, PROMPTS = (1024, 8) if ON_GPU else (64, 2)
FEW, TOKENS = (64, 512) if ON_GPU else (8, 32)


def rows(steps: int) -> Iterator[Row]:
    """Rows of a model after so many steps, by temperature and draft."""
    training = Training(Settings(steps=steps, device=DEVICE, **SETTINGS))
    for _ in range(steps):
        training.step()
    bits = training.evaluate()["bits per byte"]
    model = training.model.to(DTYPE)
    prompts = corpus.first_windows(training.held_out, PROMPT, PROMPTS).tokens
    for temperature in (0.0, 0.8):
        for looks in (False, True):
            found = [_call(model, p, temperature, looks) for p in prompts]
            seconds, passes = (sum(x) for x in zip(*found, strict=True))
            tokens = len(prompts) * TOKENS
            yield {
                "bits_per_byte": round(bits, 3),
                "temperature": temperature,
                "draft": "lookup" if looks else None,
                "confirmed": round(tokens / passes, 2),
                "seconds": seconds / tokens,
            }


def _call(
    model: LanguageModel, prompt: torch.Tensor, temperature: float, looks: bool
) -> tuple[float, int]:
    """Seconds and passes of the last TOKENS of a call."""
    lookup, passes = NgramLookup(), 0

    def draft(text: list[int]) -> list[int]:
        nonlocal passes
        passes += 1
        return lookup(text)

    found = stream(
        model,
        prompt,
        FEW + TOKENS,
        temperature=temperature,
        generator=torch.Generator().manual_seed(0),
        draft=draft if looks else None,
    )
    for _ in range(FEW):
        next(found)
    # A pass has begun that makes the next tokens: it counts, with its time.
    passes, start = 1, time.perf_counter() if looks else now()
    for _ in found:
        pass
    return now() - start, passes if looks else TOKENS
