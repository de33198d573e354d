"""Titans' long-term memory (Behrouz et al. 2025)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.deep import titans
from fastweights.deep.dual_form import NetworkWeights, Norm
from fastweights.dtypes import upcast
from fastweights.layers.common.convolution import HeadsConvolution
from fastweights.layers.common.layer import (
    CheckedModule,
    FactoryOptions,
    Hidden,
    Layer,
)
from fastweights.layers.common.layer_arguments import head_size, scaled_size
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.plain_modules import (
    is_untouched,
    note_source_forward,
)
from fastweights.layers.common.state import LayerState, Offsets
from fastweights.layers.common.unpacked_rows import UnpackedRows


@note_source_forward
class StartWeights(CheckedModule):
    """The weights of every sequence's first memory, and its norm's.

    A module that is called for them: what shards parameters, or fetches them
    from elsewhere, does so when their module is called.
    """

    def __init__(
        self,
        num_heads: int,
        widths: list[int],
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H, factory = num_heads, FactoryOptions(device=device, dtype=dtype)
        self.depth = len(widths) - 1
        for i in range(self.depth):
            W = torch.empty(H, widths[i], widths[i + 1], **factory)
            b = torch.empty(H, widths[i + 1], **factory)
            self.register_parameter(f"W{i + 1}", nn.Parameter(W))
            self.register_parameter(f"b{i + 1}", nn.Parameter(b))
        size = (H, widths[-1])
        self.norm_weight = nn.Parameter(torch.empty(size, **factory))
        self.norm_bias = nn.Parameter(torch.empty(size, **factory))

    def forward(self) -> tuple[NetworkWeights, Norm]:
        """Weights and biases layer by layer, and the norm's.

        Copies, if others have touched the module: what has fetched the
        parameters takes them away after the call.
        """
        names = [f"{x}{i + 1}" for i in range(self.depth) for x in "Wb"]
        names += ["norm_weight", "norm_bias"]
        tensors: list[Tensor] = [getattr(self, name) for name in names]
        if not is_untouched(self, StartWeights):
            tensors = [p.clone() for p in tensors]
        pairs = [*zip(tensors[::2], tensors[1::2], strict=True)]
        return pairs[:-1], pairs[-1]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw a memory of which a unit has variance 1."""
        for p in self.parameters():
            p.zero_()
        for i in range(self.depth):
            W = self.get_parameter(f"W{i + 1}")
            W.normal_(std=1 / math.sqrt(W.shape[1]))
        self.norm_weight.fill_(1)


class TitansMemory(Layer):
    """A network that learns v from k, with momentum and weight decay.

        q, k, v = silu(convolution(W_qkv x)), q and k of unit length
        theta = max_rate sigmoid(a), eta = sigmoid(b), alpha = sigmoid(c)
        a, b, c = W_rates x + bias, per head
        y = W_o (norm(o) * silu(W_g x)), o by fastweights.deep.titans

    The memory alone of arXiv 2501.00663, without attention beside it, with
    per-token rates as in its eqs. 11 to 14. There is no code by the authors.
    The paper leaves the memory's activation and the rates' bounds open; here
    they are GELU and max_rate, and a LayerNorm stands behind the memory, as
    in TTT: without one the gradients of a chunk whose keys are alike, all
    taken at the same weights, add up to steps that grow without bound.
    titans-pytorch, which most people use, has it too, with a residual; it
    takes one rate of momentum and decay per chunk, steps once per chunk, and
    has no convolution.

    Differs from the published one in: what the paper leaves open: GELU, a
    bound of the rates, a LayerNorm behind the memory.

    Args:
        dim: width D of x and y.
        num_heads: heads H, each with a memory of its own.
        head_dim: their size K, that of q, k and v; dim / num_heads if None.
        depth: layers of the memory; 1: a matrix and a bias.
        expansion: width of the memory's hidden layers over head_dim.
        chunk_size: tokens whose gradients are taken at the same weights.
        max_rate: the bound of theta.
        conv_size: width of the convolution, 2 to 4; None: there is none.
        norm_eps: of the output norm.
    """

    reads_packs_as_rows = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        depth: int = 2,
        expansion: float = 4.0,
        chunk_size: int = 16,
        max_rate: float = 0.1,
        conv_size: int | None = 4,
        norm_eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H, K = num_heads, head_size(head_dim, dim, num_heads)
        hidden = scaled_size("expansion", expansion, head_dim=K)
        self.dim, self.chunk_size, self.max_rate = dim, chunk_size, max_rate
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        widths = [K, *[hidden] * (depth - 1), K]
        self.start = StartWeights(H, widths, **factory)
        self.qkv_proj = nn.Linear(dim, 3 * H * K, bias=False, **factory)
        self.convolution = HeadsConvolution(
            (H, H), (K, K), conv_size, **factory
        )
        self.rates_proj = nn.Linear(dim, 3 * H, **factory)
        self.gate_proj = nn.Linear(dim, H * K, bias=False, **factory)
        self.norm = OutputNorm(K, "silu", eps=norm_eps, **factory)
        self.o_proj = nn.Linear(H * K, dim, bias=False, **factory)
        self.start.reset_parameters()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with a memory that keeps 98 %."""
        self.rates_proj.bias.zero_()
        self.rates_proj.bias.chunk(3)[2].fill_(-4)

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, num_read, convolution) after the last tokens.

        S [N, H, 3, P] holds what a head's P weights have learned, their
        momentum, and what they had learned when the chunk began.
        """
        q, k, v, past = self.convolution(self.qkv_proj(x), state, cu_seqlens)
        unpacked = UnpackedRows(x, state, cu_seqlens)
        q, k, v = (unpacked.spread(t) for t in (q, k, v))
        rate, momentum, g = (unpacked.spread(t) for t in self.rates(x))
        o, S = titans(
            q,
            k,
            v,
            rate,
            momentum,
            g,
            *self.start(),
            chunk_size=self.chunk_size,
            initial_state=state and state.batch_field("S"),
            position=unpacked.num_read,
            lengths=unpacked.lengths,
        )
        y = self.o_proj(self.norm(unpacked.pack(o), self.gate_proj(x)))
        return y, LayerState(
            S=S, num_read=unpacked.num_read_after(), convolution=past
        )

    def rates(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, ...]:
        """Rate, momentum and log decay, [B, T, H] each."""
        a, b, c = upcast(self.rates_proj(x)).chunk(3, -1)
        # The paper's loss has no half: its theta counts twice.
        rate = 2 * self.max_rate * a.sigmoid()
        return rate, b.sigmoid(), F.logsigmoid(-c)
