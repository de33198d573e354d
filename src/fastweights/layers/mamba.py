"""Mamba (Gu and Dao 2023)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.layers.convolution import ShortConvolution
from fastweights.layers.parts import (
    SMALLEST_STEP,
    Factory,
    check_input,
    check_range,
    check_sizes,
    inverse_softplus,
    uniform,
    without_decay,
)
from fastweights.layers.state import LayerState, Offsets, updated
from fastweights.selective import selective_scan


class Mamba(nn.Module):
    """Mamba's layer: a decay for every entry of the state (arXiv 2312.00752).

        u, z = W_in x,  u = convolution(u)
        dt, B, C = W_x u
        y = W_o fastweights.selective_scan(u, W_dt dt, A, B, C, D, z=z)

    Args:
        dim: width D of x and y.
        state_size: entries N of the state per channel of u.
        expand: width of u over dim.
        dt_rank: rank of dt; dim / 16, rounded up, if None.
        conv_size: width of the convolution.
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
        check_sizes(dim=dim, state_size=state_size)
        check_range("dt_range", dt_range)
        inner, R = int(dim * expand), dt_rank or math.ceil(dim / 16)
        check_sizes(dt_rank=R, **{"expand * dim": inner})
        self.dim, self.dt_range = dim, dt_range
        self.widths = (R, state_size, state_size)
        to: Factory = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False, **to)
        self.convolution = ShortConvolution(inner, conv_size, bias=True, **to)
        self.x_proj = nn.Linear(inner, sum(self.widths), bias=False, **to)
        self.dt_proj = nn.Linear(R, inner, bias=False, **to)
        self.dt_bias = without_decay(nn.Parameter(torch.empty(inner, **to)))
        self.A_log = without_decay(
            nn.Parameter(torch.empty(inner, state_size, **to))
        )
        self.D = without_decay(nn.Parameter(torch.ones(inner, **to)))
        self.o_proj = nn.Linear(inner, dim, bias=False, **to)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A = 1 .. N in every channel, dt log-uniform, both in fp32."""
        n = torch.arange(1, self.A_log.shape[1] + 1, device=self.D.device)
        self.A_log.copy_(n.float().log().expand_as(self.A_log))
        low, high = (math.log(x) for x in self.dt_range)
        dt = uniform(self.dt_bias, low, high).exp().clamp_min(SMALLEST_STEP)
        self.dt_bias.copy_(inverse_softplus(dt))
        bound = self.dt_proj.in_features**-0.5
        self.dt_proj.weight.uniform_(-bound, bound)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Float[Tensor, "B T D"], LayerState]:
        """y, and the state (S, convolution) after each sequence's last token.

        Without gradients the one that came in is changed in place.
        """
        check_input(x, self.dim, state, cu_seqlens)
        u, z = self.in_proj(x).chunk(2, -1)
        u, inputs = self.convolution(u, state, cu_seqlens)
        dt, B, C = self.x_proj(u).split(self.widths, -1)
        full = torch.promote_types(u.dtype, torch.float32)
        y, S = selective_scan(
            u,
            self.dt_proj(dt).to(full),
            -self.A_log.to(full).exp(),
            B,
            C,
            self.D.to(full),
            z=z.to(full),
            dt_bias=self.dt_bias.to(full),
            dt_softplus=True,
            initial_state=None if state is None else state.get("S"),
            cu_seqlens=cu_seqlens,
        )
        return self.o_proj(y), updated(state, S=S, convolution=inputs)
