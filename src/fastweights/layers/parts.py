"""What stands around a recurrence: gates, norms, rotary positions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fastweights.output_norm import ACTIVATIONS, Activation, gated_rms_norm

SMALLEST_STEP = 1e-4


class Factory(TypedDict):
    """Where a module's parameters are made, and in which dtype."""

    device: torch.device | None
    dtype: torch.dtype | None


def without_decay(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that weight decay should leave alone."""
    parameter._no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def parameter_groups(
    model: nn.Module, weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups for an optimiser: with weight decay, and without.

    Decay is for matrices. It would pull A_log, dt_bias and D to values that
    mean something else than 'small', so that these are exempt, as are norms
    and biases (everything with fewer than two dimensions).

        torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3)
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            exempt = getattr(parameter, "_no_weight_decay", False)
            groups[parameter.dim() >= 2 and not exempt].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]


class Decay(nn.Module):
    """g = -exp(A_log) softplus(a + dt_bias): Mamba-2's gate (Dao and Gu 2024).

    At its start a = 0, and head h forgets half in ln 2 / (A dt) tokens, with
    A uniform in ``A_range`` and dt log-uniform in ``dt_range``: 0.4 to 700
    tokens with the published ranges. A is drawn in fp32 and has a lower
    bound: A = 0, which a draw in bf16 does give, makes A_log = -inf, and its
    gradient too.

    Args:
        num_heads: heads H, one A for each.
        channels: gates per head, one dt_bias for each.
        A_range, dt_range: bounds of A and dt, > 0.
    """

    def __init__(
        self,
        num_heads: int,
        channels: int = 1,
        *,
        A_range: tuple[float, float] = (1.0, 16.0),
        dt_range: tuple[float, float] = (1e-3, 1e-1),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_range("A_range", A_range)
        check_range("dt_range", dt_range)
        self.A_range, self.dt_range, self.channels = (
            A_range,
            dt_range,
            channels,
        )
        to: Factory = {"device": device, "dtype": dtype}
        self.A_log = without_decay(nn.Parameter(torch.empty(num_heads, **to)))
        self.dt_bias = without_decay(
            nn.Parameter(torch.empty(num_heads * channels, **to))
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw A and dt again, in fp32."""
        self.A_log.copy_(uniform(self.A_log, *self.A_range).log())
        low, high = (math.log(x) for x in self.dt_range)
        dt = uniform(self.dt_bias, low, high).exp().clamp_min(SMALLEST_STEP)
        self.dt_bias.copy_(inverse_softplus(dt))

    def step(self, a: Float[Tensor, "B T n"]) -> Float[Tensor, "B T n"]:
        """The step size dt = softplus(a + dt_bias), in fp32."""
        full = torch.promote_types(a.dtype, torch.float32)
        return F.softplus(a.to(full) + self.dt_bias.to(full))

    def forward(self, a: Float[Tensor, "B T n"]) -> Float[Tensor, "B T *n"]:
        """The log decays g <= 0 of a [B, T, H] or [B, T, H * channels].

        Of that shape, and [B, T, H, channels] if there are several to a
        head; fp32 (fp64 if a is).
        """
        dt = self.step(a)
        rate = self.A_log.to(dt.dtype).exp()
        if self.channels == 1:
            return -rate * dt
        return -rate[:, None] * dt.unflatten(-1, (-1, self.channels))


def check_range(name: str, bounds: tuple[float, float]) -> None:
    """Raise unless 0 < bounds[0] <= bounds[1]."""
    if not (len(bounds) == 2 and 0 < bounds[0] <= bounds[1] < math.inf):
        raise ValueError(f"{name}: got {bounds}, need 0 < lower <= upper")


def uniform(like: Tensor, low: float, high: float) -> Tensor:
    """Of like's shape and device, drawn in fp32 (fp64 if like is)."""
    full = torch.promote_types(like.dtype, torch.float32)
    return torch.empty_like(like, dtype=full).uniform_(low, high)


def inverse_softplus(x: Tensor) -> Tensor:
    """y with softplus(y) = x, for x > 0."""
    return x + (-torch.expm1(-x)).log()


class OutputNorm(nn.Module):
    """RMS norm over a head's channels, times a function of a gate.

        y = o / sqrt(mean(o^2) + eps) * weight * activation(gate)

    One weight per channel, shared by the heads. Arithmetic is in fp32, under
    autocast too.

    Args:
        size: channels V of a head.
        activation: of the gate, "silu" or "sigmoid"; None: no gate.
        eps: added to the mean square.
    """

    def __init__(
        self,
        size: int,
        activation: Activation | None = "silu",
        *,
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation: got {activation!r}, need 'silu', 'sigmoid' or "
                "None"
            )
        self.activation, self.eps = activation, eps
        self.weight = nn.Parameter(
            torch.ones(size, device=device, dtype=dtype)
        )

    def forward(
        self,
        o: Float[Tensor, "B T HV V"],
        gate: Float[Tensor, "B T HV*V"] | None = None,
    ) -> Float[Tensor, "B T HV*V"]:
        """The heads side by side, in o's dtype."""
        # A gate without an activation has a sigmoid.
        activation = self.activation or "sigmoid"
        return gated_rms_norm(
            o, self.weight, gate, activation=activation, eps=self.eps
        )


def rotary(
    x: Float[Tensor, "B T H D"],
    position: Int[Tensor, "B T"],
    theta: float = 1e4,
    fraction: float = 1.0,
) -> Float[Tensor, "B T H D"]:
    """Rotary position embedding (Su et al. 2021), pairs half a head apart.

    Channels j and j + R / 2 turn by position * theta^(-2 j / R), for the
    first R = fraction * D channels; the others stay. In fp32, returned in
    x's dtype.
    """
    R = int(x.shape[-1] * fraction) // 2 * 2
    full = torch.promote_types(x.dtype, torch.float32)
    j = torch.arange(0, R, 2, device=x.device, dtype=full)
    angle = position[..., None].to(full) * theta ** (-j / R)
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    a, b = x[..., :R].to(full).chunk(2, -1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned.to(x.dtype), x[..., R:]], -1)


def check_sizes(**sizes: int) -> None:
    """Raise unless each is a positive integer."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: got {size!r}, need an integer >= 1")


def check_input(
    x: Tensor, dim: int, state: object, cu_seqlens: Tensor | None
) -> None:
    """Raise unless x is [B, T, dim] and the state fits its rows."""
    if x.dim() != 3 or x.shape[-1] != dim:
        raise ValueError(f"x: got shape {list(x.shape)}, need [B, T, {dim}]")
    if cu_seqlens is not None and len(x) != 1:
        raise ValueError(
            f"x: got shape {list(x.shape)}, need B = 1 with cu_seqlens"
        )
    rows = len(x) if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tensors: Iterable[tuple[str, Tensor]] = (
        () if state is None else state.tensors().items()  # type: ignore
    )
    for name, tensor in tensors:
        if len(tensor) != rows:
            raise ValueError(
                f"state: got {name} of shape {list(tensor.shape)}, need "
                f"{rows} rows, one for each sequence"
            )
