"""What all layers have in common: how they are made, and what they keep."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, TypedDict, get_args, get_type_hints

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fastweights.arguments import (
    check_dtype,
    check_flags,
    check_integers,
    check_names,
    check_numbers,
    check_sizes,
)
from fastweights.layers.common.layer_arguments import check_input
from fastweights.layers.common.plain_modules import note_source_forward
from fastweights.layers.common.state import (
    LayerState,
    Offsets,
    update_state,
)
from fastweights.layers.common.unpacked_rows import compute_by_length
from fastweights.torch_internals import is_traced

Hidden = Float[Tensor, "B T D"]

WITHOUT_WEIGHT_DECAY = re.compile(
    r"(A_log|dt_bias|norm_weight|norm_bias|\bb\d+|qk_scale|qk_offset)$"
)
"""Names of parameters without weight decay, whatever their shape."""

RENAMED_ARGUMENTS = {
    "activation": "gate_activation",
    "base_lr": "max_rate or initial_rate",
    "cap": "gate_cap",
    "expand_k": "qk_factor",
    "expand_v": "v_factor",
    "normalize": "qk_l2norm",
    "qk_norm": "qk_norm_type",
    "steps": "solver_steps",
    "theta": "rope_theta",
}
"""Names of arguments that saved models may have, and their names now."""

ARGUMENT_ALIASES = RENAMED_ARGUMENTS | {
    "d_conv": "conv_size",
    "checkpoint": "recompute",
    "conv_kernel": "conv_size",
    "correction_factor": "correction",
    "d_model": "dim",
    "d_state": "state_size",
    "expand_ratio": "expand",
    "expand_v": "v_factor (width of v over dim)",
    "expand_qk": "qk_factor",
    "gate_logit_normalizer": "temperature",
    "gate_low_rank_dim": "gate_rank",
    "head_k_dim": "head_dim",
    "head_size": "head_dim",
    "headdim": "head_dim",
    "hidden_size": "dim",
    "input_dim": "dim",
    "key_dim": "head_dim",
    "layer_idx": "layer",
    "n_groups": "num_groups",
    "n_heads": "num_heads",
    "ngroups": "num_groups",
    "num_key_value_heads": "num_kv_heads",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "qk_dim_factor": "qk_factor",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "use_beta_bias": "beta_bias",
    "use_gate": "output_gate",
    "use_output_gate": "output_gate",
    "use_short_conv": "conv_size (None: no convolution)",
    "v_dim_factor": "v_factor",
    "window_size": "window",
}
"""Names of arguments in public implementations, and their names here."""


RANGES_BY_NAME = {"eps": ">= 0", "norm_eps": ">= 0", "lower_bound": "< 0"}
RANGES_BY_NAME |= {"correction": "any"}
"""What numbers by these names have to be; all others are above 0."""


class FactoryOptions(TypedDict):
    """The device and the dtype that a module's parameters are made in."""

    device: torch.device | None
    dtype: torch.dtype | None


class CheckedModule(nn.Module):
    """A module that says which argument of its constructor does not fit.

    What an argument has to be is read off its annotation, one of these kinds
    or None: True or False, an integer >= 1, a number, a device, a floating
    point dtype; other arguments are for the class itself to check. Names of
    public implementations are answered by the one they have here. What a
    subclass outside of this project takes is its own to check. Parameters
    that weight decay should spare carry ``_no_weight_decay``, for optimisers
    that look for it; a copy loses such marks, and
    :func:`fastweights.layers.parameter_groups` goes by names.
    """

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        make = vars(cls).get("__init__")
        if make is not None:
            checked = _checked(make, is_ours(cls))
            cls.__init__ = checked  # type: ignore[method-assign]


