"""All outputs at once: masked quadratic forms, without a state.

Softmax attention, naive and online, and the additive members of the family
as a decayed score matrix times the values. Shapes: q [B, Tq, H, K],
k [B, T, H, K], v [B, T, H, V] -> o [B, Tq, H, V]. Nothing here groups heads.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

Queries = Float[Tensor, "B Tq H K"]
Keys = Float[Tensor, "B T H K"]
Values = Float[Tensor, "B T H V"]
Outputs = Float[Tensor, "B Tq H V"]


def causal_mask(
    num_queries: int, num_keys: int, device: torch.device | None = None
) -> Tensor:
    """True where query i may read key j; the last query reads all keys.

    Raises ValueError for more queries than keys: the first would read none.
    """
    if num_queries > num_keys:
        raise ValueError(
            f"num_queries: got {num_queries}, "
            f"need at most the number of keys, {num_keys}"
        )
    i = torch.arange(num_queries, device=device)[:, None]
    j = torch.arange(num_keys, device=device)[None, :]
    return j <= i + (num_keys - num_queries)


def softmax_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float | None = None,
    causal: bool = True,
) -> Outputs:
    """Softmax attention as it is defined (Vaswani et al. 2017, eq. 1).

    scale is K**-0.5 unless given. With fewer queries than keys and
    ``causal``, the queries are the last ones of the sequence.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * torch.einsum("bihk,bjhk->bhij", q, k)
    if causal:
        mask = causal_mask(q.shape[1], k.shape[1], q.device)
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return torch.einsum("bhij,bjhv->bihv", weights, v)


def softmax_attention_online(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float | None = None,
    causal: bool = True,
    block_size: int = 64,
) -> Outputs:
    """Softmax attention by blocks of keys, never the whole score matrix.

    For each query it carries the largest score so far, the sum of
    exponentials relative to it (Milakov and Gimelshein 2018, algorithm 3),
    and the weighted sum of values (Rabe and Staats 2021; Dao et al. 2022).
    For clarity the mask is formed whole; a kernel would compute its blocks.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, Tq, H, _ = q.shape
    T, V = v.shape[1], v.shape[3]
    mask = causal_mask(Tq, T, q.device) if causal else None
    largest = q.new_full((B, H, Tq), float("-inf"))
    total = q.new_zeros(B, H, Tq)
    weighted = q.new_zeros(B, H, Tq, V)
    for start in range(0, T, block_size):
        block = slice(start, start + block_size)
        scores = scale * torch.einsum("bihk,bjhk->bhij", q, k[:, block])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, block], float("-inf"))
        new_largest = torch.maximum(largest, scores.amax(-1))
        rescale = (largest - new_largest).exp()
        p = (scores - new_largest[..., None]).exp()
        total = rescale * total + p.sum(-1)
        weighted = rescale[..., None] * weighted + torch.einsum(
            "bhij,bjhv->bhiv", p, v[:, block]
        )
        largest = new_largest
    return (weighted / total[..., None]).movedim(1, 2)


def linear_attention_bidirectional(
    q: Queries, k: Keys, v: Values, *, scale: float | None = None
) -> Outputs:
    """Every query reads every key: one K^T V, then one product per query.

    The sum of value times similarity, without the denominator. For a
    normalised answer append a column of ones to v and divide by the last
    column of the result. scale is K**-0.5 unless given.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = torch.einsum("bjhk,bjhv->bhkv", k, v)
    return scale * torch.einsum("bihk,bhkv->bihv", q, S)


def decays(
    G: Float[Tensor, "*lead C DG"], dtype: torch.dtype | None = None
) -> Float[Tensor, "*lead C C DG"]:
    """exp(G_i - G_j) for j <= i, else 0, from running sums G of log decays.

    The exponent is formed before it is exponentiated, so it never exceeds
    0; it is rounded to ``dtype``, G's if None. What stands at j = i is the
    constant 1: no gate has a part in it, and a gradient through G_i - G_i
    would bury the gate's own, which under strong decay is smaller than the
    rounding of two equal terms.
    """
    C = G.shape[-2]
    D = (G[..., :, None, :] - G[..., None, :, :]).to(dtype or G.dtype)
    # A CPU computes 2^x faster than e^x.
    below = D.new_full((C, C), 1 / math.log(2)).tril_(-1)[..., None]
    above = D.new_full((C, C), -math.inf).triu_(1)[..., None]
    return torch.addcmul(above, D, below).exp2()


def decayed_scores(
    q: Keys,
    k: Keys,
    g: Float[Tensor, "B T H DG"] | None = None,
) -> Float[Tensor, "B H T T"]:
    """A_ij = sum_d q_id k_jd exp(G_id - G_jd) for j <= i, else 0.

    G is the running sum of g, the log decay. g has a width DG of 1 (a gate
    per head) or of K (a gate per key channel). Without g nothing decays.
    """
    T = q.shape[1]
    if g is None:
        mask = causal_mask(T, T, q.device)
        return torch.einsum("bihk,bjhk->bhij", q, k) * mask
    D = decays(g.cumsum(1).movedim(1, 2))  # [B, H, T, T, DG]
    if D.shape[-1] == 1:
        return torch.einsum("bihk,bjhk->bhij", q, k) * D[..., 0]
    return torch.einsum("bihk,bjhk,bhijk->bhij", q, k, D)


def parallel(
    q: Keys,
    k: Keys,
    v: Values,
    g: Float[Tensor, "B T H DG"] | None = None,
    *,
    scale: float | None = None,
) -> Values:
    """The additive members, S_t = Diag(e^g_t) S_{t-1} + k_t v_t^T, at once.

    scale is K**-0.5 unless given. Costs O(T^2) time and memory, with a gate
    per channel O(T^2 K); it is here to be compared with.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    A = decayed_scores(q, k, g)
    return scale * torch.einsum("bhij,bjhv->bihv", A, v)
