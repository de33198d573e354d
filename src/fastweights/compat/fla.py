"""flash-linear-attention's functions by name, computed by this library.

Each takes what the function of that name takes in fla-core 0.6.0, in that
order and with those defaults, and returns what it returns: o [B, T, HV, V]
in v's dtype, and the final state [N, HV, K, V] in fp32 (fp64 if q is), or
None unless output_final_state. All run where
:func:`fastweights.linear_recurrence` runs, have gradients, and compile
without a graph break. They are those that programs in use call; the others
are members of the family, ``fw.gla`` and so on. The bodies below are empty: a
signature says which function it is, MEANINGS what an argument means, and
:func:`_compute` does it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.arguments import (
    CHUNK_SIZES,
    check_flags,
    check_numbers,
    check_shapes,
    check_sizes,
    check_tensors,
    refuse_shape,
)
from fastweights.compat.packed import offsets_of
from fastweights.dtypes import compute_dtype, upcast
from fastweights.heads import l2norm
from fastweights.ops.common.registration import needs_gradient
from fastweights.ops.decode import MAX_STEP_TOKENS, decode_step
from fastweights.ops.members import (
    clamp_gate,
    comba_operands,
    gated_deltanet2_operands,
)
from fastweights.ops.recurrence import linear_recurrence

__all__ = [
    "chunk_comba",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn2",
    "chunk_kda",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "fused_recurrent_comba",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn2",
    "fused_recurrent_kda",
    "fused_recurrent_simple_gla",
]

SHAPES = {1: "[HV]", 3: "[B, T, HV]", 4: "[B, T, HV, K]"}
Arguments = dict[str, Any]

TENSORS = {
    "q": "[B, T, H, K]",
    "r": "the queries, [B, T, H, K]",
    "k": "[B, T, H, K]; of gated_delta_product [B, T n, H, K], n steps for "
    "each token, and so v and beta",
    "v": "[B, T, HV, V], HV a multiple of H",
    "g": "log decay [B, T, HV], of kda and gdn2 [B, T, HV, K]",
    "b": "of gdn2 the strength of erasing, [B, T, H, K]; of rwkv7 what is "
    "written of what a reads",
    "w": "of gdn2 the strength of writing, [B, T, HV, V]; of rwkv7 the log "
    "decay, [B, T, H, K]",
    "a": "[B, T, H, K], the key that reads before the decay",
    "p": "[B, T, H, K], the key that reads before the decay",
    "gk": "log decay [B, T, HV, K], times that of g",
    "g_gamma": "log decay [HV], instead of g",
    "beta": "[B, T, HV] write strength; 1 if None",
    "A_log": "[HV], for use_gate_in_kernel",
    "dt_bias": "[HV], of kda [HV * K], for use_gate_in_kernel, or None",
    "initial_state": "[N, HV, K, V], or None for zeros",
    "cu_seqlens": "[N + 1] offsets of packed sequences, B = 1",
    "cu_seq_lens_q": "the same, by the name that transformers gives it",
    "seq_idx": "[B, T] the document of each token, instead of offsets; the "
    "final states are then those of each row's last document",
}
FLAGS = {
    "output_final_state": "whether to return the final state",
    "use_qk_l2norm_in_kernel": "q, k and p are divided by sqrt(|x|^2 + 1e-6)",
    "use_gate_in_kernel": "the log decay is -exp(A_log) softplus(g + "
    "dt_bias), or with lower_bound that times sigmoid(exp(A_log) (g + "
    "dt_bias)), where A_log may be None",
    "use_beta_sigmoid_in_kernel": "beta is sigmoid(beta)",
    "allow_neg_eigval": "beta is 2 sigmoid(beta)",
    "safe_gate": "with use_gate_in_kernel, lower_bound has to be in [-5, 0); "
    "without, a hint, not needed",
    "state_v_first": "states are [N, HV, V, K]",
}
UNSUPPORTED = {
    "gv": "None: there is no decay per value channel",
    "reverse": "False: flip q, k, v, g and o along T instead",
    "cp_context": "None: a sequence lies on one device",
    "use_graph": "False: calls are captured in CUDA graphs as they are",
    "max_num_seqs": "None: it belongs to use_graph",
    "return_intermediate_states": "False: call it chunk by chunk instead",
}
HINTS = ("cu_seqlens_cpu", "chunk_indices", "disable_recompute")
MEANINGS = TENSORS | FLAGS | dict.fromkeys(HINTS, "a hint, not needed")
MEANINGS |= {
    name: f"not supported, {need}" for name, need in UNSUPPORTED.items()
}
MEANINGS |= {
    "scale": "factor on o; K**-0.5 if None",
    "num_householder": "n, the steps of each token",
    "lower_bound": "of the log decay, for use_gate_in_kernel",
    "chunk_size": "16, 32 or 64, of simple_gla the nearest of them; None "
    "chooses",
}

RETURNS = """
Returns:
    o [B, T, HV, V] in v's dtype, and the final state in fp32 (fp64 if q is),
    or None.

