"""flash-linear-attention's functions by name, computed by this library.

Each takes what the function of that name takes in fla-core 0.6.0, in that
order and with those defaults, and returns what it returns: o [B, T, HV, V]
in v's dtype, and the final state [N, HV, K, V] in fp32 (fp64 if q is), or
None unless output_final_state. All run where
:func:`fastweights.linear_recurrence` runs, have gradients, and compile
without a graph break. The bodies below are empty: a signature says which
function it is, MEANINGS what an argument means, and :func:`_compute` does it.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.arguments import (
    CHUNK_SIZES,
    DEFAULT_CHUNK_SIZE,
    check_flags,
    check_number,
    check_shapes,
    check_tensors,
    wrong_shape,
)
from fastweights.compat.packed import offsets_of
from fastweights.dtypes import compute_dtype
from fastweights.ops.members import linear_attention, retnet_decay
from fastweights.ops.recurrence import linear_recurrence
from fastweights.ops.registration import needs_gradient
from fastweights.reference.packing import sequences
from fastweights.serving import MAX_TOKENS, decode_step

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
]

SHAPES = {1: "[HV]", 3: "[B, T, HV]", 4: "[B, T, HV, K]"}
P = ParamSpec("P")
Arguments = dict[str, Any]

TENSORS = {
    "q": "[B, T, H, K]",
    "k": "[B, T, H, K]",
    "v": "[B, T, HV, V], HV a multiple of H",
    "g": "log decay [B, T, HV], of gla and kda [B, T, HV, K]",
    "gk": "log decay [B, T, HV, K], times that of g",
    "g_gamma": "log decay [HV], instead of g",
    "beta": "[B, T, HV] write strength; 1 if None",
    "A_log": "[HV], for use_gate_in_kernel",
    "dt_bias": "[HV], of kda [HV * K], for use_gate_in_kernel, or None",
    "initial_state": "[N, HV, K, V], or None for zeros; with normalize the "
    "pair of it and the sum of the keys [N, 1, H, K], which is also what is "
    "returned",
    "cu_seqlens": "[N + 1] offsets of packed sequences, B = 1",
    "cu_seq_lens_q": "the same, by the name that transformers gives it",
    "seq_idx": "[B, T] the document of each token, instead of offsets; the "
    "final states are then those of each row's last document",
}
FLAGS = {
    "output_final_state": "whether to return the final state",
    "use_qk_l2norm_in_kernel": "q and k are divided by sqrt(|x|^2 + 1e-6)",
    "use_gate_in_kernel": "the log decay is -exp(A_log) softplus(g + "
    "dt_bias), or with lower_bound that times sigmoid(exp(A_log) (g + "
    "dt_bias)), where A_log may be None",
    "use_beta_sigmoid_in_kernel": "beta is sigmoid(beta)",
    "allow_neg_eigval": "beta is 2 sigmoid(beta)",
    "safe_gate": "with use_gate_in_kernel, lower_bound has to be in [-5, 0); "
    "without, a hint, not needed",
    "normalize": "o is divided by scale q . (sum of the keys) + 1e-10",
    "state_v_first": "states are [N, HV, V, K]",
    "transpose_state_layout": "the older name of state_v_first, deprecated",
    "return_intermediate_states": "whether to return the state before each "
    "chunk too, [B, chunks, HV, K, V] in k's dtype, without gradients; those "
    "of packed sequences one after another, B = 1",
}
NEEDS = {
    "gv": "None: there is no decay per value channel",
    "reverse": "False: flip q, k, v, g and o along T instead",
    "cp_context": "None: a sequence lies on one device",
    "use_graph": "False: calls are captured in CUDA graphs as they are",
    "max_num_seqs": "None: it belongs to use_graph",
}
HINTS = ("cu_seqlens_cpu", "chunk_indices", "disable_recompute")
MEANINGS = TENSORS | FLAGS | dict.fromkeys(HINTS, "a hint, not needed")
MEANINGS |= {name: f"not supported, {need}" for name, need in NEEDS.items()}
MEANINGS |= {
    "scale": "factor on o; K**-0.5 if None",
    "lower_bound": "of the log decay, for use_gate_in_kernel",
    "chunk_size": "16, 32 or 64, of kda 32 or 64, of simple_gla and retention "
    "any power of 2, of which the nearest is taken; None chooses",
}

RETURNS = """
Returns:
    o [B, T, HV, V] in v's dtype, and the final state in fp32 (fp64 if q is),
    or None.

Raises:
    TypeError, ValueError, NotImplementedError: an argument does not fit, or
        is not supported; the message names it.
