"""Where in a text the heads of a trained model forget.

    fastweights bench gates --json h200_gates.json

trains chapter 10's Gated DeltaNet
(``fastweights_lab.experiments.comparison.LARGE``, seed 0) and notes, along a
passage of held-out text, how often each byte halves what a head holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from fastweights_lab.bench.timing import Row
from fastweights_lab.bench.trained import BASE, trained_model
from fastweights_lab.experiments.learned_gates import recurrence_inputs
from fastweights_lab.text import corpus

VARIANT = "gated delta"
END, LENGTH = 18_766, 120
"""Of the passage, in tokens of the held-out text."""


def rows() -> Iterator[Row]:
    """The passage and the model's score, then a row per head."""
    run = trained_model(VARIANT, BASE)
    T = run.settings.length
    starts = torch.tensor([END - T])  # as much before it as a window has
    tokens = corpus.windows(run.held_out, T, starts).tokens
    yield {
        "variant": VARIANT,
        "bits per byte": run.evaluate()["bits per byte"],
        "text": bytes(tokens[0, -LENGTH:].tolist()).decode(),
    }
    with run.autocast():
        layers = [*recurrence_inputs(run.model, tokens)]
    for place, inputs in layers:
        halvings = inputs["g"][0, -LENGTH:].double() / -math.log(2)
        for head, of_head in enumerate(halvings.T.tolist()):
            yield {
                "layer": place,
                "head": head,
                "halvings": [round(x, 3) for x in of_head],
            }
