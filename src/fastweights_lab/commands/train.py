"""Train a small language model: ``fastweights train``.

With no options a model of 0.4 million parameters reads the standard library
of CPython 3.12.3, byte by byte, for 300 steps: minutes on a CPU.
``--corpus`` names files and folders of yours, ``--pattern`` the layers:

    fastweights train --corpus notes/ --pattern '3*kda,softmax'

Under torchrun every process takes its part of every step:

    torchrun --nproc-per-node 2 -m fastweights.train --tokens 65536

``--context-parallel 2`` has two processes share each sequence, for those
that one cannot hold, and ``--fsdp`` spreads parameters and the optimiser over
all of them; checkpoints go on with any number of processes.

The folder ``--out`` gets a checkpoint, from which ``--resume`` goes on bit
for bit (with more ``--steps`` also a run that is done: from there the rate
is that of a run of so many steps), a log of JSON lines whose first one says
what ran, the tokenizer, and the model, which ``fastweights generate`` and
``fastweights.models.load`` read. Notebooks call the same
``fastweights_lab.text.training``.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastweights.models.files import safetensors, write_whole
from fastweights_lab.program import ended
from fastweights_lab.records import append
from fastweights_lab.text.training import (
    Progress,
    Settings,
    Training,
    read_checkpoint,
)

PROGRAM = "fastweights train"
CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
TOKENIZER = "tokenizer.json"


def take_all_steps(training: Training, stopped: Callable[[], bool]) -> bool:
    """All steps that are left, with log, evaluations and checkpoints.

    Returns:
        Whether it came to its end; False if ``stopped`` said to stop.
    """
    settings, lead = training.settings, training.rank == 0
    out, steps = Path(settings.out), settings.steps
    progress = Progress(steps, quiet=not lead)
    progress.say(
        f"{training.model.num_parameters:,} parameters on "
        f"{training.device.type}; {training.text.size:,} bytes of text"
    )
    if training.steps_done == steps:
        progress.say(
            f"all {steps} steps are done; --steps {2 * steps} would go on"
        )

    def log(**row: Any) -> None:
        if lead:
            append(out / LOG, row)

    log(begins_at=training.steps_done, **training.record())
    start, since = time.perf_counter(), training.steps_done
    while training.steps_done < steps:
        loss = training.step()
        step = training.steps_done
        last = step == steps
        if last or step % settings.log_every == 0:
            value = total(loss, training) / training.processes
            seconds = (time.perf_counter() - start) / (step - since)
            rate = settings.tokens / seconds
            log(
                step=step,
                loss=value,
                norm=float(training.norm),
                lr=settings.learning_rate(step - 1),
                tokens=step * settings.tokens,
                tokens_per_second=rate,
            )
            left = datetime.timedelta(seconds=round((steps - step) * seconds))
            text = f"loss {value:.3f}  {rate:,.0f} tokens/s  {left} to go"
            progress.show(step, text)
        stop = total(torch.tensor(float(stopped())), training) > 0
        asked = lead or training.together
        if asked and (last or step % settings.eval_every == 0):
            found = training.evaluate()
            log(step=step, **found)
            progress.say(f"step {step}: {in_words(found)}")
        if last or stop or step % settings.save_every == 0:
            save(training)
            if dist.is_initialized():
                dist.barrier()
        if stop and not last:
            progress.say(
                f"stopped after step {step}; it goes on with: {PROGRAM} "
                f"--resume {settings.out}"
            )
            return False
    return True


def total(x: torch.Tensor, training: Training) -> float:
    """The sum over all processes."""
    if training.processes > 1:
        x = x.to(training.device)
        dist.all_reduce(x)
    return x.item()


def in_words(found: dict[str, float]) -> str:
    """What an evaluation found."""
    parts = (
        f"{found['repeated']:.3f} where a 5-gram is repeated, "
        f"{found['new']:.3f} elsewhere"
    )
    if not 0 < found["share"] < 1:
        some = "every" if found["share"] else "no"
        parts = f"{some} byte completes a repeated 5-gram"
    return f"{found['bits per byte']:.3f} bits per byte ({parts})"


def save(training: Training) -> None:
    """Write the checkpoint, and a tokenizer that is of a file."""
    out = Path(training.settings.out)
    training.save(out / CHECKPOINT)
    text = getattr(training.tokenizer, "file", None)
    if text is not None and training.rank == 0:
        write_whole(out / TOKENIZER, lambda beside: beside.write_bytes(text))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add Settings' fields, by groups, and --resume to the last group."""
    for f in fields(Settings):
        if group := f.metadata.get("group"):
            add = parser.add_argument_group(group).add_argument
        add(f"--{f.name.replace('_', '-')}", **as_option(f))
    add("--resume", metavar="FOLDER", help="folder of a run to go on with")


def as_option(f: Field) -> dict[str, Any]:
    """How argparse takes a field of Settings, which has its default."""
    shown: Any = f.default
    more: dict[str, Any] = {"default": argparse.SUPPRESS}
    match f.type.partition(" | ")[0]:
        case "bool":
            more["action"] = argparse.BooleanOptionalAction
            shown = "yes" if shown else "no"
        case "tuple[str, ...]":
            one = f.name == "pattern"
            more |= {"type": as_pattern} if one else {"nargs": "+"}
            more["metavar"] = "TYPES" if one else "NAME"
            shown = " ".join(shown)
        case name:
            more["type"] = {"int": int, "float": float}.get(name, str)
            more["choices"] = f.metadata.get("choices")
            more["metavar"] = None if more["choices"] else name.upper()
    default = "" if shown is None else f" (default: {shown})"
    return more | {"help": f.metadata["help"] + default.replace("%", "%%")}


