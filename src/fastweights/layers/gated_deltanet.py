"""Gated DeltaNet (Yang et al. 2025)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.layers.convolution import HeadsConvolution
from fastweights.layers.parts import (
    Decay,
    Factory,
    OutputNorm,
    check_input,
    check_sizes,
)
from fastweights.layers.state import LayerState, Offsets, recur, updated


class GatedDeltaNet(nn.Module):
    """Forget by e^g, then correct by the delta rule (arXiv 2412.06464).

        q, k, v = convolution(W_qkv x), q and k of unit length
        g = -exp(A_log) softplus(W_a x + dt_bias)
        beta = sigmoid(W_b x)
        y = W_o (norm(o) * silu(W_g x)), o by fastweights.gated_deltanet

    Public implementations differ: flash-linear-attention and Qwen3-Next have
    no bias for beta, the authors' own code has one (``beta_bias``); the
    authors draw A from (0, 16), Qwen3-Next from (0.01, 16), Mamba-2 from
    (1, 16), the default here. flash-linear-attention has a convolution for
    each of q, k and v, Qwen3-Next and this layer one for all three, which is
    the same function. The authors' sizes are head_dim 256 with expand_v 2
    and 0.75 dim / 256 heads; Qwen3-Next's are head_dim 128, expand_v 1 and
    twice as many value heads as heads.

    Args:
        dim: width D of x and y.
        num_heads: heads H of q and k.
        head_dim: their size K.
        num_v_heads: value heads HV, a multiple of H; H if None. Consecutive
            value heads share a head of q and k.
        expand_v: V / K.
        conv_size: width of the convolution; None: there is none.
        allow_neg_eigval: beta is in (0, 2), not (0, 1): I - beta k k^T then
            has eigenvalues down to -1, with which a state can count modulo
            two (Grazzi et al. 2025).
        beta_bias: whether W_b has a bias.
        A_range, dt_range: as in :class:`fastweights.layers.Decay`.
        norm_eps: of the output norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        num_v_heads: int | None = None,
        expand_v: float = 1.0,
        conv_size: int | None = 4,
        allow_neg_eigval: bool = False,
        beta_bias: bool = False,
        A_range: tuple[float, float] = (1.0, 16.0),
        dt_range: tuple[float, float] = (1e-3, 1e-1),
        norm_eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H, HV = num_heads, num_v_heads or num_heads
        K, V = head_dim, int(head_dim * expand_v)
        check_sizes(dim=dim, num_heads=H, head_dim=K, num_v_heads=HV)
        check_sizes(**{"expand_v * head_dim": V})
        self.dim, self.allow_neg_eigval = dim, allow_neg_eigval
        to: Factory = {"device": device, "dtype": dtype}
        width = 2 * H * K + HV * V
        self.qkv_proj = nn.Linear(dim, width, bias=False, **to)
        self.convolution = HeadsConvolution((H, HV), (K, V), conv_size, **to)
        self.a_proj = nn.Linear(dim, HV, bias=False, **to)
        self.b_proj = nn.Linear(dim, HV, bias=beta_bias, **to)
        self.decay = Decay(HV, A_range=A_range, dt_range=dt_range, **to)
        self.g_proj = nn.Linear(dim, HV * V, bias=False, **to)
        self.norm = OutputNorm(V, "silu", eps=norm_eps, **to)
        self.o_proj = nn.Linear(HV * V, dim, bias=False, **to)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Float[Tensor, "B T D"], LayerState]:
        """y, and the state after the last token of each sequence.

        The state holds S and convolution. Without gradients the one that
        came in is changed in place and returned.
        """
        check_input(x, self.dim, state, cu_seqlens)
        q, k, v, inputs = self.convolution(self.qkv_proj(x), state, cu_seqlens)
        g, beta = self.decay(self.a_proj(x)), self.b_proj(x).float().sigmoid()
        if self.allow_neg_eigval:
            beta = 2 * beta
        o, S = recur(q, k, v, g, beta, state=state, cu_seqlens=cu_seqlens)
        y = self.o_proj(self.norm(o, self.g_proj(x)))
        return y, updated(state, S=S, convolution=inputs)
