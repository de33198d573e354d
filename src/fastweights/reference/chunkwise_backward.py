"""The gradients of the chunk form, stage by stage, by hand.

:func:`chunk_states` scans again for the states, :func:`scan_backward` scans
back for their gradients, and with both :func:`intra_backward` finds what
each chunk gives its inputs, all chunks at once; :func:`chunkwise_backward`
composes them. The kernels have the same stages. No gradient of the inverse P
is formed: with M = Diag(beta) Akk and P = (I + M)^{-1}, a gradient dv_new of
P x gives y = P^T dv_new to x and dM = -y (P x)^T to M. Shapes are those of
:mod:`.chunkwise`.

A gate's gradient is a sum over the pairs of tokens that it stands between.
Under strong decay each pair counts next to nothing, so no term in it may be
a difference of larger ones: a token's product with itself, which no gate
has a part in, and what the tokens leave in the state are kept apart.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fastweights.reference.chunkwise import (
    STRIP,
    Chunks,
    Gates,
    Square,
    State,
    each_chunk,
    from_chunks,
    intra,
    new_values,
    next_state,
    running_sum,
    sum_after,
    to_chunks,
)
from fastweights.reference.parallel import decays

States = Float[Tensor, "B N H K V"]


def per_gate(x: Chunks, G: Gates) -> Gates:
    """Sum over the key channels that share a gate."""
    return x.sum(-1, keepdim=True) if G.shape[-1] == 1 else x


def reverse_cumsum(x: Chunks) -> Chunks:
    """What stands at each token of a chunk and after it, summed."""
    return x.flip(-2).cumsum(-2).flip(-2)


def sum_before(x: Chunks) -> Chunks:
    """What stands before each token of a chunk, summed."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0)).cumsum(-2)


def decayed_sum(A: Square, x: Chunks, G: Gates) -> Chunks:
    """sum_j A_ij x_jd exp(G_id - G_jd) over j < i.

    A gate a channel takes the strips of :func:`.chunkwise.decayed_scores`.
    """
    A = A.tril(-1)
    if G.shape[-1] == 1:
        return (A * decays(G, x.dtype)[..., 0]) @ x
    rows = []
    for s in range(0, A.shape[-1], STRIP):
        strip = slice(s, s + STRIP)
        x_s, G_s, A_s = x[..., strip, :], G[..., strip, :], A[..., strip, :]
        start = G_s[..., :1, :]
        earlier_x = x[..., :s, :] * (start - G[..., :s, :]).to(x).exp()
        earlier = (A_s[..., :s] @ earlier_x) * (G_s - start).to(x).exp()
        D = decays(G_s, x.dtype)
        own = A_s[..., strip, None] * D * x_s[..., None, :, :]
        rows.append(earlier + own.sum(-2))
    return torch.cat(rows, dim=-2)


def decayed_sum_after(A: Square, x: Chunks, G: Gates) -> Chunks:
    """sum_i A_ij x_id exp(G_id - G_jd) over i > j: the columns of A.

    The same sum with time reversed, in which -G falls as G does in time.
    """
    A, x, G = A.mT.flip(-2, -1), x.flip(-2), -G.flip(-2)
    return decayed_sum(A, x, G).flip(-2)


def through_scores(
    q: Chunks,
    k: Chunks,
    beta: Chunks | None,
    G: Gates,
    dAqk: Square,
    dM: Square | None,
) -> tuple[Chunks, Chunks, Gates, Chunks | None]:
    """What dAqk and dM give a chunk's tokens: dq, dk, dg and dbeta.

    dM is the gradient of M = Diag(beta) Akk, None for the additive rule. A
    row of a score matrix gains from later gates, a column loses.
    """
    A, x = dAqk[None], q[None]
    if beta is not None and dM is not None:
        A, x = torch.stack([dAqk, dM]), torch.stack([q, beta * k])
    dq, *answer = decayed_sum(A, k, G)
    dk_col = decayed_sum_after(A, x, G).sum(0)
    dk_row, dbeta = torch.zeros_like(k), None
    if beta is not None and answer:
        dbeta = (k * answer[0]).sum(-1, keepdim=True)
        dk_row = beta * answer[0]
    dg = reverse_cumsum(per_gate(q * dq + k * dk_row - k * dk_col, G))
    own = dAqk.diagonal(dim1=-2, dim2=-1)[..., None]  # no gate's part
    return dq + own * k, dk_row + dk_col + own * q, dg, dbeta


def chunk_states(
    k: Chunks,
    v: Chunks,
    g: Gates,
    beta: Chunks | None,
    G: Gates,
    P: Square | None,
    S: State,
) -> tuple[States, Chunks]:
    """The state that enters each chunk, and v_new: ``scan`` once more."""
    states, written = [], []
    for k_n, v_n, beta_n, G_n, rest_n, P_n in each_chunk(
        k, v, beta, G, sum_after(g), P
    ):
        states.append(S)
        written.append(new_values(k_n, v_n, beta_n, G_n, P_n, S))
        S = next_state(k_n, written[-1], G_n, rest_n, S)
    return torch.stack(states, dim=1), torch.stack(written, dim=1)