Raises:
    TypeError, ValueError, NotImplementedError: an argument does not fit, or
        is not supported; the message names it.
"""


def _fla_function(stub: Callable) -> Callable[..., tuple[Tensor, Any]]:
    """The function of FLA that has this name and signature."""
    parameters, title = inspect.signature(stub).parameters, stub.__name__
    defaults = {
        name: x.default
        for name, x in parameters.items()
        if x.default is not x.empty
    }

    @functools.wraps(stub)
    def call(*values: Any, **named: Any) -> tuple[Tensor, Any]:
        stub(*values, **named)  # Python itself refuses what does not fit
        positional = dict(zip(parameters, values, strict=False))
        return _compute(title, {**defaults, **positional, **named})

    lines = [f"    {name}: {MEANINGS[name]}." for name in parameters]
    call.__doc__ = "\n".join(
        [f"{title} of fla-core 0.6.0 (fla.ops).\n\nArgs:", *lines, RETURNS]
    )
    return call


def _compute(name: str, x: Arguments) -> tuple[Tensor, Tensor | None]:
    """The results of the function of this name for these arguments."""
    _check(name, x)
    q, k, v = x["q"] if "q" in x else x["r"], x["k"], x["v"]
    dtype, shape = v.dtype, (*q.shape[:2], *v.shape[2:])
    # q and k in fp32, say, beside v in half precision: in the wider one.
    full = torch.promote_types(torch.promote_types(q.dtype, k.dtype), dtype)
    q, k, v = q.to(full), k.to(full), v.to(full)
    if x.get("use_qk_l2norm_in_kernel"):
        q, k = l2norm(q), l2norm(k)
    names = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
    offsets, last = offsets_of(q, *[x.get(name) for name in names])
    gates = [
        gate.to(compute_dtype(full))
        if gate is not None and gate.dtype not in (torch.float32, full)
        else gate
        for gate in (_log_decay(x), _write_strength(x))
    ]
    tokens, steps = _erase_operands(name, x, q, k, v, *gates)
    if offsets is not None:
        offsets = steps * offsets
    if last is not None:  # rows of documents: one row of all of them
        tokens = [
            y if y is None or y.dim() < 3 else y.flatten(0, 1)[None]
            for y in tokens
        ]
    state = x["initial_state"]
    if state is not None:
        state = state.to(compute_dtype(full))
        state = state.mT.contiguous() if x.get("state_v_first") else state
    if (
        name.startswith("fused")
        and shape[1] <= MAX_STEP_TOKENS
        and state is not None
        and offsets is None
        and not needs_gradient(*tokens, state)
    ):
        state = state.clone()  # FLA leaves the one that it is given
        q, k, v, g, beta, e = tokens
        named = {"g": g, "beta": beta, "erase_key": e, "scale": x["scale"]}
        o = decode_step(q, k, v, state=state, **named)
    else:
        size = x.get("chunk_size")
        if name.endswith("simple_gla") and isinstance(size, int) and size > 0:
            size = min(max(size, CHUNK_SIZES[0]), CHUNK_SIZES[-1])
        o, state = linear_recurrence(
            *tokens[:5],
            erase_key=tokens[5],
            scale=x["scale"],
            initial_state=state,
            cu_seqlens=offsets,
            chunk_size=size,
        )
    o = o[:, steps - 1 :: steps].reshape(shape).to(dtype)
    if not x["output_final_state"]:
        return o, None
    state = state if last is None else state[last]
    return o, state.mT.contiguous() if x.get("state_v_first") else state


def _erase_operands(
    name: str, x: Arguments, q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Any
) -> tuple[list[Any], int]:
    """q, k, v, g, beta and erase_key, of as many steps for each token."""
    if name.endswith("gdn2"):
        b, w = x["b"].to(q.dtype), x["w"].to(q.dtype)
        v, erase_key = gated_deltanet2_operands(k, v, b, w)
        return [q, k, v, g, None, erase_key], 1
    if name.endswith("comba"):
        p = x["p"].to(q.dtype)
        p = l2norm(p) if x["use_qk_l2norm_in_kernel"] else p
        v, g, erase_key = comba_operands(v, p, g, beta)
        return [q, k, v, g, None, erase_key], 1
    if name.endswith("rwkv7"):
        # Diag(e^w) S + b a^T S, and then what k writes.
        g = clamp_gate(x["w"], q.dtype)
        a, b = x["a"].to(q.dtype), x["b"].to(q.dtype)
        e = (a / g.exp()).to(q.dtype)  # reads the state before the decay
        k = torch.stack((-b, k), 2).flatten(1, 2)
        return [_second(q), k, _second(v), _first(g), None, _first(e)], 2
    n = x.get("num_householder", 1)
    if n > 1:
        q = q.repeat_interleave(n, 1)
        if g is not None:  # of the first step
            g = F.pad(g[:, :, None], (0, 0, 0, n - 1)).flatten(1, 2)
    return [q, k, v, g, beta, None], n


def _first(y: Tensor) -> Tensor:
    """y for the first of each token's two steps, zeros for the second."""
    return F.pad(y[:, :, None], (0, 0, 0, 0, 0, 1)).flatten(1, 2)


