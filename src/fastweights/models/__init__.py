"""Decoder-only language models of the library's layers, from a config.

    from fastweights.models import LanguageModel, ModelConfig, load

    config = ModelConfig(
        vocab_size=257,
        dim=128,
        num_layers=4,
        pattern=3 * ("gated_deltanet",) + ("softmax",),
        num_heads=4,
    )
    model = LanguageModel(config)
    logits, states = model(tokens)              # tokens [B, T]
    loss = model.loss(tokens)                   # mean over next tokens
    new = model.generate([prompt], 100)[0]      # prompt [T]
    model.save("folder")
    model = load("folder")

A layer class of your own joins the table :data:`LAYERS` under a name:
``LAYERS["mine"] = MyLayer``, then ``pattern=("mine",)``. It is called as
``MyLayer(dim, ..., device=device, dtype=dtype)`` and has to go by
``y, state = layer(x, state=None, cu_seqlens=None)`` as those of
:mod:`fastweights.layers` do.

Of the modules ``config`` comes first, then ``model``, which it describes, and
``loss``. ``generate`` is in ``streaming``, a token of it in ``decoding``:
``sampling`` draws it, ``captured_step`` makes it one launch, ``speculation``
guesses several. ``pool`` has the states of requests that come and go,
``files`` a model on a disk, ``transformers`` and ``transformers_config`` one
in that package's form.
"""

from fastweights.models.config import LAYERS, ModelConfig
from fastweights.models.files import load
from fastweights.models.loss import (
    linear_cross_entropy,
    next_tokens,
    token_losses,
)
from fastweights.models.model import Block, LanguageModel, SwiGLU
from fastweights.models.pool import StatePool
from fastweights.models.transformers import from_transformers

__all__ = [
    "LAYERS",
    "Block",
    "LanguageModel",
    "ModelConfig",
    "StatePool",
    "SwiGLU",
    "from_transformers",
    "linear_cross_entropy",
    "load",
    "next_tokens",
    "token_losses",
]
