"""Steps in place: a state is updated by one new token or a few.

:func:`fastweights.decode_step` continues the recurrence itself. mLSTM,
normalised linear attention and Mamba's selective scan compute something
beside it, and have steps of their own. All change the state that they are
given, have no gradients, and take ``rows``: the state is then a pool of N
states, and sequence b has row rows[b] of it. A row that is none of 0 to N - 1
reads and writes nothing, and its outputs are 0. A state may come from
torch.inference_mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    OFFSETS,
    check_arguments,
    check_flags,
    check_kinds,
    check_number,
    check_rows,
    check_states,
    check_tensors,
    check_values,
    is_readable,
    wrong_shape,
)
from fastweights.dtypes import (
    cast_for_autocast,
    compute_dtype,
    without_autocast,
)
from fastweights.ops.backends import (
    Backend,
    backend_for,
    check_backend,
    record_run,
)
from fastweights.ops.members import (
    Keys,
    PerHead,
    Values,
    check_dim,
    check_gate,
)
from fastweights.ops.mlstm import (
    divide_by_normaliser,
    gates_in_units,
    memory_arguments,
)
from fastweights.ops.normaliser import StateAndNormaliser, check_normalised
from fastweights.ops.registration import past_dispatcher
from fastweights.ops.selective import check_scan
from fastweights.ranks.group import refuse_ranks
from fastweights.reference.backend import advance, per_value_head, widen
from fastweights.reference.chunkwise import CLEARS

Rows = Int[Tensor, " B"]

MAX_TOKENS = 16

NARROW = (torch.bfloat16,)
"""What else a state may be kept in than fp32.

