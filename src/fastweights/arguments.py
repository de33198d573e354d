"""What a call refuses before anything runs: types, shapes, devices, values.

linear_recurrence and decode_step, through which all members go, look at
values too where FASTWEIGHTS_CHECK=1 is in the environment at import.

What is checked by itself comes by its keyword, after what is needed of it, as
in ``check_numbers("> 0", eps=eps)``. What is held against another tensor, or
refused, comes after its name.
"""

from __future__ import annotations

import itertools
import math
import numbers
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fastweights import torch_internals
from fastweights.dtypes import DTYPES, compute_dtype

MAX_KERNEL_K = 256  # of the family's kernels
CHUNK_SIZES = (16, 32, 64)
DEFAULT_CHUNK_SIZE = 64  # where the caller leaves that open

INDEX_DTYPES = (torch.int32, torch.int64)

TENSOR_TYPES = (Tensor, torch.nn.Parameter)

CHECKS_VALUES = os.environ.get("FASTWEIGHTS_CHECK", "0") not in ("", "0")
"""Whether values are looked at."""


class RecurrenceOperands(NamedTuple):
    """The tensors of a call, as linear_recurrence describes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    erase_key: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def per_token(self) -> tuple[Any, ...]:
        """The tensors that have a row for each token."""
        return self[:-2]

    def differentiable(
        self, state_name: str = "initial_state"
    ) -> dict[str, Tensor]:
        """The given tensors that may have a gradient, by name."""
        names = *self._fields[:-2], state_name
        pairs = zip(names, self, strict=False)
        return {name: x for name, x in pairs if x is not None}


class RecurrenceOptions(NamedTuple):
    """The options of the recurrence's operator and of its backends."""

    scale: float
    chunk_size: int = DEFAULT_CHUNK_SIZE
    backend: str = "auto"  # as the caller has it
    batch_invariant: bool = False  # ops.common.batch_invariance


def check_recurrence_arguments(
    operands: RecurrenceOperands,
    *,
    scale: float | None = None,
    chunk_size: int | None = None,
    state_name: str = "initial_state",
    state_dtypes: tuple[torch.dtype, ...] = (),
    min_tokens: int = 1,
) -> None:
    """Raise for the first argument that does not fit the others.

    ``state_name`` is what the caller calls ``initial_state``, which may have
    ``state_dtypes`` besides its own; T is ``min_tokens`` or more. Only types,
    dtypes, layouts, shapes and devices count.
    """
    q, k, v, g, beta, erase_key, initial_state, cu_seqlens = operands
    if k is None or v is None:
        check_tensors(k=k, v=v)
    check_types_and_devices(
        {"q": q},
        same={"k": k, "v": v, "erase_key": erase_key},
        same_or_fp32={"g": g, "beta": beta},
        states={state_name: initial_state},
        offsets={"cu_seqlens": cu_seqlens},
        extra_dtypes=state_dtypes,
    )
    if q.dim() != 4:
        refuse_shape("q", q, "[B, T, H, K]")
    B, T, H, K = shape = q.shape
    if k.shape != shape:
        refuse_shape("k", k, f"q's, {list(shape)}")
    if B < 1 or min_tokens > T or H < 1 or K < 1:
        sizes = "B, T, H, K" if min_tokens else "B, H, K"
        refuse_shape("q", q, f"[B, T, H, K] with {sizes} >= 1")
    batch, length, HV, V = v.shape if v.dim() == 4 else 4 * (0,)
    if batch != B or length != T or HV < 1 or V < 1:
        refuse_shape("v", v, f"[{B}, {T}, HV, V] with HV, V >= 1")
    if HV % H:
        need = f"[{B}, {T}, HV, V] with HV a multiple of q's {H} heads"
        refuse_shape("v", v, need)
    if g is not None:
        # By dimensions first: to compare B with HV makes a graph for one B.
        gate = (HV,) if g.dim() == 1 else (B, T, HV, K)[: max(g.dim(), 3)]
        if g.shape != gate:
            need = f"[{HV}], [{B}, {T}, {HV}] or [{B}, {T}, {HV}, {K}]"
            refuse_shape("g", g, need)
    if beta is not None and beta.shape != (B, T, HV):
        refuse_shape("beta", beta, f"[{B}, {T}, {HV}]")
    if erase_key is not None:
        HE = H if erase_key.dim() == 4 and erase_key.shape[2] == H else HV
        if erase_key.shape != (B, T, HE, K):
            need = f"[{B}, {T}, {HV}, {K}] or [{B}, {T}, {H}, {K}]"
            refuse_shape("erase_key", erase_key, need)
        if beta is not None:
            raise ValueError(
                "erase_key: got a tensor beside beta, need one of the two; "
                "beta k, and beta v for v, are the delta rule of beta"
            )
    N = B
    if cu_seqlens is not None:
        N = check_sequences("q", q, "[1, T, H, K]", cu_seqlens)
    if initial_state is not None and initial_state.shape != (N, HV, K, V):
        need = f"[{N}, {HV}, {K}, {V}]"
        refuse_shape(state_name, initial_state, need)
    if scale is not None:
        check_numbers("any", scale=scale)
    if chunk_size is None:
        return
    if not isinstance(chunk_size, int):
        raise TypeError(
            f"chunk_size: got {type(chunk_size).__name__}, need an int or None"
        )
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(
            f"chunk_size: got {chunk_size!r}, "
            f"need one of {CHUNK_SIZES} or None"
        )


