"""A few tokens per sequence: on a GPU a layer is three or four launches.

What a token costs is the reading of weights and states. Called one by one,
modules make thirty launches of a block, each of which costs more than what it
reads. On a GPU a product has the norm before it and what comes behind it in
its own kernel (:mod:`fastweights.kernels.gemv`), and the recurrence its gates
and unit lengths (:mod:`fastweights.kernels.decode`). Gated DeltaNet is three
launches, KDA four, and the MLP behind it two; with more than 16 tokens in
all the three norms are launches of their own. Elsewhere a layer's one token
is as few of PyTorch's operators as there can be (:mod:`.fused_step_in_torch`).
Values are those of the modules, rounded in fewer places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fastweights import torch_internals
from fastweights.arguments import MAX_KERNEL_K, TENSOR_TYPES
from fastweights.dtypes import under_autocast
from fastweights.layers.common import fused_step_in_torch as in_torch
from fastweights.layers.common.convolution import ShortConvolution
from fastweights.layers.common.gates import Decay
from fastweights.layers.common.layer import Hidden, Layer
from fastweights.layers.common.layer_arguments import check_input
from fastweights.layers.common.plain_modules import is_untouched
from fastweights.layers.common.state import LayerState
from fastweights.ops.common.backends import record_run, resolve_backend
from fastweights.ranks.group import current_ranks

MAX_FUSED_SEQUENCES = 256
"""The most sequences: more are bound by arithmetic, at which BLAS is best."""

MAX_FUSED_TOKENS = 16
"""The most tokens in all, if sequences have several: one tile holds them."""


def fits_fused_step(x: Tensor) -> bool:
    """Whether these tokens may be computed without calling the modules."""
    B, T, _ = x.shape
    fits = B <= MAX_FUSED_SEQUENCES if T == 1 else B * T <= MAX_FUSED_TOKENS
    return (
        fits
        and x.is_contiguous()
        and not torch.is_grad_enabled()
        and current_ranks() is None
        and not under_autocast(x)
        and not torch_internals.is_traced()
        and (T == 1 or runs_kernels(x))
    )


def runs_kernels(x: Tensor) -> bool:
    """Whether Triton's kernels compute x's tokens, not PyTorch's operators."""
    return resolve_backend("auto", x.device, x.dtype) == "triton"


def are_fusable(x: Tensor, modules: Sequence[nn.Module | None]) -> bool:
    """Whether a kernel of a step may use the modules' parameters for x.

    That asks for more than is_plain: nobody has touched the modules or their
    parts, and their parameters are contiguous on x's device. A decay's
    may be of another dtype than x's, and only a convolution has a bias.
    """
    for module in modules:
        if module is None:
            continue
        module_class, parts = type(module), [*module._modules.values()]
        if not (is_untouched(module, module_class) and are_fusable(x, parts)):
            return False
        for name, parameter in module._parameters.items():
            if parameter is None and name == "bias":
                continue
            if (
                parameter is None
                or type(parameter) not in TENSOR_TYPES
                or parameter.device != x.device
                or not parameter.is_contiguous()
                or (parameter.dtype != x.dtype and module_class is not Decay)
                or (name == "bias" and module_class is not ShortConvolution)
            ):
                return False
    return True


def is_fusable_layer(
    layer: Any,
    layer_class: type[Layer],
    x: Hidden,
    modules: Sequence[nn.Module | None],
) -> bool:
    """Whether the layer is of this class itself, its modules fusable."""
    untouched = is_untouched(layer, layer_class, Layer)
    return untouched and are_fusable(x, modules)


def project_and_add(
    x: Hidden, o: Float[Tensor, "B T C"], projection: Any, **options: Any
) -> Hidden:
    """x + projection(o); the options are :func:`gemv`'s, applied to o."""
    if not runs_kernels(x):
        return in_torch.project_and_add(x, o, projection)
    from fastweights.kernels.gemv import gemv

    y = gemv(
        o.flatten(0, 1), projection.weight, residual=x.flatten(0, 1), **options
    )
    return y.view_as(x)


