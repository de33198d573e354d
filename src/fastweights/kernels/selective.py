"""Mamba's selective scan: prefixes of affine maps, tile by tile of time.

A token maps each element of the state, h -> a h + b with a = e^{dt A} and
b = dt x B. Such maps compose into such maps, so that all prefixes of a tile
of BT tokens come from one ``tl.associative_scan``, log2(BT) deep; from tile
to tile one state is carried. A token past the end has dt = 0: h -> h. No
decay is ever divided by: where a token has to be left out of a scan, it is
not loaded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rows_at(x, o_r, m_r, i_c, W: tl.constexpr, BW: tl.constexpr):
    """Pointers and mask of rows o_r of x [rows, W], in column tile i_c.

    The tile is [len(o_r), BW]; of the rows only those in m_r exist.
    """
    o_c = i_c * BW + tl.arange(0, BW)
    p_x = x + o_r.to(tl.int64)[:, None] * W + o_c[None, :]
    return p_x, m_r[:, None] & (o_c < W)[None, :]


@triton.jit
def load_rows(x, o_r, m_r, i_c, W: tl.constexpr, BW: tl.constexpr):
    """Those rows in fp32, 0 where there are none."""
    p_x, m_x = rows_at(x, o_r, m_r, i_c, W, BW)
    return tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)


@triton.jit
def store_rows(x, b_x, o_r, m_r, i_c, W: tl.constexpr, BW: tl.constexpr):
    """The rows back to where :func:`load_rows` would load them from."""
    p_x, m_x = rows_at(x, o_r, m_r, i_c, W, BW)
    tl.store(p_x, b_x, mask=m_x)


@triton.jit
def own_channels(D: tl.constexpr, BD: tl.constexpr):
    """A program's batch entry, tile of channels, and these with a mask."""
    ND: tl.constexpr = (D + BD - 1) // BD
    i_b, i_d = tl.program_id(0) // ND, tl.program_id(0) % ND
    o_d = i_d * BD + tl.arange(0, BD)
    return i_b.to(tl.int64), i_d, o_d, o_d < D


@triton.jit
def compose(a_1, b_1, a_2, b_2):
    """h -> a_1 h + b_1 and then h -> a_2 h + b_2, as one such map."""
    return a_2 * a_1, a_2 * b_1 + b_2


@triton.jit
def scan_maps(b_a, b_b, b_h, REVERSE: tl.constexpr):
    """b_h [BD, BN] after each map [BT, BD, BN] and those before it.

    REVERSE: and those behind it, from the last map to the first.
    """
    b_a, b_b = tl.associative_scan((b_a, b_b), 0, compose, reverse=REVERSE)
    return b_a * b_h[None, :, :] + b_b


@triton.jit
def decays(b_dt, b_A):
    """e^{dt A} of b_dt [BT, BD] and b_A [BD, BN]: [BT, BD, BN]."""
    return tl.exp(b_dt[:, :, None] * b_A[None, :, :])


@triton.jit
def outer(b_x, b_B):
    """x B^T a token of b_x [BT, BD] and b_B [BT, BN]: [BT, BD, BN]."""
    return b_x[:, :, None] * b_B[:, None, :]


@triton.jit
def row(b_x, i):
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
    x,
    A,
    dt,
    B,
    C,
    skip,
    initial_state,
    y,
    state,
    states,
    T,
    D: tl.constexpr,
    N: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
):
    """Outputs and last state of BD channels of one batch entry.

    And, unless states is None, the state that enters each tile of time:
    states [B, NT, D, N], fp32.
    """
    i_b, i_d, o_d, m_d = own_channels(D, BD)
    NT = tl.cdiv(T, BT)
    b_A = load_rows(A, o_d, m_d, 0, N, BN)  # [BD, BN]
    if skip is not None:
        b_skip = tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32)
    if initial_state is None:
        b_h = tl.zeros([BD, BN], dtype=tl.float32)
    else:
        b_h = load_rows(initial_state, i_b * D + o_d, m_d, 0, N, BN)

    for i_t in range(NT):
        o_c = i_t * BT + tl.arange(0, BT)
        o_t, m_t = i_b * T + o_c, o_c < T
        if states is not None:
            o_h = (i_b * NT + i_t) * D + o_d
            store_rows(states, b_h, o_h, m_d, 0, N, BN)
        b_x = load_rows(x, o_t, m_t, i_d, D, BD)  # [BT, BD]
        b_dt = load_rows(dt, o_t, m_t, i_d, D, BD)  # [BT, BD]
        b_B = load_rows(B, o_t, m_t, 0, N, BN)  # [BT, BN]
        b_C = load_rows(C, o_t, m_t, 0, N, BN)  # [BT, BN]
        b_hs = states_after(b_x, b_dt, b_B, b_A, b_h)  # [BT, BD, BN]
        b_y = tl.sum(b_hs * b_C[:, None, :], axis=2)  # [BT, BD]
        if skip is not None:
            b_y += b_skip[None, :] * b_x
        store_rows(y, b_y, o_t, m_t, i_d, D, BD)
        b_h = row(b_hs, BT - 1)  # [BD, BN]
    store_rows(state, b_h, i_b * D + o_d, m_d, 0, N, BN)


