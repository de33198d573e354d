"""Gates of a layer: its decay and its strength of writing."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.dtypes import compute_dtype, upcast
from fastweights.layers.common.layer import CheckedModule, FactoryOptions
from fastweights.layers.common.layer_arguments import check_range
from fastweights.layers.common.plain_modules import note_source_forward

SMALLEST = 1e-4  # A and dt at the start


@note_source_forward
class Decay(CheckedModule):
    """g = -exp(A_log) softplus(a + dt_bias): Mamba-2's gate (Dao and Gu 2024).

    When a is 0, head h forgets half in ln 2 / (A dt) tokens, with A uniform
    in ``A_range`` and dt log-uniform in ``dt_range``: 0.4 to 700 tokens with
    the published ranges, half of the heads within 10. What has to be recalled
    over more tokens starts better from a smaller A: (0.01, 0.16) is a hundred
    times slower. A is drawn in fp32 and is at least 1e-4: from a draw of 0
    A_log is -inf, its gradient 0, and the head never forgets, nor learns to.

    With ``lower_bound`` g = lower_bound * sigmoid(exp(A_log) (a + dt_bias)),
    which no input makes smaller than the bound: KDA's "safe gate" in
    flash-linear-attention, GLM-5-Next and Ling, all with -5. A_log starts at
    0 then, and half-lives at 1.5 to 139 tokens.

    Args:
        num_heads: heads H, one A each.
        channels: gates per head, one dt_bias each.
        A_range: bounds of A at the start, >= 0, as (0, 16).
        dt_range: bounds of dt at the start, > 0.
        lower_bound: the least g, < 0; None: there is none.
    """

    def __init__(
        self,
        num_heads: int,
        channels: int = 1,
        *,
        A_range: tuple[float, float] = (1.0, 16.0),
        dt_range: tuple[float, float] = (1e-3, 1e-1),
        lower_bound: float | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_range(">= 0", A_range=A_range)
        check_range("> 0", dt_range=dt_range)
        self.A_range, self.dt_range = A_range, dt_range
        self.lower_bound, self.channels = lower_bound, channels
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.A_log = nn.Parameter(torch.empty(num_heads, **factory))
        self.dt_bias = nn.Parameter(
            torch.empty(num_heads * channels, **factory)
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw A and dt again, in fp32."""
        if self.lower_bound is None:
            A = uniform_like(self.A_log, *self.A_range)
            self.A_log.copy_(A.clamp_min(SMALLEST).log())
        else:
            self.A_log.zero_()
        draw_dt_bias_(self.dt_bias, self.dt_range)

    def dt(self, a: Float[Tensor, "B T n"]) -> Float[Tensor, "B T n"]:
        """The step size dt = softplus(a + dt_bias), in fp32 (fp64 if a is)."""
        a = upcast(a)
        return F.softplus(a + self.dt_bias.to(a.dtype))

    def log_decay(self, dt: Float[Tensor, "B T n"]) -> Float[Tensor, "B T *n"]:
        """g = -exp(A_log) dt, of step sizes dt [B, T, H * channels]."""
        return -self.times_rate(dt, self.A_log.to(dt.dtype).exp())

    def forward(self, a: Float[Tensor, "B T n"]) -> Float[Tensor, "B T *n"]:
        """The log decays g <= 0 of a [B, T, H * channels].

        [B, T, H], or [B, T, H, channels] if there are several per head; fp32
        (fp64 if a is).
        """
        if self.lower_bound is None:
            return self.log_decay(self.dt(a))
        a = upcast(a)
        a = a + self.dt_bias.to(a.dtype)
        rate = self.A_log.to(a.dtype).exp()
        return self.lower_bound * self.times_rate(a, rate).sigmoid()

    def times_rate(self, a: Tensor, rate: Tensor) -> Tensor:
        """Each head's channels times its rate."""
        if self.channels == 1:
            return rate * a
        return rate[:, None] * a.unflatten(-1, (-1, self.channels))


@torch.no_grad()
def draw_dt_bias_(bias: Tensor, dt_range: tuple[float, float]) -> None:
    """Set a bias such that softplus(bias) is log-uniform, drawn in fp32."""
    low, high = (math.log(x) for x in dt_range)
    dt = uniform_like(bias, low, high).exp().clamp_min(SMALLEST)
    bias.copy_(dt + (-torch.expm1(-dt)).log())  # softplus, inverted


def write_strength(
    logits: Float[Tensor, "B T HV"], allow_neg_eigval: bool
) -> Float[Tensor, "B T HV"]:
    """beta = sigmoid(logits), twice that if eigenvalues may be negative.

    In fp32 (fp64 if the logits are). With beta in (0, 2) the factor
    I - beta k k^T has an eigenvalue down to -1, with which a state can count
    modulo two (Grazzi et al. 2025).
    """
    beta = upcast(logits).sigmoid()
    return 2 * beta if allow_neg_eigval else beta


def low_rank(
    dim: int,
    rank: int,
    out: int,
    *,
    bias: bool,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """A matrix as the product of two; the second has a bias, or none has."""
    return nn.Sequential(
        nn.Linear(dim, rank, bias=False, device=device, dtype=dtype),
        nn.Linear(rank, out, bias=bias, device=device, dtype=dtype),
    )


def uniform_like(like: Tensor, low: float, high: float) -> Tensor:
    """Uniform numbers like ``like``, drawn in fp32 (fp64 if like is)."""
    return torch.empty_like(like, dtype=compute_dtype(like.dtype)).uniform_(
        low, high
    )
