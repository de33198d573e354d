"""DeltaNet (Schlag et al. 2021; Yang et al. 2024)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.heads import l2norm
from fastweights.layers.common.convolution import HeadsConvolution
from fastweights.layers.common.gates import write_strength
from fastweights.layers.common.layer import FactoryOptions, FamilyLayer, Hidden
from fastweights.layers.common.layer_arguments import (
    check_one_of,
    head_size,
    scaled_size,
)
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.state import LayerState, Offsets, run_recurrence

Heads = Float[Tensor, "B T H K"]
FEATURES = {
    "silu": F.silu,
    "relu": F.relu,
    "elu": lambda x: F.elu(x) + 1,
    "identity": lambda x: x,
}


class DeltaNet(FamilyLayer):
    """Correct what the state returns for a key (arXiv 2406.06484).

        q, k, v = silu(convolution(W_qkv x)), q and k of unit length
        beta = sigmoid(W_b x)
        y = W_o norm(o), o by fastweights.deltanet

    The original (arXiv 2102.11174, eq. 24) has no convolution, and takes
    elu(x) + 1 for SiLU, with queries and keys that sum to one:
    ``conv_size=None, qk_activation="elu", qk_norm_type="sum"`` (there v has no
    activation; here and in flash-linear-attention it has SiLU). As in
    flash-linear-attention the output has no gate by default.

    Differs from the published one in: nothing, by its defaults.

    Weights of flash-linear-attention: qkv_proj is q_proj, k_proj and v_proj
    one below the other, convolution.short_convolution is q_conv1d, k_conv1d
    and v_conv1d, norm is o_norm.

    Args:
        dim: width D of x and y.
        num_heads: heads H of q, k and v.
        head_dim: size K of a head of q and k; dim / num_heads if None.
        expand_v: V / K.
        conv_size: width of the convolution, 2 to 4; None: there is none.
        qk_activation: of q and k, after the convolution: "silu", "relu",
            "elu" (plus 1) or "identity".
        qk_norm_type: "l2": q and k are divided by their length; "sum": by the
            sum of their channels, which has to stay away from 0.
        allow_neg_eigval: beta in (0, 2), not (0, 1) (Grazzi et al. 2025).
        output_gate: whether the output is multiplied by silu(W_g x).
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
        qk_activation: Literal["silu", "relu", "elu", "identity"] = "silu",
        qk_norm_type: Literal["l2", "sum"] = "l2",
        allow_neg_eigval: bool = False,
        output_gate: bool = False,
        norm_eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_one_of(tuple(FEATURES), qk_activation=qk_activation)
        check_one_of(("l2", "sum"), qk_norm_type=qk_norm_type)
        H, K = num_heads, head_size(head_dim, dim, num_heads)
        V = scaled_size("expand_v", expand_v, head_dim=K)
        self.dim, self.allow_neg_eigval = dim, allow_neg_eigval
        self.qk_activation, self.qk_norm_type = qk_activation, qk_norm_type
        is_default = (qk_activation, qk_norm_type) == ("silu", "l2")
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, H * (2 * K + V), bias=False, **factory)
        self.convolution = HeadsConvolution(
            (H, H),
            (K, V),
            conv_size,
            qk_l2norm=is_default,
            activation=is_default,
            **factory,
        )
        self.b_proj = nn.Linear(dim, H, bias=False, **factory)
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
        if not self.convolution.activation:
            q, k, v = self.features(q), self.features(k), F.silu(v)
        beta = write_strength(self.b_proj(x), self.allow_neg_eigval)
        o, S = run_recurrence(
            q, k, v, None, beta, state=state, cu_seqlens=cu_seqlens
        )
        gate = None if self.gate_proj is None else self.gate_proj(x)
        y = self.o_proj(self.norm(o, gate))
        return y, LayerState(S=S, convolution=past)

    def features(self, x: Heads) -> Heads:
        """Activation and norm of q or k, where they are not the usual ones."""
        y = FEATURES[self.qk_activation](x)
        if self.qk_norm_type == "l2":
            return l2norm(y)
        return (y / y.sum(-1, keepdim=True)).to(x.dtype)
