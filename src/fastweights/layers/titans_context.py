"""Titans' memory as context: segments that read it before they teach it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fastweights import any_length, private
from fastweights.deep.chunks import Layout, Part
from fastweights.deep.dual import Layers, Norm, each, leaves, pairs
from fastweights.deep.titans import chunk, packed, recall, unpacked
from fastweights.deep.whole import scanned
from fastweights.layers.arguments import check_input
from fastweights.layers.rows import Rows, by_length
from fastweights.layers.state import LayerState, Offsets, updated
from fastweights.layers.titans_attention import Beside, Tokens
from fastweights.layers.window import seen_always
from fastweights.ops import without_autocast
from fastweights.reference.backend import wide


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

    Differs from the published one in: one h per token, which sees no later
    one; the gate.

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

    @by_length
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
        check_input(x, self, state, cu_seqlens, *self.fields)
        rows = Rows(x, state, cu_seqlens)
        x = rows.spread(x)
        start, norm = self.memory.start()
        full = wide(x.dtype)
        start = [(W.to(full), b.to(full)) for W, b in start]
        norm = norm[0].to(full), norm[1].to(full)
        if state is None:
            (H, K), N = self.heads, x.shape[0]
            P = sum(w[0].numel() for layer in start for w in layer)
            seen = x.new_zeros(N, self.window, 4 * H * K)
            S0 = x.new_zeros(N, H, 3, P, dtype=full)
        else:
            seen, S0 = state.get("window").to(x.dtype), state.get("S")
        always = self.always()

        def segment(
            carried: Sequence[Tensor], x: Tokens, part: Part
        ) -> tuple[list[Tensor], Tokens]:
            """A segment's part: what is carried on, and what it puts out."""
            seen, *weights = carried
            third = len(weights) // 3
            M, S, base = (
                pairs(weights[i : i + third])
                for i in range(0, len(weights), third)
            )
            h = self.recalled(x, base, norm)
            q, k, v = self.projected(x, part.place)
            _, *of_h = self.projected(h, part.place)
            seen = written(seen, [*of_h, k, v], part)
            a = in_segment(q, seen, part.place, always).flatten(2)
            M, S, m = self.learned(M, S, base, a, part, norm)
            base = each(part.choose, M, base)
            after = (t for layers in (M, S, base) for t in leaves(layers))
            return [seen, *after], self.gated(a, m)

        begun = unpacked(S0, start)
        carried: Sequence[Tensor] = [
            seen,
            *(t for w in begun for t in leaves(w)),
        ]
        layout = Layout(
            self.window, x.shape[1], x.device, rows.position, rows.lengths
        )
        # A scan of PyTorch 2.13 fails where the batch is open as well.
        opened = [any_length.is_open(n) for n in x.shape[:2]]
        if private.SCAN and opened == [False, True]:
            slots = torch.arange(self.window, device=x.device)

            def step(
                carried: Sequence[Tensor], given: Sequence[Tensor]
            ) -> tuple[list[Tensor], Tokens]:
                x, valid, ends = given
                place = slots.expand(valid.shape)
                part = Part(slice(None), place, valid, ends)
                return segment(carried, x, part)

            carried, outputs = scanned(step, carried, layout.grid(x))
            y = layout.from_grid(outputs.movedim(0, 1).flatten(1, 2))
        else:
            parts = []
            for part in layout:
                carried, o = segment(carried, part.take(x), part)
                parts.append(o)
            y = layout.join(parts)
        seen, *weights = carried
        third = len(weights) // 3
        M, S, base = (
            pairs(weights[i : i + third])
            for i in range(0, len(weights), third)
        )
        S0, at = packed(M, S, base, start), rows.after()
        after = {"S": S0, "position": at, "window": seen}
        return rows.pack(y), updated(state, **after)

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
    """Attention of queries at these places to h and x up to their own."""
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
