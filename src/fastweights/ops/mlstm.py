"""xLSTM's matrix memory: a member whose gates need a stabilizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    check_dims,
    check_entries_if_enabled,
    check_gate,
    check_numbers,
)
from fastweights.dtypes import MIN_LOG_DECAY, cast_for_autocast, compute_dtype
from fastweights.heads import state_shape
from fastweights.ops.common.backends import Backend
from fastweights.ops.common.registration import register
from fastweights.ops.common.rows import Rows, clamp_rows, write_rows
from fastweights.ops.decode import refuse_gradients
from fastweights.ops.members import Keys, PerHead, Values
from fastweights.ops.normaliser import (
    StateAndNormaliser,
    check_normalised,
    check_normalised_step,
    normalised_step,
    recurrence_with_normaliser,
)
from fastweights.packing import (
    num_sequences,
    sequence_ids,
    states_or_zeros,
    tail_mask,
)
from fastweights.ranks.group import Ranks, current_ranks, refuse_ranks
from fastweights.ranks.shard import pad_to_one_token, shard_of

Stabilizer = Float[Tensor, "N HV"]
Memory = tuple[StateAndNormaliser, Stabilizer]


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
    backend: Backend = "auto",
) -> tuple[Values, Memory]:
    """mLSTM (Beck et al. 2024, eqs. 19 to 27), chunkwise.

        C_t = e^{g_t} C_{t-1} + e^{i_t} k_t v_t^T
        n_t = e^{g_t} n_{t-1} + e^{i_t} k_t
        o_t = scale C_t^T q_t / max(|scale n_t^T q_t|, 1)

    What is computed and kept is e^{-m_t} C_t and e^{-m_t} n_t, with the
    stabilizer m_t = max(g_t + m_{t-1}, i_t): then neither the decay of the
    state nor the weight of a value exceeds 1.

        o, memory = fw.mlstm(q, k, v, g, i)

    Args:
        q, k, v: as in :func:`fastweights.linear_recurrence`.
        g: [B, T, HV], log of the forget gate: logsigmoid of its
            pre-activation or, for an exponential gate, that itself.
        i: [B, T, HV], log of the input gate: its pre-activation. Neither
            gate has a bound: where i is -inf nothing is written, where g is
            -inf all before is forgotten. Both are fp32 or q's dtype.
        initial_state: what an earlier call returned; empty if None. A
            memory whose m is -inf is empty, whatever its state holds.
        eps: >= 0, added to the denominator in units of e^{m_t}, so that it
            cannot vanish; xLSTM's code has the same.
        cu_seqlens, scale, chunk_size, backend: as in linear_recurrence.

    Returns:
        o [B, T, HV, V] and (state, m): state [N, HV, K, V + 1] is e^{-m} C
        and, in its last column, e^{-m} n; m [N, HV] is the stabilizer
        after the last token. Both fp32 (fp64 if q is). Where nothing has
        been written, or all of it forgotten, o is 0 and m is -inf.

        The denominator is computed in fp32 for every dtype, at the cost
        that :func:`fastweights.ops.normaliser.recurrence_with_normaliser`
        names.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, value or device does not fit; the message names
            the argument, what it got and what it needs.
        NotImplementedError: in the backward of a backward, under a transform
            of torch.func, or in forward-mode autograd, unless backend is
            "loop".
    """
    q, k, v = cast_for_autocast(q, k, v)
    operands: Any = (q, k, v, g, i, initial_state, cu_seqlens)
    options: Any = (eps, scale, chunk_size, backend)
    if (ranks := current_ranks()) is None:
        return _local_mlstm(*operands, *options)
    return _mlstm_over_ranks(ranks, *operands, *options)


def _local_mlstm(
    q: Keys,
    k: Keys,
    v: Values,
    g: PerHead,
    i: PerHead,
    initial_state: Memory | None,
    cu_seqlens: Int[Tensor, " N+1"] | None,
    eps: float,
    scale: float | None,
    chunk_size: int | None,
    backend: Backend,
) -> tuple[Values, Memory]:
    """mlstm of sequences that are here as a whole."""
    check_dims("[B, T, HV]", g=g)
    options: dict[str, Any] = {
        "cu_seqlens": cu_seqlens,
        "scale": scale,
        "chunk_size": chunk_size,
        "backend": backend,
    }
    check_normalised(q, k, v, g, memory_arguments(initial_state), **options)
    check_gate("i", i, q, v)
    check_numbers(">= 0", eps=eps)
    if cu_seqlens is not None:
        tail = tail_mask(cu_seqlens, q.shape[1])[:, None]
        g, i = g.masked_fill(tail, 0), i.masked_fill(tail, 0)
    check_entries_if_enabled("numbers < inf", i=i)
    state = m = None
    if initial_state is not None:
        state, m = initial_state
        check_entries_if_enabled("numbers < inf", **{"initial_state[1]": m})
        state = state.masked_fill(m.isneginf()[..., None, None], 0)
    dtype = compute_dtype(q.dtype)
    # An empty state is not cleared again: kernels are slower where they clear.
    log_decay, weight, floor, last = gates_in_units(
        g, i, m, cu_seqlens, dtype, empty_log_decay=0.0
    )
    o, z, state = recurrence_with_normaliser(
        q, k, weight * v, weight, log_decay, initial_state=state, **options
    )
    return divide_by_normaliser(o, z, floor, eps).to(v.dtype), (state, last)


def _mlstm_over_ranks(
    ranks: Ranks,
    q: Keys,
    k: Keys,
    v: Values,
    g: PerHead,
    i: PerHead,
    initial_state: Memory | None,
    cu_seqlens: Int[Tensor, " N+1"] | None,
    *options: Any,
) -> tuple[Values, Memory]:
    """mlstm of this rank's tokens, which may be none.

    A rank maps (S, m) to e^{a + m - m'} S + e^{b - m'} B with
    m' = max(a + m, b), where a is the sum of g, and (B, b) what it makes of
    an empty memory. As within a rank, no gradient goes through m, a and b in
    m', and m' is rounded up to the dtype that it is handed over in.
    """
    T = q.shape[1]
    q, k, v, g = pad_to_one_token(q, k, v, g)
    if T == 0:
        i = F.pad(i, (0, 0, 0, 1), value=-torch.inf)
    check_dims("[B, T, HV]", g=g)
    memory = memory_arguments(initial_state)
    check_normalised(q, k, v, g, memory, cu_seqlens=cu_seqlens)
    shard = shard_of(ranks, q, T, cu_seqlens)
    if initial_state is None:
        wide = F.pad(v, (0, 1))
        state = states_or_zeros(q, state_shape(q, wide), None, cu_seqlens)
        m = state.new_full(state.shape[:2], -torch.inf)
    else:
        state, m = initial_state
    first, first_m = (
        shard.initial_states(state),
        shard.initial_states(m, -torch.inf),
    )

    def run(state: Tensor, m: Tensor, offsets: Tensor | None) -> Any:
        return _local_mlstm(q, k, v, g, i, (state, m), offsets, *options)

    own = [x.index_select(0, shard.outgoing) for x in (first, first_m)]
    start = (
        shard.states_for_map(own[0]),
        shard.states_for_map(own[1], -torch.inf),
    )
    _, (B, b) = run(*start, shard.offsets_for_map())
    B, b = shard.outgoing_of_map(B), shard.outgoing_of_map(b, -torch.inf)
    a = shard.where_passing(g.sum(1, dtype=torch.float64), -torch.inf)
    B = ranks.gather(B).double()
    a, b = ranks.gather(torch.stack([a, b.double()])).unbind(1)
    states, ms = [torch.zeros_like(B[0])], [torch.full_like(b[0], -torch.inf)]
    for a_r, B_r, b_r in zip(a, B, b, strict=True):
        S, m = states[-1], ms[-1]
        ms.append(round_up(torch.fmax(a_r + m, b_r).detach(), first.dtype))
        unit = ms[-1].masked_fill(ms[-1].isneginf(), 0)
        parts = ((a_r + m - unit, S), (b_r - unit, B_r))
        states.append(sum(x.exp()[..., None, None] * y for x, y in parts))
    # A part of all states: a backward asks each rank for its gradient.
    incoming = torch.stack(states)[ranks.rank]
    entering = shard.with_incoming(first, incoming)
    m = shard.with_incoming(first_m, ms[ranks.rank])
    o, (state, m) = run(entering, m, shard.cu_seqlens)
    last = shard.final_states(state, states[-1]), shard.final_states(m, ms[-1])
    return o[:, :T], last


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, in fp64, rounded up to a number of this dtype."""
    nearest = x.to(dtype)
    above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    return torch.where(nearest.double() < x, above, nearest).double()