def _second(y: Tensor) -> Tensor:
    """y for the second of each token's two steps, zeros for the first."""
    return F.pad(y[:, :, None], (0, 0, 0, 0, 1, 0)).flatten(1, 2)


def _check(title: str, x: Arguments) -> None:
    """Raise for what linear_recurrence would not refuse by this name."""
    for name, need in UNSUPPORTED.items():
        got = x.get(name)
        if got is not None and got is not False:
            raise NotImplementedError(
                f"{name}: got {type(got).__name__}, need {need}"
            )
    given = {name: y for name, y in x.items() if y is not None}
    tensors = {name: y for name, y in given.items() if name in TENSORS}
    check_tensors(**tensors)
    check_flags(**{name: y for name, y in given.items() if name in FLAGS})
    dims = {"g": 4 if title.endswith(("kda", "gdn2")) else 3, "gk": 4}
    dims |= {"g_gamma": 1, "beta": 3}
    for name, y in tensors.items():
        if y.dim() != dims.get(name, y.dim()):
            refuse_shape(name, y, SHAPES[dims[name]])
    if "num_householder" in x:
        check_sizes(num_householder=x["num_householder"])
        B, T, *sizes = x["q"].shape
        steps = (B, T * x["num_householder"], *sizes)
        check_shapes(k=(x["k"], steps))
    keys, shapes = x["k"].shape, {"w": x["v"].shape}
    if title.endswith("rwkv7"):
        shapes = {"w": keys}
    for name in ("a", "b", "p", "w"):
        if name in x:
            check_shapes(**{name: (x[name], tuple(shapes.get(name, keys)))})
    gate, bound = given.get("use_gate_in_kernel"), x.get("lower_bound")
    if gate and "g" in given:
        sizes = {"A_log": x["v"].shape[2:3], "dt_bias": x["g"].shape[2:]}
        for name, size in sizes.items():
            if name in given and given[name].numel() != size.numel():
                refuse_shape(name, given[name], f"[{size.numel()}]")
    if bound is not None:
        check_numbers("< 0", lower_bound=bound)
    because = "because of use_gate_in_kernel"
    either = " or lower_bound" if "lower_bound" in x else ""
    sigmoid = given.get("use_beta_sigmoid_in_kernel")
    offsets = "cu_seqlens" in given or "cu_seq_lens_q" in given
    if gate and "g" not in given:
        raise _wrong_value("g", None, f"it {because}")
    if gate and "A_log" not in given and bound is None:
        raise _wrong_value("A_log", None, f"it{either} {because}")
    if gate and x.get("safe_gate") and (bound is None or bound < -5):
        need = "one in [-5, 0) because of safe_gate"
        raise _wrong_value("lower_bound", bound, need)
    if "g" in given and "g_gamma" in given:
        raise _wrong_value("g_gamma", "a decay beside g", "one of them")
    if sigmoid and "beta" not in given:
        need = "it because of use_beta_sigmoid_in_kernel"
        raise _wrong_value("beta", None, need)
    if given.get("allow_neg_eigval") and not sigmoid:
        need = "False unless use_beta_sigmoid_in_kernel"
        raise _wrong_value("allow_neg_eigval", True, need)
    if "seq_idx" in given and "initial_state" in given and not offsets:
        need = "cu_seqlens for these"
        raise _wrong_value("seq_idx", "documents beside initial_state", need)


