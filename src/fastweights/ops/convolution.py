"""The short causal convolution that stands before the recurrence.

    z_t = bias + sum_j weight[:, W - 1 - j] x_{t-j},  j = 0 .. W - 1
    y_t = silu(z_t)

Every channel has a filter of its own, W = 2 to 4 tokens long: what the
published layers do with queries, keys and values before they meet the state.
Before a sequence's first token stand its initial state's W - 1 inputs, or
zeros.

A backend of the operator (:mod:`fastweights.kernels.convolution` or
:mod:`fastweights.torch_backend.convolution`) has ``forward`` and ``backward``.
Which one runs is asked inside of it, so that torch.compile has nothing to ask
while it traces.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    check_flags,
    check_integers,
    check_numbers,
    check_offsets_on_host,
    check_sequences,
    check_tensors,
    check_types_and_devices,
    refuse_shape,
)
from fastweights.dtypes import without_autocast
from fastweights.heads import NO_HEADS, HeadLayout, empty_heads
from fastweights.ops.common.backends import (
    KERNEL_OR_TORCH,
    KernelOrTorch,
    check_backend,
    record_run,
    resolve_backend,
)
from fastweights.ops.common.registration import Operator
from fastweights.packing import num_sequences
from fastweights.ranks.group import current_ranks
from fastweights.ranks.shard import run_over_ranks, shard_of
from fastweights.torch_backend import convolution as torch_convolution

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
    backend: KernelOrTorch = "auto",
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
    inputs: Any = [None if t is None else t.contiguous() for t in tensors]
    options = ([*NO_HEADS], None, activation == "silu", backend)
    _, _, y, state = _convolution(*inputs, *options)
    return y, state


def convolve_heads(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, " C"] | None = None,
    *,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    qk_l2norm: bool = True,
    eps: float = 1e-6,
    activation: Activation = "silu",
    initial_state: Float[Tensor, "N W-1 C"] | None = None,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    backend: KernelOrTorch = "auto",
) -> tuple[
    Float[Tensor, "B T H K"],
    Float[Tensor, "B T H K"],
    Float[Tensor, "B T HV V"],
    Float[Tensor, "N W-1 C"],
]:
    """The short convolution of q, k and v side by side, cut into heads.

    One pass over memory for what :func:`short_convolution`, three copies and
    two normalisations would do: x is read once, q, k and v are written once,
    each contiguous, as the recurrence takes them.

    Args:
        x: [B, T, C] with C = 2 H K + HV V: H heads of K channels of queries,
            as many of keys, HV heads of V channels of values.
        heads: H and HV, each >= 1.
        sizes: K and V, each >= 1.
        qk_l2norm: whether each head of q and k is divided by
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
    check_pairs(heads, sizes)
    (H, HV), (K, V) = heads, sizes
    C = 2 * H * K + HV * V
    if x.shape[2] != C:
        refuse_shape("x", x, f"[B, T, {C}], 2 H K + HV V of heads and sizes")
    check_flags(qk_l2norm=qk_l2norm)
    check_numbers("> 0", eps=eps)
    inputs: Any = [None if t is None else t.contiguous() for t in tensors]
    added = float(eps) if qk_l2norm else None
    options = ((H, HV, K, V), added, activation == "silu", backend)
    return _convolution(*inputs, *options)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Call the operator, on all tokens or on this rank's.

    A rank of T tokens moves a state up by T rows, and what it leaves in an
    empty one is decided by its last W - 1 tokens.
    """
    if (ranks := current_ranks()) is None:
        states = initial_state, cu_seqlens
        return CONVOLUTION(x, weight, bias, *states, *options)
    T, rows = x.shape[1], weight.shape[1] - 1
    shard = shard_of(ranks, x, T, cu_seqlens)
    if initial_state is None:
        N = check_sequences("x", x, "[1, T, C]", cu_seqlens)
        initial_state = x.new_zeros(N, rows, x.shape[2])

    def run(state: Tensor, offsets: Tensor | None, x: Tensor = x) -> Any:
        return CONVOLUTION(x, weight, bias, state, offsets, *options)

    initial_states = shard.initial_states(initial_state)
    own = initial_states.index_select(0, shard.outgoing)
    offsets, before = shard.offsets_for_map(), max(T - rows, 0)
    if offsets is not None:
        offsets = (offsets - before).clamp(min=0)
    tokens = x[:, before:].contiguous()
    *_, state = run(shard.states_for_map(own), offsets, tokens)
    row = torch.arange(rows, device=x.device)
    M = (row[:, None] + T == row).to(x.dtype)
    M = shard.where_passing(M.expand(len(shard.outgoing), rows, rows))
    B = shard.outgoing_of_map(state)
    return run_over_ranks(shard, run, initial_states, M, B, matrix=True)


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
    check_tensors(x=x, weight=weight)
    check_types_and_devices(
        {"x": x},
        same={"initial_state": initial_state},
        same_or_fp32={"weight": weight, "bias": bias},
        offsets={"cu_seqlens": cu_seqlens},
    )
    if x.dim() != 3 or x.shape[0] < 1 or x.shape[2] < 1:
        refuse_shape("x", x, "[B, T, C] with B, C >= 1")
    C = x.shape[2]
    fits = weight.dim() == 2 and weight.shape[0] == C
    if not fits or weight.shape[1] not in WIDTHS:
        refuse_shape("weight", weight, f"[{C}, W] with W one of {WIDTHS}")
    W = weight.shape[1]
    if bias is not None and bias.shape != (C,):
        refuse_shape("bias", bias, f"[{C}]")
    N = check_sequences("x", x, "[1, T, C]", cu_seqlens)
    if initial_state is not None and initial_state.shape != (N, W - 1, C):
        refuse_shape("initial_state", initial_state, f"[{N}, {W - 1}, {C}]")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation: got {activation!r}, need one of {ACTIVATIONS}"
        )
    check_backend(backend, KERNEL_OR_TORCH)


def check_pairs(heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    """Raise unless pairs are H and HV, K and V, each an integer >= 1."""
    for name, pair in (("heads", heads), ("sizes", sizes)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            what = "H and HV" if name == "heads" else "K and V"
            raise TypeError(f"{name}: got {pair!r}, need two ints, {what}")
        check_integers(**{f"{name}[{i}]": n for i, n in enumerate(pair)})
        if min(pair) < 1:
            raise ValueError(f"{name}: got {tuple(pair)}, need both >= 1")


def _backend_and_module(backend: str, x: Tensor) -> tuple[str, ModuleType]:
    """The backend that runs, and where its functions stand.

    Without a token PyTorch's, since there is nothing to launch.
    """
    chosen = resolve_backend(backend, x.device, x.dtype)
    if chosen == "triton" and x.shape[1]:
        from fastweights.kernels import convolution as triton_convolution

        return chosen, triton_convolution
    return "torch", torch_convolution


def _forward(
    x: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the results of a backend."""
    *inputs, layout, eps, silu, backend = arguments
    chosen, module = _backend_and_module(backend, x)
    check_offsets_on_host(inputs[-1], x.shape[1])
    record_run(f"{chosen} forward")
    with without_autocast(x):
        return module.forward(x, *inputs, HeadLayout(*layout), eps, silu)


