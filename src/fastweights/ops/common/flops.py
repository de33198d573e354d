"""FLOPs of linear_recurrence, for torch.utils.flop_counter.FlopCounterMode.

What the chunk form multiplies, per token and value head, in chunks of C
tokens (64 unless chunk_size says): products of matrices as PyTorch counts
them, two operations for each multiplication and addition, triangular scores
as full ones; gates, which are elementwise, count nothing, like elsewhere in
PyTorch. Of one chunk [C, K], [C, V] and its state [K, V]:

    forward    q k^T: C C K; q S: C K V; Aqk v_new: C C V; k^T v_new: C K V
    and delta  k k^T: C C K; k S: C K V; P (v - k S): C C V; P itself, the
               inverse of a unit triangular matrix: C^3 / 6
    backward   the states again, k^T v_new: C K V; do v_new^T and Aqk^T do:
               C C V each; dAqk k and dAqk^T q: C C K each; k dS, q^T do,
               do S^T and v_new dS^T: C K V each
    and delta  the errors again, k S: C K V and P (..): C C V; P^T dv_new and
               y v_new^T: C C V each; dAkk k and dAkk^T k: C C K each;
               k^T (beta y) and (beta y) S^T: C K V each

An ``erase_key`` takes the place of k: the same count. The scores and P, or
what stands for them, are kept for the backward. backend="loop" has no
operator: what it multiplies is counted as it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fastweights.arguments import RecurrenceOptions
from fastweights.torch_internals import dispatch_modes


def _sizes(
    shapes: Any, options: RecurrenceOptions
) -> tuple[tuple[int, ...], bool]:
    """B, T, HV, K, V and C of operands' shapes, and whether a rule erases."""
    (B, T, _, K), (HV, V), C = shapes.q, shapes.v[2:], options.chunk_size
    delta = shapes.beta is not None or shapes.erase_key is not None
    return (B, T, HV, K, V, C), delta


def forward(shapes: Any, options: RecurrenceOptions) -> int:
    """FLOPs of the operator fastweights::linear_recurrence."""
    (B, T, HV, K, V, C), delta = _sizes(shapes, options)
    flops = 2 * (C * K + C * V + 2 * K * V)
    if delta:
        flops += 2 * (C * K + C * V + K * V) + C * C // 3
    return B * T * HV * flops


def backward(
    do: Any, dstate: Any, shapes: Any, saved: Any, options: RecurrenceOptions
) -> int:
    """FLOPs of the operator fastweights::linear_recurrence_backward."""
    (B, T, HV, K, V, C), delta = _sizes(shapes, options)
    products = 5 * K * V + 2 * C * V + 2 * C * K
    if delta:
        products += 3 * K * V + 3 * C * V + 2 * C * K
    return B * T * HV * 2 * products


FORMULAS: dict[Any, Callable[..., int]] = {}  # of operators that have one


def register_flop_formulas() -> None:
    """Give PyTorch's FLOP counters these formulas, open ones too.

    Its module imports Triton, so that it is left alone until somebody else
    has imported it. A counter copies the formulas when it is made.
    """
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    counters = [getattr(x, "counter", None) for x in dispatch_modes()]
    for operator, formula in FORMULAS.items():
        if operator not in module.flop_registry:
            module.register_flop_formula(operator)(formula)
        for counter in counters:
            if isinstance(counter, module.FlopCounterMode):
                counter.flop_registry.setdefault(
                    operator, module.flop_registry[operator]
                )
