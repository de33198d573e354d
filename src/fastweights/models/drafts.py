"""What may follow a text: drafts, which a model then checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastweights.models.config import ModelConfig
from fastweights.models.decoding import prefill
from fastweights.models.draws import Sampling
from fastweights.models.model import LanguageModel
from fastweights.models.sampling import Draft, check_ids
from fastweights.models.speculation import DRAFTS, TOKENS, Reader, Row, Text


def proposals(
    draft: Draft, model: LanguageModel, rows: list[Row], sampling: Sampling
) -> Callable[[], list[Text]]:
    """A function that drafts up to DRAFTS tokens behind each row's text."""
    V = model.config.vocabulary
    if isinstance(getattr(draft, "config", None), ModelConfig):
        small: Any = draft
        if small.config.vocabulary != V:
            raise ValueError(
                f"draft: got a vocabulary of {small.config.vocabulary}, need "
                f"the model's, {V}"
            )
        if small.embedding.weight.device != sampling.seed.device:
            raise ValueError(
                f"draft: got device {small.embedding.weight.device}, need the "
                f"model's, {sampling.seed.device}"
            )
        prompts = [torch.tensor(row.text) for row in rows]
        _, states = prefill(small, prompts, rows[0].tokens + TOKENS)
        reader = Reader(small, states, rows, sampling)
        return lambda: drafts_of_model(reader)
    if draft != "lookup" and not callable(draft):
        raise ValueError(
            f'draft: got {draft!r}, need "lookup", a LanguageModel, a '
            "function or None"
        )
    each: list[Any] = [
        Lookup() if draft == "lookup" else lambda text: draft(text.copy())
        for _ in rows
    ]

    def propose() -> list[Text]:
        drafts: list[Text] = []
        for guess, row in zip(each, rows, strict=True):
            some = [] if row.done else guess(row.text)
            drafts.append([int(token) for token in some][:DRAFTS])
            check_ids("draft", drafts[-1], V)
        return drafts

    return propose


def drafts_of_model(reader: Reader) -> list[Text]:
    """What a second model draws, a pass for each draft."""
    drafts: list[Text] = [[] for _ in reader.rows]
    for _ in range(DRAFTS):
        draws = reader(drafts)()  # none of a row that is done
        for some, drawn in zip(drafts, draws, strict=True):
            some += [max(token, 0) for token in drawn[-1:]]
    return drafts


class Lookup:
    """What followed the last tokens where they stood in the text before.

    Of the last three tokens, else two, else one, where they stood last
    (prompt lookup, Saxena 2023). What reaches the end of the text goes on
    from its beginning, as if the text had a period.
    """

    def __init__(self) -> None:
        self.seen, self.after = 0, dict[tuple[int, ...], int]()

    def __call__(self, text: Text) -> Text:
        """Up to DRAFTS tokens; the text is the last call's and more."""
        for end in range(max(self.seen, 1), len(text)):
            for n in range(1, min(3, end) + 1):
                self.after[tuple(text[end - n : end])] = end
        self.seen = len(text)
        for n in (3, 2, 1):
            at = self.after.get(tuple(text[-n:]))
            if at is not None:
                period = len(text) - at
                return [text[at + j % period] for j in range(DRAFTS)]
        return []
