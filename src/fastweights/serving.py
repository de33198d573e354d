"""Steps in place for what is more than the recurrence, one token or a few.

:func:`fastweights.decode_step` continues the recurrence itself. mLSTM,
normalised linear attention and Mamba's selective scan compute something
beside it, which goes on from here. Like decode_step these change the state
that they are given, have no gradients, and take ``rows``: the state is then a
pool of N states, and sequence b has row rows[b] of it. A row that is none of
0 to N - 1 reads and writes nothing, and its outputs are 0. A state may come
from torch.inference_mode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    OFFSETS,
    check_flags,
    check_kinds,
    check_number,
    check_rows,
    check_states,
    check_tensors,
    wrong_shape,
)
from fastweights.decoding import MAX_TOKENS, NARROW, decode_step
from fastweights.family import Keys, PerHead, Values, check_gate, need
from fastweights.mlstm import divided, in_units, named
from fastweights.normaliser import check_normalised
from fastweights.ops import Backend, autocast, without_autocast
from fastweights.reference.backend import wide
from fastweights.reference.chunkwise import CLEARS
from fastweights.selective import check_scan

State = Float[Tensor, "N HV K V+1"]
Rows = Int[Tensor, " B"]


@torch.no_grad()
def mlstm_step(
    q: Keys,
    k: Keys,
    v: Values,
    g: PerHead,
    i: PerHead,
    *,
    state: tuple[State, Float[Tensor, "N HV"]],
    rows: Rows | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Values:
    """:func:`fastweights.mlstm` for 1 to 16 new tokens of each sequence.

    Args:
        q, k, v, g, i, eps, scale, backend: as in mlstm.
        state: the pair (state, m) that mlstm returned; both are updated in
            place. An empty one is zeros and an m of -inf.
        rows: which rows of the state are the sequences'; see above.

    Returns:
        o [B, T, HV, V] in v's dtype. Arithmetic is in fp32 (fp64 if q is).

    Raises:
        TypeError, ValueError: as mlstm and decode_step.
    """
    q, k, v = autocast(q, k, v)
    if state is None:
        raise TypeError("state: got NoneType, need a pair of tensors")
    need("g", g, 3, "[B, T, HV]")
    _check_normalised(q, k, v, g, named(state, "state"), rows, scale)
    check_gate("i", i, q, v)
    check_number("eps", eps, ">= 0")
    S, m = state
    dtype = wide(q.dtype)
    first = m if rows is None else m[inside(rows, m)]
    decay, weight, least, last = in_units(
        g, i, first, None, dtype, of_empty=CLEARS
    )
    v_and_one = torch.cat([weight * v, weight], -1)
    with without_autocast(q):
        o = decode_step(
            q.to(dtype),
            k.to(dtype),
            v_and_one,
            g=decay,
            state=S,
            rows=rows,
            scale=scale,
            backend=backend,
        )
    put(m, last, rows)
    o, z = o[..., :-1], o[..., -1:]
    return divided(o, z, least, eps).to(v.dtype)


@torch.no_grad()
def linear_attention_step(
    q: Keys,
    k: Keys,
    v: Values,
    *,
    state: State,
    feature_map: Callable[[Tensor], Tensor] | None = None,
    rows: Rows | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Values:
    """Normalised linear attention for 1 to 16 new tokens of each sequence.

    Continues ``fastweights.linear_attention(..., normalize=True)``, whose
    state [N, HV, K, V + 1] is updated in place; the other arguments are its
    own. (Without normalize, decode_step continues it.)

    Returns:
        o [B, T, HV, V] in v's dtype. Arithmetic is in fp32 (fp64 if q is).

    Raises:
        TypeError, ValueError: as linear_attention and decode_step.
    """
    if feature_map is not None:
        if not callable(feature_map):
            raise TypeError(
                f"feature_map: got {type(feature_map).__name__}, need a "
                "function or None"
            )
        q, k = feature_map(q), feature_map(k)
    check_number("eps", eps, ">= 0")
    q, k, v = autocast(q, k, v)
    _check_normalised(q, k, v, None, {"state": state}, rows, scale)
    dtype = wide(q.dtype)
    v_and_one = torch.cat(
        [v.to(dtype), torch.ones_like(v[..., :1], dtype=dtype)], -1
    )
    with without_autocast(q):
        o = decode_step(
            q.to(dtype),
            k.to(dtype),
            v_and_one,
            state=state,
            rows=rows,
            scale=scale,
            backend=backend,
        )
    return (o[..., :-1] / (o[..., -1:] + eps)).to(v.dtype)


@torch.no_grad()
def selective_step(
    x: Float[Tensor, "B T D"],
    dt: Float[Tensor, "B T D"],
    A: Float[Tensor, "D N"],
    B: Float[Tensor, "B T *G N"],
    C: Float[Tensor, "B T *G N"],
    D: Float[Tensor, " D"] | None = None,
    *,
    state: Float[Tensor, "S D N"],
    z: Float[Tensor, "B T D"] | None = None,
    dt_bias: Float[Tensor, " D"] | None = None,
    dt_softplus: bool = False,
    rows: Rows | None = None,
) -> Float[Tensor, "B T D"]:
    """:func:`fastweights.selective_scan` for a few new tokens, in place.

    Args:
        x, dt, A, B, C, D, z, dt_bias, dt_softplus: as in selective_scan.
        state: [S, D, N] fp32 (fp64 if x is), updated in place.
        rows: which rows of the state are the sequences'; see above.

    Returns:
        y [B, T, D] in x's dtype, by PyTorch's operators: under torch.compile
        a token is one kernel.

    Raises:
        TypeError, ValueError: as selective_scan.
    """
    x, B, C = autocast(x, B, C)
    check_scan(x, dt, A, B, C, D, z, dt_bias, None, None)
    check_flags(dt_softplus=dt_softplus)
    if x.shape[1] > MAX_TOKENS:
        need = f"[B, T, D] with T <= {MAX_TOKENS}; for more tokens there is "
        wrong_shape("x", x, f"{need}selective_scan")
    _check_states(x, {"state": state}, rows, tuple(A.shape))
    full = wide(x.dtype)
    u, dt, A, B, C = (t.to(full) for t in (x, dt, A, B, C))
    if dt_bias is not None:
        dt = dt + dt_bias.to(full)
    if dt_softplus:
        dt = F.softplus(dt)
    G = B.shape[2] if B.dim() == 4 else 1
    spread = x.shape[2] // G
    B, C = (t.unflatten(-1, (1, -1)) if t.dim() == 3 else t for t in (B, C))
    h = state if rows is None else state[inside(rows, state)]
    outputs = []
    with without_autocast(x):
        for t in range(x.shape[1]):
            B_t, C_t = (
                y[:, t].repeat_interleave(spread, 1) for y in (B, C)
            )  # [B, D, N]
            step = dt[:, t, :, None]
            h = (step * A).exp() * h + step * u[:, t, :, None] * B_t
            outputs.append((h * C_t).sum(-1))
        y = torch.stack(outputs, 1)
        if D is not None:
            y = y + D.to(full) * u
        if z is not None:
            y = y * F.silu(z.to(full))
    put(state, h, rows)
    if rows is not None:
        there = (rows >= 0) & (rows < state.shape[0])
        y = y.where(there[:, None, None], 0)
    return y.to(x.dtype)


def _check_normalised(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    states: dict[str, Tensor],
    rows: Rows | None,
    scale: float | None,
) -> None:
    """Raise for the first argument that does not fit the others."""
    check_normalised(q, k, v, g, {}, scale=scale)
    HV, V = v.shape[2:]
    narrow = () if q.dtype == torch.float64 else NARROW
    shapes = (HV, q.shape[3], V + 1), (HV,)
    _check_states(q, states, rows, *shapes, besides=narrow)


def _check_states(
    q: Tensor,
    states: dict[str, Tensor],
    rows: Rows | None,
    *shapes: tuple[int, ...],
    besides: tuple[torch.dtype, ...] = (),
) -> None:
    """Raise unless states have rows of these shapes.

    The first may be in one of the dtypes ``besides``.
    """
    check_tensors(states)
    N = q.shape[0]
    if rows is not None:
        first = next(iter(states.values()))
        N = first.shape[0] if first.dim() else 0
        check_rows(rows, q.shape[0], N, none=True)
        check_kinds({"q": q, "rows": rows}, {"q": (q.dtype,), "rows": OFFSETS})
    for (name, state), shape in zip(states.items(), shapes, strict=False):
        check_states(q, {name: state}, {name: (N, *shape)}, besides)
        besides = ()


def inside(rows: Rows, pool: Tensor) -> Rows:
    """Rows that the pool has, for others some row of it."""
    return rows.to(torch.int64).clamp(0, pool.shape[0] - 1)


def writes(
    rows: Rows, pool: Tensor
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"], Tensor]:
    """Who writes where: rows of the pool, sequences, whether any has a row.

    A sequence without a row writes what the first one that has a row does,
    into the same place: nothing depends on which of the two comes last.
    """
    there = (rows >= 0) & (rows < pool.shape[0])
    first = there.int().argmax()
    source = torch.arange(rows.shape[0], device=rows.device)
    source = source.where(there, first)
    return inside(rows, pool)[source], source, there.any()


def put(pool: Tensor, new: Tensor, rows: Rows | None) -> None:
    """Write ``new`` into these rows of the pool, those that it has.

    A pool that comes from torch.inference_mode may change there only.
    """
    if not torch.compiler.is_compiling() and pool.is_inference():
        with torch.inference_mode():
            _put(pool, new, rows)
    else:
        _put(pool, new, rows)


def _put(pool: Tensor, new: Tensor, rows: Rows | None) -> None:
    if rows is None:
        pool.copy_(new)
        return
    at, source, some = writes(rows, pool)
    pool.index_put_((at,), new[source].where(some, pool[at]))
