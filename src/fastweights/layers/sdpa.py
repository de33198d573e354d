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

from fastweights import private
from fastweights.arguments import is_readable
from fastweights.dtypes import cast_for_autocast
from fastweights.layers.state import Offsets
from fastweights.reference.packing import sequence_of

Heads = Float[Tensor, "B T H K"]
Keys = Float[Tensor, "B S HK K"]  # or values: of S tokens, HK heads
Packed = Float[Tensor, "1 T H K"]
PackedKeys = Float[Tensor, "1 T HK K"]

TILE = 512  # queries per tile, where the mask is written

# From PyTorch 2.12 on heads are shared only if one says so, before always.
_ASKS = private.version_of(torch) >= (2, 12)


def attention(q: Heads, k: Keys, v: Keys, mask: Tensor | None = None) -> Heads:
    """Causal, or where ``mask`` is true; heads of k and v are shared."""
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)


def packed_attention(
    q: Packed, k: PackedKeys, v: PackedKeys, cu_seqlens: Offsets
) -> Packed:
    """Causal within each sequence; heads of k and v are shared.

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
    offsets = F.pad(cu_seqlens, (0, 1), value=q.shape[1])
    if reads_offsets(q.device, q.dtype, q.shape[-1]):
        # Here, since its module imports a compiler.
        from torch.nn.attention.varlen import varlen_attn

        asked = {"enable_gqa": q.shape[2] != k.shape[2]} if _ASKS else {}
        named: dict[str, Any] = {"window_size": (-1, 0), **asked}  # causal
        offsets = offsets.to(torch.int32)
        longest = max(q.shape[1], 2)  # it takes a 1 for a step of decoding
        given = offsets, offsets, longest, longest
        o = varlen_attn(q[0], k[0], v[0], *given, **named)
        assert isinstance(o, Tensor)  # alone, since nothing else is asked
        return o[None]
    if is_readable(cu_seqlens):
        sizes = offsets.diff().tolist()
        parts = zip(*(x.split(sizes, 1) for x in (q, k, v)), strict=True)
        found = [attention(*part) for part in parts if part[0].shape[1]]
        return torch.cat(found, 1)
    return in_tiles(q, k, v, cu_seqlens)


def in_tiles(
    q: Packed, k: PackedKeys, v: PackedKeys, cu_seqlens: Offsets
) -> Packed:
    """Packed attention by a mask, of TILE queries at a time."""
    T, row = q.shape[1], sequence_of(cu_seqlens, q.shape[1])
    if T <= TILE:
        return tile(q, k, v, row, row)
    tiles = []
    for start in range(0, T, TILE):
        end = start + TILE
        o = checkpoint(
            tile,
            q[:, start:end],
            k[:, :end],
            v[:, :end],
            row[start:end],
            row[:end],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        tiles.append(o)
    return torch.cat(tiles, 1)


@private.constant_in_graphs
def reads_offsets(device: torch.device, dtype: torch.dtype, K: int) -> bool:
    """Whether PyTorch has kernels for packed sequences of such heads.

    Their backward leaves out some GPUs between K = 192 and 256.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    sizes = K % 8 == 0 and (K <= 192 or K == 256)
    if device.type != "cuda" or not half or not sizes or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def tile(
    q: Float[Tensor, "1 C H K"],
    k: PackedKeys,
    v: PackedKeys,
    own: Int[Tensor, " C"],
    row: Int[Tensor, " T"],
) -> Float[Tensor, "1 C H K"]:
    """The last C queries of T tokens; of each, which sequence it is in."""
    same = own[:, None] == row
    return attention(q, k, v, same.tril(row.shape[0] - own.shape[0]))