@triton.jit(do_not_specialize=["T"])
def selective_bwd_kernel(
    x,
    A,
    dt,
    B,
    C,
    skip,
    states,
    dy,
    dstate,
    dx,
    ddt,
    dA,
    dB,
    dC,
    dskip,
    dinitial,
    T,
    D: tl.constexpr,
    N: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
):
    """Gradients of BD channels of one batch entry, last tile of time first.

    dA [B, D, N] and dskip [B, D] are this entry's share, dB and dC
    [B, ND, T, N] that of the channels, all fp32: torch adds them up.
    """
    i_b, i_d, o_d, m_d = own_channels(D, BD)
    NT = tl.cdiv(T, BT)
    b_A = load_rows(A, o_d, m_d, 0, N, BN)  # [BD, BN]
    b_dA = tl.zeros([BD, BN], dtype=tl.float32)
    if skip is not None:
        b_skip = tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_dskip = tl.zeros([BD], dtype=tl.float32)
    if dstate is None:
        b_dh = tl.zeros([BD, BN], dtype=tl.float32)
    else:
        b_dh = load_rows(dstate, i_b * D + o_d, m_d, 0, N, BN)

    for i in range(NT):
        i_t = NT - 1 - i
        o_c = i_t * BT + tl.arange(0, BT)
        o_t, m_t = i_b * T + o_c, o_c < T
        b_x = load_rows(x, o_t, m_t, i_d, D, BD)  # [BT, BD]
        b_dt = load_rows(dt, o_t, m_t, i_d, D, BD)  # [BT, BD]
        b_dy = load_rows(dy, o_t, m_t, i_d, D, BD)  # [BT, BD]
        b_B = load_rows(B, o_t, m_t, 0, N, BN)  # [BT, BN]
        b_C = load_rows(C, o_t, m_t, 0, N, BN)  # [BT, BN]

        # dh_t = a_{t+1} dh_{t+1} + dy_t C_t: the next token's decay.
        m_next = (o_c + 1 < T) & (o_c + 1 < i_t * BT + BT)
        b_next = load_rows(dt, o_t + 1, m_next, i_d, D, BD)  # [BT, BD]
        b_dhs = scan_maps(
            decays(b_next, b_A), outer(b_dy, b_C), b_dh, True
        )  # [BT, BD, BN]

        # h_{t-1}: of one token earlier, and the first is the one that enters.
        m_last = m_t & (o_c > i_t * BT)
        b_hs = states_after(
            load_rows(x, o_t - 1, m_last, i_d, D, BD),
            load_rows(dt, o_t - 1, m_last, i_d, D, BD),
            load_rows(B, o_t - 1, m_last, 0, N, BN),
            b_A,
            load_rows(states, (i_b * NT + i_t) * D + o_d, m_d, 0, N, BN),
        )  # [BT, BD, BN]
        b_a = decays(b_dt, b_A)  # [BT, BD, BN]
        b_kept = b_a * b_hs  # what token t leaves of h_{t-1} [BT, BD, BN]
        b_hs = b_kept + outer(b_dt * b_x, b_B)  # h_t [BT, BD, BN]

        o_p = tl.program_id(0).to(tl.int64) * T + o_c
        b_dC = tl.sum(b_hs * b_dy[:, :, None], axis=1)  # [BT, BN]
        store_rows(dC, b_dC, o_p, m_t, 0, N, BN)
        b_dB = tl.sum(b_dhs * (b_dt * b_x)[:, :, None], axis=1)  # [BT, BN]
        store_rows(dB, b_dB, o_p, m_t, 0, N, BN)
        b_dg = b_dhs * b_kept  # the gradient of dt A [BT, BD, BN]
        b_dA += tl.sum(b_dg * b_dt[:, :, None], axis=0)  # [BD, BN]
        b_dw = tl.sum(b_dhs * b_B[:, None, :], axis=2)  # of dt x [BT, BD]
        b_ddt = b_dw * b_x + tl.sum(b_dg * b_A[None, :, :], axis=2)
        store_rows(ddt, b_ddt, o_t, m_t, i_d, D, BD)
        b_dx = b_dw * b_dt  # [BT, BD]
        if skip is not None:
            b_dx += b_skip[None, :] * b_dy
            b_dskip += tl.sum(b_dy * b_x, axis=0)  # [BD]
        store_rows(dx, b_dx, o_t, m_t, i_d, D, BD)
        b_dh = row(b_a * b_dhs, 0)  # [BD, BN]
    o_h = i_b * D + o_d
    store_rows(dA, b_dA, o_h, m_d, 0, N, BN)
    if skip is not None:
        tl.store(dskip + o_h, b_dskip, mask=m_d)
    if dinitial is not None:
        store_rows(dinitial, b_dh, o_h, m_d, 0, N, BN)


