"""Mamba's selective scan: prefixes of affine maps, tile by tile of time.

A token maps each element of the state, h -> a h + b with a = e^{dt A} and
b = dt x B. Such maps compose into such maps, so that all prefixes of a tile
of BT tokens come from one ``tl.associative_scan``, log2(BT) deep; from tile
to tile one state is carried. A token past the end has dt = 0: h -> h. No
decay is ever divided by: where a token has to be left out of a scan, it is
not loaded.

A program has BD of the channels of one group, which share B and C, and one
sequence: a batch entry, or what cu_seqlens cuts from the only one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.arguments import check_offsets_on_host
from fastweights.kernels.tail import clear_tail
from fastweights.kernels.tile import first_slot, sequence_span
from fastweights.packing import num_sequences

FP32 = torch.float32
SETTINGS = {"num_warps": 8, "num_stages": 1}


class SelectiveMeta(NamedTuple):
    """Constants of a kernel: its argument META."""

    D: int  # channels
    N: int  # numbers in a channel's state
    G: int  # groups of channels, that share B and C
    BT: int
    BD: int
    BN: int

    @property
    def NP(self) -> int:
        """Tiles of channels per group."""
        return -(-(self.D // self.G) // self.BD)


@triton.jit
def entries_at(x, rows, columns, W: tl.constexpr):
    """Pointers to rows and columns of x [rows, W], and mask.

    Both are pairs: which ones, and which of those exist.
    """
    o_r, m_r = rows
    o_c, m_c = columns
    p_x = x + o_r.to(tl.int64)[:, None] * W + o_c[None, :]
    return p_x, m_r[:, None] & m_c[None, :]


@triton.jit
def load_entries(x, rows, columns, W: tl.constexpr):
    """The entries of :func:`entries_at` in fp32, 0 where there are none."""
    p_x, m_x = entries_at(x, rows, columns, W)
    return tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)


@triton.jit
def store_entries(x, b_x, rows, columns, W: tl.constexpr):
    """Store the entries where :func:`load_entries` would load them from."""
    p_x, m_x = entries_at(x, rows, columns, W)
    tl.store(p_x, b_x, mask=m_x)


@triton.jit
def channels_of_program(META: tl.constexpr):
    """A program's sequence, tile of channels, group, and channels."""
    P: tl.constexpr = META.D // META.G  # channels per group
    NP: tl.constexpr = META.NP
    ND: tl.constexpr = META.G * NP
    i_n, i_d = tl.program_id(0) // ND, tl.program_id(0) % ND
    o_p = i_d % NP * META.BD + tl.arange(0, META.BD)
    return i_n.to(tl.int64), i_d, i_d // NP, i_d // NP * P + o_p, o_p < P


@triton.jit
def tokens_of_sequence(cu_seqlens, i_n, T, BT: tl.constexpr):
    """A sequence's first token, its length, and its first tile of time."""
    start, end = sequence_span(i_n, cu_seqlens, T)
    first = first_slot(i_n, cu_seqlens, T, BT)
    return start, (end - start).to(tl.int32), first


@triton.jit
def compose(a_1, b_1, a_2, b_2):
    """h -> a_1 h + b_1 and then h -> a_2 h + b_2, as one such map."""
    return a_2 * a_1, a_2 * b_1 + b_2


@triton.jit
def scan_maps(b_a, b_b, b_h, REVERSE: tl.constexpr):
    """The state after each token, by its map h -> b_a h + b_b: [BT, BD, BN].

    b_a, b_b [BT, BD, BN]; b_h [BD, BN]. The maps act in the order of the
    tokens, with REVERSE from the last token to the first.
    """
    b_a, b_b = tl.associative_scan((b_a, b_b), 0, compose, reverse=REVERSE)
    return b_a * b_h[None, :, :] + b_b


