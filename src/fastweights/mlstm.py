"""xLSTM's matrix memory: a member whose gates need a stabilizer."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    check_arguments,
    check_kinds,
    check_tensors,
    wrong_shape,
)
from fastweights.family import (
    Keys,
    PerHead,
    State,
    Values,
    check_gate,
    need,
)
from fastweights.ops import autocast, linear_recurrence

Stabilizer = Float[Tensor, "N HV"]
Memory = tuple[State, Stabilizer]


def mlstm(
    q: Keys,
    k: Keys,
    v: Values,
    g: PerHead,
    i: PerHead,
    *,
    initial_state: Memory | None = None,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Values, Memory]:
    """mLSTM (Beck et al. 2024, eqs. 19 to 27), chunkwise.

        C_t = e^{g_t} C_{t-1} + e^{i_t} k_t v_t^T
        n_t = e^{g_t} n_{t-1} + e^{i_t} k_t
        o_t = scale C_t^T q_t / max(|scale n_t^T q_t|, 1)

    What is computed and kept is e^{-m_t} C_t and e^{-m_t} n_t, with the
    stabilizer m_t = max(g_t + m_{t-1}, i_t): then neither the decay of the
    state nor the weight of a value exceeds 1.

    Args:
        q, k, v: as in :func:`fastweights.linear_recurrence`.
        g: [B, T, HV], log of the forget gate: logsigmoid of its
            pre-activation or, for an exponential gate, that itself.
        i: [B, T, HV], log of the input gate: its pre-activation. Neither
            gate has a bound. Both are fp32 or q's dtype.
        initial_state: what an earlier call returned; empty if None.
        eps: added to the denominator in units of e^{m_t}, so that it cannot
            vanish; xLSTM's code has the same.
        scale, chunk_size, backend: as in linear_recurrence.

    Returns:
        o [B, T, HV, V] and (state, m): state [N, HV, K, V + 1] is e^{-m} C
        and, in its last column, e^{-m} n; m [N, HV] is the stabilizer
        after the last token. Both fp32 (fp64 if q is).

    Raises:
        TypeError, ValueError: as linear_recurrence.
    """
    q, k, v = autocast(q, k, v)
    need("g", g, 3, "[B, T, HV]")
    check_arguments(q, k, v, g, None, scale, None, cu_seqlens, chunk_size)
    check_gate("i", i, q, v)
    N = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is not None:
        check_memory(initial_state, q, v, N)
    dtype = torch.promote_types(q.dtype, torch.float32)
    g, i = g.to(dtype), i.to(dtype)
    state, m = (None, None) if initial_state is None else initial_state
    before, after, last = stabilizers(g, i, m, cu_seqlens)
    # Any stabilizer gives the same o: it takes no part in the gradients.
    rescaled = g + torch.minimum(before - after, -g).detach()
    weight = (i - after).exp()[..., None]
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    v = (weight * v).to(v.dtype)
    o, state = linear_recurrence(
        q,
        k,
        v,
        rescaled,
        initial_state=state,
        cu_seqlens=cu_seqlens,
        scale=scale,
        chunk_size=chunk_size,
        backend=backend,
    )
    least = (-after).exp()[..., None]  # 1, in units of e^m
    total = torch.maximum(o[..., -1:].abs(), least)
    return (o[..., :-1] / (total + eps)).to(v.dtype), (state, last)


def check_memory(memory: Memory, q: Keys, v: Values, N: int) -> None:
    """Raise unless that is what a call returned for N such sequences."""
    if not isinstance(memory, tuple | list) or len(memory) != 2:
        raise TypeError(
            f"initial_state: got {type(memory).__name__}, need a pair of "
            "tensors, (state, m)"
        )
    HV, V = v.shape[2:]
    shapes = {
        "initial_state[0]": (N, HV, q.shape[3], V + 1),
        "initial_state[1]": (N, HV),
    }
    tensors = dict(zip(shapes, memory, strict=True))
    check_tensors(tensors)
    full = torch.promote_types(q.dtype, torch.float32)
    dtypes: dict[str, tuple[torch.dtype, ...]] = {"q": (q.dtype,)}
    check_kinds({"q": q} | tensors, dtypes | dict.fromkeys(shapes, (full,)))
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            wrong_shape(name, tensors[name], f"{list(shape)}")


@torch.no_grad()
def stabilizers(
    g: PerHead, i: PerHead, m: Stabilizer | None, cu_seqlens: Tensor | None
) -> tuple[PerHead, PerHead, Stabilizer]:
    """m_t = max(g_t + m_{t-1}, i_t): before and after each token, the last.

    All at once: with G_t the running sum of g, m_t - G_t is the running
    maximum of i_t - G_t; in fp64, for G grows. Sequences of a pack are
    lifted one above the other, so that each begins anew. Offsets that are
    none give any numbers, and no error: linear_recurrence has that.
    """
    B, T, HV = g.shape
    wide_g, wide_i = g.double(), i.double()
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    first = wide_g.new_full((N, HV), -torch.inf) if m is None else m.double()
    tokens = torch.arange(T, device=g.device)
    if cu_seqlens is None:
        sequence, starts = torch.zeros_like(tokens), tokens == 0
        entering = first[:, None]
    else:
        offsets = cu_seqlens.to(g.device, torch.int64)
        ends = offsets[1:].contiguous()
        sequence = torch.searchsorted(ends, tokens, right=True)
        sequence = sequence.clamp(max=N - 1)
        starts = tokens == offsets[sequence]
        entering = first[sequence][None]
    starts = starts[:, None]
    b = torch.where(starts, (wide_g + entering).maximum(wide_i), wide_i)
    G = wide_g.cumsum(1)
    height = (b - G).amax() - (b - G).amin() + 1
    lift = height * sequence[:, None]
    after = (b - G + lift).cummax(1).values - lift + G
    before = after.roll(1, 1)
    fresh = torch.where(entering.isneginf(), after - wide_g, entering)
    before = torch.where(starts, fresh, before)
    last = after[:, -1]
    if cu_seqlens is not None:
        some = (ends > offsets[:-1])[:, None]
        last = torch.where(some, after[0, (ends - 1).clamp(0, T - 1)], first)
    return before.to(g), after.to(g), last.to(g)
