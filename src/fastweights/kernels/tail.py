"""Zeros for the tokens of a pack that stand after its last sequence.

A pack may have more tokens than its offsets name, as one does that was filled
up to a fixed length. No program of another kernel has them, and what they
would hold is whatever memory held. Where there are none, a program reads one
number and ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.kernels.tile import sequence_offset

ROWS = tl.constexpr(64)  # tokens of a program
COLUMNS = tl.constexpr(128)


@triton.jit(do_not_specialize=["N", "T"])
def clear_tail_kernel(tensors, cu_seqlens, N, T, WIDTHS: tl.constexpr):
    """0 in rows cu_seqlens[N] to T of each of the tensors [T, width]."""
    end = sequence_offset(N, cu_seqlens, T)
    first = tl.program_id(0).to(tl.int64) * ROWS
    if first + ROWS > end:
        o_t = first + tl.arange(0, ROWS)
        m_t = (o_t >= end) & (o_t < T)
        for i in tl.static_range(len(WIDTHS)):
            for c in range(0, WIDTHS[i], COLUMNS):
                o_c = c + tl.arange(0, COLUMNS)
                mask = m_t[:, None] & (o_c < WIDTHS[i])[None, :]
                p_x = tensors[i] + o_t[:, None] * WIDTHS[i] + o_c[None, :]
                tl.store(p_x, 0.0, mask=mask)


def clear_tail(cu_seqlens: Tensor | None, *tensors: Tensor | None) -> None:
    """Clear the tail of a pack, in each of the tensors that are there.

    Each is contiguous, [1, T, ...], and on the device of ``cu_seqlens``.
    Without those there is no pack, and nothing to clear.
    """
    present = tuple(x for x in tensors if x is not None and x.numel())
    if cu_seqlens is None or not present:
        return
    T = present[0].shape[1]
    widths = tuple(x[0, 0].numel() for x in present)
    N = cu_seqlens.shape[0] - 1
    with torch.cuda.device_of(cu_seqlens):
        clear_tail_kernel[(triton.cdiv(T, ROWS.value),)](
            present, cu_seqlens, N, T, widths
        )
