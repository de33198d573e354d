"""What layers refuse: each message names what came and what is needed."""

import inspect
import math
import re

import pytest
import torch
from layer_cases import CASES, made, tokens
from torch import zeros

from fastweights.layers import (
    MLSTM,
    Decay,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    HeadsConvolution,
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
    parameter_groups,
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
    "gate-of-a-norm": (
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
        lambda: GatedDeltaNet(8, 2, 4, A_range=(-0.1, 16.0)),
        "A_range: got (-0.1, 16.0)",
        "need (lower, upper) with 0 <= lower <= upper",
    ),
    "no-A": (
        lambda: GatedDeltaNet(8, 2, 4, A_range=(0.0, 0.0)),
        "A_range: got (0.0, 0.0)",
        "need (lower, upper) with 0 <= lower <= upper",
    ),
    "dt": (
        lambda: Mamba(8, dt_range=(0.1, 0.001)),
        "dt_range: got (0.1, 0.001)",
        "need (lower, upper) with 0 < lower <= upper",
    ),
    "norm-eps-of-none": (
        lambda: SoftmaxAttention(8, 2, norm_eps=-1),
        "norm_eps: got -1",
        "need >= 0",
    ),
    "lower-bound-inf": (
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
        lambda: LightningAttention(8, 2, layer=4, num_layers=4),
        "layer: got 4",
        "need 0 to num_layers - 1 = 3",
    ),
    "mamba2-heads": (
        lambda: Mamba2(8, head_dim=5),
        "expand * dim / head_dim: got 3.2",
        WHOLE,
    ),
    "mamba2-groups": (
        lambda: Mamba2(8, head_dim=4, num_groups=3),
        "num_groups: got 3",
        "need a divisor of the 4 heads",
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
    "norm-eps": (
        lambda: SoftmaxAttention(8, 2, norm_eps=math.inf),
        "norm_eps: got inf",
        "need a finite number",
    ),
    "lower-bound": (
        lambda: KimiDeltaAttention(8, 2, lower_bound=-math.inf),
        "lower_bound: got -inf",
        "need a finite number",
    ),
    "theta-inf": (
        lambda: MultiScaleRetention(8, 2, theta=math.inf),
        "theta: got inf",
        "need a finite number",
    ),
    "expand-v-inf": (
        lambda: GatedDeltaNet(8, 2, 4, expand_v=math.inf),
        "expand_v: got inf",
        "need a finite number",
    ),
    "odd": (
        lambda: MultiScaleRetention(6, 2),
        "dim / num_heads: got 3",
        "need an even number",
    ),
    "state-size": (
        lambda: Mamba(8, state_size=300),
        "state_size: got 300",
        "need at most 256",
    ),
    "shared-heads": (
        lambda: HeadsConvolution((2, 3), (4, 4)),
        "heads: got (2, 3)",
        "need HV a multiple of H, 2",
    ),
    "device": (
        lambda: GatedDeltaNet(8, 2, 4, device="nonsense"),
        "device: got 'nonsense'",
        "need a device",
    ),
    "gate": (
        lambda: OutputNorm(4, None)(zeros(1, 2, 1, 4), zeros(1, 2, 4)),
        "activation: got None",
        "need the gate's",
    ),
    "centred-gate": (
        lambda: OutputNorm(4, None, center=True)(
            zeros(1, 2, 1, 4), zeros(1, 2, 4)
        ),
        "activation: got None",
        "need the gate's",
    ),
    "weight-decay": (
        lambda: parameter_groups(DeltaNet(8, 2), -1.0),
        "weight_decay: got -1.0",
        "need >= 0",
    ),
    "size": (
        lambda: DeltaNet(8, 2).state_bytes(0),
        "T: got 0",
        WHOLE,
    ),
    "room": (
        lambda: SoftmaxAttention(8, 4).new_state(2, 0),
        "capacity: got 0",
        WHOLE,
    ),
}
TYPES = {
    "heads": (lambda: GatedDeltaNet(8, 2.0, 4), "num_heads: got float", "int"),
    "one-head": (lambda: DeltaNet(8, True), "num_heads: got bool", "int"),
    "taps": (
        lambda: GatedDeltaNet(8, 2, 4, conv_size=4.0),
        "conv_size: got float",
        "int",
    ),
    "pair": (
        lambda: HeadsConvolution(2, (4, 4)),
        "heads: got 2",
        "need two ints, H and HV",
    ),
    "dtype": (
        lambda: GatedDeltaNet(8, 2, 4, dtype=torch.int64),
        "dtype: got torch.int64",
        "need one of",
    ),
    "dtype-name": (
        lambda: GatedDeltaNet(8, 2, 4, dtype="fp32"),
        "dtype: got 'fp32'",
        "need one of",
    ),
    "weight-decay": (
        lambda: parameter_groups(DeltaNet(8, 2), "x"),
        "weight_decay: got str",
        "real number",
    ),
    "token-ids": (
        lambda: DeltaNet(8, 2)(torch.zeros(2, 5, 8, dtype=torch.int64)),
        "x: got torch.int64",
        "need embeddings, [B, T, 8]",
    ),
    "double": (
        lambda: DeltaNet(8, 2)(zeros(2, 5, 8).double()),
        "x: got torch.float64",
        "need the layer's, torch.float32",
    ),
    "half": (
        lambda: DeltaNet(8, 2)(zeros(2, 5, 8).half()),
        "x: got torch.float16",
        "need the layer's, torch.float32",
    ),
    "hidden-size": (
        lambda: GatedDeltaNet(hidden_size=8, num_heads=2),
        "hidden_size: got 8",
        "need it as dim",
    ),
    "short-conv": (
        lambda: DeltaNet(8, 2, use_short_conv=False),
        "use_short_conv: got False",
        "need it as conv_size (None: no convolution)",
    ),
    "d-state": (
        lambda: Mamba(8, d_state=4),
        "d_state: got 4",
        "need it as state_size",
    ),
    "layer-index": (
        lambda: DeltaNet(8, 2, layer_idx=0),
        "layer_idx: got 0, which DeltaNet has not",
        "need one of dim, num_heads, head_dim, expand_v",
    ),
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


LAYERS = [*dict.fromkeys(type(make()) for make in CASES.values())]


def flags():
    """Every argument of a layer that is True or False."""
    for layer in sorted(LAYERS, key=lambda layer: layer.__name__):
        for name, p in inspect.signature(layer).parameters.items():
            if isinstance(p.default, bool):
                yield pytest.param(layer, name, id=f"{layer.__name__}-{name}")


@pytest.mark.parametrize("layer, name", flags())
def test_a_flag_is_true_or_false(layer, name):
    with pytest.raises(TypeError, match=f"{name}: got 'no', need True or"):
        layer(8, 2, **{name: "no"})


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_a_layer_says_how_it_differs(layer):
    assert layer.__doc__.count("Differs from the published one in: ") == 1


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_arguments_have_one_order(layer):
    """dim, num_heads, head_dim, each that there is; the rest by name."""
    parameters = inspect.signature(layer).parameters.values()
    order = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert order == ["dim", "num_heads", "head_dim"][: len(order)]
    if len(order) == 3:
        assert inspect.signature(layer).parameters["head_dim"].default is None


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_every_norm_has_the_eps_that_was_asked_for(layer):
    if "norm_eps" not in inspect.signature(layer).parameters:
        assert layer is Mamba  # which has no norm
        return
    more = {"qk_norm": True} if layer is SoftmaxAttention else {}
    if layer is LightningAttention:
        more = {"layer": 0, "num_layers": 1}
    first = {"head_dim": 4} if layer is Mamba2 else {"num_heads": 2}
    made = layer(8, **first, norm_eps=0.5, **more)
    norms = [m.eps for m in made.modules() if hasattr(m, "eps")]
    assert norms and set(norms) == {0.5}


def test_a_layer_with_autocast_takes_what_is_cast():
    layer, x = DeltaNet(8, 2), zeros(2, 5, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x)[0].dtype == torch.bfloat16


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


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_offsets_that_are_none(name, gradients):
    """Read on the host by every layer, before anything is computed."""
    layer, x = made(name), tokens(1, 9)
    with torch.set_grad_enabled(gradients):
        for values in ([0, 5, 3, 9], [1, 9], [0, 10], [-1, 9]):
            with pytest.raises(
                ValueError, match=r"cu_seqlens: got .*, need v"
            ):
                layer(x, cu_seqlens=torch.tensor(values))
        with pytest.raises(TypeError, match=r"cu_seqlens: got torch\.float"):
            layer(x, cu_seqlens=torch.tensor([0.0, 9.0]))
        with pytest.raises(ValueError, match="cu_seqlens: got device meta"):
            layer(x, cu_seqlens=torch.tensor([0, 9], device="meta"))
