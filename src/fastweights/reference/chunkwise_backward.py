"""The gradients of the chunk form, stage by stage, by hand.

:func:`chunk_states` scans again for the states, :func:`scan_backward` scans
back for their gradients, and with both :func:`intra_backward` finds what
each chunk gives its inputs, all chunks at once; :func:`chunkwise_backward`
composes them. The kernels have the same stages. No gradient of the inverse P
is formed: with P = (I + Aek)^{-1}, a gradient dv_new of P x gives
y = P^T dv_new to x, which is the gradient of v, and dAek = -y (P x)^T.
Shapes are those of :mod:`.chunkwise`.

A gate's gradient is a sum over the pairs of tokens that it stands between.
Under strong decay each pair counts next to nothing, so no term in it may be
a difference of larger ones: a token's product with itself, which no gate
has a part in, and what the tokens leave in the state are kept apart.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fastweights.reference.chunkwise import (
    STRIP,
    Chunks,
    Gates,
    Keys,
    Square,
    State,
    Values,
    decayed,
    each_chunk,
    empty_state,
    erasing_chunks,
    from_chunks,
    intra,
    new_values,
    next_state,
    running_sum,
    sum_after,
    to_chunks,
)
from fastweights.reference.parallel import decays

ChunkStates = Float[Tensor, "B N H K V"]


def per_gate(
    x: Float[Tensor, "B N H rows K"], G: Gates
) -> Float[Tensor, "B N H rows DG"]:
    """Sum over the key channels that share one gate."""
    return x.sum(-1, keepdim=True) if G.shape[-1] == 1 else x


def reverse_cumsum(x: Chunks) -> Chunks:
    """Sums of what stands at each token of a chunk and after it."""
    return x.flip(-2).cumsum(-2).flip(-2)


def sum_before(x: Chunks) -> Chunks:
    """Sums of what stands before each token of a chunk."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0)).cumsum(-2)


def decayed_sums(
    A: Float[Tensor, "*stack C C"],
    x: Float[Tensor, "*stack C K"],
    k: Float[Tensor, "*lead C K"],
    G: Float[Tensor, "*lead C DG"] | None,
) -> tuple[Float[Tensor, "*stack C K"], Float[Tensor, "*stack C K"]]:
    """Decayed products of a strictly lower triangular A with k, A^T with x.

    sum_j A_ij k_jd exp(G_id - G_jd) at each row i, and at each column j
    sum_i A_ij x_id exp(G_id - G_jd). One gate per channel takes the strips
    of :func:`.chunkwise.chunk_scores`.
    """
    if G is None or G.shape[-1] == 1:
        A = A if G is None else A * decays(G, A.dtype)[..., 0]
        return A @ k, A.mT @ x
    rows, columns = [], torch.zeros_like(x)
    for s in range(0, A.shape[-1], STRIP):
        strip, before = slice(s, s + STRIP), slice(0, s)
        x_s, k_s, G_s = (t[..., strip, :] for t in (x, k, G))
        A_s, A_before = A[..., strip, strip], A[..., strip, before]
        start = G_s[..., :1, :]
        since = (G_s - start).to(x).exp()
        until = (start - G[..., before, :]).to(x).exp()
        D = decays(G_s, x.dtype) * A_s[..., None]  # [16, 16, K]
        row = (A_before @ (until * k[..., before, :])) * since
        rows.append(row + (D * k_s[..., None, :, :]).sum(-2))
        columns[..., before, :] += until * (A_before.mT @ (since * x_s))
        columns[..., strip, :] += (D * x_s[..., :, None, :]).sum(-3)
    return torch.cat(rows, dim=-2), columns


def through_scores(
    q: Keys,
    k: Keys,
    e: Keys | None,
    G: Gates | None,
    dAqk: Square,
    dAek: Square | None,
) -> tuple[Keys, Keys, Gates | None, Keys | None]:
    """dq, dk, dg and de of a chunk's tokens, from dAqk and dAek.

    dAek is None for the additive rule. A score decays by e^{G_i - G_j}: it
    adds to dG_i what it takes from dG_j.
    """
    A, x = [dAqk], [q]
    if e is not None and dAek is not None:
        A, x = [dAqk, dAek], [q, e]
    rows, columns = decayed_sums(
        torch.stack(A).tril_(-1), torch.stack(x), k, G
    )
    dk, dg = columns.sum(0), None
    if G is not None:
        change = (torch.stack(x) * rows).sum(0) - k * dk
        dg = reverse_cumsum(per_gate(change, G))
    dq, *de = rows
    own = dAqk.diagonal(dim1=-2, dim2=-1)[..., None]  # no gate's part
    return dq + own * k, dk + own * q, dg, de[0] if de else None


def chunk_states(
    k: Keys,
    v: Values,
    g: Gates | None,
    e: Keys | None,
    G: Gates | None,
    P: Square | None,
    S: State,
) -> tuple[ChunkStates, Values]:
    """The state that enters each chunk, and v_new: ``scan`` once more."""
    states, written = [], []
    for k_n, v_n, e_n, G_n, rest_n, P_n in each_chunk(
        k, v, e, G, sum_after(g), P
    ):
        states.append(S)
        written.append(new_values(v_n, e_n, G_n, P_n, S))
        S = next_state(k_n, written[-1], G_n, rest_n, S)
    return torch.stack(states, dim=1), torch.stack(written, dim=1)


