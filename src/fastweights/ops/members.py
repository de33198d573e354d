"""The members of the family, each a few lines over linear_recurrence.

All take [B, T, H, D] tensors, accept the keywords of
:func:`fastweights.linear_recurrence` (scale, initial_state, cu_seqlens,
chunk_size, backend) and return the outputs and the final state.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, Unpack, cast, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    RecurrenceOperands,
    check_dims,
    check_entries_if_enabled,
    check_flags,
    check_gate,
    check_integers,
    check_names,
    check_numbers,
    check_recurrence_arguments,
    check_sizes,
    check_strength,
)
from fastweights.dtypes import cast_for_autocast, compute_dtype, upcast
from fastweights.heads import HeadStates, per_value_head
from fastweights.ops.common.backends import Backend
from fastweights.ops.normaliser import (
    check_normalised,
    features,
    recurrence_with_normaliser,
)
from fastweights.ops.recurrence import linear_recurrence
from fastweights.packing import tail_mask
from fastweights.ranks.group import current_ranks, min_tokens
from fastweights.ranks.shard import shard_of

Member = TypeVar("Member", bound=Callable[..., Any])

Keys = Float[Tensor, "B T H K"]
Values = Float[Tensor, "B T HV V"]
FeatureState = Float[Tensor, "N HV F V"]
NormalisedState = Float[Tensor, "N HV F V+1"]
PerHead = Float[Tensor, "B T HV"]
PerChannel = Float[Tensor, "B T HV K"]


class WithoutScale(TypedDict, total=False):
    """Keywords that every member shares, as in linear_recurrence."""

    initial_state: HeadStates | None
    cu_seqlens: Int[Tensor, " N+1"] | None
    chunk_size: int | None
    backend: Backend


class Options(WithoutScale, total=False):
    """Keywords of every member whose scale is K**-0.5 by default."""

    scale: float | None


ARGUMENT_DOCS = {
    "q": ", of one dtype with k and v.",
    "k": ".",
    "v": "; HV is a multiple of H.",
    "g": " natural log of the decay, <= 0, in fp32 or q's dtype.",
    "beta": " write strength, in fp32 or q's dtype.",
}
SHARED_DOCS = """\
    scale: factor on o; K**-0.5 if None.
    initial_state, cu_seqlens, chunk_size, backend: as in
        :func:`fastweights.linear_recurrence`.

Returns:
    o [B, T, HV, V] in v's dtype, and the state [N, HV, K, V] after the last
    token of each sequence, in fp32 (fp64 if q is).

Raises:
    TypeError, ValueError, NotImplementedError: as
        :func:`fastweights.linear_recurrence`.
