"""MesaNet (von Oswald et al. 2025)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from fastweights.deep import mesa
from fastweights.dtypes import upcast
from fastweights.heads import l2norm
from fastweights.layers.common.convolution import ShortConvolution
from fastweights.layers.common.layer import FactoryOptions, Hidden, Layer
from fastweights.layers.common.layer_arguments import head_size
from fastweights.layers.common.output_norm import OutputNorm
from fastweights.layers.common.state import LayerState, Offsets


class MesaNet(Layer):
    """The matrix that fits all decayed tokens best (arXiv 2506.05233).

        q, k = silu(convolution(W_qk x)), of unit length, v = W_v x
        g = logsigmoid(a), beta = sigmoid(b), a, b = W_ab x + bias
        ridge = min_ridge + softplus(lam), per head and key channel
        y = W_o norm(o), o by fastweights.deep.mesa

    as in flash-linear-attention. There v is neither convolved nor gated
    either, and its conjugate gradients add 1e-5 to denominators, which these
    do not.

    Differs from the published one in: no 1e-5 in the denominators of
    conjugate gradients.

    Weights of flash-linear-attention: qkv_proj is q_proj, k_proj and v_proj
    one below the other, convolution is q_conv1d and k_conv1d, ab_proj is
    a_proj and b_proj, lam is lambda_params, norm is o_norm.

    Args:
        dim: width D of x and y.
        num_heads: heads H.
        head_dim: their size K, that of v too; dim / num_heads if None.
        conv_size: width of the convolution of q and k, 2 to 4.
        min_ridge: lower bound of the ridge, > 0; it starts at 0.75 more.
        solver_steps: of conjugate gradients.
        norm_eps: of the output norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        conv_size: int = 4,
        min_ridge: float = 0.25,
        solver_steps: int = 30,
        norm_eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H, K = num_heads, head_size(head_dim, dim, num_heads)
        self.dim, self.num_heads, self.solver_steps = dim, H, solver_steps
        self.min_ridge = min_ridge
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(dim, 3 * H * K, bias=False, **factory)
        self.convolution = ShortConvolution(2 * H * K, conv_size, **factory)
        self.ab_proj = nn.Linear(dim, 2 * H, **factory)
        self.lam = nn.Parameter(torch.empty(H * K, **factory))
        self.norm = OutputNorm(K, None, eps=norm_eps, **factory)
        self.o_proj = nn.Linear(H * K, dim, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the ridge 0.75 above its least."""
        self.lam.fill_(math.log(math.expm1(0.75)))

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, LayerState]:
        """y, and the state (S, convolution) after each sequence's last token.

        S is [N, H, K, 2 K], sums of k k^T beside those of k v^T.
        """
        H = self.num_heads
        qk, v = self.qkv_proj(x).tensor_split([2 * len(self.lam)], -1)
        qk, past = self.convolution(qk, state, cu_seqlens)
        q, k = (l2norm(t.unflatten(-1, (H, -1))) for t in qk.chunk(2, -1))
        a, b = upcast(self.ab_proj(x)).chunk(2, -1)
        ridge = self.min_ridge + F.softplus(upcast(self.lam))
        o, S = mesa(
            q,
            k,
            v.unflatten(-1, (H, -1)),
            F.logsigmoid(a),
            b.sigmoid(),
            ridge.unflatten(0, (H, -1)),
            solver_steps=self.solver_steps,
            initial_state=state and state.batch_field("S"),
            cu_seqlens=cu_seqlens,
        )
        y = self.o_proj(self.norm(o))
        return y, LayerState(S=S, convolution=past)
