"""One training run: its settings, its steps, its checkpoints.

    run = Training(Settings(steps=100, device="cpu"))
    for _ in range(100):
        loss = run.step()
    run.evaluate()["bits per byte"]
    run.save("checkpoint.pt")
    run = Training(run.settings, "checkpoint.pt")   # goes on bit for bit

Bit for bit if nothing differs, the number of threads included; on a GPU but
for the gradient of the embedding, whose terms PyTorch adds in any order
unless torch.use_deterministic_algorithms(True) is set. It is the only
operation of a step whose bits differed between equal passes (H200, 2,245
operations, 64 x 1,024 tokens).

:mod:`fastweights_lab.commands.train` is the program around it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastweights import torch_internals
from fastweights.arguments import check_integers, check_numbers, check_sizes
from fastweights.layers import parameter_groups
from fastweights.models import LanguageModel, ModelConfig
from fastweights.models.config import update_saved
from fastweights.models.files import write_whole
from fastweights.ranks.group import context_parallel, current_ranks
from fastweights_lab.records import machine, with_new_names
from fastweights_lab.text import corpus


def option(default: Any, text: str, **more: Any) -> Any:
    """A setting: its default, and what --help says of it.

    ``least`` or ``need`` is what it has to be; ``group`` begins a group.
    """
    return field(default=default, metadata={"help": text, **more})


class Schedule:
    """A run's learning rates, one per step."""

    lr: float
    steps: int
    warmup: int
    final_lr: float

    def learning_rate(self, step: int) -> float:
        """A step's learning rate (from 0): up in a line, down in a cosine.

        And no further after the last one.
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        left = max(1, self.steps - self.warmup)
        done = min(1.0, (step - self.warmup) / left)
        low = self.lr * self.final_lr
        return low + (self.lr - low) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Settings(Schedule):
    """What a run is; each field is an option of the program.

    Raises:
        TypeError, ValueError: a field has no fitting value; named.
    """

    corpus: tuple[str, ...] = option(
        ("stdlib",),
        "text to train on: files, folders, or stdlib, CPython 3.12.3's",
        group="text",
    )
    suffixes: tuple[str, ...] = option(
        (".py", ".txt", ".md"),
        "endings of the files that folders are searched for",
    )
    tokenizer: str | None = option(
        None, "file tokenizer.json; without one each byte is a token"
    )
    packed: bool = option(
        False, "read whole documents, packed, in place of windows"
    )
    length: int = option(256, "tokens in a window of text", least=2)
    tokens: int = option(
        2048, "tokens that a step reads, over all processes", least=2
    )
    pattern: tuple[str, ...] = option(
        ("gated_deltanet",),
        "types of layer, repeated up to the depth, such as 3*kda,softmax",
        group="model",
    )
    num_layers: int = option(2, "number of layers, the model's depth")
    dim: int = option(128, "width of the residual stream")
    num_heads: int = option(4, "number of heads in a layer")
    head_dim: int | None = option(
        None, "size of a head; dim / num_heads without it"
    )
    mlp_ratio: float = option(
        2.0, "hidden width of the MLPs, as a multiple of dim"
    )
    tie_embeddings: bool = option(
        True, "use the embeddings of tokens as the head's matrix too"
    )
    options: str = option(
        "{}",
        "other arguments of layers by type, as JSON: "
        """'{"kda": {"expand_v": 2}}'""",
    )
    vocab_size: int | None = option(
        None, "number of tokens that the model knows; else the tokenizer's"
    )
    steps: int = option(
        300,
        "steps of the optimiser, over which the learning rate falls",
        least=1,
        group="training",
    )
    lr: float = option(3e-3, "highest learning rate", need="> 0")
    warmup: int = option(
        20, "steps in which the learning rate rises to its highest", least=0
    )
    final_lr: float = option(
        0.1, "last learning rate, as a part of the highest", need=">= 0"
    )
    weight_decay: float = option(0.1, "weight decay of matrices", need=">= 0")
    clip: float = option(
        1.0, "largest norm of the gradient, which is else scaled", need="> 0"
    )
    accumulate: int = option(
        1, "forward and backward passes per step", least=1
    )
    seed: int = option(0, "seed of the model and of the batches", least=0)
    device: str = option(
        "auto",
        "device: cpu, cuda, ..; auto is cuda if it is there",
        group="machine",
    )
    precision: str = option(
        "auto",
        "precision of products; auto is bf16 on cuda",
        choices=("auto", "fp32", "bf16"),
    )
    context_parallel: int = option(
        1, "processes that share each sequence", least=1
    )
    fsdp: bool = option(
        False, "shard parameters and the optimiser's state over all processes"
    )
    compile: bool = option(False, "compile the model by torch.compile")
    recompute: bool = option(
        False, "compute activations again in the backward: less memory"
    )
    out: str = option(
        "run", "folder of the checkpoint, the log and the model", group="run"
    )
    log_every: int = option(10, "steps between two lines of the log", least=1)
    eval_every: int = option(100, "steps between two evaluations", least=1)
    eval_windows: int = option(
        32, "windows of held-out text in an evaluation", least=1
    )
    save_every: int = option(100, "steps between two checkpoints", least=1)
    sample: int = option(
        0, "tokens of text that the trained model writes", least=0
    )
    prompt: str = option("def ", "beginning of the text that it writes")

    def __post_init__(self) -> None:
        for of in fields(self):
            value, need = getattr(self, of.name), of.metadata
            if "least" in need:
                check_integers(**{of.name: value})
                if not need["least"] <= value < 2**40:
                    raise ValueError(
                        f"{of.name}: got {value}, need an integer >= "
                        f"{need['least']}, and less than 2**40"
                    )
            if "need" in need:
                check_numbers("any", **{of.name: value})
                check_numbers(need["need"], **{of.name: value})
            if value not in need.get("choices", (value,)):
                raise ValueError(
                    f"{of.name}: got {value!r}, need one of {need['choices']}"
                )
        if self.final_lr > 1:
            raise ValueError(f"final_lr: got {self.final_lr}, need 0 to 1")
        for name in ("corpus", "suffixes", "pattern"):
            several = getattr(self, name)
            if isinstance(several, str):
                raise TypeError(f"{name}: got {several!r}, need a tuple")
            object.__setattr__(self, name, tuple(map(os.fspath, several)))
        object.__setattr__(self, "out", os.fspath(self.out))
        if self.vocab_size is not None:
            check_sizes(vocab_size=self.vocab_size)
        self.model_config(1)

    def model_config(self, needed: int) -> ModelConfig:
        """The model's, for a tokenizer that needs so many tokens."""
        size = needed if self.vocab_size is None else self.vocab_size
        if size < needed:
            raise ValueError(
                f"vocab_size: got {size}, need the tokenizer's {needed} or "
                "more"
            )
        try:
            options = json.loads(self.options)
        except ValueError as error:
            raise ValueError(
                f"options: got {self.options!r}, need JSON: {error}"
            ) from None
        return ModelConfig(
            vocab_size=size,
            dim=self.dim,
            num_layers=self.num_layers,
            pattern=self.pattern,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            options=options,
            mlp_ratio=self.mlp_ratio,
            tie_embeddings=self.tie_embeddings,
        )

    def check_parts(self, parts: int) -> None:
        """Raise unless a step can be taken in so many equal passes."""
        unit = parts if self.packed else parts * self.length
        if self.tokens % unit or self.tokens < 2 * parts:
            by = "" if self.packed else " x length"
            raise ValueError(
                f"tokens: got {self.tokens} per step, need a multiple of "
                f"{unit} (processes x accumulate{by})"
            )
        length = self.tokens // parts if self.packed else self.length
        if length % self.context_parallel:
            raise ValueError(
                f"context_parallel: got {self.context_parallel}, need a "
                f"divisor of the {length} tokens of a "
                f"{'pack' if self.packed else 'window'}"
            )