"""


def shape_of(annotation: Any) -> str:
    """[B, T, HV] for Float[Tensor, "B T HV"], also where None may stand."""
    tensor, *_ = get_args(annotation) or (annotation,)
    return f"[{', '.join(tensor.dim_str.split())}]"


def member(function: Member) -> Member:
    """Name the options of a member: to help(), and where one is unknown.

    Arguments that its docstring does not have under Args are described as in
    ARGUMENT_DOCS, and those of all members as in SHARED_DOCS.
    """
    known = inspect.signature(linear_recurrence, eval_str=True).parameters
    signature = inspect.signature(function, eval_str=True)
    *parameters, _ = signature.parameters.values()
    annotations = {x.name: x.annotation for x in parameters}
    shared = Options.__annotations__.keys() - annotations
    parameters += [x for name, x in known.items() if name in shared]
    title, names = function.__name__, [x.name for x in parameters]

    @functools.wraps(function)
    def checked_call(*operands: Any, **options: Any) -> Any:
        check_names(title, options, names)
        return function(*operands, **options)

    summary, _, args = (inspect.getdoc(function) or "").partition(
        "\n\nArgs:\n"
    )
    lines = [
        f"    {name}: {shape_of(annotation)}{ARGUMENT_DOCS[name]}"
        for name, annotation in annotations.items()
        if name in ARGUMENT_DOCS and f"    {name}: " not in args
    ]
    lines += [args] if args else []
    positional = [
        x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD
    ]
    example = f"    o, state = fw.{title}({', '.join(positional)})"
    parts = [summary, "", example, "", "Args:", *lines, SHARED_DOCS]
    checked_call.__doc__ = "\n".join(parts)
    signature = signature.replace(parameters=parameters)
    checked_call.__signature__ = signature  # type: ignore
    return cast("Member", checked_call)


@member
def linear_attention(
    q: Keys,
    k: Keys,
    v: Values,
    *,
    feature_map: Callable[[Tensor], Tensor] | None = None,
    normalize: bool = False,
    eps: float = 1e-6,
    **options: Unpack[Options],
) -> tuple[Values, FeatureState | NormalisedState]:
    """S_t = S_{t-1} + phi(k_t) v_t^T (Katharopoulos et al. 2020).

    With normalize the outputs are divided by z_t = scale * phi(q_t) . sum
    phi(k) plus eps: v gets a last column of ones, so that the state, initial
    and final, has V + 1 columns. With features that vanish or change sign,
    z_t can be near zero; it is computed in fp32 at least, at the cost
    that :func:`fastweights.ops.normaliser.recurrence_with_normaliser` names.

    Args:
        feature_map: phi, applied to q and k first; K is then its width.
        normalize: whether o is divided.
        eps: added to what divides, >= 0.
    """
    check_dims("[B, T, heads, width]", q=q, k=k, v=v)
    q, k = features(feature_map, q, k)
    check_flags(normalize=normalize)
    check_numbers(">= 0", eps=eps)
    if not normalize:
        return linear_recurrence(q, k, v, None, None, **options)
    q, k, v = cast_for_autocast(q, k, v)
    state, offsets = options.get("initial_state"), options.get("cu_seqlens")
    states = {} if state is None else {"initial_state": state}
    check_normalised(q, k, v, None, states, **options)
    one = torch.ones_like(v[..., :1], dtype=compute_dtype(v.dtype))
    ranks = current_ranks()
    o, z, state = recurrence_with_normaliser(
        q, k, v, one, None, ranks=ranks, **options
    )
    if offsets is not None:
        T, own_offsets = q.shape[1], offsets
        if ranks is not None:
            shard: Any = shard_of(ranks, q, T, offsets)
            own_offsets = shard.cu_seqlens
        z = z.masked_fill(tail_mask(own_offsets, T)[:, None, None], 1)
    return (o / (z + eps)).to(v.dtype), state


def retnet_log_decay(
    num_heads: int,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " HV"]:
    """RetNet's fixed log decays, log(1 - 2^(-5-h)) for head h.

    Args:
        num_heads: HV, at least 1; at most 20 in fp16, 145 in fp32, where
            later heads' log decays would round to 0.
        device, dtype: of the result.

    Returns:
        [HV], all < 0.

    Raises:
        TypeError: num_heads is no integer.
        ValueError: it is below 1, or some head's log decay rounds to 0.
    """
    check_sizes(num_heads=num_heads)
    numbers = torch.finfo(dtype)
    most = -4 - round(math.log2(numbers.tiny) + math.log2(numbers.eps))
    if num_heads > most:
        raise ValueError(
            f"num_heads: got {num_heads}, need at most {most} in {dtype}, "
            f"where the log decays of heads {most} and up are 0"
        )
    h = torch.arange(num_heads, device=device, dtype=torch.float64)
    return torch.log1p(-torch.exp2(-5 - h)).to(dtype)


def lightning_log_decay(
    num_heads: int,
    layer: int,
    num_layers: int,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " HV"]:
    """Lightning Attention's fixed log decays in one layer.

    -s_h (1 - layer / (num_layers - 1) + 1e-5), layers counted from 0, as in
    MiniMax-01 (2025): later layers forget less. The s_h are ALiBi's
    slopes (Press et al. 2022): 2^(-8h/n) for h = 1 to n if the number of
    heads n is a power of two; else those of the power of two below it and
    every other one of twice that power.

    Args:
        num_heads: HV, at least 1.
        layer: its number, from 0.
        num_layers: how many layers the model has.
        device, dtype: of the result.

    Returns:
        [HV], all < 0.

    Raises:
        TypeError: a number is no integer.
        ValueError: there is no such layer, or no head.
    """
    check_sizes(num_heads=num_heads)
    check_integers(layer=layer, num_layers=num_layers)
    if not 0 <= layer < num_layers:
        raise ValueError(
            f"layer: got {layer}, need 0 to num_layers - 1 = {num_layers - 1}"
        )

    def slopes(n: int) -> Tensor:
        h = torch.arange(1, n + 1, device=device, dtype=torch.float64)
        return torch.exp2(-8 * h / n)

    n = 2 ** int(math.log2(num_heads))
    s = torch.cat([slopes(n), slopes(2 * n)[::2][: num_heads - n]])
    return -(s * (1 - layer / max(num_layers - 1, 1) + 1e-5)).to(dtype)


@member
def retention(
    q: Keys,
    k: Keys,
    v: Values,
    g: Float[Tensor, " HV"] | None = None,
    **options: Unpack[Options],
) -> tuple[Values, HeadStates]:
    """S_t = e^g S_{t-1} + k_t v_t^T, one fixed g per head (Sun et al. 2023).

    Without g it takes RetNet's own, :func:`retnet_log_decay`, in fp64 if q is.
    Lightning Attention is this with :func:`lightning_log_decay`.
    """
    if g is None:
        check_dims("[B, T, H, K]", q=q)
        check_dims("[B, T, HV, V]", v=v)
        dtype = compute_dtype(q.dtype)
        g = retnet_log_decay(v.shape[2], device=v.device, dtype=dtype)
    check_dims("[HV]", g=g)
    return linear_recurrence(q, k, v, g, None, **options)


@member
def mamba2(
    q: Keys,
    k: Keys,
    v: Values,
    g: PerHead,
    *,
    scale: float | None = 1.0,
    **options: Unpack[WithoutScale],
) -> tuple[Values, HeadStates]:
    """S_t = e^{g_t} S_{t-1} + k_t v_t^T, one g per head and step.

    Mamba-2's state space dual form (Dao and Gu 2024): q, k are its C and B,
    v its dt * x, and g its dt * A. Its scale is 1 by default, as Mamba-2's
    is, and not K**-0.5 as that of the other members.
    """
    check_dims("[B, T, HV]", g=g)
    return linear_recurrence(q, k, v, g, None, scale=scale, **options)


@member
def gated_retention(
    q: Keys,
    k: Keys,
    v: Values,
    logits: PerHead,
    *,
    temperature: float = 16.0,
    **options: Unpack[Options],
) -> tuple[Values, HeadStates]:
    """S_t = sigmoid(logits_t)^(1/temperature) S_{t-1} + k_t v_t^T.

    RetNet with a gate of the data (Sun et al. 2024).

    Args:
        logits: [B, T, HV] in fp32, half precision or q's dtype.
        temperature: > 0. It keeps an untrained gate close to 1: 0.96 where
            the logit is 0.
    """
    check_dims("[B, T, H, K]", q=q)
    check_dims("[B, T, HV, V]", v=v)
    narrow = (torch.float16, torch.bfloat16)
    check_gate("logits", logits, q, v, *narrow)
    check_entries_if_enabled("numbers", logits=logits)
    check_numbers("> 0", temperature=temperature)
    dtype = compute_dtype(logits.dtype)
    g = F.logsigmoid(logits.to(dtype)) / temperature
    return linear_recurrence(q, k, v, g, None, **options)


@member
def gla(
    q: Keys, k: Keys, v: Values, g: PerChannel, **options: Unpack[Options]
) -> tuple[Values, HeadStates]:
    """S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T (Yang et al. 2024)."""
    check_dims("[B, T, HV, K]", g=g)
    return linear_recurrence(q, k, v, g, None, **options)


@member
def deltanet(
    q: Keys, k: Keys, v: Values, beta: PerHead, **options: Unpack[Options]
) -> tuple[Values, HeadStates]:
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T.

    The delta rule of Schlag et al. 2021, chunkwise as in Yang et al. 2024.
    No step amplifies what is in the state where 0 <= beta_t |k_t|^2 <= 2;
    unit keys with beta in [0, 1] or [0, 2] are usual.
    """
    check_dims("[B, T, HV]", beta=beta)
    return linear_recurrence(q, k, v, None, beta, **options)