def _fake(
    x: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, cu_seqlens, layout, *_ = others
    N, W = num_sequences(x, cu_seqlens), weight.shape[1]
    return *empty_heads(x, layout), x.new_empty(N, W - 1, x.shape[2])


def _backward(
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dstate: Tensor | None,
    x: Tensor,
    *arguments: Any,
) -> list[Tensor]:
    """Gradients of the inputs up to initial_state that are not None.

    Each has its input's shape and dtype. A gradient of a result is None where
    nothing depends on it.
    """
    *others, layout, eps, silu, backend = arguments
    chosen, module = _backend_and_module(backend, x)
    record_run(f"{chosen} backward")
    outputs = [dq, dk, dv]
    if any(dy is None for dy in outputs):
        outputs = [
            zeros.zero_() if dy is None else dy
            for dy, zeros in zip(outputs, empty_heads(x, layout), strict=True)
        ]
    output_grads = (
        None if t is None else t.contiguous() for t in (*outputs, dstate)
    )
    with without_autocast(x):
        options = HeadLayout(*layout), eps, silu
        grads = module.backward(*output_grads, x, *others, *options)
    return [
        grad.to(t.dtype).contiguous()
        for grad, t in zip(grads, (x, *others[:3]), strict=True)
        if t is not None
    ]


CONVOLUTION = Operator(
    "short_convolution",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, "
    "Tensor? cu_seqlens",
    # H, K, HV and V, of which H is 0 where v is all there is, in x's shape;
    # what is added under the root of the norm, None without one.
    "int[] layout, float? eps, bool silu, str backend",
    "Tensor q, Tensor k, Tensor v, Tensor state",
    forward=_forward,
    fake=_fake,
    backward=_backward,
)