@triton.jit
def decays(b_dt, b_A):
    """e^{dt A} of b_dt [BT, BD] and b_A [BD, BN]: [BT, BD, BN]."""
    return tl.exp(b_dt[:, :, None] * b_A[None, :, :])


@triton.jit
def outer(b_x, b_B):
    """x B^T per token, of b_x [BT, BD] and b_B [BT, BN]: [BT, BD, BN]."""
    return b_x[:, :, None] * b_B[:, None, :]


@triton.jit
def select_row(b_x, i):
    """b_x[i] of b_x [BT, BD, BN]."""
    m_t = tl.arange(0, b_x.shape[0]) == i
    return tl.sum(tl.where(m_t[:, None, None], b_x, 0.0), axis=0)


@triton.jit
def states_after(b_x, b_dt, b_B, b_A, b_h):
    """The state after each token, from b_h: [BT, BD, BN].

    b_x, b_dt [BT, BD]; b_B [BT, BN]; b_A, b_h [BD, BN].
    """
    b_b = outer(b_dt * b_x, b_B)  # [BT, BD, BN]
    return scan_maps(decays(b_dt, b_A), b_b, b_h, False)


@triton.jit(do_not_specialize=["T"])
def selective_fwd_kernel(
    inputs, initial_state, cu_seqlens, results, T, META: tl.constexpr
):
    """Outputs and last state of BD channels of one sequence.

    And, unless states is None, the state that enters each tile of time:
    states [NT, D, N], fp32.
    """
    x, A, dt, B, C, skip = inputs
    y, state, states = results
    D: tl.constexpr = META.D
    N: tl.constexpr = META.N
    BT: tl.constexpr = META.BT
    i_n, _, i_g, o_d, m_d = channels_of_program(META)
    start, length, first = tokens_of_sequence(cu_seqlens, i_n, T, BT)
    o_n = tl.arange(0, META.BN)
    channels, columns = (o_d, m_d), (o_n, o_n < N)
    own = i_n * D + o_d, m_d
    b_A = load_entries(A, channels, columns, N)  # [BD, BN]
    if skip is not None:
        b_skip = tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32)
    if initial_state is None:
        b_h = tl.zeros(b_A.shape, tl.float32)
    else:
        b_h = load_entries(initial_state, own, columns, N)

    for i_t in range(tl.cdiv(length, BT)):
        o_c = i_t * BT + tl.arange(0, BT)
        o_t, m_t = start + o_c, o_c < length
        tokens, rows = (o_t, m_t), (o_t * META.G + i_g, m_t)
        if states is not None:
            enters = (first + i_t) * D + o_d, m_d
            store_entries(states, b_h, enters, columns, N)
        b_x = load_entries(x, tokens, channels, D)  # [BT, BD]
        b_dt = load_entries(dt, tokens, channels, D)  # [BT, BD]
        b_B = load_entries(B, rows, columns, N)  # [BT, BN]
        b_C = load_entries(C, rows, columns, N)  # [BT, BN]
        b_hs = states_after(b_x, b_dt, b_B, b_A, b_h)  # [BT, BD, BN]
        b_y = tl.sum(b_hs * b_C[:, None, :], axis=2)  # [BT, BD]
        if skip is not None:
            b_y += b_skip[None, :] * b_x
        store_entries(y, b_y, tokens, channels, D)
        b_h = select_row(b_hs, BT - 1)  # [BD, BN]
    store_entries(state, b_h, own, columns, N)


