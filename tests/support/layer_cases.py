"""The layers with the options that the tests cross, at tiny sizes."""

from collections.abc import Callable
from functools import partial

import torch

from fastweights.layers import (
    MLSTM,
    TTTMLP,
    Comba,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedLinearAttention,
    KimiDeltaAttention,
    LaCT,
    LayerState,
    LightningAttention,
    LinearRecurrence,
    Mamba,
    Mamba2,
    MesaNet,
    MultiScaleRetention,
    SoftmaxAttention,
    TitansMemory,
    TTTLinear,
)

D = 8
# fmt: off
LAYER_CASES: dict[str, Callable[..., torch.nn.Module]] = {
    "deltanet": partial(DeltaNet, D, 2),
    "deltanet-options": partial(DeltaNet, D, 2, 3, expand_v=4 / 3,
        conv_size=None, allow_neg_eigval=True, output_gate=True),
    "deltanet-original": partial(DeltaNet, D, 2, conv_size=None,
        qk_activation="elu", qk_norm_type="sum"),
    "deltanet-relu": partial(DeltaNet, D, 2, conv_size=2,
        qk_activation="relu"),
    "gated-deltanet": partial(GatedDeltaNet, D, 2, 4),
    "gated-deltanet-options": partial(GatedDeltaNet, D, 1, 3, num_v_heads=2,
        expand_v=2, conv_size=3, allow_neg_eigval=True, beta_bias=True),
    "gated-deltanet-bare": partial(GatedDeltaNet, D, 2, 4, conv_size=None,
        output_gate=False),
    "kda": partial(KimiDeltaAttention, D, 2, 4),
    "kda-options": partial(KimiDeltaAttention, D, 1, 4, num_v_heads=2,
        expand_v=0.5, conv_size=None, allow_neg_eigval=True,
        output_gate_bias=True, lower_bound=-5.0),
    "gated-deltanet2": partial(GatedDeltaNet2, D, 2, 4),
    "gated-deltanet2-options": partial(GatedDeltaNet2, D, 2, 4, num_v_heads=4,
        expand_v=0.5, conv_size=None, allow_neg_eigval=True, lower_bound=-5.0),
    "comba": partial(Comba, D, 2, 4),
    "comba-options": partial(Comba, D, 1, 4, num_v_heads=2, expand_v=0.5,
        conv_size=3, correction=0.02, unit_p=True),
    "gla": partial(GatedLinearAttention, D, 2, gate_rank=3),
    "gla-conv": partial(GatedLinearAttention, D, 2, qk_factor=1.0,
        v_factor=2.0, temperature=4.0, conv_size=4),
    "retnet": partial(MultiScaleRetention, D, 2),
    "lightning": partial(LightningAttention, D, 3, 4, layer=1, num_layers=4),
    "recurrence-linear": partial(LinearRecurrence, D, 2, 4, rule="additive",
        decay=None, qk_l2norm=False),
    "recurrence-decay": partial(LinearRecurrence, D, 2, 3, rule="additive",
        expand_v=4 / 3, conv_size=None, activation=False),
    "recurrence-constant": partial(LinearRecurrence, D, 2, 4,
                                   decay="constant"),
    "recurrence-channel": partial(LinearRecurrence, D, 2, 4, decay="channel",
        output_gate=False, allow_neg_eigval=True),
    "mamba2": partial(Mamba2, D, head_dim=4, state_size=3),
    "mamba2-groups": partial(Mamba2, D, head_dim=4, state_size=3, num_groups=2,
        conv_size=2),
    "mamba": partial(Mamba, D, state_size=3),
    "mlstm": partial(MLSTM, D, 2),
    "ttt-linear": partial(TTTLinear, D, 2, mini_batch=4),
    "ttt-mlp": partial(TTTMLP, D, 2, mini_batch=7, max_rate=1.0),
    "titans": partial(TitansMemory, D, 2, 4, chunk_size=6),
    "titans-linear": partial(TitansMemory, D, 2, 8, depth=1, chunk_size=4,
        conv_size=None, max_rate=0.02),
    "lact": partial(LaCT, D, 2, chunk_size=6, muon=False),
    "lact-muon": partial(LaCT, D, 2, chunk_size=20),
    "lact-options": partial(LaCT, D, 1, num_attention_heads=2, expansion=1.5,
        chunk_size=4, window=7, muon=False, momentum=False, prenorm=True,
        initial_rate=0.1),
    "mesanet": partial(MesaNet, D, 2, 4, solver_steps=8),
    "softmax": partial(SoftmaxAttention, D, 2),
    "softmax-options": partial(SoftmaxAttention, D, 4, num_kv_heads=2,
        head_dim=4, rope_theta=100.0, rotary_fraction=0.5, qk_norm=True,
        output_gate=True),
    "softmax-olmo": partial(SoftmaxAttention, D, 4, num_kv_heads=2,
        rope_theta=None, qk_norm=True, head_qk_norm=False),
}
"""What makes each layer; device and dtype may follow."""
# fmt: on


def make_layer(
    name: str, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """The layer, with random numbers for what starts as a constant.

    Ones and zeros would hide where a weight is used, and gates that start
    almost closed what they let through. TTT's first weights are so small
    that a network of two layers puts out next to nothing, 1e-4: a LayerNorm
    behind it bends within such steps as finite differences take.
    """
    torch.manual_seed(sum(map(ord, name)))
    layer = LAYER_CASES[name](dtype=dtype)
    with torch.no_grad():
        for key, p in layer.named_parameters():
            last = key.rpartition(".")[2]
            if "norm" in key:
                p.uniform_(0.5, 1.5)
            elif last in ("d", "D", "bias"):
                p.normal_()
            elif last == "A_log":
                p.uniform_(-1.0, 1.0)
            elif last == "dt_bias":
                p.uniform_(-3.0, 0.0)
            elif key == "gates.weight":
                p.normal_(0, 0.5)
            elif name.startswith("ttt-") and last in ("W1", "W2"):
                p.normal_(0, p.shape[1] ** -0.5)
            elif name.startswith("ttt-") and last in (
                "b1",
                "b2",
                "step_offset",
            ):
                p.normal_(0, 0.3)
    return layer


def hidden(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, D, generator=generator, dtype=dtype)


def contents(state: LayerState) -> dict[str, torch.Tensor]:
    """The tensors of a state; of keys and values only what is in use."""
    found = state.tensors()
    if state.num_read is not None and state.keys is not None:
        at = torch.arange(state.keys.shape[1])
        there = (at < state.num_read[:, None])[..., None, None]
        most = int(state.num_read.max())
        for name in ("keys", "values"):
            found[name] = (found[name] * there)[:, :most]
    return found
