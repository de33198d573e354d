"""Inputs of the selective scan."""

import torch


def tokens(
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