def scan_backward(
    q: Chunks,
    k: Chunks,
    g: Gates,
    beta: Chunks | None,
    G: Gates,
    Aqk: Square,
    P: Square | None,
    do: Chunks,
    dS: State,
    *,
    scale: float,
) -> tuple[Chunks, States, State]:
    """From the last chunk to the first, carrying the state's gradient.

    Returns y = P^T dv_new (dv_new itself for the additive rule), the
    gradient of the state that leaves each chunk, and that of the first.
    """
    ys, leaving = [], []
    chunks = each_chunk(q, k, beta, G, sum_after(g), Aqk, P, scale * do)
    for q_n, k_n, beta_n, G_n, rest_n, Aqk_n, P_n, do_n in reversed(
        list(chunks)
    ):
        leaving.append(dS)
        y = Aqk_n.mT @ do_n + (k_n * rest_n.exp()) @ dS  # dv_new
        dS = G_n[..., -1:, :].exp().mT * dS + (q_n * G_n.exp()).mT @ do_n
        if P_n is not None:
            y = P_n.mT @ y
            dS = dS - (k_n * G_n.exp()).mT @ (beta_n * y)
        ys.append(y)
    return torch.stack(ys[::-1], 1), torch.stack(leaving[::-1], 1), dS


def through_states(
    q: Chunks,
    k: Chunks,
    v: Chunks,
    g: Gates,
    beta: Chunks | None,
    G: Gates,
    do: Chunks,
    v_new: Chunks,
    y: Chunks,
    states: States,
    leaving: States,
    *,
    scale: float,
) -> tuple[
    Chunks, Chunks, Chunks, Gates, Chunks | None, Square, Square | None
]:
    """dq, dk, dv, dg and dbeta as far as states pass them; dAqk and dM."""
    dAqk = scale * (do @ v_new.mT).tril()
    dq = scale * (do @ states.mT) * G.exp()
    dk_state = (v_new @ leaving.mT) * sum_after(g).exp()
    dk_row, dv, dbeta, dM = torch.zeros_like(k), y, None, None
    if beta is not None:
        answer = -(y @ states.mT) * G.exp()
        dbeta = (y * v).sum(-1, keepdim=True)
        dbeta = dbeta + (k * answer).sum(-1, keepdim=True)
        dk_row, dv = beta * answer, beta * y
        dM = -(y @ v_new.mT).tril(-1)
    kept = G[..., -1:, :].exp() * (states * leaving).sum(-1)[..., None, :]
    dg = (
        reverse_cumsum(per_gate(q * dq + k * dk_row, G))
        + sum_before(per_gate(k * dk_state, G))
        + per_gate(kept, G)
    )
    return dq, dk_row + dk_state, dv, dg, dbeta, dAqk, dM


def intra_backward(
    q: Chunks,
    k: Chunks,
    v: Chunks,
    g: Gates,
    beta: Chunks | None,
    G: Gates,
    do: Chunks,
    v_new: Chunks,
    y: Chunks,
    states: States,
    leaving: States,
    *,
    scale: float,
) -> tuple[Chunks, Chunks, Chunks, Gates, Chunks | None]:
    """Inside each chunk: dq, dk, dv, dg and dbeta."""
    dq, dk, dv, dg, dbeta, dAqk, dM = through_states(
        q, k, v, g, beta, G, do, v_new, y, states, leaving, scale=scale
    )
    parts = through_scores(q, k, beta, running_sum(g), dAqk, dM)
    if dbeta is not None and parts[3] is not None:
        dbeta = dbeta + parts[3]
    return dq + parts[0], dk + parts[1], dv, dg + parts[2], dbeta


def chunkwise_backward(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H DG"],
    beta: Float[Tensor, "B T H"] | None,
    *,
    do: Float[Tensor, "B T H V"],
    dS: State,
    scale: float,
    initial_state: State,
    chunk_size: int = 64,
    Aqk: Square | None = None,
    P: Square | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, State]:
    """dq, dk, dv, dg, dbeta and the initial state's gradient.

    Aqk and P are those that :func:`.chunkwise.chunkwise_forward` returned;
    without them they are computed again. The states always are, as in the
    kernels: kept, they would be K V numbers a chunk.
    """
    T = q.shape[1]
    q, k, v, g, do = (to_chunks(x, chunk_size) for x in (q, k, v, g, do))
    if beta is not None:
        beta = to_chunks(beta[..., None], chunk_size)
    G = running_sum(g).to(g)
    if Aqk is None:
        G, Aqk, P = intra(q, k, g, beta)
    states, v_new = chunk_states(k, v, g, beta, G, P, initial_state)
    y, leaving, dS = scan_backward(
        q, k, g, beta, G, Aqk, P, do, dS, scale=scale
    )
    *grads, dbeta = intra_backward(
        q, k, v, g, beta, G, do, v_new, y, states, leaving, scale=scale
    )
    dq, dk, dv, dg = (from_chunks(x, T) for x in grads)
    if dbeta is not None:
        dbeta = from_chunks(dbeta, T)[..., 0]
    return dq, dk, dv, dg, dbeta, dS
