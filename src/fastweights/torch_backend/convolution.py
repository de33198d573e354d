"""The short convolution in PyTorch, forward and backward.

Every sequence is preceded by the W - 1 inputs that came before it, so that
no token has to ask where its sequence begins: the convolution is W shifted
products over all rows, and the next state is the last W - 1 of them, however
few tokens a sequence has. Packed sequences lie end to end, each behind its
own such rows; where those are follows from cu_seqlens without reading it on
the host.

Shifts, not ``conv1d``: on one core of a CPU, in fp32 with W = 4, they take
0.8 ms where conv1d over [B, C, T] takes 5 to 9 and conv2d in channels-last
3.5 (B 8, T 256, C 384), 23 us where those take 77 and 57 (B 1, T 1), and 0.7
ms where those take 10 and 0.7 (B 64, T 1, C 6144).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweights.dtypes import compute_dtype
from fastweights.heads import HeadLayout, split_heads
from fastweights.packing import Offsets, num_sequences, sequence_ids

RowNumbers = Int[Tensor, " rows"]


class Places(NamedTuple):
    """The places of packed sequences among the rows, each behind its state."""

    tokens: RowNumbers  # [T]
    first: RowNumbers  # [N * (W - 1)], the states that sequences begin with
    last: RowNumbers  # [N * (W - 1)], those that they leave
    no_tokens: Bool[Tensor, "T 1"]  # after the last sequence


def find_places(cu_seqlens: Offsets, T: int, W: int) -> Places:
    """The places, of which none is outside of [0, T + N (W - 1)).

    That holds for any offsets, which are moved to where they could be.
    """
    offsets = cu_seqlens.long().clamp(0, T).cummax(0).values
    N = cu_seqlens.shape[0] - 1
    t = torch.arange(T, device=cu_seqlens.device)
    n = sequence_ids(offsets, T).clamp(max=N - 1)
    i = torch.arange(N * (W - 1), device=cu_seqlens.device)
    sequence = i // (W - 1)  # the sequence of a row of a state
    first, last = offsets[sequence] + i, offsets[sequence + 1] + i
    no_tokens = (t >= offsets[-1])[:, None]
    return Places(t + (n + 1) * (W - 1), first, last, no_tokens)


def prepend_states(
    x: Float[Tensor, "B T C"],
    initial_state: Float[Tensor, "N W-1 C"] | None,
    W: int,
    places: Places | None,
    N: int,
) -> Float[Tensor, "B L C"]:
    """The tokens in the dtype of the arithmetic, behind their states.

    L is T + W - 1, or T + N (W - 1) of N packed sequences, at ``places``.
    """
    B, T, C = x.shape
    sequences = 1 if places is None else N
    rows = x.new_empty(
        B, T + sequences * (W - 1), C, dtype=compute_dtype(x.dtype)
    )
    if places is None:
        rows[:, W - 1 :] = x
        rows[:, : W - 1] = 0 if initial_state is None else initial_state
        return rows
    rows.zero_()  # offsets that are none leave rows out
    tokens = x[0].masked_fill(places.no_tokens, 0)
    rows[0, places.tokens] = tokens.to(rows.dtype)
    if initial_state is not None:
        rows[0, places.first] = initial_state.to(rows.dtype).flatten(0, 1)
    return rows


def convolve(
    rows: Float[Tensor, "B L C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, " C"] | None,
) -> Float[Tensor, "B L-W+1 C"]:
    """bias + sum_j weight[:, W - 1 - j] x_{t-j}, without the activation."""
    W = weight.shape[1]
    taps = weight.to(rows.dtype).mT.contiguous()  # [W, C]
    T = rows.shape[1] - W + 1
    if bias is None:
        z = rows[:, :T] * taps[0]
    else:
        z = torch.addcmul(bias.to(rows.dtype), rows[:, :T], taps[0])
    for i in range(1, W):
        z.addcmul_(rows[:, i : i + T], taps[i])
    return z


def unactivated(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, " C"] | None,
    initial_state: Float[Tensor, "N W-1 C"] | None,
    cu_seqlens: Offsets | None,
) -> tuple[Float[Tensor, "B L C"], Float[Tensor, "B T C"], Places | None]:
    """The extended rows, each token's sum before the activation, places."""
    T, W = x.shape[1], weight.shape[1]
    places = None if cu_seqlens is None else find_places(cu_seqlens, T, W)
    N = num_sequences(x, cu_seqlens)
    rows = prepend_states(x, initial_state, W, places, N)
    z = convolve(rows, weight, bias)
    if places is not None:
        z = z[:, places.tokens - (W - 1)].masked_fill_(places.no_tokens, 0)
    return rows, z, places


def last_inputs(
    rows: Float[Tensor, "B L C"], places: Places | None, N: int, W: int
) -> Float[Tensor, "N W-1 C"]:
    """The last W - 1 inputs of each of N sequences."""
    if places is None:
        return rows[:, rows.shape[1] - (W - 1) :]
    return rows[0, places.last].view(N, W - 1, rows.shape[2])