CHANGEABLE = {
    *("accumulate", "compile", "device", "out", "prompt", "recompute"),
    *("fsdp", "context_parallel"),
    *("eval_every", "log_every", "save_every", "sample", "steps"),
    *("corpus", "suffixes", "tokenizer"),  # whose content is compared
}
"""What a run may change when it goes on."""


class Training:
    """A model, its optimiser, its text, and how far it has come.

    In a process group (torchrun) every process makes one.

    Args:
        settings: what to run.
        path: a checkpoint to go on from. With other ``steps`` than it had,
            the learning rate goes on as in a run of so many from the start.

    Raises:
        TypeError, ValueError: a setting does not fit, or not the
            checkpoint; the message names it.
    """

    def __init__(
        self, settings: Settings, path: str | Path | None = None
    ) -> None:
        self.settings, self.steps_done = settings, 0
        grouped = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if grouped else 0
        self.processes = dist.get_world_size() if grouped else 1
        ranks = settings.context_parallel
        if self.processes % ranks:
            raise ValueError(
                f"context_parallel: got {ranks}, need a divisor of the "
                f"{self.processes} processes that torchrun starts"
            )
        if settings.fsdp and not grouped:
            raise ValueError("fsdp: got True, need processes of torchrun")
        self.num_parts = settings.accumulate * self.processes // ranks
        settings.check_parts(self.num_parts)
        self.device = chosen_device(settings.device)
        self.tokenizer: corpus.Tokenizer = (
            corpus.ByteTokenizer()
            if settings.tokenizer is None
            else corpus.FileTokenizer(settings.tokenizer)
        )
        config = settings.model_config(self.tokenizer.vocab_size)
        self.text = corpus.read(settings.corpus, settings.suffixes)
        self.sources = {
            "corpus": {"bytes": self.text.size, "sha256": self.text.sha256},
            "tokenizer": self.tokenizer.sha256,
        }
        before = None if path is None else read_checkpoint(path)
        if before is not None:
            self._check(before)
        stream = corpus.Stream.of(self.text.train, self.tokenizer)
        self.held_out = corpus.Stream.of(self.text.held_out, self.tokenizer)
        self.batches: corpus.Packed | corpus.Windows
        if settings.packed:
            self.batches = corpus.Packed(
                stream, settings.tokens, settings.seed
            )
        else:
            self.batches = corpus.Windows(
                stream,
                settings.length,
                settings.tokens // settings.length,
                settings.seed,
            )
        if len(self.held_out.tokens) < 2 + ranks:
            raise ValueError(
                f"corpus: got {self.text.size} bytes, need more: nothing is "
                "left to test on"
            )

        torch.manual_seed(settings.seed)
        self.model = LanguageModel(
            config, recompute=settings.recompute, device=self.device
        )
        if before is not None:
            self.model.load_state_dict(before["model"])
        self.wrapped_model: Any = self.model
        if settings.compile:
            self._compile()
        self.mesh: Any = None
        if grouped:
            self._spread()
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, settings.weight_decay),
            lr=settings.lr,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        if before is not None:
            self._restore(before)

    def _compile(self) -> None:
        """The model as one graph; blocks, where they are gathered by turns."""
        if not self.settings.fsdp:
            self.model.compile(fullgraph=True)
            return
        for block in self.model.blocks:
            forward: Any = torch.compile(block.forward, fullgraph=True)
            block.forward = forward  # type: ignore[method-assign]

    def _spread(self) -> None:
        """Wrap the model by DDP or FSDP, and make the mesh of processes."""
        # Here, since what it imports takes a second.
        from torch.distributed import fsdp
        from torch.distributed.device_mesh import init_device_mesh

        ranks, kind = self.settings.context_parallel, self.device.type
        sizes = (self.processes // ranks, ranks)
        names = ("data", "sequence")
        self.mesh = init_device_mesh(kind, sizes, mesh_dim_names=names)
        if self.settings.fsdp:
            every = init_device_mesh(kind, (self.processes,))
            for block in self.model.blocks:
                fsdp.fully_shard(block, mesh=every)
            fsdp.fully_shard(self.model, mesh=every)
            fsdp.register_fsdp_forward_method(self.model, "generate")
            return
        if self.settings.compile:
            torch_internals.leave_graphs_whole()
        self.wrapped_model = DistributedDataParallel(self.model)

    @property
    def together(self) -> bool:
        """Whether processes need each other to run the model once."""
        return self.settings.fsdp or self.settings.context_parallel > 1

    def coordinate(self) -> tuple[int, int]:
        """This process' place in the mesh: its batches, its tokens."""
        return divmod(self.rank, self.settings.context_parallel)

    def shard(self, x: Tensor) -> Tensor:
        """This process' tokens of sequences [B, T]."""
        return x.chunk(self.settings.context_parallel, 1)[self.coordinate()[1]]

    def ranks(self) -> AbstractContextManager:
        """Where the processes of a sequence work on it together."""
        if self.mesh is None or self.settings.context_parallel == 1:
            return nullcontext()
        return context_parallel(
            self.mesh["sequence"], share_final_states=False
        )

    def autocast(self) -> AbstractContextManager:
        """Where products are bf16, if they shall be."""
        wanted = self.settings.precision
        if wanted == "auto":
            wanted = "bf16" if self.device.type == "cuda" else "fp32"
        if wanted == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def step(self) -> Tensor:
        """One step of the optimiser: the mean loss, in nats per token.

        Of this process' part. The norm of the gradient is left in
        ``self.norm``.

        Raises:
            FloatingPointError: the norm is not finite; no parameter has
                changed.
        """
        settings, passes = self.settings, self.settings.accumulate
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate(self.steps_done)
        total = torch.zeros((), device=self.device)
        for i in range(passes):
            batch = self.batches.batch(
                self.steps_done,
                self.coordinate()[0] * passes + i,
                self.num_parts,
            ).to(self.device)
            # Processes sum their gradients in the last pass.
            if isinstance(self.wrapped_model, DistributedDataParallel):
                self.wrapped_model.require_backward_grad_sync = i == passes - 1
            elif settings.fsdp:
                self.wrapped_model.set_requires_gradient_sync(i == passes - 1)
            with self.ranks():
                with self.autocast():
                    loss = self.wrapped_model(
                        self.shard(batch.tokens),
                        cu_seqlens=batch.cu_seqlens,
                        targets=self.shard(batch.targets),
                    )
                (loss / passes).backward()
            total += loss.detach() / passes
        self.norm = whole(
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        )
        if not self.norm.isfinite():
            self.optimizer.zero_grad()
            raise FloatingPointError(
                f"step {self.steps_done + 1}: the norm of the gradient is "
                f"{self.norm.item()} and the loss {total.item():.4g}, so no "
                "parameter was changed; a lower lr or clip may help"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
        return total

    def evaluate(
        self, stream: corpus.Stream | None = None
    ) -> dict[str, float]:
        """Bits per byte on windows spread over a stream, or the held-out one.

        ``repeated`` is what the tokens cost that complete five which stood
        in their window before, ``new`` what the others cost, and ``share``
        the former's part of all; see
        :func:`fastweights_lab.text.corpus.repeated`. Separators count as
        tokens and not as bytes.
        """
        stream = self.held_out if stream is None else stream
        last = len(stream.tokens) - 1
        T = min(self.settings.length, last)
        T -= T % self.settings.context_parallel
        last -= T
        number = min(self.settings.eval_windows, last + 1)
        starts = torch.arange(number) * last // max(1, number - 1)
        losses, again = [], []
        for rows in starts.split(8):
            batch = corpus.windows(stream, T, rows)
            again.append(corpus.repeated(batch))
            pair = [self.shard(x) for x in (batch.tokens, batch.targets)]
            with self.ranks(), self.autocast():
                x = self.model.token_losses(*(x.to(self.device) for x in pair))
                ranks = current_ranks()
                losses.append(x if ranks is None else ranks.gather_tokens(x))
        bits = torch.cat(losses).cpu().double() / math.log(2)
        bits, hit = bits * stream.tokens_per_byte, torch.cat(again)
        return {
            "bits per byte": bits.mean().item(),
            "repeated": bits[hit].mean().item() if hit.any() else math.nan,
            "new": bits[~hit].mean().item(),
            "share": hit.double().mean().item(),
        }

    def sample(self, prompt: str, tokens: int) -> str:
        """The prompt, and the text that the model writes after it."""
        start = torch.tensor([self.tokenizer.separator])
        encoded = self.tokenizer.encode(prompt.encode())
        generator = torch.Generator(self.device)
        generator.manual_seed(self.settings.seed)
        with self.autocast():
            (new,) = self.model.generate(
                torch.cat([start, encoded]),
                tokens,
                temperature=0.8,
                top_p=0.95,
                generator=generator,
                stop=self.tokenizer.separator,
            )
        return prompt + self.tokenizer.decode(new)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint, in one step: the old one or the new is there.

        One file, whatever the processes have: it is read at any layout. All
        of them call it, and the first one writes.

        Raises:
            OSError: there is no room for it, or no right to write.
        """
        path = Path(path)

        def kept(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            """Whole, one after the other, where they are written."""
            found = ((name, whole(x)) for name, x in tensors.items())
            return {name: x.cpu() for name, x in found if not self.rank}

        optimizer = self.optimizer.state_dict()
        moments = optimizer["state"].items()
        optimizer["state"] = {i: kept(tensors) for i, tensors in moments}
        state = {
            "settings": asdict(self.settings),
            **self.sources,
            "step": self.steps_done,
            "model": kept(self.model.state_dict()),
            "optimizer": optimizer,
            "random": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["random on cuda"] = torch.cuda.get_rng_state()
        if self.rank:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_whole(path, lambda beside: torch.save(state, beside))
        except RuntimeError as error:  # of a full disk
            why = first_line(error)
            raise OSError(f"cannot write {path}: {why}") from None

    def _check(self, before: dict[str, Any]) -> None:
        """Raise unless a checkpoint is of this run: settings and text."""
        for name, got in asdict(self.settings).items():
            need = before["settings"][name]
            if name not in CHANGEABLE and got != need:
                raise ValueError(
                    f"{name}: got {got}, need {need} as before, to go on"
                )
        found, text = before["corpus"]["sha256"], self.text.sha256
        if text != found:
            raise ValueError(
                f"corpus: got text with sha256 {text[:12]}.., need what the "
                f"checkpoint has read, {found[:12]}.."
            )
        tokenizer = self.tokenizer.sha256
        if tokenizer != before["tokenizer"]:
            raise ValueError(
                f"tokenizer: got {self.settings.tokenizer or 'bytes'}, need "
                "the checkpoint's, which is another one"
            )
        if self.settings.steps < before["step"]:
            raise ValueError(
                f"steps: got {self.settings.steps}, need the "
                f"{before['step']} that are done, or more"
            )

    def _restore(self, state: dict[str, Any]) -> None:
        self.steps_done = state["step"]
        parameters = [
            x for group in self.optimizer.param_groups for x in group["params"]
        ]
        for i, moments in state["optimizer"]["state"].items():
            moments |= {
                name: sharded_like(parameters[i], x)
                for name, x in moments.items()
            }
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda" and "random on cuda" in state:
            torch.cuda.set_rng_state(state["random on cuda"])

    def record(self) -> dict[str, Any]:
        """What ran: settings, corpus, model, versions, device."""
        return {
            "settings": asdict(self.settings),
            **self.sources,
            "parameters": self.model.num_parameters,
            "processes": self.processes,
            "threads": torch.get_num_threads(),
            **machine(self.device),
        }


def whole(x: Tensor) -> Tensor:
    """A tensor that is sharded over processes, on all of them."""
    full: Callable[[], Tensor] | None = getattr(x, "full_tensor", None)
    return x if full is None else full()


def sharded_like(parameter: Tensor, x: Tensor) -> Tensor:
    """x, which has a parameter's shape, sharded over processes as that is."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or x.shape != parameter.shape:
        return x
    from torch.distributed.tensor import distribute_tensor

    of: Any = parameter
    return distribute_tensor(x.to(of.device), mesh, of.placements)


class Progress:
    """One line that changes on a terminal, plain lines elsewhere."""

    def __init__(self, steps: int, quiet: bool = False) -> None:
        self.steps, self.quiet = steps, quiet
        self.live = sys.stderr.isatty()

    def show(self, step: int, text: str) -> None:
        """What a step has to say."""
        if self.quiet:
            return
        line = f"step {step}/{self.steps}  {text}"
        if self.live:
            cells = round(20 * step / self.steps)
            bar = "#" * cells + "." * (20 - cells)
            print(f"\r[{bar}] {line}\033[K", end="", file=sys.stderr)
        else:
            print(line, file=sys.stderr)
        sys.stderr.flush()

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self.quiet:
            end = "\r\033[K" if self.live else ""
            print(end + text, file=sys.stderr, flush=True)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """What :meth:`Training.save` wrote.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    if not Path(path).is_file():
        raise ValueError(f"path: got {path}, need a file, a checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        state["corpus"]["sha256"], state["step"]
        settings = with_new_names(state["settings"])
        saved = settings | {"options": json.loads(settings["options"])}
        if (now := update_saved(saved)) != saved:
            now["options"] = json.dumps(now["options"])
            settings = now
        state["settings"] = settings
    except Exception as error:  # a broken zip, a pickle, another program's
        raise ValueError(
            f"path: got {path}, which is no checkpoint of this program: "
            f"{first_line(error)}"
        ) from None
    return state


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def chosen_device(name: str) -> torch.device:
    """The device of this name; "auto" is CUDA if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()  # which meta cannot do
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device: got {name!r}, need auto, cpu, cuda, ..: "
            f"{first_line(error)}"
        ) from None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