@member
def gated_deltanet(
    q: Keys,
    k: Keys,
    v: Values,
    g: PerHead,
    beta: PerHead,
    **options: Unpack[Options],
) -> tuple[Values, HeadStates]:
    """S_t = (I - beta_t k_t k_t^T) e^{g_t} S_{t-1} + beta_t k_t v_t^T.

    Gated DeltaNet (Yang et al. 2025) forgets by e^{g_t}, then corrects by the
    delta rule. Keys are of unit length, as it is published.

    Args:
        q: [B, T, H, K], of one dtype with k and v.
        k: [B, T, H, K].
        v: [B, T, HV, V]; HV is a multiple of H.
        g: [B, T, HV] natural log of the decay, <= 0, in fp32 or q's dtype.
        beta: [B, T, HV] write strength, in fp32 or q's dtype.
    """
    check_dims("[B, T, HV]", g=g, beta=beta)
    return linear_recurrence(q, k, v, g, beta, **options)


@member
def kda(
    q: Keys,
    k: Keys,
    v: Values,
    g: PerChannel,
    beta: PerHead,
    **options: Unpack[Options],
) -> tuple[Values, HeadStates]:
    """S_t = (I - beta_t k_t k_t^T) Diag(e^{g_t}) S_{t-1} + beta_t k_t v_t^T.

    Kimi Delta Attention (Kimi Team 2025) is Gated DeltaNet with a gate per key
    channel. Keys are of unit length, as it is published.

    Args:
        q: [B, T, H, K], of one dtype with k and v.
        k: [B, T, H, K].
        v: [B, T, HV, V]; HV is a multiple of H.
        g: [B, T, HV, K] natural log of the decay, <= 0, in fp32 or q's dtype.
        beta: [B, T, HV] write strength, in fp32 or q's dtype.
    """
    check_dims("[B, T, HV, K]", g=g)
    check_dims("[B, T, HV]", beta=beta)
    return linear_recurrence(q, k, v, g, beta, **options)


