"""What a language model is made of, as values that JSON can hold."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from torch import nn

from fastweights import layers
from fastweights.arguments import (
    check_flags,
    check_names,
    check_numbers,
    check_sizes,
    resolve_alias,
)
from fastweights.layers.common.layer import (
    ARGUMENT_ALIASES,
    RENAMED_ARGUMENTS,
)

LAYERS: dict[str, type[nn.Module]] = {
    "comba": layers.Comba,
    "deltanet": layers.DeltaNet,
    "gated_deltanet": layers.GatedDeltaNet,
    "gated_deltanet2": layers.GatedDeltaNet2,
    "gla": layers.GatedLinearAttention,
    "kda": layers.KimiDeltaAttention,
    "lact": layers.LaCT,
    "lightning": layers.LightningAttention,
    "mamba": layers.Mamba,
    "mamba2": layers.Mamba2,
    "mesanet": layers.MesaNet,
    "mlstm": layers.MLSTM,
    "recurrence": layers.LinearRecurrence,
    "retention": layers.MultiScaleRetention,
    "softmax": layers.SoftmaxAttention,
    "titans": layers.TitansMemory,
    "ttt_linear": layers.TTTLinear,
    "ttt_mlp": layers.TTTMLP,
}
"""The types of layer that a pattern may name. Yours may join them."""


class _NamesChecked:
    """Checks the names of the arguments, before __init__ sees them."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        names = [x.name for x in fields(cls)]  # type: ignore[arg-type]
        check_names(cls.__name__, options, names, ARGUMENT_ALIASES)
        return super().__new__(cls)


