"""Comba (Hu et al. 2025)."""

from __future__ import annotations

import torch
from torch import nn

from fastweights.heads import l2norm
from fastweights.layers.common.convolution import HeadsConvolution
from fastweights.layers.common.gates import Decay, write_strength
from fastweights.layers.common.layer import FactoryOptions, FamilyLayer, Hidden
from fastweights.layers.common.layer_arguments import (
    head_size,
    num_value_heads,
    scaled_size,
)
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.state import LayerState, Offsets, run_recurrence
from fastweights.ops.members import comba_operands


class Comba(FamilyLayer):
    """Gated DeltaNet that erases less than it writes (arXiv 2506.02475).

        q, k, v = silu(convolution(W_qkv x))
        p = sigmoid(d) k, then q = q - D p; q and k of unit length
        g = -exp(A_log) softplus(W_a x + dt_bias)
        beta = sigmoid(W_b x)
        y = W_o (norm(o) * sigmoid(W_g x)), o by fastweights.comba

    d and D are numbers per head of q and k. The authors found D = 0.02 at
    the start better in small models (``correction``). Their code, in
    flash-linear-attention, brings p to unit length, too, so that d counts
    for q only (``unit_p``). Their sizes are head_dim 256 with expand_v 2 and
    0.75 dim / 256 heads.

    Differs from the published one in: A, from (1, 16) where the authors have
    ``A_range=(0, 16)``; expand_v, 1 for their 2; heads of dim / num_heads for
    their 256; p as in the paper, of which the authors' code has the direction.

    Weights of flash-linear-attention: qkv_proj is q_proj, k_proj and v_proj
    one below the other, convolution.short_convolution is q_conv1d, k_conv1d
    and v_conv1d, ab_proj is a_proj and b_proj, norm is o_norm, d is
    decay (and the decay's A_log and dt_bias are decay.A_log and
    decay.dt_bias).

    Args:
        dim: width D of x and y.
        num_heads: heads H of q and k.
        head_dim: their size K; dim / num_heads if None.
        num_v_heads: value heads HV, a multiple of H; H if None. Consecutive
            value heads share a head of q and k.
        expand_v: V / K.
        conv_size: width of the convolution, 2 to 4; None: there is none.
        correction: D at the start.
        unit_p: whether p is brought to unit length.
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
        correction: float = 1.0,
        unit_p: bool = False,
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
        self.dim, self.correction, self.unit_p = dim, correction, unit_p
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        width = 2 * H * K + HV * V
        self.qkv_proj = nn.Linear(dim, width, bias=False, **factory)
        self.convolution = HeadsConvolution(
            (H, HV), (K, V), conv_size, qk_l2norm=False, **factory
        )
        self.d = nn.Parameter(torch.empty(H, **factory))
        self.D = nn.Parameter(torch.empty(H, **factory))
        self.ab_proj = nn.Linear(dim, 2 * HV, bias=False, **factory)
        self.decay = Decay(HV, A_range=A_range, dt_range=dt_range, **factory)
        self.gate_proj = nn.Linear(dim, HV * V, bias=False, **factory)
        self.norm = OutputNorm(V, "sigmoid", eps=norm_eps, **factory)
        self.o_proj = nn.Linear(HV * V, dim, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set d to 1, and D to the correction."""
        self.d.fill_(1)
        self.D.fill_(self.correction)

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, convolution) after these tokens."""
        q, k, v, past = self.convolution(self.qkv_proj(x), state, cu_seqlens)
        share = self.d.sigmoid()[:, None].to(k.dtype)
        q = l2norm(q - self.D[:, None].to(q.dtype) * share * k)
        k = l2norm(k)
        p = k if self.unit_p else share * k
        a, b = self.ab_proj(x).chunk(2, -1)
        g, beta = self.decay(a), write_strength(b, False)
        v, g, erase_key = comba_operands(v, p, g, beta)
        o, S = run_recurrence(
            q, k, v, g, erase_key=erase_key, state=state, cu_seqlens=cu_seqlens
        )
        y = self.o_proj(self.norm(o, self.gate_proj(x)))
        return y, LayerState(S=S, convolution=past)
