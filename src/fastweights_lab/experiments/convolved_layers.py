"""Layers of the experiments that have a short convolution in front."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.layers import (
    TTTMLP,
    LaCT,
    LayerState,
    LinearRecurrence,
    TTTLinear,
)
from fastweights.layers.common.convolution import ShortConvolution
from fastweights.layers.common.rotary import rotary
from fastweights.layers.common.state import Offsets, token_positions
from fastweights.models import LAYERS


class ConvolvedSoftmax(LinearRecurrence):
    """:class:`fastweights.layers.LinearRecurrence` with softmax inside.

        q, k, v = silu(convolution(W_qkv x))
        y = W_o (norm(o) * silu(W_g x)), o = softmax(q k^T / sqrt(K)) v

    One layer of plain softmax attention cannot answer with a pair's value:
    key and value stand in different tokens. The convolution brings them
    together, as it does for the recurrences. For whole sequences: it goes on
    from no state.

    Args:
        dim, num_heads, head_dim: as there.
        rope_theta: base of rotary positions; None: there are none.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        rope_theta: float | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            head_dim,
            rule="additive",
            decay=None,
            qk_l2norm=False,
            device=device,
            dtype=dtype,
        )
        self.rope_theta = rope_theta

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Float[Tensor, "B T D"], LayerState]:
        """y, and the keys and values of all tokens."""
        check_whole_rows(state, cu_seqlens)
        q, k, v, inputs = self.convolution(self.qkv_proj(x))
        if self.rope_theta is not None:
            position = token_positions(x.shape[1], x.device, None, None)
            q = rotary(q, position, self.rope_theta)
            k = rotary(k, position, self.rope_theta)
        q, k_h, v_h = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k_h, v_h, is_causal=True)
        gate = None if self.gate_proj is None else self.gate_proj(x)
        y = self.o_proj(self.norm(o.transpose(1, 2), gate))
        return y, LayerState(keys=k, values=v, convolution=inputs)


def check_whole_rows(
    state: LayerState | None, cu_seqlens: Offsets | None
) -> None:
    """A layer that goes on from no state is given none."""
    if state is not None or cu_seqlens is not None:
        raise ValueError("state, cu_seqlens: got one, need whole rows")


def convolve_input(layer: type[nn.Module]) -> type[nn.Module]:
    """The layer, reading x + convolution(x) in place of x.

    One layer alone cannot answer with a pair's value if nothing brings key
    and value together, which stand in different tokens. TTT's authors have
    this as an option (``pre_conv``). For whole sequences: it goes on from no
    state.
    """

    class Convolved(layer):  # type: ignore[misc, valid-type]
        def __init__(self, dim: int, *arguments: Any, **options: Any) -> None:
            super().__init__(dim, *arguments, **options)
            self.before = ShortConvolution(
                dim,
                activation=False,
                device=options.get("device"),
                dtype=options.get("dtype"),
            )

        def forward(
            self,
            x: Float[Tensor, "B T D"],
            state: LayerState | None = None,
            cu_seqlens: Offsets | None = None,
        ) -> tuple[Float[Tensor, "B T D"], LayerState]:
            check_whole_rows(state, cu_seqlens)
            return super().forward(x + self.before(x)[0])

    Convolved.__signature__ = inspect.signature(layer)  # type: ignore
    return Convolved


LAYERS["convolved_softmax"] = ConvolvedSoftmax
LAYERS["convolved_recurrence"] = convolve_input(LinearRecurrence)
LAYERS["convolved_ttt_linear"] = convolve_input(TTTLinear)
LAYERS["convolved_ttt_mlp"] = convolve_input(TTTMLP)
LAYERS["convolved_lact"] = convolve_input(LaCT)
