"""decode_step: the recurrence for one new token or a few, in place.

mLSTM, normalised linear attention and Mamba's selective scan compute
something beside the recurrence, and have steps of their own, in their files.
All steps change the state that they are given, have no gradients, and take
``rows``: the state is then a pool of N states, and sequence b has row rows[b]
of it. A row that is none of 0 to N - 1 reads and writes nothing, and its
outputs are 0. A state may come from torch.inference_mode.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    INDEX_DTYPES,
    RecurrenceOperands,
    check_dtypes,
    check_recurrence_arguments,
    check_tensors,
    check_values_if_enabled,
    is_readable,
    refuse_shape,
)
from fastweights.dtypes import (
    cast_for_autocast,
    compute_dtype,
    without_autocast,
)
from fastweights.heads import per_value_head, state_shape
from fastweights.ops.common.backends import (
    Backend,
    check_backend,
    record_run,
    recurrence_backend,
)
from fastweights.ops.common.registration import (
    needs_gradient,
    operator_or_function,
    register,
)
from fastweights.ops.common.rows import (
    Rows,
    check_rows_of_states,
    clamp_rows,
    write_rows,
)
from fastweights.ranks.group import refuse_ranks
from fastweights.torch_backend import decode as torch_decode

MAX_STEP_TOKENS = 16

NARROW_STATE_DTYPES = (torch.bfloat16,)
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
    erase_key: Float[Tensor, "B T _ K"] | None = None,
    rows: Rows | None = None,
    num_accepted: Int[Tensor, " B"] | None = None,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Float[Tensor, "B T HV V"]:
    """:func:`linear_recurrence` for 1 to 16 new tokens of each sequence.

    The table says what continues each member. It takes the scale that the
    member was given, if any. phi is the member's feature map; logits are fp32;
    retnet_log_decay is what retention takes without a g, and has
    dtype=torch.float64 if q has. g, beta and erase_key go by name, since
    members differ in which of them they have. beta_ is beta[..., None], and g_
    likewise.

        linear_attention  phi(q), phi(k), v
        retention         q, k, v, g=retnet_log_decay(HV)
        gated_retention   q, k, v, g=logsigmoid(logits) / temperature
        mamba2            q, k, v, g=g, scale=1.0
        gla               q, k, v, g=g
        deltanet          q, k, v, beta=beta
        gated_deltanet    q, k, v, g=g, beta=beta
        kda               q, k, v, g=g, beta=beta
        gated_deltanet2   q, k, w * v, g=g, erase_key=b * k
        comba             q, k, beta_ * v, g=g, erase_key=beta_ * exp(-g_) * p

    mlstm, linear_attention with normalize and selective_scan do more than the
    recurrence: :mod:`fastweights.serving` has their steps.

        o = fw.decode_step(q, k, v, g=g, beta=beta, state=state)

    Args:
        q, k, v, g, beta, erase_key, scale: as in linear_recurrence, T <= 16.
        state: [B, HV, K, V] fp32 (fp64 if q is), the state before the first
            of the tokens. It is updated in place, to the one after the
            last; it need not be contiguous, and may come from
            torch.inference_mode. In bf16 it has half the bytes, and is
            rounded once per call, at the cost that
            :data:`NARROW_STATE_DTYPES` states.
        rows: [B] int32 or int64, for a state [N, HV, K, V] that is a pool:
            sequence b has row rows[b] of it, and the other rows stay as they
            are. No two sequences may have the same row, which is checked
            on a CPU. One whose row is none of 0 to N - 1 (-1, say, where a
            batch is filled up) reads and writes no state; its outputs are 0.
        num_accepted: [B] int32 or int64, 0 to T, which is checked on a CPU:
            how many tokens of each sequence its state takes in; None: all.
            There are outputs for all tokens. So a model reads guesses of what
            comes next, and takes in those that turn out right.
        backend: as in linear_recurrence. "triton" is one kernel that reads
            and writes the state once; "torch" and "loop" are both the
            loop over tokens in PyTorch.

    Returns:
        o [B, T, HV, V] in v's dtype. Arithmetic is in fp32 (fp64 if q is),
        under autocast too, which rounds q, k, v and erase_key on their way in
        and nothing else. No gradients.

    Raises:
        TypeError: an argument is of the wrong type or dtype, or g or beta
            came without its name.
        ValueError: a shape, value or device does not fit, or a gradient is
            needed; the message names the argument, what it got and what it
            needs.
    """
    refuse_ranks("decode_step")
    q, k, v = cast_for_autocast(q, k, v)
    if erase_key is not None:
        (erase_key,) = cast_for_autocast(erase_key)
    operands = RecurrenceOperands(q, k, v, g, beta, erase_key, state)
    _check(operands, rows, scale, backend)
    if erase_key is not None:
        erase_key = per_value_head(erase_key, v.shape[2])
    if num_accepted is not None:
        check_num_accepted("num_accepted", num_accepted, q=q)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    tensors = (q, k, v, g, beta, erase_key, state, rows, num_accepted)
    if torch.compiler.is_compiling():
        return DECODE(*tensors, scale, backend)
    step = operator_or_function(DECODE, _decode, tensors)
    if state.is_inference():
        # Only there may it be changed; what is returned goes anywhere.
        with torch.inference_mode():
            o = step(*tensors, scale, backend)
        return o if torch.is_inference_mode_enabled() else o.clone()
    o = step(*tensors, scale, backend)
    # A graph that has saved it must notice.
    torch.autograd.graph.increment_version(state)
    return o


def _check(
    operands: RecurrenceOperands,
    rows: Tensor | None,
    scale: float | None,
    backend: Backend,
) -> None:
    """Raise for the first argument that does not fit the others."""
    q, _, v, *_, state, _ = operands
    if state is None:
        raise TypeError("state: got NoneType, need a Tensor")
    narrow = narrow_dtypes(q)
    check_recurrence_arguments(
        operands if rows is None else operands._replace(initial_state=None),
        scale=scale,
        state_name="state",
        state_dtypes=narrow,
    )
    if rows is not None:
        check_rows_of_states(
            q, {"state": state}, rows, state_shape(q, v), extra_dtypes=narrow
        )
    if q.shape[1] > MAX_STEP_TOKENS:
        raise ValueError(
            f"q: got shape {list(q.shape)}, need [B, T, H, K] with T <= "
            f"{MAX_STEP_TOKENS}; for more tokens there is linear_recurrence"
        )
    if not state.is_contiguous() and _overlaps(state):
        raise ValueError(
            f"state: got strides {list(state.stride())}, need a tensor whose "
            "elements share no memory, such as its clone()"
        )
    if torch.is_grad_enabled():  # else a token would look through all
        refuse_gradients(**operands.differentiable("state"))
    check_backend(backend)
    check_values_if_enabled(operands, "state")


def narrow_dtypes(q: Tensor) -> tuple[torch.dtype, ...]:
    """Dtypes other than fp32 that a state may have for this q."""
    fp64 = isinstance(q, Tensor) and q.dtype == torch.float64
    return () if fp64 else NARROW_STATE_DTYPES


def check_num_accepted(name: str, num_accepted: Tensor, **of: Tensor) -> None:
    """Raise unless num_accepted is [B], 0 to T each, for [B, T, ...].

    int32 or int64, and T <= 16.
    """
    ((first, x),) = of.items()
    (B, T), values = x.shape[:2], [0]
    check_tensors(**{name: num_accepted})
    check_dtypes(
        {**of, name: num_accepted}, {first: (x.dtype,), name: INDEX_DTYPES}
    )
    if T > MAX_STEP_TOKENS:
        raise ValueError(
            f"{name}: got {T} tokens, need at most {MAX_STEP_TOKENS} with it"
        )
    if num_accepted.shape != (B,):
        refuse_shape(name, num_accepted, f"[{B}]")
    if is_readable(num_accepted):
        values = num_accepted.tolist()
    if not all(0 <= n <= T for n in values):
        raise ValueError(f"{name}: got {values}, need 0 to {T}")


def refuse_gradients(**tensors: Tensor | None) -> None:
    """Raise for the first tensor that a gradient is asked for."""
    for name, x in tensors.items():
        if needs_gradient(x):
            raise ValueError(
                f"{name}: got a tensor that requires a gradient, need one "
                "that does not, or torch.no_grad(): a step has none"
            )


def _overlaps(x: Tensor) -> bool:
    """Whether some elements of x share memory, as far as strides tell.

    None do if each stride steps over all that smaller ones reach; else it
    counts as if some did.
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
    erase_key: Tensor | None,
    state: Tensor,
    rows: Tensor | None,
    num_accepted: Tensor | None,
    scale: float,
    backend: Backend,
) -> Tensor:
    """Return outputs; ``state`` becomes the one after what is accepted."""
    chosen = recurrence_backend(backend, q)
    record_run(f"{chosen} decode")
    if chosen == "triton":
        from fastweights.kernels.decode import decode

        given = q, k, v, g, beta, state, rows, scale
        return decode(*given, erase_key=erase_key, num_accepted=num_accepted)
    if g is not None and g.dim() == 1:
        g = g.expand(v.shape[:3])
    with without_autocast(q):
        x = torch_decode.expand_inputs(q, k, v, g, beta, erase_key)
        # All sequences, those without a row as well: nothing here waits for
        # the device, or depends on how many there are of them.
        S = state if rows is None else state[clamp_rows(rows, state)]
        S = S.to(compute_dtype(q.dtype))
        o = torch_decode.decode(S, x, num_accepted, scale).to(v.dtype)
        if S is not state:
            write_rows(state, S.to(state.dtype), rows)
        if rows is not None:
            inside = (rows >= 0) & (rows < len(state))
            o = o.where(inside[:, None, None, None], 0)
        return o


DECODE = register(
    "decode_step(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, "
    "Tensor? erase_key, Tensor(a!) state, Tensor? rows, Tensor? num_accepted, "
    "float scale, str backend) -> Tensor",
    _decode,
    lambda q, k, v, *_: v.new_empty(v.shape),
)
