"""One language model with other layers in it, trained on the same text.

    python -m fastweights.comparison kinds parts --json text.json

trains the model of 20 million parameters on Python's standard library, with
each variant and each seed, several runs side by side on one GPU, and writes
a line per run. Stopped at any point it goes on from there. ``--dry`` says
what would run. A chapter trains the same variants at a size for its
reader's CPU:

    found = train("delta", 0, SMALL)
    found["bits per byte"]
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from importlib import resources
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import fastweights as fw
from fastweights import corpus
from fastweights.training import Settings, Training

Progress = Callable[[int, float], None]


def _recurrence(**options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return ("recurrence",), {"recurrence": options}


VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "linear": _recurrence(rule="additive", decay=None),
    "decay": _recurrence(rule="additive"),
    "delta": _recurrence(decay=None),
    "gated delta": _recurrence(),
    "KDA": _recurrence(decay="channel"),
    "softmax": (("softmax",), {}),
    "hybrid": (("recurrence", "recurrence", "softmax"), {}),
    "no convolution": _recurrence(conv_size=None),
    "no unit keys": _recurrence(normalize=False),
    "no output gate": _recurrence(gate=False),
    "fast gate": _recurrence(dt_range=(1.0, 10.0)),
}
"""Each one's pattern of layers and their options.

The first five are the same layer with another recurrence. The last four are
gated delta with one part taken away, or with gates that start by forgetting
half within 0.7 tokens and less.
"""

GROUPS = {
    "kinds": ("linear", "decay", "delta", "gated delta", "KDA", "softmax"),
    "parts": (
        "hybrid",
        "no convolution",
        "no unit keys",
        "no output gate",
        "fast gate",
    ),
}

LARGE = Settings(
    length=2048,
    tokens=32768,
    num_layers=6,
    dim=512,
    num_heads=4,
    mlp_ratio=8 / 3,
    steps=800,
    lr=2e-3,
    warmup=80,
    eval_windows=64,
    device="cuda",
    compile=True,
)
"""20 million parameters, 26 million tokens: half a minute of an H200."""

SMALL = Settings(
    length=128,
    tokens=1024,
    num_layers=2,
    dim=64,
    num_heads=2,
    steps=300,
    lr=6e-3,
    eval_windows=64,
    device="cpu",
)
"""A tenth of a million parameters: ten seconds of a laptop."""

PROMPT = "def "
LONG = 4  # evaluated on windows this many times as long as those trained on


def chosen(variant: str, seed: int, base: Settings) -> Settings:
    """The settings of one run.

    Raises:
        ValueError: there is no such variant.
    """
    if variant not in VARIANTS:
        raise ValueError(
            f"variant: got {variant!r}, need one of {', '.join(VARIANTS)}"
        )
    pattern, options = VARIANTS[variant]
    return replace(
        base, pattern=pattern, options=json.dumps(options), seed=seed
    )


def train(
    variant: str,
    seed: int = 0,
    base: Settings = SMALL,
    *,
    every: int = 20,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """One run, from its first step to its last, and what came of it.

    Args:
        variant: one of :data:`VARIANTS`.
        seed: of the parameters and of the batches.
        base: everything else.
        every: steps between two entries of ``losses``.
        progress: is told the step and the loss at each of them.

    Returns:
        variant, seed, settings, parameters, ``state bytes`` after a window,
        ``flops`` of a forward per token, ``losses`` (nats per token, by
        step), what :meth:`Training.evaluate` finds, ``by position`` (see
        :func:`by_position`), text ``before`` and ``after``, and seconds of
        the steps but the first.
    """
    run = Training(chosen(variant, seed, base))
    length, losses = run.settings.length, {}
    before = run.sample(PROMPT, 200)
    start = since = time.perf_counter()
    for step in range(run.settings.steps):
        loss = run.step()
        if step % every == 0 or step == run.settings.steps - 1:
            losses[step] = loss.item()
            if progress is not None:
                progress(step, losses[step])
        if step == 0:
            since = time.perf_counter()
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    end = time.perf_counter()
    return {
        "variant": variant,
        "seed": seed,
        **run.record(),
        "state bytes": run.model.state_bytes(length),
        "flops": run.model.flops_per_token(length),
        "losses": losses,
        **run.evaluate(),
        "by position": by_position(run, LONG * length),
        "before": before,
        "after": run.sample(PROMPT, 400),
        "seconds": end - since,
        "first step": since - start,
    }


def by_position(run: Training, length: int) -> dict[int, float]:
    """Bits per byte by where in a window a token stands, held-out text.

    Keys are positions 0, 64, 128, 256, ...: each stands for the tokens from
    there to the next one. Windows are ``length`` tokens and do not overlap.
    """
    stream = run.held_out
    length = min(length, len(stream.tokens) - 1)
    number = min(64, (len(stream.tokens) - 1) // length)
    found = []
    for starts in (torch.arange(number) * length).split(4):
        batch = corpus.windows(stream, length, starts).to(run.device)
        with run.autocast():
            found.append(run.model.token_losses(batch.tokens, batch.targets))
    bits = torch.cat(found).cpu().double().mean(0) / math.log(2)
    bits = bits * stream.tokens_per_byte
    edges = [0] + [2**i for i in range(6, 40) if 2**i < length]
    ends = [*edges[1:], length]
    return {
        a: bits[a:b].mean().item() for a, b in zip(edges, ends, strict=True)
    }


def load() -> list[dict[str, Any]]:
    """The recorded runs that ship with the library."""
    file = resources.files("fastweights") / "data" / "text.json"
    return json.loads(file.read_text())["runs"]


def of(runs: Iterable[dict[str, Any]], variant: str, what: str) -> list[float]:
    """One figure of a variant's runs, one per seed."""
    return [run[what] for run in runs if run["variant"] == variant]


