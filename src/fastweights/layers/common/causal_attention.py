"""Causal softmax attention by PyTorch: of a batch, and of packed sequences.

Its scaled_dot_product_attention knows no packed sequences but by a mask, of
T x T entries, which would be kept for the backward too. On a GPU its
varlen_attn reads the offsets where they are. Elsewhere the queries go by
tiles here, each with the rows of the mask that it needs, and the backward
makes them again. flex_attention has no backward on a CPU and writes all
scores unless it is compiled, and nested tensors have no shared heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastweights import torch_internals
from fastweights.arguments import is_readable
from fastweights.dtypes import cast_for_autocast
from fastweights.layers.common.state import Offsets
from fastweights.packing import sequence_ids
from fastweights.ranks.group import current_ranks

Heads = Float[Tensor, "B T H K"]
Keys = Float[Tensor, "B S HK K"]  # or values: of S tokens, HK heads
Packed = Float[Tensor, "1 T H K"]
PackedKeys = Float[Tensor, "1 T HK K"]

TILE = 512  # queries per tile, where the mask is written

# From PyTorch 2.12 on heads are shared only if one says so, before always.
ASKS_FOR_GQA = torch_internals.version_of(torch) >= (2, 12)


def sdpa(q: Heads, k: Keys, v: Keys, mask: Tensor | None = None) -> Heads:
    """Attention, causal or by ``mask``; heads of k and v are shared."""
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)


def attend_causally(
    q: Heads, k: Keys, v: Keys, cu_seqlens: Offsets | None
) -> Heads:
    """Causal attention of a batch or pack; q are of its last tokens.

    Ranks that share a sequence have fewer q than k and v. PyTorch's ring
    attention is for batches of equal ranks. Keys and values are gathered
    instead, which serves packs and any ranks.
    """
    if cu_seqlens is not None:
        return packed_attention(q, k, v, cu_seqlens)
    if q.shape[1] == k.shape[1]:
        return sdpa(q, k, v)
    if q.is_cuda:
        # Here, since its module imports a compiler.
        from torch.nn.attention.bias import causal_lower_right

        q, k, v = cast_for_autocast(q, k, v)
        return sdpa(q, k, v, causal_lower_right(q.shape[1], k.shape[1]))
    return attend_by_tiles(q, k, v, None)


def packed_attention(
    q: Packed, k: PackedKeys, v: PackedKeys, cu_seqlens: Offsets
) -> Packed:
    """Attention, causal within each sequence; heads of k and v are shared.

    q are of the last of the tokens of k and v.

    Memory grows with T, not with T^2, and nothing waits for the device. On a
    CPU, and in fp16 and bf16 on a GPU of compute capability 8.0 or higher,
    with K a multiple of 8 up to 192, or 256, no sequence meets another's
    keys. Otherwise, and on a CPU under torch.compile, each token is
    multiplied with all before it, TILE queries at a time: sequences of more
    than TILE tokens in all pay for a second forward in their backward, and a
    NaN in one of them reaches the gradients of the others.
    """
    q, k, v = cast_for_autocast(q, k, v)
    # What stands after the last sequence is read as one more.
    end, before = k.shape[1], k.shape[1] - q.shape[1]
    offsets = F.pad(cu_seqlens.to(torch.int32), (0, 1), value=end)
    q_offsets = offsets
    if current_ranks() is not None:
        offsets = offsets.clamp(max=end)
        q_offsets = (offsets - before).clamp(min=0)
    if reads_offsets(q.device, q.dtype, q.shape[-1]):
        # Here, since its module imports a compiler.
        from torch.nn.attention.varlen import varlen_attn

        gqa = {"enable_gqa": q.shape[2] != k.shape[2]} if ASKS_FOR_GQA else {}
        options: dict[str, Any] = {"window_size": (-1, 0), **gqa}  # causal
        # It takes a 1 for a step of decoding.
        bounds = q_offsets, offsets, max(q.shape[1], 2), max(end, 2)
        o = varlen_attn(q[0], k[0], v[0], *bounds, **options)
        assert isinstance(o, Tensor)  # alone, since nothing else is asked
        return o[None]
    if is_readable(cu_seqlens):
        sizes = offsets.diff().tolist()
        parts = zip(
            q.split(q_offsets.diff().tolist(), 1),
            *(x.split(sizes, 1) for x in (k, v)),
            strict=True,
        )
        outputs = [
            attend_causally(q_n, k_n, v_n, None)
            for q_n, k_n, v_n in parts
            if q_n.shape[1]
        ]
        return torch.cat(outputs, 1)
    return attend_by_tiles(q, k, v, cu_seqlens)


def attend_by_tiles(
    q: Heads, k: Keys, v: Keys, cu_seqlens: Offsets | None
) -> Heads:
    """Attention by a mask, of TILE of the last queries at a time."""
    end, before = k.shape[1], k.shape[1] - q.shape[1]
    if cu_seqlens is None:
        sequence = torch.zeros(end, dtype=torch.int64, device=q.device)
    else:
        sequence = sequence_ids(cu_seqlens, end)
    if q.shape[1] <= TILE:
        return attend_one_tile(q, k, v, sequence[before:], sequence)
    tiles = []
    for start in range(before, end, TILE):
        stop = start + TILE
        o = checkpoint(
            attend_one_tile,
            q[:, start - before : stop - before],
            k[:, :stop],
            v[:, :stop],
            sequence[start:stop],
            sequence[:stop],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        tiles.append(o)
    return torch.cat(tiles, 1)


@torch_internals.constant_in_graphs
def reads_offsets(device: torch.device, dtype: torch.dtype, K: int) -> bool:
    """Whether PyTorch has kernels for packed sequences of such heads.

    Their backward leaves out some GPUs between K = 192 and 256.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    sizes = K % 8 == 0 and (K <= 192 or K == 256)
    if device.type != "cuda" or not half or not sizes or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def attend_one_tile(
    q: Float[Tensor, "B C H K"],
    k: Keys,
    v: Keys,
    q_sequence: Int[Tensor, " C"],
    sequence: Int[Tensor, " S"],
) -> Float[Tensor, "B C H K"]:
    """Attention of the last C queries, each within its own sequence."""
    same = q_sequence[:, None] == sequence
    return sdpa(q, k, v, same.tril(len(sequence) - len(q_sequence)))
