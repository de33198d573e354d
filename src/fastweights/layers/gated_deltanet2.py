"""Gated DeltaNet-2 (Hatamizadeh et al. 2026)."""

from __future__ import annotations

import torch
from torch import nn

from fastweights.heads import per_value_head
from fastweights.layers.common.convolution import HeadsConvolution
from fastweights.layers.common.gates import Decay, low_rank, write_strength
from fastweights.layers.common.layer import FactoryOptions, FamilyLayer, Hidden
from fastweights.layers.common.layer_arguments import (
    head_size,
    num_value_heads,
    scaled_size,
)
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.state import LayerState, Offsets, run_recurrence
from fastweights.ops.members import gated_deltanet2_operands


class GatedDeltaNet2(FamilyLayer):
    """KDA with strengths per channel (arXiv 2605.22791).

        q, k, v = silu(convolution(W_qkv x)), q and k of unit length
        g = -exp(A_log) softplus(W_f2 W_f1 x + dt_bias), one per channel of k
        b = sigmoid(W_b x), w = sigmoid(W_w x), one per channel of k and of v
        y = W_o (norm(o) * sigmoid(W_g2 W_g1 x + bias)),
            o by fastweights.gated_deltanet2

    W_f1 and W_g1 have V rows, the size of one head. g and b are of the heads
    of q and k, and value heads that share one share them.

    Differs from the published one in: nothing.

    Weights of flash-linear-attention: qkv_proj is q_proj, k_proj and v_proj
    one below the other, convolution.short_convolution is q_conv1d, k_conv1d
    and v_conv1d, norm is o_norm.

    Args:
        dim: width D of x and y.
        num_heads: heads H of q and k.
        head_dim: their size K; dim / num_heads if None.
        num_v_heads: value heads HV, a multiple of H; H if None.
        expand_v: V / K.
        conv_size: width of the convolution, 2 to 4; None: there is none.
        allow_neg_eigval: b in (0, 2), not (0, 1) (Grazzi et al. 2025).
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
        self.f_proj = low_rank(dim, V, H * K, bias=False, **factory)
        self.decay = Decay(
            H,
            K,
            A_range=A_range,
            dt_range=dt_range,
            lower_bound=lower_bound,
            **factory,
        )
        self.b_proj = nn.Linear(dim, H * K, bias=False, **factory)
        self.w_proj = nn.Linear(dim, HV * V, bias=False, **factory)
        self.gate_proj = low_rank(dim, V, HV * V, bias=True, **factory)
        self.norm = OutputNorm(V, "sigmoid", eps=norm_eps, **factory)
        self.o_proj = nn.Linear(HV * V, dim, bias=False, **factory)

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, convolution) after these tokens."""
        q, k, v, past = self.convolution(self.qkv_proj(x), state, cu_seqlens)
        g = self.decay(self.f_proj(x)).view(k.shape)
        b = write_strength(self.b_proj(x), self.allow_neg_eigval).view(k.shape)
        w = write_strength(self.w_proj(x), False).view(v.shape)
        v, erase_key = gated_deltanet2_operands(k, v, b, w)
        g = per_value_head(g, v.shape[2])
        o, S = run_recurrence(
            q, k, v, g, erase_key=erase_key, state=state, cu_seqlens=cu_seqlens
        )
        y = self.o_proj(self.norm(o, self.gate_proj(x)))
        return y, LayerState(S=S, convolution=past)
