"""Layers with a fixed decay per head: RetNet, Lightning Attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fastweights.dtypes import compute_dtype
from fastweights.heads import HeadLayout, split_heads
from fastweights.layers.common.layer import FactoryOptions, FamilyLayer, Hidden
from fastweights.layers.common.layer_arguments import (
    check_even,
    head_size,
    scaled_size,
)
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.rotary import rotary
from fastweights.layers.common.state import (
    LayerState,
    Offsets,
    run_recurrence,
    token_counts,
    token_positions,
)
from fastweights.ops.members import lightning_log_decay, retnet_log_decay
from fastweights.ranks.group import token_offset_and_total


class MultiScaleRetention(FamilyLayer):
    """RetNet's layer: a fixed decay per head (Sun et al. 2023, eq. 8).

        q, k, v = W_qkv x, q and k turned by their positions
        y = W_o (norm(o) * silu(W_g x)), o by fastweights.retention

    The paper norms the heads by GroupNorm; its later code and
    flash-linear-attention take the RMS norm that stands here. The paper's
    code turns neighbouring channels as a pair, flash-linear-attention and
    this layer channels half a head apart, which is the same up to the order
    of the rows of W_q and of W_k.

    Differs from the published one in: RMS norm for GroupNorm; which
    channels turn as a pair.

    Weights of flash-linear-attention: qkv_proj is q_proj, k_proj and v_proj
    one below the other, norm is g_norm_swish_gate.

    Args:
        dim: width D of x and y.
        num_heads: heads H; head h decays by log(1 - 2^(-5-h)).
        v_factor: width of v over dim.
        rope_theta: base of the rotary positions.
        norm_eps: of the output norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        v_factor: float = 2.0,
        rope_theta: float = 1e4,
        norm_eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H, K = num_heads, head_size(None, dim, num_heads)
        V = scaled_size("v_factor", v_factor, H, dim=dim)
        check_even("dim / num_heads", K)  # channels turn in pairs
        self.dim, self.rope_theta = dim, rope_theta
        self.layout = HeadLayout(H, H, K, V)
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, H * (2 * K + V), bias=False, **factory)
        self.gate_proj = nn.Linear(dim, H * V, bias=False, **factory)
        self.norm = OutputNorm(V, "silu", eps=norm_eps, **factory)
        self.o_proj = nn.Linear(H * V, dim, bias=False, **factory)

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, num_read) after each sequence's last token."""
        q, k, v = split_heads(self.qkv_proj(x), self.layout)
        T = x.shape[1]
        start, total = token_offset_and_total(T)
        position = token_positions(T, x.device, state, cu_seqlens, start)
        q, k = (
            rotary(q, position, self.rope_theta),
            rotary(k, position, self.rope_theta),
        )
        g = retnet_log_decay(
            v.shape[2], device=x.device, dtype=compute_dtype(q.dtype)
        )
        o, S = run_recurrence(q, k, v, g, state=state, cu_seqlens=cu_seqlens)
        y = self.o_proj(self.norm(o, self.gate_proj(x)))
        num_read = token_counts(x, cu_seqlens, state, total)
        if state is not None:
            num_read = num_read + state.batch_field("num_read")
        return y, LayerState(S=S, num_read=num_read)


class LightningAttention(FamilyLayer):
    """Lightning Attention as in MiniMax-01 (arXiv 2501.08313).

        q, k, v = silu(W_qkv x)
        y = W_o (norm(o) * sigmoid(W_g x))

    with one norm over all heads together, and o by fastweights.retention
    with :func:`fastweights.lightning_log_decay` and scale 1: later layers
    forget less.

    Public implementations differ. With a number of heads that is no power of
    two, MiniMax's own code takes ALiBi's slopes, as here, and transformers
    takes 2^(-8h/H) all the same. transformers divides the layer's number by
    num_layers - 1 + 1e-5 and not by num_layers - 1, which changes g by less
    than 2e-5 of the slope.

    Differs from the published one in: the order of the rows of W_qkv.

    Weights of MiniMax: the rows of its qkv_proj are q, k and v of the first
    head, then of the second, and so on; here q of all heads, then k, then v.
    gate_proj is output_gate, o_proj is out_proj.

    Args:
        dim: width D of x and y.
        num_heads: heads H.
        head_dim: size of a head; dim / num_heads if None.
        layer: the layer's number, from 0.
        num_layers: layers of the model.
        norm_eps: of the output norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        layer: int,
        num_layers: int,
        norm_eps: float = 1e-6,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H, K = num_heads, head_size(head_dim, dim, num_heads)
        self.dim, self.layout = dim, HeadLayout(H, H, K, K)
        self.layer, self.num_layers = layer, num_layers
        lightning_log_decay(H, layer, num_layers)  # checks them
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, 3 * H * K, bias=False, **factory)
        self.gate_proj = nn.Linear(dim, H * K, bias=False, **factory)
        self.norm = OutputNorm(H * K, "sigmoid", eps=norm_eps, **factory)
        self.o_proj = nn.Linear(H * K, dim, bias=False, **factory)

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S) after the last token of each sequence."""
        qkv = F.silu(self.qkv_proj(x))
        q, k, v = split_heads(qkv, self.layout)
        g = lightning_log_decay(
            v.shape[2],
            self.layer,
            self.num_layers,
            device=x.device,
            dtype=compute_dtype(q.dtype),
        )
        o, S = run_recurrence(
            q, k, v, g, state=state, cu_seqlens=cu_seqlens, scale=1.0
        )
        o = o.flatten(2)[:, :, None]
        y = self.o_proj(self.norm(o, self.gate_proj(x)))
        return y, LayerState(S=S)
