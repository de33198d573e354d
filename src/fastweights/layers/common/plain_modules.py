"""Modules whose weights may be used as their forward would use them.

A layer hands several weights to one operator, which passes the modules'
calls by. Only of a module that nobody has touched does that give the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastweights import torch_internals
from fastweights.arguments import TENSOR_TYPES

Source = tuple[type[nn.Module] | None, Callable]


def source_of(module_class: type[nn.Module]) -> Source:
    """A class of modules, and the forward that stands in its source."""
    forward = module_class.forward
    home = vars(sys.modules[module_class.__module__])
    # One that somebody has put there before this module was imported is not.
    return module_class if forward.__globals__ is home else None, forward


def is_untouched(module: nn.Module, source: Source) -> bool:
    """Whether a call of the module runs the forward of its source, alone.

    A subclass, a parametrization or a unit of FSDP is of another class;
    adapters and offloaders put a forward of their own on the object or on
    the class; hooks look at a call or renew the weight before it.
    """
    attributes = module.__dict__
    return type(module) is source[0] and not (
        getattr(module.forward, "__func__", None) is not source[1]
        or attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or torch_internals.has_global_hooks()
    )


def is_plain(module: nn.Module, source: Source, device: torch.device) -> bool:
    """Whether a module's weight does all that a call of the module does.

    Only then may the weight be used past the module's forward. A weight that
    is sharded or offloaded is no plain tensor on ``device``.
    """
    if not is_untouched(module, source):
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


PLAIN_LINEAR = source_of(nn.Linear)


def is_product(module: nn.Module, x: Tensor) -> bool:
    """Whether the module is x W^T, and nothing else."""
    return is_plain(module, PLAIN_LINEAR, x.device) and module.bias is None
