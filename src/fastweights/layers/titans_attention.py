"""Titans' three ways to put a memory beside attention (section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fastweights.arguments import check_number
from fastweights.deep.chunks import Layout, Part
from fastweights.deep.dual import Layers, Norm, each
from fastweights.deep.titans import chunk, packed, recall, unpacked
from fastweights.layers.arguments import check_input, check_sizes, head_size
from fastweights.layers.parts import Factory, rotary
from fastweights.layers.rows import Rows
from fastweights.layers.state import LayerState, Offsets, positions, updated
from fastweights.layers.titans import TitansMemory
from fastweights.layers.window import seen_always, window_attention
from fastweights.ops import without_autocast
from fastweights.reference.backend import wide

Tokens = Float[Tensor, "B T D"]


class Beside(nn.Module):
    """Attention, N persistent tokens that it always sees, and a memory.

    Keys and values of the persistent tokens p [N, D], which are learned, are
    W_k p and W_v p, at position 0. The paper puts p before every sequence,
    for the memory to read too: that amounts to other first weights, which
    are learned here anyway.

    Args:
        dim: width D of x and y.
        num_heads: heads H of attention and of the memory.
        head_dim: size of the memory's heads; dim / num_heads if None.
        window: tokens that one attends to, with itself.
        persistent: tokens N.
        theta: base of the rotary positions.
        norm_eps: of the norms.
        depth, expansion, chunk_size, max_rate, conv_size: the memory's, as of
            :class:`TitansMemory`.
    """

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
        if K % 2:
            raise ValueError(f"dim / num_heads: got {K}, need an even number")
        head_dim = K if head_dim is None else head_dim
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

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a state."""
        return ("S", "position", "window", *self.memory.convolution.fields)

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
        """In the window, and what the tokens that follow need of it."""
        at = positions(x.shape[1], x.device, state, cu_seqlens)
        rows = Rows(x, state, cu_seqlens)
        q, k, v = (rows.spread(t) for t in self.projected(x, at))
        o, past = window_attention(
            q,
            k,
            v,
            self.window,
            None if state is None else state.get("window"),
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
    """

    def forward(
        self,
        x: Tokens,
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Tokens, LayerState]:
        """y, and the state (S, position, window, convolution) after x.

        As of :class:`TitansMemory`, and ``window`` the last keys and values.
        """
        check_input(x, self.dim, state, cu_seqlens, *self.fields)
        a, past = self.attend(x, state, cu_seqlens)
        m, after = self.memory.remember(x, state, cu_seqlens)
        return self.gated(a, m), updated(state, window=past, **after)


class MemoryAsLayer(Beside):
    """The memory, and attention in a window behind it (MAL).

        y = W_o norm(attention(norm(memory(x))))

    of arXiv 2501.00663, eqs. 29 to 31; the norms are this library's.
    """

    def forward(
        self,
        x: Tokens,
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Tokens, LayerState]:
        """y, and the state (S, position, window, convolution) after x."""
        check_input(x, self.dim, state, cu_seqlens, *self.fields)
        m, after = self.memory.remember(x, state, cu_seqlens)
        m = self.memory_norm(m).to(m.dtype)
        a, past = self.attend(m, state, cu_seqlens)
        y = self.o_proj(self.norm(a).to(a.dtype))
        return y, updated(state, window=past, **after)


class MemoryAsContext(Beside):
    """Attention in segments, which also sees what the memory recalls (MAC).

    Of a segment's tokens x, with M the memory's weights at its start:

        h = M(x)
        a = attention of x to the persistent tokens, h and x
        y = W_o (norm(a) * sigmoid(norm(memory(a))))

    where the memory learns a and answers to it, a token at a time (arXiv
    2501.00663, eqs. 21 to 25, whose last product is open: the gate is that of
    :class:`MemoryAsGate`). Token t sees x and h of the tokens up to t: each
    h is M's answer to one token, and all of them, as in the paper's picture,
    would let t see what follows it. A segment has ``window`` tokens, and is
    one chunk of the memory, which has no convolution.

    Args:
        window: tokens per segment; the others are those of
            :class:`MemoryAsGate`.
    """

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
        max_rate: float = 0.1,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            head_dim,
            window=window,
            persistent=persistent,
            theta=theta,
            norm_eps=norm_eps,
            depth=depth,
            expansion=expansion,
            chunk_size=window,
            max_rate=max_rate,
            conv_size=None,
            device=device,
            dtype=dtype,
        )

    def forward(
        self,
        x: Tokens,
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Tokens, LayerState]:
        """y, and the state (S, position, window) after x.

        S as of :class:`TitansMemory`; ``window`` [N, segment, .] has keys and
        values of h and of x, by their places in the segment.
        """
        check_input(x, self.dim, state, cu_seqlens, *self.fields)
        rows = Rows(x, state, cu_seqlens)
        x = rows.spread(x)
        start, norm = self.memory.weighed
        full = wide(x.dtype)
        start = [(W.to(full), b.to(full)) for W, b in start]
        norm = norm[0].to(full), norm[1].to(full)
        if state is None:
            (H, K), N = self.heads, len(x)
            P = sum(w[0].numel() for layer in start for w in layer)
            seen = x.new_zeros(N, self.window, 4 * H * K)
            S0 = x.new_zeros(N, H, 3, P, dtype=full)
        else:
            seen, S0 = state.get("window").to(x.dtype), state.get("S")
        M, S, base = unpacked(S0, start)
        always, outputs = self.always(), []
        layout = Layout(
            self.window, x.shape[1], x.device, rows.position, rows.lengths
        )
        for part in layout:
            x_ = part.take(x)
            h = self.recalled(x_, base, norm)
            q, k, v = self.projected(x_, part.place)
            _, *of_h = self.projected(h, part.place)
            seen = written(seen, [*of_h, k, v], part)
            a = in_segment(q, seen, part.place, always).flatten(2)
            M, S, m = self.learned(M, S, base, a, part, norm)
            outputs.append(self.gated(a, m))
            base = each(part.choose, M, base)
        y = rows.pack(layout.join(outputs))
        S0, at = packed(M, S, base, start), rows.after()
        return y, updated(state, S=S0, position=at, window=seen)

    def recalled(self, x: Tokens, weights: Layers, norm: Norm) -> Tokens:
        """What these weights answer to each token."""
        memory = self.memory
        q, *_ = memory.convolution(memory.qkv_proj(x))
        with without_autocast(x):
            o = recall(q.transpose(1, 2).to(norm[0].dtype), weights, norm)
        return memory.put_out(o.transpose(1, 2).to(x.dtype), x)

    def learned(
        self,
        M: Layers,
        S: Layers,
        base: Layers,
        a: Tokens,
        part: Part,
        norm: Norm,
    ) -> tuple[Layers, Layers, Tokens]:
        """The weights and S after a segment's part, and its answers."""
        memory, full = self.memory, norm[0].dtype
        q, k, v, _ = memory.convolution(memory.qkv_proj(a))
        q, k, v = (t.transpose(1, 2).to(full) for t in (q, k, v))
        rate, momentum, g = (t.to(full) for t in memory.rates(a))
        # A token that is not there keeps W and S.
        theta = part.only(rate, 0.0).mT
        eta, alpha = (part.only(t, 1.0).mT for t in (momentum, g.exp()))
        moves = part.only(torch.ones_like(rate), 0.0).mT
        with without_autocast(a):
            M, S, o = chunk(
                M, S, base, q, k, v, theta, eta, alpha, moves, norm
            )
        return M, S, memory.put_out(o.transpose(1, 2).to(a.dtype), a)


def written(
    seen: Float[Tensor, "N C F"],
    new: Sequence[Float[Tensor, "N T H K"]],
    part: Part,
) -> Float[Tensor, "N C F"]:
    """Keys and values of tokens that there are, at their places."""
    values = torch.cat([t.flatten(2) for t in new], -1).to(seen.dtype)
    at = part.place[..., None].expand_as(values)
    return seen.scatter(1, at, part.only(values, seen.gather(1, at)))


def in_segment(
    q: Float[Tensor, "N T H K"],
    seen: Float[Tensor, "N C F"],
    place: Int[Tensor, "#N T"],
    always: Float[Tensor, "2 P H K"],
) -> Float[Tensor, "N T H K"]:
    """Of queries at these places to h and x, up to their own place."""
    N, C = seen.shape[:2]
    H, K = q.shape[2:]
    both = seen.to(q.dtype).unflatten(-1, (2, 2, H, K))
    # h's first, then x's: [N, H, 2 C, K]
    keys, values = both.permute(3, 0, 4, 2, 1, 5).flatten(3, 4)
    before = torch.arange(C, device=q.device) <= place[..., None]
    mask = torch.cat([before, before], -1)[:, None].expand(N, -1, -1, -1)
    keys, values, mask = seen_always(keys, values, mask, always)
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=mask
    )
    return o.transpose(1, 2)
