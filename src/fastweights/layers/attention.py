"""Softmax attention, for hybrids and comparisons."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fastweights.arguments import check_sizes
from fastweights.layers.common.causal_attention import (
    Heads,
    attend_causally,
    sdpa,
)
from fastweights.layers.common.fused_step import (
    is_fusable_layer,
    norm_and_project,
    project_and_add,
)
from fastweights.layers.common.layer import FactoryOptions, Hidden, Layer
from fastweights.layers.common.layer_arguments import check_input, head_size
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.rotary import rotary
from fastweights.layers.common.state import (
    LayerState,
    Offsets,
    token_positions,
    update_state,
)
from fastweights.layers.common.unpacked_rows import UnpackedRows
from fastweights.ops.common.rows import clamp_rows, rows_to_write
from fastweights.ranks.group import current_ranks, token_offset_and_total
from fastweights.ranks.shard import shard_of

NewKeys = Float[Tensor, "B T HK K"]  # or values


class SoftmaxAttention(Layer):
    """Causal softmax attention with grouped heads and rotary positions.

        q, k, v = W_qkv x, q and k turned by their positions
        y = W_o softmax(q k^T / sqrt(K)) v

    by PyTorch's scaled_dot_product_attention. Qwen3-Next's has ``qk_norm``,
    ``output_gate``, a ``rotary_fraction`` of 0.25 and head_dim 256. OLMo's
    in its hybrid has ``qk_norm`` with ``head_qk_norm=False``, and no
    positions. Kimi Linear's has none either, and is multi-head latent
    attention, which this is not.

    Differs from the published one in: rotary positions, which turn q and k
    unless ``rope_theta=None`` (Vaswani et al. 2017 add positions to the
    embeddings); no biases; no dropout.

    Weights of Qwen3-Next: the rows of its q_proj are q and the gate of the
    first head, then of the second, and so on; here qkv_proj is q of all
    heads, then k, then v, and the gate is gate_proj. Its q_norm and k_norm
    multiply by 1 + weight, these by weight.

    Args:
        dim: width D of x and y.
        num_heads: heads H of q.
        head_dim: size K of a head; dim / num_heads if None.
        num_kv_heads: heads of k and v, a divisor of H; H if None.
            Consecutive heads of q share one of k and v.
        rope_theta: base of the rotary positions; None: there are none.
        rotary_fraction: share of a head's channels that turn, the first.
        qk_norm: whether q and k are normed, by RMSNorm.
        head_qk_norm: whether per head; else over all heads' channels
            together, as in OLMo 2.
        output_gate: whether the output is multiplied by sigmoid(W_g x).
        norm_eps: of the norms of q and k.
    """

    supports_num_accepted = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        num_kv_heads: int | None = None,
        rope_theta: float | None = 1e4,
        rotary_fraction: float = 1.0,
        qk_norm: bool = False,
        head_qk_norm: bool = True,
        output_gate: bool = False,
        norm_eps: float = 1e-6,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H, K = num_heads, head_size(head_dim, dim, num_heads)
        HK = H if num_kv_heads is None else num_kv_heads
        if H % HK:
            raise ValueError(
                f"num_kv_heads: got {HK}, need a divisor of num_heads = {H}"
            )
        if rotary_fraction > 1:
            raise ValueError(
                f"rotary_fraction: got {rotary_fraction}, need at most 1"
            )
        self.dim, self.K = dim, K
        self.rope_theta, self.rotary_fraction = rope_theta, rotary_fraction
        self.widths = (H * K, HK * K, HK * K)
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, sum(self.widths), bias=False, **factory)
        self.gate_proj: nn.Linear | None = None
        if output_gate:
            self.gate_proj = nn.Linear(dim, H * K, bias=False, **factory)
        self.q_norm, self.k_norm = (
            OutputNorm(
                K if head_qk_norm else width, None, eps=norm_eps, **factory
            )
            if qk_norm
            else None
            for width in self.widths[:2]
        )
        self.o_proj = nn.Linear(H * K, dim, bias=False, **factory)

    def preallocate_state(
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
        num_read = torch.zeros(num_sequences, dtype=torch.int64, device=device)
        return LayerState(keys=keys, values=values, num_read=num_read)

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState | None]:
        """y, and the state (keys, values, num_read) with x's tokens added.

        Without gradients the state that came in is enlarged where it is too
        small. With gradients, packed sequences and no state, as in training,
        none is made, which would wait for the device: None is returned in
        its place, and memory grows with T
        (:func:`fastweights.layers.common.causal_attention.packed_attention`).
        """
        o, after = self._attend(self.qkv_proj(x), state, cu_seqlens)
        if self.gate_proj is not None:
            o = o * self.gate_proj(x).sigmoid()
        return self.o_proj(o), after

    def _attend(
        self,
        qkv: Float[Tensor, "B T C"],
        state: LayerState | None,
        cu_seqlens: Offsets | None,
    ) -> tuple[Float[Tensor, "B T H*K"], LayerState | None]:
        """Attention's outputs [B, T, H K], from q, k and v side by side."""
        H, HK = (width // self.K for width in self.widths[:2])
        qk, v = qkv.unflatten(-1, (-1, self.K)).split([H + HK, HK], 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, _ = qkv.split(self.widths, -1)
            q = self.q_norm(q.unflatten(-1, (-1, self.q_norm.size)))
            k = self.k_norm(k.unflatten(-1, (-1, self.k_norm.size)))
            qk = torch.cat([q, k], -1).unflatten(-1, (-1, self.K))
        if self.rope_theta is not None:
            T, device = qkv.shape[1], qkv.device
            start, _ = token_offset_and_total(T)
            position = token_positions(T, device, state, cu_seqlens, start)
            qk = rotary(qk, position, self.rope_theta, self.rotary_fraction)
        q, k = qk.split([H, HK], 2)
        o, after = attend_with_state(q, k, v, state, cu_seqlens)
        return o.flatten(2), after

    def fused_step(
        self, x: Hidden, norm: nn.RMSNorm, state: LayerState
    ) -> Hidden | None:
        """x + layer(norm(x)), in few launches: :meth:`.Layer.fused_step`."""
        modules = self.qkv_proj, self.gate_proj
        parts = norm, *modules, self.o_proj
        if not is_fusable_layer(self, SoftmaxAttention, x, parts):
            return None
        check_input(x, self, state, None)
        qkv, gate = norm_and_project(x, norm, modules)
        o, after = self._attend(qkv, state, None)
        assert after is not None
        update_state(state, after)
        if gate is not None:
            o = o * gate.sigmoid()
        return project_and_add(x, o, self.o_proj)


def attend_with_state(
    q: Heads,
    k: NewKeys,
    v: NewKeys,
    state: LayerState | None,
    cu_seqlens: Offsets | None,
) -> tuple[Heads, LayerState | None]:
    """Attention of new tokens to themselves and to what the state holds.

    Beside the new state, None for packed sequences in training. Under
    context_parallel q are this rank's, k and v become those of all ranks.
    """
    T, ranks = q.shape[1], current_ranks()
    start, _ = token_offset_and_total(T)
    if ranks is not None:
        both = ranks.gather_tokens(torch.cat([k, v], -1))
        k, v = both.chunk(2, -1)
    # No sequence has read a token; asked before one is written in place.
    captured = is_captured(q)
    is_first = state is None or not (captured or state.read_at_most)
    o = None
    if is_first:
        end = start + T
        o = attend_causally(q, k[:, :end], v[:, :end], cu_seqlens)
        training = state is None and torch.is_grad_enabled()
        if training and cu_seqlens is not None:
            return o, None
    unpacked = UnpackedRows(k, state, cu_seqlens)
    if state is None:
        assert o is not None
        k, v = unpacked.spread(k), unpacked.spread(v)
        num_read = unpacked.num_read_after()
        return o, LayerState(
            keys=k, values=v, num_read=num_read, read_at_most=k.shape[1]
        )
    position = token_positions(k.shape[1], q.device, state, cu_seqlens)
    q_rows, q_position = unpacked, position
    if ranks is not None:
        shard = shard_of(ranks, q, T, cu_seqlens)
        q_rows = UnpackedRows(q, state, shard.cu_seqlens)
        q_position = token_positions(T, q.device, state, cu_seqlens, start)
    after = append_keys(k, v, state, position, unpacked)
    if o is not None:
        return o, after
    keys, values = after.tensor("keys"), after.tensor("values")
    if not captured:  # else the room for all tokens that may come
        keys, values = (x[:, : after.read_at_most] for x in (keys, values))
    if state.rows is not None:
        rows = clamp_rows(state.rows, keys)
        keys, values = keys[rows], values[rows]
    key_position = torch.arange(keys.shape[1], device=q.device)
    q_position = q_rows.spread(q_position)[..., None]
    mask = (key_position <= q_position)[:, None]
    keys, values = keys.to(q.dtype), values.to(q.dtype)
    return q_rows.pack(sdpa(q_rows.spread(q), keys, values, mask)), after


def is_captured(q: Heads) -> bool:
    """Whether the call will run again, by itself, with more tokens read."""
    return torch.compiler.is_compiling() or (
        q.is_cuda and torch.cuda.is_current_stream_capturing()
    )


def append_keys(
    k: Heads,
    v: Heads,
    state: LayerState,
    position: Int[Tensor, "B T"],
    unpacked: UnpackedRows,
) -> LayerState:
    """A state with keys and values of new tokens, at their positions.

    Without gradients they are written in place, into a copy if the state has
    no room for them; with gradients, always into a copy.
    """
    used, read = state.read_at_most + k.shape[1], unpacked.num_read_after()
    rows = state.rows
    if unpacked.cu_seqlens is not None:
        # Each token is a row of its own, and of none after the last sequence.
        if rows is None:
            rows = torch.arange(len(read), device=k.device)
        inside = (rows >= 0) & (rows < len(state.tensor("num_read")))
        used = int(read.where(inside, 0).max())
        rows = F.pad(rows, (0, 1), value=-1)[unpacked.row]
        k, v, position = (x[0][:, None] for x in (k, v, position))
    keys, values = state.tensor("keys"), state.tensor("values")
    if state.rows is None:
        keys, values = grow_to(keys, used), grow_to(values, used)
        if torch.is_grad_enabled():
            keys, values = keys.clone(), values.clone()
        else:
            state.keys, state.values = keys, values
    elif used > keys.shape[1]:
        raise ValueError(
            f"state: got a pool with room for {keys.shape[1]} tokens per row, "
            f"need {used}"
        )
    if rows is None:
        row = torch.arange(k.shape[0], device=k.device)[:, None]
        keys[row, position] = k.to(keys.dtype)
        values[row, position] = v.to(values.dtype)
    else:
        row, source, exists = rows_to_write(rows, keys)
        # Where none has a row, a position is some row's, a full one's even.
        index = row[:, None], position[source].clamp(max=keys.shape[1] - 1)
        for x, new in ((keys, k), (values, v)):
            new = new[source].to(x.dtype)
            x.index_put_(index, new.where(exists, x[index]))
    after = LayerState(keys=keys, values=values, num_read=read)
    after.read_at_most = max(used, state.read_at_most)
    return after


def grow_to(x: Tensor, capacity: int) -> Tensor:
    """x, or a copy with room for ``capacity`` tokens, at least twice x's."""
    if x.shape[1] >= capacity:
        return x
    more = max(capacity, 2 * x.shape[1]) - x.shape[1]
    return torch.cat([x, x.new_zeros(x.shape[0], more, *x.shape[2:])], 1)
