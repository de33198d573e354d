"""The experiments, as data: what is compared, on which tasks."""

from __future__ import annotations

import functools
from typing import Any

from fastweights_lab.experiments.grid import Grid, Variant
from fastweights_lab.tasks import (
    AssociativeRecall,
    Calls,
    Needles,
    OverwritingRecall,
    Reassignment,
    RepeatedRecall,
    Scope,
    Sections,
    StateTracking,
)


def layers(kind: str, **options: Any) -> Variant:
    """Layers of one kind."""
    return Variant((kind,), {kind: options})


recurrence = functools.partial(layers, "recurrence")


def family(**gate: Any) -> dict[str, Variant]:
    """All that are compared; ``gate`` is how those with a decay start."""
    return {
        "linear": recurrence(rule="additive", decay=None),
        "decay": recurrence(rule="additive", **gate),
        "delta": recurrence(decay=None),
        "gated delta": recurrence(**gate),
        "GLA": recurrence(rule="additive", decay="channel", **gate),
        "KDA": recurrence(decay="channel", **gate),
        "Gated DeltaNet-2": layers("gated_deltanet2", **gate),
        "softmax": layers("convolved_softmax"),
        "softmax, rotary": layers("convolved_softmax", rope_theta=1e4),
    }


FOUR = ("linear", "decay", "delta", "gated delta")

SLOW = {"A_range": (0.01, 0.5)}
"""Half-lives from 14 to 70,000 tokens."""

PUBLISHED = {
    "decay, published gate": recurrence(rule="additive"),
    "gated delta, published gate": recurrence(),
}
"""Half-lives from 0.4 to 700 tokens: one draw per head, and few heads."""

FAMILY = {**family(**SLOW), **PUBLISHED}


MODELS = {name: FAMILY[name] for name in (*FOUR, "KDA", "Gated DeltaNet-2")}
MODELS["softmax"] = FAMILY["softmax, rotary"]
MODELS["hybrid"] = Variant(
    ("recurrence", "convolved_softmax"),
    {"recurrence": SLOW, "convolved_softmax": {"rope_theta": 1e4}},
)
"""Chapter 10's, in two layers: the hybrid has gated delta, then softmax."""


TWO_LAYERS = {
    "num_layers": 2,
    "steps": 1200,
    "rows": 32,
    "weight_decay": 0.0,
}

DEEP = {
    "delta": recurrence(decay=None),
    "delta, TTT's convolution": layers(
        "convolved_recurrence", decay=None, conv_size=None
    ),
    "gated delta": recurrence(**SLOW),
    "TTT-Linear, 16": layers("convolved_ttt_linear", mini_batch=16),
    "TTT-MLP, 16": layers("convolved_ttt_mlp", mini_batch=16),
    "Titans, 16": layers("titans", chunk_size=16),
    "LaCT, 16": layers("convolved_lact", num_heads=4, chunk_size=16),
    "MesaNet": layers("mesanet"),
}
"""Chapter 12's layers: mini-batches or chunks of 16 tokens. Those that have
no convolution of their own get one in front, and so does delta once, without
its own."""

SHORT = {
    "TTT-Linear, 4": layers("convolved_ttt_linear", mini_batch=4),
    "TTT-MLP, 4": layers("convolved_ttt_mlp", mini_batch=4),
}
"""And of 4, which take a step more often, and longer to train."""

PATIENT = {"A_range": (3.99, 4.01), "dt_range": (0.00199, 0.00201)}
"""A half-life of 87 tokens, and A so large that one token can clear all."""


RESET = {
    **{name: MODELS[name] for name in MODELS if name != "Gated DeltaNet-2"},
    **{
        f"{name}, patient": family(**PATIENT)[name]
        for name in ("decay", "gated delta", "KDA")
    },
}
"""Chapter 10's first seven, and its gates with chapter 11's start."""


def recalls(task: Any, *pairs: int, **sizes: Any) -> dict[str, Any]:
    """A grid's tasks: the same numbers of pairs for training and testing."""
    tests = {f"{n} pairs": task(pairs=n, **sizes) for n in pairs}
    return {"train": tuple(tests.values()), "tests": tests}


