"""LaCT: fast weights that step once per large chunk (Zhang et al. 2025)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.deep import lact
from fastweights.dtypes import upcast
from fastweights.layers.common.layer import FactoryOptions, Hidden, Layer
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
    token_positions,
)
from fastweights.layers.common.unpacked_rows import UnpackedRows
from fastweights.layers.common.window_attention import window_attention


class LaCT(Layer):
    """A SwiGLU network as memory, and attention in a window beside it.

        q, k, v = W_qkv x, q and k normed, RMS over all channels
        a = attention of q, k, v in a window, with rotary positions
        q', k', v' = silu(q s_q + o_q), silu(k s_k + o_k), silu(v),
            q' and k' of unit length per head, with rotary positions
        rates = softplus(W_r x + b_r + softplus^-1(initial_rate)), per matrix
        o by fastweights.deep.lact
        y = W_o (a + norm(o) * silu(W_s x + b_s))

    the last factor per head (arXiv 2505.23884, its language model). The
    memory is read with the weights of the chunk's start: what a token can
    know of its own chunk comes from the window, which should be as long.

    Differs from the published one in: w0 and w2 as full matrices; ``muon``,
    which the authors' configuration leaves off until it is asked for, and
    with it the norms of q and k.

    Weights of the authors' layer_lact_swiglu.py: qkv_proj is qkv, rates_proj
    is lr_proj, w0, w1 and w2 are their transposes, momentum_proj is
    momentum_proj.0, scale_proj is ttt_scale_proj, norm is ttt_norm, and the
    columns of qk_scale and qk_offset are rows here. Their language models
    make w0 and w2 of two factors of rank 32 plus half the identity, to save
    parameters; these start as full matrices, their other option.

    Args:
        dim: width D of x and y.
        num_heads: heads H of the memory, of size dim / num_heads.
        num_attention_heads: heads of the attention; num_heads if None.
            Rotary positions turn heads of their size.
        expansion: width of the memory's hidden layer over its heads' size.
        chunk_size: tokens per step.
        window: tokens that one attends to, with itself; chunk_size if None.
        muon: whether gradients are orthogonalised.
        momentum: whether they are added up over chunks.
        prenorm: whether weights are normed where they are used, and not
            where they are kept; the authors' ttt_prenorm.
        initial_rate: where the rates start.
        rope_theta: base of the rotary positions.
        norm_eps: of the norms.
    """

    reads_packs_as_rows = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_attention_heads: int | None = None,
        expansion: float = 1.0,
        chunk_size: int = 2048,
        window: int | None = None,
        muon: bool = True,
        momentum: bool = True,
        prenorm: bool = False,
        initial_rate: float = 1e-3,
        rope_theta: float = 5e5,
        norm_eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        window = chunk_size if window is None else window
        H, K = num_heads, head_size(None, dim, num_heads)
        near = H if num_attention_heads is None else num_attention_heads
        if dim % near:
            raise ValueError(
                f"num_attention_heads: got {near}, need a divisor of dim = "
                f"{dim}"
            )
        check_even("dim / num_attention_heads", dim // near)
        self.num_attention_heads = near
        hidden = scaled_size("expansion", expansion, head_dim=K)
        self.dim, self.num_heads, self.rope_theta = dim, H, rope_theta
        self.chunk_size, self.window, self.muon = chunk_size, window, muon
        self.prenorm = prenorm
        self.rate_bias = initial_rate + math.log(-math.expm1(-initial_rate))
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False, **factory)
        self.q_norm = nn.RMSNorm(dim, eps=norm_eps, **factory)
        self.k_norm = nn.RMSNorm(dim, eps=norm_eps, **factory)
        self.qk_scale = nn.Parameter(torch.empty(2, dim, **factory))
        self.qk_offset = nn.Parameter(torch.empty(2, dim, **factory))
        self.w0 = nn.Parameter(torch.empty(H, K, hidden, **factory))
        self.w1 = nn.Parameter(torch.empty(H, hidden, K, **factory))
        self.w2 = nn.Parameter(torch.empty(H, K, hidden, **factory))
        self.rates_proj = nn.Linear(dim, 3 * H, **factory)
        self.momentum_proj = nn.Linear(dim, H, **factory) if momentum else None
        self.scale_proj = nn.Linear(dim, H, **factory)
        self.norm = OutputNorm(K, None, eps=norm_eps, **factory)
        self.o_proj = nn.Linear(dim, dim, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw a memory of units of variance 1; leave q and k as they come."""
        for W in (self.w0, self.w1, self.w2):
            W.normal_(std=1 / math.sqrt(W.shape[1]))
        self.qk_scale.fill_(1)
        self.qk_offset.zero_()

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, num_read, window) after the last tokens.

        S [N, H, 3 P + 1] holds what a head's P weights have learned, their
        momentum, and the sums of the chunk so far; ``window`` the keys and
        values that the attention beside it still sees.
        """
        q, k, v = self.qkv_proj(x).chunk(3, -1)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        position = token_positions(x.shape[1], x.device, state, cu_seqlens)
        unpacked = UnpackedRows(x, state, cu_seqlens)
        by_head = (self.num_attention_heads, -1)

        def rotated(t: Tensor) -> Tensor:
            return rotary(t.unflatten(-1, by_head), position, self.rope_theta)

        o_window, past = window_attention(
            unpacked.spread(rotated(q)),
            unpacked.spread(rotated(k)),
            unpacked.spread(v.unflatten(-1, by_head)),
            self.window,
            state and state.batch_field("window"),
            unpacked.num_read,
            unpacked.lengths,
        )
        scales, offsets = upcast(self.qk_scale), upcast(self.qk_offset)
        split = (self.num_heads, -1)
        q, k = (
            rotated(self.unit(F.silu(upcast(t) * scales[i] + offsets[i])))
            .to(v.dtype)
            .flatten(2)
            .unflatten(-1, split)
            for i, t in enumerate((q, k))
        )
        rates = F.softplus(upcast(self.rates_proj(x)) + self.rate_bias)
        momentum = None
        if self.momentum_proj is not None:
            momentum = unpacked.spread(upcast(self.momentum_proj(x)).sigmoid())
        o, S = lact(
            unpacked.spread(q),
            unpacked.spread(k),
            unpacked.spread(F.silu(v).unflatten(-1, split)),
            unpacked.spread(rates.unflatten(-1, split)),
            (self.w0, self.w1, self.w2),
            momentum,
            chunk_size=self.chunk_size,
            muon=self.muon,
            prenorm=self.prenorm,
            initial_state=state and state.batch_field("S"),
            position=unpacked.num_read,
            lengths=unpacked.lengths,
        )
        o_memory = self.norm(unpacked.pack(o)).unflatten(-1, split)
        o_memory = o_memory * F.silu(self.scale_proj(x))[..., None]
        o = unpacked.pack(o_window).flatten(2) + o_memory.flatten(2)
        y = self.o_proj(o)
        num_read = unpacked.num_read_after()
        return y, LayerState(S=S, num_read=num_read, window=past)

    def unit(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """x at length 1 per head of the memory: x / (|x| + 1e-5)."""
        x = x.unflatten(-1, (self.num_heads, -1))
        size = x.square().sum(-1, keepdim=True)
        # The root of 0 has no gradient.
        size = size.where(size > 0, 1.0).sqrt()
        return (x / (size + 1e-5)).flatten(2)
