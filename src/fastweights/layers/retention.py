"""Layers with a fixed decay per head: RetNet, Lightning Attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.family import lightning_decay, retnet_decay
from fastweights.layers.parts import (
    Factory,
    OutputNorm,
    check_input,
    check_sizes,
    rotary,
)
from fastweights.layers.state import (
    LayerState,
    Offsets,
    lengths,
    positions,
    recur,
    updated,
)


class MultiScaleRetention(nn.Module):
    """RetNet's layer: a fixed decay per head (Sun et al. 2023, eq. 8).

        q, k, v = W_qkv x, q and k turned by their positions
        y = W_o (norm(o) * silu(W_g x)), o by fastweights.retention

    The paper norms the heads by GroupNorm; its later code and
    flash-linear-attention take the RMS norm that stands here.

    Args:
        dim: width D of x and y.
        num_heads: heads H; head h decays by log(1 - 2^(-5-h)).
        expand_v: width of v over dim.
        theta: base of the rotary positions.
        norm_eps: of the output norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        expand_v: float = 2.0,
        theta: float = 1e4,
        norm_eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, num_heads=num_heads)
        H, K, V = num_heads, dim // num_heads, int(dim * expand_v) // num_heads
        check_sizes(**{"dim / num_heads": K})
        check_sizes(**{"expand_v * dim / num_heads": V})
        self.dim, self.H, self.theta = dim, H, theta
        self.widths, self.sizes = (H * K, H * K, H * V), (K, K, V)
        to: Factory = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, H * (2 * K + V), bias=False, **to)
        self.g_proj = nn.Linear(dim, H * V, bias=False, **to)
        self.norm = OutputNorm(V, "silu", eps=norm_eps, **to)
        self.o_proj = nn.Linear(H * V, dim, bias=False, **to)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Float[Tensor, "B T D"], LayerState]:
        """y, and the state (S, position) after each sequence's last token.

        Without gradients the one that came in is changed in place.
        """
        check_input(x, self.dim, state, cu_seqlens)
        q, k, v = (
            part.unflatten(-1, (self.H, size))
            for part, size in zip(
                self.qkv_proj(x).split(self.widths, -1),
                self.sizes,
                strict=True,
            )
        )
        at = positions(x.shape[1], x.device, state, cu_seqlens)
        q, k = rotary(q, at, self.theta), rotary(k, at, self.theta)
        full = torch.promote_types(q.dtype, torch.float32)
        g = retnet_decay(self.H, device=x.device, dtype=full)
        o, S = recur(q, k, v, g, state=state, cu_seqlens=cu_seqlens)
        y = self.o_proj(self.norm(o, self.g_proj(x)))
        position = lengths(x, cu_seqlens)
        if state is not None:
            position = position + state.get("position")
        return y, updated(state, S=S, position=position)


class LightningAttention(nn.Module):
    """Lightning Attention as in MiniMax-01 (arXiv 2501.08313).

        q, k, v = silu(W_qkv x)
        y = W_o (norm(o) * sigmoid(W_g x))

    with one norm over all heads together, and o by fastweights.retention
    with :func:`fastweights.lightning_decay`: later layers forget less. Its
    code does not scale q.

    Args:
        dim: width D of x and y.
        num_heads: heads H.
        layer: the layer's number, from 0.
        num_layers: layers of the model.
        head_dim: size of a head; dim / num_heads if None.
        norm_eps: of the output norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        layer: int,
        num_layers: int,
        *,
        head_dim: int | None = None,
        norm_eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, num_heads=num_heads)
        H, K = num_heads, head_dim or dim // num_heads
        check_sizes(head_dim=K)
        self.dim, self.H = dim, H
        self.layer, self.num_layers = layer, num_layers
        lightning_decay(H, layer, num_layers)  # checks them
        to: Factory = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, 3 * H * K, bias=False, **to)
        self.g_proj = nn.Linear(dim, H * K, bias=False, **to)
        self.norm = OutputNorm(H * K, "sigmoid", eps=norm_eps, **to)
        self.o_proj = nn.Linear(H * K, dim, bias=False, **to)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Float[Tensor, "B T D"], LayerState]:
        """y, and the state (S) after the last token of each sequence.

        Without gradients the one that came in is changed in place.
        """
        check_input(x, self.dim, state, cu_seqlens)
        qkv = F.silu(self.qkv_proj(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.H, -1)) for part in qkv)
        g = lightning_decay(
            self.H, self.layer, self.num_layers, device=x.device
        )
        o, S = recur(q, k, v, g, state=state, cu_seqlens=cu_seqlens, scale=1.0)
        o = o.flatten(2)[:, :, None]
        y = self.o_proj(self.norm(o, self.g_proj(x)))
        return y, updated(state, S=S)
