"""The short convolution before a recurrence, as modules."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.dtypes import cast_for_autocast
from fastweights.heads import HeadLayout, l2norm, split_heads
from fastweights.layers.common.layer import CheckedModule, FactoryOptions
from fastweights.layers.common.layer_arguments import check_one_of
from fastweights.layers.common.plain_modules import (
    is_plain,
    note_source_forward,
)
from fastweights.layers.common.state import LayerState, Offsets
from fastweights.ops.convolution import (
    check_pairs,
    convolve_heads,
    short_convolution,
)

Past = Float[Tensor, "N W-1 C"]


@note_source_forward
class ShortConvolution(CheckedModule):
    """A causal convolution per channel, then SiLU.

        y_t = silu(bias + sum_j weight[:, W - 1 - j] x_{t-j})

    Args:
        channels: channels C of x and y.
        conv_size: width W, 2 to 4.
        bias: whether there is one (Mamba has, others have not).
        activation: whether SiLU follows.
    """

    def __init__(
        self,
        channels: int,
        conv_size: int = 4,
        *,
        bias: bool = False,
        activation: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        check_one_of((2, 3, 4), conv_size=conv_size)
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(channels, conv_size, **factory))
        self.bias = (
            nn.Parameter(torch.empty(channels, **factory)) if bias else None
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """PyTorch's own start for such a convolution: U(-1, 1) / sqrt(W)."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            self.bias.uniform_(-bound, bound)

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Float[Tensor, "B T C"], Past]:
        """y, and the inputs that the next tokens need."""
        y, past = short_convolution(
            x,
            self.weight,
            self.bias,
            activation="silu" if self.activation else None,
            initial_state=past_of(state, x),
            cu_seqlens=cu_seqlens,
        )
        return y, accepted_past(past, x, state)


@note_source_forward
class HeadsConvolution(CheckedModule):
    """q, k and v of a recurrence, from channels [q | k | v].

    A short convolution with SiLU over all channels, then q and k divided by
    sqrt(|.|^2 + 1e-6): unit keys keep the delta rule from diverging. One
    convolution over all channels, the module ``short_convolution``, is the
    same function as one for each of q, k and v; its weight is theirs one
    after the other.

    Args:
        heads: heads H of q and k, value heads HV.
        sizes: size K of a head of q and of k, size V of a head of v.
        conv_size: width of the convolution, 2 to 4; None: there is none.
        qk_l2norm: whether q and k are brought to unit length.
        activation: whether SiLU follows the convolution, or where there is
            none the projection.
        bias: whether the convolution has one.
    """

    def __init__(
        self,
        heads: tuple[int, int],
        sizes: tuple[int, int],
        conv_size: int | None = 4,
        *,
        qk_l2norm: bool = True,
        activation: bool = True,
        bias: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_pairs(heads, sizes)
        if heads[1] % heads[0]:
            raise ValueError(
                f"heads: got {heads}, need HV a multiple of H, {heads[0]}"
            )
        self.heads, self.sizes = heads, sizes
        self.qk_l2norm, self.activation = qk_l2norm, activation
        (H, HV), (K, V) = heads, sizes
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.short_convolution = None
        if conv_size is not None:
            self.short_convolution = ShortConvolution(
                2 * H * K + HV * V,
                conv_size,
                bias=bias,
                activation=activation,
                **factory,
            )

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[
        Float[Tensor, "B T H K"],
        Float[Tensor, "B T H K"],
        Float[Tensor, "B T HV V"],
        Past | None,
    ]:
        """q, k, v, and the inputs that the next tokens need."""
        past = None
        if self.short_convolution is None:
            x = F.silu(x) if self.activation else x
        elif is_plain(self.short_convolution, ShortConvolution, x.device):
            q, k, v, past = convolve_heads(
                x,
                self.short_convolution.weight,
                self.short_convolution.bias,
                heads=self.heads,
                sizes=self.sizes,
                qk_l2norm=self.qk_l2norm,
                activation="silu" if self.activation else None,
                initial_state=past_of(state, x),
                cu_seqlens=cu_seqlens,
            )
            return q, k, v, accepted_past(past, x, state)
        else:
            x, past = self.short_convolution(x, state, cu_seqlens)
        (H, HV), (K, V) = self.heads, self.sizes
        q, k, v = split_heads(x, HeadLayout(H, HV, K, V))
        if self.qk_l2norm:
            q, k = l2norm(q), l2norm(k)
        return q, k, v, past


def past_of(state: LayerState | None, x: Tensor) -> Past | None:
    """The inputs that a convolution has kept, if any, in x's dtype."""
    past = state and state.batch_field("convolution")
    return None if past is None else past.to(cast_for_autocast(x)[0].dtype)


def accepted_past(
    past: Past, x: Float[Tensor, "B T C"], state: LayerState | None
) -> Past:
    """The inputs to keep: those after the last token that is accepted."""
    if state is None or state.num_accepted is None:
        return past
    before = state.batch_field("convolution")
    both = torch.cat([before.to(past.dtype), x.to(past.dtype)], 1)
    last = torch.arange(past.shape[1], device=x.device)
    index = state.num_accepted[:, None] + last
    return torch.take_along_dim(both, index[..., None], 1)
