"""Inputs of the short convolution, and the one of heads as one of channels."""

import torch

from fastweights.ops.convolution import convolve_heads

HEADS = {"heads": (2, 3), "sizes": (3, 2)}  # 18 channels


def convolution_inputs(
    *,
    B=2,
    T=9,
    C=18,
    W=4,
    N=None,
    bias=True,
    state=True,
    dtype=torch.float64,
    single=None,
    device="cpu",
    seed=0,
):
    """Random inputs; ``single`` is the filter's dtype, if not x's.

    N is the number of states, B unless given.
    """
    torch.manual_seed(seed)
    x = {"x": torch.randn(B, T, C), "weight": torch.randn(C, W)}
    if bias:
        x["bias"] = torch.randn(C)
    if state:
        x["initial_state"] = torch.randn(N or B, W - 1, C)
    wide = single or dtype
    filters = ("weight", "bias")
    return {
        name: t.to(device, wide if name in filters else dtype)
        for name, t in x.items()
    }


def flat(**inputs):
    """convolve_heads with q, k and v side by side again, for ``results``."""
    q, k, v, state = convolve_heads(**inputs)
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    return torch.cat([t.flatten(2) for t in (q, k, v)], dim=2), state
