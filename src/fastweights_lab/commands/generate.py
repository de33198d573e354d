"""Let a saved model write: ``fastweights generate FOLDER --prompt TEXT``.

    fastweights generate run --prompt 'def ' --temperature 0
    head -c 500 setup.py | fastweights generate run

The folder is one of ``fastweights train``, or one to which
``LanguageModel.save`` wrote; with a ``tokenizer.json`` beside the model its
tokens are that file's, else bytes. The prompt is the first text of a
document. What follows it is written as it comes, up to ``--stop``, to the
token that begins another document, or to ``--max-new-tokens``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from fastweights.models import load
from fastweights.models.streaming import stream
from fastweights_lab.commands.train import TOKENIZER
from fastweights_lab.text import corpus
from fastweights_lab.text.training import chosen_device

UNKNOWN = "\ufffd"  # what bytes that are no text are decoded to


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder, the prompt, and how it is continued."""
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="folder of the model")
    add(
        "--prompt",
        metavar="TEXT",
        help="text to continue; without it standard input",
    )
    add(
        "--max-new-tokens",
        type=int,
        default=200,
        metavar="N",
        help="tokens to write, at most (default: 200)",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        help="number that divides logits before a token is drawn; 0 takes "
        "the likeliest token (default: 0.8)",
    )
    add(
        "--top-p",
        type=float,
        default=0.95,
        help="probability that the likeliest tokens need together, of which "
        "one is drawn (default: 0.95)",
    )
    add(
        "--stop",
        metavar="TEXT",
        help="text at which the answer ends, without it",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the draws (default: 0)",
    )
    add(
        "--device",
        default="auto",
        help="device: cpu, cuda, ..; auto is cuda if it is there",
    )


def run(args: argparse.Namespace) -> int:
    """Write what a model makes of the prompt: 0, or 130 for Ctrl-C.

    Raises:
        FileNotFoundError: there is no model in the folder.
        ValueError: an option does not fit, or model and tokenizer.
    """
    if args.stop == "":
        raise ValueError("stop: got '', need some text")
    device = chosen_device(args.device)
    model = load(args.folder, device=device)
    tokenizer = tokenizer_of(args.folder)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"folder: got a model of {model.config.vocab_size} tokens, need "
            f"the {tokenizer.vocab_size} of its tokenizer or more"
        )
    prompt = args.prompt
    text = sys.stdin.buffer.read() if prompt is None else os.fsencode(prompt)
    start = torch.tensor([tokenizer.separator])
    tokens = stream(
        model,
        torch.cat([start, tokenizer.encode(text)]),
        args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        generator=torch.Generator(device).manual_seed(args.seed),
        stop=tokenizer.separator,
    )
    found = pieces(tokenizer, (int(token) for token in tokens))
    status = 0
    try:
        for piece in found if args.stop is None else until(args.stop, found):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        status = 130
    print()
    return status


def tokenizer_of(folder: Path) -> corpus.Tokenizer:
    """The tokenizer in a model's folder; bytes if there is none."""
    file = folder / TOKENIZER
    return (
        corpus.FileTokenizer(file) if file.exists() else corpus.ByteTokenizer()
    )


def pieces(
    tokenizer: corpus.Tokenizer, tokens: Iterable[int]
) -> Iterator[str]:
    """The text of tokens as it comes, each character once it is whole.

    A token's text can depend on the one before: both are decoded.
    """
    kept: list[int] = []  # those of the last piece, then those to come
    old = 0

    def decode(some: list[int]) -> str:
        return tokenizer.decode(torch.tensor(some, dtype=torch.int64))

    for token in tokens:
        kept.append(token)
        before, both = decode(kept[:old]), decode(kept)
        if len(both) > len(before) and not both.endswith(UNKNOWN):
            yield both[len(before) :]
            kept, old = kept[old:], len(kept) - old
    yield decode(kept)[len(decode(kept[:old])) :]


def until(stop: str, pieces: Iterable[str]) -> Iterator[str]:
    """The text before ``stop``, which may begin in one piece of many."""
    held = ""
    for piece in pieces:
        text, found, _ = (held + piece).partition(stop)
        if found:
            yield text
            return
        sure = max(0, len(text) - len(stop) + 1)
        yield text[:sure]
        held = text[sure:]
    yield held
