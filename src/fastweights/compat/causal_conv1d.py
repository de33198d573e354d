"""causal_conv1d's two functions, which keep packed documents apart.

y_t = act(sum_w weight[:, w] x_{t - W + 1 + w} + bias), depthwise: the short
convolution before q, k and v. Signatures as in causal_conv1d 1.5, whose
layout is [B, D, T], with one more parameter, cu_seq_lens_q.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import (
    check_dims,
    check_flags,
    check_packed,
    check_shapes,
    check_tensors,
    is_readable,
    refuse_shape,
)
from fastweights.compat.packed import document_offsets, is_first_token
from fastweights.ops.convolution import WIDTHS, short_convolution
from fastweights.packing import num_sequences
from fastweights.torch_backend.convolution import last_inputs, unactivated

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]

ACTIVATIONS = (None, "silu", "swish")


def causal_conv1d_fn(
    x: Float[Tensor, "B D T"],
    weight: Float[Tensor, "D W"],
    bias: Float[Tensor, " D"] | None = None,
    seq_idx: Int[Tensor, "B T"] | None = None,
    initial_states: Float[Tensor, "B D W-1"] | None = None,
    return_final_states: bool = False,
    final_states_out: Float[Tensor, "B D W-1"] | None = None,
    activation: str | None = None,
    cu_seq_lens_q: Int[Tensor, " N+1"] | None = None,
) -> (
    Float[Tensor, "B D T"]
    | tuple[Float[Tensor, "B D T"], Float[Tensor, "B D W-1"]]
):
    """Each channel convolved with its own W weights, over the past.

    Args:
        x, weight, bias: any floating dtype; sums are in fp32 (fp64 if x is).
        seq_idx: the document of each token, side by side; what is below 0
            belongs to none, and y is 0 there.
        initial_states: the columns before the first of x; zeros if None.
        return_final_states: whether to return the last W - 1 columns too.
        final_states_out: where to write these.
        activation: None, "silu" or "swish", which are one function.
        cu_seq_lens_q: offsets of the documents in the last
            cu_seq_lens_q[-1] columns of x, B = 1; columns before these, which
            come from a cache, belong to the first document. Used instead of
            seq_idx if both are given, since both say the same.

    Returns:
        y [B, D, T] in x's dtype, and with return_final_states the pair of it
        and the final states [B, D, W - 1].

    Raises:
        TypeError: seq_idx is not of integers.
        ValueError: there is no such activation, a shape does not fit, or
            states go with packed documents.
    """
    check_flags(return_final_states=return_final_states)
    packed = seq_idx is not None or cu_seq_lens_q is not None
    if packed and (initial_states is not None or return_final_states):
        name = "seq_idx" if cu_seq_lens_q is None else "cu_seq_lens_q"
        raise ValueError(
            f"{name}: got packed documents, need None with initial_states "
            "or return_final_states"
        )
    B, D, T = _checked_sizes(x, weight, bias)
    W = weight.shape[1]
    check_shapes(
        initial_states=(initial_states, (B, D, W - 1)),
        final_states_out=(final_states_out, (B, D, W - 1)),
        seq_idx=(seq_idx, (B, T)),
    )
    cu_seqlens = None
    if cu_seq_lens_q is not None:
        check_packed(x.mT, cu_seq_lens_q, name="cu_seq_lens_q")
        if B != 1:
            refuse_shape("x", x, "[1, D, T] because cu_seq_lens_q is given")
        ends = cu_seq_lens_q[1:] + (T - cu_seq_lens_q[-1])
        cu_seqlens = torch.cat([cu_seq_lens_q[:1], ends])
    elif seq_idx is not None:
        cu_seqlens = _static_offsets(seq_idx)
    # [B, T, D]; a batch of packed rows is one row, with more documents.
    rows = x.mT if cu_seqlens is None else x.mT.reshape(1, B * T, D)
    before = None if initial_states is None else initial_states.mT
    y, final = _convolve(rows, weight, bias, activation, before, cu_seqlens)
    y = y.reshape(B, T, D).mT
    if seq_idx is not None and cu_seq_lens_q is None:
        y = y.masked_fill(seq_idx[:, None] < 0, 0)
    if not return_final_states:
        return y
    final = final.mT
    if final_states_out is not None:
        final = final_states_out.copy_(final)
    return y, final


def causal_conv1d_update(
    x: Float[Tensor, "B D T"] | Float[Tensor, "B D"],
    conv_state: Float[Tensor, "B D L"],
    weight: Float[Tensor, "D W"],
    bias: Float[Tensor, " D"] | None = None,
    activation: str | None = None,
    cache_seqlens: Int[Tensor, " B"] | None = None,
    conv_state_indices: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B D T"] | Float[Tensor, "B D"]:
    """causal_conv1d_fn for a few new tokens.

    Args:
        x, weight, bias, activation: as there; x may lack T, which is 1 then.
        conv_state: the last L >= W - 1 columns, which it is updated to hold,
            in place.
        cache_seqlens, conv_state_indices: not supported, None.

    Returns:
        y of x's shape and dtype.

    Raises:
        NotImplementedError: an argument that is not supported is given.
        ValueError: there is no such activation, or L is below W - 1.
    """
    for name, got in (
        ("cache_seqlens", cache_seqlens),
        ("conv_state_indices", conv_state_indices),
    ):
        if got is not None:
            raise NotImplementedError(
                f"{name}: got {type(got).__name__}, need None: the state of "
                "row b is conv_state[b], oldest column first"
            )
    columns = x
    if isinstance(x, Tensor) and x.dim() == 2:
        columns = x[..., None]
    B, D, _ = _checked_sizes(columns, weight, bias)
    check_tensors(conv_state=conv_state)
    *rows, L = conv_state.shape or (0,)
    past = weight.shape[1] - 1
    if rows != [B, D] or past > L:
        need = f"[{B}, {D}, L] with L >= {past}"
        refuse_shape("conv_state", conv_state, need)
    before = conv_state[..., L - past :].mT
    y, _ = _convolve(columns.mT, weight, bias, activation, before)
    both = torch.cat([conv_state, columns.to(conv_state.dtype)], -1)
    conv_state.copy_(both[..., -L:])
    return y.mT.reshape(x.shape)


def _checked_sizes(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[int, int, int]:
    """B, D and T, unless an argument does not fit: then raise, by its name."""
    check_dims("[B, D, T]", x=x)
    check_tensors(weight=weight)
    B, D, T = x.shape
    if weight.dim() != 2 or weight.shape[0] != D or not weight.shape[1]:
        refuse_shape("weight", weight, f"[{D}, W]")
    check_shapes(bias=(bias, (D,)))
    return B, D, T


def _static_offsets(seq_idx: Int[Tensor, "B T"]) -> Int[Tensor, " BT+1"]:
    """Offsets of the documents of all rows, one after another.

    In a graph, and on another device than a CPU, there are as many as
    tokens, of which the last are empty: no device has to tell a host how
    many documents there are.
    """
    B, T = seq_idx.shape
    if is_readable(seq_idx):
        return document_offsets(seq_idx, seq_idx)[0]
    new = is_first_token(seq_idx)
    place = torch.arange(B * T, device=seq_idx.device)
    starts = torch.where(new.flatten(), place, B * T).sort().values
    return F.pad(starts, (0, 1), value=B * T)


def _convolve(
    x: Float[Tensor, "B T D"],
    weight: Float[Tensor, "D W"],
    bias: Float[Tensor, " D"] | None,
    activation: str | None,
    before: Float[Tensor, "N W-1 D"] | None,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N W-1 D"]]:
    """short_convolution with weights of any dtype and width."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation: got {activation!r}, need one of {ACTIVATIONS}"
        )
    if weight.shape[1] not in WIDTHS:  # in PyTorch, by its own gradients
        rows, y, at = unactivated(x, weight, bias, before, cu_seqlens)
        y = y if activation is None else F.silu(y)
        N, W = num_sequences(x, cu_seqlens), weight.shape[1]
        final = last_inputs(rows, at, N, W)
        return y.to(x.dtype), final.to(x.dtype)
    if weight.dtype not in (x.dtype, torch.float32):
        weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(weight.dtype)
    before = None if before is None else before.to(x.dtype)
    return short_convolution(
        x,
        weight,
        bias,
        activation=None if activation is None else "silu",
        initial_state=before,
        cu_seqlens=cu_seqlens,
    )