def gates_in_units(
    g: PerHead,
    i: PerHead,
    m: Stabilizer | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    *,
    empty_log_decay: float,
) -> tuple[PerHead, Tensor, Tensor, Stabilizer]:
    """The gates of a state in units of e^m: log decays and weights.

    Then 1 in these units, which is the floor of the normaliser, and the last
    m. ``empty_log_decay`` is the log decay of a state that is empty.
    """
    g, i = g.double(), i.double()
    before, after, last = stabilizers(g, i, m, cu_seqlens, dtype)
    # Any stabilizer gives the same o: it takes no part in the gradients.
    log_decay = g + torch.minimum(before - after, -g).detach()
    empty, emptied = before.isneginf(), after.isneginf()
    log_decay = log_decay.masked_fill(g.isneginf() | emptied, MIN_LOG_DECAY)
    log_decay = log_decay.masked_fill(empty, empty_log_decay).to(dtype)
    weight = (i - after.masked_fill(emptied, 0)).exp()[..., None].to(dtype)
    return log_decay, weight, (-after).exp()[..., None].to(dtype), last


def divide_by_normaliser(
    o: Tensor, z: Tensor, floor: Tensor, eps: float
) -> Tensor:
    """o / (max(|z|, floor) + eps)."""
    return o / (torch.maximum(z.abs(), floor) + eps)


