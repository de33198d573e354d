"""selective_scan: Mamba's recurrence, as a loop and as a prefix scan.

    h_t = e^{dt_t A} h_{t-1} + dt_t x_t B_t^T
    y_t = h_t C_t + D x_t

The state h is [D, N], products with e^{dt_t A}, dt_t, x_t and D are element
by element, and e^{dt_t A} is [D, N]: entry (d, n) is e^{dt_t[d] A[d, n]}.

A backend of the operator (:mod:`fastweights.kernels.selective` or
:mod:`fastweights.torch_backend.selective`) has ``tile_length``,
``forward`` and ``backward``. Which one runs is asked inside of it,
so that torch.compile has nothing to ask while it traces.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    check_flags,
    check_sequences,
    check_shapes,
    check_tensors,
    check_types_and_devices,
    refuse_shape,
)
from fastweights.dtypes import (
    cast_for_autocast,
    compute_dtype,
    without_autocast,
)
from fastweights.ops.common.backends import (
    Backend,
    check_backend,
    record_run,
    resolve_backend,
)
from fastweights.ops.common.registration import Operator, needs_gradient
from fastweights.ops.common.rows import (
    Rows,
    check_rows_of_states,
    clamp_rows,
    write_rows,
)
from fastweights.ops.decode import MAX_STEP_TOKENS, refuse_gradients
from fastweights.packing import num_sequences, states_or_zeros, tail_mask
from fastweights.ranks.group import current_ranks, refuse_ranks
from fastweights.ranks.shard import (
    pad_to_one_token,
    run_additive_over_ranks,
    shard_of,
)
from fastweights.torch_backend import selective as torch_selective

MAX_N = 256


def selective_scan(
    x: Float[Tensor, "Bt T D"],
    dt: Float[Tensor, "Bt T D"],
    A: Float[Tensor, "D N"],
    B: Float[Tensor, "Bt T *G N"],
    C: Float[Tensor, "Bt T *G N"],
    D: Float[Tensor, " D"] | None = None,
    *,
    z: Float[Tensor, "Bt T D"] | None = None,
    dt_bias: Float[Tensor, " D"] | None = None,
    dt_softplus: bool = False,
    initial_state: Float[Tensor, "S D N"] | None = None,
    cu_seqlens: Int[Tensor, " S+1"] | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "Bt T D"], Float[Tensor, "S D N"]]:
    """Mamba's selective scan (Gu and Dao 2023, algorithm 2).

    The arguments are those of Mamba's own ``selective_scan_fn(u, delta, A,
    B, C, D, z, delta_bias, delta_softplus)``, with time before channels:
    x is ``u.mT``, dt ``delta.mT``, B and C have their last dimension moved
    to the second place, z and y are transposed, dt_bias is ``delta_bias``
    and dt_softplus ``delta_softplus``.

        y, state = fw.selective_scan(x, dt, A, B, C)

    Args:
        x: [Bt, T, D], of one dtype with B and C (fp64, fp32, fp16 or bf16).
        dt: [Bt, T, D] step sizes; fp32 or x's dtype. They are > 0 once
            dt_bias is added and the softplus taken, if asked for.
        A: [D, N], N <= 256, finite and <= 0: entry (d, n) of the state
            decays by e^{dt A}. fp32 or x's dtype.
        B, C: [Bt, T, N], by which the state is written and read, or
            [Bt, T, G, N] for G groups of channels: channel d has those of
            group d // (D // G).
        D: [D] the share of x that goes straight to y, fp32 or x's dtype;
            None: nothing does.
        z: [Bt, T, D], fp32 or x's dtype: y is multiplied by silu(z). None:
            it stays as it is.
        dt_bias: [D], fp32 or x's dtype, added to dt in fp32 (fp64 if x
            is); None: nothing is.
        dt_softplus: whether dt, with its bias, is log(1 + e^dt) from here.
        initial_state: [S, D, N] fp32 (fp64 if x is), S = Bt or the number
            of packed sequences; zeros if None.
        cu_seqlens: [S + 1] int32 or int64, Bt = 1: sequence s is the tokens
            from cu_seqlens[s] up to cu_seqlens[s + 1], possibly none. What
            comes after the last one has outputs and gradients of 0. The
            kernels read it on the device, unchecked; PyTorch's backends
            read and check it on the host.
        backend: "triton" (a prefix scan in tiles of time: CUDA, compute
            capability 8.0 or higher, not fp64), "torch" (the same in
            PyTorch), "loop" (one token at a time, PyTorch) or "auto" (the
            first that runs on x's device and dtype).

    Returns:
        y [Bt, T, D] in x's dtype, and the state after the last token of
        each sequence, [S, D, N] in fp32 (fp64 if x is fp64), the dtype of
        all arithmetic. Autocast rounds x, B and C on their way in and
        nothing else. Gradients flow to every input from both results, and
        two runs give the same bits; gradients of gradients only with
        backend "loop".

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, value or device does not fit; the message names
            the argument, what it got and what it needs.
        NotImplementedError: in the backward of a backward, under a transform
            of torch.func, or in forward-mode autograd, unless backend is
            "loop".
    """
    x, B, C = cast_for_autocast(x, B, C)
    if (ranks := current_ranks()) is not None:
        T = x.shape[1]
        x, dt, B, C, z = pad_to_one_token(x, dt, B, C, z)
    check_scan(x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens)
    check_flags(dt_softplus=dt_softplus)
    check_backend(backend)
    full, offsets = compute_dtype(x.dtype), cu_seqlens
    if ranks is not None:
        shard = shard_of(ranks, x, T, cu_seqlens)
        offsets = shard.cu_seqlens
    if offsets is not None:
        tail = tail_mask(offsets, x.shape[1])[:, None]
        dt = dt.masked_fill(tail, 0)
        z = None if z is None else z.masked_fill(tail, 0)
    # Outside the operator: these are a token's own, which torch.compile
    # fuses with what comes before and after, and autograd differentiates.
    if dt_bias is not None:
        dt = dt.to(full) + dt_bias.to(full)
    if dt_softplus:
        dt = F.softplus(dt.to(full))

    def run(state: Tensor | None, offsets: Tensor | None) -> Any:
        return _local_scan(x, dt, A, B, C, D, z, state, offsets, backend)

    if ranks is None:
        return run(initial_state, offsets)
    dt = min(T, 1) * dt  # a token in the place of none decays nothing
    initial_states = states_or_zeros(x, A.shape, initial_state, cu_seqlens)
    initial_states = shard.initial_states(initial_states)
    steps = dt.sum(1, dtype=torch.float64)
    decay = (steps[..., None] * A).exp()
    y, state = run_additive_over_ranks(shard, run, initial_states, decay)
    return y[:, :T], state


def _local_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """selective_scan of sequences that are here as a whole."""
    if B.dim() == 3:
        B, C = B[:, :, None], C[:, :, None]
    inputs = (x, dt, A, B, C, D, initial_state, cu_seqlens)
    if backend == "loop":
        record_run("loop forward")
        with without_autocast(x):
            y, state = torch_selective.loop(*inputs)
    else:
        keep = needs_gradient(*inputs)
        # Views of a wider tensor are copied once, not in forward and backward.
        contiguous = (None if t is None else t.contiguous() for t in inputs)
        y, state = SCAN(*contiguous, keep, z is not None, backend)
    if z is not None:
        y = y * F.silu(z.to(compute_dtype(x.dtype)))
    return y.to(x.dtype), state


def check_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise for the first argument that does not fit the others."""
    check_tensors(x=x, dt=dt, A=A, B=B, C=C)
    check_types_and_devices(
        {"x": x},
        same={"B": B, "C": C},
        same_or_fp32={"dt": dt, "A": A, "D": D, "z": z, "dt_bias": dt_bias},
        states={"initial_state": initial_state},
        offsets={"cu_seqlens": cu_seqlens},
    )
    if x.dim() != 3 or any(n < 1 for n in x.shape):
        refuse_shape("x", x, "[B, T, D] with B, T, D >= 1")
    batch, T, channels = x.shape
    for name, t in (("dt", dt), ("z", z)):
        if t is not None and t.shape != x.shape:
            refuse_shape(name, t, f"x's, {list(x.shape)}")
    fits = A.dim() == 2 and A.shape[0] == channels
    if not fits or not 1 <= A.shape[1] <= MAX_N:
        refuse_shape("A", A, f"[{channels}, N] with 1 <= N <= {MAX_N}")
    N = A.shape[1]
    flat = (batch, T, N)
    G = B.shape[2] if B.dim() == 4 else 1
    if B.shape not in (flat, (batch, T, G, N)) or G < 1 or channels % G:
        need = f"{list(flat)} or [{batch}, {T}, G, {N}]"
        refuse_shape("B", B, f"{need} with G a divisor of D = {channels}")
    S = check_sequences("x", x, "[1, T, D]", cu_seqlens, "S")
    check_shapes(
        C=(C, tuple(B.shape)),
        D=(D, (channels,)),
        dt_bias=(dt_bias, (channels,)),
        initial_state=(initial_state, (S, channels, N)),
    )


def _backend_and_module(backend: str, x: Tensor) -> tuple[str, ModuleType]:
    """The backend that runs, and where its functions stand."""
    chosen = resolve_backend(backend, x.device, x.dtype)
    if chosen == "triton":
        from fastweights.kernels import selective as triton_selective

        return chosen, triton_selective
    return chosen, torch_selective


def empty_states(
    module: ModuleType,
    x: Tensor,
    A: Tensor,
    B: Tensor,
    cu_seqlens: Tensor | None,
    keep: bool,
) -> Tensor:
    """Allocate the state that enters each tile of time, if it is kept.

    It has one dimension: torch.compile would make a case of a single tile.
    Packed sequences begin with tiles of their own: sequence n with tile
    ``cu_seqlens[n] // length + n``, past all of the one before it.
    """
    batch, T, _ = x.shape
    length = module.tile_length(*A.shape, B.shape[2])
    tiles = 0
    if keep and cu_seqlens is None:
        tiles = -(-T // length)
    elif keep and cu_seqlens is not None:
        tiles = T // length + cu_seqlens.shape[0] - 1
    return x.new_empty(batch * tiles * A.numel(), dtype=compute_dtype(x.dtype))


def _forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a backend's results; with ``keep``, what its backward re-uses.

    y is in x's dtype, or with ``full`` in that of the arithmetic.
    """
    *inputs, keep, full, backend = arguments
    chosen, module = _backend_and_module(backend, x)
    record_run(f"{chosen} forward")
    _, A, B, *_, cu_seqlens = inputs
    states = empty_states(module, x, A, B, cu_seqlens, keep)
    with without_autocast(x):
        kept = states if keep else None
        y, state = module.forward(x, *inputs, kept, y_dtype(x, full))
    return y, state, states


def y_dtype(x: Tensor, full: bool) -> torch.dtype:
    """The dtype of y, in which a gate after it takes its gradient too."""
    return compute_dtype(x.dtype) if full else x.dtype


def _fake(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, cu_seqlens, keep, full, backend = others
    _, module = _backend_and_module(backend, x)
    states = empty_states(module, x, A, B, cu_seqlens, keep)
    S = num_sequences(x, cu_seqlens)
    y = x.new_empty(x.shape, dtype=y_dtype(x, full))
    return y, states.new_empty(S, *A.shape), states


def _backward(
    dy: Tensor | None, dstate: Tensor | None, x: Tensor, *arguments: Any
) -> list[Tensor]:
    """Gradients of the inputs up to initial_state that are not None.

    Each has its input's shape and dtype. dy or dstate is None where nothing
    depends on that result.
    """
    *inputs, (states,), _, _, backend = arguments
    chosen, module = _backend_and_module(backend, x)
    record_run(f"{chosen} backward")
    dy = torch.zeros_like(x) if dy is None else dy.contiguous()
    dstate = None if dstate is None else dstate.contiguous()
    with without_autocast(x):
        grads = module.backward(dy, dstate, x, *inputs, states)
    return [
        grad.to(t.dtype).contiguous()
        for grad, t in zip(grads, (x, *inputs[:-1]), strict=True)
        if t is not None
    ]


SCAN = Operator(
    "selective_scan",
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
    "Tensor? initial_state, Tensor? cu_seqlens",
    "bool keep, bool full, str backend",
    "Tensor y, Tensor state, Tensor states",
    num_hidden=1,
    num_kept=1,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    alternative="loop",
)


def selective_step(
    x: Float[Tensor, "B T D"],
    dt: Float[Tensor, "B T D"],
    A: Float[Tensor, "D N"],
    B: Float[Tensor, "B T *G N"],
    C: Float[Tensor, "B T *G N"],
    D: Float[Tensor, " D"] | None = None,
    *,
    state: Float[Tensor, "S D N"],
    z: Float[Tensor, "B T D"] | None = None,
    dt_bias: Float[Tensor, " D"] | None = None,
    dt_softplus: bool = False,
    rows: Rows | None = None,
) -> Float[Tensor, "B T D"]:
    """:func:`fastweights.selective_scan` for a few new tokens, in place.

    Args:
        x, dt, A, B, C, D, z, dt_bias, dt_softplus: as in selective_scan.
        state: [S, D, N] fp32 (fp64 if x is), updated in place.
        rows: which rows of the state are the sequences', as in
            decode_step.

    Returns:
        y [B, T, D] in x's dtype, by PyTorch's operators: under torch.compile
        a token is one kernel.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, value or device does not fit, there are more than
            16 tokens, or a gradient is needed.
    """
    refuse_ranks("selective_step")
    x, B, C = cast_for_autocast(x, B, C)
    check_scan(x, dt, A, B, C, D, z, dt_bias, None, None)
    check_flags(dt_softplus=dt_softplus)
    if x.shape[1] > MAX_STEP_TOKENS:
        need = f"[B, T, D] with T <= {MAX_STEP_TOKENS}; for more tokens there "
        refuse_shape("x", x, f"{need}is selective_scan")
    check_rows_of_states(x, {"state": state}, rows, tuple(A.shape))
    gates = {"D": D, "z": z, "dt_bias": dt_bias, "state": state}
    refuse_gradients(x=x, dt=dt, A=A, B=B, C=C, **gates)
    full = compute_dtype(x.dtype)
    u, dt, A, B, C = (t.to(full) for t in (x, dt, A, B, C))
    if dt_bias is not None:
        dt = dt + dt_bias.to(full)
    if dt_softplus:
        dt = F.softplus(dt)
    G = B.shape[2] if B.dim() == 4 else 1
    spread = x.shape[2] // G
    B, C = (t.unflatten(-1, (1, -1)) if t.dim() == 3 else t for t in (B, C))
    h = state if rows is None else state[clamp_rows(rows, state)]
    outputs = []
    with without_autocast(x):
        for t in range(x.shape[1]):
            B_t, C_t = (
                y[:, t].repeat_interleave(spread, 1) for y in (B, C)
            )  # [B, D, N]
            step = dt[:, t, :, None]
            h = (step * A).exp() * h + step * u[:, t, :, None] * B_t
            outputs.append((h * C_t).sum(-1))
        y = torch.stack(outputs, 1)
        if D is not None:
            y = y + D.to(full) * u
        if z is not None:
            y = y * F.silu(z.to(full))
    write_rows(state, h, rows)
    if rows is not None:
        inside = (rows >= 0) & (rows < state.shape[0])
        y = y.where(inside[:, None, None], 0)
    return y.to(x.dtype)
