"""Kimi Delta Attention (Kimi Team 2025)."""

from __future__ import annotations

import torch
from torch import nn

from fastweights.layers.common.convolution import HeadsConvolution
from fastweights.layers.common.fused_step import fused_layer_step
from fastweights.layers.common.gates import Decay, low_rank, write_strength
from fastweights.layers.common.layer import FactoryOptions, FamilyLayer, Hidden
from fastweights.layers.common.layer_arguments import (
    head_size,
    num_value_heads,
    scaled_size,
)
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.state import LayerState, Offsets, run_recurrence


class KimiDeltaAttention(FamilyLayer):
    """The delta rule with a decay per key channel (arXiv 2510.26692).

        q, k, v = silu(convolution(W_qkv x)), q and k of unit length
        g = -exp(A_log) softplus(W_f2 W_f1 x + dt_bias), one per channel of k
        beta = sigmoid(W_b x)
        y = W_o (norm(o) * sigmoid(W_g2 W_g1 x)), o by fastweights.kda

    W_f1 and W_g1 have V rows, the size of one head. Public implementations
    differ: W_g2 has a bias in flash-linear-attention and none in
    transformers' Kimi Linear (``output_gate_bias``); dt_bias started at 0 in
    early versions of flash-linear-attention; GLM-5-Next bounds the decay
    from below by ``lower_bound=-5``, and so does Ling, with one matrix for
    W_f2 W_f1. With fewer heads of q and k than of v, flash-linear-attention
    had one gate per head of q and k; here each value head has its own.

    Differs from the published one in: no bias in W_g2 (``output_gate_bias``).

    Weights of flash-linear-attention: qkv_proj is q_proj, k_proj and v_proj
    one below the other, convolution.short_convolution is q_conv1d, k_conv1d
    and v_conv1d, norm is o_norm. Of transformers' Kimi Linear: the same,
    with one conv1d; f_proj is forget_gate's f_a_proj and f_b_proj, gate_proj
    is g_a_proj and g_b_proj.

    Args:
        dim: width D of x and y.
        num_heads: heads H of q and k.
        head_dim: their size K; dim / num_heads if None.
        num_v_heads: value heads HV, a multiple of H; H if None.
        expand_v: V / K.
        conv_size: width of the convolution, 2 to 4; None: there is none.
        allow_neg_eigval: beta in (0, 2), not (0, 1) (Grazzi et al. 2025).
        output_gate_bias: whether W_g2 has a bias.
        A_range, dt_range, lower_bound: as in
            :class:`fastweights.layers.Decay`.
        norm_eps: of the output norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        num_v_heads: int | None = None,
        expand_v: float = 1.0,
        conv_size: int | None = 4,
        allow_neg_eigval: bool = False,
        output_gate_bias: bool = False,
        A_range: tuple[float, float] = (1.0, 16.0),
        dt_range: tuple[float, float] = (1e-3, 1e-1),
        lower_bound: float | None = None,
        norm_eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H, K = num_heads, head_size(head_dim, dim, num_heads)
        HV = num_value_heads(num_v_heads, num_heads)
        V = scaled_size("expand_v", expand_v, head_dim=K)
        self.dim, self.allow_neg_eigval = dim, allow_neg_eigval
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        width = 2 * H * K + HV * V
        self.qkv_proj = nn.Linear(dim, width, bias=False, **factory)
        self.convolution = HeadsConvolution(
            (H, HV), (K, V), conv_size, **factory
        )
        self.f_proj = low_rank(dim, V, HV * K, bias=False, **factory)
        self.decay = Decay(
            HV,
            K,
            A_range=A_range,
            dt_range=dt_range,
            lower_bound=lower_bound,
            **factory,
        )
        self.b_proj = nn.Linear(dim, HV, bias=False, **factory)
        self.gate_proj = low_rank(
            dim, V, HV * V, bias=output_gate_bias, **factory
        )
        self.norm = OutputNorm(V, "sigmoid", eps=norm_eps, **factory)
        self.o_proj = nn.Linear(HV * V, dim, bias=False, **factory)

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, convolution) after these tokens."""
        q, k, v, past = self.convolution(self.qkv_proj(x), state, cu_seqlens)
        g = self.decay(self.f_proj(x))
        beta = write_strength(self.b_proj(x), self.allow_neg_eigval)
        o, S = run_recurrence(
            q, k, v, g, beta, state=state, cu_seqlens=cu_seqlens
        )
        y = self.o_proj(self.norm(o, self.gate_proj(x)))
        return y, LayerState(S=S, convolution=past)

    def fused_step(
        self, x: Hidden, norm: nn.RMSNorm, state: LayerState
    ) -> Hidden | None:
        """x + layer(norm(x)), in few launches: :meth:`.Layer.fused_step`."""
        modules = self.qkv_proj, self.f_proj, self.b_proj, self.gate_proj
        return fused_layer_step(
            x, norm, self, KimiDeltaAttention, state, modules
        )