BARE = {"conv_size": None, "activation": False}
"""No convolution, which would mix neighbours, and keys of any direction: a
swap is a reflection along a difference, and SiLU leaves keys few of those."""

TWO = {"decay": None, "allow_neg_eigval": True, "conv_size": None}
REFLECTIONS = {
    "beta up to 2": recurrence(**TWO, activation=False),
    "beta up to 1": recurrence(decay=None, **BARE),
    "decay": recurrence(rule="additive", **BARE),
    "beta up to 2, SiLU": recurrence(**TWO, activation=True),
}


def tracking(
    group: str, *elements: int, trained: int = 32, **sizes: Any
) -> dict[str, Any]:
    """A grid's tasks: trained at one length, tested at several."""
    return {
        "train": (StateTracking(group, elements=trained, **sizes),),
        "tests": {
            f"{n} elements": StateTracking(group, elements=n, **sizes)
            for n in elements
        },
        "variants": REFLECTIONS,
    }


TRACKS = {"mlp_ratio": 2.0, "weight_decay": 0.0}
TRACKERS = {
    **REFLECTIONS,
    "linear": recurrence(rule="additive", decay=None, **BARE),
    "gated delta": recurrence(allow_neg_eigval=True, **SLOW, **BARE),
    "GLA": recurrence(rule="additive", decay="channel", **SLOW, **BARE),
    "KDA": recurrence(decay="channel", allow_neg_eigval=True, **SLOW, **BARE),
    "softmax": layers("softmax", rope_theta=None),
    "softmax, rotary": layers("softmax", rope_theta=1e4),
}
"""All kinds of layer; of those that correct, two more with beta up to two."""

LENGTHS = (32, 64, 128, 256)
LOW = (1e-3, 3e-3, 1e-2)
LOWER = (3e-4, *LOW)


def live(*only: str, steps: int = 0, lr: float = 3e-3) -> dict[str, Any]:
    """What a chapter runs: one rate and seed, some variants, some steps."""
    found: dict[str, Any] = {"lrs": (lr,), "seeds": (0,)}
    if only:
        found["only"] = only
    if steps:
        found["settings"] = {"steps": steps}
    return found


