"""Mamba-2 (Dao and Gu 2024)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.dtypes import upcast
from fastweights.layers.common.convolution import HeadsConvolution
from fastweights.layers.common.gates import Decay
from fastweights.layers.common.layer import FactoryOptions, FamilyLayer, Hidden
from fastweights.layers.common.layer_arguments import scaled_size, whole_number
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.state import LayerState, Offsets, run_recurrence

Steps = Float[Tensor, "B T H"]


class StepAndDecay(Decay):
    """dt beside g: Mamba-2 writes with the step of its decay."""

    def forward(  # type: ignore[override]
        self, a: Steps
    ) -> tuple[Steps, Steps]:
        dt = self.dt(a)
        return dt, self.log_decay(dt)


class Mamba2(FamilyLayer):
    """Mamba-2's layer: a decay per head and step (arXiv 2405.21060).

        C, B, u = silu(convolution(W_x x))
        dt = softplus(W_dt x + dt_bias),  g = -exp(A_log) dt
        y = W_o norm((o + D u) * silu(W_z x))

    with o by fastweights.mamba2 for q, k, v = C, B, dt u. So dt is the step
    of the decay and of the write in one, and the norm, over all heads of a
    group together, comes after the gate: in Gated DeltaNet the gate comes
    after the norm.

    Public implementations differ: A starts at 1, 2, .. H in transformers and
    is drawn in mamba_ssm and flash-linear-attention, as here; with several
    groups these two norm each of them, and so does this layer.

    Differs from the published one in: the order of the channels of x_proj.

    Weights of mamba_ssm and transformers: the rows of in_proj are z_proj,
    then those of x_proj in the order u, B, C, then dt_proj; conv1d has the
    order u, B, C, and convolution.short_convolution has C, B, u.

    Args:
        dim: width D of x and y.
        head_dim: channels of u per head; there are expand * dim / head_dim
            heads.
        state_size: size of a row of B and C.
        expand: width of u over dim.
        num_groups: groups of heads that share B and C.
        conv_size: width of the convolution, 2 to 4; it has a bias.
        A_range, dt_range: as in :class:`fastweights.layers.Decay`.
        norm_eps: of the norm.
    """

    def __init__(
        self,
        dim: int,
        *,
        head_dim: int = 64,
        state_size: int = 128,
        expand: float = 2.0,
        num_groups: int = 1,
        conv_size: int = 4,
        A_range: tuple[float, float] = (1.0, 16.0),
        dt_range: tuple[float, float] = (1e-3, 1e-1),
        norm_eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        G, N, P = num_groups, state_size, head_dim
        inner = scaled_size("expand", expand, dim=dim)
        H = whole_number("expand * dim / head_dim", inner / P)
        if H % G:
            raise ValueError(
                f"num_groups: got {G}, need a divisor of the {H} heads, "
                "expand * dim / head_dim"
            )
        self.dim, self.G = dim, G
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.x_proj = nn.Linear(dim, 2 * G * N + inner, bias=False, **factory)
        self.convolution = HeadsConvolution(
            (G, H), (N, P), conv_size, qk_l2norm=False, bias=True, **factory
        )
        self.dt_proj = nn.Linear(dim, H, bias=False, **factory)
        self.decay = StepAndDecay(
            H, A_range=A_range, dt_range=dt_range, **factory
        )
        self.D = nn.Parameter(torch.empty(H, **factory))
        self.z_proj = nn.Linear(dim, inner, bias=False, **factory)
        self.norm = OutputNorm(
            inner // G, None, num_heads=G, eps=norm_eps, **factory
        )
        self.o_proj = nn.Linear(inner, dim, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set D to 1."""
        self.D.fill_(1)

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, convolution) after these tokens."""
        C, B, u, past = self.convolution(self.x_proj(x), state, cu_seqlens)
        dt, g = self.decay(self.dt_proj(x))
        o, S = run_recurrence(
            C,
            B,
            (dt[..., None] * u).to(u.dtype),
            g,
            state=state,
            cu_seqlens=cu_seqlens,
            scale=1.0,
        )
        y = upcast(o) + self.D.to(dt.dtype)[:, None] * u
        y = y.flatten(2) * F.silu(upcast(self.z_proj(x)))
        y = self.norm(y.unflatten(-1, (self.G, -1))).to(u.dtype)
        return self.o_proj(y), LayerState(S=S, convolution=past)
