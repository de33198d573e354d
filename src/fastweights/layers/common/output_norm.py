"""The norm before a layer's last projection, with its gate."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.dtypes import upcast
from fastweights.layers.common.layer import CheckedModule
from fastweights.layers.common.layer_arguments import check_one_of
from fastweights.layers.common.plain_modules import note_source_forward
from fastweights.ops.output_norm import (
    ACTIVATIONS,
    GateActivation,
    gated_rms_norm,
    norm_by_formula,
)


@note_source_forward
class OutputNorm(CheckedModule):
    """A norm over each head's channels, times a function of a gate.

        y = o / sqrt(mean(o^2) + eps) * weight * activation(gate)

    Arithmetic is in fp32, under autocast too.

    Args:
        size: channels V of a head.
        gate_activation: "silu" or "sigmoid"; None: no gate.
        num_heads: heads with weights of their own; 1: all share one weight
            per channel.
        center: whether each head's mean is taken away first: LayerNorm in
            place of RMSNorm.
        eps: added to the mean square, >= 0.
    """

    def __init__(
        self,
        size: int,
        gate_activation: GateActivation | None = "silu",
        *,
        num_heads: int = 1,
        center: bool = False,
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_one_of(ACTIVATIONS, gate_activation=gate_activation)
        self.size, self.gate_activation = size, gate_activation
        self.center, self.eps = center, eps
        self.weight = nn.Parameter(
            torch.empty(num_heads * size, device=device, dtype=dtype)
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the weights to 1."""
        self.weight.fill_(1)

    def forward(
        self,
        o: Float[Tensor, "B T HV V"],
        gate: Float[Tensor, "B T HV*V"] | None = None,
    ) -> Float[Tensor, "B T HV*V"]:
        """The normed heads side by side, in o's dtype."""
        weight = self.weight
        if gate is not None and self.gate_activation is None:
            raise ValueError("gate_activation: got None, need the gate's")
        if self.weight.shape[0] > self.size:
            weight = weight.unflatten(0, (-1, self.size))
        if not self.center:
            return gated_rms_norm(
                o,
                weight,
                gate,
                gate_activation=self.gate_activation,
                eps=self.eps,
            )
        y = upcast(o)
        y = y - y.mean(-1, keepdim=True)
        silu = self.gate_activation == "silu"
        return norm_by_formula(y, weight, gate, silu, self.eps).to(o.dtype)