"""


def _function(stub: Callable[P, Any]) -> Callable[P, tuple[Any, ...]]:
    """The function of FLA that has this name and signature."""
    parameters = inspect.signature(stub).parameters
    defaults = {
        name: x.default
        for name, x in parameters.items()
        if x.default is not x.empty
    }
    title = stub.__name__

    @functools.wraps(stub)
    def call(*given: P.args, **named: P.kwargs) -> tuple[Any, ...]:
        stub(*given, **named)  # Python itself refuses what does not fit
        positional = dict(zip(parameters, given, strict=False))
        return _compute(title, {**defaults, **positional, **named})

    lines = [f"    {name}: {MEANINGS[name]}." for name in parameters]
    call.__doc__ = "\n".join(
        [f"{title} of fla-core 0.6.0 (fla.ops).\n\nArgs:", *lines, RETURNS]
    )
    return call


def _compute(name: str, x: Arguments) -> tuple[Any, ...]:
    """What the function of this name returns for these arguments."""
    _check(name, x)
    q, k, v = x["q"], x["k"], x["v"]
    dtype, shape = v.dtype, v.shape
    # q and k in fp32, say, beside v in half precision: in the wider one.
    full = torch.promote_types(torch.promote_types(q.dtype, k.dtype), dtype)
    q, k, v = q.to(full), k.to(full), v.to(full)
    if x.get("use_qk_l2norm_in_kernel"):
        q, k = _unit(q), _unit(k)
    names = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
    offsets, last = offsets_of(q, *[x.get(name) for name in names])
    options = {"scale": x["scale"], "cu_seqlens": offsets}
    if x.get("normalize"):
        o, pair = _normalised(q, k, v, x, **options)
        return o.to(dtype), pair
    tokens = [q, k, v]
    for gate in (_log_decay(name, x), _strength(x)):
        if gate is not None and gate.dtype not in (torch.float32, full):
            gate = gate.to(compute_dtype(full))
        tokens.append(gate)
    if last is not None:  # rows of documents: one row of all of them
        tokens = [
            y if y is None or y.dim() < 3 else y.flatten(0, 1)[None]
            for y in tokens
        ]
    v_first = x.get("state_v_first") or x.get("transpose_state_layout")
    state = x["initial_state"]
    if state is not None:
        state = state.to(compute_dtype(full))
        state = state.mT.contiguous() if v_first else state
    chunk_size = _chunk_size(name, x.get("chunk_size"))
    before = None
    if x.get("return_intermediate_states"):
        before = _states(tokens, state, chunk_size, **options)
    if (
        name.startswith("fused")
        and shape[1] <= MAX_TOKENS
        and state is not None
        and offsets is None
        and not needs_gradient(*tokens, state)
    ):
        state = state.clone()  # FLA leaves the one that it is given
        q, k, v, g, beta = tokens
        o = decode_step(q, k, v, state=state, g=g, beta=beta, scale=x["scale"])
    else:
        o, state = linear_recurrence(
            *tokens, initial_state=state, chunk_size=chunk_size, **options
        )
    if last is not None:
        o, state = o.reshape(shape), state[last]
    found = [state if x["output_final_state"] else None, before]
    if v_first:
        found = [y if y is None else y.mT.contiguous() for y in found]
    return o.to(dtype), *found[: 1 if before is None else 2]


def _check(title: str, x: Arguments) -> None:
    """Raise for what linear_recurrence would not refuse by this name."""
    for name, need in NEEDS.items():
        got = x.get(name)
        if got is not None and got is not False:
            raise NotImplementedError(
                f"{name}: got {type(got).__name__}, need {need}"
            )
    given = {name: y for name, y in x.items() if y is not None}
    tensors = {name: y for name, y in given.items() if name in TENSORS}
    if given.get("normalize") and isinstance(x["initial_state"], tuple):
        del tensors["initial_state"]
    check_tensors(tensors)
    check_flags(**{name: y for name, y in given.items() if name in FLAGS})
    by_channel = title.endswith("kda") or (
        title.endswith("_gla") and ("simple" not in title)
    )
    dims = {"g": 4 if by_channel else 3, "gk": 4, "g_gamma": 1, "beta": 3}
    for name, y in tensors.items():
        if y.dim() != dims.get(name, y.dim()):
            wrong_shape(name, y, SHAPES[dims[name]])
    gate, bound = given.get("use_gate_in_kernel"), x.get("lower_bound")
    if gate and "g" in given:
        sizes = {"A_log": x["v"].shape[2:3], "dt_bias": x["g"].shape[2:]}
        for name, size in sizes.items():
            if name in given and given[name].numel() != size.numel():
                wrong_shape(name, given[name], f"[{size.numel()}]")
    if bound is not None:
        check_number("lower_bound", bound, "< 0")
    because = "because of use_gate_in_kernel"
    either = " or lower_bound" if "lower_bound" in x else ""
    low = bound is None or bound < -5
    _refuse(gate and x["g"] is None, "g", None, f"it {because}")
    _refuse(
        gate and x["A_log"] is None and bound is None,
        *("A_log", None, f"it{either} {because}"),
    )
    _refuse(
        gate and x.get("safe_gate") and low,
        *("lower_bound", bound, "one in [-5, 0) because of safe_gate"),
    )
    _refuse(
        "g" in given and "g_gamma" in given,
        *("g_gamma", "a decay beside g", "one of them"),
    )
    sigmoid = "use_beta_sigmoid_in_kernel"
    _refuse(
        given.get(sigmoid) and x["beta"] is None,
        *("beta", None, f"it because of {sigmoid}"),
    )
    _refuse(
        given.get("allow_neg_eigval") and not given[sigmoid],
        *("allow_neg_eigval", True, f"False unless {sigmoid}"),
    )
    offsets = "cu_seqlens" in given or "cu_seq_lens_q" in given
    _refuse(
        "seq_idx" in given and "initial_state" in given and not offsets,
        *("seq_idx", "documents beside initial_state"),
        "cu_seqlens for these",
    )
    _refuse(
        given.get("return_intermediate_states")
        and needs_gradient(*tensors.values()),
        *("return_intermediate_states", "True where a gradient is asked for"),
        "torch.inference_mode() or torch.no_grad()",
    )
    older = "transpose_state_layout"
    if older in given:
        both = "a value beside state_v_first"
        _refuse(x["state_v_first"], older, both, "one of them")
    if older in given and not torch.compiler.is_compiling():
        warnings.warn(
            f"{older} is the older name of state_v_first",
            DeprecationWarning,
            stacklevel=4,
        )


def _refuse(wrong: object, name: str, got: object, need: str) -> None:
    """Raise ValueError, which names the argument, if it is wrong."""
    if wrong:
        raise ValueError(f"{name}: got {got}, need {need}")


def _chunk_size(name: str, asked: int | None) -> int | None:
    """The chunk_size of linear_recurrence, refused where FLA refuses it."""
    if asked is None or not isinstance(asked, int):
        return asked  # linear_recurrence refuses what is no integer
    if name.endswith(("simple_gla", "retention")):
        if asked < 1 or asked & (asked - 1):
            raise ValueError(f"chunk_size: got {asked}, need a power of 2")
        return min(max(asked, CHUNK_SIZES[0]), CHUNK_SIZES[-1])
    sizes = CHUNK_SIZES[1:] if name.endswith("kda") else CHUNK_SIZES
    if asked not in sizes:
        raise ValueError(f"chunk_size: got {asked}, need one of {sizes}")
    return asked


def _states(
    tokens: list[Tensor | None],
    state: Tensor | None,
    chunk_size: int | None,
    scale: float | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """The state before each chunk, one call of the recurrence per chunk."""
    q, k, v = (y for y in tokens[:3] if y is not None)
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state is None:
        shape = (N, v.shape[2], q.shape[3], v.shape[3])
        state = q.new_zeros(shape, dtype=compute_dtype(q.dtype))
    size, before = chunk_size or DEFAULT_CHUNK_SIZE, []
    for n, span in sequences(cu_seqlens, q.shape[1]):
        S, row = state[n], []
        start, stop, _ = span.indices(q.shape[1])
        for t in range(start, stop, size):
            row.append(S.to(k.dtype))
            chunk = slice(t, min(t + size, stop))
            part: Any = [y if y is None else y[:, chunk] for y in tokens]
            _, S = linear_recurrence(*part, initial_state=S, scale=scale)
        before.append(torch.stack(row, 1))
    return torch.cat(before, 1)


def _normalised(
    q: Tensor, k: Tensor, v: Tensor, x: Arguments, **options: Any
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """linear_attn with normalize; the key sum is our state's last column."""
    state = x["initial_state"]
    if state is not None:
        if not isinstance(state, tuple) or len(state) != 2:
            raise ValueError(
                f"initial_state: got {type(state).__name__}, need the pair "
                "of a state [N, H, K, V] and a key sum [N, 1, H, K] because "
                "of normalize"
            )
        cu_seqlens, keys = options["cu_seqlens"], q.shape[2:]
        N = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        need = (N, *keys, v.shape[3]), (N, 1, *keys)
        for y, shape in zip(state, need, strict=True):
            check_shapes({"initial_state": (y, shape)})
        S, total = (y.to(compute_dtype(q.dtype)) for y in state)
        state = torch.cat([S, total.movedim(1, -1)], -1)
    o, state = linear_attention(
        q, k, v, normalize=True, eps=1e-10, initial_state=state, **options
    )
    if not x["output_final_state"]:
        return o, None
    S, total = state.split([v.shape[-1], 1], -1)
    return o, (S, total.movedim(-1, 1))


