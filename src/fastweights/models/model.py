"""Embedding, blocks of a layer and an MLP, norm, logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastweights.arguments import check_sizes, check_tensors, refuse_shape
from fastweights.layers import LayerState
from fastweights.layers.common.fused_step import (
    are_fusable,
    fits_fused_step,
    norm_and_project,
    project_and_add,
    runs_kernels,
)
from fastweights.layers.common.layer import CheckedModule, Hidden, extrapolate
from fastweights.layers.common.layer_arguments import check_one_of
from fastweights.layers.common.plain_modules import (
    is_plain,
    is_plain_product,
    note_source_forward,
)
from fastweights.models.config import LAYERS, ModelConfig
from fastweights.models.loss import (
    check_tokens,
    linear_cross_entropy,
    losses_of_logits,
    next_tokens,
    token_losses,
)
from fastweights.packing import Offsets

LayerStates = list[LayerState | None]
"""Those of a model's layers, in their order."""


@note_source_forward
class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) * W_up x) (Shazeer 2020).

    Args:
        dim: width D of x and y.
        width: of what is multiplied.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(
            dim, 2 * width, bias=False, device=device, dtype=dtype
        )
        self.down_proj = nn.Linear(
            width, dim, bias=False, device=device, dtype=dtype
        )

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


def fused_mlp(x: Hidden, norm: nn.RMSNorm, mlp: Any) -> Hidden | None:
    """x + mlp(norm(x)) in two launches; None if modules have to be called."""
    if type(mlp) is not SwiGLU or not are_fusable(x, [norm, mlp]):
        return None
    (y,) = norm_and_project(x, norm, [mlp.gate_up_proj], swiglu=True)
    return project_and_add(x, y, mlp.down_proj)


