"""What layers refuse: each message names what came and what is needed."""

import inspect
import math
import re

import pytest
import torch
from support.layer_cases import LAYER_CASES, hidden, make_layer
from support.refused import refused
from torch import zeros

from fastweights import layers
from fastweights.layers import (
    DeltaNet,
    LightningAttention,
    Mamba,
    Mamba2,
    SoftmaxAttention,
)
from fastweights.layers.common.layer import CheckedModule

REFUSED = """
DeltaNet(8, 3)
    ValueError: dim / num_heads: got 2.6666666666666665, need an integer >= 1
DeltaNet(8, 2, 3, expand_v=1.5)
    ValueError: expand_v * head_dim: got 4.5, need an integer >= 1
GatedDeltaNet(8, 2, 4, num_v_heads=3)
    ValueError: num_v_heads: got 3, need a multiple of num_heads = 2
GatedDeltaNet(8, 2, 4, conv_size=5)
    ValueError: conv_size: got 5, need one of (2, 3, 4)
ShortConvolution(8, 0)
    ValueError: conv_size: got 0, need one of (2, 3, 4)
DeltaNet(8, 2, qk_activation="gelu")
    ValueError: qk_activation: got 'gelu', need one of ('silu', 'relu', 'elu',
    'identity')
DeltaNet(8, 2, qk_norm_type=None)
    ValueError: qk_norm_type: got None, need one of ('l2', 'sum')
OutputNorm(8, "swish")
    ValueError: gate_activation: got 'swish', need one of
    ('silu', 'sigmoid', None)
GatedDeltaNet(8, 2, 4, norm_eps=-1.0)
    ValueError: norm_eps: got -1.0, need >= 0
GatedDeltaNet(8, 2, 4, A_range=(-0.1, 16.0))
    ValueError: A_range: got (-0.1, 16.0), need (lower, upper) with 0 <= lower
    <= upper
GatedDeltaNet(8, 2, 4, A_range=(0.0, 0.0))
    ValueError: A_range: got (0.0, 0.0), need (lower, upper) with 0 <= lower <=
    upper
Mamba(8, dt_range=(0.1, 0.001))
    ValueError: dt_range: got (0.1, 0.001), need (lower, upper) with 0 < lower
    <= upper
KimiDeltaAttention(8, 2, 4, lower_bound=5.0)
    ValueError: lower_bound: got 5.0, need < 0
TTTLinear(6, 2)
    ValueError: head_dim: got 3, need an even number
LaCT(8, 2, num_attention_heads=3)
    ValueError: num_attention_heads: got 3, need a divisor of dim = 8
LaCT(8, 2, expansion=0.3)
    ValueError: expansion * head_dim: got 1.2, need an integer >= 1
Decay(0)
    ValueError: num_heads: got 0, need an integer >= 1
GatedLinearAttention(8, 2, qk_factor=0.6)
    ValueError: qk_factor * dim / num_heads: got 2.4, need an integer >= 1
GatedLinearAttention(8, 2, v_factor=0.1)
    ValueError: v_factor * dim / num_heads: got 0.4, need an integer >= 1
MultiScaleRetention(8, 2, v_factor=0.3)
    ValueError: v_factor * dim / num_heads: got 1.2, need an integer >= 1
LightningAttention(8, 2, layer=4, num_layers=4)
    ValueError: layer: got 4, need 0 to num_layers - 1 = 3
Mamba2(8, head_dim=5)
    ValueError: expand * dim / head_dim: got 3.2, need an integer >= 1
Mamba2(8, head_dim=4, num_groups=3)
    ValueError: num_groups: got 3, need a divisor of the 4 heads, expand * dim
    / head_dim
Mamba(7, expand=1.5)
    ValueError: expand * dim: got 10.5, need an integer >= 1
MLSTM(8, 2, gate_cap=0.0)
    ValueError: gate_cap: got 0.0, need > 0
MLSTM(8, 2, qk_factor=0.3)
    ValueError: qk_factor * dim / num_heads: got 1.2, need an integer >= 1
SoftmaxAttention(8, 4, num_kv_heads=3)
    ValueError: num_kv_heads: got 3, need a divisor of num_heads = 4
SoftmaxAttention(8, 4, rotary_fraction=1.5)
    ValueError: rotary_fraction: got 1.5, need at most 1
MultiScaleRetention(6, 2)
    ValueError: dim / num_heads: got 3, need an even number
Mamba(8, state_size=300)
    ValueError: state_size: got 300, need at most 256
HeadsConvolution((2, 3), (4, 4))
    ValueError: heads: got (2, 3), need HV a multiple of H, 2
GatedDeltaNet(8, 2, 4, device="nonsense")
    ValueError: device: got 'nonsense', need a device, as "cpu" or "cuda"
OutputNorm(4, None)(zeros(1, 2, 1, 4), zeros(1, 2, 4))
    ValueError: gate_activation: got None, need the gate's
OutputNorm(4, None, center=True)(zeros(1, 2, 1, 4), zeros(1, 2, 4))
    ValueError: gate_activation: got None, need the gate's
parameter_groups(DeltaNet(8, 2), -1.0)
    ValueError: weight_decay: got -1.0, need >= 0
DeltaNet(8, 2).state_bytes(0)
    ValueError: T: got 0, need an integer >= 1
SoftmaxAttention(8, 4).preallocate_state(2, 0)
    ValueError: capacity: got 0, need an integer >= 1
HeadsConvolution(2, (4, 4))
    TypeError: heads: got 2, need two ints, H and HV
GatedDeltaNet(8, 2, 4, dtype="fp32")
    TypeError: dtype: got 'fp32', need one of (torch.float64, torch.float32,
    torch.float16, torch.bfloat16)
parameter_groups(DeltaNet(8, 2), "x")
    TypeError: weight_decay: got str, need a real number
DeltaNet(8, 2)(torch.zeros(2, 5, 8, dtype=torch.int64))
    TypeError: x: got torch.int64, need embeddings, [B, T, 8] of a floating
    point dtype; token ids go to a LanguageModel
DeltaNet(8, 2)(zeros(2, 5, 8).double())
    TypeError: x: got torch.float64, need the layer's, torch.float32
DeltaNet(8, 2)(zeros(2, 5, 8).half())
    TypeError: x: got torch.float16, need the layer's, torch.float32
GatedDeltaNet(hidden_size=8, num_heads=2)
    TypeError: hidden_size: got 8, need it as dim
DeltaNet(8, 2, use_short_conv=False)
    TypeError: use_short_conv: got False, need it as conv_size (None: no
    convolution)
MultiScaleRetention(8, 2, expand_v=1.0)
    TypeError: expand_v: got 1.0, need it as v_factor (width of v over dim)
TTTLinear(8, 2, base_lr=1.0)
    TypeError: base_lr: got 1.0, need it as max_rate
LaCT(8, 2, base_lr=1.0)
    TypeError: base_lr: got 1.0, need it as initial_rate
Mamba(8, d_state=4)
    TypeError: d_state: got 4, need it as state_size
DeltaNet(8, 2, layer_idx=0)
    TypeError: layer_idx: got 0, which DeltaNet does not take, need one of dim,
    num_heads, head_dim, expand_v, conv_size, qk_activation,
Decay(2, lower_bound="-5")
    TypeError: lower_bound: got str, need a real number
Decay(2, A_range=3.0)
    TypeError: A_range: got 3.0, need two real numbers
Mamba2(64, dt_range=(0.1,))
    TypeError: dt_range: got (0.1,), need two real numbers
"""


