"""Record what layers of transformers do, for tests/layers/test_published.py.

    PYTHONPATH= python tests/recorded/layers.py

with transformers 5.23.0 (Apache-2.0) and torch installed. Each layer gets
random weights at a tiny size, reads random tokens in fp32 on a CPU, and
weights, tokens and outputs become one JSON file beside this script. The test
loads the weights into a layer of ours, and needs no transformers.
"""

import base64
import json
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from transformers.models.glm5_next import modeling_glm5_next as glm5_next
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.minimax import modeling_minimax as minimax
from transformers.models.qwen3_next import modeling_qwen3_next as qwen
from transformers.models.xlstm import modeling_xlstm as xlstm

HERE = Path(__file__).resolve().parent
D, B, T = 8, 2, 21


def qwen_config():
    return transformers.Qwen3NextConfig(
        hidden_size=D,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=3,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.25,
        },
        attn_implementation="eager",
    )


def gated_deltanet():
    return qwen.Qwen3NextGatedDeltaNet(qwen_config(), 0), {}


def attention():
    config = qwen_config()
    at = torch.arange(T)[None].expand(B, T)
    turn = qwen.Qwen3NextRotaryEmbedding(config)(torch.zeros(B, T, D), at)
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    options = {"position_embeddings": turn, "attention_mask": mask}
    return qwen.Qwen3NextAttention(config, 3), options


def kda_config():
    return SimpleNamespace(
        hidden_size=D,
        linear_num_heads=2,
        linear_head_dim=4,
        linear_conv_kernel_dim=4,
        linear_lower_bound=-5.0,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        layer_types=["linear_attention"],
    )


def kda():
    return kimi.KimiLinearDeltaAttention(kda_config(), 0), {}


def safe_gate():
    """Only the gate of GLM-5-Next's KDA, whose rest is Kimi Linear's."""
    return glm5_next.Glm5NextTextForgetGate(kda_config()), {}


def mamba2_mixer():
    config = transformers.Mamba2Config(
        hidden_size=D,
        num_heads=4,
        head_dim=4,
        state_size=3,
        n_groups=2,
        expand=2,
        chunk_size=8,
        num_hidden_layers=1,
    )
    return mamba2.Mamba2Mixer(config, 0), {}


def mamba_mixer():
    config = transformers.MambaConfig(
        hidden_size=D, state_size=3, num_hidden_layers=1
    )
    return mamba.MambaMixer(config, 0), {}


def mlstm():
    config = transformers.xLSTMConfig(
        hidden_size=D,
        num_heads=2,
        num_blocks=1,
        chunk_size=8,
        mode="inference",
        autocast_kernel_dtype="float32",
    )
    return xlstm.xLSTMLayer(config), {}


def lightning():
    config = SimpleNamespace(
        hidden_size=D,
        head_dim=3,
        num_attention_heads=4,
        num_hidden_layers=4,
        block_size=8,
        hidden_act="silu",
        layer_types=["linear_attention"] * 4,
    )
    layer = minimax.MiniMaxLightningAttention(config, 1)
    return layer, {"position_embeddings": None, "attention_mask": None}


LAYERS = {
    "qwen3_next_gated_deltanet": gated_deltanet,
    "qwen3_next_attention": attention,
    "kimi_linear_delta_attention": kda,
    "glm5_next_forget_gate": safe_gate,
    "mamba2_mixer": mamba2_mixer,
    "mamba_mixer": mamba_mixer,
    "xlstm_mlstm_layer": mlstm,
    "minimax_lightning_attention": lightning,
}


@torch.no_grad()
def randomise(layer: torch.nn.Module) -> None:
    for name, p in layer.named_parameters():
        if "A_log" in name:
            p.uniform_(-1, 1)
        elif "dt_bias" in name:
            p.uniform_(-3, 0)
        elif "norm" in name:
            p.uniform_(0.5, 1.5)
        elif p.dim() == 1:
            p.normal_()
        else:
            p.normal_(0, 0.5)


def pack(x: torch.Tensor) -> list:
    """Shape, and the fp32 numbers in base64."""
    raw = x.detach().float().contiguous().numpy().astype("<f4").tobytes()
    return [list(x.shape), base64.b64encode(raw).decode()]


def main() -> None:
    for name, make in LAYERS.items():
        torch.manual_seed(0)
        layer, options = make()
        layer.eval()
        randomise(layer)
        x = torch.randn(B, T, D)
        with torch.no_grad():
            y = layer(x, **options)
        y = y[0] if isinstance(y, tuple) else y
        record = {
            "class": f"{type(layer).__module__}.{type(layer).__name__}",
            "versions": f"transformers {transformers.__version__}, "
            f"torch {torch.__version__}",
            "command": "python tests/recorded/layers.py",
            "x": pack(x),
            "y": pack(y),
            "weights": {k: pack(p) for k, p in layer.named_parameters()},
        }
        text = json.dumps(record, indent=1)
        (HERE / f"{name}.json").write_text(text + "\n")
        print(f"{name:32} {len(text) / 1000:.1f} kB, |y| {y.std():.2f}")


if __name__ == "__main__":
    main()
