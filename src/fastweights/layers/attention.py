"""Softmax attention, for hybrids and comparisons."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fastweights.arguments import check_number
from fastweights.layers.arguments import check_input, check_sizes, head_size
from fastweights.layers.layer import Layer
from fastweights.layers.parts import Factory, OutputNorm, rotary
from fastweights.layers.rows import Rows
from fastweights.layers.sdpa import Heads, attention, packed_attention
from fastweights.layers.state import (
    LayerState,
    Offsets,
    lengths,
    positions,
    updated,
    whole,
)
from fastweights.serving import inside, writes


class SoftmaxAttention(Layer):
    """Causal softmax attention with grouped heads and rotary positions.

        q, k, v = W_qkv x, q and k turned by their positions
        y = W_o softmax(q k^T / sqrt(K)) v

    by PyTorch's scaled_dot_product_attention. Qwen3-Next's has ``qk_norm``,
    ``gate``, a ``rotary_fraction`` of 0.25 and head_dim 256; Kimi Linear's
    has no positions, and is multi-head latent attention, which this is not.

    Differs from the published one in: rotary positions, which turn q and k
    unless ``theta=None`` (Vaswani et al. 2017 add positions to the
    embeddings); no biases; no dropout.

    Weights of Qwen3-Next: the rows of its q_proj are q and the gate of the
    first head, then of the second, and so on; here qkv_proj is q of all
    heads, then k, then v, and the gate is g_proj. Its q_norm and k_norm
    multiply by 1 + weight, these by weight.

    Args:
        dim: width D of x and y.
        num_heads: heads H of q.
        head_dim: size K of a head; dim / num_heads if None.
        num_kv_heads: heads of k and v, a divisor of H; H if None.
            Consecutive heads of q share one of k and v.
        theta: base of the rotary positions; None: there are none.
        rotary_fraction: share of a head's channels that turn, the first.
        qk_norm: whether q and k are normed per head, by RMSNorm.
        gate: whether the output is multiplied by sigmoid(W_g x).
        norm_eps: of the norms of q and k.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        num_kv_heads: int | None = None,
        theta: float | None = 1e4,
        rotary_fraction: float = 1.0,
        qk_norm: bool = False,
        gate: bool = False,
        norm_eps: float = 1e-6,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, num_heads=num_heads)
        H, K = num_heads, head_size(head_dim, dim, num_heads)
        HK = H if num_kv_heads is None else num_kv_heads
        check_sizes(num_kv_heads=HK)
        if H % HK:
            raise ValueError(
                f"num_kv_heads: got {HK}, need a divisor of num_heads = {H}"
            )
        if theta is not None:
            check_number("theta", theta, "> 0")
        check_number("norm_eps", norm_eps, ">= 0")
        check_number("rotary_fraction", rotary_fraction, "> 0")
        if rotary_fraction > 1:
            raise ValueError(
                f"rotary_fraction: got {rotary_fraction}, need at most 1"
            )
        self.dim, self.K = dim, K
        self.theta, self.rotary_fraction = theta, rotary_fraction
        self.widths = (H * K, HK * K, HK * K)
        to: Factory = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, sum(self.widths), bias=False, **to)
        self.g_proj = nn.Linear(dim, H * K, bias=False, **to) if gate else None
        self.q_norm, self.k_norm = (
            OutputNorm(K, None, eps=norm_eps, **to) if qk_norm else None
            for _ in "qk"
        )
        self.o_proj = nn.Linear(H * K, dim, bias=False, **to)

    def new_state(
        self,
        num_sequences: int,
        capacity: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LayerState:
        """An empty state with room for ``capacity`` tokens per sequence.

        A state that a call has to enlarge moves to new memory; with enough
        room from the start, it stays where it is.
        """
        check_sizes(num_sequences=num_sequences, capacity=capacity)
        like = next(self.parameters(), torch.empty(0))
        size = (num_sequences, capacity, self.widths[1] // self.K, self.K)
        device = like.device if device is None else device
        dtype = like.dtype if dtype is None else dtype
        keys, values = (
            torch.zeros(size, dtype=dtype, device=device) for _ in "kv"
        )
        position = torch.zeros(num_sequences, dtype=torch.int64, device=device)
        return LayerState(keys=keys, values=values, position=position)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Float[Tensor, "B T D"], LayerState | None]:
        """y, and the state (keys, values, position) with x's tokens added.

        Without gradients the state that came in is changed in place, enlarged
        where it is too small, and returned. With gradients, packed sequences
        and no state, as in training, none is made, which would wait for the
        device: None is returned in its place, and memory grows with T
        (:func:`fastweights.layers.sdpa.packed_attention`).
        """
        fields = ("keys", "values", "position")
        check_input(x, self, state, cu_seqlens, *fields)
        q, k, v = (
            part.unflatten(-1, (-1, self.K))
            for part in self.qkv_proj(x).split(self.widths, -1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q).view_as(q)
            k = self.k_norm(k).view_as(k)
        if self.theta is not None:
            at = positions(x.shape[1], x.device, state, cu_seqlens)
            q, k = (
                rotary(t, at, self.theta, self.rotary_fraction) for t in (q, k)
            )
        if cu_seqlens is None:
            o, after = attend(q, k, v, state)
        elif state is None and torch.is_grad_enabled():
            o, after = packed_attention(q, k, v, cu_seqlens), None
        else:
            o, after = attend_packed(q, k, v, state, cu_seqlens)
        o = o.flatten(2)
        if self.g_proj is not None:
            o = o * self.g_proj(x).sigmoid()
        return self.o_proj(o), after


def attend(
    q: Heads,
    k: Heads,
    v: Heads,
    state: LayerState | None,
    count: Int[Tensor, " B"] | None = None,
    used: int | None = None,
) -> tuple[Heads, LayerState]:
    """Attention of new tokens to themselves and to what the state holds.

    ``count`` and ``used`` are those of :func:`remember`.
    """
    alone = fresh(state, q)  # before the state is changed in place
    keys, values, at, after = remember(k, v, state, count, used)
    if alone:
        return attention(q, k, v), after
    if not recorded(q):  # else the room for all tokens that may come
        keys, values = keys[:, : after.used], values[:, : after.used]
    if after.rows is not None:
        own = inside(after.rows, keys)
        keys, values = keys[own], values[own]
    return attention_at(q, keys, values, at), after


def recorded(q: Heads) -> bool:
    """Whether the call will run again, by itself, with more tokens read."""
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    return torch.compiler.is_compiling() or capturing


def fresh(state: LayerState | None, q: Heads) -> bool:
    """Whether no sequence has read a token before."""
    return state is None or (state.used == 0 and not recorded(q))


def remember(
    k: Heads,
    v: Heads,
    state: LayerState | None,
    count: Int[Tensor, " B"] | None = None,
    used: int | None = None,
) -> tuple[Heads, Heads, Int[Tensor, "B T"], LayerState]:
    """Keys and values with the new ones, their places, and the state then.

    ``count`` is how many of the T tokens of each row are there; all if None.
    ``used`` is what the state's is after them, of one that they have been
    written to already.
    """
    B, T = k.shape[:2]
    if count is None:
        count = lengths(k, None)
    at = torch.arange(T, device=k.device)[None]
    if state is None:
        return k, v, at, LayerState(keys=k, values=v, position=count, used=T)
    before = state.get("position")
    at = before[:, None] + at
    if state.rows is not None or used is not None:
        if used is None:
            assert state.rows is not None
            into_pool(k, v, state, state.rows, at, state.used + T)
        keys, values = whole(state, "keys"), whole(state, "values")
    else:
        keys, values = (
            enlarged(state.get(name), state.used + T)
            for name in ("keys", "values")
        )
        if torch.is_grad_enabled():
            keys, values = keys.clone(), values.clone()
        # What is not there is written too, past the end of its sequence,
        # where the next tokens overwrite it before any query sees it.
        row = torch.arange(B, device=k.device)[:, None]
        keys[row, at], values[row, at] = k.to(keys.dtype), v.to(values.dtype)
        if not torch.is_grad_enabled():
            state.keys, state.values = keys, values
    after = updated(
        state,
        keys=keys,
        values=values,
        position=before + count,
        used=state.used + T if used is None else used,
    )
    return keys, values, at, after


def attention_at(
    q: Heads, keys: Heads, values: Heads, at: Int[Tensor, "B T"]
) -> Heads:
    """Attention of queries at these positions to the keys up to their own."""
    place = torch.arange(keys.shape[1], device=q.device)
    mask = (place <= at[..., None])[:, None]
    return attention(q, keys.to(q.dtype), values.to(q.dtype), mask)


def into_pool(
    k: Heads,
    v: Heads,
    state: LayerState,
    rows: Int[Tensor, " B"],
    at: Int[Tensor, "B T"],
    used: int,
) -> None:
    """Write keys and values of new tokens into these rows of the pool.

    ``used`` is the most tokens that one of the rows has after them.
    """
    keys, values = whole(state, "keys"), whole(state, "values")
    if used > keys.shape[1]:
        raise ValueError(
            f"state: got a pool with room for {keys.shape[1]} tokens per row, "
            f"need {used}"
        )
    row, source, some = writes(rows, keys)
    # Where no sequence has a row, `at` is that of some row, a full one even.
    place = row[:, None], at[source].clamp(max=keys.shape[1] - 1)
    for x, new in ((keys, k), (values, v)):
        x.index_put_(place, new[source].to(x.dtype).where(some, x[place]))


def enlarged(x: Tensor, capacity: int) -> Tensor:
    """x, or a copy with room for so many tokens or twice what it had."""
    if x.shape[1] >= capacity:
        return x
    more = max(capacity, 2 * x.shape[1]) - x.shape[1]
    return torch.cat([x, x.new_zeros(x.shape[0], more, *x.shape[2:])], 1)


def attend_packed(
    q: Heads,
    k: Heads,
    v: Heads,
    state: LayerState | None,
    cu_seqlens: Offsets,
) -> tuple[Heads, LayerState]:
    """Attention of packed sequences, laid side by side if they go on."""
    rows, used = Rows(q, state, cu_seqlens), None
    if state is not None and by_token(state, rows):
        # Each token alone: what pads a row may not fit into the state.
        mine = state.rows
        if mine is None:
            mine = torch.arange(rows.count.shape[0], device=q.device)
        own = F.pad(mine, (0, 1), value=-1)[rows.row]
        at = F.pad(state.get("position"), (0, 1))[rows.row] + rows.place
        there = (own >= 0) & (own < state.tensors()["position"].shape[0])
        used = int(torch.where(there, at + 1, 0).max())
        if state.rows is None:
            state.keys, state.values = (
                enlarged(state.get(name), used) for name in ("keys", "values")
            )
        k_t, v_t = k[0][:, None], v[0][:, None]
        into_pool(k_t, v_t, state, own, at[:, None], used)
    if fresh(state, q):
        o = packed_attention(q, k, v, cu_seqlens)
        k, v = rows.spread(k), rows.spread(v)
        *_, after = remember(k, v, state, rows.count, used)
    else:
        q, k, v = (rows.spread(x) for x in (q, k, v))
        o, after = attend(q, k, v, state, rows.count, used)
        o = rows.pack(o)
    if used is not None:
        after.used = used
    return o, after


def by_token(state: LayerState, rows: Rows) -> bool:
    """Whether keys go to their places one by one, as far as they reach.

    Always in a pool; in place where a row of its own might have no room for
    the longest sequence.
    """
    if state.rows is not None or torch.is_grad_enabled():
        return state.rows is not None
    return state.used + rows.longest > whole(state, "keys").shape[1]
