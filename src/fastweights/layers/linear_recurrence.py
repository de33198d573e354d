"""One layer for every recurrence of the family, for comparisons."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fastweights.layers.common.convolution import HeadsConvolution
from fastweights.layers.common.fused_step import fused_layer_step
from fastweights.layers.common.gates import Decay, low_rank, write_strength
from fastweights.layers.common.layer import FactoryOptions, FamilyLayer, Hidden
from fastweights.layers.common.layer_arguments import (
    check_one_of,
    head_size,
    scaled_size,
)
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.state import LayerState, Offsets, run_recurrence

Rule = Literal["additive", "delta"]
Per = Literal["head", "channel", "constant"]


class LinearRecurrence(FamilyLayer):
    """Any member of the family, all of them in the same surroundings.

        q, k, v = silu(convolution(W_qkv x)), q and k of unit length
        g = -exp(A_log) softplus(W_a x + dt_bias), per head or per channel
        beta = sigmoid(W_b x), for the delta rule
        y = W_o (norm(o) * silu(W_g x)), o by fastweights.linear_recurrence

    The published layers differ in more than their recurrence: linear
    attention and GLA came without a convolution and without unit keys, for
    one. A comparison of recurrences has to hold everything else fixed, and
    this layer does. With ``decay="head"`` and ``rule="delta"`` it is
    :class:`fastweights.layers.GatedDeltaNet`, whose ab_proj is a_proj and
    b_proj one below the other; with ``decay="channel"`` it has
    :class:`KimiDeltaAttention`'s gate, and the output gate of the others. The
    additive rule writes with strength one.

    Differs from the published one in: its surroundings, which are Gated
    DeltaNet's for every recurrence.

    Args:
        dim: width D of x and y.
        num_heads: heads H.
        head_dim: their size K; dim / num_heads if None.
        rule: "additive" adds k v^T to the state; "delta" corrects what the
            state answers to k.
        decay: None keeps everything; "head" or "channel" decays the state
            by one factor per head, or by one per head and key channel;
            "constant" by one per head that no token changes, a is 0.
        expand_v: V / K.
        conv_size: width of the convolution, 2 to 4; None: there is none.
        activation: whether q, k and v have SiLU. Without it keys may point
            anywhere, where SiLU all but keeps them among the positive.
        qk_l2norm: whether q and k are brought to unit length.
        output_gate: whether the output is multiplied by silu(W_g x).
        allow_neg_eigval: beta in (0, 2), not (0, 1) (Grazzi et al. 2025).
        A_range, dt_range: as in :class:`fastweights.layers.Decay`.
        norm_eps: of the output norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        rule: Rule = "delta",
        decay: Per | None = "head",
        expand_v: float = 1.0,
        conv_size: int | None = 4,
        activation: bool = True,
        qk_l2norm: bool = True,
        output_gate: bool = True,
        allow_neg_eigval: bool = False,
        A_range: tuple[float, float] = (1.0, 16.0),
        dt_range: tuple[float, float] = (1e-3, 1e-1),
        norm_eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_one_of(("additive", "delta"), rule=rule)
        check_one_of((None, "head", "channel", "constant"), decay=decay)
        H, K = num_heads, head_size(head_dim, dim, num_heads)
        V = scaled_size("expand_v", expand_v, head_dim=K)
        self.dim, self.allow_neg_eigval = dim, allow_neg_eigval
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, H * (2 * K + V), bias=False, **factory)
        self.convolution = HeadsConvolution(
            (H, H),
            (K, V),
            conv_size,
            qk_l2norm=qk_l2norm,
            activation=activation,
            **factory,
        )
        self.a_proj: nn.Module | None = None
        self.decay: Decay | None = None
        if decay is not None:
            channels = K if decay == "channel" else 1
            self.decay = Decay(
                H, channels, A_range=A_range, dt_range=dt_range, **factory
            )
        if decay == "head":
            self.a_proj = nn.Linear(dim, H, bias=False, **factory)
        if decay == "channel":
            self.a_proj = low_rank(dim, V, H * K, bias=False, **factory)
        self.b_proj = (
            nn.Linear(dim, H, bias=False, **factory)
            if rule == "delta"
            else None
        )
        self.gate_proj: nn.Linear | None = None
        if output_gate:
            self.gate_proj = nn.Linear(dim, H * V, bias=False, **factory)
        self.norm = OutputNorm(
            V, "silu" if output_gate else None, eps=norm_eps, **factory
        )
        self.o_proj = nn.Linear(H * V, dim, bias=False, **factory)

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, convolution) after these tokens."""
        q, k, v, past = self.convolution(self.qkv_proj(x), state, cu_seqlens)
        g, beta, gate = self.log_decay(x), None, None
        if self.b_proj is not None:
            beta = write_strength(self.b_proj(x), self.allow_neg_eigval)
        if self.gate_proj is not None:
            gate = self.gate_proj(x)
        o, S = run_recurrence(
            q, k, v, g, beta, state=state, cu_seqlens=cu_seqlens
        )
        y = self.o_proj(self.norm(o, gate))
        return y, LayerState(S=S, convolution=past)

    def log_decay(self, x: Hidden) -> Tensor | None:
        """g of these tokens, [B, T, H] or [B, T, H, K]; None without one."""
        if self.decay is None:
            return None
        if self.a_proj is None:
            return self.decay(x.new_zeros(*x.shape[:2], len(self.decay.A_log)))
        return self.decay(self.a_proj(x))

    def fused_step(
        self, x: Hidden, norm: nn.RMSNorm, state: LayerState
    ) -> Hidden | None:
        """x + layer(norm(x)), in few launches: :meth:`.Layer.fused_step`."""
        if self.decay is not None and self.a_proj is None:
            return None
        modules = self.qkv_proj, self.a_proj, self.b_proj, self.gate_proj
        return fused_layer_step(
            x, norm, self, LinearRecurrence, state, modules
        )
