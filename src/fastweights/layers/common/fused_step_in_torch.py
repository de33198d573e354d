"""What a token's kernels compute, by PyTorch's operators: on a CPU.

There an operator on one token takes as long as its call from Python,
whatever it computes: these are few, with no module's call or check between
them. Values are rounded in fewer places than the modules', as the kernels'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.dtypes import upcast
from fastweights.heads import l2norm
from fastweights.layers.common.convolution import HeadsConvolution
from fastweights.layers.common.gates import Decay, write_strength
from fastweights.layers.common.layer import Hidden
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.state import LayerState
from fastweights.ops.common.rows import write_rows
from fastweights.torch_backend.decode import advance, expand_inputs


class FusedLayer(Protocol):
    """A layer that :func:`.fused_step.fused_layer_step` takes a step of."""

    convolution: HeadsConvolution
    norm: OutputNorm
    o_proj: nn.Linear
    allow_neg_eigval: bool

    @property
    def decay(self) -> Decay | None: ...


def norm_and_project(
    x: Hidden,
    norm: nn.RMSNorm,
    modules: Sequence[Any],
    *,
    swiglu: bool = False,
) -> list[Any]:
    """The modules' outputs, as :func:`.fused_step.norm_and_project`."""
    y = F.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)
    products: list[Any] = [
        None if m is None else _apply_product(m, y) for m in modules
    ]
    if not swiglu:
        return products
    gate, up = products[0].chunk(2, -1)
    return [F.silu(gate).mul_(up)]


def _apply_product(module: Any, x: Hidden) -> Float[Tensor, "B 1 N"]:
    """The module's matrix times x, or its two matrices'."""
    parts: Any = module if isinstance(module, nn.Sequential) else [module]
    for part in parts:
        x = F.linear(x, part.weight)
    return x


def project_and_add(
    x: Hidden, o: Float[Tensor, "B 1 C"], projection: nn.Linear
) -> Hidden:
    """x + projection(o)."""
    return x + F.linear(o, projection.weight)


def convolve_token(
    x: Float[Tensor, "B 1 C"], convolution: Any, state: LayerState
) -> Float[Tensor, "B C"]:
    """The short convolution's step, in fp32 (fp64 if x is)."""
    inputs = torch.cat([state.batch_field("convolution"), x], 1)  # [B, W, C]
    write_rows(state.tensor("convolution"), inputs[:, 1:], state.rows)
    y = (upcast(inputs) * upcast(convolution.weight).mT).sum(1)
    if convolution.bias is not None:
        y += convolution.bias
    return F.silu(y, inplace=True) if convolution.activation else y


def recurrence(
    layer: FusedLayer,
    qkv: Float[Tensor, "B 1 C"],
    a: Tensor | None,
    b: Tensor | None,
    state: LayerState,
) -> Float[Tensor, "B 1 HV V"]:
    """Convolution, gates, unit length and step; in fp32 (fp64 if qkv is)."""
    (H, HV), (K, V) = layer.convolution.heads, layer.convolution.sizes
    y = convolve_token(qkv, layer.convolution.short_convolution, state)
    qk, v = y[:, : 2 * H * K], y[:, 2 * H * K :].view(-1, 1, HV, V)
    qk = qk.view(-1, 1, 2 * H, K)
    q, k = (l2norm(qk) if layer.convolution.qk_l2norm else qk).split(H, 2)
    g = None if layer.decay is None or a is None else layer.decay.forward(a)
    beta = None if b is None else write_strength(b, layer.allow_neg_eigval)
    S = state.batch_field("S").to(y.dtype)
    o = advance(S, *expand_inputs(q, k, v, g, beta), scale=K**-0.5)
    if S is not state.S:
        write_rows(state.tensor("S"), S, state.rows)
    return o


def project_output(
    x: Hidden,
    o: Float[Tensor, "B 1 HV V"],
    gate: Tensor | None,
    layer: FusedLayer,
) -> Hidden:
    """x + o_proj(norm(o, gate))."""
    norm = layer.norm
    y = F.rms_norm(o, o.shape[3:], upcast(norm.weight), norm.eps).flatten(2)
    if gate is not None:
        gate = upcast(gate)
        silu = norm.gate_activation == "silu"
        y *= F.silu(gate) if silu else gate.sigmoid()
    return project_and_add(x, y.to(x.dtype), layer.o_proj)
