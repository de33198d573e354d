"""Titans' memory as a gate of attention, and as a layer before it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fastweights.arguments import check_number
from fastweights.layers.arguments import (
    check_even,
    check_sizes,
    head_size,
)
from fastweights.layers.layer import Layer, Tokens
from fastweights.layers.parts import Factory, rotary
from fastweights.layers.rows import Rows
from fastweights.layers.state import LayerState, Offsets, initial, positions
from fastweights.layers.titans import TitansMemory
from fastweights.layers.window import window_attention


class Beside(Layer):
    """Attention, N persistent tokens that it always sees, and a memory.

    Keys and values of the persistent tokens p [N, D], which are learned, are
    W_k p and W_v p, at position 0. The paper puts p before every sequence,
    so that the memory reads it too: every memory then starts from the same
    other weights, and here the weights that it starts from are learned.
    """

    padded = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        window: int = 512,
        persistent: int = 16,
        theta: float = 1e4,
        norm_eps: float = 1e-5,
        depth: int = 2,
        expansion: float = 4.0,
        chunk_size: int = 16,
        max_rate: float = 0.1,
        conv_size: int | None = 4,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, num_heads=num_heads)
        check_sizes(window=window, persistent=persistent)
        check_number("theta", theta, "> 0")
        check_number("norm_eps", norm_eps, ">= 0")
        K = head_size(None, dim, num_heads)
        check_even("dim / num_heads", K)
        self.dim, self.window, self.theta = dim, window, theta
        self.heads = (num_heads, K)
        to: Factory = {"device": device, "dtype": dtype}
        self.memory = TitansMemory(
            dim,
            num_heads,
            head_dim,
            depth=depth,
            expansion=expansion,
            chunk_size=chunk_size,
            max_rate=max_rate,
            conv_size=conv_size,
            norm_eps=norm_eps,
            **to,
        )
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False, **to)
        self.persistent = nn.Parameter(torch.empty(persistent, dim, **to))
        self.norm = nn.RMSNorm(dim, eps=norm_eps, **to)
        self.memory_norm = nn.RMSNorm(dim, eps=norm_eps, **to)
        self.o_proj = nn.Linear(dim, dim, bias=False, **to)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Persistent tokens as small as embeddings."""
        self.persistent.normal_(std=0.02)

    def projected(
        self, x: Tokens, position: Int[Tensor, "#B T"]
    ) -> tuple[Float[Tensor, "B T H K"], ...]:
        """q, k and v, q and k turned by these positions."""
        q, k, v = (
            t.unflatten(-1, self.heads) for t in self.qkv_proj(x).chunk(3, -1)
        )
        q, k = (rotary(t, position, self.theta) for t in (q, k))
        return q, k, v

    def always(self) -> Float[Tensor, "2 N H K"]:
        """Keys and values of the persistent tokens."""
        _, k, v = self.qkv_proj(self.persistent).chunk(3, -1)
        return torch.stack([k, v]).unflatten(-1, self.heads)

    def attend(
        self, x: Tokens, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Tokens, Float[Tensor, "N W-1 C"]]:
        """Attention in the window, and what tokens that follow need of it."""
        at = positions(x.shape[1], x.device, state, cu_seqlens)
        rows = Rows(x, state, cu_seqlens)
        q, k, v = (rows.spread(t) for t in self.projected(x, at))
        o, past = window_attention(
            q,
            k,
            v,
            self.window,
            initial(state, "window"),
            rows.position,
            rows.lengths,
            self.always(),
        )
        return rows.pack(o).flatten(2), past

    def gated(self, a: Tokens, m: Tokens) -> Tokens:
        """W_o (norm(a) * sigmoid(norm(m)))."""
        gate = self.memory_norm(m).sigmoid()
        return self.o_proj((self.norm(a) * gate).to(a.dtype))


class MemoryAsGate(Beside):
    """Attention in a window, times what the memory says (MAG).

        y = W_o (norm(attention(x)) * sigmoid(norm(memory(x))))

    of arXiv 2501.00663, eqs. 26 to 28, whose gate is open: this one's norms
    and sigmoid are the "learnable vector-valued weights" and the "sigma" of
    the text.

    Differs from the published one in: the persistent tokens, which the
    memory does not read; the norms and the sigmoid of the gate.

    Args:
        dim: width D of x and y.
        num_heads: heads H of attention and of the memory.
        head_dim: size of the memory's heads; dim / num_heads if None.
        window: tokens that one attends to, with itself.
        persistent: tokens N that every token attends to.
        theta: base of the rotary positions.
        norm_eps: of the norms.
        depth, expansion, chunk_size, max_rate, conv_size: the memory's, as in
            :class:`TitansMemory`.
    """

    def read(
        self, x: Tokens, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Tokens, LayerState]:
        """y, and the state (S, position, window, convolution) after x.

        As of :class:`TitansMemory`, and ``window`` the last keys and values.
        """
        a, past = self.attend(x, state, cu_seqlens)
        m, after = self.memory.read(x, state, cu_seqlens)
        after.window = past
        return self.gated(a, m), after


class MemoryAsLayer(Beside):
    """The memory, and attention in a window behind it (MAL).

        y = W_o norm(attention(norm(memory(x))))

    of arXiv 2501.00663, eqs. 29 to 31; the norms are this library's.

    Differs from the published one in: the persistent tokens, which the
    memory does not read; the norms.

    Args:
        dim, num_heads, head_dim, window, persistent, theta, norm_eps: as in
            :class:`MemoryAsGate`.
        depth, expansion, chunk_size, max_rate, conv_size: the memory's, as in
            :class:`TitansMemory`.
    """

    def read(
        self, x: Tokens, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Tokens, LayerState]:
        """y, and the state (S, position, window, convolution) after x."""
        m, after = self.memory.read(x, state, cu_seqlens)
        m = self.memory_norm(m).to(m.dtype)
        a, past = self.attend(m, state, cu_seqlens)
        y = self.o_proj(self.norm(a).to(a.dtype))
        after.window = past
        return y, after
