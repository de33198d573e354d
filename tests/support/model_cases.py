"""Tiny language models of every kind of layer."""

import torch

from fastweights.models import LAYERS, LanguageModel, ModelConfig

KINDS = sorted(  # without what experiments and tests have added
    kind
    for kind, layer in LAYERS.items()
    if layer.__module__.startswith("fastweights.layers")
)


HYBRID = ("gated_deltanet", "gla", "softmax")


def make_config(pattern=HYBRID, **changes):
    fields = {
        "vocab_size": 71,
        "dim": 32,
        "num_layers": max(2, len(pattern)),
        "num_heads": 2,
        "mlp_multiple": 32,
        "post_norm_types": ("gla",),
        "options": {
            "mamba2": {"state_size": 16},
            "lact": {"chunk_size": 8},
            "mesanet": {"solver_steps": 16},
        },
    }
    return ModelConfig(pattern=pattern, **fields | changes)


def make_model(pattern=HYBRID, seed=0, **changes):
    torch.manual_seed(seed)
    return LanguageModel(make_config(pattern, **changes))


def token_ids(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(71, shape, generator=generator)