@member
def gated_deltanet2(
    q: Keys,
    k: Keys,
    v: Values,
    g: PerChannel,
    b: Float[Tensor, "B T _ K"],
    w: Values,
    **options: Unpack[Options],
) -> tuple[Values, HeadStates]:
    """S_t = (I - k_t (b_t k_t)^T) Diag(e^{g_t}) S_{t-1} + k_t (w_t v_t)^T.

    Gated DeltaNet-2 (Hatamizadeh et al. 2026): KDA with a strength per
    channel; where all of them are beta it is KDA. What may grow otherwise,
    :func:`fastweights.linear_recurrence` tells.

    Args:
        b: [B, T, HV, K] or [B, T, H, K] strength with which each key channel
            is erased, 0 to 1, in fp32 or q's dtype.
        w: [B, T, HV, V] strength with which each value channel is written, 0
            to 1, in fp32 or q's dtype.
    """
    q, k, v = cast_for_autocast(q, k, v)
    check_recurrence_arguments(
        RecurrenceOperands(q, k, v, g), min_tokens=min_tokens()
    )
    check_dims("[B, T, HV, K]", g=g)
    check_strength("b", b, q, g.shape, k.shape)
    check_strength("w", w, q, v.shape)
    check_entries_if_enabled("numbers", b=b, w=w)
    written, erase_key = gated_deltanet2_operands(k, v, b, w)
    return linear_recurrence(q, k, written, g, erase_key=erase_key, **options)


def gated_deltanet2_operands(
    k: Keys, v: Values, b: Float[Tensor, "B T _ K"], w: Values
) -> tuple[Values, Float[Tensor, "B T _ K"]]:
    """The v and erase_key of Gated DeltaNet-2's recurrence."""
    erase_key = (b * per_value_head(k, b.shape[2])).to(k.dtype)
    return (w * v).to(v.dtype), erase_key


@member
def comba(
    q: Keys,
    k: Keys,
    v: Values,
    p: Float[Tensor, "B T _ K"],
    g: PerHead,
    beta: PerHead,
    **options: Unpack[Options],
) -> tuple[Values, HeadStates]:
    """S_t = (e^{g_t} I - beta_t k_t p_t^T) S_{t-1} + beta_t k_t v_t^T.

    Comba (Hu et al. 2025): Gated DeltaNet in which another key, p, a fraction
    of k in the paper, reads what is erased, from the state before the decay.
    That is ``erase_key`` with beta e^{-g} p. A decay below e^-40, or in fp16
    below e^-10, of which the dtype keeps nothing, counts as that.

    Args:
        p: [B, T, HV, K] or [B, T, H, K], in fp32 or q's dtype.
    """
    q, k, v = cast_for_autocast(q, k, v)
    (p,) = cast_for_autocast(p)
    check_recurrence_arguments(
        RecurrenceOperands(q, k, v, g, beta), min_tokens=min_tokens()
    )
    check_dims("[B, T, HV]", g=g, beta=beta)
    check_strength("p", p, q, (*g.shape, k.shape[3]), k.shape)
    check_entries_if_enabled("numbers", p=p, beta=beta)
    written, g, erase_key = comba_operands(v, p, g, beta)
    return linear_recurrence(q, k, written, g, erase_key=erase_key, **options)


def comba_operands(
    v: Values, p: Float[Tensor, "B T _ K"], g: PerHead, beta: PerHead
) -> tuple[Values, PerHead, PerChannel]:
    """The v, g and erase_key of Comba's recurrence."""
    g, beta = clamp_gate(g, v.dtype), beta.to(compute_dtype(v.dtype))
    strength = beta * (-g).exp()
    p = per_value_head(p.to(v.dtype), v.shape[2])
    erase_key = _ScaleRows.apply(p, strength)
    return _ScaleRows.apply(v, beta), g, erase_key


class _ScaleRows(torch.autograd.Function):
    """x times a number per row, in x's dtype: one pass, no copy in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(x, factors)
        return torch.mul(x, factors[..., None], out=x.new_empty(x.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (x, factors) = grads, ctx.saved_tensors
        dfactors = (grad * x).sum(-1, dtype=factors.dtype)
        return _ScaleRows.apply(grad, factors), dfactors


def clamp_gate(g: Tensor, dtype: torch.dtype) -> Tensor:
    """g, clamped so that ``dtype`` can hold e^g and its inverse."""
    return upcast(g).clamp(min=-10.0 if dtype == torch.float16 else -40.0)
