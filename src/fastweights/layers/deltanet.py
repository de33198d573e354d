"""DeltaNet (Schlag et al. 2021; Yang et al. 2024)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.layers.convolution import HeadsConvolution
from fastweights.layers.parts import (
    Factory,
    OutputNorm,
    check_input,
    check_sizes,
)
from fastweights.layers.state import LayerState, Offsets, recur, updated


class DeltaNet(nn.Module):
    """Correct what the state returns for a key (arXiv 2406.06484).

        q, k, v = convolution(W_qkv x), q and k of unit length
        beta = sigmoid(W_b x)
        y = W_o norm(o), o by fastweights.deltanet

    The original (arXiv 2102.11174) has no convolution and takes elu(x) + 1
    for SiLU, with keys that sum to one. As in flash-linear-attention the
    output has no gate by default.

    Args:
        dim: width D of x and y.
        num_heads: heads H of q, k and v.
        head_dim: size K of a head of q and k; dim / num_heads if None.
        expand_v: V / K.
        conv_size: width of the convolution; None: there is none.
        allow_neg_eigval: beta in (0, 2), not (0, 1) (Grazzi et al. 2025).
        gate: whether the output is multiplied by silu(W_g x).
        norm_eps: of the output norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        expand_v: float = 1.0,
        conv_size: int | None = 4,
        allow_neg_eigval: bool = False,
        gate: bool = False,
        norm_eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, num_heads=num_heads)
        H, K = num_heads, head_dim or dim // num_heads
        V = int(K * expand_v)
        check_sizes(head_dim=K, **{"expand_v * head_dim": V})
        self.dim, self.allow_neg_eigval = dim, allow_neg_eigval
        to: Factory = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, H * (2 * K + V), bias=False, **to)
        self.convolution = HeadsConvolution((H, H), (K, V), conv_size, **to)
        self.b_proj = nn.Linear(dim, H, bias=False, **to)
        self.g_proj = nn.Linear(dim, H * V, bias=False, **to) if gate else None
        self.norm = OutputNorm(V, "silu" if gate else None, eps=norm_eps, **to)
        self.o_proj = nn.Linear(H * V, dim, bias=False, **to)

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
        beta = self.b_proj(x).float().sigmoid()
        if self.allow_neg_eigval:
            beta = 2 * beta
        o, S = recur(q, k, v, None, beta, state=state, cu_seqlens=cu_seqlens)
        gate = None if self.g_proj is None else self.g_proj(x)
        y = self.o_proj(self.norm(o, gate))
        return y, updated(state, S=S, convolution=inputs)