def check_types_and_devices(
    first: dict[str, Tensor],
    *,
    same: Mapping[str, Tensor | None] | None = None,
    same_or_fp32: Mapping[str, Tensor | None] | None = None,
    states: Mapping[str, Tensor | None] | None = None,
    offsets: Mapping[str, Tensor | None] | None = None,
    extra_dtypes: tuple[torch.dtype, ...] = (),
) -> None:
    """Raise for the first tensor of another type, dtype or device.

    All lie on the device of the ``first``, which has one of DTYPES. The
    dtype of ``same`` is the first's, that of ``states`` fp32 (fp64 if the
    first is) or an extra one. None stands for no tensor.
    """
    ((name, x),) = first.items()
    check_tensor(name, x)
    if x.dtype not in DTYPES:
        check_dtypes(first, {name: DTYPES})
    device, narrow, full = x.device, x.dtype, torch.float32
    if narrow is torch.float64:
        full = narrow
    for tensors, dtypes in (
        (same, (narrow,)),
        (same_or_fp32, (torch.float32, narrow)),
        (states, (full, *extra_dtypes)),
        (offsets, INDEX_DTYPES),
    ):
        for other, y in (tensors or {}).items():
            if y is None:
                continue
            if (
                not isinstance(y, Tensor)
                or y.is_nested
                or y.layout != torch.strided
            ):
                check_tensor(other, y)
            if y.dtype not in dtypes or y.device != device:
                _check_dtype_of(other, y, dtypes, name, device)


