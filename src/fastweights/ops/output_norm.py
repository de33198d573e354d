"""The norm that stands behind the recurrence, times a function of a gate.

    y = o / sqrt(mean(o^2) + eps) * weight * activation(gate)

with the mean over a head's channels. PyTorch's path is the formula, with the
gradients that autograd finds. The kernels
(:mod:`fastweights.kernels.output_norm`) are one pass over memory forward and
one backward, behind an operator, so that torch.compile need not look inside.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fastweights import torch_internals
from fastweights.arguments import (
    check_dtypes,
    check_numbers,
    check_tensors,
    refuse_shape,
)
from fastweights.dtypes import DTYPES, upcast
from fastweights.ops.common.backends import (
    KERNEL_OR_TORCH,
    KernelOrTorch,
    check_backend,
    record_run,
    resolve_backend,
)
from fastweights.ops.common.registration import Operator

GateActivation = Literal["silu", "sigmoid"]
ACTIVATIONS = (*get_args(GateActivation), None)


def gated_rms_norm(
    o: Float[Tensor, "B T HV V"],
    weight: Float[Tensor, "*HV V"],
    gate: Float[Tensor, "B T HV*V"] | None = None,
    *,
    gate_activation: GateActivation | None = "silu",
    eps: float = 1e-5,
    backend: KernelOrTorch = "auto",
) -> Float[Tensor, "B T HV*V"]:
    """RMS norm over a head's channels, times a function of a gate.

    Args:
        o: [B, T, HV, V] (fp64, fp32, fp16 or bf16), what the recurrence
            returns. Copied for the kernels if it is not contiguous.
        weight: [V], shared by the heads, or [HV, V]; any of these dtypes.
        gate: [B, T, HV * V], any of these dtypes, before its activation.
            A slice of a wider projection's channels is read where it lies,
            and kept there for the backward. None: there is no gate.
        gate_activation: "silu" or "sigmoid"; None only without one.
        eps: added to the mean square, >= 0.
        backend: "triton" (kernels: CUDA, compute capability 8.0 or higher,
            o not in fp64), "torch" (PyTorch, anywhere) or "auto" (the first
            that runs on o's device and dtype; "torch" under torch.func and
            forward-mode autograd).

    Returns:
        y [B, T, HV * V], the heads side by side, in o's dtype. Arithmetic is
        in fp32 (fp64 if o is), under autocast too. Gradients flow to o,
        weight and gate, and two runs give the same bits; gradients of
        gradients only by PyTorch's path.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, value or device does not fit; the message names
            the argument, what it got and what it needs.
        NotImplementedError: in the backward of the kernels' backward.
    """
    _check(o, weight, gate, gate_activation, eps, backend)
    silu = gate_activation == "silu"
    if resolve_backend(backend, o.device, o.dtype) != "triton":
        return norm_by_formula(o, weight, gate, silu, eps)
    inputs = (o.contiguous(), weight.contiguous(), gate)
    compiling = torch.compiler.is_compiling()
    if (
        backend == "auto"
        and not compiling
        and torch_internals.under_transform()
    ):
        return norm_by_formula(o, weight, gate, silu, eps)
    return NORM(*inputs, silu, float(eps))


def norm_by_formula(
    o: Tensor, weight: Tensor, gate: Tensor | None, silu: bool, eps: float
) -> Tensor:
    """:func:`gated_rms_norm` in PyTorch's operations."""
    y = upcast(o)
    y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (y * weight.to(y.dtype)).flatten(-2)
    if gate is not None:
        gate = gate.to(y.dtype)
        y = y * (F.silu(gate) if silu else gate.sigmoid())
    return y.to(o.dtype)


def _check(
    o: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    gate_activation: Any,
    eps: float,
    backend: Any,
) -> None:
    """Raise for the first argument that does not fit the others."""
    tensors = {"o": o, "weight": weight}
    tensors |= {} if gate is None else {"gate": gate}
    check_tensors(**tensors)
    check_dtypes(tensors, dict.fromkeys(tensors, DTYPES))
    if o.dim() != 4 or o.shape[2] < 1 or o.shape[3] < 1:
        refuse_shape("o", o, "[B, T, HV, V] with HV, V >= 1")
    B, T, HV, V = o.shape
    if weight.shape not in ((V,), (HV, V)):
        refuse_shape("weight", weight, f"[{V}] or [{HV}, {V}]")
    if gate is not None and gate.shape != (B, T, HV * V):
        refuse_shape("gate", gate, f"[{B}, {T}, {HV * V}]")
    if gate_activation not in ACTIVATIONS:
        raise ValueError(
            f"gate_activation: got {gate_activation!r}, need one of "
            f"{ACTIVATIONS}"
        )
    if gate_activation is None and gate is not None:
        raise ValueError("gate_activation: got None, need the gate's")
    check_numbers(">= 0", eps=eps)
    check_backend(backend, KERNEL_OR_TORCH)


def _forward(
    o: Tensor, weight: Tensor, gate: Tensor | None, silu: bool, eps: float
) -> Tensor:
    """Compute y; o and weight are contiguous."""
    from fastweights.kernels import output_norm

    record_run("triton forward")
    return output_norm.forward(o, weight, gate, silu, eps)


def _fake(o: Tensor, *others: Any) -> Tensor:
    return o.new_empty(*o.shape[:2], o.shape[2] * o.shape[3])


def _backward(
    dy: Tensor | None,
    o: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    silu: bool,
    eps: float,
) -> list[Tensor]:
    """Gradients of o, weight and gate, in their dtypes and contiguous."""
    from fastweights.kernels import output_norm

    record_run("triton backward")
    dy = o.new_zeros(_fake(o).shape) if dy is None else dy
    return output_norm.backward(dy.contiguous(), o, weight, gate, silu, eps)


NORM = Operator(
    "gated_rms_norm",
    "Tensor o, Tensor weight, Tensor? gate",
    "bool silu, float eps",
    "Tensor y",
    forward=_forward,
    fake=_fake,
    backward=_backward,
    alternative="torch",
)