@dataclass(frozen=True)
class ModelConfig(_NamesChecked):
    """The architecture of a :class:`fastweights.models.LanguageModel`.

    Its fields, which are its arguments, stand below.

    Raises:
        ValueError, TypeError: a field does not fit; the message names the
            field, what it got and what it needs.
    """

    vocab_size: int
    """The number of tokens; a token is 0 to vocab_size - 1."""

    dim: int
    """Width D of the residual stream."""

    num_layers: int
    """Blocks: a layer each, and most of them an MLP."""

    pattern: Sequence[str] = ("gated_deltanet",)
    """Types of layer, names of :data:`LAYERS`, repeated up to num_layers:
    ``3 * ("gated_deltanet",) + ("softmax",)``."""

    num_heads: int = 4
    """Heads of every layer that takes a number of heads."""

    head_dim: int | None = None
    """Size of a head, for layers that take it; dim / num_heads if None. It
    has to be None where no type of the pattern takes it."""

    options: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict, hash=False
    )
    """More arguments per type: ``{"softmax": {"num_kv_heads": 2}}``. They
    win over num_heads and head_dim. Lists become tuples."""

    mlp_ratio: float = 8 / 3
    """Hidden width of the MLPs over dim, before it is rounded up."""

    mlp_multiple: int = 256
    """The hidden width is rounded up to a multiple of this."""

    types_without_mlp: Sequence[str] = ("mamba", "mamba2")
    """Types of layer whose blocks have no MLP."""

    post_norm_types: Sequence[str] = ()
    """Types of layer whose blocks norm what they add, as in OLMo 2:
    x + norm(layer(x)), in place of x + layer(norm(x)); the MLP too."""

    tie_embeddings: bool = False
    """Whether the logits are products with the embeddings of the tokens."""

    norm_eps: float = 1e-6
    """The eps of the RMS norms of layers, MLPs and logits."""

    def __post_init__(self) -> None:
        for name in ("pattern", "types_without_mlp", "post_norm_types"):
            names = getattr(self, name)
            if isinstance(names, str) or not isinstance(names, Sequence):
                prefix = "the string " if isinstance(names, str) else ""
                raise TypeError(
                    f"{name}: got {prefix}{names!r}, need a tuple of names"
                )
            object.__setattr__(self, name, tuple(names))
            for layer_type in names:
                _check_layer_type(name, layer_type)
        sizes = ("vocab_size", "dim", "num_layers", "num_heads")
        check_sizes(**{name: getattr(self, name) for name in sizes})
        check_sizes(mlp_multiple=self.mlp_multiple)
        if not self.pattern:
            raise ValueError("pattern: got nothing, need a type of layer")
        takes_head_dim = _takes_head_dim(self.pattern)
        if self.head_dim is not None:
            check_sizes(head_dim=self.head_dim)
            if not takes_head_dim:
                raise ValueError(
                    f"head_dim: got {self.head_dim}, which no layer of "
                    f"{', '.join(self.pattern)} takes, need None"
                )
        elif takes_head_dim and self.dim % self.num_heads:
            raise ValueError(
                f"num_heads: got {self.num_heads}, need a divisor of dim = "
                f"{self.dim}, or head_dim"
            )
        check_numbers("> 0", mlp_ratio=self.mlp_ratio, norm_eps=self.norm_eps)
        check_flags(tie_embeddings=self.tie_embeddings)
        if not isinstance(self.options, Mapping):
            raise TypeError(
                f"options: got {self.options!r}, need a dictionary of "
                "dictionaries, one per type of layer"
            )
        for layer_type, options in self.options.items():
            _check_layer_type("options", layer_type)
            if not isinstance(options, Mapping):
                raise TypeError(
                    f"options: got {options!r} for {layer_type}, need a "
                    "dictionary of its arguments"
                )
            names = argument_names(layer_type)
            for name in options:
                if name not in names:
                    raise ValueError(
                        f"options: got {name!r} for {layer_type}, need one of "
                        f"{', '.join(names)}"
                    )
        tuples = {
            layer_type: {
                name: tuple(x) if isinstance(x, list) else x
                for name, x in options.items()
            }
            for layer_type, options in self.options.items()
        }
        object.__setattr__(self, "options", tuples)

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLPs."""
        steps = self.mlp_ratio * self.dim / self.mlp_multiple
        # Whole if the ratio is of two widths, but for its rounding.
        return math.ceil(steps * (1 - 1e-12)) * self.mlp_multiple

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The type of every block's layer, from the first to the last."""
        p = self.pattern
        return tuple(p[i % len(p)] for i in range(self.num_layers))

    @property
    def num_branches(self) -> int:
        """Terms that are added to the residual stream: layers and MLPs."""
        mlps = [x not in self.types_without_mlp for x in self.layer_types]
        return self.num_layers + sum(mlps)

    def layer_options(self, index: int) -> dict[str, Any]:
        """Arguments of layer ``index``, beside dim, device and dtype."""
        layer_type = self.layer_types[index]
        shared = {
            "num_heads": self.num_heads,
            "head_dim": self.head_dim or self.dim // self.num_heads,
            "layer": index,
            "num_layers": self.num_layers,
        }
        names = argument_names(layer_type)
        shared = {k: v for k, v in shared.items() if k in names}
        return shared | dict(self.options.get(layer_type, {}))

    def to_json(self) -> str:
        """The configuration as a JSON object, for :meth:`from_json`."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """Read a configuration from :meth:`to_json`'s text.

        That of an earlier version may have options by their names of then.

        Raises:
            ValueError: it is not JSON, lacks a field, has one that is not
                known here, or one that does not fit.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"config: got text that is no JSON, need an object: {error}"
            ) from None
        if not isinstance(values, dict):
            raise ValueError(f"config: got {values!r}, need a JSON object")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(
                f"config: got the field {unknown[0]!r}, need one of "
                f"{', '.join(sorted(known))}"
            )
        for name in ("vocab_size", "dim", "num_layers"):
            if name not in values:
                raise ValueError(f"{name}: got nothing, need an integer")
        return cls(**update_saved(values))


def argument_names(layer_type: str) -> list[str]:
    """The arguments of a layer of this type that ``options`` may set."""
    names = inspect.signature(LAYERS[layer_type]).parameters
    return [name for name in names if name not in ("dim", "device", "dtype")]


def _takes_head_dim(pattern: Sequence[str]) -> bool:
    return any("head_dim" in argument_names(x) for x in pattern)


def update_saved(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that another version has saved, as ModelConfig takes them now.

    Options by the names that they have now, and no head_dim if no layer of
    the pattern takes it. Fields that do not fit stay, for ModelConfig to name.
    """
    try:
        options = {
            layer_type: {_name_now(layer_type, k): x for k, x in given.items()}
            for layer_type, given in fields.get("options", {}).items()
        }
        takes_it = _takes_head_dim(fields.get("pattern", ModelConfig.pattern))
    except (AttributeError, KeyError, TypeError):
        return fields
    head_dim = fields.get("head_dim") if takes_it else None
    return fields | {"options": options, "head_dim": head_dim}


def _name_now(layer_type: str, name: str) -> str:
    names = argument_names(layer_type)
    if name in names:
        return name
    return resolve_alias(name, names, RENAMED_ARGUMENTS) or name


def _check_layer_type(name: str, layer_type: str) -> None:
    if not isinstance(layer_type, str) or layer_type not in LAYERS:
        raise ValueError(
            f"{name}: got {layer_type!r}, need one of {', '.join(LAYERS)} "
            "(your own: fastweights.models.LAYERS[name] = its class)"
        )
