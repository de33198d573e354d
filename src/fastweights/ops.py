"""linear_recurrence: one operator, and the one place that picks its backend.

    S_t = (I - beta_t k_t k_t^T) Diag(e^{g_t}) S_{t-1} + beta_t k_t v_t^T
    S_t =                        Diag(e^{g_t}) S_{t-1} +        k_t v_t^T
    o_t = scale * S_t^T q_t

The first line is the delta rule, the second the additive rule (beta None).
"""

from __future__ import annotations

import itertools
import numbers

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.reference.chunkwise import chunkwise
from fastweights.reference.steps import recurrence, scan

MAX_K = 256
CHUNK_SIZES = (16, 32, 64)
BACKENDS = ("auto", "chunkwise", "loop")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def linear_recurrence(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, " ..."] | None = None,
    beta: Float[Tensor, "B T HV"] | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"]]:
    """Every member of the family, from linear attention to KDA.

    Args:
        q, k: [B, T, H, K], K <= 256, of one dtype with v (fp64, fp32, fp16
            or bf16).
        v: [B, T, HV, V]; HV is a multiple of H, and value head h uses key
            head h // (HV // H).
        g: natural log of the decay, finite and <= 0: [HV] fixed,
            [B, T, HV] a head and step, or [B, T, HV, K] a key channel and
            step. fp32 or q's dtype. None: nothing is forgotten.
        beta: [B, T, HV] write strength of the delta rule, fp32 or q's
            dtype. None: the additive rule (which is not beta = 1).
        scale: factor on the outputs; K**-0.5 if None.
        initial_state: [N, HV, K, V] fp32 (fp64 if q is), N = B or the
            number of packed sequences; zeros if None.
        cu_seqlens: [N + 1] int32 or int64, B = 1: sequence n is the tokens
            from cu_seqlens[n] up to cu_seqlens[n + 1], possibly none. It is
            read on the host.
        chunk_size: tokens a chunk, 16, 32 or 64; None chooses.
        backend: "chunkwise" (matrix products, PyTorch), "loop" (one token
            at a time, PyTorch) or "auto".

    Returns:
        o [B, T, HV, V] in v's dtype, and the state after the last token of
        each sequence, [N, HV, K, V] in fp32 (fp64 if q is fp64). Arithmetic
        is in fp32 (fp64 if q is), under autocast too. Gradients flow to
        every input from both.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, value or device does not fit; the message names
            the argument, what it got and what it needs.
    """
    _check(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size)
    backend = choose_backend(backend)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    num_sequences = B if cu_seqlens is None else len(cu_seqlens) - 1
    dtype = torch.promote_types(q.dtype, torch.float32)
    if initial_state is None:
        initial_state = q.new_zeros(num_sequences, HV, K, V, dtype=dtype)
    # Widened before it is repeated, an input gathers its gradient in dtype.
    g = q.new_zeros(1, dtype=dtype) if g is None else g.to(dtype)
    if g.dim() == 1:
        g = g.expand(B, T, HV)
    if g.dim() == 3:
        g = g[..., None]
    heads = (x.to(dtype).repeat_interleave(HV // H, dim=2) for x in (q, k))
    tokens = [*heads, v.to(dtype), g]
    if beta is not None:
        tokens.append(beta.to(dtype))
    scale = K**-0.5 if scale is None else float(scale)

    if cu_seqlens is None:
        o, state = _run(tokens, initial_state, scale, chunk_size, backend)
        return o.to(v.dtype), state
    outputs, states = [], []
    offsets = cu_seqlens.tolist()
    _check_offsets(offsets, T)
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        state = initial_state[n : n + 1]
        if a < b:
            part = [x[:, a:b] for x in tokens]
            o, state = _run(part, state, scale, chunk_size, backend)
            outputs.append(o)
        states.append(state)
    return torch.cat(outputs, dim=1).to(v.dtype), torch.cat(states)


def _run(
    tokens: list[Tensor],
    state: Tensor,
    scale: float,
    chunk_size: int | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    with torch.autocast(state.device.type, enabled=False):
        if backend == "loop":
            q, *others = tokens
            return scan(recurrence, state, scale * q, *others)
        return chunkwise(
            *tokens,
            scale=scale,
            initial_state=state,
            chunk_size=chunk_size or 64,
        )


def choose_backend(backend: str = "auto") -> str:
    """The backend that runs when ``backend`` is asked for."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, need one of {BACKENDS}")
    return "chunkwise" if backend == "auto" else backend


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> None:
    """Raise for the first argument that does not fit the others."""
    tensors = {"q": q, "k": k, "v": v}
    optional = {
        "g": g,
        "beta": beta,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    tensors |= {name: x for name, x in optional.items() if x is not None}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, need a Tensor")
    if q.dtype not in _DTYPES:
        raise TypeError(f"q: got {q.dtype}, need one of {_DTYPES}")
    full = torch.promote_types(q.dtype, torch.float32)
    dtypes = {
        "k": (q.dtype,),
        "v": (q.dtype,),
        "g": (torch.float32, q.dtype),
        "beta": (torch.float32, q.dtype),
        "initial_state": (full,),
        "cu_seqlens": (torch.int32, torch.int64),
    }
    for name, x in tensors.items():
        if name in dtypes and x.dtype not in dtypes[name]:
            need = " or ".join(map(str, dict.fromkeys(dtypes[name])))
            raise TypeError(f"{name}: got {x.dtype}, need {need}")
        if x.device != q.device:
            raise ValueError(
                f"{name}: got device {x.device}, need q's, {q.device}"
            )

    if q.dim() != 4:
        _wrong_shape("q", q, "[B, T, H, K]")
    if k.shape != q.shape:
        _wrong_shape("k", k, f"q's, {list(q.shape)}")
    B, T, H, K = q.shape
    if min(B, T, H, K) < 1 or K > MAX_K:
        need = f"B, T, H, K >= 1 and K <= {MAX_K}"
        _wrong_shape("q", q, f"[B, T, H, K] with {need}")
    if v.dim() != 4 or v.shape[:2] != q.shape[:2] or min(v.shape) < 1:
        _wrong_shape("v", v, f"[{B}, {T}, HV, V] with HV, V >= 1")
    HV, V = v.shape[2:]
    if HV % H:
        need = f"[{B}, {T}, HV, V] with HV a multiple of q's {H} heads"
        _wrong_shape("v", v, need)
    if g is not None and g.shape not in (
        (HV,),
        (B, T, HV),
        (B, T, HV, K),
    ):
        need = f"[{HV}], [{B}, {T}, {HV}] or [{B}, {T}, {HV}, {K}]"
        _wrong_shape("g", g, need)
    if beta is not None and beta.shape != (B, T, HV):
        _wrong_shape("beta", beta, f"[{B}, {T}, {HV}]")
    N = B
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
            _wrong_shape("cu_seqlens", cu_seqlens, "[N + 1] with N >= 1")
        if B != 1:
            _wrong_shape("q", q, "[1, T, H, K] because cu_seqlens is given")
        N = len(cu_seqlens) - 1
    if initial_state is not None and initial_state.shape != (N, HV, K, V):
        need = f"[{N}, {HV}, {K}, {V}]"
        _wrong_shape("initial_state", initial_state, need)
    if scale is not None and not isinstance(scale, numbers.Real):
        raise TypeError(
            f"scale: got {type(scale).__name__}, need a real number or None"
        )
    if chunk_size is not None and not isinstance(chunk_size, int):
        raise TypeError(
            f"chunk_size: got {type(chunk_size).__name__}, need an int or None"
        )
    if chunk_size is not None and chunk_size not in CHUNK_SIZES:
        raise ValueError(
            f"chunk_size: got {chunk_size!r}, "
            f"need one of {CHUNK_SIZES} or None"
        )


def _wrong_shape(name: str, x: Tensor, need: str) -> None:
    raise ValueError(f"{name}: got shape {list(x.shape)}, need {need}")


def _check_offsets(offsets: list[int], T: int) -> None:
    increases = all(a <= b for a, b in itertools.pairwise(offsets))
    if offsets[0] != 0 or offsets[-1] != T or not increases:
        raise ValueError(
            f"cu_seqlens: got {offsets}, need values that start at 0, "
            f"never decrease and end at T = {T}"
        )
