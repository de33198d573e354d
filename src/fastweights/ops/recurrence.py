"""linear_recurrence: one operator for all members, in front of its backends.

    S_t = (I - beta_t k_t k_t^T) Diag(e^{g_t}) S_{t-1} + beta_t k_t v_t^T
    S_t =                        Diag(e^{g_t}) S_{t-1} +        k_t v_t^T
    S_t = (I -        k_t e_t^T) Diag(e^{g_t}) S_{t-1} +        k_t v_t^T
    o_t = scale * S_t^T q_t

The first line is the delta rule, the second the additive rule (beta None),
and in the third another key, ``erase``, reads what is erased.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    DEFAULT_CHUNK_SIZE,
    check_arguments,
    check_values,
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
    recurrence_kernels_run,
)
from fastweights.ops.flops import tell_counters
from fastweights.ops.invariance import is_invariant
from fastweights.ops.registration import Operator
from fastweights.ranks.exchange import Exchange
from fastweights.ranks.group import Ranks, current
from fastweights.ranks.stretch import (
    additive_over_ranks,
    over_ranks,
    stretch_of,
    total_decay,
    with_a_token,
)
from fastweights.reference import backend as torch_backend
from fastweights.reference.backend import (
    first_states,
    per_value_head,
    widen,
)
from fastweights.reference.packing import sequences
from fastweights.reference.steps import recurrence, scan


def linear_recurrence(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, " ..."] | None = None,
    beta: Float[Tensor, "B T HV"] | None = None,
    *,
    erase: Float[Tensor, "B T _ K"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"]]:
    """Every member of the family, from linear attention to Comba.

        o, state = fw.linear_recurrence(q, k, v, g, beta)

    Args:
        q, k: [B, T, H, K], of one dtype with v (fp64, fp32, fp16 or bf16).
        v: [B, T, HV, V]; HV is a multiple of H, and value head h uses key
            head h // (HV // H).
        g: natural log of the decay, finite and <= 0: [HV] fixed,
            [B, T, HV] per head and step, or [B, T, HV, K] per key channel and
            step. fp32 or q's dtype. None: nothing is forgotten.
        beta: [B, T, HV] write strength of the delta rule, fp32 or q's
            dtype. None: the additive rule (which is not beta = 1).
        erase: [B, T, HV, K] or [B, T, H, K], q's dtype: the key that reads
            what is erased, with its strength, while k writes, and v has the
            strength of the writing. beta k with beta v is the delta rule of
            beta, which is then not given. See below for what may grow.
        scale: factor on the outputs; K**-0.5 if None.
        initial_state: [N, HV, K, V] fp32 (fp64 if q is), N = B or the
            number of packed sequences; zeros if None.
        cu_seqlens: [N + 1] int32 or int64, B = 1: sequence n is the tokens
            from cu_seqlens[n] up to cu_seqlens[n + 1], possibly none. It
            lies on q's device. Tokens after the last sequence, which fill a
            pack up to a fixed length, have outputs and gradients of 0. On a
            GPU the kernels read the offsets there, unchecked: those that do
            not rise from 0 to at most T give wrong numbers, but reach no
            other memory. On a CPU, and by PyTorch's backends, they are read
            and checked on the host.
        chunk_size: tokens per chunk, 16, 32 or 64; None chooses.
        backend: "triton" (kernels: CUDA, compute capability 8.0 or higher,
            K <= 256, not fp64), "chunkwise" (the same matrix products in
            PyTorch), "loop" (one token at a time, PyTorch) or "auto" (the
            first that runs on q's device, dtype and K).

    Returns:
        o [B, T, HV, V] in v's dtype, and the state after the last token of
        each sequence, [N, HV, K, V] in fp32 (fp64 if q is fp64). PyTorch's
        backends compute in fp32 (fp64 if q is). The kernels multiply in q's
        dtype, which in fp16 the state's entries must fit (and with a gate per
        channel 256 times k's), and fp32 as PyTorch multiplies it on CUDA: in
        TF32 where ``torch.backends.cuda.matmul.fp32_precision`` is "tf32",
        which is also what ``torch.set_float32_matmul_precision`` makes of
        "high" and "medium", else to fp32 accuracy (as always for K > 128).
        They add up in fp32, and gates, beta and the states handed over are
        fp32 throughout; with a gate per channel in half precision a step lets
        at least 2^-29 of a channel through to the next 7 tokens, unless its
        chunk decays by 2^-8192. Autocast rounds q, k and v on their way in and
        nothing else. Gradients flow to every input from both results, and
        two runs give the same bits; gradients of gradients only with backend
        "loop".

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, value or device does not fit; the message names
            the argument, what it got and what it needs.
        NotImplementedError: in the backward of a backward, under a transform
            of torch.func, or in forward-mode autograd, unless backend is
            "loop".

    What ``erase`` may be. I - k e^T has the eigenvalue 1 - e.k, and with e
    parallel to k and e.k from 0 to 2 lengthens nothing. With e = b k, |k| = 1
    and a strength b from 0 to 1 per channel the eigenvalue is between 0 and
    1, but the matrix may lengthen a state: by a factor of 2 / sqrt(3) = 1.155
    at most, where b is 1 in channels that have a third of |k|^2, and 0 in the
    others. Under strengths that are the same for all tokens that does not
    add up; under others it may, token by token, unless decays are below
    sqrt(3) / 2. Where a state grows, the inverse of its chunks does, and so
    do rounding errors; no backend bounds them. The kernels compute an inverse
    that fp16 cannot hold in TF32, but keep it in q's dtype: it must fit.

    With ``FASTWEIGHTS_CHECK=1`` in the environment when fastweights is
    imported, values are checked too: see
    :func:`fastweights.arguments.check_values`. FLOP counters count what
    :mod:`fastweights.ops.flops` says. DTensors go through
    ``torch.distributed.tensor.experimental.local_map``, sharded over heads:
    Shard(2) of what has tokens, Shard(1) of the states.
    """
    q, k, v = cast_for_autocast(q, k, v)
    if erase is not None:
        (erase,) = cast_for_autocast(erase)
    of, states = (q, k, v, g, beta, erase), (initial_state, cu_seqlens)
    options: Any = (scale, chunk_size, backend)
    if (ranks := current()) is None:
        return of_one_rank(*of, *states, *options)
    return _over_ranks(ranks, *of, *states, *options)


def of_one_rank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """linear_recurrence of sequences that are here as a whole."""
    given: Any = {"g": g, "beta": beta, "erase": erase}
    given |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    check_arguments(q, k, v, **given, scale=scale, chunk_size=chunk_size)
    check_backend(backend)
    check_values(q, k, v, **given)
    of, states = (q, k, v, g, beta, erase), (initial_state, cu_seqlens)
    return _by(RECURRENCE, *of, *states, scale, chunk_size, backend)


def _by(
    operator: Operator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    chunk_size: int | None,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """What an operator makes of arguments that have been checked."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    # Views of a wider tensor are copied once, not in forward and backward.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if g is not None and g.dim() == 1:
        # Widened before it is repeated, it gathers its gradient so.
        g = g.to(compute_dtype(q.dtype)).expand(v.shape[:3])
    if erase is not None:
        erase = per_value_head(erase, v.shape[2]).contiguous()
    inputs = (q, k, v, g, beta, erase, initial_state, cu_seqlens, scale)
    if backend == "loop":
        return _loop(*inputs)
    return operator(*inputs, chunk_size, backend, is_invariant())


def _over_ranks(
    ranks: Ranks,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """linear_recurrence of this rank's tokens, which may be none."""
    scale, chunk_size, backend = options
    check_arguments(
        q,
        k,
        v,
        g=g,
        beta=beta,
        erase=erase,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        fewest=0,
    )
    check_backend(backend)
    T = q.shape[1]
    q, k, v, g, beta, erase = with_a_token(q, k, v, g, beta, erase)
    if g is not None and g.dim() == 1:
        g = (min(T, 1) * g).expand(v.shape[:3])
    first = first_states(q, v, initial_state, cu_seqlens)
    if recurrence_kernels_run(backend, q.device, q.dtype, q.shape[-1]):
        stretch: Any = None  # nothing is to be looked up in it
        finish = cu_seqlens is not None or ranks.doubles(is_invariant())
        if initial_state is not None or finish:
            stretch = stretch_of(ranks, q, T, cu_seqlens)
            first = stretch.first(first)
        check_values(q, k, v, g=g, beta=beta, erase=erase)
        of, states = (q, k, v, g, beta, erase), (first, cu_seqlens)
        o, state = _by(ON_RANKS, *of, *states, *options)
        if finish:
            state = stretch.finish(state)
        return o[:, :T], state
    stretch = stretch_of(ranks, q, T, cu_seqlens)
    first = stretch.first(first)

    def run(v: Tensor, first: Tensor, offsets: Tensor | None) -> Any:
        return of_one_rank(q, k, v, g, beta, erase, first, offsets, *options)

    of_v = functools.partial(run, v)
    if beta is None and erase is None:
        decay = total_decay(g, q)
        o, state = additive_over_ranks(stretch, of_v, first, decay)
        return o[:, :T], state
    # Each column of a state is a recurrence of its own. V of them give B, and
    # K that begin as the identity and write nothing give M.
    own = first.index_select(0, stretch.leaving)
    R, HV, K, V = own.shape
    one = torch.eye(K, dtype=own.dtype, device=own.device)
    own = torch.cat([own, stretch.through(one.expand(R, HV, K, K))], -1)
    wide = torch.cat([v, v.new_zeros(*v.shape[:3], K)], -1)
    _, found = run(wide, stretch.map_start(own), stretch.map_offsets())
    B, M = stretch.leave(found).split([V, K], -1)
    o, state = over_ranks(stretch, of_v, first, M, B, matrix=True)
    return o[:, :T], state


def _implementation(
    asked: str, q: Tensor, chunk_size: int | None
) -> tuple[str, ModuleType, int]:
    """A backend's name, where its functions stand, and tokens per chunk."""
    backend = backend_for(asked, q)
    module: ModuleType = torch_backend
    if backend == "triton":
        from fastweights.kernels.recurrence import backend as module
    return backend, module, chunk_size or DEFAULT_CHUNK_SIZE


def _loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """One token at a time, with the gradients that autograd finds."""
    record_run("loop forward")
    if cu_seqlens is not None and cu_seqlens.is_meta:
        raise ValueError(
            "cu_seqlens: got a tensor on the device meta, need one with "
            'values, which backend="loop" reads'
        )
    with without_autocast(q):
        g = torch.zeros_like(v[..., 0]) if g is None else g
        names = ("q", "k", "v", "g", "beta", "erase")
        wide = zip(names, widen(q, k, v, g, beta, erase), strict=True)
        tokens = {name: x for name, x in wide if x is not None}
        tokens["q"] = scale * tokens["q"]

        def step(S: Tensor, *at_t: Tensor) -> tuple[Tensor, Tensor]:
            return recurrence(S, **dict(zip(tokens, at_t, strict=True)))

        state = first_states(q, v, initial_state, cu_seqlens)
        # Of no token, but o depends on the states, if nothing else does: under
        # context_parallel every rank takes part in a backward.
        outputs = [state[: len(v), :, :0].transpose(1, 2)]
        states = list(state.split(1))
        for n, t in sequences(cu_seqlens, q.shape[1]):
            inputs = (x[:, t] for x in tokens.values())
            o, last = scan(step, state[n], *inputs)
            outputs.append(o)
            states[n] = last.split(1)
        rest = v.shape[1] - sum(o.shape[1] for o in outputs)
        outputs.append(state.new_zeros(len(v), rest, *v.shape[2:]))
        return torch.cat(outputs, dim=1).to(v.dtype), torch.cat(states)


def _forward(
    q: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What a backend computes, and what its backward re-uses."""
    *inputs, chunk_size, asked, invariant = arguments
    backend, module, chunk_size = _implementation(asked, q, chunk_size)
    record_run(f"{backend} forward")
    with without_autocast(q):
        return module.forward(q, *inputs, chunk_size, invariant)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    g, beta, erase, initial_state, cu_seqlens, *options = others
    _, chunk_size, asked, invariant = options
    _, module, chunk_size = _implementation(asked, q, chunk_size)
    tokens = (q, v, g, beta, erase, cu_seqlens)
    saved = module.empty_saved(*tokens, chunk_size, invariant)
    state = first_states(q, v, initial_state, cu_seqlens)
    return v.new_empty(v.shape), state, saved


def _backward(
    do: Tensor | None, dstate: Tensor | None, q: Tensor, *arguments: Any
) -> list[Tensor]:
    """Gradients of the inputs up to initial_state that are not None."""
    *inputs, chunk_size, asked, invariant = arguments
    backend, module, chunk_size = _implementation(asked, q, chunk_size)
    record_run(f"{backend} backward")
    with without_autocast(q):
        return module.backward(do, dstate, q, *inputs, chunk_size, invariant)


def _forward_of_a_rank(
    q: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """As :func:`_forward`; a batch's final states are those of all ranks.

    Of a pack, or if maps double, they are what leaves here. Also kept are what
    ranks told and the states that enter this one.
    """
    *inputs, first, cu_seqlens, scale, chunk_size, _, invariant = arguments
    exchange = Exchange(_ranks(), q, cu_seqlens, invariant=invariant)
    entering = first.clone(memory_format=torch.contiguous_format)
    states = entering, exchange.cu_seqlens
    _, module, chunk_size = _implementation("triton", q, chunk_size)
    record_run("triton forward")
    with without_autocast(q):
        o, state, saved = module.forward(
            *(q, *inputs, *states, scale, chunk_size, invariant),
            exchange.forward,
        )
    if cu_seqlens is None and not exchange.doubles:
        state = exchange.last.to(state.dtype)
    return o, state, [*saved, exchange.told, entering]


def _fake_of_a_rank(
    q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    g, beta, erase, first, cu_seqlens, *options = others
    _, chunk_size, _, invariant = options
    _, module, chunk_size = _implementation("triton", q, chunk_size)
    tokens = (q, v, g, beta, erase, cu_seqlens)
    saved = module.empty_saved(*tokens, chunk_size, invariant, True)
    rows, K = first.shape[0] if cu_seqlens is None else 1, q.shape[-1]
    width = 1 if beta is None and erase is None else K
    row = rows, v.shape[2], K, width + v.shape[3]
    size = 1 if _ranks().doubles(invariant) else _ranks().size
    told = first.new_empty(size, *row)
    states = [torch.empty_like(first) for _ in range(2)]
    return v.new_empty(v.shape), states[0], [*saved, told, states[1]]


def _backward_of_a_rank(
    do: Tensor | None, dstate: Tensor | None, q: Tensor, *arguments: Any
) -> list[Tensor]:
    """As :func:`_backward`."""
    *inputs, _, cu_seqlens, saved, scale, chunk_size, _, invariant = arguments
    *saved, told, entering = saved
    leaving = torch.zeros_like(entering)
    finish = cu_seqlens is not None or _ranks().doubles(invariant)
    if finish and dstate is not None:
        leaving, dstate = leaving.copy_(dstate), None
    given = _ranks(), q, cu_seqlens, told, dstate
    exchange = Exchange(*given, invariant=invariant)
    states = entering, exchange.cu_seqlens
    _, module, chunk_size = _implementation("triton", q, chunk_size)
    record_run("triton backward")
    with without_autocast(q):
        return module.backward(
            *(do, leaving, q, *inputs, *states, saved),
            *(scale, chunk_size, invariant, exchange.backward),
        )


def _ranks() -> Ranks:
    """Those of the context that is open."""
    ranks = current()
    if ranks is None:
        raise RuntimeError(
            "context_parallel: got a backward outside of it, need it inside, "
            "since ranks tell each other gradients"
        )
    return ranks


def _operator(name: str, *functions: Callable) -> Operator:
    forward, fake, backward = functions
    return Operator(
        name,
        "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, "
        "Tensor? erase, Tensor? initial_state, Tensor? cu_seqlens",
        "float scale, int? chunk_size, str backend, bool invariant",
        "Tensor o, Tensor state, Tensor[] saved",
        hidden=1,
        kept=1,
        forward=forward,
        fake=fake,
        backward=backward,
        instead='only backend="loop" has',
    )


RECURRENCE = _operator("linear_recurrence", _forward, _fake, _backward)
ON_RANKS = _operator(
    "linear_recurrence_on_ranks",
    _forward_of_a_rank,
    _fake_of_a_rank,
    _backward_of_a_rank,
)
tell_counters()
