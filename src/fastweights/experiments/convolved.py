"""A short convolution before layers that have none."""

from __future__ import annotations

import inspect
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from fastweights.experiments.softmax import check_whole_rows
from fastweights.layers import TTTMLP, LaCT, LayerState, TTTLinear
from fastweights.layers.convolution import ShortConvolution
from fastweights.layers.state import Offsets
from fastweights.models import LAYERS


def convolved(layer: type[nn.Module]) -> type[nn.Module]:
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


LAYERS["convolved_ttt_linear"] = convolved(TTTLinear)
LAYERS["convolved_ttt_mlp"] = convolved(TTTMLP)
LAYERS["convolved_lact"] = convolved(LaCT)
