"""Tiny models of transformers: their configurations, by type."""

import importlib

import torch
from torch.overrides import TorchFunctionMode

SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
OWN_LAYERS = ("bamba", "falcon_h1", "inkling2", "zamba", "zamba2")
LAYERS = ["linear_attention"] * 2 + ["full_attention"]
GDN = {
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "head_dim": 16,
}
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT = {
    "num_local_experts": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    **EXPERTS,
}
MIXTURE = {"num_experts": 4, "shared_expert_intermediate_size": 32, **EXPERTS}
INDEXER = {
    "n_heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "budget": 64,
    "compress_ratio": 4,
}
SCAN = {
    "state_size": 10,
    "n_groups": 2,
    "num_heads": 8,
    "head_dim": 12,
    "chunk_size": 16,
}
SSM = {
    "mamba_d_state": 10,
    "mamba_n_groups": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_chunk_size": 16,
}
SHORT = {
    "layer_types": ["conv", "conv", "full_attention"],
    "num_dense_layers": 1,
}

# The classes' prefix, and what they are configured with.
TINY_MODELS = {
    "qwen3_next": ("Qwen3Next", GDN | MIXTURE),
    "qwen3_5": ("Qwen3_5", GDN),
    "olmo_hybrid": ("OlmoHybrid", GDN | {"linear_num_key_heads": 8}),
    "kimi_linear": (
        "KimiLinear",
        LATENT | {"linear_head_dim": 12, "linear_num_heads": 8},
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", GDN | MIXTURE),
    "qwen4_exp": (
        "Qwen4Exp",
        GDN
        | MIXTURE
        | {"hc_lowrank": 8, "num_key_value_heads": 2}
        | {f"indexer_{key}": n for key, n in INDEXER.items()},
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        LATENT | {"head_dim": 12, "n_group": 1, "topk_group": 1},
    ),
    "lara_mini": ("LaraMini", GDN),
    "mamba2": ("Mamba2", SCAN),
    "bamba": ("Bamba", SSM | {"attn_layer_indices": [2], "head_dim": 12}),
    "falcon_h1": ("FalconH1", SSM | {"mamba_d_ssm": 96, "head_dim": 12}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        SSM
        | {"layer_types": ["mamba", "mamba", "attention"]}
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 32},
    ),
    "nemotron_h": (
        "NemotronH",
        {"layers_block_type": ["mamba", "mamba", "attention"]}
        | {"mamba_num_heads": 8, "mamba_head_dim": 12, "head_dim": 12}
        | {"ssm_state_size": 10, "n_groups": 2, "chunk_size": 16},
    ),
    "zamba2": (
        "Zamba2",
        SSM
        | {"layers_block_type": ["mamba", "mamba", "hybrid"]}
        | {"mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 12}
        | {"num_mem_blocks": 1, "adapter_rank": 4, "chunk_size": 16},
    ),
    "mamba": ("Mamba", {"state_size": 10, "time_step_rank": 5}),
    "falcon_mamba": ("FalconMamba", {"state_size": 10, "time_step_rank": 5}),
    "jamba": (
        "Jamba",
        {"mamba_d_state": 10, "mamba_dt_rank": 5}
        | {"attn_layer_period": 3, "attn_layer_offset": 2}
        | {"num_experts": 4, "num_experts_per_tok": 2},
    ),
    "zamba": (
        "Zamba",
        {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"]}
        | {"mamba_d_state": 10, "mamba_dt_rank": 5, "n_mamba_heads": 2}
        | {"num_hidden_layers": 5},
    ),
    "minimax": (
        "MiniMax",
        {"head_dim": 12, "block_size": 16}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "lfm2": ("Lfm2", SHORT),
    "lfm2_moe": ("Lfm2Moe", SHORT | EXPERTS | {"num_experts": 4}),
    "lfm3": ("Lfm3", SHORT | EXPERTS | {"num_experts": 4}),
    "inkling2": (
        "Inkling2",
        EXPERTS
        | {"head_dim": 12, "swa_head_dim": 12, "swa_num_attention_heads": 4}
        | {"swa_num_key_value_heads": 4, "n_routed_experts": 4}
        | {"n_shared_experts": 1, "unpadded_vocab_size": 64}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
}


def modeling(name):
    return importlib.import_module(
        f"transformers.models.{name}.modeling_{name}"
    )


def with_spread_gates(model):
    """The same model: its gates forget over many tokens, or over few."""
    for key, x in model.named_parameters():
        if key.endswith("A_log"):
            x.data.uniform_(-6, 0)
        elif key.endswith("dt_bias"):
            x.data.normal_()
    return model


class InDouble(TorchFunctionMode):
    """What a modeling file computes in fp32, whatever comes, is in fp64."""

    def __torch_function__(self, function, types, given=(), named=None):
        def wide(x):
            return torch.float64 if x is torch.float32 else x

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        named = {key: wide(x) for key, x in (named or {}).items()}
        return function(*map(wide, given), **named)
