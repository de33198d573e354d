"""selective_scan: Mamba's recurrence, as a loop and as a prefix scan.

    h_t = e^{dt_t A} h_{t-1} + dt_t x_t B_t^T
    y_t = h_t C_t + D x_t

The state h is [D, N], products with e^{dt_t A}, dt_t, x_t and D are element
by element, and e^{dt_t A} is [D, N]: entry (d, n) is e^{dt_t[d] A[d, n]}.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fastweights.arguments import (
    DTYPES,
    check_kinds,
    check_tensors,
    wrong_shape,
)
from fastweights.ops import autocast, choose_backend, ran
from fastweights.reference.backend import wide
from fastweights.reference.steps import scan, selective

BACKENDS = ("auto", "triton", "loop")
MAX_N = 256


def selective_scan(
    x: Float[Tensor, "Bt T D"],
    dt: Float[Tensor, "Bt T D"],
    A: Float[Tensor, "D N"],
    B: Float[Tensor, "Bt T N"],
    C: Float[Tensor, "Bt T N"],
    D: Float[Tensor, " D"] | None = None,
    *,
    initial_state: Float[Tensor, "Bt D N"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "Bt T D"], Float[Tensor, "Bt D N"]]:
    """Mamba's selective scan (Gu and Dao 2023, algorithm 2).

    Args:
        x: [Bt, T, D], of one dtype with B and C (fp64, fp32, fp16 or bf16).
        dt: [Bt, T, D] step sizes > 0, after the softplus; fp32 or x's
            dtype.
        A: [D, N], N <= 256, finite and <= 0: entry (d, n) of the state
            decays by e^{dt A}. fp32 or x's dtype.
        B, C: [Bt, T, N], by which the state is written and read.
        D: [D] the share of x that goes straight to y, fp32 or x's dtype;
            None: nothing does.
        initial_state: [Bt, D, N] fp32 (fp64 if x is); zeros if None.
        backend: "triton" (a prefix scan in tiles of time: CUDA, compute
            capability 8.0 or higher, not fp64), "loop" (one token at a
            time, PyTorch) or "auto" (the first that runs on x's device and
            dtype).

    Returns:
        y [Bt, T, D] in x's dtype, and the state after the last token,
        [Bt, D, N] in fp32 (fp64 if x is fp64), the dtype of all arithmetic.
        Autocast rounds x, B and C on their way in and nothing else.
        Gradients flow to every input from both results, and two runs give
        the same bits; gradients of gradients only with backend "loop".

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, value or device does not fit; the message names
            the argument, what it got and what it needs.
        NotImplementedError: in the backward of a backward.
    """
    x, B, C = autocast(x, B, C)
    _check(x, dt, A, B, C, D, initial_state)
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, need one of {BACKENDS}")
    inputs = (x, dt, A, B, C, D, initial_state)
    if _backend(backend, x.device, x.dtype) == "loop":
        return _loop(*inputs)
    given = [t for t in inputs if t is not None]
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    # Views of a wider tensor are copied once, not in forward and backward.
    contiguous = (None if t is None else t.contiguous() for t in inputs)
    y, state, _ = _forward(*contiguous, keep)
    return y, state


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
) -> None:
    """Raise for the first argument that does not fit the others."""
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    optional = {"D": D, "initial_state": initial_state}
    tensors |= {name: t for name, t in optional.items() if t is not None}
    check_tensors(tensors)
    either = (torch.float32, x.dtype)
    dtypes: dict[str, tuple[torch.dtype, ...]] = {
        "x": DTYPES,
        "dt": either,
        "A": either,
        "B": (x.dtype,),
        "C": (x.dtype,),
        "D": either,
        "initial_state": (wide(x.dtype),),
    }
    check_kinds(tensors, dtypes)
    if x.dim() != 3 or min(x.shape) < 1:
        wrong_shape("x", x, "[B, T, D] with B, T, D >= 1")
    batch, T, channels = x.shape
    if dt.shape != x.shape:
        wrong_shape("dt", dt, f"x's, {list(x.shape)}")
    fits = A.dim() == 2 and A.shape[0] == channels
    if not fits or not 1 <= A.shape[1] <= MAX_N:
        wrong_shape("A", A, f"[{channels}, N] with 1 <= N <= {MAX_N}")
    N = A.shape[1]
    shapes = {
        "B": (batch, T, N),
        "C": (batch, T, N),
        "D": (channels,),
        "initial_state": (batch, channels, N),
    }
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            wrong_shape(name, tensors[name], f"{list(shape)}")


@torch.compiler.assume_constant_result
def _backend(asked: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that runs when ``asked`` is asked for.

    torch.compile asks while it traces, and could not trace the answer.
    """
    if asked == "triton" and dtype == torch.float64:
        raise ValueError(
            "backend: got 'triton', which needs x, B and C in float32, "
            "float16 or bfloat16, not float64"
        )
    chosen = choose_backend(asked, device, dtype)
    return "loop" if chosen == "chunkwise" else chosen


def _loop(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One token at a time, with the gradients that autograd finds."""
    ran("loop forward")
    dtype, full = x.dtype, wide(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        x, dt, A, B, C = (t.to(full) for t in (x, dt, A, B, C))
        h = initial_state
        if h is None:
            h = x.new_zeros(len(x), *A.shape)
        y, h = scan(
            lambda h, x, dt, B, C: selective(h, x, dt, A, B, C),
            h,
            *(x, dt, B, C),
        )
        if D is not None:
            y = y + D.to(full) * x
        return y.to(dtype), h


INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
    "Tensor? initial_state"
)


@torch.library.custom_op(
    "fastweights::selective_scan",
    mutates_args=(),
    schema=f"({INPUTS}, bool keep) -> (Tensor y, Tensor state, Tensor states)",
)
def _forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel computes; with ``keep``, what its backward re-uses."""
    from fastweights.kernels.selective import forward

    ran("triton forward")
    return forward(x, *arguments)


@_forward.register_fake
def _(x, dt, A, B, C, D, initial_state, keep):
    from fastweights.kernels.selective import empty_states

    state = x.new_empty(len(x), *A.shape, dtype=torch.float32)
    return x.new_empty(x.shape), state, empty_states(x, A, keep)


@torch.library.custom_op(
    "fastweights::selective_scan_backward",
    mutates_args=(),
    schema=f"(Tensor? dy, Tensor? dstate, {INPUTS}, Tensor states)"
    " -> Tensor[] grads",
)
def _backward(
    dy: Tensor | None, dstate: Tensor | None, x: Tensor, *arguments: Any
) -> list[Tensor]:
    """Gradients of the inputs that are not None."""
    from fastweights.kernels.selective import backward

    ran("triton backward")
    return backward(dy, dstate, x, *arguments)


@_backward.register_fake
def _(dy, dstate, *others):
    return [x.new_empty(x.shape) for x in others[:7] if x is not None]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:7], output[2])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dy: Tensor | None, dstate: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    *inputs, states = ctx.saved_tensors  # checkpointing: read once
    grads = iter(_backward(dy, dstate, *inputs, states))
    found = [None if x is None else next(grads) for x in inputs]
    return (*found, None)


def _refuse(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "selective_scan: got a gradient of its gradient, which only "
        'backend="loop" has'
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)
