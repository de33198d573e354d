"""Titans' memory as context: segments that read it before they teach it."""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fastweights import private
from fastweights.arguments import PLAIN
from fastweights.deep.chunks import Layout, Part
from fastweights.deep.dual import Layers, Norm, each
from fastweights.deep.titans import chunk, packed, recall, unpacked
from fastweights.dtypes import (
    DTYPES,
    autocast,
    compute_dtype,
    without_autocast,
)
from fastweights.layers.convolution import HeadsConvolution
from fastweights.layers.layer import Tokens
from fastweights.layers.parts import OutputNorm
from fastweights.layers.rows import Rows
from fastweights.layers.state import LayerState, Offsets, lengths
from fastweights.layers.titans import Start
from fastweights.layers.titans_attention import Beside
from fastweights.layers.window import seen_always
from fastweights.ops import any_length
from fastweights.ops.projections import Untouched, is_untouched, untouched

CALLED = (Start, HeadsConvolution, OutputNorm, nn.Linear, nn.RMSNorm)
KINDS: dict[type[nn.Module], Untouched] = {
    kind: untouched(kind) for kind in CALLED
}
"""What a layer calls, as they stand in their sources."""


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
        window: tokens per segment.
        dim, num_heads, head_dim, persistent, theta, norm_eps: as in
            :class:`MemoryAsGate`.
        depth, expansion, max_rate: the memory's, as in :class:`TitansMemory`.
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
        options: dict[str, Any] = {
            "window": window,
            "persistent": persistent,
            "theta": theta,
            "norm_eps": norm_eps,
            "depth": depth,
            "expansion": expansion,
            "max_rate": max_rate,
        }
        super().__init__(
            dim,
            num_heads,
            head_dim,
            **options,
            chunk_size=window,
            conv_size=None,
            device=device,
            dtype=dtype,
        )
        sizes = {"dim": dim, "num_heads": num_heads, "head_dim": head_dim}
        self.options = json.dumps(sizes | options)

    def read(
        self, x: Tokens, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Tokens, LayerState]:
        """y, and the state (S, position, window) after x.

        S as of :class:`TitansMemory`; ``window`` [N, segment, .] has keys and
        values of h and of x, by their places in the segment. A graph for any
        number of tokens has the layer as one operator, if nobody has touched
        its modules; else each number is a graph of its own.
        """
        if any_length.is_open(x.shape[1]) and _is_plain(self, x.device):
            y, S, seen = self.as_operator(x, state, cu_seqlens)
        else:
            y, S, seen = self.remember(x, state, cu_seqlens)
        at = lengths(x, cu_seqlens)
        if state is not None:
            at = state.get("position") + at
        return y, LayerState(S=S, position=at, window=seen)

    def remember(
        self, x: Tokens, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Tokens, Tensor, Tensor]:
        """y, S and the window, a segment at a time."""
        rows = Rows(x, state, cu_seqlens)
        x = rows.spread(x)
        start, norm = self.memory.start()
        full = compute_dtype(x.dtype)
        start = [(W.to(full), b.to(full)) for W, b in start]
        norm = norm[0].to(full), norm[1].to(full)
        if state is None:
            S_row, seen_row = self.state_shapes()
            S0 = x.new_zeros(x.shape[0], *S_row, dtype=full)
            seen = x.new_zeros(x.shape[0], *seen_row)
        else:
            S0, seen = state.get("S"), state.get("window").to(x.dtype)
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
            base = each(part.choose, M, base)
            outputs.append(self.gated(a, m))
        y = rows.pack(layout.join(outputs))
        return y, packed(M, S, base, start), seen

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a row of S and of ``window``."""
        start, (H, K) = self.memory.start, self.heads
        P = sum(p.numel() for p in start.parameters()) // H
        P -= 2 * start.norm_weight.shape[1]
        return (H, 3, P), (self.window, 4 * H * K)

    def as_operator(
        self, x: Tokens, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Tokens, Tensor, Tensor]:
        """:meth:`remember` of a layer like this, with its parameters."""
        names = ("S", "position", "window")
        S, position, seen = (
            None if state is None else state.get(name) for name in names
        )
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        S_row, seen_row = self.state_shapes()
        sizes = math.prod(S_row), math.prod(seen_row)
        dtype = autocast(x)[0].dtype
        one, two, *others = self.parameters()
        y, after = any_length.call(
            "titans_context",
            [one, two, x, S, position, seen, cu_seqlens, *others],
            [DTYPES.index(dtype)],
            [N, sum(sizes)],
            compute_dtype(x.dtype),
            self.options,
        )
        S, seen = after.split(sizes, 1)
        S, seen = S.unflatten(1, S_row), seen.unflatten(1, seen_row)
        return y.to(dtype), S, seen.to(x.dtype)

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


LOCK = threading.Lock()


@private.constant_in_graphs
def _is_plain(layer: MemoryAsContext, device: torch.device) -> bool:
    """Whether nobody has touched a module, or moved a parameter."""
    return all(
        type(m) in KINDS and is_untouched(m, KINDS[type(m)])
        for m in layer.modules()
        if m not in (layer, layer.memory)  # whose forward is not called
    ) and all(
        (type(p) in PLAIN or torch.compiler.is_exporting())
        and p.device == device
        for p in layer.parameters()
    )


@functools.cache
def _like(options: str) -> MemoryAsContext:
    """A layer of these options without parameters, called past its checks."""
    layer = MemoryAsContext(**json.loads(options), device=torch.device("meta"))
    layer.forward = layer.remember  # type: ignore[assignment]
    return layer


def _open(
    tensors: list[Any], numbers: list[int], options: str
) -> tuple[Tensor, Tensor]:
    one, two, x, S, position, seen, cu_seqlens, *others = tensors
    layer, state = _like(options), None
    if S is not None:
        state = LayerState(S=S, position=position, window=seen)
    names = [name for name, _ in layer.named_parameters()]
    given = dict(zip(names, (one, two, *others), strict=True))
    dtype, kind = DTYPES[numbers[0]], x.device.type
    # What autocast makes of x is in another dtype, or there was none.
    with LOCK, torch.autocast(kind, dtype, enabled=dtype != x.dtype):
        y, S, seen = torch.func.functional_call(
            layer, given, (x, state, cu_seqlens)
        )
    flat = [S.flatten(1), seen.to(S.dtype).flatten(1)]
    return y.to(x.dtype), torch.cat(flat, 1)


any_length.FUNCTIONS["titans_context"] = _open


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