class Block(nn.Module):
    """x + layer(norm(x)), then x + mlp(mlp_norm(x)) unless its type has none.

    Types in the config's ``post_norm_types``: x + norm(layer(x)), then
    x + mlp_norm(mlp(x)).

    Args:
        config: the model's.
        index: which of its blocks, from 0: that decides its type.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        D, eps = config.dim, config.norm_eps
        layer_type = config.layer_types[index]
        self.norm = nn.RMSNorm(D, eps=eps, device=device, dtype=dtype)
        options = config.layer_options(index)
        layer_class = LAYERS[layer_type]
        self.layer = layer_class(D, **options, device=device, dtype=dtype)
        self.mlp_norm: Any = None
        self.mlp: Any = None
        self.post_norm = layer_type in config.post_norm_types
        if layer_type not in config.types_without_mlp:
            self.mlp_norm = nn.RMSNorm(D, eps=eps, device=device, dtype=dtype)
            self.mlp = SwiGLU(D, config.mlp_width, device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Float[Tensor, "B T D"], LayerState | None]:
        fits = cu_seqlens is None and fits_fused_step(x)
        y = self._fused_step(x, state) if fits and state is not None else None
        if y is None:
            y = x if self.post_norm else self.norm(x)
            y, state = self.layer(y, state, cu_seqlens)
            y = x + (self.norm(y) if self.post_norm else y)
        if self.mlp is None:
            return y, state
        x, norm, mlp = y, self.mlp_norm, self.mlp
        if self.post_norm:
            return x + norm(mlp(x)), state
        y = fused_mlp(x, norm, mlp) if fits else None
        return x + mlp(norm(x)) if y is None else y, state

    def _fused_step(
        self, x: Float[Tensor, "B T D"], state: LayerState
    ) -> Float[Tensor, "B T D"] | None:
        """x + layer(norm(x)), fused; None if the layer has no way for it."""
        fused_step = getattr(self.layer, "fused_step", None)
        if fused_step is None or self.post_norm:
            return None
        if state.num_accepted is not None and not runs_kernels(x):
            return None
        y: Tensor | None = fused_step(x, self.norm, state)
        if y is not None:
            state.num_accepted = None
        return y


class LanguageModel(CheckedModule):
    """A decoder-only language model: tokens in, logits of the next ones out.

    Its parameters start as follows. Matrices and embeddings are drawn from
    N(0, 0.02^2), those that write to the residual stream (``o_proj``,
    ``down_proj``) with a standard deviation smaller by the square root of
    the number of such matrices. Convolutions, biases and gates start as
    their layers have them.

    Args:
        config: what it is made of.
        recompute: whether a training step keeps only what goes into each
            block, and computes the rest again in the backward (activation
            checkpointing). It may be changed at any time, as an attribute.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        recompute: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise TypeError(
                f"config: got {type(config).__name__}, need a ModelConfig"
            )
        self.config, self.recompute = config, recompute
        V, D = config.vocab_size, config.dim
        self.embedding = nn.Embedding(V, D, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(
            Block(config, i, device=device, dtype=dtype)
            for i in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(
            D, eps=config.norm_eps, device=device, dtype=dtype
        )
        self.head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.head = nn.Linear(D, V, bias=False, device=device, dtype=dtype)
        self._init_weights()

    def reset_parameters(self) -> None:
        """All parameters as at the start, drawn again."""
        for child in self.children():
            child.apply(_reset)  # what a module holds before the module
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Draw the matrices, and what layers draw themselves."""
        small = 0.02 / math.sqrt(self.config.num_branches)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                out = name.endswith(("o_proj", "down_proj"))
                module.weight.normal_(std=small if out else 0.02)
        for block in self.blocks:
            for module in block.get_submodule("layer").modules():
                if not isinstance(module, nn.Linear):
                    _reset(module)

    @overload
    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        states: Sequence[LayerState | None] | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Float[Tensor, "B T V"], LayerStates]: ...

    @overload
    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        states: Sequence[LayerState | None] | None = None,
        cu_seqlens: Offsets | None = None,
        *,
        targets: Int[Tensor, "B T"],
        ignore_index: int = -100,
        reduction: Literal["mean", "none"] = "mean",
    ) -> Float[Tensor, "*rows"]: ...

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        states: Sequence[LayerState | None] | None = None,
        cu_seqlens: Offsets | None = None,
        *,
        targets: Int[Tensor, "B T"] | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "none"] = "mean",
    ) -> tuple[Float[Tensor, "B T V"], LayerStates] | Float[Tensor, "*rows"]:
        """Logits of the tokens after these, and the layers' states.

        With ``targets`` the mean loss alone, as in :meth:`loss`: what
        DistributedDataParallel and FSDP wrap is this function.

        Args:
            tokens: 0 to vocab_size - 1.
            states: one per layer, of the tokens before these. Without
                gradients they are changed in place.
            cu_seqlens: where packed sequences begin and end; B is 1 then.
            targets: the tokens after these, or ``ignore_index``.
            ignore_index: marks tokens that predict nothing.
            reduction: of the losses, "mean", or "none": each token's,
                without gradients, 0 if ignored.
        """
        check_one_of(("mean", "none"), reduction=reduction)
        if targets is not None:
            x = self.hidden(tokens, states, cu_seqlens, return_states=False)[0]
            weight = self._weight_of_logits(x)
            if weight is None:
                logits = self.logits(x)
                return losses_of_logits(
                    logits, targets, ignore_index, reduction
                )
            loss = (
                linear_cross_entropy if reduction == "mean" else token_losses
            )
            return loss(x, weight, targets, ignore_index)
        x, after = self.hidden(tokens, states, cu_seqlens)
        return self.logits(x), after

    def loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"] | None = None,
        cu_seqlens: Offsets | None = None,
        *,
        ignore_index: int = -100,
    ) -> Float[Tensor, ""]:
        """Mean cross-entropy, in nats per token, without all logits at once.

        If ``targets`` is None each token's is the one after it, and the last
        token of a row or of a packed sequence has none.
        """
        if targets is None:
            targets = next_tokens(tokens, cu_seqlens, ignore_index)
        return self(
            tokens,
            cu_seqlens=cu_seqlens,
            targets=targets,
            ignore_index=ignore_index,
        )

    def token_losses(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        cu_seqlens: Offsets | None = None,
        *,
        ignore_index: int = -100,
    ) -> Float[Tensor, "B T"]:
        """Each token's loss in nats, without gradients; 0 if ignored."""
        check_tensors(targets=targets)  # None asks for logits
        with torch.no_grad():
            return self(
                tokens,
                cu_seqlens=cu_seqlens,
                targets=targets,
                ignore_index=ignore_index,
                reduction="none",
            )

    def hidden(
        self,
        tokens: Int[Tensor, "B T"],
        states: Sequence[LayerState | None] | None = None,
        cu_seqlens: Offsets | None = None,
        *,
        return_states: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], LayerStates]:
        """What the head turns to logits, and the layers' states.

        Without ``return_states`` the list is empty.
        """
        check_tokens("tokens", tokens, self.config.vocab_size)
        if tokens.dim() != 2 or not tokens.numel():
            refuse_shape("tokens", tokens, "[B, T] with B, T >= 1")
        if states is None:
            states = [None] * len(self.blocks)
        if not isinstance(states, Sequence):
            raise TypeError(
                f"states: got {type(states).__name__}, need a list of states"
            )
        if len(states) != len(self.blocks):
            raise ValueError(
                f"states: got {len(states)}, need {len(self.blocks)}, one "
                "per layer"
            )
        x = self.embedding(tokens)
        after: LayerStates = []
        recomputes = self.recompute and torch.is_grad_enabled()
        for block, state in zip(self.blocks, states, strict=True):
            if recomputes and not return_states:
                x = checkpoint(
                    _output, block, x, state, cu_seqlens, use_reentrant=False
                )
            elif recomputes:
                x, state = checkpoint(
                    block, x, state, cu_seqlens, use_reentrant=False
                )
            else:
                x, state = block(x, state, cu_seqlens)
            after.append(state)
        return self.norm(x), after if return_states else []

    def logits(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """Logits of hidden states: the head's, or those of tied embeddings.

        The latter are products with what the embedding's module says of each
        token of the vocabulary.
        """
        if self.head is not None:
            return self.head(x)
        weight = self._weight_of_logits(x)
        assert weight is not None
        return F.linear(x, weight)

    def _weight_of_logits(self, x: Tensor) -> Float[Tensor, "V D"] | None:
        """The matrix of the logits, None if only the head's module knows."""
        if self.head is not None:
            return self.head.weight if is_plain_product(self.head, x) else None
        if is_plain(self.embedding, nn.Embedding, x.device):
            return self.embedding.weight
        every = torch.arange(self.config.vocab_size, device=x.device)
        return self.embedding(every[None])[0]

    def preallocate_states(
        self,
        num_sequences: int,
        capacity: int,
        *,
        device: torch.device | None = None,
    ) -> LayerStates:
        """States to begin with, which stay where they are up to a length.

        Layers whose states grow get one with room for ``capacity`` tokens
        per sequence, on their parameters' device if ``device`` is None. The
        others get None and make their own.
        """
        check_sizes(num_sequences=num_sequences, capacity=capacity)
        states = []
        for block in self.blocks:
            layer = block.get_submodule("layer")
            make = getattr(layer, "preallocate_state", None)
            state = make and make(num_sequences, capacity, device=device)
            states.append(state)
        return states

    def generate(
        self,
        prompts: Tensor | Sequence[Tensor],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
        stop: int | Iterable[int] | Tensor | None = None,
        draft: Literal["lookup"]
        | Callable[[list[int]], Iterable[int]]
        | None = None,
    ) -> list[Int[Tensor, " new"]]:
        """Continue prompts: the new tokens of each.

        All prompts are read packed, in one go; then all rows go on
        together, one token per step, on states that stay where they are. On
        a GPU the step is captured in a CUDA graph, once per call, if nothing
        in the model has to be called from Python (hooks, say);
        :func:`fastweights.ops.record_backends` shows it, a "graph step".
        ``model.compile(fullgraph=True)`` compiles these steps. What FSDP
        has sharded needs its ``register_fsdp_forward_method(model,
        "generate")`` before.
        :func:`fastweights.models.streaming.stream` yields them as they come.

        Args:
            prompts: [T], [N, T], or a list of [T] of any lengths >= 1.
            max_new_tokens: new tokens at most.
            temperature: 0 takes the likeliest token; else logits are
                divided by it, and a token is drawn.
            top_p: draw from the likeliest tokens that have together at
                least this probability.
            generator: draws; PyTorch's own if None.
            stop: tokens at which a row ends, without them.
            draft: guesses what comes next, up to 7 tokens ahead, which one
                step of the model checks: the tokens are the same ones in
                fewer steps, as far as the logits of several tokens at once
                round as those of one. "lookup" looks the last one to three
                tokens up in the text so far, for code and for answers that
                repeat their prompt; or a smaller model with the same
                vocabulary; or a function that takes a row's tokens so far, a
                list, and returns those that may follow.
        """
        from fastweights.models.streaming import as_prompts, as_stops, stream

        prompts = as_prompts(prompts, self.config.vocab_size)
        ends = as_stops(stop, self.config.vocab_size)
        found = stream(
            self,
            prompts,
            max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            generator=generator,
            stop=ends,
            draft=draft,
        )
        steps = list(found)
        if not steps:
            return [prompt.new_empty(0) for prompt in prompts]
        new = torch.stack(steps, 1)
        if not ends:
            return list(new)
        is_end = torch.isin(new, torch.tensor(ends, device=new.device))
        before = (is_end.cumsum(1) == 0).sum(1).tolist()
        return [row[:n] for row, n in zip(new, before, strict=True)]

    @property
    def num_parameters(self) -> int:
        """Numbers that are learned; tied embeddings count once."""
        return sum(p.numel() for p in self.parameters())

    def state_bytes(self, T: int) -> int:
        """Bytes of the states of one sequence after T tokens.

        As the layers make them, without any room to grow. Beyond 1,024
        tokens every further one is taken to cost what it costs up to there:
        nothing, or its keys and values.
        """
        check_sizes(T=T)

        def after(T: int) -> int:
            return sum(x.nbytes for x in self._meta_states(T) if x is not None)

        return extrapolate(after, T)

    def flops_per_token(self, T: int) -> float:
        """FLOPs of a forward, per token of a sequence of T tokens.

        Two per multiplication and addition in products of matrices, as
        PyTorch's FlopCounterMode counts them with
        :mod:`fastweights.ops.common.flops`: softmax attention's scores as a
        full square, and what is elementwise not at all. A training step takes
        three times as many.
        """
        from torch.utils.flop_counter import FlopCounterMode

        check_sizes(T=T)
        with FlopCounterMode(display=False) as counter:
            self._meta_states(T)
        return counter.get_total_flops() / T

    def save(self, folder: str | Path) -> None:
        """Write model.safetensors and config.json; see :func:`load`."""
        from fastweights.models.files import save

        save(self, folder)

    def to_transformers(self) -> Any:
        """Copy the model to one of transformers, which engines can serve.

        It is an OlmoHybridForCausalLM or a Qwen3_5ForCausalLM, whichever the
        config fits; its ``save_pretrained`` writes a folder. Either has
        layers ``"gated_deltanet"`` and ``"softmax"``, Qwen3.5 with

            options={
                "gated_deltanet": {"norm_eps": 1e-6},
                "softmax": {"qk_norm": True, "output_gate": True},
            }

        and OLMo-Hybrid with ``post_norm_types=("softmax",)`` and

            options={"softmax": {"qk_norm": True, "head_qk_norm": False}}

        Qwen3.5's norms have weights w as w - 1, which for w below 0.5 is
        rounded, in bf16 by at most 0.002.

        Returns:
            the model, in the dtype and on the device of this one. Its config
            names no token that ends a text.

        Raises:
            ImportError: transformers is not installed.
            ValueError: the config fits neither; the message names what each
                of them needs.
        """
        from fastweights.models.transformers import to_transformers

        return to_transformers(self)

    @torch.no_grad()
    def _meta_states(self, T: int) -> LayerStates:
        """The states after T tokens, on a device that holds no numbers."""
        meta, dtype = torch.device("meta"), self.embedding.weight.dtype
        model = LanguageModel(self.config, device=meta, dtype=dtype)
        tokens = torch.empty(1, T, dtype=torch.int64, device=meta)
        return model(tokens)[1]


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()


def _output(
    block: nn.Module,
    x: Tensor,
    state: LayerState | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    return block(x, state, cu_seqlens)[0]
