"""FASTWEIGHTS_CHECK=1: linear_recurrence and decode_step look at values.

What shapes and dtypes cannot show: NaN, a log decay above 0, a delta rule
that diverges, offsets that are none. All members go through these two. The
variable is read once, at import. With it each call waits for the GPU; without
it nothing is read. Where values cannot be read nothing is checked: under
torch.compile and the transforms of torch.func, in a trace, while a CUDA graph
is captured, for tensors without data or of a class of their own.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fastweights.arguments import PLAIN, check_offsets
from fastweights.private import in_torch_func

CHECKED = os.environ.get("FASTWEIGHTS_CHECK", "0") not in ("", "0")


@torch.no_grad()
def check_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    state_name: str = "initial_state",
) -> None:
    """Raise ValueError for the first argument whose values do not fit.

    The arguments have passed check_arguments; ``state_name`` is what the
    caller calls ``initial_state``.
    """
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    named[state_name] = initial_state
    given = {name: x for name, x in named.items() if x is not None}
    if not all(_has_values(x) for x in given.values()):
        return
    wrong = [(name, x.isnan(), "numbers") for name, x in given.items()]
    if g is not None:
        wrong.append(("g", g > 0, "g <= 0, the log of a decay"))
    if beta is not None:
        # Unit keys and beta = 2 are right: both may have been rounded up.
        most = 2 * (1 + 2 * torch.finfo(k.dtype).eps)
        step = k.to(torch.promote_types(k.dtype, torch.float32))
        step = step.square().sum(-1)
        step = beta * step.repeat_interleave(v.shape[2] // k.shape[2], -1)
        need = "beta |k|^2 <= 2, above which the delta rule diverges"
        wrong.append(("beta", step > most, need))
    found = torch.stack([mask.any() for _, mask, _ in wrong]).tolist()
    for (name, mask, need), there in zip(wrong, found, strict=True):
        if there:
            at = mask.nonzero()[0].tolist()
            raise ValueError(
                f"{name}: got {given[name][tuple(at)].item()} at {at}, "
                f"need {need}"
            )
    if cu_seqlens is not None:
        check_offsets(cu_seqlens.tolist(), q.shape[1])


def _has_values(x: Tensor) -> bool:
    """Whether the host may read x, and x has something to read."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or in_torch_func()
        or type(x) not in PLAIN
        or x.is_meta
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )
