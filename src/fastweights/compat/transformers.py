"""Which functions of transformers' modeling files are this library's, where.

A table has what a modeling file calls a function, ours, and the arguments
that the file passes without a name. Arguments that ours does not name are
left out: :func:`fastweights.patch_transformers` sees to that.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.compat import causal_conv1d, fla, mamba_ssm
from fastweights.compat.packed import check_no_tail
from fastweights.dtypes import compute_dtype

Table = dict[str, tuple[Callable, tuple[str, ...]]]
PACKED = ("seq_idx", "cu_seq_lens_q")


def with_check(check: Callable[..., None], call: Callable) -> Callable:
    """A function whose arguments go through a check before it has them."""

    @functools.wraps(call)
    def both(*given: Any, **named: Any) -> Any:
        check(*given, **named)
        return call(*given, **named)

    return both


def check_unpacked(*given: Any, **named: Any) -> None:
    """Raise for arguments of packed documents, which a model type drops."""
    for name in PACKED:
        if named.get(name) is not None:
            raise ValueError(
                f"{name}: got packed documents, need None: this model "
                "type does not hand it to its recurrence, so that they "
                "would reach each other; pass one document per row"
            )


def check_ends(query: Tensor, *given: Any, **named: Any) -> None:
    """Raise for offsets, by the name cu_seqlens, that end before query."""
    if named.get("cu_seqlens") is not None:
        check_no_tail(query, named["cu_seqlens"])


def warn_of_attention(*given: Any, **named: Any) -> None:
    """Warn that the model's own attention looks past documents' ends."""
    packed = any([named.get(name) is not None for name in PACKED])
    if packed and not torch.compiler.is_compiling():
        warnings.warn(
            "packed documents reach each other through this model "
            "type's own attention, unless it is flash attention; its "
            "recurrence keeps them apart",
            stacklevel=4,
        )


one_document = functools.partial(with_check, check_unpacked)
whole = functools.partial(with_check, check_ends)
beside_attention = functools.partial(with_check, warn_of_attention)


def with_activation(convolve: Callable, tensors: int) -> Callable:
    """A convolution with any of transformers' activations after it.

    By position the activation comes after ``tensors`` tensors, as in
    transformers' own function.
    """

    @functools.wraps(convolve)
    def call(*given: Any, activation: str | None = None, **named: Any) -> Any:
        if len(given) > tensors:
            given, activation = given[:-1], given[-1]
        if activation in causal_conv1d.ACTIVATIONS:
            return convolve(*given, activation=activation, **named)
        functions = importlib.import_module("transformers.activations").ACT2FN
        return functions[activation](convolve(*given, **named))

    return call


def unfused(*given: Any) -> None:
    """Return None: the modeling file then calls its parts, which are ours."""


def lightning_attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """MiniMaxLightningAttention.forward: retention between its own parts.

    Returns:
        y, and the state [B, H, D, D] in fp32 (fp64 if y is).
    """
    cache = past_key_values if cache is None else cache
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = qkv * attention_mask[..., None].to(qkv.dtype)
    H, width = self.num_attention_heads, self.head_dim
    q, k, v = qkv.unflatten(-1, (H, -1)).split(width, -1)
    state = None
    if cache is not None:
        state = cache.get_linear_cache(self.layer_idx)
    full = compute_dtype(q.dtype)
    slopes = self.get_slope_rate(q.device)  # its buffer may be narrower
    o, state = fla.fused_recurrent_simple_gla(
        q,
        k,
        v,
        g_gamma=-slopes.flatten().to(full),
        scale=1.0,
        initial_state=state,
        output_final_state=True,
        seq_idx=seq_idx,
        cu_seq_lens_q=cu_seq_lens_q,
    )
    y = self.norm(o.flatten(2))
    y = self.out_proj(F.sigmoid(self.output_gate(hidden_states)) * y)
    if cache is not None:
        cache.set_linear_cache(self.layer_idx, state)
    return y, state


QKV = ("query", "key", "value", "g", "beta")
SCAN = ("hidden_states", "dt", "A", "B", "C")
STEP = ("state", *SCAN, "D")
CONVOLUTION: Table = {
    "causal_conv1d_fn": (
        with_activation(causal_conv1d.causal_conv1d_fn, 3),
        ("hidden_states", "weight", "bias"),
    ),
    "causal_conv1d_update": (
        with_activation(causal_conv1d.causal_conv1d_update, 4),
        ("hidden_states", "conv_state", "weight", "bias", "activation"),
    ),
}
GATED_DELTANET: Table = CONVOLUTION | {
    "torch_chunk_gated_delta_rule": (whole(fla.chunk_gated_delta_rule), QKV),
    "torch_recurrent_gated_delta_rule": (
        whole(fla.fused_recurrent_gated_delta_rule),
        QKV,
    ),
}
KDA: Table = CONVOLUTION | {
    "chunk_kimi_delta_attention": (fla.chunk_kda, QKV),
    "recurrent_kimi_delta_attention": (fla.fused_recurrent_kda, QKV),
}
MAMBA2: Table = CONVOLUTION | {
    "mamba2_chunk_scan": (mamba_ssm.mamba_chunk_scan_combined, SCAN),
    "mamba2_selective_state_update": (mamba_ssm.selective_state_update, STEP),
    "mamba2_split_conv1d_scan_combined": (unfused, ()),
}
MAMBA_PARTS: Table = CONVOLUTION | {  # of Mamba; zamba has no whole of them
    "mamba_selective_scan": (mamba_ssm.selective_scan_fn, SCAN),
    "mamba_selective_state_update": (mamba_ssm.selective_state_update, STEP),
}
MAMBA: Table = MAMBA_PARTS | {"mamba_inner_fn": (unfused, ())}
LIGHTNING: Table = {
    "MiniMaxLightningAttention.forward": (
        lightning_attention,
        ("self", "hidden_states", "position_embeddings", "attention_mask"),
    ),
}
# Model types that drop what says where packed documents end, and classes that
# see it before: whole models, since a layer that transformers checkpoints
# compares its forward with the one that it knows.
DROPS_PACKING = {
    "falcon_mamba": "FalconMambaModel FalconMambaForCausalLM",
    "inkling": "InklingTextModel",
    "inkling2": "Inkling2TextModel",
    "inkling2_loop": "Inkling2LoopTextModel",
    "jamba": "JambaModel",
    "mamba": "MambaModel MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "zamba": "ZambaModel",
}
EXTRA_TABLES: dict[str, Table] = {
    model: {
        f"{x}.forward": (one_document, ("self", "input_ids"))
        for x in classes.split()
    }
    for model, classes in DROPS_PACKING.items()
}
EXTRA_TABLES |= {
    "glm5_next": {
        "chunk_kimi_delta_attention": (beside_attention(fla.chunk_kda), QKV),
    },
    "granitemoehybrid": {
        "mamba2_chunk_scan": (
            beside_attention(mamba_ssm.mamba_chunk_scan_combined),
            SCAN,
        ),
    },
}
TABLES = (
    (GATED_DELTANET, "lara_mini olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next"),
    (GATED_DELTANET, "qwen4_exp"),
    (KDA, "bailing_hybrid glm5_next kimi_linear"),
    (MAMBA2, "bamba falcon_h1 granitemoehybrid mamba2 nemotron_h zamba2"),
    (MAMBA, "falcon_mamba jamba mamba"),
    (MAMBA_PARTS, "zamba"),
    (LIGHTNING, "minimax"),
    (CONVOLUTION, "inkling inkling2 inkling2_loop lfm2 lfm2_moe lfm3"),
)
MODELS = {
    f"transformers.models.{model}.modeling_{model}": table
    | EXTRA_TABLES.get(model, {})
    for table, models in TABLES
    for model in models.split()
}
