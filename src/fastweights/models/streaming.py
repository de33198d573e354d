"""Continuing prompts, all of them together, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from fastweights.arguments import check_integers, check_numbers, is_readable
from fastweights.models.decoding import NOT_FINITE, Decoding, prefill
from fastweights.models.model import LanguageModel
from fastweights.models.sampling import Sampling
from fastweights.ops.decode import MAX_STEP_TOKENS

STEPS_PER_CHECK = 16
"""Tokens after which a GPU is asked whether to go on."""

Draft = Literal["lookup"] | Callable[[list[int]], Iterable[int]]
"""Or it is a LanguageModel, whose own draws are the drafts."""

Prompts = Int[Tensor, " T"] | Int[Tensor, "N T"] | Sequence[Int[Tensor, " _"]]


@torch.no_grad()
def stream(
    model: LanguageModel,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    stop: int | Iterable[int] | Tensor | None = None,
    draft: Draft | None = None,
) -> Iterator[Int[Tensor, " N"]]:
    """Yield the next token of every prompt; see LanguageModel.generate.

    It ends when every row has come to a token of ``stop``. What a row gets
    after its own has no meaning. A GPU is asked about that once in 16 tokens,
    so that the host need not wait for each.

    Raises:
        ValueError: logits are not finite (-inf is allowed, and bans a token).
            On a CPU it is raised before their token is yielded, on a GPU up
            to 16 tokens later.
    """
    V = model.config.vocab_size
    prompts = as_prompts(prompts, V)
    check_sampling(max_new_tokens, temperature, top_p, generator)
    stop_tokens = as_stops(stop, V)
    # A pass that checks drafts reads beyond the last token.
    logits, states = prefill(model, prompts, max_new_tokens + MAX_STEP_TOKENS)
    N, device = len(prompts), logits.device
    sampling = _sampling_of(N, temperature, top_p, generator, device)
    if draft is not None and max_new_tokens:
        from fastweights.models.speculation import (
            Continuation,
            Reader,
            make_proposer,
            speculate,
        )

        continuations = [
            Continuation(x.tolist(), len(x), max_new_tokens, stop_tokens)
            for x in prompts
        ]
        propose = make_proposer(draft, model, continuations, sampling)
        reader = Reader(model, states, continuations, sampling)
        yield from speculate(reader, logits, propose)
        return
    decoding = Decoding(
        model,
        states,
        logits,
        sampling=sampling,
        stop_tokens=stop_tokens,
        max_steps=max_new_tokens,
    )
    for step in range(max_new_tokens):
        decoding.step()
        checks = device.type == "cpu" or (step + 1) % STEPS_PER_CHECK == 0
        if checks and decoding.not_finite.any():
            break
        yield decoding.token.clone()  # whoever gets it may change it
        if stop_tokens and checks and decoding.done.all():
            return
    if decoding.not_finite.any():
        raise ValueError(NOT_FINITE)


def _sampling_of(
    N: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator | None,
    device: torch.device,
) -> Sampling:
    """The Sampling of rows that differ only in seeds, which are drawn."""
    seed = torch.empty(N, dtype=torch.int64, device=device)
    if temperature > 0:
        seed_device = device if generator is None else generator.device
        seed = torch.randint(
            2**63 - 1, (N,), generator=generator, device=seed_device
        ).to(device)
    return Sampling(
        torch.full((N,), temperature, dtype=torch.float64, device=device),
        torch.full((N,), top_p, device=device),
        seed,
        torch.zeros(N, dtype=torch.int64, device=device),
        greedy=temperature == 0,
        whole_distribution=top_p == 1,
    )


def as_prompts(prompts: Prompts, vocab_size: int) -> list[Int[Tensor, " _"]]:
    """One tensor per prompt."""
    if isinstance(prompts, Tensor) and prompts.dim() < 2:
        prompts = [prompts]
    if not isinstance(prompts, Iterable):
        raise TypeError(
            f"prompts: got {type(prompts).__name__}, need a tensor or a list "
            "of tensors"
        )
    prompts = list(prompts)
    if not prompts:
        raise ValueError("prompts: got none, need one or more")
    return [as_prompt("prompts", x, vocab_size) for x in prompts]


def as_prompt(name: str, x: Tensor, vocab_size: int) -> Int[Tensor, " T"]:
    """A prompt as int64; raises unless it has one token [T] or more."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, need tensors [T]")
    if x.dim() != 1 or not len(x):
        raise ValueError(
            f"{name}: got shape {list(x.shape)}, need one token or more, [T]"
        )
    if x.is_floating_point() or x.dtype == torch.bool:
        raise TypeError(f"{name}: got {x.dtype}, need integers")
    if is_readable(x):
        check_ids(name, [int(x.min()), int(x.max())], vocab_size)
    return x.to(torch.int64)


def as_stops(
    stop: int | Iterable[int] | Tensor | None, vocab_size: int
) -> list[int]:
    """The tokens at which a row ends, of whatever type they were given in."""
    if stop is None:
        return []
    plain: Any = getattr(stop, "tolist", lambda: stop)()  # PyTorch, numpy
    several = isinstance(plain, Iterable) and not isinstance(plain, str)
    tokens = list(plain) if several else [plain]
    for token in tokens:
        check_integers(stop=token)
    check_ids("stop", tokens, vocab_size)
    return tokens


def check_ids(name: str, tokens: list[int], vocab_size: int) -> None:
    """Raise unless they are in the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{name}: got {token}, need tokens of the vocabulary, 0 to "
                f"{vocab_size - 1}"
            )


def check_sampling(
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator | None,
) -> None:
    """Raise for a number of tokens or a way of drawing that cannot be."""
    check_integers(max_new_tokens=max_new_tokens)
    if max_new_tokens < 0:
        raise ValueError(
            f"max_new_tokens: got {max_new_tokens}, need 0 or more"
        )
    check_numbers(">= 0", temperature=temperature)
    check_numbers("> 0", top_p=top_p)
    if top_p > 1:
        raise ValueError(f"top_p: got {top_p}, need 0 < top_p <= 1")
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(
            f"generator: got {type(generator).__name__}, need a "
            "torch.Generator or None"
        )
