"""Modules whose weights may be used as their forward would use them.

A layer hands several weights to one operator, which passes the modules'
calls by. Only of a module that nobody has touched does that give the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from fastweights import torch_internals
from fastweights.arguments import TENSOR_TYPES

SOURCE_FORWARDS: dict[type[nn.Module], Callable] = {}
"""Classes whose modules may be plain: the forward in each one's source."""

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])


def note_source_forward(module_class: ModuleClass) -> ModuleClass:
    """A decorator: enter a class and its forward into SOURCE_FORWARDS."""
    forward = module_class.forward
    # One that somebody else has put there is not in the source.
    if forward.__globals__ is vars(sys.modules[module_class.__module__]):
        SOURCE_FORWARDS[module_class] = forward
    return module_class


for _class in (nn.Embedding, nn.Linear, nn.RMSNorm, nn.Sequential):
    note_source_forward(_class)


def is_untouched(
    module: nn.Module,
    module_class: type[nn.Module],
    owner: type[nn.Module] | None = None,
) -> bool:
    """Whether the module is of the class, and a call runs its forward alone.

    That is the one in the source, of the class itself or of its ``owner``. A
    subclass, a parametrization or a unit of FSDP is of another class;
    adapters and offloaders put a forward of their own on the object or on
    the class; hooks look at a call or renew the weight before it.
    """
    forward = SOURCE_FORWARDS.get(owner or module_class)
    attributes = module.__dict__
    return type(module) is module_class and not (
        forward is None
        or getattr(module.forward, "__func__", None) is not forward
        or attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or torch_internals.has_global_hooks()
    )


def is_plain(
    module: nn.Module, module_class: type[nn.Module], device: torch.device
) -> bool:
    """Whether a module's weight does all that a call of the module does.

    Only then may the weight be used past the module's forward. A weight that
    is sharded or offloaded is no plain tensor on ``device``.
    """
    if not is_untouched(module, module_class):
        return False
    weight, bias = module.weight, getattr(module, "bias", None)
    return (
        type(weight) in TENSOR_TYPES
        and weight.device == device
        and (
            bias is None
            or (type(bias) in TENSOR_TYPES and bias.device == device)
        )
    )


def is_plain_product(module: nn.Module, x: Tensor) -> bool:
    """Whether the module is x W^T, and nothing else."""
    return is_plain(module, nn.Linear, x.device) and module.bias is None
