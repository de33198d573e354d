"""Softmax attention to the last tokens only, which a state can hold."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.ops.common import any_length


def window_attention(
    q: Float[Tensor, "N L H K"],
    k: Float[Tensor, "N L H K"],
    v: Float[Tensor, "N L H K"],
    window: int,
    past: Float[Tensor, "N W-1 C"] | None = None,
    position: Int[Tensor, " N"] | None = None,
    lengths: Int[Tensor, " N"] | None = None,
) -> tuple[Float[Tensor, "N L H K"], Float[Tensor, "N W-1 C"]]:
    """Each token attends to itself and the window - 1 tokens before it.

    Tokens go by blocks as long as the window, each with the keys of its own
    block and of the one before: the cost per token does not grow with L.

    Args:
        q, k, v: of one dtype, turned by their positions already.
        window: tokens W that one attends to, with itself.
        past: [k | v] of the W - 1 tokens before, all heads side by side.
        position: tokens that each row has read before; None: none.
        lengths: tokens of each row; None: L.

    Returns:
        o, and the past of the tokens that follow.
    """
    N, L, H, K = q.shape
    before = window - 1
    if any_length.is_dynamic(L):
        results = (v.shape, v.dtype), ([N, before, 2 * H * K], k.dtype)
        inputs = q, k, v, window, past, position, lengths
        return any_length.call_as_operator(window_attention, results, *inputs)
    key_values = torch.cat([k.flatten(2), v.flatten(2)], -1)
    if past is None:
        past = key_values.new_zeros(N, before, 2 * H * K)
    key_values = torch.cat([past.to(key_values.dtype), key_values], 1)
    block = min(L, window)
    count = -(-L // block)
    padding = count * block - L
    q = F.pad(q, (0, 0, 0, 0, 0, padding)).unflatten(1, (count, block))
    # A padding of nothing would copy the whole window.
    keys = F.pad(key_values, (0, 0, 0, padding)) if padding else key_values
    # [N, count, block + before, 2 H K]
    keys = keys.unfold(1, block + before, block).mT
    keys, values = (
        x.unflatten(-1, (H, K)).flatten(0, 1).transpose(1, 2)
        for x in keys.chunk(2, -1)
    )
    i = torch.arange(block, device=q.device)[:, None]
    j = torch.arange(block + before, device=q.device)
    in_window = (j >= i) & (j <= i + before)
    # A key's place in its sequence must not lie before the first token's.
    start = torch.arange(count, device=q.device)[:, None] * block + j - before
    first = 0 if position is None else -position[:, None, None]
    exists = (start >= first).expand(N, count, -1)
    mask = (in_window & exists[..., None, :]).flatten(0, 1)[:, None]
    queries = q.flatten(0, 1).transpose(1, 2)
    o = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    o = o.transpose(1, 2).unflatten(0, (N, count)).flatten(1, 2)[:, :L]
    if lengths is None:
        return o, key_values[:, L:]
    index = lengths[:, None] + torch.arange(before, device=q.device)
    return o, torch.take_along_dim(key_values, index[..., None], 1)
