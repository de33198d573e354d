"""A ModelConfig as the config of a model of transformers, and back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fastweights.models.config import LAYERS, ModelConfig

CLASSES = {
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
"""The model types of transformers, and their classes with logits."""

LAYER_TYPES = {
    "gated_deltanet": "linear_attention",
    "softmax": "full_attention",
}
"""Types of layer here, and in ``layer_types`` of a config there."""

FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
OPTIONS = {
    "gated_deltanet": {
        "num_heads": "linear_num_key_heads",
        "num_v_heads": "linear_num_value_heads",
        "head_dim": "linear_key_head_dim",
        "conv_size": "linear_conv_kernel_dim",
        "norm_eps": "rms_norm_eps",
    },
    "softmax": {
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "norm_eps": "rms_norm_eps",
    },
}
"""Fields of a ModelConfig, and options of its layers: their names there."""

DELTANET = {"output_gate": True, "beta_bias": False}
FIXED: dict[str, dict[str, dict[str, Any]]] = {
    "olmo_hybrid": {
        "gated_deltanet": DELTANET | {"norm_eps": 1e-5},
        "softmax": {
            "output_gate": False,
            "qk_norm": True,
            "head_qk_norm": False,
            "rotary_fraction": 1.0,
        },
    },
    "qwen3_5_text": {
        "gated_deltanet": DELTANET | {"allow_neg_eigval": False},
        "softmax": {
            "output_gate": True,
            "qk_norm": True,
            "head_qk_norm": True,
        },
    },
}
"""Options of the layers that all models of a type have."""

POST_NORM_TYPES = {"olmo_hybrid": ("softmax",), "qwen3_5_text": ()}
"""Types of layer whose blocks norm what they add."""


def config_from_transformers(config: Any) -> ModelConfig:
    """Make a ModelConfig of the config of a model of transformers.

    Raises:
        ValueError: a field has no counterpart.
    """
    name = config.model_type
    if name not in CLASSES:
        raise ValueError(
            f"config.model_type: got {name!r}, need one of "
            f"{', '.join(CLASSES)}"
        )
    rope = config.rope_parameters or {}
    scaling = rope.get("rope_type", "default")
    quantised = getattr(config, "quantization_config", None)
    for field, got, need in (
        ("hidden_act", config.hidden_act, "silu"),
        ("attention_bias", config.attention_bias, False),
        ("attention_dropout", config.attention_dropout or 0, 0),
        ("rope_parameters.rope_type", scaling, "default"),
        ("quantization_config", quantised, None),
    ):
        if got != need:
            raise ValueError(f"config.{field}: got {got!r}, need {need!r}")
    our_types = {theirs: ours for ours, theirs in LAYER_TYPES.items()}
    for layer_type in config.layer_types:
        if layer_type not in our_types:
            raise ValueError(
                f"config.layer_types: got {layer_type!r}, need one of "
                f"{', '.join(our_types)}"
            )
    options: dict[str, dict[str, Any]] = {
        ours: {key: getattr(config, field) for key, field in fields.items()}
        for ours, fields in OPTIONS.items()
    }
    V = config.linear_value_head_dim
    options["gated_deltanet"]["expand_v"] = V / config.linear_key_head_dim
    H, theta = config.num_attention_heads, rope.get("rope_theta")
    K = getattr(config, "head_dim", None) or config.hidden_size // H
    options["softmax"] |= {"head_dim": K, "rope_theta": theta}
    if name == "olmo_hybrid":
        below = config.linear_allow_neg_eigval
        options["gated_deltanet"]["allow_neg_eigval"] = below
    else:
        turns = rope.get("partial_rotary_factor", 1.0)
        options["softmax"]["rotary_fraction"] = turns
    return ModelConfig(
        **{ours: getattr(config, theirs) for ours, theirs in FIELDS.items()},
        pattern=[our_types[theirs] for theirs in config.layer_types],
        num_heads=H,
        head_dim=K,
        options={key: x | FIXED[name][key] for key, x in options.items()},
        mlp_ratio=config.intermediate_size / config.hidden_size,
        mlp_multiple=1,
        post_norm_types=POST_NORM_TYPES[name],
    )


def fields_for_transformers(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Find the model type that a config has, and what it is configured with.

    Raises:
        ValueError: no type fits; the message says what each of them needs.
    """
    fault = {name: next(unsupported(config, name), None) for name in CLASSES}
    fits = [name for name, said in fault.items() if said is None]
    if not fits:
        raise ValueError(
            "config: got a model that transformers does not have, need one of "
            + "; ".join(f"{name} ({said})" for name, said in fault.items())
        )
    fields = {theirs: getattr(config, key) for key, theirs in FIELDS.items()}
    options = {ours: layer_options(config, ours) for ours in OPTIONS}
    for ours, names in OPTIONS.items():
        fields |= {theirs: options[ours][key] for key, theirs in names.items()}
    delta, softmax = options["gated_deltanet"], options["softmax"]
    rope = {"rope_type": "default", "rope_theta": softmax["rope_theta"]}
    if fits == ["olmo_hybrid"]:
        fields["linear_allow_neg_eigval"] = delta["allow_neg_eigval"]
    else:
        rope["partial_rotary_factor"] = softmax["rotary_fraction"]
    return fits[0], fields | {
        "rms_norm_eps": config.norm_eps,
        "intermediate_size": config.mlp_width,
        "layer_types": [LAYER_TYPES[ours] for ours in config.layer_types],
        "head_dim": softmax["head_dim"],
        "linear_value_head_dim": round(delta["expand_v"] * delta["head_dim"]),
        "rope_parameters": rope,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def layer_options(config: ModelConfig, layer_type: str) -> dict[str, Any]:
    """All options of a type of layer, with the sizes that None stands for."""
    parameters = inspect.signature(LAYERS[layer_type]).parameters
    options = {name: p.default for name, p in parameters.items()}
    options |= replace(config, pattern=(layer_type,)).layer_options(0)
    H = options["num_heads"]
    options["head_dim"] = options["head_dim"] or config.dim // H
    name = "num_kv_heads" if layer_type == "softmax" else "num_v_heads"
    options[name] = options[name] or H
    return options


def unsupported(config: ModelConfig, name: str) -> Iterator[str]:
    """The parts of a config that no model of this type of transformers has."""
    olmo, types = name == "olmo_hybrid", dict.fromkeys(config.layer_types)
    if types.keys() != LAYER_TYPES.keys():
        need = " and ".join(LAYER_TYPES)
        yield f"pattern: got {', '.join(types)}, need {need}"
        return
    if any(x in config.types_without_mlp for x in types):
        yield f"types_without_mlp: got {config.types_without_mlp}, need ()"
    ours, theirs = config.post_norm_types, POST_NORM_TYPES[name]
    for layer_type in types:
        if (layer_type in ours) != (layer_type in theirs):
            yield f"post_norm_types: got {ours}, need {theirs}"
        got = layer_options(config, layer_type)
        needs = {"norm_eps": config.norm_eps} | FIXED[name][layer_type]
        if layer_type == "gated_deltanet":
            needs["conv_size"] = got["conv_size"] or 4
        elif not olmo:
            needs["rope_theta"] = got["rope_theta"] or 1e4
        for key, need in needs.items():
            if got[key] != need:
                yield (
                    f"options: got {key} = {got[key]!r} for {layer_type}, "
                    f"need {need!r}"
                )
