"""Models of transformers as this library's, and back.

OLMo-Hybrid and Qwen3.5's dense text model are blocks of Gated DeltaNet and of
softmax attention, as a :class:`LanguageModel` can be. Tables of names say
what is copied where, in either direction:

* what is one matrix here may be several there, one below the other;
* the rows of Qwen3.5's q_proj are q of the first head, then the gate of that
  head's output, then q of the second, and so on;
* Qwen3.5's norms multiply by 1 + weight, but for the one with a gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.models.config import ModelConfig
from fastweights.models.files import cpu_tensor
from fastweights.models.model import LanguageModel
from fastweights.models.transformers_config import (
    CLASSES,
    config_from_transformers,
    fields_for_transformers,
)

OUTER_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
BLOCK = {
    "norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_up_proj": "mlp.gate_proj mlp.up_proj",
}
DELTANET = BLOCK | {
    "layer.convolution.short_convolution": "linear_attn.conv1d",
    "layer.decay.A_log": "linear_attn.A_log",
    "layer.decay.dt_bias": "linear_attn.dt_bias",
}
ATTENTION = {
    "layer.qkv_proj": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "layer.q_norm": "self_attn.q_norm",
    "layer.k_norm": "self_attn.k_norm",
    "layer.o_proj": "self_attn.o_proj",
}
BLOCK_NAMES = {
    "olmo_hybrid": {
        "gated_deltanet": DELTANET
        | {
            "layer.qkv_proj": "linear_attn.q_proj linear_attn.k_proj "
            "linear_attn.v_proj",
            "layer.ab_proj": "linear_attn.a_proj linear_attn.b_proj",
            "layer.gate_proj": "linear_attn.g_proj",
            "layer.norm": "linear_attn.o_norm",
            "layer.o_proj": "linear_attn.o_proj",
        },
        "softmax": BLOCK
        | ATTENTION
        | {
            "norm": "post_attention_layernorm",
            "mlp_norm": "post_feedforward_layernorm",
        },
    },
    "qwen3_5_text": {
        "gated_deltanet": DELTANET
        | {
            "layer.qkv_proj": "linear_attn.in_proj_qkv",
            "layer.ab_proj": "linear_attn.in_proj_a linear_attn.in_proj_b",
            "layer.gate_proj": "linear_attn.in_proj_z",
            "layer.norm": "linear_attn.norm",
            "layer.o_proj": "linear_attn.out_proj",
        },
        "softmax": BLOCK | ATTENTION | {"layer.gate_proj": "self_attn.gate"},
    },
}
"""The names there of each parameter of a block (gate: half of q_proj)."""


def from_transformers(model: Any) -> LanguageModel:
    """Make a LanguageModel of transformers' OLMo-Hybrid or Qwen3.5.

    Qwen3.5 is the dense text model, and the text model alone where a folder
    has one for images too. Its norms multiply by 1 + w, those here by w: in
    bf16 the sum is rounded, by 0.4 % at most; a model that transformers has
    loaded in fp32 loses nothing. What ends a text is ``stop`` of
    :meth:`LanguageModel.generate`; a tokenizer stays transformers'.

    Args:
        model: an OlmoHybridForCausalLM or a Qwen3_5ForCausalLM, which is
            copied; or the folder of one, or its name on the hub.

    Returns:
        the model, for training as for inference, in the dtype and on the
        device of that one; a folder's in its files' dtype, on the CPU.

    Raises:
        ImportError: transformers is not installed.
        TypeError: ``model`` is none of these.
        ValueError: a field of its config has no counterpart here (other
            model types, experts, biases, scaled positions, quantisation); the
            message names it. Or a tensor is missing, or there is one more.
    """
    from transformers import PreTrainedModel

    if isinstance(model, str | Path):
        model = read_folder(model)
    elif not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: got {type(model).__name__}, need a model of "
            "transformers, or the folder of one"
        )
    config = config_from_transformers(model.config)
    name = model.config.model_type
    if type(model).__name__ != CLASSES[name]:
        raise ValueError(
            f"model: got {type(model).__name__}, need {CLASSES[name]}"
        )
    like = model.get_input_embeddings().weight
    copy = LanguageModel(config, device=like.device, dtype=like.dtype)
    theirs = {key: cpu_tensor(key, x) for key, x in model.state_dict().items()}
    for x, parts, centred in pairs(config, name, copy.state_dict(), theirs):
        whole = torch.cat([part.flatten() for part in parts]).view_as(x)
        x.copy_(whole.double() + 1 if centred else whole)
    return copy


def to_transformers(model: LanguageModel) -> Any:
    """Copy a model to transformers; see LanguageModel.to_transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, fields = fields_for_transformers(model.config)
    config, like = AutoConfig.for_model(name, **fields), model.embedding.weight
    copy = AutoModelForCausalLM.from_config(config, dtype=like.dtype)
    for p in copy.parameters():  # some are fp32 in any model
        p.data = p.data.to(like.dtype)
    ours = {key: cpu_tensor(key, x) for key, x in model.state_dict().items()}
    theirs = copy.state_dict()
    for x, parts, centred in pairs(model.config, name, ours, theirs):
        x = x.double() - 1 if centred else x
        sizes = [part.numel() for part in parts]
        for part, values in zip(parts, x.flatten().split(sizes), strict=True):
            part.copy_(values.view_as(part))
    return copy.to(like.device)


def pairs(
    config: ModelConfig,
    name: str,
    ours: dict[str, Tensor],
    theirs: dict[str, Tensor],
) -> Iterator[tuple[Tensor, list[Tensor], bool]]:
    """Each parameter here, and views of what it is made of there.

    The third is whether the numbers there are 1 less.

    Raises:
        ValueError: there is a tensor too few or too many.
    """
    theirs, qwen = dict(theirs), name == "qwen3_5_text"
    if config.tie_embeddings:
        theirs.pop("lm_head.weight", None)
    for q_proj in [x for x in theirs if qwen and x.endswith("q_proj.weight")]:
        K = len(theirs[q_proj.replace("q_proj", "q_norm")])
        both = theirs[q_proj].unflatten(0, (-1, 2, K)).unbind(1)
        theirs[q_proj], theirs[q_proj.replace("q_proj", "gate")] = both
    for key, x in ours.items():
        stem = key.removesuffix(".weight")
        if stem in OUTER_NAMES:
            parts = [OUTER_NAMES[stem]]
        else:
            _, i, stem = stem.split(".", 2)
            names = BLOCK_NAMES[name][config.layer_types[int(i)]]
            names_there = names.get(stem, stem).split()
            parts = [f"model.layers.{i}.{part}" for part in names_there]
        weight = ".weight" if key.endswith(".weight") else ""
        keys = [part + weight for part in parts]
        if lacks := [part for part in keys if part not in theirs]:
            raise ValueError(f"model: got nothing for {key}, need {lacks[0]}")
        centred = qwen and "norm" in keys[0] and "linear_attn" not in keys[0]
        yield x, [theirs.pop(part) for part in keys], centred
    if theirs:
        raise ValueError(
            f"model: got {next(iter(theirs))}, for which there is no place"
        )


def read_folder(folder: str | Path) -> Any:
    """A folder's model of transformers, if its config has a counterpart."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    config_from_transformers(config)
    model_class = getattr(transformers, CLASSES[config.model_type])
    model, loading = model_class.from_pretrained(
        folder, config=config, dtype="auto", output_loading_info=True
    )
    if loading["missing_keys"]:
        lacks = sorted(loading["missing_keys"])[0]
        raise ValueError(f"model: got no {lacks} in {folder}, need it")
    return model
