"""The processes that share a sequence, and what carries tensors among them.

PyTorch's collectives do, with gradients: what is gathered forward is summed
and scattered backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastweights.arguments import check_flags, check_integers
from fastweights.dtypes import upcast

Overlap = Callable[[], None] | None

# What PyTorch before 2.13 calls them; None without torch.distributed.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)


@dataclass(frozen=True)
class Ranks:
    """The processes that share a sequence, and this one's rank."""

    group: Any
    rank: int
    size: int
    tokens_per_rank: tuple[int, ...] | None
    share_final_states: bool

    def counts(self, T: int) -> tuple[int, ...]:
        """The number of tokens of each rank, where this one has T."""
        counts = self.tokens_per_rank
        if counts is None:
            return (T,) * self.size
        if counts[self.rank] != T:
            raise ValueError(
                f"tokens_per_rank: got {T} on rank {self.rank}, need the "
                f"{counts[self.rank]} that context_parallel was told"
            )
        return counts

    def tokens_before(self, T: int) -> int:
        """The number of tokens that the ranks before this one have."""
        return sum(self.counts(T)[: self.rank])

    # The next four have gradients; every rank has to call them. ``overlap``
    # is called while x travels.

    def gather(self, x: Tensor, overlap: Overlap = None) -> Tensor:
        """x of all ranks, [ranks, *x.shape]."""
        return _Gather.apply(x, self.group, self.size, overlap)

    def shift(self, x: Tensor, step: int, overlap: Overlap = None) -> Tensor:
        """x of the rank ``step`` before this one, or zeros."""
        return _Shift.apply(x, self, step, overlap)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over ranks, on all of them."""
        return _Sum.apply(x, self.group)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """x [B, T, ...] of all ranks, one after the other in time."""
        counts = self.counts(x.shape[1])
        if self.tokens_per_rank is None:
            return self.gather(x).transpose(0, 1).flatten(1, 2)
        lack = x.new_zeros(len(x), max(counts) - x.shape[1], *x.shape[2:])
        parts = self.gather(torch.cat([x, lack], 1)).unbind()
        cut = [p[:, :T] for p, T in zip(parts, counts, strict=True)]
        return torch.cat(cut, 1)


# Not a ContextVar: checkpointing computes again in a thread of autograd's.
_contexts: list[Ranks] = []


def current_ranks() -> Ranks | None:
    """The ranks that share sequences now; None: each is whole here."""
    return _contexts[-1] if _contexts else None


def token_offset_and_total(T: int) -> tuple[int, int]:
    """The first of T tokens here among all ranks', and their number."""
    ranks = current_ranks()
    if ranks is None:
        return 0, T
    return ranks.tokens_before(T), sum(ranks.counts(T))


def min_tokens() -> int:
    """The least number of tokens of an operator: a rank may have none."""
    return 1 if current_ranks() is None else 0