def scan_backward(
    q: Keys,
    k: Keys,
    g: Gates | None,
    e: Keys | None,
    G: Gates | None,
    Aqk: Square,
    P: Square | None,
    do: Values,
    dS: State,
) -> tuple[Values, ChunkStates, State]:
    """Carry the state's gradient from the last chunk to the first.

    do is scale times the gradient of the outputs. Returns
    y = P^T dv_new (dv_new itself for the additive rule), the gradient of the
    state that leaves each chunk, and that of the state that enters the first.
    """
    ys, leaving = [], []
    chunks = each_chunk(q, k, e, G, sum_after(g), Aqk, P, do)
    for q_n, k_n, e_n, G_n, rest_n, Aqk_n, P_n, do_n in reversed(list(chunks)):
        leaving.append(dS)
        y = Aqk_n.mT @ do_n + decayed(k_n, rest_n) @ dS  # dv_new
        total = None if G_n is None else G_n[..., -1:, :].mT
        dS = decayed(dS, total) + decayed(q_n, G_n).mT @ do_n
        if P_n is not None:
            y = P_n.mT @ y
            dS = dS - decayed(e_n, G_n).mT @ y
        ys.append(y)
    return torch.stack(ys[::-1], 1), torch.stack(leaving[::-1], 1), dS


def through_states(
    q: Keys,
    k: Keys,
    g: Gates | None,
    e: Keys | None,
    G: Gates | None,
    do: Values,
    v_new: Values,
    y: Values,
    states: ChunkStates,
    leaving: ChunkStates,
) -> tuple[Keys, Keys, Gates | None, Keys | None, Square, Square | None]:
    """dq, dk, dg and de as far as states pass them; dAqk and dAek."""
    dAqk = (do @ v_new.mT).tril_()
    dq = decayed(do @ states.mT, G)
    dk = decayed(v_new @ leaving.mT, sum_after(g))
    change, dg, de, dAek = q * dq, None, None, None
    if e is not None:
        de = decayed(-y @ states.mT, G)
        change = change + e * de
        dAek = (-y @ v_new.mT).tril_(-1)
    if G is not None:
        kept = (states * leaving).sum(-1)[..., None, :]
        dg = (
            reverse_cumsum(per_gate(change, G))
            + sum_before(per_gate(k * dk, G))
            + per_gate(decayed(kept, G[..., -1:, :]), G)
        )
    return dq, dk, dg, de, dAqk, dAek


def intra_backward(
    q: Keys,
    k: Keys,
    g: Gates | None,
    e: Keys | None,
    G: Gates | None,
    do: Values,
    v_new: Values,
    y: Values,
    states: ChunkStates,
    leaving: ChunkStates,
) -> list[Any]:
    """Inside each chunk: dq, dk, dg and de."""
    *grads, dAqk, dAek = through_states(
        q, k, g, e, G, do, v_new, y, states, leaving
    )
    exact = None if g is None else running_sum(g)
    inside: Any = through_scores(q, k, e, exact, dAqk, dAek)
    return [
        None if x is None else x + x_in
        for x, x_in in zip(grads, inside, strict=True)
    ]


def one_backward(
    q: Keys,
    k: Keys,
    v: Values,
    g: Gates | None,
    e: Keys | None,
    Aqk: Square,
    P: Square | None,
    do: Values,
) -> tuple[Values, list[Any]]:
    """dv, and dq, dk, dg and de, of a single chunk, from its outputs alone.

    An empty state enters it, and nothing depends on the one that leaves: of
    all the stages' terms these are what is left. do is as in
    :func:`scan_backward`.
    """
    v_new, y, dAek = v, Aqk.mT @ do, None
    if P is not None:
        v_new, y = P @ v, P.mT @ y
        dAek = (-y @ v_new.mT).tril_(-1)
    dAqk = (do @ v_new.mT).tril_()
    exact = None if g is None else running_sum(g)
    return y, [*through_scores(q, k, e, exact, dAqk, dAek)]


def chunkwise_backward(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H DG"] | None,
    beta: Float[Tensor, "B T H"] | None,
    erase_key: Float[Tensor, "B T H K"] | None = None,
    *,
    do: Float[Tensor, "B T H V"],
    dS: State | None,
    scale: float,
    initial_state: State | None,
    chunk_size: int = 64,
    Aqk: Square | None = None,
    P: Square | None = None,
) -> tuple[Any, ...]:
    """dq, dk, dv, dg, dbeta, derase_key and the initial state's gradient.

    initial_state None is an empty one, dS None a gradient of zeros; with
    both None, the initial state's gradient may be None too.

    Aqk and P are those that :func:`.chunkwise.chunkwise_forward` returned;
    without them they are computed again. The states always are, as in the
    kernels: kept, they would be K V numbers per chunk.
    """
    T, keys, values = q.shape[1], k, v
    q, k, v, g, e = erasing_chunks(q, k, v, g, beta, erase_key, chunk_size)
    do = to_chunks(scale * do, chunk_size)
    if Aqk is None:
        G, Aqk, P = intra(q, k, g, e)
    if initial_state is None and dS is None and q.shape[1] == 1:
        dv, grads = one_backward(q, k, v, g, e, Aqk, P, do)
    else:
        G = None if g is None else running_sum(g).to(g)
        S = empty_state(k, v) if initial_state is None else initial_state
        dS = torch.zeros_like(S) if dS is None else dS
        states, v_new = chunk_states(k, v, g, e, G, P, S)
        dv, leaving, dS = scan_backward(q, k, g, e, G, Aqk, P, do, dS)
        grads = intra_backward(q, k, g, e, G, do, v_new, dv, states, leaving)
    found: list[Any] = [
        None if x is None else from_chunks(x, T) for x in (*grads, dv)
    ]
    dq, dk, dg, de, dv = found
    dbeta = None
    if beta is not None:
        dbeta = (keys * de).sum(-1) + (values * dv).sum(-1)
        strength = beta[..., None]
        dk, dv, de = dk + strength * de, strength * dv, None
    return dq, dk, dv, dg, dbeta, de, dS
