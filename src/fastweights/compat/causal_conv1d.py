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
    check_flags,
    check_tensors,
    readable,
    wrong_shape,
)
from fastweights.compat.packed import check_named, documents, first_tokens
from fastweights.convolution import short_convolution
from fastweights.reference.backend import wide

ACTIVATIONS = (None, "silu", "swish")
WIDTHS = (2, 3, 4)  # of short_convolution; wider ones are a sum of shifts


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
    states = {
        "initial_states": initial_states,
        "final_states_out": final_states_out,
    }
    B, _, T = _check(x, weight, bias, states)
    cu_seqlens = None
    if cu_seq_lens_q is not None:
        check_named(x.mT, cu_seq_lens_q)
        if B != 1:
            raise ValueError(
                f"x: got shape {list(x.shape)}, need [1, D, T] because "
                "cu_seq_lens_q is given"
            )
        ends = cu_seq_lens_q[1:] + (T - cu_seq_lens_q[-1])
        cu_seqlens = torch.cat([cu_seq_lens_q[:1], ends])
    elif seq_idx is not None:
        check_tensors({"seq_idx": seq_idx})
        if seq_idx.shape != (B, T):
            raise ValueError(
                f"seq_idx: got shape {list(seq_idx.shape)}, need [{B}, {T}]"
            )
        cu_seqlens = _offsets(seq_idx)
    # [B, T, D]; a batch of packed rows is one row, with more documents.
    rows = x.mT if cu_seqlens is None else x.mT.reshape(1, B * T, -1)
    before = None if initial_states is None else initial_states.mT
    y, final = _short_convolution(
        rows,
        weight,
        bias,
        activation=activation,
        initial_state=before,
        cu_seqlens=cu_seqlens,
    )
    y = y.reshape(B, T, -1).mT
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
    B, D, _ = _check(columns, weight, bias, {})
    check_tensors({"conv_state": conv_state})
    if conv_state.dim() != 3 or conv_state.shape[:2] != (B, D):
        wrong_shape("conv_state", conv_state, f"[{B}, {D}, L]")
    L, past = conv_state.shape[-1], weight.shape[-1] - 1
    if past > L:
        raise ValueError(
            f"conv_state: got shape {list(conv_state.shape)}, need "
            f"[B, D, L] with L >= {past}"
        )
    y, _ = _short_convolution(
        columns.mT,
        weight,
        bias,
        activation=activation,
        initial_state=conv_state[..., L - past :].mT,
    )
    both = torch.cat([conv_state, columns.to(conv_state.dtype)], -1)
    conv_state.copy_(both[..., -L:])
    return y.mT.reshape(x.shape)


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: dict[str, Tensor | None],
) -> tuple[int, int, int]:
    """B, D and T, unless an argument does not fit: then raise, by its name."""
    check_tensors({"x": x, "weight": weight})
    if x.dim() != 3:
        wrong_shape("x", x, "[B, D, T]")
    B, D, T = x.shape
    if weight.dim() != 2 or weight.shape[0] != D or not weight.shape[1]:
        wrong_shape("weight", weight, f"[{D}, W]")
    shapes = {name: (B, D, weight.shape[1] - 1) for name in states}
    for name, y in ({"bias": bias} | states).items():
        if y is not None:
            check_tensors({name: y})
            if y.shape != shapes.get(name, (D,)):
                wrong_shape(name, y, f"{list(shapes.get(name, (D,)))}")
    return B, D, T


def _offsets(seq_idx: Int[Tensor, "B T"]) -> Int[Tensor, " BT+1"]:
    """Offsets of the documents of all rows, one after another.

    In a graph, and on another device than a CPU, there are as many as
    tokens, of which the last are empty: no device has to tell a host how
    many documents there are.
    """
    B, T = seq_idx.shape
    if readable(seq_idx):
        return documents(seq_idx, seq_idx)[0]
    new = first_tokens(seq_idx)
    place = torch.arange(B * T, device=seq_idx.device)
    starts = torch.where(new.flatten(), place, B * T).sort().values
    return F.pad(starts, (0, 1), value=B * T)


def _short_convolution(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, " C"] | None = None,
    *,
    activation: str | None = None,
    initial_state: Float[Tensor, "B W-1 C"] | None = None,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "B W-1 C"]]:
    """fastweights.convolution.short_convolution, with weights in any dtype."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation: got {activation!r}, need one of {ACTIVATIONS}"
        )
    if weight.shape[-1] not in WIDTHS:
        return _wide_convolution(
            *(x, weight, bias, activation, initial_state, cu_seqlens)
        )
    if weight.dtype not in (x.dtype, torch.float32):
        weight = weight.to(x.dtype)
    if bias is not None:
        bias = bias.to(weight.dtype)
    if initial_state is not None:
        initial_state = initial_state.to(x.dtype)
    return short_convolution(
        x,
        weight,
        bias,
        activation=None if activation is None else "silu",
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )


def _wide_convolution(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, " C"] | None,
    activation: str | None,
    initial_state: Float[Tensor, "B W-1 C"] | None,
    cu_seqlens: Int[Tensor, " N+1"] | None,
) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "B W-1 C"]]:
    """_short_convolution of any width, in PyTorch: one product per tap."""
    full, (T, W) = wide(x.dtype), (x.shape[1], weight.shape[-1])
    first = initial_state
    if first is None:
        first = x.new_zeros(x.shape[0], W - 1, x.shape[2])
    columns = torch.cat([first.to(full), x.to(full)], 1)
    taps = weight.to(full)
    y = columns[:, W - 1 :] * taps[:, -1]
    if cu_seqlens is not None:
        t = torch.arange(T, device=x.device)
        own = torch.searchsorted(cu_seqlens.to(t.dtype), t, right=True) - 1
        past = (t - cu_seqlens[own])[:, None]  # tokens of its document [T, 1]
    for s in range(1, W):
        tap = columns[:, W - 1 - s : W - 1 - s + T] * taps[:, W - 1 - s]
        y = y + (tap if cu_seqlens is None else tap.where(past >= s, 0))
    if bias is not None:
        y = y + bias.to(full)
    y = y if activation is None else F.silu(y)
    return y.to(x.dtype), columns[:, T:].to(x.dtype)
