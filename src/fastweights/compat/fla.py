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
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.decoding import MAX_TOKENS, decode_step
from fastweights.family import linear_attention, retnet_decay
from fastweights.ops import linear_recurrence
from fastweights.reference.backend import wide

P = ParamSpec("P")
Arguments = dict[str, Any]

MEANINGS = {
    "q": "[B, T, H, K]",
    "k": "[B, T, H, K]",
    "v": "[B, T, HV, V], HV a multiple of H",
    "g": "log decay [B, T, HV], of gla and kda [B, T, HV, K]",
    "gk": "log decay [B, T, HV, K], times that of g",
    "gv": "not supported: None",
    "g_gamma": "log decay [HV], instead of g",
    "beta": "[B, T, HV] write strength; 1 if None",
    "A_log": "[HV], for use_gate_in_kernel",
    "dt_bias": "[HV], of kda [HV * K], for use_gate_in_kernel, or None",
    "scale": "factor on o; K**-0.5 if None",
    "initial_state": "[N, HV, K, V], or None for zeros; with normalize the "
    "pair of it and the sum of the keys [N, 1, H, K], which is also what is "
    "returned",
    "output_final_state": "whether to return the final state",
    "use_qk_l2norm_in_kernel": "q and k are divided by sqrt(|x|^2 + 1e-6)",
    "use_gate_in_kernel": "the log decay is -exp(A_log) softplus(g + "
    "dt_bias), or with lower_bound that times sigmoid(exp(A_log) (g + "
    "dt_bias)), where A_log may be None",
    "use_beta_sigmoid_in_kernel": "beta is sigmoid(beta)",
    "allow_neg_eigval": "beta is 2 sigmoid(beta)",
    "safe_gate": "with use_gate_in_kernel, lower_bound has to be in [-5, 0); "
    "without, a hint, not needed",
    "lower_bound": "of the log decay, for use_gate_in_kernel",
    "normalize": "o is divided by scale q . (sum of the keys) + 1e-10",
    "state_v_first": "states are [N, HV, V, K]",
    "cu_seqlens": "[N + 1] offsets of packed sequences, B = 1",
    "cu_seq_lens_q": "the same, by the name that transformers gives it",
    "chunk_size": "16, 32 or 64; None chooses",
    "cu_seqlens_cpu": "a hint, not needed",
    "chunk_indices": "a hint, not needed",
    "disable_recompute": "a hint, not needed",
    "reverse": "not supported: False",
    "return_intermediate_states": "not supported: False",
    "cp_context": "not supported: None",
    "use_graph": "not supported: False",
    "max_num_seqs": "not supported: None",
}
NEEDS = {
    "gv": "None: there is no decay per value channel",
    "reverse": "False: flip q, k, v, g and o along T instead",
    "return_intermediate_states": "False: only the last state is returned",
    "cp_context": "None: a sequence lies on one device",
    "use_graph": "False: calls are captured in CUDA graphs as they are",
    "max_num_seqs": "None: it belongs to use_graph",
}


def _function(stub: Callable[P, Any]) -> Callable[P, tuple[Tensor, Any]]:
    """The function of FLA that has this name and signature."""
    parameters = inspect.signature(stub).parameters
    defaults = {
        name: x.default
        for name, x in parameters.items()
        if x.default is not x.empty
    }
    names, title = tuple(parameters), stub.__name__

    @functools.wraps(stub)
    def call(*given: P.args, **named: P.kwargs) -> tuple[Tensor, Any]:
        stub(*given, **named)  # Python itself refuses what does not fit
        positional = dict(zip(names, given, strict=False))
        return _compute(title, {**defaults, **positional, **named})

    lines = "\n".join(f"{name}: {MEANINGS[name]}" for name in names)
    call.__doc__ = (
        f"{title} of fla-core 0.6.0 (fla.ops).\n\n{lines}\n\n"
        "Raises ValueError or NotImplementedError, which name the argument, "
        "and what\nfastweights.linear_recurrence raises."
    )
    return call


def _compute(name: str, x: Arguments) -> tuple[Tensor, Any]:
    """What the function of this name returns for these arguments."""
    for argument, need in NEEDS.items():
        got = x.get(argument)
        if got is not None and got is not False:
            raise NotImplementedError(
                f"{argument}: got {type(got).__name__}, need {need}"
            )
    q, k, v = x["q"], x["k"], x["v"]
    if x.get("use_qk_l2norm_in_kernel"):
        q, k = _unit(q), _unit(k)
    options = {"scale": x["scale"], "cu_seqlens": _offsets(x)}
    if x.get("normalize"):
        return _normalised(q, k, v, x, **options)
    g = _log_decay(name, x)
    beta = _strength(x) if "beta" in x else None
    g, beta = (_fitting(y, q) for y in (g, beta))
    state = x["initial_state"]
    v_first = x.get("state_v_first")
    if state is not None:
        state = state.to(wide(q.dtype))
        state = state.mT.contiguous() if v_first else state
    few = name.startswith("fused") and q.shape[1] <= MAX_TOKENS
    if (
        few
        and state is not None
        and options["cu_seqlens"] is None
        and not _differentiable(q, k, v, g, beta, state)
    ):
        state = state.clone()  # FLA leaves the one that it is given
        o = decode_step(q, k, v, state=state, g=g, beta=beta, scale=x["scale"])
    else:
        o, state = linear_recurrence(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            chunk_size=x.get("chunk_size"),
            **options,
        )
    if not x["output_final_state"]:
        return o, None
    return o, state.mT.contiguous() if v_first else state


