"""Layers around the recurrences, as published: ``y, state = layer(x)``.

    layer = GatedDeltaNet(1024, num_heads=8, head_dim=128)
    y, state = layer(x)                    # x, y [B, T, 1024]
    y, state = layer(more, state)          # the tokens after them
    y, state = layer(packed, cu_seqlens=offsets)    # B = 1

Every layer reads [B, T, dim], or packed sequences with B = 1, and returns a
:class:`LayerState` with one row per sequence (softmax attention makes none
for packed sequences in training). Tokens after the last sequence of a pack
change nothing, and what comes out for them means nothing. Without gradients a
state that comes back in is changed in place; with gradients a new one is
made, through which gradients flow. ``state.clone()`` keeps one.

Where a layer has q, k and v, one matrix W_qkv makes them: its rows are those
of q for all heads, then of k, then of v. Each class says how the weights of
public implementations map to it, and in what it differs from the published
layer. Arguments have one order, (dim, num_heads, head_dim) where a layer has
all three, and the rest go by name; the names of other libraries (hidden_size,
d_model, use_short_conv, ...) are answered by the one that each has here
(:data:`fastweights.layers.common.layer.ARGUMENT_ALIASES`).
``layer.state_bytes(T)`` is the size of a state.
"""

from fastweights.layers.attention import SoftmaxAttention
from fastweights.layers.comba import Comba
from fastweights.layers.common.convolution import (
    HeadsConvolution,
    ShortConvolution,
)
from fastweights.layers.common.gates import Decay
from fastweights.layers.common.layer import Layer, parameter_groups
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.state import LayerState
from fastweights.layers.deltanet import DeltaNet
from fastweights.layers.gated_deltanet import GatedDeltaNet
from fastweights.layers.gated_deltanet2 import GatedDeltaNet2
from fastweights.layers.gla import GatedLinearAttention
from fastweights.layers.kda import KimiDeltaAttention
from fastweights.layers.lact import LaCT
from fastweights.layers.linear_recurrence import LinearRecurrence
from fastweights.layers.mamba import Mamba
from fastweights.layers.mamba2 import Mamba2
from fastweights.layers.mesanet import MesaNet
from fastweights.layers.mlstm import MLSTM
from fastweights.layers.retention import (
    LightningAttention,
    MultiScaleRetention,
)
from fastweights.layers.titans import TitansMemory
from fastweights.layers.ttt import TTTMLP, TTTLinear

__all__ = [
    "MLSTM",
    "TTTMLP",
    "Comba",
    "Decay",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedLinearAttention",
    "HeadsConvolution",
    "KimiDeltaAttention",
    "LaCT",
    "Layer",
    "LayerState",
    "LightningAttention",
    "LinearRecurrence",
    "Mamba",
    "Mamba2",
    "MesaNet",
    "MultiScaleRetention",
    "OutputNorm",
    "ShortConvolution",
    "SoftmaxAttention",
    "TTTLinear",
    "TitansMemory",
    "parameter_groups",
]