def _unit(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6) along its last dimension, in x's dtype."""
    full = x.to(compute_dtype(x.dtype))
    rest = full.square().sum(-1, keepdim=True)
    return (full * (rest + 1e-6).rsqrt()).to(x.dtype)


def _log_decay(name: str, x: Arguments) -> Tensor | None:
    """The g of linear_recurrence."""
    if name.endswith("retention"):
        v = x["v"]
        dtype = compute_dtype(v.dtype)
        return retnet_decay(v.shape[2], device=v.device, dtype=dtype)
    g, by_channel = x.get("g"), x.get("gk")
    if x.get("use_gate_in_kernel"):
        g = _activated(x)
    if g is not None and by_channel is not None:
        return g[..., None] + by_channel
    given = (g, x.get("g_gamma"), by_channel)
    return next((y for y in given if y is not None), None)


def _activated(x: Arguments) -> Tensor:
    """The log decay that use_gate_in_kernel makes of g, in fp32 or fp64."""
    A, bias, bound = x["A_log"], x["dt_bias"], x.get("lower_bound")
    g = x["g"].to(compute_dtype(x["g"].dtype))
    if bias is not None:
        g = g + bias.to(g.dtype).view(g.shape[2:])
    rate = 1.0
    if A is not None:
        rate = A.to(g.dtype).exp().view(g.shape[2:3] + (1,) * (g.dim() - 3))
    if bound is None:
        return -rate * F.softplus(g)
    return bound * torch.sigmoid(rate * g)


