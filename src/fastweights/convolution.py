"""The short causal convolution that stands before the recurrence.

    z_t = bias + sum_j weight[:, W - 1 - j] x_{t-j},  j = 0 .. W - 1
    y_t = silu(z_t)

Every channel has a filter of its own, W = 2 to 4 tokens long: what the
published layers do with queries, keys and values before they meet the state.
Before a sequence's first token stand its initial state's W - 1 inputs, or
zeros.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights import private
from fastweights.arguments import (
    DTYPES,
    check_integers,
    check_kinds,
    check_number,
    check_tensors,
    wrong_shape,
)
from fastweights.convolution_operator import (
    BACKENDS,
    FORWARD,
    NAMES,
    NUMBER,
    Backend,
    Convolution,
    _forward,
)
from fastweights.ops import past_dispatcher, refuse_transforms

WIDTHS = (2, 3, 4)
ACTIVATIONS = ("silu", None)
Activation = Literal["silu"] | None


def short_convolution(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, " C"] | None = None,
    *,
    activation: Activation = "silu",
    initial_state: Float[Tensor, "N W-1 C"] | None = None,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "N W-1 C"]]:
    """A causal convolution of each channel with its own filter, then SiLU.

    Args:
        x: [B, T, C] (fp64, fp32, fp16 or bf16), T >= 0. Copied if it is not
            contiguous.
        weight: [C, W], W = 2, 3 or 4, fp32 or x's dtype: ``weight[:, W - 1]``
            multiplies the current token and ``weight[:, 0]`` the oldest, as
            in ``torch.nn.Conv1d(C, C, W, groups=C)``, whose [C, 1, W] weight
            this is without its second dimension.
        bias: [C], fp32 or x's dtype; None: nothing is added.
        activation: "silu", z / (1 + e^-z), or None: y is z.
        initial_state: [N, W - 1, C] in x's dtype, the last W - 1 inputs
            before x, oldest first; N = B or the number of packed sequences;
            zeros if None.
        cu_seqlens: [N + 1] int32 or int64, B = 1: sequence n is the tokens
            from cu_seqlens[n] up to cu_seqlens[n + 1], possibly none, and
            sees no other. Tokens after the last one have outputs and
            gradients of 0. It lies on x's device. On a GPU nothing reads it
            on the host: offsets that do not rise from 0 to at most T give
            wrong numbers, but reach no other memory. On a CPU it is checked.
        backend: "triton" (a kernel: CUDA, compute capability 8.0 or higher,
            not fp64), "torch" (PyTorch, anywhere) or "auto" (the first that
            runs on x's device and dtype).

    Returns:
        y [B, T, C] in x's dtype, and the last W - 1 inputs of each sequence,
        [N, W - 1, C] in x's dtype, with which the next call goes on. Of a
        sequence shorter than that, some are from its initial state.
        Arithmetic is in fp32 (fp64 if x is), whatever autocast says, which
        casts nothing here. Gradients flow to x, weight, bias and
        initial_state from both results, and two runs give the same bits.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, value or device does not fit; the message names
            the argument, what it got and what it needs.
        NotImplementedError: in the backward of a backward, under a transform
            of torch.func, or in forward-mode autograd.
    """
    tensors = (x, weight, bias, initial_state, cu_seqlens)
    _check(*tensors, activation, backend)
    options = ((0, 0, 1, 0), None, activation == "silu", backend)
    _, _, y, state = _call("short_convolution", tensors, options)
    return y, state


def convolve_heads(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, " C"] | None = None,
    *,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    normalize: bool = True,
    eps: float = 1e-6,
    activation: Activation = "silu",
    initial_state: Float[Tensor, "N W-1 C"] | None = None,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    backend: Backend = "auto",
) -> tuple[
    Float[Tensor, "B T H K"],
    Float[Tensor, "B T H K"],
    Float[Tensor, "B T HV V"],
    Float[Tensor, "N W-1 C"],
]:
    """The same of queries, keys and values side by side, cut into heads.

    One pass over memory for what :func:`short_convolution`, three copies and
    two normalisations would do: x is read once, q, k and v are written once,
    each contiguous, as the recurrence takes them.

    Args:
        x: [B, T, C] with C = 2 H K + HV V: H heads of K channels of queries,
            as many of keys, HV heads of V channels of values.
        heads: H and HV, each >= 1.
        sizes: K and V, each >= 1.
        normalize: whether each head of q and k is divided by
            sqrt(sum of its squares + eps), in the arithmetic's dtype, after
            the activation.
        eps: added to that sum, > 0; 1e-6 is what the published layers have.

    ``weight``, ``bias`` and all others are as in :func:`short_convolution`,
    and so is what it raises.

    Returns:
        q and k [B, T, H, K], v [B, T, HV, V], all in x's dtype, and the last
        W - 1 inputs of each sequence [N, W - 1, C].
    """
    tensors = (x, weight, bias, initial_state, cu_seqlens)
    _check(*tensors, activation, backend)
    layout = _layout(x, heads, sizes)
    if not isinstance(normalize, bool):
        kind = type(normalize).__name__
        raise TypeError(f"normalize: got {kind}, need a bool")
    check_number("eps", eps, "> 0")
    added = float(eps) if normalize else None
    options = (layout, added, activation == "silu", backend)
    return _call("convolve_heads", tensors, options)


def _call(
    name: str, tensors: tuple[Tensor | None, ...], options: tuple
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator, or what is behind it where nobody looks."""
    inputs = [None if t is None else t.contiguous() for t in tensors]
    if torch.compiler.is_compiling():
        return FORWARD(*inputs, *options)
    if private.transformed():
        refuse_transforms(name, *inputs, loop=False)
    asked = torch.is_grad_enabled() and any(
        [t is not None and t.requires_grad for t in inputs]
    )
    if asked and not torch.jit.is_tracing():
        for argument, t in zip(NAMES, inputs, strict=True):
            if t is not None and t.is_inference():
                raise ValueError(
                    f"{argument}: got a tensor made in torch.inference_mode, "
                    "need its clone(), since a gradient is asked for"
                )
        return Convolution.apply(*inputs, *options)
    forward = past_dispatcher(FORWARD, _forward, inputs[:NUMBER])
    return forward(*inputs, *options)


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: Any,
    backend: Any,
) -> None:
    """Raise for the first argument that does not fit the others."""
    tensors = {"x": x, "weight": weight}
    optional = {
        "bias": bias,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    tensors |= {name: t for name, t in optional.items() if t is not None}
    check_tensors(tensors)
    check_kinds({"x": x}, {"x": DTYPES})
    either = (torch.float32, x.dtype)
    dtypes: dict[str, tuple[torch.dtype, ...]] = {
        "x": DTYPES,
        "weight": either,
        "bias": either,
        "initial_state": (x.dtype,),
        "cu_seqlens": (torch.int32, torch.int64),
    }
    check_kinds(tensors, dtypes)
    if x.dim() != 3 or x.shape[0] < 1 or x.shape[2] < 1:
        wrong_shape("x", x, "[B, T, C] with B, C >= 1")
    N, _, C = x.shape
    fits = weight.dim() == 2 and weight.shape[0] == C
    if not fits or weight.shape[1] not in WIDTHS:
        wrong_shape("weight", weight, f"[{C}, W] with W one of {WIDTHS}")
    W = weight.shape[1]
    if bias is not None and bias.shape != (C,):
        wrong_shape("bias", bias, f"[{C}]")
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            wrong_shape("cu_seqlens", cu_seqlens, "[N + 1] with N >= 1")
        if N != 1:
            wrong_shape("x", x, "[1, T, C] because cu_seqlens is given")
        N = cu_seqlens.shape[0] - 1
    if initial_state is not None and initial_state.shape != (N, W - 1, C):
        wrong_shape("initial_state", initial_state, f"[{N}, {W - 1}, {C}]")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation: got {activation!r}, need one of {ACTIVATIONS}"
        )
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, need one of {BACKENDS}")


def _layout(
    x: Tensor, heads: tuple[int, int], sizes: tuple[int, int]
) -> tuple[int, int, int, int]:
    """H, K, HV and V; raise unless x has as many channels."""
    check_pairs(heads, sizes)
    (H, HV), (K, V) = heads, sizes
    C = 2 * H * K + HV * V
    if x.shape[2] != C:
        wrong_shape("x", x, f"[B, T, {C}], 2 H K + HV V of heads and sizes")
    return H, K, HV, V


def check_pairs(heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    """Raise unless they are H and HV, K and V, each an integer >= 1."""
    for name, pair in (("heads", heads), ("sizes", sizes)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            what = "H and HV" if name == "heads" else "K and V"
            raise TypeError(f"{name}: got {pair!r}, need two ints, {what}")
        for i, number in enumerate(pair):
            check_integers({f"{name}[{i}]": number})
        if min(pair) < 1:
            raise ValueError(f"{name}: got {tuple(pair)}, need both >= 1")