EXPERIMENTS: dict[str, Grid] = {
    "recall": Grid(
        "Which value belongs to a key? (zoology's MQAR)",
        **recalls(AssociativeRecall, 4, 8, 16),
        variants=FAMILY,
        settings={"steps": 1500},
        sizes=((2, 16),),
        quick=live(*FOUR, steps=600),
    ),
    "recall-sizes": Grid(
        "How much is recalled per byte of state?",
        **recalls(AssociativeRecall, 8, 16, 32, length=128),
        variants=FAMILY,
        settings={"steps": 3000},
        sizes=((2, 8), (2, 16), (2, 32)),
        lrs=(3e-3, 1e-2, 3e-2),
        quick={**live(*FOUR), "sizes": ((2, 8), (2, 16))},
    ),
    "overwriting": Grid(
        "Which of a key's values came last?",
        **recalls(OverwritingRecall, 4, 8),
        variants=FAMILY,
        quick=live(*FOUR, steps=600, lr=1e-2),
    ),
    "overwriting-deep": Grid(
        "And with weights that are a network?",
        **recalls(OverwritingRecall, 4, 8),
        variants={**DEEP, **SHORT},
        settings={"steps": 4000},
        lrs=LOW,
        quick=live("delta", "TTT-MLP, 4", "Titans, 16", "MesaNet", steps=600),
    ),
    "reading-once": Grid(
        "Which value belongs to a key, after one reading?",
        **recalls(RepeatedRecall, 8, 16, writes=1),
        variants=FAMILY,
        quick=live(*FOUR, steps=600),
    ),
    "reading-thrice": Grid(
        "Do three readings of the same pairs help?",
        **recalls(RepeatedRecall, 8, 16, writes=3),
        variants=FAMILY,
        quick=live(*FOUR, steps=600),
    ),
    "needles": Grid(
        "What is kept through 8 times the text trained on?",
        train=tuple(Needles(level=level) for level in (1, 2, 3)),
        tests={
            f"level {level}, {n} segments": Needles(level=level, segments=n)
            for level in (1, 2, 3)
            for n in (8, 16, 32, 64)
        },
        variants=FAMILY,
        settings={"steps": 1800, "rows": 32, "test_rows": 128},
        sizes=((2, 16),),
        quick=live(*FOUR, steps=800),
    ),
    "needles-deep": Grid(
        "And what does a network keep through 4 times the text?",
        train=(Needles(level=2),),
        tests={
            f"{n} segments": Needles(level=2, segments=n) for n in (8, 16, 32)
        },
        variants=DEEP,
        lrs=LOW,
        settings={"steps": 4000, "rows": 32, "test_rows": 128},
        quick=live("delta", "TTT-Linear, 16", "MesaNet", steps=600),
    ),
    "reassigned": Grid(
        "Which value has a variable now, in the text of a program?",
        train=tuple(
            Reassignment(variables=n, questions=3 * n // 2) for n in (2, 4, 8)
        ),
        tests={
            f"{n} questions": Reassignment(questions=n)
            for n in (12, 24, 48, 96)
        },
        variants=MODELS,
        settings=TWO_LAYERS,
        sizes=((2, 16),),
        lrs=(3e-4, 1e-3, 3e-3, 1e-2, 2e-2),
        seeds=(0, 1, 2, 3, 4),
        quick=live("decay", "gated delta", steps=200),
    ),
    "calls": Grid(
        "And if nothing outlives a call of the program?",
        train=tuple(
            Calls(variables, questions, calls)
            for variables, questions, calls in (
                (2, 4, 4),
                (4, 12, 3),
                (8, 36, 2),
            )
        ),
        tests={
            f"{n} calls of {q}": Calls(questions=q, calls=n)
            for q, n in ((36, 2), (36, 8), (96, 4))
        },
        variants=RESET,
        settings={**TWO_LAYERS, "steps": 2400},
        sizes=((2, 16),),
        lrs=(1e-3, 3e-3, 1e-2, 2e-2),
        seeds=(0, 1, 2, 3, 4),
        quick=live("decay", "gated delta", steps=200),
    ),
    "scope": Grid(
        "Is a reset obeyed?",
        train=(Scope(),),
        tests={f"{n} segments": Scope(segments=n) for n in (6, 24)},
        variants={**family(**PATIENT), **PUBLISHED},
        settings={"steps": 1200, "rows": 32},
        quick=live(*FOUR, steps=800),
    ),
    "sections": Grid(
        "Can one layer replace a value, and let go of a section?",
        train=(Sections(),),
        tests={f"{n} segments": Sections(segments=n) for n in (6, 24)},
        variants={**family(**PATIENT), **PUBLISHED},
        settings={"steps": 1600, "rows": 32},
        lrs=(3e-3, 6e-3, 1e-2, 2e-2),
        quick=live(*FOUR[1:], lr=6e-3),
    ),
    "parity": Grid(
        "Is the number of ones even?",
        **tracking("Z2", *LENGTHS),
        settings={**TRACKS, "steps": 400, "rows": 128},
        sizes=((1, 8),),
        lrs=LOW,
        quick=live(),
    ),
    "swaps-of-5": Grid(
        "Which order are five things in, after swaps?",
        **tracking("S5", *LENGTHS, inputs="swaps") | {"variants": TRACKERS},
        settings={**TRACKS, "steps": 1200},
        lrs=LOW,
        quick=live("beta up to 2", "beta up to 1", "beta up to 2, SiLU"),
    ),
    "orders-of-3": Grid(
        "Which order are three things in, at one step per reordering?",
        **tracking("S3", 16, *LENGTHS, trained=16),
        settings={**TRACKS, "steps": 1600},
        lrs=LOWER,
        quick=live("beta up to 2"),
    ),
    "orders-of-3-by-two": Grid(
        "And at two steps per reordering?",
        **tracking("S3", 16, *LENGTHS, trained=16, parts=2),
        settings={**TRACKS, "steps": 1600},
        lrs=LOWER,
        quick=live("beta up to 2", lr=2e-3),
    ),
}
"""By name: ``fastweights experiments NAME``."""
