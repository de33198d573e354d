"""Mamba's selective scan: token by token, and by a prefix scan per chunk.

A token maps each entry of the state, h -> a h + b with a = e^{dt A} <= 1 and
b = dt x B. Such maps compose, so that
:func:`~fastweights.reference.prefix.scan_by_pairs_` gets all states of a
chunk in a few operations on whole tensors, and no decay is divided by. From
chunk to chunk one state is carried: never more than a chunk's states are in
memory.

Shapes: D channels are G groups of P, which share B and C. A chunk of L
tokens has x, dt [Bt, L, G, P] and B, C [Bt, L, G, N]; A is [G, N, P] here,
and a state [Bt, G, N, P], as the book has its states: B is a key, C a query
and dt x a value. Channels lie side by side, which a CPU's vectors like.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.dtypes import compute_dtype
from fastweights.packing import (
    Piece,
    pack_pieces,
    sequence_spans,
    states_or_zeros,
)
from fastweights.reference.prefix import scan_by_pairs_
from fastweights.reference.steps import outer, read, scan, selective

Channels = Float[Tensor, "Bt L G P"]
Shared = Float[Tensor, "Bt L G N"]
EnteringState = Float[Tensor, "Bt G N P"]
Decays = Float[Tensor, "Bt L+2 G N P"]
TokenStates = Float[Tensor, "Bt L+1 G N P"]
Rates = Float[Tensor, "G N P"]
ScanOffsets = Int[Tensor, " S+1"]


def decays(dt: Channels, A: Rates) -> Decays:
    """e^{dt A} of each token, between two of step 0, whose decay is 1."""
    dt = F.pad(dt, (0, 0, 0, 0, 1, 1))
    return (dt[..., None, :] * A).exp_()


def states_of(
    a: Decays, w: Channels, B: Shared, h: EnteringState
) -> TokenStates:
    """The state h that enters a chunk, and that after each of its tokens."""
    B, w = (F.pad(t, (0, 0, 0, 0, 1, 0)) for t in (B, w))
    b = outer(B, w)
    b[:, 0] = h
    return scan_by_pairs_(a[:, :-1], b)


def chunk_backward(
    x: Channels,
    dt: Channels,
    A: Rates,
    B: Shared,
    C: Shared,
    h: EnteringState,
    dy: Channels,
    dh: EnteringState,
) -> tuple[Channels, Channels, Rates, Shared, Shared, EnteringState]:
    """Gradients of x, dt, A, B, C and of the state h that enters a chunk.

    dh is the gradient of the state that leaves it. The same scan, from the
    last token to the first: dh_t = a_{t+1} dh_{t+1} + C_t dy_t^T.
    """
    a, w = decays(dt, A), dt * x
    hs = states_of(a, w, B, h)
    dhs = outer(C, dy)
    dhs[:, -1] += dh
    scan_by_pairs_(a[:, 2:], dhs, reverse=True)
    dh = a[:, 1] * dhs[:, 0]

    dC = states_along(hs[:, 1:], dy)
    dB = states_along(dhs, w)
    dw = read(dhs, B)
    dg = dhs.mul_(a[:, 1:-1]).mul_(hs[:, :-1])  # the gradient of dt A
    dx, ddt = dw * dt, dw * x + (dg * A).sum(-2)
    dA = dg.mul_(dt[..., None, :]).sum(dim=(0, 1))
    return dx, ddt, dA, dB, dC, dh


def states_along(h: Float[Tensor, "Bt L G N P"], w: Channels) -> Shared:
    """h w, for every token: of each row of the state, its part along w."""
    return torch.einsum("...np,...p->...n", h, w)


def tile_length(D: int, N: int, G: int) -> int:
    """Tokens in a chunk: few where a single state fills a cache."""
    return 64 if D * N <= 4096 else 16


def chunks(
    cu_seqlens: ScanOffsets | None, x: Float[Tensor, "Bt T D"], length: int
) -> Iterator[tuple[Any, list[tuple[Any, Piece]]]]:
    """Each sequence: which states are its own, and its chunks.

    A chunk is an index of its first state among all that are kept, and its
    tokens. Short sequences of a pack are one chunk together.
    """
    T = x.shape[1]
    parts = [Piece(slice(None), (slice(None), slice(0, T)), length)]
    if cu_seqlens is not None:
        parts = pack_pieces(cu_seqlens, x, length, lambda L: 4 * length // L)
    for part in parts:
        n = part.states
        if part.valid is not None:
            place = part.tokens[1][:, 0] // length + n
            yield n, [((0, place), part)]
            continue
        rows, t = part.tokens
        place = t.start // length + (n.start or 0)
        found = []
        for i, first in enumerate(range(t.start, t.stop, length)):
            tokens = rows, slice(first, min(first + length, t.stop))
            found.append(((rows, place + i), Piece(n, tokens, length)))
        yield n, found


def in_groups(
    G: int, dtype: torch.dtype, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Tensors [..., D] as [..., G, P], in ``dtype``."""
    return tuple(x.unflatten(-1, (G, -1)).to(dtype) for x in tensors)


def keys_first(h: Float[Tensor, "*lead D N"], G: int) -> Tensor:
    """[..., D, N] as [..., G, N, P]."""
    return h.unflatten(-2, (G, -1)).mT.contiguous()


def channels_first(h: Float[Tensor, "*lead G N P"]) -> Tensor:
    """[..., G, N, P] as [..., D, N]."""
    return h.mT.flatten(-3, -2)


