"""Packed documents as transformers names them: seq_idx, cu_seq_lens_q."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastweights import torch_internals
from fastweights.arguments import check_packed, check_shapes, is_readable

_known_offsets: WeakIdKeyDictionary = WeakIdKeyDictionary()


def is_first_token(seq_idx: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Whether a document begins at each token of each row.

    Raises:
        TypeError: seq_idx may have rounded the numbers of documents.
    """
    if seq_idx.is_floating_point():
        raise TypeError(f"seq_idx: got {seq_idx.dtype}, need integers")
    new = torch.ones_like(seq_idx, dtype=torch.bool)
    new[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return new


def check_no_tail(x: Shaped[Tensor, "B T *others"], offsets: Tensor) -> None:
    """Raise unless these end with x, as transformers' cu_seq_lens_q do.

    A convolution takes the columns that they leave out for a cache's, which
    come first; where offsets may end earlier, what is left out comes last.
    Values are read where that costs no synchronisation.
    """
    check_packed(x, offsets, name="cu_seq_lens_q")
    T = x.shape[1]
    if is_readable(offsets) and (end := offsets[-1].item()) != T:
        raise ValueError(
            f"cu_seq_lens_q: got offsets that end at {end}, need T = {T}: "
            "padding is one more document"
        )


def offsets_of(
    x: Shaped[Tensor, "B T *others"],
    cu_seqlens: Int[Tensor, " N+1"] | None,
    cu_seq_lens_q: Int[Tensor, " N+1"] | None,
    seq_idx: Int[Tensor, "rows tokens"] | None,
) -> tuple[Int[Tensor, " N+1"] | None, Int[Tensor, " rows"] | None]:
    """Offsets by any of their names, which are used instead of a seq_idx.

    A seq_idx without offsets has beside them each row's last document.

    Raises:
        TypeError, ValueError: offsets are given twice, or do not fit x.
    """
    if cu_seq_lens_q is not None:
        if cu_seqlens is not None:
            raise ValueError(
                "cu_seq_lens_q: got offsets beside cu_seqlens, need one of "
                "them"
            )
        check_no_tail(x, cu_seq_lens_q)
        cu_seqlens = cu_seq_lens_q
    if cu_seqlens is not None or seq_idx is None:
        return cu_seqlens, None
    return document_offsets(seq_idx, x)


def document_offsets(
    seq_idx: Int[Tensor, "B T"], x: Shaped[Tensor, "B T *others"]
) -> tuple[Int[Tensor, " N+1"], Int[Tensor, " B"]]:
    """Offsets of the documents of all rows, one row after another.

    Beside them the number of each row's last document. The device tells the
    host how many there are once per tensor seq_idx, not once per layer.

    Raises:
        TypeError: seq_idx is not of integers.
        ValueError: seq_idx is not of x's first two dimensions' shape.
    """
    check_shapes(seq_idx=(seq_idx, x.shape[:2]))
    compiling = torch.compiler.is_compiling()
    cached = not compiling and not seq_idx.is_inference()
    if cached:
        version, kept_offsets = _known_offsets.get(seq_idx, (None, None))
        if version == seq_idx._version:
            return kept_offsets
    new = is_first_token(seq_idx)
    starts = new.flatten().nonzero().flatten()
    torch_internals.expect_at_least_one(starts.shape[0])
    offsets = F.pad(starts, (0, 1), value=seq_idx.numel())
    kept_offsets = offsets, new.sum(1).cumsum(0) - 1
    if cached:
        _known_offsets[seq_idx] = seq_idx._version, kept_offsets
    return kept_offsets