@triton.jit(do_not_specialize=["T", "num_tokens"])
def selective_bwd_kernel(
    inputs,
    cu_seqlens,
    states,
    output_grads,
    grads,
    T,
    num_tokens,
    META: tl.constexpr,
):
    """Gradients of BD channels of one sequence, last tile of time first.

    dA [S, D, N] and dskip [S, D] are this sequence's share, dB and dC
    [ND, num_tokens, N] that of the channels, all fp32: torch adds them up.
    num_tokens is that of all sequences.
    """
    x, A, dt, B, C, skip = inputs
    dy, dstate = output_grads
    dx, ddt, dA, dB, dC, dskip, dinitial = grads
    D: tl.constexpr = META.D
    N: tl.constexpr = META.N
    BT: tl.constexpr = META.BT
    i_n, i_d, i_g, o_d, m_d = channels_of_program(META)
    start, length, first = tokens_of_sequence(cu_seqlens, i_n, T, BT)
    o_n = tl.arange(0, META.BN)
    channels, columns = (o_d, m_d), (o_n, o_n < N)
    own = i_n * D + o_d, m_d
    NT = tl.cdiv(length, BT)
    b_A = load_entries(A, channels, columns, N)  # [BD, BN]
    b_dA = tl.zeros(b_A.shape, tl.float32)
    if skip is not None:
        b_skip = tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_dskip = tl.zeros_like(b_skip)
    if dstate is None:
        b_dh = tl.zeros(b_A.shape, tl.float32)
    else:
        b_dh = load_entries(dstate, own, columns, N)

    for i in range(NT):
        i_t = NT - 1 - i
        o_c = i_t * BT + tl.arange(0, BT)
        o_t, m_t = start + o_c, o_c < length
        tokens, rows = (o_t, m_t), (o_t * META.G + i_g, m_t)
        b_x = load_entries(x, tokens, channels, D)  # [BT, BD]
        b_dt = load_entries(dt, tokens, channels, D)  # [BT, BD]
        b_dy = load_entries(dy, tokens, channels, D)  # [BT, BD]
        b_B = load_entries(B, rows, columns, N)  # [BT, BN]
        b_C = load_entries(C, rows, columns, N)  # [BT, BN]

        # dh_t = a_{t+1} dh_{t+1} + dy_t C_t: the next token's decay.
        m_next = (o_c + 1 < length) & (o_c + 1 < i_t * BT + BT)
        b_next = load_entries(dt, (o_t + 1, m_next), channels, D)  # [BT, BD]
        b_dhs = scan_maps(
            decays(b_next, b_A), outer(b_dy, b_C), b_dh, True
        )  # [BT, BD, BN]

        # h_{t-1}: of one token earlier, and the first is the one that enters.
        m_last = m_t & (o_c > i_t * BT)
        b_hs = states_after(
            load_entries(x, (o_t - 1, m_last), channels, D),
            load_entries(dt, (o_t - 1, m_last), channels, D),
            load_entries(B, ((o_t - 1) * META.G + i_g, m_last), columns, N),
            b_A,
            load_entries(states, ((first + i_t) * D + o_d, m_d), columns, N),
        )  # [BT, BD, BN]
        b_a = decays(b_dt, b_A)  # [BT, BD, BN]
        b_kept = b_a * b_hs  # what token t leaves of h_{t-1} [BT, BD, BN]
        b_hs = b_kept + outer(b_dt * b_x, b_B)  # h_t [BT, BD, BN]

        shares = i_d.to(tl.int64) * num_tokens + o_t, m_t
        b_dC = tl.sum(b_hs * b_dy[:, :, None], axis=1)  # [BT, BN]
        store_entries(dC, b_dC, shares, columns, N)
        b_dB = tl.sum(b_dhs * (b_dt * b_x)[:, :, None], axis=1)  # [BT, BN]
        store_entries(dB, b_dB, shares, columns, N)
        b_dg = b_dhs * b_kept  # the gradient of dt A [BT, BD, BN]
        b_dA += tl.sum(b_dg * b_dt[:, :, None], axis=0)  # [BD, BN]
        b_dw = tl.sum(b_dhs * b_B[:, None, :], axis=2)  # of dt x [BT, BD]
        b_ddt = b_dw * b_x + tl.sum(b_dg * b_A[None, :, :], axis=2)
        store_entries(ddt, b_ddt, tokens, channels, D)
        b_dx = b_dw * b_dt  # [BT, BD]
        if skip is not None:
            b_dx += b_skip[None, :] * b_dy
            b_dskip += tl.sum(b_dy * b_x, axis=0)  # [BD]
        store_entries(dx, b_dx, tokens, channels, D)
        b_dh = select_row(b_a * b_dhs, 0)  # [BD, BN]
    store_entries(dA, b_dA, own, columns, N)
    if skip is not None:
        tl.store(dskip + (i_n * D + o_d), b_dskip, mask=m_d)
    if dinitial is not None:
        store_entries(dinitial, b_dh, own, columns, N)