def memory_arguments(
    memory: Any, name: str = "initial_state"
) -> dict[str, Tensor]:
    """The state and the stabilizer; raises if they are no pair."""
    if memory is None:
        return {}
    if not isinstance(memory, tuple | list) or len(memory) != 2:
        raise TypeError(
            f"{name}: got {type(memory).__name__}, need a pair of "
            "tensors, (state, m)"
        )
    return {f"{name}[{n}]": x for n, x in enumerate(memory)}


@torch.no_grad()
def stabilizers(
    g: PerHead,
    i: PerHead,
    m: Stabilizer | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[PerHead, PerHead, Stabilizer]:
    """m_t = max(g_t + m_{t-1}, i_t): before and after each token, the last.

    They are in fp64, as g and i are. But the last one is rounded up to
    ``dtype``, also where it stands after its token: so a state is handed over
    in the units that it was computed in, and no gate exceeds 1. Wrong offsets
    give wrong numbers and no error here; linear_recurrence has one.
    """
    _, T, HV = g.shape
    N = num_sequences(g, cu_seqlens)
    first = g.new_full((N, HV), -torch.inf) if m is None else m.double()
    tokens = torch.arange(T, device=g.device)
    if cu_seqlens is None:
        starts, ends = tokens == 0, tokens == T - 1
        entering = first[:, None]
    else:
        offsets = cu_seqlens.to(g.device, torch.int64)
        stops = offsets[1:]
        sequence = sequence_ids(offsets, T).clamp(max=N - 1)
        starts = tokens == offsets[sequence]
        ends = tokens == stops[sequence] - 1
        entering = first[sequence][None]
    starts, ends = starts[:, None], ends[:, None]
    carried = g.masked_fill(starts, -torch.inf)
    fresh = torch.where(starts, torch.fmax(g + entering, i), i)
    after = running_maximum(carried, fresh)
    last = round_up(after, dtype)
    after = torch.where(ends, last, after)
    before = torch.where(starts, entering, after.roll(1, 1))
    if cu_seqlens is None:
        return before, after, last[:, -1].to(dtype)
    nonempty = (stops > offsets[:-1])[:, None]
    last = last[0, (stops - 1).clamp(0, T - 1)].to(dtype)
    return before, after, torch.where(nonempty, last, first.to(dtype))


def running_maximum(a: PerHead, b: PerHead) -> PerHead:
    """m_t = max(a_t + m_{t-1}, b_t) for every t, from an m of -inf.

    A stretch of tokens maps m to max(a + m, b), and two stretches compose
    to max(a2 + a1 + m, max(a2 + b1, b2)): each pass doubles the stretch that
    ends at t. Gates of -inf need no care, and fmax keeps a NaN where it is.
    """
    if torch.compiler.is_compiling():
        return RUNNING_MAXIMUM(a, b)
    return _running_maximum(a, b)


def _running_maximum(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.clone(), b.clone()
    size = 1
    while size < a.shape[1]:
        later, earlier = slice(size, None), slice(-size)
        b[:, later] = torch.fmax(a[:, later] + b[:, earlier], b[:, later])
        a[:, later] = a[:, later] + a[:, earlier]
        size *= 2
    return b


# One node of a compiled graph for any T.
RUNNING_MAXIMUM = register(
    "running_maximum(Tensor a, Tensor b) -> Tensor",
    _running_maximum,
    lambda a, b: torch.empty_like(b),
)


def mlstm_step(
    q: Keys,
    k: Keys,
    v: Values,
    g: PerHead,
    i: PerHead,
    *,
    state: tuple[StateAndNormaliser, Float[Tensor, "N HV"]],
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
        rows: which rows of the state are the sequences', as in
            decode_step.

    Returns:
        o [B, T, HV, V] in v's dtype. Arithmetic is in fp32 (fp64 if q is).

    Raises:
        TypeError: an argument is of the wrong type or dtype, or state is no
            pair.
        ValueError: a shape, value or device does not fit, there are more than
            16 tokens, or a gradient is needed.
    """
    refuse_ranks("mlstm_step")
    q, k, v = cast_for_autocast(q, k, v)
    if state is None:
        raise TypeError("state: got NoneType, need a pair of tensors")
    check_dims("[B, T, HV]", g=g)
    check_normalised_step(
        q, k, v, g, memory_arguments(state, "state"), rows, scale
    )
    check_gate("i", i, q, v)
    refuse_gradients(i=i)
    check_numbers(">= 0", eps=eps)
    S, m = state
    dtype = compute_dtype(q.dtype)
    first = m if rows is None else m[clamp_rows(rows, m)]
    check_entries_if_enabled("numbers < inf", i=i, **{"state[1]": first})
    log_decay, weight, floor, last = gates_in_units(
        g, i, first, None, dtype, empty_log_decay=MIN_LOG_DECAY
    )
    options = {"g": log_decay, "scale": scale, "backend": backend}
    o, z = normalised_step(q, k, weight * v, weight, S, rows, **options)
    write_rows(m, last, rows)
    return divide_by_normaliser(o, z, floor, eps).to(v.dtype)