def loop(
    x: Float[Tensor, "Bt T D"],
    dt: Float[Tensor, "Bt T D"],
    A: Float[Tensor, "D N"],
    B: Float[Tensor, "Bt T G N"],
    C: Float[Tensor, "Bt T G N"],
    D: Float[Tensor, " D"] | None,
    initial_state: Float[Tensor, "S D N"] | None,
    cu_seqlens: ScanOffsets | None,
) -> tuple[Float[Tensor, "Bt T D"], Float[Tensor, "S D N"]]:
    """Run one token at a time, with the gradients that autograd finds.

    y is in the dtype of the arithmetic.
    """
    full, G = compute_dtype(x.dtype), B.shape[2]
    initial_states = states_or_zeros(x, A.shape, initial_state, cu_seqlens)
    states = list(initial_states.unflatten(1, (G, -1)).split(1))
    rates = A.to(full).unflatten(0, (G, -1))
    tokens = (*in_groups(G, full, x, dt), B.to(full), C.to(full))
    outputs = []
    for s, t in sequence_spans(cu_seqlens, x.shape[1]):
        y, h = scan(
            lambda h, x, dt, B, C: selective(h, x, dt, rates, B, C),
            torch.cat(states[s]),
            *(token[:, t] for token in tokens),
        )
        outputs.append(y.flatten(2))
        states[s] = h.split(1)
    ends = sum(y.shape[1] for y in outputs)
    y = torch.cat([x[:, :0].to(full), *outputs], 1)
    if D is not None:
        y = y + D.to(full) * x[:, :ends].to(full)
    y = F.pad(y, (0, 0, 0, x.shape[1] - ends))
    return y, torch.cat(states).flatten(1, 2)


def forward(
    x: Float[Tensor, "Bt T D"],
    dt: Float[Tensor, "Bt T D"],
    A: Float[Tensor, "D N"],
    B: Float[Tensor, "Bt T G N"],
    C: Float[Tensor, "Bt T G N"],
    D: Float[Tensor, " D"] | None,
    initial_state: Float[Tensor, "S D N"] | None,
    cu_seqlens: ScanOffsets | None,
    states: Float[Tensor, " Bt*NT*D*N"] | None,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "Bt T D"], Float[Tensor, "S D N"]]:
    """Outputs, in ``dtype``, and last states.

    The state that enters each chunk goes into ``states`` unless it is None.
    """
    full, G = compute_dtype(x.dtype), B.shape[2]
    state = states_or_zeros(x, A.shape, initial_state, cu_seqlens)
    y = torch.zeros_like(x, dtype=dtype)  # as after the last sequence
    if states is not None:
        states = states.view(len(x), -1, *A.shape)
    A = keys_first(A.to(full), G)
    length = tile_length(x.shape[2], A.shape[1], G)
    for n, parts in chunks(cu_seqlens, x, length):
        h = keys_first(state[n], G)
        for place, part in parts:
            if states is not None:
                states[place] = channels_first(h)
            x_t, dt_t, B_t, C_t = part.select(x, dt, B, C)
            x_t, dt_t = in_groups(G, full, x_t, dt_t)
            a, w = decays(dt_t, A), dt_t * x_t
            hs = states_of(a, w, B_t.to(full), h)
            y_t = read(hs[:, 1:], C_t.to(full)).flatten(2)
            if D is not None:
                y_t.addcmul_(D.to(full), x_t.flatten(2))
            part.put(y, y_t)
            h = hs[:, -1]
        state[n] = channels_first(h)
    return y, state


def backward(
    dy: Float[Tensor, "Bt T D"],
    dstate: Float[Tensor, "S D N"] | None,
    x: Float[Tensor, "Bt T D"],
    dt: Float[Tensor, "Bt T D"],
    A: Float[Tensor, "D N"],
    B: Float[Tensor, "Bt T G N"],
    C: Float[Tensor, "Bt T G N"],
    D: Float[Tensor, " D"] | None,
    initial_state: Float[Tensor, "S D N"] | None,
    cu_seqlens: ScanOffsets | None,
    states: Float[Tensor, " Bt*NT*D*N"],
) -> list[Tensor | None]:
    """Gradients of x, dt, A, B, C, D and initial_state.

    Those of A and D are in the dtype of the arithmetic. ``states`` is what
    :func:`forward` put there.
    """
    full, G = compute_dtype(x.dtype), B.shape[2]
    dx, ddt, dB, dC = (torch.zeros_like(t) for t in (x, dt, B, C))
    dh = states_or_zeros(x, A.shape, dstate, cu_seqlens)
    states = states.view(len(x), -1, *A.shape)
    A = keys_first(A.to(full), G)
    dA = torch.zeros_like(A)
    dD = None if D is None else torch.zeros_like(D, dtype=full)
    length = tile_length(x.shape[2], A.shape[1], G)
    for n, parts in chunks(cu_seqlens, x, length):
        dh_t = keys_first(dh[n], G)
        for place, part in reversed(parts):
            x_t, dt_t, dy_t, B_t, C_t = part.select(x, dt, dy, B, C)
            x_t, dt_t, dy_t = in_groups(G, full, x_t, dt_t, dy_t)
            h = keys_first(states[place], G)
            dx_t, ddt_t, dA_t, dB_t, dC_t, dh_t = chunk_backward(
                x_t, dt_t, A, B_t.to(full), C_t.to(full), h, dy_t, dh_t
            )
            dA += dA_t
            part.put(dB, dB_t)
            part.put(dC, dC_t)
            dx_t = dx_t.flatten(2)
            if D is not None and dD is not None:
                dx_t.addcmul_(D.to(full), dy_t.flatten(2))
                dD += (dy_t * x_t).sum(dim=(0, 1)).flatten()
            part.put(dx, dx_t)
            part.put(ddt, ddt_t.flatten(2))
        dh[n] = channels_first(dh_t)
    return [dx, ddt, channels_first(dA), dB, dC, dD, dh]