def _wrong_value(name: str, got: Any, need: str) -> ValueError:
    return ValueError(f"{name}: got {got}, need {need}")


def _log_decay(x: Arguments) -> Tensor | None:
    """The g of linear_recurrence."""
    g, by_channel = x.get("g"), x.get("gk")
    if x.get("use_gate_in_kernel"):
        g = _activate_gate(x)
    if g is not None and by_channel is not None:
        return g[..., None] + by_channel
    given = (g, x.get("g_gamma"), by_channel)
    return next((y for y in given if y is not None), None)


def _activate_gate(x: Arguments) -> Tensor:
    """The log decay that use_gate_in_kernel makes of g, in fp32 or fp64."""
    A, bias, bound = x["A_log"], x["dt_bias"], x.get("lower_bound")
    g = upcast(x["g"])
    if bias is not None:
        g = g + bias.to(g.dtype).view(g.shape[2:])
    rate = 1.0
    if A is not None:
        rate = A.to(g.dtype).exp().view(g.shape[2:3] + (1,) * (g.dim() - 3))
    if bound is None:
        return -rate * F.softplus(g)
    return bound * torch.sigmoid(rate * g)


def _write_strength(x: Arguments) -> Tensor | None:
    """The beta of linear_recurrence."""
    beta: Any = x.get("beta")
    if x.get("use_beta_sigmoid_in_kernel"):
        beta = torch.sigmoid(upcast(beta))
        return 2 * beta if x["allow_neg_eigval"] else beta
    if beta is None and "beta" in x:
        return torch.ones_like(x["v"][..., 0])
    return beta


# fmt: off
@_fla_function
def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    chunk_indices=None, cp_context=None, *, use_gate_in_kernel=False,
    A_log=None, dt_bias=None, chunk_size=None, cu_seq_lens_q=None,
    seq_idx=None,
): ...


@_fla_function
def fused_recurrent_gated_delta_rule(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None,
    initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None,
    dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, *, cu_seq_lens_q=None,
    seq_idx=None,
): ...


@_fla_function
def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, safe_gate=False, lower_bound=None,
    disable_recompute=False, return_intermediate_states=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    cp_context=None, use_graph=False, max_num_seqs=None, *, A_log=None,
    dt_bias=None, chunk_size=None, cu_seq_lens_q=None,
    seq_idx=None,
): ...


@_fla_function
def fused_recurrent_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None,
    initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None, *,
    cu_seq_lens_q=None, seq_idx=None,
): ...


@_fla_function
def chunk_gdn2(
    q, k, v, g, b, w, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None,
    safe_gate=False, lower_bound=None, disable_recompute=False,
    return_intermediate_states=False, state_v_first=False, *, A_log=None,
    dt_bias=None, chunk_size=None,
): ...


@_fla_function
def fused_recurrent_gdn2(
    q, k, v, g, b, w, A_log=None, dt_bias=None, scale=None,
    initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None,
): ...


@_fla_function
def chunk_comba(
    q, k, v, p, g, beta=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, cu_seqlens_cpu=None,
): ...


@_fla_function
def fused_recurrent_comba(
    q, k, p, v, g, beta=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
): ...


@_fla_function
def chunk_rwkv7(
    r, w, k, v, a, b, scale=1.0, initial_state=None,
    output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None,
    safe_gate=False, chunk_size=None, disable_recompute=False,
    cp_context=None, lower_bound=None,
): ...


@_fla_function
def chunk_gated_delta_product(
    q, k, v, g, beta, num_householder, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, cu_seqlens_cpu=None,
): ...


@_fla_function
def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
    output_final_state=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, *, chunk_size=None,
): ...


@_fla_function
def fused_recurrent_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
    output_final_state=False, reverse=False, state_v_first=False,
    cu_seqlens=None, *, cu_seq_lens_q=None, seq_idx=None,
): ...
# fmt: on
