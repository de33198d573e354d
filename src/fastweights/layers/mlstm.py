"""mLSTM (Beck et al. 2024, 2025)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fastweights.dtypes import upcast
from fastweights.heads import HeadLayout, split_heads
from fastweights.layers.common.layer import FactoryOptions, Hidden, Layer
from fastweights.layers.common.layer_arguments import scaled_size
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.state import LayerState, Offsets, state_if_step
from fastweights.ops.mlstm import mlstm, mlstm_step


class MLSTM(Layer):
    """xLSTM's matrix memory as in xLSTM-7B (arXiv 2503.13427).

        q, k, v = W_qkv x
        i = cap(W_i x + b_i),  f = cap(W_f x + b_f),  cap(a) = 15 tanh(a / 15)
        y = W_o (norm(h) * sigmoid(W_g x)), h by fastweights.mlstm

    with logsigmoid(f) for the log of the forget gate and i for that of the
    input gate. The norm is a LayerNorm over each head, with a weight per
    channel of each. At the start the matrices of the gates are 0, b_f goes
    from 3 to 6 over the heads and b_i is -10.

    The first xLSTM (arXiv 2405.04517) has a convolution, an outer projection
    to twice the width and a skip around the memory, which the larger model
    left out. xLSTM-7B's code starts the stabilizer m at 0 and this layer at
    -inf, which differs only in what eps adds to the normaliser.

    Differs from the published one in: m, which starts at -inf for 0.

    Weights of xLSTM-7B: qkv_proj is q, k and v one below the other, gates is
    igate_preact above fgate_preact, gate_proj is ogate_preact, norm is
    multihead_norm.

    Args:
        dim: width D of x and y.
        num_heads: heads H.
        qk_factor: width of q and of k over dim.
        v_factor: width of v over dim.
        gate_cap: bound of the gates' pre-activations, > 0.
        norm_eps: of the output norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qk_factor: float = 0.5,
        v_factor: float = 1.0,
        gate_cap: float = 15.0,
        norm_eps: float = 1e-6,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H = num_heads
        K = scaled_size("qk_factor", qk_factor, H, dim=dim)
        V = scaled_size("v_factor", v_factor, H, dim=dim)
        self.dim, self.gate_cap = dim, gate_cap
        self.layout = HeadLayout(H, H, K, V)
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, H * (2 * K + V), bias=False, **factory)
        self.gates = nn.Linear(dim, 2 * H, **factory)
        self.gate_proj = nn.Linear(dim, H * V, bias=False, **factory)
        self.norm = OutputNorm(
            V, "sigmoid", num_heads=H, center=True, eps=norm_eps, **factory
        )
        self.o_proj = nn.Linear(H * V, dim, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with gates that ignore x, long memories and small writes."""
        self.gates.weight.zero_()
        write, forget = self.gates.bias.chunk(2)
        write.fill_(-10)
        forget.copy_(torch.linspace(3, 6, len(forget)))

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, m) after the last token of each sequence."""
        q, k, v = split_heads(self.qkv_proj(x), self.layout)
        a = upcast(self.gates(x))
        i, f = (self.gate_cap * torch.tanh(a / self.gate_cap)).chunk(2, -1)
        g = F.logsigmoid(f)
        if stepped := state_if_step(state, x, cu_seqlens):
            S, m = stepped.tensor("S"), stepped.tensor("m")
            h = mlstm_step(q, k, v, g, i, state=(S, m), rows=stepped.rows)
        else:
            memory = None
            if state is not None:
                memory = state.batch_field("S"), state.batch_field("m")
            h, (S, m) = mlstm(
                q, k, v, g, i, initial_state=memory, cu_seqlens=cu_seqlens
            )
        y = self.o_proj(self.norm(h, self.gate_proj(x)))
        return y, LayerState(S=S, m=m)