A call rounds it once, to 8 bits, and that adds up over what a state holds.
One token per call, keys of unit length, K = V = 64, a gate per head: outputs
are off by 0.4 % where half is forgotten in 10 tokens, by 1.4 % in 100 and by
5 % in 1,000, and with the delta rule, which corrects its own errors, by 0.4,
1.1 and 1.5 %. While nothing is written, a gate that takes less than one part
in 512, a half-life of 355 tokens or more, forgets nothing at all.
"""


def decode_step(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    *,
    state: Float[Tensor, "N HV K V"],
    g: Float[Tensor, " ..."] | None = None,
    beta: Float[Tensor, "B T HV"] | None = None,
    erase: Float[Tensor, "B T _ K"] | None = None,
    rows: Rows | None = None,
    accepted: Int[Tensor, " B"] | None = None,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Float[Tensor, "B T HV V"]:
    """:func:`linear_recurrence` for 1 to 16 new tokens of each sequence.

    What continues a member, with the scale that it was called with (phi is
    its feature map, if it has one; logits are fp32; retnet_decay is what
    retention takes unless it is given a g, with dtype=torch.float64 if q is
    that). g, beta and erase go by name: members differ in which of them they
    have. beta_ is beta[..., None], and g_ likewise.

        linear_attention     phi(q), phi(k), v
        retention            q, k, v, g=retnet_decay(HV)
        gated_retention      q, k, v, g=logsigmoid(logits) / temperature
        mamba2, gla          q, k, v, g=g
        deltanet             q, k, v, beta=beta
        gated_deltanet, kda  q, k, v, g=g, beta=beta
        gated_deltanet2      q, k, w * v, g=g, erase=b * k
        comba                q, k, beta_ * v, g=g, erase=beta_ * exp(-g_) * p

    mlstm, linear_attention with normalize and selective_scan do more than the
    recurrence: :mod:`fastweights.serving` has their steps.

        o = fw.decode_step(q, k, v, g=g, beta=beta, state=state)

    Args:
        q, k, v, g, beta, erase, scale: as in linear_recurrence, T <= 16.
        state: [B, HV, K, V] fp32 (fp64 if q is), the state before the first
            of the tokens. It is updated in place, to the one after the
            last; it need not be contiguous, and may come from
            torch.inference_mode. In bf16 it has half the bytes, and is
            rounded once per call: :data:`NARROW` says what that costs.
        rows: [B] int32 or int64, for a state [N, HV, K, V] that is a pool:
            sequence b has row rows[b] of it, and the other rows stay as they
            are. No two sequences may have the same row, which is checked
            on a CPU. One whose row is none of 0 to N - 1 (-1, say, where a
            batch is filled up) reads and writes no state; its outputs are 0.
        accepted: [B] int32 or int64, 0 to T, which is checked on a CPU: of
            each sequence the state becomes the one after so many of its
            tokens, None: after all. Outputs are those of all tokens. So a
            model reads what was only guessed to come next, and takes in what
            turned out to be right.
        backend: as in linear_recurrence. "triton" is one kernel that reads
            and writes the state once; "chunkwise" and "loop" are both the
            loop over tokens in PyTorch.

    Returns:
        o [B, T, HV, V] in v's dtype. Arithmetic is in fp32 (fp64 if q is),
        under autocast too, which rounds q, k, v and erase on their way in and
        nothing else. No gradients.

    Raises:
        TypeError: an argument is of the wrong type or dtype, or g or beta
            came without its name.
        ValueError: a shape, value or device does not fit, or a gradient is
            needed; the message names the argument, what it got and what it
            needs.
    """
    refuse_ranks("decode_step")
    q, k, v = cast_for_autocast(q, k, v)
    if erase is not None:
        (erase,) = cast_for_autocast(erase)
    _check(q, k, v, g, beta, erase, state, rows, scale, backend)
    if erase is not None:
        erase = per_value_head(erase, v.shape[2])
    if accepted is not None:
        check_accepted("accepted", accepted, q=q)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    tensors = (q, k, v, g, beta, erase, state, rows, accepted)
    if torch.compiler.is_compiling():
        return DECODE(*tensors, scale, backend)
    step = past_dispatcher(DECODE, _decode, tensors)
    if state.is_inference():
        # Only there may it be changed; what is returned goes anywhere.
        with torch.inference_mode():
            o = step(*tensors, scale, backend)
        return o if torch.is_inference_mode_enabled() else o.clone()
    o = step(*tensors, scale, backend)
    if step is _decode:
        # As the operator does: a graph that has saved it must notice.
        torch.autograd.graph.increment_version(state)
    return o


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    state: Tensor,
    rows: Tensor | None,
    scale: float | None,
    backend: Backend,
) -> None:
    """Raise for the first argument that does not fit the others."""
    if state is None:
        raise TypeError("state: got NoneType, need a Tensor")
    narrow = _narrow(q)
    check_arguments(
        *(q, k, v, g, beta, scale, state if rows is None else None, None),
        None,
        erase=erase,
        state_name="state",
        state_dtypes=narrow,
    )
    if rows is not None:
        shape = (v.shape[2], q.shape[3], v.shape[3])
        _check_states(q, {"state": state}, rows, shape, besides=narrow)
    if q.shape[1] > MAX_TOKENS:
        raise ValueError(
            f"q: got shape {list(q.shape)}, need [B, T, H, K] with "
            f"T <= {MAX_TOKENS}; for more tokens there is linear_recurrence"
        )
    if not state.is_contiguous() and _overlaps(state):
        raise ValueError(
            f"state: got strides {list(state.stride())}, need a tensor whose "
            "elements share no memory, such as its clone()"
        )
    if torch.is_grad_enabled():
        given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        _refuse_gradients(**given, erase=erase, state=state)
    check_backend(backend)
    check_values(
        *(q, k, v, g, beta, state, None), erase=erase, state_name="state"
    )


def _refuse_gradients(**tensors: Tensor | None) -> None:
    """Raise for the first tensor that a gradient is asked for."""
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise ValueError(
                f"{name}: got a tensor that requires a gradient, need one "
                "that does not, or torch.no_grad(): decode_step has none"
            )


def _overlaps(x: Tensor) -> bool:
    """Whether elements share memory, or it takes more to say that none do.

    None do if each stride steps over all that smaller ones reach.
    """
    shape = zip(x.shape, x.stride(), strict=True)
    dims = [(size, stride) for size, stride in shape if size > 1]
    for size, stride in dims:
        reach = sum([(n - 1) * step for n, step in dims if step <= stride])
        if size * stride <= reach:
            return True
    return False


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    state: Tensor,
    rows: Tensor | None,
    accepted: Tensor | None,
    scale: float,
    backend: Backend,
) -> Tensor:
    """The outputs; ``state`` becomes the one after what is accepted."""
    if backend_for(backend, q) == "triton":
        from fastweights.kernels.decode import decode

        record_run("triton decode")
        return decode(
            *(q, k, v, g, beta, state, rows, scale),
            erase=erase,
            accepted=accepted,
        )
    record_run("loop forward")
    if g is not None and g.dim() == 1:
        g = g.expand(v.shape[:3])
    with without_autocast(q):
        x, full = widen(q, k, v, g, beta, erase), compute_dtype(q.dtype)
        # All sequences, those without a row as well: nothing here waits for
        # the device, or depends on how many there are of them.
        S = state if rows is None else state[rows_inside(rows, state)]
        S = S.to(full)
        o = _advance(S, x, accepted, scale).to(v.dtype)
        if S is not state:
            write_rows(state, S.to(state.dtype), rows)
        if rows is not None:
            there = (rows >= 0) & (rows < len(state))
            o = o.where(there[:, None, None, None], 0)
        return o


def _advance(
    S: Tensor, x: Sequence[Any], accepted: Tensor | None, scale: float
) -> Tensor:
    """Outputs of all tokens; S becomes the state after those accepted."""
    if accepted is None:
        return advance(S, *x, scale=scale)
    o = advance(S.clone(), *x, scale=scale)
    q, k, v, g, beta, erase = x
    token = torch.arange(q.shape[1], device=S.device)
    each = (token < accepted[:, None])[..., None]  # [N, T, 1]
    all_of = each[..., None]
    # What is refused writes nothing, and nothing is forgotten for it.
    k, v = k.where(all_of, 0), v.where(all_of, 0)
    g = None if g is None else g.where(all_of, 0)
    beta = None if beta is None else beta.where(each, 0)
    erase = None if erase is None else erase.where(all_of, 0)
    advance(S, q, k, v, g, beta, erase, scale=scale)
    return o


DECODE = torch.library.custom_op(
    "fastweights::decode_step",
    _decode,
    mutates_args=("state",),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, "
    "Tensor? erase, Tensor(a!) state, Tensor? rows, Tensor? accepted, "
    "float scale, str backend) -> Tensor",
)


@DECODE.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return v.new_empty(v.shape)


@torch.no_grad()
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
        rows: which rows of the state are the sequences'; see above.

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
    check_dim("g", g, 3, "[B, T, HV]")
    _check_normalised(
        q, k, v, g, memory_arguments(state, "state"), rows, scale
    )
    check_gate("i", i, q, v)
    check_number("eps", eps, ">= 0")
    S, m = state
    dtype = compute_dtype(q.dtype)
    first = m if rows is None else m[rows_inside(rows, m)]
    decay, weight, least, last = gates_in_units(
        g, i, first, None, dtype, of_empty=CLEARS
    )
    options = {"g": decay, "scale": scale, "backend": backend}
    o, z = _normalised_step(q, k, weight * v, weight, S, rows, **options)
    write_rows(m, last, rows)
    return divide_by_normaliser(o, z, least, eps).to(v.dtype)


@torch.no_grad()
def linear_attention_step(
    q: Keys,
    k: Keys,
    v: Values,
    *,
    state: StateAndNormaliser,
    feature_map: Callable[[Tensor], Tensor] | None = None,
    rows: Rows | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Values:
    """Normalised linear attention for 1 to 16 new tokens of each sequence.

    Continues ``fastweights.linear_attention(..., normalize=True)``, whose
    state it takes. (Without normalize, decode_step continues it.)

    Args:
        q, k, v, feature_map, eps, scale: as in linear_attention, T <= 16.
        state: [N, HV, K, V + 1] fp32 (fp64 if q is), or bf16; updated in
            place.
        rows, backend: as in decode_step.

    Returns:
        o [B, T, HV, V] in v's dtype. Arithmetic is in fp32 (fp64 if q is).

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, value or device does not fit, there are more than
            16 tokens, or a gradient is needed.
    """
    if feature_map is not None:
        if not callable(feature_map):
            raise TypeError(
                f"feature_map: got {type(feature_map).__name__}, need a "
                "function or None"
            )
        q, k = feature_map(q), feature_map(k)
    check_number("eps", eps, ">= 0")
    refuse_ranks("linear_attention_step")
    q, k, v = cast_for_autocast(q, k, v)
    _check_normalised(q, k, v, None, {"state": state}, rows, scale)
    one = torch.ones_like(v[..., :1])
    options = {"scale": scale, "backend": backend}
    o, z = _normalised_step(q, k, v, one, state, rows, **options)
    return (o / (z + eps)).to(v.dtype)


def _normalised_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    one: Tensor,
    state: Tensor,
    rows: Rows | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """A step of v and of ``one``, the state's last column: o and z.

    As a sum that may cancel, and a divisor, in fp32 (fp64 if q is).
    """
    dtype = compute_dtype(q.dtype)
    both = torch.cat([v.to(dtype), one.to(dtype)], -1)
    with without_autocast(q):
        o = decode_step(
            q.to(dtype), k.to(dtype), both, state=state, rows=rows, **options
        )
    return o[..., :-1], o[..., -1:]


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
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, value or device does not fit, there are more than
            16 tokens, or a gradient is needed.
    """
    refuse_ranks("selective_step")
    x, B, C = cast_for_autocast(x, B, C)
    check_scan(x, dt, A, B, C, D, z, dt_bias, None, None)
    check_flags(dt_softplus=dt_softplus)
    if x.shape[1] > MAX_TOKENS:
        need = f"[B, T, D] with T <= {MAX_TOKENS}; for more tokens there is "
        wrong_shape("x", x, f"{need}selective_scan")
    _check_states(x, {"state": state}, rows, tuple(A.shape))
    full = compute_dtype(x.dtype)
    u, dt, A, B, C = (t.to(full) for t in (x, dt, A, B, C))
    if dt_bias is not None:
        dt = dt + dt_bias.to(full)
    if dt_softplus:
        dt = F.softplus(dt)
    G = B.shape[2] if B.dim() == 4 else 1
    spread = x.shape[2] // G
    B, C = (t.unflatten(-1, (1, -1)) if t.dim() == 3 else t for t in (B, C))
    h = state if rows is None else state[rows_inside(rows, state)]
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
    write_rows(state, h, rows)
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
    shapes = (HV, q.shape[3], V + 1), (HV,)
    _check_states(q, states, rows, *shapes, besides=_narrow(q))