@contextmanager
def context_parallel(
    mesh: Any,
    tokens_per_rank: Sequence[int] | None = None,
    *,
    share_final_states: bool = True,
) -> Iterator[None]:
    """Operators and layers on sequences that are spread over ranks.

        with fw.context_parallel(mesh):
            o, state = fw.gated_deltanet(q, k, v, g, beta)

    Within it each rank of ``mesh``, say init_device_mesh("cuda", (8,)), hands
    in its own tokens, which come after those of the rank before it, and gets
    their outputs. All ranks make the same calls and the same backward, which
    belongs into the context too, since checkpointing computes again in it.

    * Batches have the same rows on all ranks. ``cu_seqlens`` are the offsets
      of the whole pack, on every rank; borders between ranks may lie
      anywhere in it. A rank may have no tokens, in operators.
    * ``initial_state`` is the same on all ranks. Row n is read by the rank
      that has the first token of sequence n: of a batch by the first.
    * The final state of every sequence is returned on all ranks. Nothing has
      the bits that one process finds, since what ranks send each other is
      added up in their order; but see :func:`fastweights.batch_invariant`.
      From 9 ranks on maps are composed by doubling, in ceil(log2 ranks) rounds
      instead of one all-gather; not so in mlstm, nor by the kernels in
      batch_invariant(), whose bits are those of one tree.
    * What is differentiated is the sum of what the ranks differentiate. A
      gradient is therefore that of the rank's own tokens; those of weights,
      and of ``initial_state``, which all ranks share, are to be added up, as
      DistributedDataParallel and FSDP do. A mean loss is that of the rank's
      targets over the mean number of targets of a rank, so that the average
      over ranks, of losses and of gradients, is that of all targets.

    It is for :func:`fastweights.linear_recurrence`, every member,
    :func:`fastweights.mlstm`, :func:`fastweights.selective_scan`, the short
    convolution, layers of these, softmax attention, and a LanguageModel of
    such layers. TTT, Titans, LaCT, MesaNet, decoding and its states refuse.

    What is computed twice: the kernels of linear_recurrence find a rank's map
    as they find those of segments of a long sequence, and run each scan once.
    Without kernels, and in mlstm, each rank's tokens are first run for their
    map, by the operator itself. Of the additive rule that is their final
    state, in a second pass over k and v; of the delta rule it is a pass on
    V + K columns, V for B and K for M. Softmax attention has the keys and
    values of all ranks on each of them.

    Args:
        mesh: a DeviceMesh of one dimension, or a process group; its ranks in
            their order.
        tokens_per_rank: where they have different numbers of them. None: all
            have as many as this one. Beyond that nobody compares them.
        share_final_states: whether all ranks get a pack's final states, which
            then travel in every call, N times K V numbers per head. Without
            it each rank has those of the sequences whose last token it has,
            and zeros in the rows of others. A batch's are on all ranks
            anyway.

    Raises:
        TypeError, ValueError: the mesh has more dimensions than one, or
            tokens_per_rank has no entry for each rank.
    """
    if isinstance(mesh, dist.ProcessGroup):
        group = mesh
    elif hasattr(mesh, "get_group") and hasattr(mesh, "ndim"):
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh: got {mesh.ndim} dimensions, need one of them, as in "
                'mesh["name"]'
            )
        group = mesh.get_group()
    else:
        raise TypeError(
            f"mesh: got {type(mesh).__name__}, need a DeviceMesh or a "
            "process group"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    counts = None
    if tokens_per_rank is not None:
        name, counts = "tokens_per_rank", tuple(tokens_per_rank)
        check_integers(**{f"{name}[{i}]": n for i, n in enumerate(counts)})
        if len(counts) != size or min(counts) < 0 or not sum(counts):
            raise ValueError(
                f"{name}: got {list(counts)}, need {size} numbers >= 0, one "
                "for each rank, and one of them above 0"
            )
    check_flags(share_final_states=share_final_states)
    _contexts.append(Ranks(group, rank, size, counts, share_final_states))
    try:
        yield
    finally:
        _contexts.pop()


def refuse_ranks(what: str) -> None:
    """Raise under context_parallel, which ``what`` cannot do."""
    if current_ranks() is not None:
        raise NotImplementedError(
            f"{what}: got a call under context_parallel, need one outside of "
            "it, on whole sequences"
        )


class _Gather(torch.autograd.Function):
    """[ranks, *x.shape]; the gradient is the sum over ranks, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Any, size: int, overlap: Overlap
    ) -> Tensor:
        ctx.group, ctx.size = group, size
        y, part = x.new_empty(size, *x.shape), x.contiguous()[None]
        if overlap is None:
            _all_gather(y, part, group=group)
        else:
            pending = _all_gather(y, part, group=group, async_op=True)
            overlap()
            pending.wait()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        dx = _Scatter.apply(upcast(dy), ctx.group, ctx.size)
        return dx.to(dy.dtype), None, None, None


class _Scatter(torch.autograd.Function):
    """The sum over ranks of this rank's part, of y [ranks, ...]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        x = y.new_empty(1, *y.shape[1:])
        _reduce_scatter(x, y.contiguous(), group=group)
        return x[0]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(dx, ctx.group, ctx.size, None), None, None


class _Shift(torch.autograd.Function):
    """Send round a ring, zeros past its end; the gradient, the other way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ranks: Ranks, step: int, overlap: Overlap
    ) -> Tensor:
        from torch.distributed import _functional_collectives as collectives

        ctx.ranks, ctx.step = ranks, step
        to = [(r + step) % ranks.size for r in range(ranks.size)]
        y = collectives.permute_tensor(x.flatten(), to, ranks.group)
        if overlap is not None:
            overlap()
        y = collectives.wait_tensor(y).view(x.shape)
        here = 0 <= ranks.rank - step < ranks.size
        return y if here else torch.zeros_like(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _Shift.apply(dy, ctx.ranks, -ctx.step, None), None, None, None


class _Sum(torch.autograd.Function):
    """The sum over ranks, on each; so is the gradient's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(dy, ctx.group), None
