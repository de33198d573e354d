"""A stand-in until the operator lands."""

import torch
import torch.nn.functional as F


def short_convolution(
    x,
    weight,
    bias=None,
    *,
    activation="silu",
    initial_state=None,
    cu_seqlens=None,
    backend="auto",
):
    B, T, C = x.shape
    W = weight.shape[1]
    full = torch.promote_types(x.dtype, torch.float32)
    if cu_seqlens is None:
        first = (
            x.new_zeros(B, W - 1, C)
            if initial_state is None
            else initial_state.to(x.dtype)
        )
        p = torch.cat([first, x], 1)
        y = sum(
            p[:, j : j + T].to(full) * weight[:, j].to(full) for j in range(W)
        )
        last = p[:, T:]
    else:
        ys, lasts = [], []
        for n in range(len(cu_seqlens) - 1):
            a, b = int(cu_seqlens[n]), int(cu_seqlens[n + 1])
            s = None if initial_state is None else initial_state[n : n + 1]
            y1, l1 = short_convolution(
                x[:, a:b], weight, None, activation=None, initial_state=s
            )
            ys.append(y1.to(full))
            lasts.append(l1)
        y, last = torch.cat(ys, 1), torch.cat(lasts, 0)
    if bias is not None:
        y = y + bias.to(full)
    if activation is not None:
        y = F.silu(y)
    return y.to(x.dtype), last


def convolve_heads(
    x,
    weight,
    bias=None,
    *,
    heads,
    sizes,
    normalize=True,
    eps=1e-6,
    activation="silu",
    initial_state=None,
    cu_seqlens=None,
    backend="auto",
):
    y, last = short_convolution(
        x,
        weight,
        bias,
        activation=activation,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )
    (H, HV), (K, V) = heads, sizes
    q, k, v = (
        t.unflatten(-1, (-1, s))
        for t, s in zip(y.split([H * K, H * K, HV * V], -1), (K, K, V))
    )
    if normalize:
        f = torch.promote_types(y.dtype, torch.float32)
        q, k = (
            (
                t.to(f)
                * (t.to(f).square().sum(-1, keepdim=True) + eps).rsqrt()
            ).to(t.dtype)
            for t in (q, k)
        )
    return q, k, v.contiguous(), last