def _narrow(q: Tensor) -> tuple[torch.dtype, ...]:
    """What else a state of q may be kept in."""
    fp64 = isinstance(q, Tensor) and q.dtype == torch.float64
    return () if fp64 else NARROW


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


def check_accepted(name: str, accepted: Tensor, **of: Tensor) -> None:
    """Raise unless it is [B], 0 to T each, for a tensor [B, T, ...].

    int32 or int64, and T <= 16.
    """
    ((first, x),) = of.items()
    (B, T), values = x.shape[:2], [0]
    check_tensors({name: accepted})
    check_kinds({**of, name: accepted}, {first: (x.dtype,), name: OFFSETS})
    if T > MAX_TOKENS:
        raise ValueError(
            f"{name}: got {T} tokens, need at most {MAX_TOKENS} with it"
        )
    if accepted.shape != (B,):
        wrong_shape(name, accepted, f"[{B}]")
    if is_readable(accepted):
        values = accepted.tolist()
    if not all(0 <= n <= T for n in values):
        raise ValueError(f"{name}: got {values}, need 0 to {T}")


def rows_inside(rows: Rows, pool: Tensor) -> Rows:
    """Rows that the pool has, for others some row of it."""
    return rows.to(torch.int64).clamp(0, pool.shape[0] - 1)


def rows_to_write(
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
    return rows_inside(rows, pool)[source], source, there.any()


def write_rows(pool: Tensor, new: Tensor, rows: Rows | None) -> None:
    """Write ``new`` into these rows of the pool, those that it has.

    A pool that comes from torch.inference_mode may change there only.
    """
    if not torch.compiler.is_compiling() and pool.is_inference():
        with torch.inference_mode():
            _write_rows(pool, new, rows)
    else:
        _write_rows(pool, new, rows)


def _write_rows(pool: Tensor, new: Tensor, rows: Rows | None) -> None:
    if rows is None:
        pool.copy_(new)
        return
    at, source, some = rows_to_write(rows, pool)
    pool.index_put_((at,), new[source].where(some, pool[at]))