def as_pattern(text: str) -> tuple[str, ...]:
    """ "3*kda,softmax" as three times kda, then softmax."""
    found: list[str] = []
    for part in text.split(","):
        times, star, layer_type = part.strip().rpartition("*")
        if star and not re.fullmatch(r"\s*[1-9]\d{0,3}\s*", times, re.ASCII):
            raise argparse.ArgumentTypeError(
                f"got {part!r}, need a type, or NUMBER*TYPE with a number "
                "from 1 to 9999"
            )
        found += [layer_type.strip()] * (int(times) if star else 1)
    return tuple(found)


def chosen_settings(args: argparse.Namespace) -> tuple[Settings, Path | None]:
    """The settings asked for, and the checkpoint that they go on from."""
    names = Settings.__dataclass_fields__
    given = {name: x for name, x in vars(args).items() if name in names}
    folder = args.resume
    if folder is None:
        settings = Settings(**given)
        path = Path(settings.out) / CHECKPOINT
        if path.exists():
            raise ValueError(
                f"out: got {settings.out}, which holds a run: go on with "
                f"--resume {settings.out}, or name another folder"
            )
        return settings, None
    path = Path(folder) / CHECKPOINT
    if not path.is_file():
        raise ValueError(f"resume: got {folder}, which has no {CHECKPOINT}")
    try:
        saved = Settings(**read_checkpoint(path)["settings"])
    except TypeError as error:
        raise ValueError(
            f"resume: got {path}, of another version: {error}"
        ) from None
    given.setdefault("out", str(folder))
    return replace(saved, **given), path


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """torchrun's, if it started this process."""
    if "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    named = device == "auto" or device.startswith("cuda")
    on_cuda = named and torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if on_cuda else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; pressed again it stops at once."""
    pressed: list[int] = []

    def press(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, press) for number in numbers]
    try:
        yield lambda: bool(pressed)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def run(args: argparse.Namespace) -> int:
    """Train as asked: 0, 1 where it broke off, 2 for what does not fit."""
    safetensors()  # which would be missed at the end
    settings, path = chosen_settings(args)
    with process_group(settings.device):
        return run_in_group(settings, path)


def run_in_group(settings: Settings, path: Path | None) -> int:
    """What run does within the process group.

    When it returns nothing holds the model any more, no error either. Gloo's
    group would otherwise end with the last of DDP's parts, which wait with
    Python's lock for a thread that waits for the lock.
    """
    with ctrl_c() as stopped:
        try:
            try:
                training = Training(settings, path)
            except (ImportError, OSError, TypeError, ValueError) as error:
                return ended(f"{PROGRAM}: {error}", 2)
            choose_threads(training)
            if not take_all_steps(training, stopped):
                return 130
            if training.rank == 0 or settings.fsdp:
                save_result(training)
            return 0
        except KeyboardInterrupt:
            return ended("stopped at once", 130)
        except FloatingPointError as error:
            why = str(error)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            why = (
                "memory: got too little, need fewer tokens or a smaller "
                "model, or --accumulate, or --recompute"
            )
        except OSError as error:
            out = Path(settings.out)
            free = shutil.disk_usage(out if out.is_dir() else ".").free / 2**20
            why = f"{error}; {free:,.0f} MiB are free"
    return ended(f"{PROGRAM}: {why}; {what_is_left(settings)}", 1)


def choose_threads(training: Training) -> None:
    """Go on with one thread where that is twice as fast as all of them.

    So it is where other programs keep the processors busy, since threads
    wait for each other. OMP_NUM_THREADS in the environment wins.
    """
    threads = torch.get_num_threads()
    alone = training.processes == 1 and training.device.type == "cpu"
    if threads == 1 or not alone or "OMP_NUM_THREADS" in os.environ:
        return
    tokens = training.held_out.tokens[: training.settings.length + 1].long()

    @torch.no_grad()
    def seconds(number: int) -> float:
        torch.set_num_threads(number)
        start = time.perf_counter()
        training.model.token_losses(tokens[None, :-1], tokens[None, 1:])
        return time.perf_counter() - start

    seconds(1)  # the first is slow
    one, many = (min(seconds(n) for _ in "123") for n in (1, threads))
    if many > 2 * one:
        torch.set_num_threads(1)
        print(
            f"1 thread, which is more than twice as fast here as {threads}; "
            f"OMP_NUM_THREADS={threads} would take them",
            file=sys.stderr,
        )


def out_of_memory(error: Exception) -> bool:
    """Whether it says that there is no memory, on any device."""
    of_cpu = "DefaultCPUAllocator" in str(error)
    return of_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)


def what_is_left(settings: Settings) -> str:
    """What is left of a run that broke off."""
    path = Path(settings.out) / CHECKPOINT
    if not path.is_file():
        return "no checkpoint was written"
    step = read_checkpoint(path)["step"]
    return f"{path} is that of step {step}"


def save_result(training: Training) -> None:
    """Write the model for load(), and a sample if one was asked for."""
    settings = training.settings
    training.model.save(settings.out)
    if settings.sample:
        text = training.sample(settings.prompt, settings.sample)
        if training.rank == 0:
            print(text)
