"""TTT-Linear and TTT-MLP (Sun et al. 2024)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.deep import ttt
from fastweights.dtypes import upcast
from fastweights.heads import HeadLayout, split_heads
from fastweights.layers.common.layer import FactoryOptions, Hidden, Layer
from fastweights.layers.common.layer_arguments import check_even, head_size
from fastweights.layers.common.rotary import rotary
from fastweights.layers.common.state import (
    LayerState,
    Offsets,
    token_positions,
)
from fastweights.layers.common.unpacked_rows import UnpackedRows


class TTTLinear(Layer):
    """Weights trained on v - k from k, by mini-batches (arXiv 2407.04620).

        q, k, v = W_qkv x, q and k turned by their place in the mini-batch
        rate = max_rate sigmoid(W_rate x + b) / head_dim, per head
        y = W_o norm(o), o by fastweights.deep.ttt

    with an affine model per head and a LayerNorm behind it, whose first
    weights are learned, and norm a LayerNorm over all heads together. Token t
    of a mini-batch steps by max(1 / (t + 1) + step_offset_t, 0), an offset
    learned from 0. This is the authors' layer for a Transformer's backbone;
    for Mamba's it shares one projection of q and k, convolves them, and has a
    gate. Rotary positions turn neighbouring channels.

    Differs from the published one in: nothing, by its defaults, of the
    layer for a Transformer's backbone.

    Weights of the authors' ttt.py: qkv_proj is q_proj, k_proj and v_proj one
    below the other, rate_proj is learnable_ttt_lr_weight and _bias,
    step_offset is learnable_token_idx, W1, b1, W2 and b2 are their namesakes
    (b without its second dimension), model_norm is ttt_norm.

    Args:
        dim: width D of x and y.
        num_heads: heads H.
        head_dim: their size, even; dim / num_heads if None.
        mini_batch: tokens whose gradients are taken at the same weights.
        max_rate: bound of the learning rate times head_dim; None: 1 for
            TTT-Linear, 0.1 for TTT-MLP, which the authors start at 0.01.
        rope_theta: base of the rotary positions.
        norm_eps: of the LayerNorm before W_o.
    """

    expansion: int | None = None
    """Width of the model's hidden layer over head_dim; None: there is none."""

    default_max_rate = 1.0

    reads_packs_as_rows = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        mini_batch: int = 16,
        max_rate: float | None = None,
        rope_theta: float = 1e4,
        norm_eps: float = 1e-6,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        max_rate = self.default_max_rate if max_rate is None else max_rate
        H, K = num_heads, head_size(head_dim, dim, num_heads)
        check_even("head_dim", K)
        self.dim, self.layout = dim, HeadLayout(H, H, K, K)
        self.mini_batch, self.max_rate, self.rope_theta = (
            mini_batch,
            max_rate,
            rope_theta,
        )
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, 3 * H * K, bias=False, **factory)
        self.rate_proj = nn.Linear(dim, H, **factory)
        self.step_offset = nn.Parameter(torch.empty(mini_batch, **factory))
        widths = (
            [K, K] if self.expansion is None else [K, self.expansion * K, K]
        )
        self.depth = len(widths) - 1
        for i in range(self.depth):
            W = torch.empty(H, widths[i], widths[i + 1], **factory)
            b = torch.empty(H, widths[i + 1], **factory)
            self.register_parameter(f"W{i + 1}", nn.Parameter(W))
            self.register_parameter(f"b{i + 1}", nn.Parameter(b))
        self.model_norm_weight = nn.Parameter(torch.empty(H, K, **factory))
        self.model_norm_bias = nn.Parameter(torch.empty(H, K, **factory))
        self.post_norm = nn.LayerNorm(H * K, eps=norm_eps, **factory)
        self.o_proj = nn.Linear(H * K, dim, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw small first weights; set steps of 1 / (t + 1)."""
        for W, b in self.start:
            W.normal_(std=0.02)
            b.zero_()
        self.rate_proj.weight.normal_(std=0.02)
        self.rate_proj.bias.zero_()
        self.step_offset.zero_()
        self.model_norm_weight.fill_(1)
        self.model_norm_bias.zero_()

    @property
    def start(self) -> list[tuple[Tensor, Tensor]]:
        """The weights with which every sequence begins, layer by layer."""
        numbers = range(1, self.depth + 1)
        return [
            (getattr(self, f"W{i}"), getattr(self, f"b{i}")) for i in numbers
        ]

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, num_read) after each sequence's last token.

        S [N, H, 2, P] holds what a head's P weights have learned, and the
        gradients of a mini-batch that is not complete.
        """
        q, k, v = split_heads(self.qkv_proj(x), self.layout)
        position = token_positions(x.shape[1], x.device, state, cu_seqlens)
        position = position % self.mini_batch
        q, k = (
            rotary_neighbours(t, position, self.rope_theta) for t in (q, k)
        )
        rate = (
            upcast(self.rate_proj(x)).sigmoid() * self.max_rate / q.shape[-1]
        )
        unpacked = UnpackedRows(x, state, cu_seqlens)
        offset = upcast(self.step_offset)
        numbers = torch.ones_like(offset).cumsum(0)
        q, k, v, rate = (unpacked.spread(t) for t in (q, k, v, rate))
        o, S = ttt(
            q,
            k,
            v,
            rate,
            self.start,
            (self.model_norm_weight, self.model_norm_bias),
            (1 / numbers + offset).clamp_min(0),
            initial_state=state and state.batch_field("S"),
            position=unpacked.num_read,
            lengths=unpacked.lengths,
        )
        y = self.o_proj(self.post_norm(unpacked.pack(o).flatten(2)))
        return y, LayerState(S=S, num_read=unpacked.num_read_after())


class TTTMLP(TTTLinear):
    """TTT-Linear with a hidden layer, four times as wide, in its model.

    f(z) = W2^T gelu(W1^T z + b1) + b2 in place of W1^T z + b1; all else is
    :class:`TTTLinear`, its arguments too.

    Differs from the published one in: a bound of the rate of 0.1 from the
    first step, which the authors reach from 0.01.

    Args:
        dim, num_heads, head_dim, mini_batch, max_rate, rope_theta, norm_eps:
            as in :class:`TTTLinear`.
    """

    expansion = 4
    default_max_rate = 0.1


def rotary_neighbours(
    x: Float[Tensor, "B T H K"], position: Tensor, theta: float
) -> Float[Tensor, "B T H K"]:
    """Rotary positions for pairs of neighbouring channels."""
    halves = x.unflatten(-1, (-1, 2)).mT.flatten(-2)
    turned = rotary(halves, position, theta)
    return turned.unflatten(-1, (2, -1)).mT.flatten(-2)
