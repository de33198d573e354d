"""mLSTM (Beck et al. 2024, 2025)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.layers.parts import (
    Factory,
    OutputNorm,
    check_input,
    check_sizes,
    without_decay,
)
from fastweights.layers.state import LayerState, Offsets, updated
from fastweights.mlstm import mlstm


class MLSTM(nn.Module):
    """xLSTM's matrix memory as in xLSTM-7B (arXiv 2503.13427).

        q, k, v = W_qkv x
        f = cap(W_f x + b_f),  i = cap(W_i x + b_i),  cap(a) = 15 tanh(a / 15)
        y = W_o (norm(h) * sigmoid(W_g x)), h by fastweights.mlstm

    with logsigmoid(f) for the log of the forget gate and i for that of the
    input gate. At the start the matrices of the gates are 0, b_f goes from 3
    to 6 over the heads and b_i is -10. The first xLSTM (arXiv 2405.04517)
    has a convolution, an outer projection to twice the width and a skip
    around the memory, which the larger model left out; it norms the heads
    by LayerNorm.

    Args:
        dim: width D of x and y.
        num_heads: heads H.
        qk_factor: width of q and of k over dim.
        v_factor: width of v over dim.
        cap: bound of the gates' pre-activations, > 0.
        norm_eps: of the output norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qk_factor: float = 0.5,
        v_factor: float = 1.0,
        cap: float = 15.0,
        norm_eps: float = 1e-6,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, num_heads=num_heads)
        H = num_heads
        K, V = int(dim * qk_factor) // H, int(dim * v_factor) // H
        check_sizes(**{"qk_factor * dim / num_heads": K})
        check_sizes(**{"v_factor * dim / num_heads": V})
        if not cap > 0:
            raise ValueError(f"cap: got {cap}, need > 0")
        self.dim, self.cap, self.H = dim, cap, H
        self.widths, self.sizes = (H * K, H * K, H * V), (K, K, V)
        to: Factory = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, H * (2 * K + V), bias=False, **to)
        self.gates = nn.Linear(dim, 2 * H, **to)
        without_decay(self.gates.get_parameter("weight"))
        self.g_proj = nn.Linear(dim, H * V, bias=False, **to)
        self.norm = OutputNorm(V, "sigmoid", eps=norm_eps, **to)
        self.o_proj = nn.Linear(H * V, dim, bias=False, **to)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Gates that know nothing of x, long memories and small writes."""
        self.gates.weight.zero_()
        forget, write = self.gates.bias.chunk(2)
        forget.copy_(torch.linspace(3, 6, self.H))
        write.fill_(-10)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Float[Tensor, "B T D"], LayerState]:
        """y, and the state (S, m) after the last token of each sequence.

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
        a = self.gates(x)
        a = a.to(torch.promote_types(a.dtype, torch.float32))
        f, i = (self.cap * torch.tanh(a / self.cap)).chunk(2, -1)
        memory = None
        if state is not None:
            memory = state.get("S"), state.get("m")
        h, (S, m) = mlstm(
            q,
            k,
            v,
            F.logsigmoid(f),
            i,
            initial_state=memory,
            cu_seqlens=cu_seqlens,
        )
        y = self.o_proj(self.norm(h, self.g_proj(x)))
        return y, updated(state, S=S, m=m)