@note_source_forward
class Layer(CheckedModule):
    """A layer: y, state = layer(x, state, cu_seqlens).

    Each class has ``dim`` and a ``compute`` of its own. Which fields a state
    has to have, and their shapes, is checked in layers of this project only: a
    second layer, on the device "meta", tells them. A constructor from
    elsewhere is not called a second time.

    With gradients a call leaves the state that came in as it was. Without
    (torch.no_grad) it changes that state in place: to go on from one state
    twice, give each call a ``state.clone()``.

    A class says by attributes, all False here, what its ``compute`` can do.
    With ``reads_packs_as_rows`` it gets packed sequences as rows, filled up to
    the longest. With ``supports_num_accepted`` it does what
    ``LayerState.num_accepted`` asks for; else it is called for a token at a
    time. With ``supports_bf16_state`` a step reads and writes a pool's S in
    bf16. With ``supports_captured_packs`` its kernels read packs without
    waiting for the device, so that CUDA graphs can have them.
    """

    dim: int
    """Width D of x and y."""

    reads_packs_as_rows: bool = False
    supports_num_accepted: bool = False
    supports_bf16_state: bool = False
    supports_captured_packs: bool = False

    preallocate_state: Callable[..., LayerState] | None = None
    """Where states grow: makes an empty one of (num_sequences, capacity)."""

    def forward(
        self,
        x: Hidden,
        state: LayerState | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> tuple[Hidden, LayerState | None]:
        """y, and the state after the last token of each sequence.

        Without gradients the state that came in is changed in place and
        returned. Which fields it has, the layer's ``compute`` says; None where
        that makes none (softmax attention, packed sequences, training).
        """
        check_input(x, self, state, cu_seqlens)
        partly = state is not None and state.num_accepted is not None
        if self.reads_packs_as_rows and cu_seqlens is not None:
            y, after = compute_by_length(self.compute, x, state, cu_seqlens)
        elif partly and not self.supports_num_accepted:
            y, after = compute_by_token(self.compute, x, state)
        else:
            y, after = self.compute(x, state, cu_seqlens)
        if state is not None:
            after = update_state(state, after)
            state.num_accepted = None
        elif (
            after is not None
            and not is_traced()
            and "row_shapes" not in vars(self)
        ):
            self.row_shapes = _row_shapes(after)
        return y, after

    def compute(
        self, x: Hidden, state: LayerState | None, cu_seqlens: Offsets | None
    ) -> tuple[Hidden, Any]:
        """y, and a new state or None, of arguments that have been checked."""
        raise NotImplementedError

    def fused_step(
        self, x: Hidden, norm: nn.RMSNorm, state: LayerState
    ) -> Hidden | None:
        """x + layer(norm(x)) of a few tokens per sequence, the state in place.

        It makes fewer launches than the modules. Where the layer has no way
        for that (:mod:`fastweights.layers.common.fused_step`), it returns None
        and has written nothing. Else ``state`` is the one after these tokens,
        of which it took in ``num_accepted``; the caller sets that to None.
        """
        return None

    @torch.no_grad()
    def state_bytes(self, T: int) -> int:
        """Bytes of the state of one sequence after T tokens.

        As the layer makes it, without any room to grow. Beyond 1,024 tokens
        every further one is taken to cost what it costs up to there: nothing,
        or its keys and values.
        """
        return extrapolate(lambda T: self.meta_state(T).nbytes, T)

    @property
    def can_be_remade(self) -> bool:
        """Whether its constructor may run again, for a state's shapes.

        What the constructor of a layer from elsewhere does, and whether it
        takes a device, is not known here.
        """
        return is_ours(type(self).__init__) and is_ours(self.compute)

    @torch.no_grad()
    def meta_state(self, T: int) -> LayerState:
        """A state after T tokens, on a device that holds no numbers.

        A layer that is not remade reads T zeros where it is.
        """
        numbers = (p for p in self.parameters() if p.is_floating_point())
        like, layer = next(numbers, torch.empty(0)), self
        factory: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        if self.can_be_remade:
            factory["device"] = torch.device("meta")
            args, options = self._made_with
            layer = type(self)(*args, **options | factory)
        _, state = layer(torch.zeros(1, T, self.dim, **factory))
        return state or LayerState()

    @functools.cached_property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of a row of each field of its states.

        They are those of the first state that a call has made; before that, of
        a meta state, for which PyTorch loads its compiler.
        """
        make = self.preallocate_state
        return _row_shapes(make(1, 1) if make else self.meta_state(1))


class FamilyLayer(Layer):
    """A layer whose recurrence is of the family: :func:`run_recurrence`'s."""

    supports_num_accepted = True
    supports_bf16_state = True
    supports_captured_packs = True


def _row_shapes(state: LayerState) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape[1:]) for name, x in state.tensors().items()}