def meta_of(D: int, N: int, G: int) -> SelectiveMeta:
    """Tiles of at most 4096 numbers, 16 a thread.

    The longer a tile, the fewer states go to memory; the more channels it
    has, the fewer shares of dB and dC. BT does not depend on D. Tiles of
    fewer than 4 columns spill registers.
    """
    BN = max(4, triton.next_power_of_2(N))
    bits = 13 - BN.bit_length()  # log2 of 4096 / BN
    BD = min(2 ** (bits - bits // 2), triton.next_power_of_2(D // G))
    return SelectiveMeta(D, N, G, BT=2 ** (bits // 2), BD=BD, BN=BN)


def tile_length(D: int, N: int, G: int) -> int:
    """Tokens in a tile of time."""
    return meta_of(D, N, G).BT


def grid_of(S: int, meta: SelectiveMeta) -> tuple[int]:
    """One program per sequence and tile of channels of a group."""
    return (S * meta.G * meta.NP,)


def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Outputs and last states, as :mod:`fastweights.torch_backend.selective`.

    The tensors are contiguous.
    """
    check_offsets_on_host(cu_seqlens, x.shape[1])
    S = num_sequences(x, cu_seqlens)
    y = torch.empty_like(x, dtype=dtype)
    channels, N = A.shape
    state = x.new_empty(S, channels, N, dtype=FP32)
    meta, T = meta_of(channels, N, B.shape[2]), x.shape[1]
    inputs, results = (x, A, dt, B, C, D), (y, state, states)
    with torch.cuda.device_of(x):
        selective_fwd_kernel[grid_of(S, meta)](
            inputs, initial_state, cu_seqlens, results, T, meta, **SETTINGS
        )
    clear_tail(cu_seqlens, y)
    return y, state


def backward(
    dy: Tensor,
    dstate: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
) -> list[Tensor | None]:
    """Gradients of x, dt, A, B, C, D and initial_state, None without them.

    Those of A, B, C and D are in fp32. The tensors are contiguous.
    """
    (batch, T, channels), (G, N) = x.shape, B.shape[2:]
    S = num_sequences(x, cu_seqlens)
    meta = meta_of(channels, N, G)
    dx, ddt = torch.empty_like(x), torch.empty_like(dt)
    dA = x.new_empty(S, channels, N, dtype=FP32)
    dB, dC = x.new_empty(2, G, meta.NP, batch, T, N, dtype=FP32)
    dD = None if D is None else dA.new_empty(S, channels)
    dinitial = None if initial_state is None else torch.empty_like(dA)
    inputs, output_grads = (x, A, dt, B, C, D), (dy, dstate)
    groups = inputs, cu_seqlens, states, output_grads
    grads = dx, ddt, dA, dB, dC, dD, dinitial
    arguments = *groups, grads, T, batch * T, meta
    with torch.cuda.device_of(x):
        selective_bwd_kernel[grid_of(S, meta)](*arguments, **SETTINGS)
    dB, dC = dB.sum(1), dC.sum(1)  # [G, Bt, T, N]
    clear_tail(cu_seqlens, dx, ddt, *dB, *dC)
    dB, dC = (x.movedim(0, 2) for x in (dB, dC))  # [Bt, T, G, N]
    dD = None if dD is None else dD.sum(0)
    return [dx, ddt, dA.sum(0), dB, dC, dD, dinitial]
