"""Gated DeltaNet (Yang et al. 2025)."""

from __future__ import annotations

import torch
from torch import nn

from fastweights.layers.common.convolution import HeadsConvolution
from fastweights.layers.common.fused_step import fused_layer_step
from fastweights.layers.common.gates import Decay, write_strength
from fastweights.layers.common.layer import FactoryOptions, FamilyLayer, Hidden
from fastweights.layers.common.layer_arguments import (
    head_size,
    num_value_heads,
    scaled_size,
)
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.state import LayerState, Offsets, run_recurrence


class GatedDeltaNet(FamilyLayer):
    """Forget by e^g, then correct by the delta rule (arXiv 2412.06464).

        q, k, v = silu(convolution(W_qkv x)), q and k of unit length
        g = -exp(A_log) softplus(W_a x + dt_bias)
        beta = sigmoid(W_b x)
        y = W_o (norm(o) * silu(W_g x)), o by fastweights.gated_deltanet

    Public implementations differ. flash-linear-attention and Qwen3-Next have
    no bias for beta, the authors' own code has one (``beta_bias``). The
    authors and flash-linear-attention draw A from (0, 16), Qwen3-Next from
    (0.01, 16), Mamba-2 from (1, 16), which is the default here. dt_bias is
    drawn everywhere as here, but in Qwen3-Next it is 1: every head then
    starts by forgetting half in 0.03 to 53 tokens. The authors' sizes are
    head_dim 256 with expand_v 2 and 0.75 dim / 256 heads; Qwen3-Next's are
    head_dim 128, expand_v 1, twice as many value heads as heads and
    norm_eps 1e-6.

    Differs from the published one in: A, from (1, 16) where the authors
    have ``A_range=(0, 16)``; expand_v, 1 for their 2; heads of dim /
    num_heads for their 256; no bias of beta (``beta_bias``).

    Weights of flash-linear-attention: qkv_proj is q_proj, k_proj and v_proj
    one below the other, convolution.short_convolution is q_conv1d, k_conv1d
    and v_conv1d, ab_proj is a_proj and b_proj, norm is o_norm. Of
    Qwen3-Next: the rows of in_proj_qkvz are, for each head of q and k in
    turn, its q, its k, the v and the z of its value heads (z is gate_proj),
    and those of in_proj_ba its b and its a; conv1d has the order of
    short_convolution.

    Args:
        dim: width D of x and y.
        num_heads: heads H of q and k.
        head_dim: their size K; dim / num_heads if None.
        num_v_heads: value heads HV, a multiple of H; H if None. Consecutive
            value heads share a head of q and k.
        expand_v: V / K.
        conv_size: width of the convolution, 2 to 4; None: there is none.
        allow_neg_eigval: beta in (0, 2), not (0, 1) (Grazzi et al. 2025).
        beta_bias: whether W_b has a bias, 0 at the start.
        output_gate: whether the output is multiplied by silu(W_g x).
        A_range, dt_range: as in :class:`fastweights.layers.Decay`.
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
        beta_bias: bool = False,
        output_gate: bool = True,
        A_range: tuple[float, float] = (1.0, 16.0),
        dt_range: tuple[float, float] = (1e-3, 1e-1),
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
        self.ab_proj = nn.Linear(dim, 2 * HV, bias=False, **factory)
        self.b_bias = (
            nn.Parameter(torch.empty(HV, **factory)) if beta_bias else None
        )
        self.decay = Decay(HV, A_range=A_range, dt_range=dt_range, **factory)
        self.gate_proj: nn.Linear | None = None
        if output_gate:
            self.gate_proj = nn.Linear(dim, HV * V, bias=False, **factory)
        self.norm = OutputNorm(
            V, "silu" if output_gate else None, eps=norm_eps, **factory
        )
        self.o_proj = nn.Linear(HV * V, dim, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set beta's bias, if it has one, to 0."""
        if self.b_bias is not None:
            self.b_bias.zero_()

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, convolution) after these tokens."""
        q, k, v, past = self.convolution(self.qkv_proj(x), state, cu_seqlens)
        a, b = self.ab_proj(x).chunk(2, -1)
        b = b if self.b_bias is None else b + self.b_bias.to(b.dtype)
        g, beta = self.decay(a), write_strength(b, self.allow_neg_eigval)
        o, S = run_recurrence(
            q, k, v, g, beta, state=state, cu_seqlens=cu_seqlens
        )
        gate = None if self.gate_proj is None else self.gate_proj(x)
        y = self.o_proj(self.norm(o, gate))
        return y, LayerState(S=S, convolution=past)

    def fused_step(
        self, x: Hidden, norm: nn.RMSNorm, state: LayerState
    ) -> Hidden | None:
        """x + layer(norm(x)), in few launches: :meth:`.Layer.fused_step`."""
        if self.b_bias is not None:
            return None
        modules = self.qkv_proj, self.ab_proj, self.gate_proj
        return fused_layer_step(
            x,
            norm,
            self,
            GatedDeltaNet,
            state,
            modules,
            lambda ab, gate: (*ab.chunk(2, -1), gate),
        )
