"""A few tokens one at a time: what decode_step does without the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fastweights.dtypes import compute_dtype
from fastweights.heads import HeadStates, per_value_head


def expand_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    erase_key: Tensor | None = None,
) -> tuple[Any, ...]:
    """The inputs in fp32 or fp64, key heads repeated, gates [B,T,HV,DG]."""
    dtype, HV = compute_dtype(q.dtype), v.shape[2]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    q, k = per_value_head(q, HV), per_value_head(k, HV)
    if g is not None:
        g = g.to(dtype) if g.dim() == 4 else g.to(dtype)[..., None]
    beta, e = (None if x is None else x.to(dtype) for x in (beta, erase_key))
    return q, k, v, g, beta, e


def decode(
    S: HeadStates,
    tokens: Sequence[Any],
    num_accepted: Tensor | None,
    scale: float,
) -> Tensor:
    """Outputs of all tokens; S becomes the state after those accepted.

    ``tokens`` are what :func:`expand_inputs` returns.
    """
    if num_accepted is None:
        return advance(S, *tokens, scale=scale)
    o = advance(S.clone(), *tokens, scale=scale)
    q, k, v, g, beta, e = tokens
    token = torch.arange(q.shape[1], device=S.device)
    taken = (token < num_accepted[:, None])[..., None]  # [N, T, 1]
    taken_channels = taken[..., None]
    # What is refused writes nothing, and nothing is forgotten for it.
    k, v = k.where(taken_channels, 0), v.where(taken_channels, 0)
    g = None if g is None else g.where(taken_channels, 0)
    beta = None if beta is None else beta.where(taken, 0)
    e = None if e is None else e.where(taken_channels, 0)
    advance(S, q, k, v, g, beta, e, scale=scale)
    return o


def advance(
    state: HeadStates,
    q: Float[Tensor, "N T HV K"],
    k: Float[Tensor, "N T HV K"],
    v: Float[Tensor, "N T HV V"],
    g: Float[Tensor, "N T HV DG"] | None,
    beta: Float[Tensor, "N T HV"] | None,
    erase_key: Float[Tensor, "N T HV K"] | None,
    *,
    scale: float,
) -> Float[Tensor, "N T HV V"]:
    """A few tokens one at a time, the state in place, without gradients.

    Takes what :func:`expand_inputs` returns; ``steps.recurrence`` in as few
    operations as there can be: for one token they, not FLOPs, take the time.
    """
    N, T, HV, V = v.shape
    S = state.contiguous().view(N * HV, *state.shape[2:])
    decay = None if g is None else g.exp()
    outputs = []
    for t in range(T):
        step: list[Any] = [q, k, v, decay, beta, erase_key]
        if T > 1:
            step = [None if x is None else x[:, t : t + 1] for x in step]
        step = [None if x is None else x.reshape(N * HV, 1, -1) for x in step]
        q_t, k_t, v_t, decay_t, beta_t, e_t = step
        if decay_t is not None:
            S.mul_(decay_t.mT)
        if beta_t is not None:
            v_t = torch.baddbmm(v_t, k_t, S, alpha=-1).mul_(beta_t)
        if e_t is not None:
            v_t = torch.baddbmm(v_t, e_t, S, alpha=-1)
        S.addcmul_(k_t.mT, v_t)
        # With beta = 0 its first argument is not read.
        o = torch.baddbmm(v_t, q_t, S, beta=0, alpha=scale)
        outputs.append(o.view(N, 1, HV, V))
    if not state.is_contiguous():
        state.copy_(S.view(state.shape))
    return outputs[0] if T == 1 else torch.cat(outputs, dim=1)
