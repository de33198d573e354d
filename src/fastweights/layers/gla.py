"""Gated linear attention (Yang et al. 2024)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fastweights.dtypes import upcast
from fastweights.layers.common.convolution import HeadsConvolution
from fastweights.layers.common.gates import low_rank
from fastweights.layers.common.layer import FactoryOptions, FamilyLayer, Hidden
from fastweights.layers.common.layer_arguments import scaled_size
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.state import LayerState, Offsets, run_recurrence


class GatedLinearAttention(FamilyLayer):
    """The additive rule with a decay per key channel (arXiv 2312.06635).

        q, k, v = W_qkv x
        g = logsigmoid(W_2 W_1 x + b) / 16
        y = W_o (norm(o) * silu(W_g x)), o by fastweights.gla

    b starts at 0, so that every channel starts by forgetting half in about
    16 tokens. The paper has neither a convolution nor unit keys; zoology's
    comparisons give it a convolution, which SiLU follows (``conv_size``).

    Differs from the published one in: b, which starts at 0.

    Weights of flash-linear-attention: qkv_proj is q_proj, k_proj and v_proj
    one below the other, f_proj is gk_proj, norm is g_norm_swish_gate.

    Args:
        dim: width D of x and y.
        num_heads: heads H.
        qk_factor: width of q and of k over dim.
        v_factor: width of v over dim.
        gate_rank: rank of W_2 W_1.
        temperature: by which logsigmoid is divided, > 0.
        conv_size: width of a convolution, 2 to 4; None, as published: there
            is none.
        norm_eps: of the output norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qk_factor: float = 0.5,
        v_factor: float = 1.0,
        gate_rank: int = 16,
        temperature: float = 16.0,
        conv_size: int | None = None,
        norm_eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H = num_heads
        K = scaled_size("qk_factor", qk_factor, H, dim=dim)
        V = scaled_size("v_factor", v_factor, H, dim=dim)
        self.dim, self.temperature, self.K = dim, temperature, K
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, H * (2 * K + V), bias=False, **factory)
        self.convolution = HeadsConvolution(
            (H, H),
            (K, V),
            conv_size,
            qk_l2norm=False,
            activation=conv_size is not None,
            **factory,
        )
        self.f_proj = low_rank(dim, gate_rank, H * K, bias=True, **factory)
        self.gate_proj = nn.Linear(dim, H * V, bias=False, **factory)
        self.norm = OutputNorm(V, "silu", eps=norm_eps, **factory)
        self.o_proj = nn.Linear(H * V, dim, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set b to 0."""
        self.f_proj.get_parameter("1.bias").zero_()

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, convolution) after these tokens."""
        q, k, v, past = self.convolution(self.qkv_proj(x), state, cu_seqlens)
        g = F.logsigmoid(upcast(self.f_proj(x))) / self.temperature
        g = g.unflatten(-1, (-1, self.K))
        o, S = run_recurrence(q, k, v, g, state=state, cu_seqlens=cu_seqlens)
        y = self.o_proj(self.norm(o, self.gate_proj(x)))
        return y, LayerState(S=S, convolution=past)
