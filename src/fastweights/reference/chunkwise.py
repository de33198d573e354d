"""The recurrence a chunk at a time: matrix products instead of a loop.

Stage by stage, for every gate and all rules. :func:`intra` is what happens
inside each chunk, for all chunks at once; :func:`scan` carries the state
from chunk to chunk. Their gradients: :mod:`.chunkwise_backward`. Shapes: a
sequence [B, T, H, D] is cut into [B, N, H, C, D] with N = ceil(T / C). Gates
are log decays whose last dimension is 1 (one gate per head) or K (one per key
channel), or None: nothing decays.

The stages know one rule that erases, k_t (v_t - S^T e_t)^T with an erasing
key e_t. The delta rule is that with e = beta k, and beta v for v.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fastweights.dtypes import MIN_LOG_DECAY
from fastweights.reference.parallel import decays

Chunks = Float[Tensor, "B N H C D"]
Keys = Float[Tensor, "B N H C K"]
Values = Float[Tensor, "B N H C V"]
Gates = Float[Tensor, "B N H C DG"]
Square = Float[Tensor, "B N H C C"]
State = Float[Tensor, "B H K V"]

STRIP = 16  # rows of a chunk that share a reference point for their decays


def to_chunks(x: Float[Tensor, "B T H D"], chunk_size: int) -> Chunks:
    """Cut the sequence into chunks, the last one filled up with zeros.

    A zero key and a zero log decay leave the state as it is.
    """
    if rest := -x.shape[1] % chunk_size:
        x = F.pad(x, (0, 0, 0, 0, 0, rest))
    return x.unflatten(1, (-1, chunk_size)).movedim(2, 3).contiguous()


def from_chunks(x: Chunks, T: int) -> Float[Tensor, "B T H D"]:
    """Undo :func:`to_chunks` for a sequence of T tokens."""
    return x.movedim(3, 2).flatten(1, 2)[:, :T]


def decayed(
    x: Float[Tensor, "*lead C D"], G: Float[Tensor, "*lead #C #D"] | None
) -> Float[Tensor, "*lead C D"]:
    """e^G . x: each token by its own log decay; x itself without gates."""
    return x if G is None else x * G.exp()


def running_sum(g: Gates) -> Gates:
    """G: the gates of a chunk up to and with each token, summed, in fp64.

    The decay between two tokens is the exponential of a difference of two
    sums. In fp32 they would lose the gates behind a strong one.
    """
    return g.double().clamp(min=MIN_LOG_DECAY).cumsum(dim=-2)


def chunk_scores(
    x: Float[Tensor, "*stack C K"],
    k: Float[Tensor, "*lead C K"],
    G: Float[Tensor, "*lead C DG"] | None,
) -> Float[Tensor, "*stack C C"]:
    """A_ij = sum_d x_id k_jd exp(G_id - G_jd) for j <= i, else 0.

    x holds queries or erasing keys, and G is the :func:`running_sum` of the
    gates. No exponent is ever positive, and each is rounded only as a
    difference. A gate per head decays the finished scores. With a gate per
    channel, rows go in strips of STRIP = 16. For the columns before a strip
    the decay is split at the strip's start s, exp(G_i - G_s) exp(G_s - G_j);
    inside the strip it is taken pair by pair.
    """
    if G is None:
        return (x @ k.mT).tril_()
    if G.shape[-1] == 1:
        return ((x @ k.mT) * decays(G, x.dtype)[..., 0]).tril_()
    C = x.shape[-2]
    rows = []
    for s in range(0, C, STRIP):
        x_s, k_s, G_s = (t[..., s : s + STRIP, :] for t in (x, k, G))
        start = G_s[..., :1, :]
        earlier_k = k[..., :s, :] * (start - G[..., :s, :]).to(k).exp()
        earlier = (x_s * (G_s - start).to(x).exp()) @ earlier_k.mT
        own_k = k_s[..., None, :, :] * decays(G_s, x.dtype)  # [16, 16, K]
        own = (x_s[..., :, None, :] * own_k).sum(-1)
        row = torch.cat([earlier, own], dim=-1)
        rows.append(F.pad(row, (0, C - row.shape[-1])))
    return torch.cat(rows, dim=-2)


def unit_lower_inverse(
    M: Float[Tensor, "*lead C C"],
) -> Float[Tensor, "*lead C C"]:
    """P = (I + M)^{-1} for a strictly lower triangular M: P (I + M) = I."""
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    return torch.linalg.solve_triangular(
        M, eye, upper=False, left=False, unitriangular=True
    )


def inverse_by_blocks(
    M: Float[Tensor, "*lead C C"],
) -> Float[Tensor, "*lead C C"]:
    """(I + M)^{-1} by block recursion: products alone, as in the kernels.

    Blocks of size 1, 2, 4, ... are inverted already; two neighbours with
    the block M_21 between them join as P_21 = -P_22 M_21 P_11.
    """
    C = M.shape[-1]
    P = torch.eye(C, dtype=M.dtype, device=M.device).expand_as(M)
    i = torch.arange(C, device=M.device)
    size = 1
    while size < C:
        row, column = i[:, None] // size, i[None, :] // size
        joins = (row % 2 == 1) & (column == row - 1)
        P = P - P @ (M * joins) @ P
        size *= 2
    return P


def intra(
    q: Keys, k: Keys, g: Gates | None, e: Keys | None = None
) -> tuple[Gates | None, Square, Square | None]:
    """Inside each chunk: running gates G, scores Aqk, inverse P.

    G is None without gates. P = (I + Aek)^{-1}, with Aek strictly lower
    triangular, is None for the additive rule. Under the delta rule the
    erasing key e is beta k.
    """
    G = exact = None
    if g is not None:
        exact = running_sum(g)
        G = exact.to(g)
    if e is None:
        return G, chunk_scores(q, k, exact), None
    Aqk, Aek = chunk_scores(torch.stack([q, e]), k, exact)
    return G, Aqk, unit_lower_inverse(Aek.tril(-1))


def sum_after(
    g: Float[Tensor, "*lead C DG"] | None,
) -> Float[Tensor, "*lead C DG"] | None:
    """The gates after each token of a chunk, summed: G_C - G.

    As that difference it would be the same number, but the gradient of a
    strong gate would be lost between two large terms that cancel.
    """
    if g is None:
        return None
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def each_chunk(*tensors: Tensor | None) -> Iterator[list[Any]]:
    """The tensors of chunk 0, then of chunk 1, ...; a None stays None."""
    num_chunks = next(x.shape[1] for x in tensors if x is not None)
    for n in range(num_chunks):
        yield [None if x is None else x[:, n] for x in tensors]


def new_values(
    v: Float[Tensor, "*lead C V"],
    e: Float[Tensor, "*lead C K"] | None,
    G: Float[Tensor, "*lead C DG"] | None,
    P: Float[Tensor, "*lead C C"] | None,
    S: Float[Tensor, "*lead K V"],
) -> Float[Tensor, "*lead C V"]:
    """v_new: what a chunk writes to the state S that enters it.

    The additive rule writes the values. A rule that erases writes what the
    state lacks, P (v - (e^G . e) S).
    """
    if e is None or P is None:
        return v
    return P @ (v - decayed(e, G) @ S)


def next_state(
    k: Float[Tensor, "*lead C K"],
    v_new: Float[Tensor, "*lead C V"],
    G: Float[Tensor, "*lead C DG"] | None,
    rest: Float[Tensor, "*lead C DG"] | None,
    S: Float[Tensor, "*lead K V"],
) -> Float[Tensor, "*lead K V"]:
    """The state that leaves a chunk; rest is what its tokens decay by."""
    total = None if G is None else G[..., -1:, :].mT  # of the whole chunk
    return decayed(S, total) + decayed(k, rest).mT @ v_new


def scan(
    q: Keys,
    k: Keys,
    v: Values,
    g: Gates | None,
    e: Keys | None,
    G: Gates | None,
    Aqk: Square,
    P: Square | None,
    S: State,
    *,
    scale: float,
) -> tuple[Values, State]:
    """Across chunks: outputs of each chunk and the state it hands on."""
    rest = sum_after(g)
    outputs = []
    for q_n, k_n, v_n, e_n, G_n, rest_n, Aqk_n, P_n in each_chunk(
        q, k, v, e, G, rest, Aqk, P
    ):
        v_new = new_values(v_n, e_n, G_n, P_n, S)
        o = decayed(q_n, G_n) @ S + Aqk_n @ v_new
        outputs.append(scale * o)
        S = next_state(k_n, v_new, G_n, rest_n, S)
    return torch.stack(outputs, dim=1), S


def empty_state(k: Keys, v: Values) -> State:
    """Zeros: the state before the first token, if none is given."""
    return k.new_zeros(k.shape[0], k.shape[2], k.shape[-1], v.shape[-1])


def scan_one(
    k: Keys,
    v: Values,
    g: Gates | None,
    Aqk: Square,
    P: Square | None,
    *,
    scale: float,
) -> tuple[Values, State]:
    """:func:`scan` of a single chunk that an empty state enters."""
    v_new = v if P is None else P @ v
    state = decayed(k, sum_after(g)).mT @ v_new
    return (Aqk @ v_new).mul_(scale), state[:, 0]


def erasing_chunks(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H DG"] | None,
    beta: Float[Tensor, "B T H"] | None,
    erase_key: Float[Tensor, "B T H K"] | None,
    chunk_size: int,
) -> tuple[Keys, Keys, Values, Gates | None, Keys | None]:
    """q, k, v, g and e in chunks; beta is in v and, with k, in e."""
    if beta is not None:
        erase_key, v = beta[..., None] * k, beta[..., None] * v
    q, k, v = (to_chunks(x, chunk_size) for x in (q, k, v))
    g, e = (
        None if x is None else to_chunks(x, chunk_size) for x in (g, erase_key)
    )
    return q, k, v, g, e


def chunkwise(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H DG"] | None,
    beta: Float[Tensor, "B T H"] | None = None,
    erase_key: Float[Tensor, "B T H K"] | None = None,
    *,
    scale: float,
    initial_state: State,
    chunk_size: int = 64,
) -> tuple[Float[Tensor, "B T H V"], State]:
    """Both stages on a whole sequence: outputs and the final state."""
    o, S, _, _ = chunkwise_forward(
        q,
        k,
        v,
        g,
        beta,
        erase_key,
        scale=scale,
        initial_state=initial_state,
        chunk_size=chunk_size,
    )
    return from_chunks(o, q.shape[1]), S


def chunkwise_forward(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H DG"] | None,
    beta: Float[Tensor, "B T H"] | None = None,
    erase_key: Float[Tensor, "B T H K"] | None = None,
    *,
    scale: float,
    initial_state: State | None,
    chunk_size: int = 64,
) -> tuple[Values, State, Square, Square | None]:
    """Both stages, outputs still in chunks, and what the backward re-uses.

    The backward re-uses Aqk and P of every chunk, which took the most work
    for their size; it computes the gates' running sums and the states again.
    An initial_state of None is an empty one.
    """
    q, k, v, g, e = erasing_chunks(q, k, v, g, beta, erase_key, chunk_size)
    G, Aqk, P = intra(q, k, g, e)
    if initial_state is None and q.shape[1] == 1:
        o, S = scan_one(k, v, g, Aqk, P, scale=scale)
    else:
        S = empty_state(k, v) if initial_state is None else initial_state
        o, S = scan(q, k, v, g, e, G, Aqk, P, S, scale=scale)
    return o, S, Aqk, P
