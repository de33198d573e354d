"""What training makes of a recurrence: its gates, write strengths and keys.

    run = Training(comparison.settings_of("gated delta", 0, comparison.SMALL))
    measure_gates(run.model, tokens)[0]["strength"]

are quantiles of the first layer's write strengths, a list per head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from fastweights.layers import LinearRecurrence
from fastweights.layers.common.gates import write_strength
from fastweights.models import LanguageModel

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
LAGS = (1, 4, 16, 64, 256, 1024)

ONE_PRODUCT = 160
"""Halvings per chunk up to which a kernel takes one product.

The bound of fp32 and bf16.
"""


@torch.no_grad()
def measure_gates(
    model: LanguageModel, tokens: Int[Tensor, "B T"], chunk: int = 64
) -> list[dict[str, Any]]:
    """Measure what each recurrence of a model does with texts, per head.

    Args:
        model: its layers of another kind than
            :class:`~fastweights.layers.LinearRecurrence` are passed over.
        tokens: texts of at least two tokens.
        chunk: tokens over which decays are added up, T if that is less; the
            rest of a text that does not fill one is left out.

    Returns:
        One dict per recurrence, with its place ``layer`` in the model and,
        for each head in turn,

        * ``cosine``: of the keys of two tokens of one text, on average;
        * ``directions``: one over the mean square of that cosine, which is
          K for keys in random directions;
        * ``strength``: :data:`QUANTILES` of the write strengths, over
          tokens;
        * ``halvings``: quantiles of -g / ln 2, over tokens and channels;
        * ``kept``: for each of :data:`LAGS` below T, the share of tokens and
          channels whose gates have, that many tokens later, left at least
          half of what was held;
        * ``chunk``: quantiles of how often a whole chunk halves what a head
          or channel holds, and ``beyond``, the share that is more than
          :data:`ONE_PRODUCT`.

        ``strength`` is None without a write strength, the last four without
        a gate.
    """
    return [
        {"layer": place, **_of_layer(inputs, chunk)}
        for place, inputs in recurrence_inputs(model, tokens)
    ]


@torch.no_grad()
def recurrence_inputs(
    model: LanguageModel, tokens: Int[Tensor, "B T"]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """What each recurrence of a model is given, and its place in the model.

    q, k, v [B, T, H, D], g [B, T, H] or [B, T, H, K] and beta [B, T, H]:
    the last two where the layer has them.
    """
    layers = [
        (place, block.layer)
        for place, block in enumerate(model.blocks)
        if isinstance(block.layer, LinearRecurrence)
    ]
    seen: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        for _, layer in layers
    ]
    try:
        model.hidden(
            tokens.to(model.embedding.weight.device), return_states=False
        )
    finally:
        for hook in hooks:
            hook.remove()
    for (place, layer), x in zip(layers, seen, strict=True):
        q, k, v, _ = layer.convolution(layer.qkv_proj(x))
        inputs = {"q": q, "k": k, "v": v}
        if (g := layer.log_decay(x)) is not None:
            inputs["g"] = g
        if layer.b_proj is not None:
            logits = layer.b_proj(x)
            inputs["beta"] = write_strength(logits, layer.allow_neg_eigval)
        yield place, inputs


def _of_layer(inputs: dict[str, Tensor], chunk: int) -> dict[str, Any]:
    k = F.normalize(inputs["k"].double(), dim=-1)
    T = k.shape[1]
    chunk = min(chunk, T)
    moments = torch.einsum("bthk,bthl->bhkl", k, k)
    cosines, squares = (  # of all pairs but a token with itself
        ((of - T) / (T * (T - 1))).mean(0).tolist()
        for of in (k.sum(1).square().sum(-1), moments.square().sum((2, 3)))
    )
    strength = halvings = kept = chunks = beyond = None
    if "beta" in inputs:
        strength = [_quantiles(of) for of in inputs["beta"].unbind(-1)]
    if "g" in inputs:
        g = inputs["g"].double()
        bits = g.reshape(*g.shape[:3], -1) / -math.log(2)  # [B, T, H, n]
        halvings = [_quantiles(of) for of in bits.unbind(2)]
        total = bits.cumsum(1)
        by_lag = [
            _per_head(total[:, lag:] - total[:, :-lag] <= 1)
            for lag in LAGS
            if lag < T
        ]
        kept = [list(of) for of in zip(*by_lag, strict=True)]
        whole = bits[:, : T // chunk * chunk].unflatten(1, (-1, chunk)).sum(2)
        chunks = [_quantiles(of) for of in whole.unbind(2)]
        beyond = _per_head(whole > ONE_PRODUCT)
    return {
        "cosine": [_digits(of) for of in cosines],
        "directions": [_digits(1 / of) for of in squares],
        "strength": strength,
        "halvings": halvings,
        "kept": kept,
        "chunk": chunks,
        "beyond": beyond,
    }


def _per_head(true: Bool[Tensor, "B T H n"]) -> list[float]:
    """The share that is true."""
    return [_digits(of) for of in true.double().mean((0, 1, 3)).tolist()]


def _quantiles(x: Tensor) -> list[float]:
    ordered = x.flatten().double().sort().values
    at = [round(q * (len(ordered) - 1)) for q in QUANTILES]
    return [_digits(of) for of in ordered[at].tolist()]


def _digits(x: float) -> float:
    return float(f"{x:.4g}")
