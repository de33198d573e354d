"""Fast Weights: linear attention from softmax to test-time training.

    o, state = fw.gated_deltanet(q, k, v, g, beta)       # [B, T, H, K] in
    more, state = fw.gated_deltanet(q, k, v, g, beta, initial_state=state)
    with torch.no_grad():                                # 1 to 16 tokens
        o = fw.decode_step(q, k, v, g=g, beta=beta, state=state)

Tensors are [B, T, H, D], in fp64, fp32, fp16 or bf16, and states fp32.
"""

from fastweights import feature_maps
from fastweights.compat import patch_transformers
from fastweights.ops.common.backends import resolve_backend
from fastweights.ops.common.batch_invariance import batch_invariant
from fastweights.ops.decode import decode_step
from fastweights.ops.members import (
    comba,
    deltanet,
    gated_deltanet,
    gated_deltanet2,
    gated_retention,
    gla,
    kda,
    lightning_log_decay,
    linear_attention,
    mamba2,
    retention,
    retnet_log_decay,
)
from fastweights.ops.mlstm import mlstm
from fastweights.ops.recurrence import linear_recurrence
from fastweights.ops.selective import selective_scan
from fastweights.ranks.group import context_parallel

__version__ = "0.1.0"

__all__ = [
    "batch_invariant",
    "comba",
    "context_parallel",
    "decode_step",
    "deltanet",
    "feature_maps",
    "gated_deltanet",
    "gated_deltanet2",
    "gated_retention",
    "gla",
    "kda",
    "lightning_log_decay",
    "linear_attention",
    "linear_recurrence",
    "mamba2",
    "mlstm",
    "patch_transformers",
    "resolve_backend",
    "retention",
    "retnet_log_decay",
    "selective_scan",
]