def options(D: int, N: int) -> dict[str, int]:
    """Launch settings, and tiles of at most 4096 numbers, 16 a thread.

    The longer a tile, the fewer states go to memory; the more channels it
    has, the fewer shares of dB and dC. BT does not depend on D. Tiles of
    fewer than 4 columns spill registers.
    """
    BN = max(4, triton.next_power_of_2(N))
    bits = 13 - BN.bit_length()  # log2 of 4096 / BN
    BD = min(2 ** (bits - bits // 2), triton.next_power_of_2(D))
    sizes = {"BT": 2 ** (bits // 2), "BD": BD, "BN": BN}
    return sizes | {"num_warps": 8, "num_stages": 1}


def empty_states(x: Tensor, A: Tensor, keep: bool) -> Tensor:
    """Room for the state that enters each tile of time, if it is kept."""
    (B, T, D), N = x.shape, A.shape[1]
    NT = -(-T // options(D, N)["BT"]) if keep else 0
    return x.new_empty(B, NT, D, N, dtype=torch.float32)


def launch(kernel: Any, x: Tensor, A: Tensor, *others: Tensor | None) -> None:
    """One program a batch entry and tile of channels."""
    (B, T, D), N = x.shape, A.shape[1]
    constants = {"D": D, "N": N} | options(D, N)
    grid = (B * triton.cdiv(D, constants["BD"]),)
    with torch.cuda.device_of(x):
        kernel[grid](x, A, *others, T, **constants)


def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, last state, and the states that the backward re-uses.

    The tensors are contiguous, and as selective_scan takes them.
    """
    y, states = torch.empty_like(x), empty_states(x, A, keep)
    state = x.new_empty(len(x), *A.shape, dtype=torch.float32)
    results = (y, state, states if keep else None)
    inputs = (x, A, dt, B, C, D, initial_state)
    launch(selective_fwd_kernel, *inputs, *results)
    return y, state, states


def backward(
    dy: Tensor | None,
    dstate: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    states: Tensor,
) -> list[Tensor]:
    """Gradients of the inputs that are not None, each in its dtype.

    dy or dstate is None where nothing depends on that result.
    """
    dy = torch.zeros_like(x) if dy is None else dy.contiguous()
    dstate = None if dstate is None else dstate.contiguous()
    (batch, T, channels), N = x.shape, A.shape[1]
    ND = triton.cdiv(channels, options(channels, N)["BD"])
    dx, ddt = torch.empty_like(x), torch.empty_like(dt)
    dA = x.new_empty(batch, channels, N, dtype=torch.float32)
    dB, dC = x.new_empty(2, batch, ND, T, N, dtype=torch.float32)
    dD = None if D is None else dA.new_empty(batch, channels)
    dinitial = None if initial_state is None else torch.empty_like(dA)
    tensors = (x, A, dt, B, C, D, states, dy, dstate)
    launch(selective_bwd_kernel, *tensors, dx, ddt, dA, dB, dC, dD, dinitial)

    grads = [dx, ddt, dA.sum(0), dB.sum(1), dC.sum(1)]
    if dD is not None:
        grads.append(dD.sum(0))
    if dinitial is not None:
        grads.append(dinitial)
    inputs = (x, dt, A, B, C, D, initial_state)
    given = [t for t in inputs if t is not None]
    return [g.to(t.dtype) for g, t in zip(grads, given, strict=True)]
