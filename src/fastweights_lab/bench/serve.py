"""What serving costs beside a batch that is full: ``fastweights bench serve``.

512 requests with prompts of 16 to 4,096 and answers of 16 to 512 tokens, all
there from the start, go through an engine of 64 rows (less on a CPU). "read"
and "write" are what ``generate`` takes for as much: for the same prompts, 64
at once, and for as many tokens by steps of full batches, in the middle of the
longest text. "share" is the sum of both by "seconds", the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fastweights.serving import Engine
from fastweights_lab.bench.generate import FEW, PATTERNS, TOKENS, make_model
from fastweights_lab.bench.timing import ON_GPU, Row, elapsed

REQUESTS, ROWS, PIECE = (512, 64, 8192) if ON_GPU else (32, 8, 256)
PROMPT, ANSWER = ((16, 4096), (16, 512)) if ON_GPU else ((4, 64), (4, 32))


def rows(names: list[str]) -> Iterator[Row]:
    """Rows of these kinds of model."""
    draw = torch.Generator().manual_seed(0)
    lengths, answers = (
        torch.randint(a, b + 1, (REQUESTS,), generator=draw).tolist()
        for a, b in (PROMPT, ANSWER)
    )
    T = PROMPT[1] + ANSWER[1]
    for name in names or PATTERNS:
        model = make_model(name)
        V = model.config.vocab_size
        prompts = [torch.randint(V, (n,)) for n in lengths]
        engine = Engine(
            model, num_rows=ROWS, tokens_per_row=T, max_prefill_tokens=PIECE
        )
        asked = list(zip(prompts, answers, strict=True))
        _serve(engine, asked[: 2 * ROWS])  # kernels are compiled
        seconds = elapsed(_serve, engine, asked)
        del engine  # with its states
        elapsed(model.generate, prompts[:ROWS], 1)  # as its kernels are
        read = sum(
            elapsed(model.generate, prompts[i : i + ROWS], 1)
            for i in range(0, REQUESTS, ROWS)
        )
        full = torch.randint(V, (ROWS, T // 2))
        few, many = (
            min(elapsed(model.generate, full, n) for _ in range(3))
            for n in (FEW, FEW + TOKENS)
        )
        write = sum(answers) / ROWS * (many - few) / TOKENS
        yield {
            "kind": name,
            "requests": REQUESTS,
            "rows": ROWS,
            "prompts": sum(lengths),
            "new": sum(answers),
            "seconds": seconds,
            "read": round(read, 4),
            "write": round(write, 4),
            "share": round((read + write) / seconds, 3),
        }


def _serve(engine: Engine, asked: list[tuple[torch.Tensor, int]]) -> None:
    for one in asked:
        engine.add(*one)
    while engine.busy:
        engine.step()