def _strength(x: Arguments) -> Tensor | None:
    """The beta of linear_recurrence."""
    beta: Any = x.get("beta")
    if x.get("use_beta_sigmoid_in_kernel"):
        beta = torch.sigmoid(beta.to(compute_dtype(beta.dtype)))
        return 2 * beta if x["allow_neg_eigval"] else beta
    if beta is None and "beta" in x:
        return torch.ones_like(x["v"][..., 0])
    return beta


# fmt: off
@_function
def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    chunk_indices=None, cp_context=None, *, use_gate_in_kernel=False,
    A_log=None, dt_bias=None, chunk_size=None, cu_seq_lens_q=None,
    seq_idx=None, transpose_state_layout=None,
): ...


@_function
def fused_recurrent_gated_delta_rule(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None,
    initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None,
    dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, *, cu_seq_lens_q=None,
    seq_idx=None, transpose_state_layout=None,
): ...


@_function
def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, safe_gate=False, lower_bound=None,
    disable_recompute=False, return_intermediate_states=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    cp_context=None, use_graph=False, max_num_seqs=None, *, A_log=None,
    dt_bias=None, chunk_size=None, cu_seq_lens_q=None,
    seq_idx=None, transpose_state_layout=None,
): ...


@_function
def fused_recurrent_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None,
    initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None, *,
    cu_seq_lens_q=None,
    seq_idx=None, transpose_state_layout=None,
): ...


@_function
def chunk_delta_rule(
    q, k, v, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, *,
    chunk_size=None,
): ...


@_function
def fused_recurrent_delta_rule(
    q, k, v, beta=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None,
): ...


@_function
def chunk_gla(
    q, k, v, g, scale=None, initial_state=None, output_final_state=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
): ...


@_function
def fused_recurrent_gla(
    q, k, v, gk=None, gv=None, scale=None, initial_state=None,
    output_final_state=False, reverse=False, state_v_first=False,
    cu_seqlens=None, *, transpose_state_layout=None,
): ...


@_function
def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
    output_final_state=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, *, chunk_size=None,
): ...


@_function
def fused_recurrent_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
    output_final_state=False, reverse=False, state_v_first=False,
    cu_seqlens=None, *, cu_seq_lens_q=None, seq_idx=None,
    transpose_state_layout=None,
): ...


@_function
def chunk_retention(
    q, k, v, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, *, chunk_size=None,
): ...


@_function
def fused_recurrent_retention(
    q, k, v, scale=None, initial_state=None, output_final_state=False,
    reverse=False, state_v_first=False, cu_seqlens=None,
    *, transpose_state_layout=None,
): ...


@_function
def chunk_linear_attn(
    q, k, v, scale=None, initial_state=None, output_final_state=False,
    normalize=True, cu_seqlens=None,
): ...


@_function
def fused_recurrent_linear_attn(
    q, k, v, scale=None, initial_state=None, output_final_state=False,
    reverse=False, normalize=False, cu_seqlens=None,
): ...
# fmt: on