def check_names(
    owner: str,
    arguments: Mapping[str, object],
    names: Iterable[str],
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Raise TypeError for the first argument that owner takes by no such name.

    ``aliases`` are other names, each with the owner's own, or with several
    joined by " or ", of which the owner has one.
    """
    names = list(names)
    for name, x in arguments.items():
        if name in names:
            continue
        if ours := resolve_alias(name, names, aliases or {}):
            raise TypeError(f"{name}: got {_describe(x)}, need it as {ours}")
        raise TypeError(
            f"{name}: got {_describe(x)}, which {owner} does not take, need "
            f"one of {', '.join(names)}"
        )


def resolve_alias(
    name: str, names: Collection[str], aliases: Mapping[str, str]
) -> str | None:
    """The alias's name among these, with what is said of it; None: none."""
    for ours in aliases.get(name, "").split(" or "):
        if ours.partition(" ")[0] in names:
            return ours
    return None


def check_tensors(**tensors: Tensor) -> None:
    """Raise TypeError for the first argument that is no tensor.

    A tensor has a place in memory for every element: check_tensor.
    """
    for name, x in tensors.items():
        check_tensor(name, x)


def check_tensor(name: str, x: Tensor) -> None:
    """Raise TypeError unless x is a tensor with a place for every element."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, need a Tensor")
    if x.is_nested:
        raise TypeError(
            f"{name}: got a nested tensor, need a dense one; sequences "
            "of several lengths are packed, with cu_seqlens"
        )
    if x.layout != torch.strided:
        raise TypeError(
            f"{name}: got layout {x.layout}, need torch.strided, as "
            "to_dense() returns it"
        )


def check_integers(**values: int) -> None:
    """Raise TypeError for the first of the arguments that is no integer."""
    for name, x in values.items():
        if isinstance(x, bool) or not isinstance(
            x, numbers.Integral | torch.SymInt
        ):
            raise TypeError(f"{name}: got {type(x).__name__}, need an int")


def check_sizes(**sizes: int) -> None:
    """Raise unless each is an integer >= 1."""
    check_integers(**sizes)
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: got {size}, need an integer >= 1")


def check_flags(**flags: bool) -> None:
    """Raise TypeError unless each is True or False."""
    for name, x in flags.items():
        if not isinstance(x, bool):
            raise TypeError(f"{name}: got {_describe(x)}, need True or False")


def check_numbers(need: str, /, **values: float) -> None:
    """Raise unless each is real, finite and "> 0", ">= 0", "< 0" or "any"."""
    real = numbers.Real | torch.SymFloat | torch.SymInt
    for name, x in values.items():
        if isinstance(x, bool) or not isinstance(x, real):
            got = type(x).__name__
            raise TypeError(f"{name}: got {got}, need a real number")
        fits = {"> 0": x > 0, ">= 0": x >= 0, "< 0": x < 0, "any": True}[need]
        if not fits:
            raise ValueError(f"{name}: got {x}, need {need}")
        if not -math.inf < x < math.inf:
            raise ValueError(f"{name}: got {x}, need a finite number")


def check_dtype(dtype: torch.dtype | None, name: str = "dtype") -> None:
    """Raise TypeError unless parameters can have it; None is PyTorch's."""
    if dtype is not None and dtype not in DTYPES:
        got = _describe(dtype)
        raise TypeError(f"{name}: got {got}, need one of {DTYPES}")


def _describe(x: object) -> str:
    """A value of a wrong type, as a message names it: short, else its type."""
    text = repr(x)
    plain = isinstance(x, bool | int | float | str | torch.dtype)
    return text if plain and len(text) <= 40 else type(x).__name__


def check_states(
    q: Tensor,
    states: dict[str, Tensor],
    shapes: dict[str, tuple[int, ...]],
    extra_dtypes: tuple[torch.dtype, ...] = (),
) -> None:
    """Raise unless states have these shapes, and the dtype of q's states.

    One of the ``extra_dtypes`` will do as well.
    """
    check_tensors(**states)
    check_types_and_devices({"q": q}, states=states, extra_dtypes=extra_dtypes)
    for name, shape in shapes.items():
        if states[name].shape != shape:
            refuse_shape(name, states[name], f"{list(shape)}")


def check_dtypes(
    tensors: dict[str, Tensor], dtypes: dict[str, tuple[torch.dtype, ...]]
) -> None:
    """Raise for a dtype that is none of its argument's, or another device.

    The device is that of the first.
    """
    first, device = next((name, x.device) for name, x in tensors.items())
    for name, x in tensors.items():
        _check_dtype_of(name, x, dtypes[name], first, device)


def _check_dtype_of(
    name: str,
    x: Tensor,
    dtypes: tuple[torch.dtype, ...],
    first: str,
    device: torch.device,
) -> None:
    if x.dtype not in dtypes:
        distinct = dict.fromkeys(dtypes)
        need = " or ".join(map(str, distinct))
        if len(distinct) > 2:
            need = f"one of {dtypes}"
        raise TypeError(f"{name}: got {x.dtype}, need {need}")
    if x.device != device:
        raise ValueError(
            f"{name}: got device {x.device}, need {first}'s, {device}"
        )


def check_shapes(**expected: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise for the first tensor, by name, without the shape beside it.

    Raise too for what is no tensor. None has no shape to check.
    """
    for name, (x, shape) in expected.items():
        if x is not None:
            check_tensor(name, x)
        if x is not None and tuple(x.shape) != shape:
            refuse_shape(name, x, f"{list(shape)}")


def refuse_shape(name: str, x: Tensor, need: str) -> NoReturn:
    """Raise ValueError: the argument, its shape, and the one it needs."""
    raise ValueError(f"{name}: got shape {list(x.shape)}, need {need}")


def check_dims(need: str, /, **tensors: Tensor) -> None:
    """Refuse any but tensors of as many dimensions as "[B, T, HV]" has."""
    for name, x in tensors.items():
        check_tensor(name, x)
        if x.dim() != need.count(",") + 1:
            refuse_shape(name, x, need)


def check_gate(
    name: str, x: Tensor, q: Tensor, v: Tensor, *others: torch.dtype
) -> None:
    """Refuse a gate but of one number per head and step, fp32 or q's dtype.

    One of the ``others`` will do as well.
    """
    check_dims("[B, T, HV]", **{name: x})
    dtypes = tuple(dict.fromkeys((torch.float32, q.dtype, *others)))
    check_dtypes({"q": q, name: x}, {"q": (q.dtype,), name: dtypes})
    if x.shape != v.shape[:3]:
        refuse_shape(name, x, f"{list(v.shape[:3])}")


def check_strength(
    name: str, x: Tensor, q: Tensor, *shapes: tuple[int, ...]
) -> None:
    """Refuse a strength of another shape, or in neither fp32 nor q's dtype."""
    check_tensor(name, x)
    dtypes = (torch.float32, q.dtype)
    check_dtypes({"q": q, name: x}, {"q": (q.dtype,), name: dtypes})
    if x.shape not in shapes:
        shown = dict.fromkeys(str(list(shape)) for shape in shapes)
        refuse_shape(name, x, " or ".join(shown))


def check_sequences(
    name: str,
    x: Tensor,
    shape: str,
    cu_seqlens: Tensor | None,
    many: str = "N",
) -> int:
    """The number of sequences: B of a batch x [B, ...], or N of a pack.

    Raise unless cu_seqlens is [N + 1], and B then 1.
    """
    if cu_seqlens is None:
        return x.shape[0]
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        need = f"[{many} + 1] with {many} >= 1"
        refuse_shape("cu_seqlens", cu_seqlens, need)
    if x.shape[0] != 1:
        refuse_shape(name, x, f"{shape} because cu_seqlens is given")
    return cu_seqlens.shape[0] - 1


def check_offsets(
    offsets: list[int], T: int, name: str = "cu_seqlens"
) -> None:
    """Raise ValueError unless offsets rise from 0 to at most T."""
    increases = all(a <= b for a, b in itertools.pairwise(offsets))
    if offsets[0] != 0 or offsets[-1] > T or not increases:
        raise ValueError(
            f"{name}: got {offsets}, need values that start at 0, "
            f"never decrease and end at T = {T} or before"
        )


def check_offsets_on_host(cu_seqlens: Tensor | None, T: int) -> None:
    """Raise ValueError for offsets that are none, if a CPU has them."""
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        check_offsets(cu_seqlens.tolist(), T)


def check_packed(
    x: Tensor,
    cu_seqlens: Tensor | None,
    name: str = "cu_seqlens",
    *,
    total: int | None = None,
) -> None:
    """Raise unless these are the offsets of a pack x [1, T, ...].

    If x is a part of a pack, that has ``total`` tokens.

    Their values are read if they lie on a CPU and nothing is traced, where
    reading them costs no synchronisation.
    """
    if cu_seqlens is None:
        return
    check_tensor(name, cu_seqlens)
    check_dtypes({name: cu_seqlens}, {name: INDEX_DTYPES})
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        refuse_shape(name, cu_seqlens, "[N + 1] with N >= 1")
    if is_readable(cu_seqlens):
        T = x.shape[1] if total is None else total
        check_offsets(cu_seqlens.tolist(), T, name)


def check_rows(
    rows: Tensor,
    count: int | None,
    size: int | None = None,
    name: str = "rows",
    *,
    allow_no_row: bool = False,
) -> None:
    """Raise unless they name ``count`` rows of a pool of ``size``.

    [count], of any count if it is None, int32 or int64. Values are read as
    :func:`check_packed` reads offsets: 0 to size - 1, none of them twice.
    With ``allow_no_row`` what is no row of the pool, such as -1, may be there.
    """
    check_tensor(name, rows)
    check_dtypes({name: rows}, {name: INDEX_DTYPES})
    if rows.dim() != 1 or (count is not None and rows.shape[0] != count):
        refuse_shape(name, rows, f"[{'M' if count is None else count}]")
    if size is None or not is_readable(rows):
        return
    values = rows.tolist()
    inside = [i for i in values if 0 <= i < size]
    if len(inside) < len(values) and not allow_no_row:
        raise ValueError(
            f"{name}: got {values}, need rows of the pool, 0 to {size - 1}"
        )
    if len(set(inside)) < len(inside):
        raise ValueError(f"{name}: got {values}, need each row once")


def is_readable(x: Tensor) -> bool:
    """Whether reading x costs no synchronisation and no trace."""
    return x.device.type == "cpu" and not torch_internals.is_traced()


def check_values_if_enabled(
    operands: RecurrenceOperands, state_name: str = "initial_state"
) -> None:
    """Raise ValueError for the first argument whose values do not fit.

    What shapes and dtypes cannot show: NaN, a log decay above 0, a delta rule
    that diverges, offsets that are none. Only with FASTWEIGHTS_CHECK=1: each
    call then waits for the GPU, without it nothing is read. Where values
    cannot be read nothing is checked: under torch.compile and the transforms
    of torch.func, in a trace, while a CUDA graph is captured, for tensors
    without data or of a class of their own.

    The arguments have passed check_recurrence_arguments; ``state_name`` is
    what the caller calls ``initial_state``.
    """
    if not CHECKS_VALUES:
        return
    _, k, v, g, beta, *_, cu_seqlens = operands
    tensors = operands.differentiable(state_name)
    if not all(_has_values(x) for x in tensors.values()):
        return
    errors = [(name, x.isnan(), "numbers") for name, x in tensors.items()]
    if g is not None:
        errors.append(("g", g > 0, "g <= 0, the log of a decay"))
    if beta is not None:
        # Unit keys and beta = 2 are right: both may have been rounded up.
        limit = 2 * (1 + 2 * torch.finfo(k.dtype).eps)
        step = k.to(compute_dtype(k.dtype))
        step = step.square().sum(-1)
        step = beta * step.repeat_interleave(v.shape[2] // k.shape[2], -1)
        need = "beta |k|^2 <= 2, above which the delta rule diverges"
        errors.append(("beta", step > limit, need))
    _refuse_entries(tensors, errors)
    if cu_seqlens is not None:
        check_offsets(cu_seqlens.tolist(), v.shape[1])


def check_entries_if_enabled(need: str, /, **tensors: Tensor) -> None:
    """Raise ValueError unless all are "numbers", or "numbers < inf".

    For what a member makes operands of: check_values_if_enabled sees those.
    """
    if CHECKS_VALUES and all(_has_values(x) for x in tensors.values()):
        # Nothing is equal to NaN.
        limit = {"numbers": math.nan, "numbers < inf": math.inf}[need]
        masks = [x.isnan() | (x == limit) for x in tensors.values()]
        errors = [(*pair, need) for pair in zip(tensors, masks, strict=True)]
        _refuse_entries(tensors, errors)


def _refuse_entries(
    tensors: dict[str, Tensor], errors: list[tuple[str, Tensor, str]]
) -> None:
    """Raise for the first entry of a mask: name, mask, what is needed."""
    flags = torch.stack([mask.any() for _, mask, _ in errors]).tolist()
    for (name, mask, need), is_wrong in zip(errors, flags, strict=True):
        if is_wrong:
            index = mask.nonzero()[0].tolist()
            raise ValueError(
                f"{name}: got {tensors[name][tuple(index)].item()} at "
                f"{index}, need {need}"
            )


def _has_values(x: Tensor) -> bool:
    """Whether the host may read x, and x has something to read."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch_internals.in_torch_func()
        or type(x) not in TENSOR_TYPES
        or x.is_meta
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )
