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

KINDS = {"gated_deltanet": "linear_attention", "softmax": "full_attention"}
"""Kinds of layer here, and in ``layer_types`` of a config there."""

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

FIXED: dict[str, dict[str, dict[str, Any]]] = {
    "olmo_hybrid": {
        "gated_deltanet": {"gate": True, "beta_bias": False, "norm_eps": 1e-5},
        "softmax": {
            "gate": False,
            "qk_norm": True,
            "head_qk_norm": False,
            "rotary_fraction": 1.0,
        },
    },
    "qwen3_5_text": {
        "gated_deltanet": {
            "gate": True,
            "beta_bias": False,
            "allow_neg_eigval": False,
        },
        "softmax": {"gate": True, "qk_norm": True, "head_qk_norm": True},
    },
}
"""Options of the layers that all models of a type have."""

POST_NORM = {"olmo_hybrid": ("softmax",), "qwen3_5_text": ()}
"""Kinds of layer whose blocks norm what they add."""


def config_here(there: Any) -> ModelConfig:
    """Make a ModelConfig of the config of a model of transformers.

    Raises:
        ValueError: a field has no counterpart.
    """
    name = there.model_type
    if name not in CLASSES:
        raise ValueError(
            f"config.model_type: got {name!r}, need one of "
            f"{', '.join(CLASSES)}"
        )
    rope = there.rope_parameters or {}
    scaling = rope.get("rope_type", "default")
    quantised = getattr(there, "quantization_config", None)
    for field, got, need in (
        ("hidden_act", there.hidden_act, "silu"),
        ("attention_bias", there.attention_bias, False),
        ("attention_dropout", there.attention_dropout or 0, 0),
        ("rope_parameters.rope_type", scaling, "default"),
        ("quantization_config", quantised, None),
    ):
        if got != need:
            raise ValueError(f"config.{field}: got {got!r}, need {need!r}")
    kinds = {theirs: ours for ours, theirs in KINDS.items()}
    for kind in there.layer_types:
        if kind not in kinds:
            raise ValueError(
                f"config.layer_types: got {kind!r}, need one of "
                f"{', '.join(kinds)}"
            )
    options: dict[str, dict[str, Any]] = {
        kind: {key: getattr(there, field) for key, field in fields.items()}
        for kind, fields in OPTIONS.items()
    }
    V = there.linear_value_head_dim
    options["gated_deltanet"]["expand_v"] = V / there.linear_key_head_dim
    H, theta = there.num_attention_heads, rope.get("rope_theta")
    K = getattr(there, "head_dim", None) or there.hidden_size // H
    options["softmax"] |= {"head_dim": K, "theta": theta}
    if name == "olmo_hybrid":
        below = there.linear_allow_neg_eigval
        options["gated_deltanet"]["allow_neg_eigval"] = below
    else:
        turns = rope.get("partial_rotary_factor", 1.0)
        options["softmax"]["rotary_fraction"] = turns
    return ModelConfig(
        **{ours: getattr(there, theirs) for ours, theirs in FIELDS.items()},
        pattern=[kinds[kind] for kind in there.layer_types],
        num_heads=H,
        head_dim=K,
        options={key: x | FIXED[name][key] for key, x in options.items()},
        mlp_ratio=there.intermediate_size / there.hidden_size,
        mlp_multiple=1,
        post_norm=POST_NORM[name],
    )


def config_there(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Find the model type that a config has, and what it is configured with.

    Raises:
        ValueError: no type fits; the message says what each of them needs.
    """
    fault = {name: next(faults(config, name), None) for name in CLASSES}
    fits = [name for name, said in fault.items() if said is None]
    if not fits:
        raise ValueError(
            "config: got a model that transformers has not, need one of "
            + "; ".join(f"{name} ({said})" for name, said in fault.items())
        )
    fields = {theirs: getattr(config, key) for key, theirs in FIELDS.items()}
    options = {kind: layer_options(config, kind) for kind in OPTIONS}
    for kind, names in OPTIONS.items():
        fields |= {theirs: options[kind][key] for key, theirs in names.items()}
    delta, softmax = options["gated_deltanet"], options["softmax"]
    rope = {"rope_type": "default", "rope_theta": softmax["theta"]}
    if fits == ["olmo_hybrid"]:
        fields["linear_allow_neg_eigval"] = delta["allow_neg_eigval"]
    else:
        rope["partial_rotary_factor"] = softmax["rotary_fraction"]
    return fits[0], fields | {
        "rms_norm_eps": config.norm_eps,
        "intermediate_size": config.mlp_width,
        "layer_types": [KINDS[kind] for kind in config.kinds],
        "head_dim": softmax["head_dim"],
        "linear_value_head_dim": round(delta["expand_v"] * delta["head_dim"]),
        "rope_parameters": rope,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def layer_options(config: ModelConfig, kind: str) -> dict[str, Any]:
    """All options of a kind of layer, with the sizes that None stands for."""
    parameters = inspect.signature(LAYERS[kind]).parameters
    found = {name: p.default for name, p in parameters.items()}
    found |= replace(config, pattern=(kind,)).layer_options(0)
    found["head_dim"] = found["head_dim"] or config.dim // found["num_heads"]
    heads = "num_kv_heads" if kind == "softmax" else "num_v_heads"
    found[heads] = found[heads] or found["num_heads"]
    return found


def faults(config: ModelConfig, name: str) -> Iterator[str]:
    """What of a config no model of one of transformers' types has."""
    olmo, kinds = name == "olmo_hybrid", dict.fromkeys(config.kinds)
    if kinds.keys() != KINDS.keys():
        yield f"pattern: got {', '.join(kinds)}, need {' and '.join(KINDS)}"
        return
    if any(kind in config.without_mlp for kind in kinds):
        yield f"without_mlp: got {config.without_mlp}, need ()"
    for kind in kinds:
        if (kind in config.post_norm) != (kind in POST_NORM[name]):
            yield f"post_norm: got {config.post_norm}, need {POST_NORM[name]}"
        got = layer_options(config, kind)
        needs = {"norm_eps": config.norm_eps} | FIXED[name][kind]
        if kind == "gated_deltanet":
            needs["conv_size"] = got["conv_size"] or 4
        elif not olmo:
            needs["theta"] = got["theta"] or 1e4
        for key, need in needs.items():
            if got[key] != need:
                yield (
                    f"options: got {key} = {got[key]!r} for {kind}, need "
                    f"{need!r}"
                )
