"""Kimi Delta Attention (Kimi Team 2025)."""

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


class KimiDeltaAttention(nn.Module):
    """The delta rule with a decay per key channel (arXiv 2510.26692).

        q, k, v = convolution(W_qkv x), q and k of unit length
        g = -exp(A_log) softplus(W_f2 W_f1 x + dt_bias), one per channel of k
        beta = sigmoid(W_b x)
        y = W_o (norm(o) * sigmoid(W_g2 W_g1 x)), o by fastweights.kda

    The gates of the decay and of the output go through V channels, the size
    of one head. The second matrix of the output's gate has a bias in
    flash-linear-attention and none in transformers' Kimi Linear
    (``gate_bias``).

    Args:
        dim: width D of x and y.
        num_heads: heads H of q and k.
        head_dim: their size K.
        num_v_heads: value heads HV, a multiple of H; H if None.
        expand_v: V / K.
        conv_size: width of the convolution; None: there is none.
        allow_neg_eigval: beta in (0, 2), not (0, 1).
        gate_bias: whether W_g2 has a bias.
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
        gate_bias: bool = False,
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
        self.f_proj = low_rank(dim, V, HV * K, bias=False, **to)
        self.decay = Decay(HV, K, A_range=A_range, dt_range=dt_range, **to)
        self.b_proj = nn.Linear(dim, HV, bias=False, **to)
        self.g_proj = low_rank(dim, V, HV * V, bias=gate_bias, **to)
        self.norm = OutputNorm(V, "sigmoid", eps=norm_eps, **to)
        self.o_proj = nn.Linear(HV * V, dim, bias=False, **to)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Float[Tensor, "B T D"], LayerState]:
        """y, and the state (S, convolution) after each sequence's last token.

        Without gradients the one that came in is changed in place.
        """
        check_input(x, self.dim, state, cu_seqlens)
        q, k, v, inputs = self.convolution(self.qkv_proj(x), state, cu_seqlens)
        g, beta = self.decay(self.f_proj(x)), self.b_proj(x).float().sigmoid()
        if self.allow_neg_eigval:
            beta = 2 * beta
        o, S = recur(q, k, v, g, beta, state=state, cu_seqlens=cu_seqlens)
        y = self.o_proj(self.norm(o, self.g_proj(x)))
        return y, updated(state, S=S, convolution=inputs)


def low_rank(
    dim: int,
    rank: int,
    out: int,
    *,
    bias: bool,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """A matrix as the product of two, with a bias on the second or none."""
    return nn.Sequential(
        nn.Linear(dim, rank, bias=False, device=device, dtype=dtype),
        nn.Linear(rank, out, bias=bias, device=device, dtype=dtype),
    )
