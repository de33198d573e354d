"""Needles in real text: a line planted in source code, asked about later.

    .. source ..
    tqvop = 4711
    .. so many bytes of source ..
    tqvop = 4711

How well does a model of bytes predict the second 4711? Held-out text is the
haystack, and the model was never trained on such lines. Beside it stands
what it predicts if the first line has another number: all it can know then
is that these are digits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from fastweights.models import LanguageModel
from fastweights_lab.text import corpus

NAME, DIGITS = 5, 4
BEFORE = 64
"""Bytes of text before the planted line."""


def lines(
    names: Int[Tensor, "B 5"], numbers: Int[Tensor, "B 4"]
) -> Int[Tensor, "B 13"]:
    r"""The bytes of ``\nname = 4711``, from letters and digits as numbers."""
    rows = len(names)
    newline, equals = (
        torch.tensor([*text.encode()]).expand(rows, -1)
        for text in ("\n", " = ")
    )
    return torch.cat(
        [newline, names + ord("a"), equals, numbers + ord("0")], 1
    )


def plant_lines(
    stream: corpus.Stream, distance: int, rows: int, seed: int = 0
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Texts with a needle, and the same texts with another number in it.

    Between the ends of the two lines stand ``distance`` bytes of the stream
    and a line's own 13; both texts end with the number that is asked for.

    Args:
        stream: of bytes.
        distance: at least 1.
        rows: texts.
        seed: of the places in the stream, the names and the numbers.

    Raises:
        ValueError: the stream has too few tokens.
    """
    need = BEFORE + distance
    last = len(stream.tokens) - need
    if last < 1:
        raise ValueError(
            f"distance: got {distance}, need less than "
            f"{len(stream.tokens) - BEFORE} in a stream of "
            f"{len(stream.tokens)} tokens"
        )
    draws = corpus.generator(seed, distance)
    starts = torch.randint(last, (rows,), generator=draws)
    text = stream.tokens[starts[:, None] + torch.arange(need)].to(torch.int64)
    names = torch.randint(26, (rows, NAME), generator=draws)
    number = torch.randint(10, (rows, DIGITS), generator=draws)
    other = (number + torch.randint(1, 10, number.shape, generator=draws)) % 10
    asked = lines(names, number)
    newline = asked[:, :1]
    before, after = text[:, :BEFORE], text[:, BEFORE + 1 :]
    with_it, without = (
        torch.cat([before, lines(names, told), newline, after, asked], 1)
        for told in (number, other)
    )
    return with_it, without


@torch.no_grad()
def measure_recall(
    model: LanguageModel,
    stream: corpus.Stream,
    distance: int,
    rows: int = 64,
    *,
    at_once: int = 8,
) -> dict[str, Any]:
    """Measure what a model of bytes knows of a number that far back.

    Returns:
        distance; ``bits`` per digit, ``bits without`` the number, and
        ``right``, the share of texts whose four digits are all likeliest.
        A digit that nothing is known of takes log2(10) = 3.32 bits.
    """
    device = model.embedding.weight.device
    found = []
    for texts in plant_lines(stream, distance, rows):
        losses, hits = [], []
        for some in texts.split(at_once):
            x = model.hidden(some[:, :-1].to(device), return_states=False)[0]
            logits = model.logits(x[:, -DIGITS:]).float()
            wanted = some[:, -DIGITS:].to(device)
            loss = F.cross_entropy(
                logits.flatten(0, 1), wanted.flatten(), reduction="none"
            )
            losses.append(loss / math.log(2))
            hits.append((logits.argmax(-1) == wanted).all(1))
        pair = torch.cat(losses).mean(), torch.cat(hits).float().mean()
        found.append([x.item() for x in pair])
    (bits, right), (without, _) = found
    return {
        "distance": distance,
        "bits": bits,
        "bits without": without,
        "right": right,
    }