LAYERS = [*dict.fromkeys(type(make()) for make in LAYER_CASES.values())]


WRONG = {
    "bool": [("no", "'no', need True or False")],
    "int": [(2.0, "float, need an int"), (True, "bool, need an int")],
    "float": [("x", "str, need a real number"), (math.inf, "inf, need ")],
}


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_flags_and_numbers_are_what_annotations_say(layer):
    for name, p in inspect.signature(layer).parameters.items():
        kind, _, none = p.annotation.partition(" | ")
        wrong = WRONG.get(kind, [])
        if kind == "int" and name not in ("layer", "conv_size"):
            wrong = [*wrong, (0, "0, need an integer >= 1")]
        if kind in WRONG and not none:
            wrong = [*wrong, (None, "None")]
        for value, said in wrong:
            with pytest.raises(
                (TypeError, ValueError), match=f"^{name}: got {said}"
            ):
                layer(8, 2, **{name: value})


def test_an_argument_of_several_kinds_is_for_its_class_to_check():
    class Mine(CheckedModule):
        __module__ = "fastweights.layers"

        def __init__(self, size: int | None, by: int | float | None = 1):
            super().__init__()

    assert Mine(None, 0) and Mine(3, None)
    with pytest.raises(ValueError, match="size: got 0, need an integer >= 1"):
        Mine(0)


def test_a_subclass_elsewhere_checks_its_own_arguments():
    class Mine(layers.GatedDeltaNet):
        def __init__(self, dim, heads, skip: int = 1, p: float | int = 0.1):
            super().__init__(dim, heads)

    assert Mine(8, 2, skip=0, p=0.0)
    with pytest.raises(ValueError, match="num_heads: got 0, need"):
        Mine(8, 0)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_a_layer_says_how_it_differs(layer):
    assert layer.__doc__.count("Differs from the published one in: ") == 1


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_options_that_a_layer_names_are_its_own(layer):
    named = re.findall(r"``(\w+)(?:``|=)", layer.__doc__)
    assert {*named} <= {*inspect.signature(layer).parameters}


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


@refused(REFUSED)
def test_what_is_refused(wrong, error):
    with error():
        eval(wrong, vars(layers) | globals())


@pytest.mark.parametrize("name", LAYER_CASES)
def test_inputs(name):
    layer, x, ends = make_layer(name), hidden(2, 3), torch.tensor([0, 3])
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
@pytest.mark.parametrize("name", LAYER_CASES)
def test_offsets_that_are_none(name, gradients):
    """Read on the host by every layer, before anything is computed."""
    layer, x = make_layer(name), hidden(1, 9)
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
