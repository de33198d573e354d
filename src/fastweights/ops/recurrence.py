"""linear_recurrence: one operator for all members, in front of its backends.

    S_t = (I - beta_t k_t k_t^T) Diag(e^{g_t}) S_{t-1} + beta_t k_t v_t^T
    S_t =                        Diag(e^{g_t}) S_{t-1} +        k_t v_t^T
    S_t = (I -        k_t e_t^T) Diag(e^{g_t}) S_{t-1} +        k_t v_t^T
    o_t = scale * S_t^T q_t

The first line is the delta rule, the second the additive rule (beta None), and
in the third another key, ``erase_key``, erases.

A call goes this way, as far as the kernels:

    linear_recurrence                     autocast; whether ranks share tokens
    recurrence_operator.local_recurrence  checks; "loop" ends here
    recurrence_operator.prepare_call      layouts; what was left to default
    registration.Operator                 what autograd and torch.compile see
    recurrence_operator._forward          a backend; what is saved
    kernels/recurrence/backend            the kind of call
    kernels/recurrence/stages             what that kind launches
    kernels/recurrence/schedule           sizes, memory; the launches

PyTorch's chunks are ``torch_backend/recurrence.forward`` in place of the last
three, and a rank's tokens go through ``recurrence_on_ranks`` in place of the
second.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import RecurrenceOperands
from fastweights.dtypes import cast_for_autocast
from fastweights.ops.common.backends import Backend
from fastweights.ops.recurrence_on_ranks import recurrence_over_ranks
from fastweights.ops.recurrence_operator import local_recurrence
from fastweights.ranks.group import current_ranks


def linear_recurrence(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, " ..."] | None = None,
    beta: Float[Tensor, "B T HV"] | None = None,
    *,
    erase_key: Float[Tensor, "B T _ K"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"]]:
    """Every member of the family, from linear attention to Comba.

        o, state = fw.linear_recurrence(q, k, v, g, beta)

    Args:
        q, k: [B, T, H, K], of one dtype with v (fp64, fp32, fp16 or bf16).
        v: [B, T, HV, V]; HV is a multiple of H, and value head h uses key
            head h // (HV // H).
        g: natural log of the decay, finite and <= 0: [HV] fixed,
            [B, T, HV] per head and step, or [B, T, HV, K] per key channel and
            step. fp32 or q's dtype. None: nothing is forgotten.
        beta: [B, T, HV] write strength of the delta rule, fp32 or q's
            dtype. None: the additive rule (which is not beta = 1).
        erase_key: [B, T, HV, K] or [B, T, H, K], q's dtype: the key that
            erases, times the strength of that, while k writes. v has the
            strength of the writing: beta k with beta v is the delta rule of
            beta, which is then not given. Stability says what may grow.
        scale: factor on the outputs; K**-0.5 if None.
        initial_state: [N, HV, K, V] fp32 (fp64 if q is), N = B or the
            number of packed sequences; zeros if None.
        cu_seqlens: [N + 1] int32 or int64, B = 1: sequence n is the tokens
            from cu_seqlens[n] up to cu_seqlens[n + 1], possibly none. It
            lies on q's device. Tokens after the last sequence, which fill a
            pack up to a fixed length, have outputs and gradients of 0. On a
            GPU the kernels read the offsets there, unchecked: those that do
            not rise from 0 to at most T give wrong numbers, but reach no
            other memory. On a CPU, and by PyTorch's backends, they are read
            and checked on the host.
        chunk_size: tokens per chunk, 16, 32 or 64; None chooses.
        backend: "triton" (kernels: CUDA, compute capability 8.0 or higher,
            K <= 256, not fp64), "torch" (the same matrix products in
            PyTorch), "loop" (one token at a time, PyTorch) or "auto" (the
            first that runs on q's device, dtype and K).

    Returns:
        o [B, T, HV, V] in v's dtype, and the state after the last token of
        each sequence, [N, HV, K, V] in fp32 (fp64 if q is). Gradients flow
        to every input from both results; gradients of gradients only with
        backend "loop".

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, value or device does not fit; the message names
            the argument, what it got and what it needs.
        NotImplementedError: in the backward of a backward, under a transform
            of torch.func, or in forward-mode autograd, unless backend is
            "loop".

    Numerics:
        PyTorch's backends compute in fp32 (fp64 if q is). The kernels add up
        in fp32, and take gates, beta and states as fp32. They multiply in q's
        dtype, which in fp16 the state's entries must fit (and with a gate per
        channel 256 times k's), and fp32 as PyTorch multiplies it on CUDA: in
        TF32 where ``torch.backends.cuda.matmul.fp32_precision`` is "tf32",
        which is also what ``torch.set_float32_matmul_precision`` makes of
        "high" and "medium", else to fp32 accuracy (as always for K > 128).
        With a gate per channel in half precision a step lets at least 2^-29
        of a channel through to the next 7 tokens, unless its chunk decays by
        2^-8192. Autocast rounds q, k, v and erase_key on their way in and
        nothing else. Two runs give the same bits.

    Stability:
        Where 0 <= beta |k|^2 <= 2 no step of the delta rule amplifies what is
        in the state. An ``erase_key`` e multiplies it by I - k e^T, which has
        the eigenvalue 1 - e.k, and with e parallel to k and e.k from 0 to 2
        lengthens nothing. With e = b k, |k| = 1 and a strength b from 0 to
        1 per channel the eigenvalue is between 0 and 1, but the matrix may
        lengthen a state: by a factor of 2 / sqrt(3) = 1.155 at most, where b
        is 1 in channels that have a third of |k|^2, and 0 in the others.
        Under strengths that are the same for all tokens that does not add up;
        under others it may, token by token, unless decays are below
        sqrt(3) / 2. Where a state grows, the inverse of its chunks does, and
        so do rounding errors; no backend bounds them. The kernels compute an
        inverse that fp16 cannot hold in TF32, but keep it in q's dtype: it
        must fit.

    With ``FASTWEIGHTS_CHECK=1`` in the environment when fastweights is
    imported, :func:`fastweights.arguments.check_values_if_enabled` looks at
    values too. FLOP counters count what
    :mod:`fastweights.ops.common.flops` says. DTensors go through
    ``torch.distributed.tensor.experimental.local_map``, sharded over heads:
    Shard(2) of what has tokens, Shard(1) of the states.
    """
    q, k, v = cast_for_autocast(q, k, v)
    if erase_key is not None:
        (erase_key,) = cast_for_autocast(erase_key)
    operands = RecurrenceOperands(
        q, k, v, g, beta, erase_key, initial_state, cu_seqlens
    )
    if (ranks := current_ranks()) is None:
        return local_recurrence(operands, scale, chunk_size, backend)
    return recurrence_over_ranks(ranks, operands, scale, chunk_size, backend)