def _worker(variant: str, seed: int, base: Settings) -> dict[str, Any]:
    def tell(step: int, loss: float) -> None:
        if step % 100 == 0:
            print(f"{variant}, {seed}: {step} {loss:.3f}", flush=True)

    return train(variant, seed, base, progress=tell)


def main(words: Sequence[str] | None = None) -> int:
    """The program: 0, or 2 for words that mean nothing."""
    program = argparse.ArgumentParser(
        prog="python -m fastweights.comparison",
        description="Train one model with other layers on the same text.",
    )
    program.add_argument(
        "what", nargs="+", help=f"of {', '.join([*GROUPS, *VARIANTS])}"
    )
    program.add_argument("--json", type=Path, help="file of the results")
    program.add_argument("--seeds", type=int, default=3)
    program.add_argument("--workers", type=int, default=3, help="at once")
    program.add_argument("--small", action="store_true", help="for a CPU")
    program.add_argument("--steps", type=int, help="in place of the size's")
    program.add_argument("--lr", type=float, help="in place of the size's")
    program.add_argument("--dry", action="store_true", help="run nothing")
    asked = program.parse_args(words)
    base = SMALL if asked.small else LARGE
    given = {"steps": asked.steps, "lr": asked.lr}
    base = replace(base, **{k: v for k, v in given.items() if v is not None})
    names = [name for what in asked.what for name in GROUPS.get(what, (what,))]
    try:
        for name in names:
            chosen(name, 0, base)
    except ValueError as error:
        print(f"python -m fastweights.comparison: {error}", file=sys.stderr)
        return 2
    record = _begun(asked.json, sys.argv[1:] if words is None else words)
    waiting = [
        (name, seed)
        for seed in range(asked.seeds)
        for name in names
        if not any(_same(run, name, seed, base) for run in record["runs"])
    ]
    print(f"{len(waiting)} runs: {', '.join(f'{a} {b}' for a, b in waiting)}")
    if asked.dry or not waiting:
        return 0
    context = get_context("spawn")
    with ProcessPoolExecutor(asked.workers, mp_context=context) as pool:
        running = [pool.submit(_worker, *one, base) for one in waiting]
        for future in as_completed(running):
            run = future.result()
            record["runs"].append(run)
            print(_line(run), flush=True)
            if asked.json:
                beside = asked.json.with_suffix(".part")
                beside.write_text(json.dumps(record, indent=1) + "\n")
                os.replace(beside, asked.json)
    return 0


def _begun(file: Path | None, words: Sequence[str]) -> dict[str, Any]:
    """What is in the file already, or the head of a new one."""
    if file is not None and file.is_file():
        return json.loads(file.read_text())
    on_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if on_gpu else platform.machine()
    return {
        "command": f"python -m fastweights.comparison {' '.join(words)}",
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastweights": fw.__version__,
        "date": datetime.date.today().isoformat(),
        "runs": [],
    }


def _same(run: dict[str, Any], name: str, seed: int, base: Settings) -> bool:
    """Whether this is that run, with these settings."""
    wanted = json.loads(json.dumps(asdict(chosen(name, seed, base))))
    return run["variant"] == name and run["settings"] == wanted


def _line(run: dict[str, Any]) -> str:
    tokens = run["settings"]["tokens"] * (run["settings"]["steps"] - 1)
    return (
        f"{run['variant']}, seed {run['seed']}: {run['bits per byte']:.3f} "
        f"bits per byte ({run['repeated']:.3f} repeated, {run['new']:.3f} "
        f"new), {tokens / run['seconds'] / 1e3:.0f} k tokens/s, first step "
        f"{run['first step']:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