def inverse_norm(
    x: Float[Tensor, "B T H K"], eps: float
) -> Float[Tensor, "B T H 1"]:
    """1 / sqrt(sum of squares + eps) of each head."""
    return torch.linalg.vecdot(x, x)[..., None].add_(eps).rsqrt_()


def forward(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, " C"] | None,
    initial_state: Float[Tensor, "N W-1 C"] | None,
    cu_seqlens: Offsets | None,
    layout: HeadLayout,
    eps: float | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Float[Tensor, "N W-1 C"]]:
    """q, k, v and the last W - 1 inputs of each sequence.

    Without an ``eps`` nothing is normalised.
    """
    rows, z, places = unactivated(x, weight, bias, initial_state, cu_seqlens)
    N, W = num_sequences(x, cu_seqlens), weight.shape[1]
    last = last_inputs(rows, places, N, W)
    state = x.new_empty(last.shape).copy_(last)
    y = F.silu(z, inplace=True) if silu else z
    if not layout.H:
        return x.new_empty(0), x.new_empty(0), y.to(x.dtype), state
    q, k, v = split_heads(y, layout)
    if eps is not None:
        q, k = (t * inverse_norm(t, eps) for t in (q, k))
    # Copies, since an operator's results share no memory.
    q, k, v = (torch.empty_like(t, dtype=x.dtype).copy_(t) for t in (q, k, v))
    return q, k, v, state


def backward(
    dq: Float[Tensor, "B T H K"] | Float[Tensor, " 0"] | None,
    dk: Float[Tensor, "B T H K"] | Float[Tensor, " 0"] | None,
    dv: Tensor,
    dstate: Float[Tensor, "N W-1 C"] | None,
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, " C"] | None,
    initial_state: Float[Tensor, "N W-1 C"] | None,
    cu_seqlens: Offsets | None,
    layout: HeadLayout,
    eps: float | None,
    silu: bool,
) -> list[Tensor | None]:
    """Gradients of x, weight, bias and initial_state, None without them.

    Those of weight and bias are in the dtype of the arithmetic.
    """
    rows, z, places = unactivated(x, weight, bias, initial_state, cu_seqlens)
    sigmoid = torch.sigmoid(z) if silu else None
    if layout.H and dq is not None and dk is not None:
        dy = torch.cat([t.flatten(2) for t in (dq, dk, dv)], dim=2)
        dy = dy.to(rows.dtype)
        if eps is not None:
            y = z if sigmoid is None else z * sigmoid
            outputs, grads = split_heads(y, layout), split_heads(dy, layout)
            for part, grad in zip(outputs[:2], grads[:2], strict=True):
                scale = inverse_norm(part, eps)  # r; the output is r y
                along = torch.linalg.vecdot(part, grad)[..., None]
                grad.mul_(scale).addcmul_(part, along * scale**3, value=-1)
    else:
        dy = dv.to(rows.dtype)
    if sigmoid is not None:
        # d silu = s (1 + z (1 - s))
        dy = dy * (1 - sigmoid).mul_(z).add_(1).mul_(sigmoid)
    return _backward_of_sums(
        dy, dstate, rows, places, x, weight, bias, initial_state
    )


def _backward_of_sums(
    dz: Float[Tensor, "B T C"],
    dstate: Float[Tensor, "N W-1 C"] | None,
    rows: Float[Tensor, "B L C"],
    places: Places | None,
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, " C"] | None,
    initial_state: Float[Tensor, "N W-1 C"] | None,
) -> list[Tensor | None]:
    """Gradients of the inputs, from those of the sums and of the states."""
    (B, _, C), W = x.shape, weight.shape[1]
    length = rows.shape[1] - W + 1
    if places is not None:
        dz_tokens = dz[0].masked_fill(places.no_tokens, 0)
        dz = dz.new_zeros(B, length, C)
        dz[0, places.tokens - (W - 1)] = dz_tokens
    dbias = None if bias is None else dz.sum(dim=(0, 1))
    taps = weight.to(dz.dtype).mT.contiguous()  # [W, C]
    drows = torch.zeros_like(rows)
    dtaps = []
    for i in range(W):
        drows[:, i : i + length].addcmul_(dz, taps[i])
        dtaps.append((dz * rows[:, i : i + length]).sum(dim=(0, 1)))
    if places is None:
        if dstate is not None:
            drows[:, length:] += dstate
        dx, dinitial = drows[:, W - 1 :], drows[:, : W - 1]
    else:
        if dstate is not None:
            # No row twice: they lie among those of a sequence and its state.
            drows[0, places.last] += dstate.to(dz.dtype).flatten(0, 1)
        dx, dinitial = drows[:, places.tokens], drows[0, places.first]
    # Copies, as in forward.
    grads = [torch.empty_like(x).copy_(dx), torch.stack(dtaps, dim=1), dbias]
    if initial_state is None:
        return [*grads, None]
    dinitial = dinitial.reshape(initial_state.shape)
    return [*grads, torch.empty_like(initial_state).copy_(dinitial)]