def norm_and_project(
    x: Hidden, norm: nn.RMSNorm, modules: Sequence[Any], **options: Any
) -> list[Any]:
    """The modules' outputs for norm(x), [B, T, N] each; a None has None.

    A module is a product, or two in a row (low_rank): the second ones of all
    modules are another launch.
    """
    if not runs_kernels(x):
        return in_torch.norm_and_project(x, norm, modules, **options)
    from fastweights.kernels.gemv import gemv

    present = [m for m in modules if m is not None]
    first: list[Any] = [
        m[0] if isinstance(m, nn.Sequential) else m for m in present
    ]
    y = gemv(
        x.flatten(0, 1),
        *(m.weight for m in first),
        norm=norm.weight,
        eps=norm_eps(norm, x),
        **options,
    )
    second = [i for i, m in enumerate(present) if isinstance(m, nn.Sequential)]
    parts = [y]
    if len(first) > 1:
        parts = list(y.split([len(m.weight) for m in first], -1))
    if second:
        weights = [present[i][1].weight for i in second]
        before = y.storage_offset()
        sources = [int(parts[i].storage_offset() - before) for i in second]
        y = gemv(y, *weights, sources=sources)
        projected = y.split([len(w) for w in weights], -1)
        for i, part in zip(second, projected, strict=True):
            parts[i] = part
    results = iter(parts)
    return [
        None if m is None else next(results).unflatten(0, x.shape[:2])
        for m in modules
    ]


def norm_eps(norm: nn.RMSNorm, x: Tensor) -> float:
    """The eps that PyTorch's RMSNorm adds."""
    return torch.finfo(x.dtype).eps if norm.eps is None else norm.eps


def fused_layer_step(
    x: Hidden,
    norm: nn.RMSNorm,
    layer: in_torch.FusedLayer,
    layer_class: type[Layer],
    state: LayerState,
    modules: Sequence[nn.Module | None],
    split_gates: Any = lambda *gates: gates,
) -> Hidden | None:
    """x + layer(norm(x)) of a layer of the family, its state in place.

    It returns None where the modules have to be called.

    Args:
        x, norm: the residual stream, and the norm before the layer.
        layer: whose state it is.
        layer_class: the class whose layers this function stands for.
        state: one that the layer has made, or a pool of them.
        modules: the projection to q, k and v, then the others.
        split_gates: makes logits of g and beta, and the output gate, of the
            others' outputs; each may be None. Without it they are these.
    """
    convolution = layer.convolution.short_convolution
    parts = (norm, layer.convolution, layer.norm, layer.o_proj)
    (H, HV), (K, V) = layer.convolution.heads, layer.convolution.sizes
    if (
        convolution is None
        or layer.norm.center
        or len(layer.norm.weight) != V
        or K > MAX_KERNEL_K
        or not is_fusable_layer(
            layer, layer_class, x, [*parts, layer.decay, *modules]
        )
    ):
        return None
    check_input(x, layer, state, None)
    if not _is_writable(state, x):
        return None
    if not runs_kernels(x):
        record_run("torch fused_step")
        qkv, *others = in_torch.norm_and_project(x, norm, modules)
        a, b, gate = split_gates(*others)
        o = in_torch.recurrence(layer, qkv, a, b, state)
        return in_torch.project_output(x, o, gate, layer)
    from fastweights.kernels.decode import decode

    record_run("triton fused_step")
    S: Any = state.S
    qkv, *others = norm_and_project(
        x,
        norm,
        modules,
        convolution=(convolution.weight, convolution.bias, state.convolution),
        rows=state.rows,
        tokens=x.shape[1],
        num_accepted=state.num_accepted,
        silu=convolution.activation,
    )
    a, b, gate = split_gates(*others)
    q, k, v = qkv.split([H * K, H * K, HV * V], -1)
    gates: dict[str, Any] = {}
    if layer.decay is not None:
        gates["decay_parameters"] = layer.decay.A_log, layer.decay.dt_bias
        gates["lower_bound"] = layer.decay.lower_bound
        a = a.unflatten(-1, (HV, K)) if layer.decay.channels > 1 else a
    o = decode(
        q.unflatten(-1, (H, K)),
        k.unflatten(-1, (H, K)),
        v.unflatten(-1, (HV, V)),
        a,
        b,
        S,
        state.rows,
        K**-0.5,
        num_accepted=state.num_accepted,
        qk_l2norm=layer.convolution.qk_l2norm,
        **gates,
        max_beta=0.0 if b is None else 1.0 + layer.allow_neg_eigval,
        state_is_ready=True,
    )
    return project_and_add(
        x,
        o.flatten(2),
        layer.o_proj,
        norm=layer.norm.weight,
        eps=layer.norm.eps,
        gate=None if gate is None else gate.flatten(0, 1),
        activation=layer.norm.gate_activation,
    )


def _is_writable(state: LayerState, x: Tensor) -> bool:
    """Whether a step may write to the state's memory."""
    inside = torch.is_inference_mode_enabled()
    return all(
        t.is_contiguous() and (inside or not t.is_inference())
        for t in state.tensors().values()
    ) and (state.convolution is None or state.convolution.dtype == x.dtype)
