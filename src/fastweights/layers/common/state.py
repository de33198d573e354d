"""What a layer keeps of the tokens it has read, and how it goes on from it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.arguments import check_integers, check_rows, is_readable
from fastweights.dtypes import compute_dtype
from fastweights.ops.common.rows import clamp_rows, write_rows
from fastweights.ops.decode import MAX_STEP_TOKENS, decode_step
from fastweights.ops.recurrence import linear_recurrence
from fastweights.packing import Offsets, sequence_ids
from fastweights.ranks.group import current_ranks


@final
@dataclass(eq=False)
class LayerState:
    """A layer's memory of the past, one row per sequence.

    Fields that a layer does not use are None. S and m are fp32 (fp64 in an
    fp64 layer) whatever the layer's dtype is: a state in half precision loses
    small writes. A pool may have S in bf16 all the same. ``num_read`` is
    int64. The other fields may be in any dtype: a call converts them to its
    own, or to autocast's, and where it writes in place, back.

    The tensors are its memory. ``read_at_most`` is a bound that each call
    moves on, so that none asks the device. ``rows``, ``all_inside`` and
    ``num_accepted`` are for the next call: they say what it does with the
    memory, and copies do not have them.

    A state made under torch.inference_mode goes on outside of it too, where
    copies take the places of its tensors; under torch.compile and in a pool
    it has to be cloned first.
    """

    S: Float[Tensor, "N HV ..."] | None = None
    """The recurrence's state, [N, HV, K, V] (Mamba: [N, D, state]; a network:
    what its weights have learned since the sequence began)."""

    m: Float[Tensor, "N HV"] | None = None
    """mLSTM's stabilizer."""

    convolution: Float[Tensor, "N W-1 C"] | None = None
    """The last inputs of the short convolution, oldest first."""

    window: Float[Tensor, "N W-1 C"] | None = None
    """LaCT's last keys and values, side by side, oldest first."""

    keys: Float[Tensor, "N capacity H K"] | None = None
    """Softmax attention's keys, by position in the sequence."""

    values: Float[Tensor, "N capacity H V"] | None = None
    """Softmax attention's values."""

    num_read: Int[Tensor, " N"] | None = None
    """Tokens read by each sequence, where a layer needs to know."""

    # No name here may begin with another, such as m: export would mix them up.
    read_at_most: int = 0
    """Tokens that any sequence has read, at most, where a layer has ``keys``.
    Calls of other layers leave it as it is."""

    rows: Int[Tensor, " B"] | None = None
    """The row of each sequence of the next call in a pool; -1: it has none."""

    all_inside: bool | None = None  # what is None is no part of a pytree
    """Whether all of ``rows`` are known to be the pool's: none is -1."""

    num_accepted: Int[Tensor, " B"] | None = None
    """How many of each sequence's tokens in the next call the state takes
    in; None: all. There are outputs for all of them. For up to 16 tokens,
    not packed, without gradients; the call sets it to None again."""

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are there, by name, those of a pool as a whole."""
        fields = [(name, getattr(self, name)) for name in TENSORS]
        return {name: x for name, x in fields if isinstance(x, Tensor)}

    def as_pool(
        self, rows: Int[Tensor, " B"], read_at_most: int
    ) -> LayerState:
        """View this state's memory as a pool, for calls without gradients.

        Sequence b of these calls has row rows[b], and the other rows stay as
        they are. No two sequences may have the same row. One whose row is
        none (-1) changes nothing, and its outputs mean nothing.

        Args:
            rows: int32 or int64, on the state's device.
            read_at_most: the most tokens that one of these rows has read.
        """
        check_integers(read_at_most=read_at_most)
        if read_at_most < 0:
            raise ValueError(
                f"read_at_most: got {read_at_most}, need an integer >= 0"
            )
        check_rows(rows, None, self.num_rows, allow_no_row=True)
        return self.as_pool_unchecked(rows, read_at_most)

    def as_pool_unchecked(
        self,
        rows: Int[Tensor, " B"],
        read_at_most: int,
        all_inside: bool | None = None,
    ) -> LayerState:
        """View as :meth:`as_pool` does, in rows known to be right."""
        call: Any = self.tensors() | {"rows": rows, "all_inside": all_inside}
        return LayerState(**call, read_at_most=read_at_most)

    def batch_field(self, name: str) -> Tensor:
        """A field of this name, or of a pool a copy of the batch's rows.

        Raises:
            ValueError: it is not there: the state is another layer's.
        """
        x = self.tensor(name)
        if self.rows is None:
            return x
        rows = self.rows if self.all_inside else clamp_rows(self.rows, x)
        return x.index_select(0, rows)

    def tensor(self, name: str) -> Tensor:
        """The field of this name, that of a pool as a whole: its memory."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(
                f"state: got one with {sorted(self.tensors())}, need {name}: "
                "is it the state of another layer?"
            )
        return value

    def _map(self, function: Any) -> LayerState:
        changed = {k: function(x) for k, x in self.tensors().items()}
        return LayerState(**changed, read_at_most=self.read_at_most)

    def to(self, device: torch.device | str) -> LayerState:
        """The state on another device, as Tensor.to."""
        return self._map(lambda x: x.to(device))

    def clone(self) -> LayerState:
        """A copy that shares no memory."""
        return self._map(torch.clone)

    def detach(self) -> LayerState:
        """The state without its history, as Tensor.detach."""
        return self._map(torch.detach)

    def select(self, rows: Int[Tensor, " M"]) -> LayerState:
        """The sequences with these indices, copied; one may come twice."""
        check_rows(rows, None)
        given = rows.tolist() if is_readable(rows) else []
        last = self.num_rows - 1
        if not all(0 <= i <= last for i in given):
            raise ValueError(f"rows: got {given}, need sequences, 0 to {last}")
        return self._map(lambda x: x.index_select(0, rows))

    def copy_(self, other: LayerState, rows: Tensor | None = None) -> None:
        """Take over another state, into these rows if they are named.

        Where softmax attention's keys and values have room for more tokens
        here than there, those that the other has room for are taken over.

        Raises:
            ValueError: the two do not hold the same fields, or one of other's
                does not fit into this one's.
        """
        if not isinstance(other, LayerState):
            got = type(other).__name__
            raise TypeError(f"other: got {got}, need a LayerState")
        if rows is not None:
            check_rows(rows, None, self.num_rows)
        mine, theirs = self.tensors(), other.tensors()
        if mine.keys() != theirs.keys():
            raise ValueError(
                f"other: got a state with {sorted(theirs)}, need one with "
                f"{sorted(mine)}"
            )
        for name, x in mine.items():
            count = x.shape[0] if rows is None else rows.shape[0]
            y, room = theirs[name], list(x.shape[1:])
            if name in ("keys", "values") and y.shape[1] < x.shape[1]:
                mine[name] = x[:, : y.shape[1]]
                room[0] = y.shape[1]
            if list(y.shape) != [count, *room]:
                raise ValueError(
                    f"other: got {name} of shape {list(y.shape)}, need "
                    f"{[count, *room]}"
                )
        for name, x in mine.items():
            if rows is not None:
                x.index_copy_(0, rows.long(), theirs[name].to(x.dtype))
            elif x is not theirs[name]:
                x.copy_(theirs[name])
        self.read_at_most = max(self.read_at_most, other.read_at_most)

    @property
    def num_rows(self) -> int:
        """Sequences, or rows of a pool."""
        if not (tensors := self.tensors()):
            raise ValueError("state: got one with no field, need a layer's")
        return min(x.shape[0] for x in tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all the tensors."""
        return sum(x.nbytes for x in self.tensors().values())


TENSORS = tuple(
    f.name
    for f in fields(LayerState)
    if f.name not in ("read_at_most", "rows", "all_inside", "num_accepted")
)

# In what torch.export and others take apart, a state is its fields.
torch.export.register_dataclass(
    LayerState, serialized_type_name="fastweights.LayerState"
)


def first_tokens(state: LayerState, n: int) -> LayerState:
    """Share the memory, of keys and values that of the first ``n`` tokens."""
    if state.keys is None or state.values is None:
        return replace(state)
    keys, values = state.keys[:, :n], state.values[:, :n]
    return replace(state, keys=keys, values=values)


def update_state(state: LayerState, after: LayerState) -> LayerState:
    """The state after a call: in place without gradients, else the new one."""
    if state.rows is not None:
        for name, x in state.tensors().items():
            new = getattr(after, name)
            if x is new:
                continue
            if state.all_inside:  # one launch in place of a dozen
                x.index_copy_(0, state.rows, new.to(x.dtype))
            else:
                write_rows(x, new.to(x.dtype), state.rows)
        most = max(state.read_at_most, after.read_at_most)
        state.read_at_most = most
        return state
    if torch.is_grad_enabled():
        return after
    state.copy_(after)
    return state


def leave_inference(state: LayerState) -> None:
    """Make a state of torch.inference_mode fit to go on outside of it.

    Only there may its tensors change: copies take their places.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return
    for name, x in state.tensors().items():
        if x.is_inference():
            if state.rows is not None:
                raise ValueError(
                    f"state: got a pool whose {name} was made under "
                    "torch.inference_mode, need one that was not, or that mode"
                )
            setattr(state, name, x.clone())


def state_if_step(
    state: LayerState | None, x: Tensor, cu_seqlens: Offsets | None
) -> LayerState | None:
    """The state, if the call may step on its memory in place; else None."""
    if state is None or cu_seqlens is not None or torch.is_grad_enabled():
        return None
    if current_ranks() is not None:  # which spreads a few tokens over ranks
        return None
    return state if x.shape[1] <= MAX_STEP_TOKENS else None


def run_recurrence(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    erase_key: Float[Tensor, "B T _ K"] | None = None,
    state: LayerState | None,
    cu_seqlens: Offsets | None,
    scale: float | None = None,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"]]:
    """The recurrence from ``state.S`` on: outputs, and S after them.

    Without gradients, 1 to 16 tokens per sequence of a batch are one
    :func:`fastweights.decode_step`, which changes ``state.S`` in place.
    """
    if stepped := state_if_step(state, q, cu_seqlens):
        S = stepped.tensor("S")
        o = decode_step(
            q,
            k,
            v,
            g=g,
            beta=beta,
            erase_key=erase_key,
            state=S,
            rows=stepped.rows,
            num_accepted=stepped.num_accepted,
            scale=scale,
        )
        return o, S
    initial_state = state and state.batch_field("S")
    if initial_state is not None:
        initial_state = initial_state.to(compute_dtype(q.dtype))
    return linear_recurrence(
        q,
        k,
        v,
        g,
        beta,
        erase_key=erase_key,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )


def token_positions(
    T: int,
    device: torch.device,
    state: LayerState | None,
    cu_seqlens: Offsets | None,
    start: int = 0,
) -> Int[Tensor, "B T"]:
    """The number of tokens of its sequence before each token.

    The first of them is token ``start`` of its batch or pack.
    """
    position = torch.arange(start, start + T, device=device)[None]
    read = state and state.batch_field("num_read")
    if cu_seqlens is None:
        return position if read is None else position + read[:, None]
    sequence = sequence_ids(cu_seqlens - start, T)
    position = position - cu_seqlens[sequence].to(position.dtype)
    if read is None:
        return position
    return position + read[sequence.clamp(max=read.shape[0] - 1)]


def token_counts(
    x: Float[Tensor, "B T ..."],
    cu_seqlens: Offsets | None,
    state: LayerState | None = None,
    T: int | None = None,
) -> Int[Tensor, " N"]:
    """The number of x's tokens that each sequence's state takes in.

    In a batch each has T of them, or all of x's if that is None.
    """
    if state is not None and state.num_accepted is not None:
        return state.num_accepted.to(torch.int64)
    if cu_seqlens is None:
        T = x.shape[1] if T is None else T
        return torch.full((x.shape[0],), T, device=x.device)
    return cu_seqlens.diff().to(torch.int64)
