"""TTT-Linear and TTT-MLP (Sun et al. 2024), a mini-batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import check_tensors, refuse_shape
from fastweights.deep.chunk_layout import ChunkLayout
from fastweights.deep.chunk_loop import LoopState, scan_chunks
from fastweights.deep.dual_form import (
    Gradients,
    NetworkWeights,
    Norm,
    answer_queries,
    as_layers,
    flatten,
    gradients,
    layer_norm,
    map_layers,
    sum_gradients,
    tensors_of,
    unflatten,
)
from fastweights.deep.network_arguments import (
    check_layers,
    check_network_inputs,
    check_shapes,
    check_state,
    check_weight_and_bias,
)
from fastweights.dtypes import compute_dtype, without_autocast
from fastweights.ops.common import any_length
from fastweights.ops.common.backends import KernelOrTorch
from fastweights.ops.common.registration import needs_gradient
from fastweights.ops.ttt import TTT, kernel_takes
from fastweights.ranks.group import refuse_ranks


def ttt(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H K"],
    rate: Float[Tensor, "B T H"],
    start: NetworkWeights,
    norm: Norm,
    step_scale: Float[Tensor, " C"],
    *,
    initial_state: Float[Tensor, "B H 2 P"] | None = None,
    position: Int[Tensor, " B"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    backend: KernelOrTorch = "auto",
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B H 2 P"]]:
    """Weights that learn v from k by mini-batches, read by q.

    With W' the weights at a mini-batch's start, its tokens t = 0, 1, ...:

        W_t = W' - step_scale_t sum_{s <= t} rate_s grad_s(W')
        grad_s = gradient of |LN(f(k_s; W')) - (v_s - k_s)|^2 / 2
        o_t = q_t + LN(f(q_t; W_t))

    and the next mini-batch starts with the last of these weights. This is
    ``online_learner(normed(network(), *norm), squared_error, summed(sgd,
    C))`` with q added, in the paper's dual form (section 2.5).

    Args:
        q, k, v: [B, T, H, K], of one dtype; computed in fp32 (fp64 if they
            are).
        rate: [B, T, H].
        start: the model's layers (W [H, K, N], b [H, N]), with GELU (tanh)
            between them: one for TTT-Linear, two for TTT-MLP.
        norm: the LayerNorm's weight and bias, [H, K] both; eps is 1e-6.
        step_scale: [C], the mini-batch's factors, of the paper 1 / (t + 1).
        initial_state: [B, H, 2, P] for P weights per head: what they have
            learned since ``start``, and the sum of the unfinished mini-batch;
            in fp32.
        position: [B], tokens that each row has read before; needed, like
            ``initial_state``, to go on.
        lengths: [B], tokens of each row; None: T.
        backend: "triton" (a kernel for whole mini-batches of one layer,
            without position and lengths, whose products are in q's dtype:
            K <= 128, 64 in fp32, C <= 16, CUDA), "torch" (PyTorch) or
            "auto" (on compute capability 9.x and 10.x the kernel in half
            precision, else PyTorch).

    Returns:
        o [B, T, H, K], in q's dtype, and the state [B, H, 2, P] after each
        row's last token.

    Raises:
        TypeError, ValueError: a dtype, device or shape does not fit; the
            message names the argument, what it got and what it needs.
    """
    refuse_ranks("ttt")
    check_network_inputs(q, k, v, {"rate": rate}, position, lengths)
    check_tensors(step_scale=step_scale)
    if step_scale.dim() != 1 or len(step_scale) < 1:
        refuse_shape("step_scale", step_scale, "[C] with C >= 1")
    dtype, size = q.dtype, len(step_scale)
    full = compute_dtype(dtype)
    B, T, H, K = q.shape
    check_layers(start, H, K, K)
    by_kernel = kernel_takes(backend, q, size, len(start))
    P = sum(x[0].numel() for layer in start for x in layer)
    check_shapes(v=(v, (B, T, H, K)))
    check_weight_and_bias("norm", norm, (H, K))
    check_state(q, initial_state, B, H, 2, P, after=position)
    if any_length.is_dynamic(T):
        results = (v.shape, dtype), ([B, H, 2, P], full)
        inputs = q, k, v, rate, start, norm, step_scale
        return any_length.call_as_operator(
            ttt,
            results,
            *inputs,
            initial_state=initial_state,
            position=position,
            lengths=lengths,
            backend=backend,
        )
    with without_autocast(q):
        tokens = (q, k, v)
        start = [(W.to(full), b.to(full)) for W, b in start]
        norm = (norm[0].to(full), norm[1].to(full))
        step_scale = step_scale.to(full)
        if initial_state is None:
            initial_state = q.new_zeros(B, H, 2, P)
        parts = initial_state.to(full).unbind(2)
        since, total = (unflatten(x, start) for x in parts)
        weights = map_layers(torch.add, since, start)
        outputs, done = [], 0
        layout = ChunkLayout(size, T, q.device, position, lengths)
        if layout.regular and (done := T // size * size):
            cut = [x[:, :done] for x in (*tokens, rate)]
            whole = _whole_by_kernel if by_kernel else _whole_by_torch
            weights, o = whole(weights, cut, norm, step_scale)
            outputs.append(o)
            layout = ChunkLayout(size, T - done, q.device)
            total = map_layers(torch.zeros_like, since)
        # Nothing, where every part begins a chunk.
        sums = None if layout.regular else total
        q, k, v, rate = (x[:, done:].to(full) for x in (*tokens, rate))
        rest = []
        for part in layout:
            rate_ = part.take(rate, 0.0).mT
            # [B, H, C, K]
            q_, k_, v_ = (part.take(x).transpose(1, 2) for x in (q, k, v))
            grads, o = _read_chunk(
                weights, sums, q_, k_, v_, rate_, norm, step_scale[part.place]
            )
            rest.append(o.transpose(1, 2))
            grad = sum_gradients(grads, rate_)
            grad = grad if sums is None else map_layers(torch.add, sums, grad)
            stepped = map_layers(
                partial(_take_step, step_scale[-1]), weights, grad
            )
            weights = map_layers(part.where_ends, stepped, weights)
            total = grad
            if not layout.regular:
                nothing = map_layers(torch.zeros_like, grad)
                total = sums = map_layers(part.where_ends, nothing, grad)
        if rest:
            outputs.append(layout.join(rest).to(dtype))
        since = map_layers(torch.sub, weights, start)
        after = flatten([*since, *total]).unflatten(-1, (2, -1))
        return torch.cat(outputs, 1), after


def _take_step(scale: Tensor, W: Tensor, G: Tensor) -> Tensor:
    return W - scale * G


def _read_chunk(
    weights: NetworkWeights,
    sums: NetworkWeights | None,
    q: Float[Tensor, "B H C K"],
    k: Float[Tensor, "B H C K"],
    v: Float[Tensor, "B H C K"],
    rate: Float[Tensor, "B H C"],
    norm: Norm,
    scale: Float[Tensor, "#B C"],
) -> tuple[Gradients, Float[Tensor, "B H C K"]]:
    """A mini-batch's gradients, and what its queries read."""
    grads = gradients(weights, k, v - k, norm)
    scale = scale[:, None]
    # [B, H, C, C]
    share = (scale[..., None] * rate[:, :, None]).tril()
    z = answer_queries(q, weights, sums, grads, None, -scale, share)
    return grads, q + layer_norm(z, norm)[0]


def _whole_by_torch(
    weights: NetworkWeights,
    tokens: Sequence[Tensor],
    norm: Norm,
    step_scale: Tensor,
) -> tuple[NetworkWeights, Float[Tensor, "B T H K"]]:
    """Complete mini-batches of q, k, v and rates, [B, T, H, ...]."""

    def step(state: LoopState, *chunk: Tensor) -> tuple[LoopState, Tensor]:
        W = as_layers(state)
        q, k, v, rate = (x.to(step_scale.dtype) for x in chunk)
        grads, o = _read_chunk(W, None, q, k, v, rate, norm, step_scale[None])
        sums = sum_gradients(grads, rate)
        W = map_layers(partial(_take_step, step_scale[-1]), W, sums)
        return tensors_of(W), o.to(chunk[0].dtype)

    state, o = scan_chunks(step, tensors_of(weights), tokens, len(step_scale))
    return as_layers(state), o


def _whole_by_kernel(
    weights: NetworkWeights,
    tokens: Sequence[Tensor],
    norm: Norm,
    step_scale: Tensor,
) -> tuple[NetworkWeights, Float[Tensor, "B T H K"]]:
    """Complete mini-batches of one layer, by Triton."""
    *qkv, rate = tokens
    inputs = (*qkv, rate.to(step_scale.dtype), *weights[0], *norm, step_scale)
    keep = needs_gradient(*inputs)
    o, W, b = TTT(*(x.contiguous() for x in inputs), keep)
    return [(W, b)], o
