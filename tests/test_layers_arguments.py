"""What layers refuse: each message names what came and what is needed."""

import re

import pytest
import torch
from layer_cases import CASES, made, tokens

from fastweights.layers import (
    MLSTM,
    Decay,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LaCT,
    LightningAttention,
    Mamba,
    Mamba2,
    MesaNet,
    MultiScaleRetention,
    OutputNorm,
    ShortConvolution,
    SoftmaxAttention,
    TitansMemory,
    TTTLinear,
)

WHOLE = "need an integer >= 1"
VALUES = {
    "dim": (lambda: DeltaNet(0, 1), "dim: got 0", WHOLE),
    "heads": (lambda: MLSTM(8, -2), "num_heads: got -2", WHOLE),
    "dim-per-head": (
        lambda: DeltaNet(8, 3),
        "dim / num_heads: got 2.6",
        WHOLE,
    ),
    "head": (lambda: DeltaNet(8, 2, 0), "head_dim: got 0", WHOLE),
    "expand-v": (
        lambda: DeltaNet(8, 2, 3, expand_v=1.5),
        "expand_v * head_dim: got 4.5",
        WHOLE,
    ),
    "expand-v-nothing": (
        lambda: GatedDeltaNet(8, 2, 3, expand_v=0),
        "expand_v: got 0",
        "need > 0",
    ),
    "value-heads": (
        lambda: GatedDeltaNet(8, 2, 4, num_v_heads=3),
        "num_v_heads: got 3",
        "need a multiple of num_heads = 2",
    ),
    "no-value-heads": (
        lambda: KimiDeltaAttention(8, 2, 4, num_v_heads=0),
        "num_v_heads: got 0",
        WHOLE,
    ),
    "taps": (
        lambda: GatedDeltaNet(8, 2, 4, conv_size=5),
        "conv_size: got 5",
        "need one of (2, 3, 4)",
    ),
    "taps-none": (
        lambda: ShortConvolution(8, 0),
        "conv_size: got 0",
        "need one of (2, 3, 4)",
    ),
    "channels": (lambda: ShortConvolution(0), "channels: got 0", WHOLE),
    "activation": (
        lambda: DeltaNet(8, 2, qk_activation="gelu"),
        "qk_activation: got 'gelu'",
        "need one of ('silu', 'relu', 'elu', 'identity')",
    ),
    "norm": (
        lambda: DeltaNet(8, 2, qk_norm=None),
        "qk_norm: got None",
        "need one of ('l2', 'sum')",
    ),
    "gate": (
        lambda: OutputNorm(8, "swish"),
        "activation: got 'swish'",
        "need one of ('silu', 'sigmoid', None)",
    ),
    "eps": (
        lambda: GatedDeltaNet(8, 2, 4, norm_eps=-1.0),
        "norm_eps: got -1.0",
        "need >= 0",
    ),
    "A": (
        lambda: GatedDeltaNet(8, 2, 4, A_range=(0.0, 16.0)),
        "A_range: got (0.0, 16.0)",
        "need (lower, upper) with 0 < lower <= upper",
    ),
    "dt": (
        lambda: Mamba(8, dt_range=(0.1, 0.001)),
        "dt_range: got (0.1, 0.001)",
        "need (lower, upper) with 0 < lower <= upper",
    ),
    "lower-bound": (
        lambda: KimiDeltaAttention(8, 2, 4, lower_bound=5.0),
        "lower_bound: got 5.0",
        "need < 0",
    ),
    "ttt-head": (
        lambda: TTTLinear(6, 2),
        "head_dim: got 3",
        "need an even number",
    ),
    "ttt-mini-batch": (
        lambda: TTTLinear(8, 2, mini_batch=0),
        "mini_batch: got 0",
        WHOLE,
    ),
    "titans-rate": (
        lambda: TitansMemory(8, 2, 4, max_rate=0.0),
        "max_rate: got 0.0",
        "need > 0",
    ),
    "titans-depth": (
        lambda: TitansMemory(8, 2, 4, depth=0),
        "depth: got 0",
        WHOLE,
    ),
    "lact-window": (
        lambda: LaCT(8, 2, window=0),
        "window: got 0",
        WHOLE,
    ),
    "lact-heads": (
        lambda: LaCT(8, 2, num_attention_heads=3),
        "num_attention_heads: got 3",
        "need a divisor of dim = 8",
    ),
    "lact-width": (
        lambda: LaCT(8, 2, expansion=0.3),
        "expansion * head_dim: got 1.2",
        WHOLE,
    ),
    "mesanet-ridge": (
        lambda: MesaNet(8, 2, 4, min_ridge=0.0),
        "min_ridge: got 0.0",
        "need > 0",
    ),
    "decay-heads": (lambda: Decay(0), "num_heads: got 0", WHOLE),
    "gla-k": (
        lambda: GatedLinearAttention(8, 2, expand_k=0.6),
        "expand_k * dim / num_heads: got 2.4",
        WHOLE,
    ),
    "gla-v": (
        lambda: GatedLinearAttention(8, 2, expand_v=0.1),
        "expand_v * dim / num_heads: got 0.4",
        WHOLE,
    ),
    "rank": (
        lambda: GatedLinearAttention(8, 2, gate_rank=0),
        "gate_rank: got 0",
        WHOLE,
    ),
    "temperature": (
        lambda: GatedLinearAttention(8, 2, temperature=0),
        "temperature: got 0",
        "need > 0",
    ),
    "retnet-v": (
        lambda: MultiScaleRetention(8, 2, expand_v=0.3),
        "expand_v * dim / num_heads: got 1.2",
        WHOLE,
    ),
    "theta": (
        lambda: MultiScaleRetention(8, 2, theta=0.0),
        "theta: got 0.0",
        "need > 0",
    ),
    "layer": (
        lambda: LightningAttention(8, 2, 4, 4),
        "layer: got 4",
        "need 0 to num_layers - 1 = 3",
    ),
    "mamba2-heads": (
        lambda: Mamba2(8, head_dim=5),
        "head_dim: got 5",
        "need a divisor",
    ),
    "mamba2-groups": (
        lambda: Mamba2(8, head_dim=4, num_groups=3),
        "head_dim: got 4",
        "whole groups",
    ),
    "expand": (lambda: Mamba(7, expand=1.5), "expand * dim: got 10.5", WHOLE),
    "dt-rank": (lambda: Mamba(8, dt_rank=0), "dt_rank: got 0", WHOLE),
    "cap": (lambda: MLSTM(8, 2, cap=0.0), "cap: got 0.0", "need > 0"),
    "mlstm-qk": (
        lambda: MLSTM(8, 2, qk_factor=0.3),
        "qk_factor * dim / num_heads: got 1.2",
        WHOLE,
    ),
    "kv-heads": (
        lambda: SoftmaxAttention(8, 4, num_kv_heads=3),
        "num_kv_heads: got 3",
        "need a divisor of num_heads = 4",
    ),
    "no-kv-heads": (
        lambda: SoftmaxAttention(8, 4, num_kv_heads=0),
        "num_kv_heads: got 0",
        WHOLE,
    ),
    "rotary": (
        lambda: SoftmaxAttention(8, 4, rotary_fraction=0.0),
        "rotary_fraction: got 0.0",
        "need > 0",
    ),
    "more-than-all": (
        lambda: SoftmaxAttention(8, 4, rotary_fraction=1.5),
        "rotary_fraction: got 1.5",
        "need at most 1",
    ),
    "room": (
        lambda: SoftmaxAttention(8, 4).new_state(2, 0),
        "capacity: got 0",
        WHOLE,
    ),
}
TYPES = {
    "heads": (lambda: GatedDeltaNet(8, 2.0, 4), "num_heads: got float", "int"),
    "dim": (lambda: Mamba("8"), "dim: got str", "int"),
    "expand": (
        lambda: GatedDeltaNet(8, 2, 4, expand_v=None),
        "expand_v: got NoneType",
        "real number",
    ),
    "factor": (
        lambda: MLSTM(8, 2, qk_factor="half"),
        "qk_factor: got str",
        "real number",
    ),
    "cap": (lambda: MLSTM(8, 2, cap=None), "cap: got NoneType", "real number"),
    "eps": (
        lambda: DeltaNet(8, 2, norm_eps="1e-5"),
        "norm_eps: got str",
        "real number",
    ),
    "lower-bound": (
        lambda: Decay(2, lower_bound="-5"),
        "lower_bound: got str",
        "real number",
    ),
    "rotary": (
        lambda: SoftmaxAttention(8, 4, rotary_fraction=None),
        "rotary_fraction: got NoneType",
        "real number",
    ),
    "range": (
        lambda: Decay(2, A_range=3.0),
        "A_range: got 3.0",
        "need two real numbers",
    ),
    "one-bound": (
        lambda: Mamba2(64, dt_range=(0.1,)),
        "dt_range: got (0.1,)",
        "need two real numbers",
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    make, got, need = VALUES[name]
    with pytest.raises(ValueError, match=re.escape(got)) as error:
        make()
    assert need in str(error.value)


@pytest.mark.parametrize("name", TYPES)
def test_types(name):
    make, got, need = TYPES[name]
    with pytest.raises(TypeError, match=re.escape(got)) as error:
        make()
    assert need in str(error.value)


@pytest.mark.parametrize("name", CASES)
def test_inputs(name):
    layer, x, ends = made(name), tokens(2, 3), torch.tensor([0, 3])
    for wrong, got in (
        (x[0], "x: got shape [3, 8]"),
        (x[..., :5], "x: got shape [2, 3, 5]"),
        (x[:, :0], "x: got shape [2, 0, 8]"),
        (x[:0], "x: got shape [0, 3, 8]"),
    ):
        with pytest.raises(ValueError, match=re.escape(got)) as error:
            layer(wrong)
        assert "need [B, T, 8] with B, T >= 1" in str(error.value)
    with pytest.raises(ValueError, match=r"need \[1, T, 8\] because"):
        layer(x, cu_seqlens=ends)
    for wrong in (ends[0], ends[:1], ends[None]):
        shape = re.escape(f"cu_seqlens: got shape {list(wrong.shape)}")
        with pytest.raises(ValueError, match=shape):
            layer(x[:1], cu_seqlens=wrong)
    with pytest.raises(TypeError, match="x: got list, need a Tensor"):
        layer([1.0])
    with pytest.raises(TypeError, match="cu_seqlens: got list, need a Tens"):
        layer(x[:1], cu_seqlens=[0, 3])
