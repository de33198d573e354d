"""Inputs of the selective scan, and what Mamba makes of them."""

import torch
import torch.nn.functional as F


def scan_inputs(
    *,
    batch=2,
    T=20,
    D=3,
    N=5,
    G=None,
    S=None,
    own=False,
    dtype=torch.float64,
    strength=None,
    device="cpu",
    seed=0,
):
    """Random inputs; ``strength`` is dt A if it is to be the same for all.

    G groups share B and C, S is the number of states, batch unless given;
    ``own`` adds Mamba's z and dt_bias.
    """
    torch.manual_seed(seed)
    groups = () if G is None else (G,)
    x = {
        "x": torch.randn(batch, T, D),
        "dt": torch.rand(batch, T, D) + 0.01,
        "A": -(torch.rand(D, N) * 3).exp(),
        "B": torch.randn(batch, T, *groups, N),
        "C": torch.randn(batch, T, *groups, N),
        "D": torch.randn(D),
        "initial_state": torch.randn(S or batch, D, N),
    }
    if strength is not None:
        x["dt"], x["A"] = torch.ones(batch, T, D), torch.full((D, N), strength)
    if own:
        x |= {"z": torch.randn(batch, T, D), "dt_bias": torch.randn(D)}
    wide = torch.promote_types(dtype, torch.float32)
    narrow = ("x", "B", "C", "z")
    return {
        name: t.to(device, dtype if name in narrow else wide)
        for name, t in x.items()
    }


def selective_scan_fn(u, delta, A, B, C, D, z, delta_bias):
    """Mamba's own, as its test's reference has it, with its softplus."""
    delta = F.softplus(delta + delta_bias[:, None])
    B, C = (t[:, None] if t.dim() == 3 else t for t in (B, C))
    B, C = (
        t.repeat_interleave(u.shape[1] // t.shape[1], dim=1) for t in (B, C)
    )
    decay = torch.einsum("bdl,dn->bdln", delta, A).exp()
    write = torch.einsum("bdl,bdnl,bdl->bdln", delta, B, u)
    h, ys = torch.zeros_like(write[:, :, 0]), []
    for t in range(u.shape[2]):
        h = decay[:, :, t] * h + write[:, :, t]
        ys.append(torch.einsum("bdn,bdn->bd", h, C[..., t]))
    y = torch.stack(ys, dim=2) + u * D[:, None]
    return y * F.silu(z), h
