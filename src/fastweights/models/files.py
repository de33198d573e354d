"""A model as a folder: model.safetensors and config.json."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.models.config import ModelConfig
from fastweights.models.model import LanguageModel

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def save(model: LanguageModel, folder: str | Path) -> None:
    """Write config.json and model.safetensors; the folder is made.

    Each file is written beside its place and then put there, so that a
    reader finds the old one or the new one. Embeddings that are tied to the
    head are there once. A sharded model is gathered, for which each of its
    processes has to call this; the first one writes.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: a parameter is not there (offloaded, quantised).
    """
    tensors = safetensors()
    state = model.state_dict()
    sharded = any(hasattr(x, "full_tensor") for x in state.values())
    weights = {name: cpu_tensor(name, x) for name, x in state.items()}
    if sharded and torch.distributed.get_rank() > 0:
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = model.config.to_json()
    write_whole(folder / CONFIG, lambda path: path.write_text(text, "utf-8"))

    def write(path: Path) -> None:
        tensors.save_file(weights, str(path))
        path.chmod((folder / CONFIG).stat().st_mode)  # it may be 600

    write_whole(folder / WEIGHTS, write)


def cpu_tensor(name: str, x: Any) -> Tensor:
    """A tensor of a model's state, gathered and on the CPU.

    Raises:
        ValueError: it holds no numbers.
    """
    if not isinstance(x, Tensor) or x.is_meta:
        what = "meta" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"model: got {name} as {what}, need a tensor with its numbers"
        )
    x = x.detach()
    if hasattr(x, "full_tensor"):  # of torch.distributed
        x = x.full_tensor()
    return x.cpu().contiguous()


def load(
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> LanguageModel:
    """The model that was saved in a folder.

    Args:
        folder: where :meth:`LanguageModel.save` put it.
        device: where its parameters shall be.
        dtype: theirs; None: each has its own of the file.

    Returns:
        the model, for training as for inference.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: the folder lacks one of the two files.
        ValueError: the config does not fit, the file of the tensors cannot
            be read, or a tensor of it is missing, has another shape or
            belongs to no parameter.
    """
    tensors = safetensors()
    from safetensors import SafetensorError

    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"folder: {folder} has no {name}")
    try:
        text = (folder / CONFIG).read_text("utf-8")
        config = ModelConfig.from_json(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    try:
        saved = tensors.load_file(str(folder / WEIGHTS))
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS}: {error}") from error
    most = Counter(x.dtype for x in saved.values()).most_common(1)
    device = None if device is None else torch.device(device)
    made_in = most[0][0] if dtype is None and most else dtype
    model = LanguageModel(config, device=device, dtype=made_in)
    wanted = model.state_dict()
    faults = [f"lacks {name}" for name in wanted if name not in saved]
    faults += [f"has {name}" for name in saved if name not in wanted]
    faults += [
        f"has {name} of shape {list(saved[name].shape)}, need {list(x.shape)}"
        for name, x in wanted.items()
        if name in saved and saved[name].shape != x.shape
    ]
    if faults:
        others = f" (and {len(faults) - 1} more)" if faults[1:] else ""
        raise ValueError(
            f"{folder / WEIGHTS}: {faults[0]}{others}: it is not of the model "
            f"in {CONFIG}"
        )
    if dtype is None:
        for name, x in model.named_parameters():
            x.data = x.data.to(saved[name].dtype)
    model.load_state_dict(saved)
    return model


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Have a file written beside its place, and put it there in one step."""
    beside = path.with_name(f".{path.name}.new")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def safetensors() -> Any:
    """The module safetensors.torch."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "saving and loading models needs safetensors: pip install "
            "safetensors"
        ) from error
    return safetensors.torch