def compute_by_token(
    compute: Callable[..., tuple[Hidden, LayerState]], x: Hidden, state: Any
) -> tuple[Hidden, LayerState]:
    """Call a layer's ``compute`` a token at a time; keep accepted states.

    The layer goes on from copies, to the last token. Each sequence keeps the
    state after the last token that it accepts.
    """
    outputs, num_accepted = [], state.num_accepted
    states_kept = {
        name: state.batch_field(name).clone() for name in state.tensors()
    }
    copies = {name: t.clone() for name, t in states_kept.items()}
    stepped = LayerState(**copies, read_at_most=state.read_at_most)
    for t, token in enumerate(x.split(1, 1)):
        y, stepped = compute(token, stepped, None)
        outputs.append(y)
        for name, new in stepped.tensors().items():
            taken = (t < num_accepted).view(-1, *[1] * (new.dim() - 1))
            states_kept[name] = torch.where(taken, new, states_kept[name])
    after = LayerState(**states_kept, read_at_most=stepped.read_at_most)
    return torch.cat(outputs, 1), after


def extrapolate(after: Callable[[int], int], T: int) -> int:
    """Call after(T); beyond 1,024 as if every further token cost the same."""
    check_sizes(T=T)
    if T <= 1024:
        return after(T)
    per_token = (after(1024) - after(512)) // 512
    return after(1024) + per_token * (T - 1024)


def is_ours(made: Any) -> bool:
    """Whether a class or function is one of this project's."""
    package, *_ = made.__module__.split(".")
    return package in ("fastweights", "fastweights_lab")


def has_no_weight_decay(name: str, parameter: Tensor) -> bool:
    """Whether weight decay is not for a parameter of this name."""
    return parameter.dim() < 2 or WITHOUT_WEIGHT_DECAY.search(name) is not None


def parameter_groups(
    model: nn.Module, weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups for an optimiser: with weight decay, and without.

        torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3)

    Weight decay is for matrices. Exempt are norms and biases, which
    are all the parameters with fewer than two dimensions, and what sets how
    fast a state forgets, A_log and dt_bias: an A_log of 0 is not a small
    weight. Exempt too are the norms and biases per head [H, n] of networks
    that are a layer's state, and scales and offsets of q and k [2, D].

    Args:
        model: any module; those of its parameters that have a gradient.
        weight_decay: of the first group, >= 0.

    Returns:
        the groups, as ``torch.optim`` takes them.

    Raises:
        TypeError, ValueError: weight_decay is no number, or below 0.
    """
    check_numbers(">= 0", weight_decay=weight_decay)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[not has_no_weight_decay(name, parameter)].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]


def _checked(make: Callable[..., None], ours: bool) -> Callable[..., None]:
    """A constructor that looks at its arguments first, if they are ours."""
    taken = inspect.signature(make).parameters
    hints = get_type_hints(make) if ours else {}
    others = any(p.kind is p.VAR_KEYWORD for p in taken.values())

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        if not others:
            check_names(
                type(self).__name__, options, [*taken][1:], ARGUMENT_ALIASES
            )
        given = dict(zip([*taken][1:], args, strict=False)) | options
        for name, hint in hints.items():
            if name in given:
                _check_argument(name, given[name], hint)
        make(self, *args, **options)
        self._made_with = args, options
        for name, parameter in self.named_parameters():
            if has_no_weight_decay(name, parameter):
                parameter._no_weight_decay = True  # type: ignore[attr-defined]

    return __init__


def _check_argument(name: str, x: Any, hint: Any) -> None:
    """Raise unless an argument is what its annotation says."""
    types = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if x is None and NoneType in types:
        return
    needed, *others = [needed for needed in types if needed is not NoneType]
    if others:
        return
    if needed is bool:
        check_flags(**{name: x})
    elif needed is int and name in ("layer", "conv_size"):
        check_integers(**{name: x})  # 0 and more, or 2 to 4
    elif needed is int:
        check_sizes(**{name: x})
    elif needed is float:
        check_numbers(RANGES_BY_NAME.get(name, "> 0"), **{name: x})
    elif needed is torch.dtype:
        check_dtype(x)
    elif needed is torch.device:
        try:
            torch.device(x)
        except (RuntimeError, TypeError):
            raise ValueError(
                f'{name}: got {x!r}, need a device, as "cpu" or "cuda"'
            ) from None
