"""Mamba (Gu and Dao 2023)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fastweights.dtypes import upcast
from fastweights.layers.common.convolution import ShortConvolution
from fastweights.layers.common.gates import draw_dt_bias_
from fastweights.layers.common.layer import FactoryOptions, Hidden, Layer
from fastweights.layers.common.layer_arguments import check_range, scaled_size
from fastweights.layers.common.state import LayerState, Offsets, state_if_step
from fastweights.ops.selective import MAX_N, selective_scan, selective_step


class Mamba(Layer):
    """Mamba's layer: a decay for every entry of the state (arXiv 2312.00752).

        u, z = W_in x
        dt, B, C = W_x u
        y = W_o fastweights.selective_scan(u, W_dt dt, A, B, C, D, z=z)

    with u = silu(convolution(u)), A = -exp(A_log), and softplus(. + dt_bias)
    taken of W_dt dt by the scan.

    Differs from the published one in: nothing, by its defaults.

    Weights of mamba_ssm and transformers have the same layout: convolution
    is conv1d, dt_bias is dt_proj.bias, o_proj is out_proj.

    Args:
        dim: width D of x and y.
        state_size: entries N of the state per channel of u.
        expand: width of u over dim.
        dt_rank: rank of dt; dim / 16, rounded up, if None.
        conv_size: width of the convolution, 2 to 4; it has a bias.
        dt_range: bounds of dt at the start.
    """

    def __init__(
        self,
        dim: int,
        *,
        state_size: int = 16,
        expand: float = 2.0,
        dt_rank: int | None = None,
        conv_size: int = 4,
        dt_range: tuple[float, float] = (1e-3, 1e-1),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_range("> 0", dt_range=dt_range)
        if state_size > MAX_N:
            raise ValueError(
                f"state_size: got {state_size}, need at most {MAX_N}"
            )
        inner = scaled_size("expand", expand, dim=dim)
        R = math.ceil(dim / 16) if dt_rank is None else dt_rank
        self.dim, self.dt_range = dim, dt_range
        self.widths = (R, state_size, state_size)
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False, **factory)
        self.convolution = ShortConvolution(
            inner, conv_size, bias=True, **factory
        )
        self.x_proj = nn.Linear(inner, sum(self.widths), bias=False, **factory)
        self.dt_proj = nn.Linear(R, inner, bias=False, **factory)
        self.dt_bias = nn.Parameter(torch.empty(inner, **factory))
        self.A_log = nn.Parameter(torch.empty(inner, state_size, **factory))
        self.D = nn.Parameter(torch.empty(inner, **factory))
        self.o_proj = nn.Linear(inner, dim, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set A to 1 .. N in each channel, D to 1; draw dt log-uniform."""
        self.D.fill_(1)
        n = torch.arange(1, self.A_log.shape[1] + 1, device=self.D.device)
        self.A_log.copy_(n.float().log().expand_as(self.A_log))
        draw_dt_bias_(self.dt_bias, self.dt_range)
        bound = self.dt_proj.in_features**-0.5
        self.dt_proj.weight.uniform_(-bound, bound)

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, convolution) after these tokens."""
        u, z = self.in_proj(x).chunk(2, -1)
        u, past = self.convolution(u, state, cu_seqlens)
        dt, B, C = self.x_proj(u).split(self.widths, -1)
        tensors = (
            u,
            upcast(self.dt_proj(dt)),
            -upcast(self.A_log).exp(),
            B,
            C,
            upcast(self.D),
        )
        gates: dict[str, Any] = {
            "z": upcast(z),
            "dt_bias": upcast(self.dt_bias),
            "dt_softplus": True,
        }
        if stepped := state_if_step(state, x, cu_seqlens):
            S = stepped.tensor("S")
            y = selective_step(*tensors, **gates, state=S, rows=stepped.rows)
        else:
            y, S = selective_scan(
                *tensors,
                **gates,
                initial_state=state and state.batch_field("S"),
                cu_seqlens=cu_seqlens,
            )
        return self.o_proj(y), LayerState(S=S, convolution=past)