def _normalised(
    q: Tensor, k: Tensor, v: Tensor, x: Arguments, **options: Any
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """linear_attn with normalize; the key sum is our state's last column."""
    state = x["initial_state"]
    if state is not None:
        if not isinstance(state, tuple):
            raise ValueError(
                f"initial_state: got {type(state).__name__}, need the pair "
                "of a state [N, H, K, V] and a key sum [N, 1, H, K] because "
                "of normalize"
            )
        S, total = (y.to(wide(q.dtype)) for y in state)
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
    full = x.to(wide(x.dtype))
    rest = full.square().sum(-1, keepdim=True)
    return (full * (rest + 1e-6).rsqrt()).to(x.dtype)


def _offsets(x: Arguments) -> Tensor | None:
    """The offsets of packed sequences, by either of their names."""
    ours, theirs = x["cu_seqlens"], x.get("cu_seq_lens_q")
    if ours is not None and theirs is not None:
        raise ValueError(
            "cu_seq_lens_q: got offsets beside cu_seqlens, need one of them"
        )
    return theirs if ours is None else ours


def _log_decay(name: str, x: Arguments) -> Tensor | None:
    """The g of linear_recurrence."""
    if name.endswith("retention"):
        v = x["v"]
        dtype = wide(v.dtype)
        return retnet_decay(v.shape[2], device=v.device, dtype=dtype)
    g, fixed, by_channel = x.get("g"), x.get("g_gamma"), x.get("gk")
    if x.get("use_gate_in_kernel"):
        g = _activated(g, x)
    if g is not None and fixed is not None:
        raise ValueError("g_gamma: got a decay beside g, need one of them")
    if g is not None and by_channel is not None:
        return g[..., None] + by_channel
    return next((y for y in (g, fixed, by_channel) if y is not None), None)


def _activated(g: Tensor | None, x: Arguments) -> Tensor:
    """The log decay that use_gate_in_kernel makes of g, in fp32 or fp64."""
    A, bias, bound = x["A_log"], x["dt_bias"], x.get("lower_bound")
    if g is None:
        raise ValueError("g: got None, need it because of use_gate_in_kernel")
    if A is None and bound is None:
        need = " or lower_bound" if "lower_bound" in x else ""
        raise ValueError(
            f"A_log: got None, need it{need} because of use_gate_in_kernel"
        )
    if x.get("safe_gate") and not (bound is not None and -5 <= bound < 0):
        raise ValueError(
            f"lower_bound: got {bound}, need one in [-5, 0) because of "
            "safe_gate"
        )
    g = g.to(wide(g.dtype))
    if bias is not None:
        g = g + bias.to(g.dtype).view(g.shape[2:])
    rate = 1.0
    if A is not None:
        rate = A.to(g.dtype).exp().view(g.shape[2:3] + (1,) * (g.dim() - 3))
    if bound is None:
        return -rate * F.softplus(g)
    return bound * torch.sigmoid(rate * g)


def _strength(x: Arguments) -> Tensor:
    """The beta of linear_recurrence."""
    beta, negative = x["beta"], x.get("allow_neg_eigval")
    if not x.get("use_beta_sigmoid_in_kernel"):
        if negative:
            raise ValueError(
                "allow_neg_eigval: got True, need False unless "
                "use_beta_sigmoid_in_kernel"
            )
        return torch.ones_like(x["v"][..., 0]) if beta is None else beta
    if beta is None:
        raise ValueError(
            "beta: got None, need it because of use_beta_sigmoid_in_kernel"
        )
    beta = torch.sigmoid(beta.to(wide(beta.dtype)))
    return 2 * beta if negative else beta


def _fitting(x: Tensor | None, q: Tensor) -> Tensor | None:
    """A gate or strength in a dtype that linear_recurrence takes with q."""
    if x is None or x.dtype in (torch.float32, q.dtype):
        return x
    return x.to(wide(q.dtype))


def _differentiable(*tensors: Tensor | None) -> bool:
    """Whether a gradient is asked for, which decode_step does not have."""
    return torch.is_grad_enabled() and any(
        [x is not None and x.requires_grad for x in tensors]
    )


# fmt: off
@_function
def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    chunk_indices=None, cp_context=None, *, use_gate_in_kernel=False,
    A_log=None, dt_bias=None, chunk_size=None, cu_seq_lens_q=None,
): ...


@_function
def fused_recurrent_gated_delta_rule(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None,
    initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None,
    dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, *, cu_seq_lens_q=None,
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
): ...


@_function
def fused_recurrent_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None,
    initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None, *,
    cu_seq_lens_q=None,
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
    cu_seqlens=None,
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
    cu_seqlens=None,
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
