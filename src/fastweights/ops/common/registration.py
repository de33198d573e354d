"""What PyTorch is told of an operator with a gradient, all in one way.

Its schemas, fake tensors, gradient, what that keeps, and what it refuses;
and the way past the dispatcher, for calls that nobody looks at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastweights import torch_internals
from fastweights.arguments import TENSOR_TYPES
from fastweights.ops.common.flops import FORMULAS, register_flop_formulas

# The library's lower interface: its custom_op looks for aliases in each call.
LIBRARY = torch.library.Library("fastweights", "FRAGMENT")


def register(
    schema: str,
    function: Callable,
    fake: Callable,
    gradient: Callable | None = None,
    save: Callable | None = None,
) -> Any:
    """An operator of torch.ops.fastweights: a function, and its fake tensors.

    One without a gradient may not be asked for it.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastweights::{name}", fake)
    if gradient is not None:
        torch.library.register_autograd(
            f"fastweights::{name}", gradient, setup_context=save
        )
    return getattr(torch.ops.fastweights, name).default


class Operator:
    """An operator of ours, in torch.ops.fastweights, and its backward.

    ``forward`` and ``backward`` are those two. A call of the object itself
    returns the results that are not hidden. Where nothing looks at operators
    it takes the functions behind them, and an autograd.Function: both spare
    the host time, since of an operator's register gradient, which
    torch.compile needs, PyTorch looks through the arguments for lists.

    Args:
        name: of the operator; its backward is ``{name}_backward``.
        inputs, options, results: what it takes and returns, in PyTorch's
            schema language. Inputs are tensors, and all have gradients but
            ``cu_seqlens``, which is last.
        forward: from inputs and options to the results.
        fake: the same of tensors without data.
        backward: from the gradients of the results that are not hidden (None
            where nothing depends on one), the inputs, a list of what was kept
            (if anything is) and the options to a list of the gradients of
            the inputs that are not None, contiguous and of their dtypes.
        num_hidden: how many of the last results are for the backward only.
        num_kept: how many of the last results the backward is given; one of
            them may be a list.
        alternative: the backend that has gradients of gradients and
            transforms, for a refusal to name; None if there is none.
        flops: formulas of its FLOPs and of its backward's, if they count.
        public_name: what a refusal calls the operator; ``name`` if empty.

    Raises, when called:
        NotImplementedError: under a transform of torch.func, in forward-mode
            autograd, and in the backward of a backward.
        ValueError: a gradient is asked for and an input is from
            torch.inference_mode, which no backward may keep.
    """

    def __init__(
        self,
        name: str,
        inputs: str,
        options: str,
        results: str,
        *,
        forward: Callable,
        fake: Callable,
        backward: Callable,
        num_hidden: int = 0,
        num_kept: int = 0,
        alternative: str | None = None,
        flops: tuple[Callable, ...] = (),
        public_name: str = "",
    ) -> None:
        self.name = public_name or name
        self.who_has = "it has not"
        if alternative is not None:
            self.who_has = f'only backend="{alternative}" has'
        self.functions = forward, backward
        self.input_names, outputs = (
            [x.split()[-1] for x in text.split(", ")]
            for text in (inputs, results)
        )
        self.num_shown, self.num_kept = len(outputs) - num_hidden, num_kept
        has_offsets = "cu_seqlens" in self.input_names
        self.num_differentiable = len(self.input_names) - has_offsets
        grads = [f"Tensor? d{name}" for name in outputs[: self.num_shown]]
        saved = ["Tensor[] saved"] if num_kept else []
        back = ", ".join([*grads, inputs, *saved, options])
        schema = f"{name}({inputs}, {options}) -> ({results})"
        gradient = self.differentiate, self.save
        self.forward = register(schema, forward, fake, *gradient)
        schema = f"{name}_backward({back}) -> Tensor[] grads"
        self.backward = register(
            schema, backward, self.fake_backward, self.refuse_second_gradient
        )
        packets = self.forward.overloadpacket, self.backward.overloadpacket
        FORMULAS.update(zip(packets, flops, strict=False))
        register_flop_formulas()

    def __call__(self, *arguments: Any) -> Any:
        inputs = arguments[: len(self.input_names)]
        if torch.compiler.is_compiling():
            return self.shown_results(self.forward(*arguments))
        if torch_internals.under_transform():
            self.refuse_transforms(*inputs)
        operator = operator_or_function(
            self.forward, self.functions[0], inputs
        )
        # A trace takes the operator's own gradient.
        if needs_gradient(*inputs) and not torch.jit.is_tracing():
            for name, x in zip(self.input_names, inputs, strict=True):
                if x is not None and x.is_inference():
                    raise ValueError(
                        f"{name}: got a tensor made in torch.inference_mode, "
                        "need its clone(), since a gradient is asked for"
                    )
            return OperatorFunction.apply(self, operator, *arguments)
        return self.shown_results(operator(*arguments))

    def shown_results(self, output: Any) -> Any:
        """Show a caller's part of the results; a single one is no tuple."""
        return (
            output[: self.num_shown] if isinstance(output, tuple) else output
        )

    def save(self, ctx: Any, inputs: tuple, output: Any) -> None:
        n = len(self.input_names)
        kept = output[len(output) - self.num_kept :] if self.num_kept else ()
        saved = [[x] if isinstance(x, Tensor) else x for x in kept]
        ctx.save_for_backward(*inputs[:n], *itertools.chain(*saved))
        ctx.options = inputs[n:]
        ctx.set_materialize_grads(False)

    def differentiate(
        self, ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # checkpointing lets them be read once
        n, grads = len(self.input_names), grads[: self.num_shown]
        saved = [list(tensors[n:])] if self.num_kept else []
        operator: Callable = self.backward  # which refuses its own gradient
        if not torch.is_grad_enabled():
            arguments = (*grads, *tensors)
            operator = operator_or_function(
                operator, self.functions[1], arguments
            )
        results = iter(operator(*grads, *tensors[:n], *saved, *ctx.options))
        inputs = tensors[: self.num_differentiable]
        nones = n - len(inputs) + len(ctx.options)
        grads = tuple([None if x is None else next(results) for x in inputs])
        return *grads, *[None] * nones

    def fake_backward(self, *arguments: Any) -> list[Tensor]:
        """Allocate the gradients."""
        inputs = arguments[self.num_shown :][: self.num_differentiable]
        return [x.new_empty(x.shape) for x in inputs if x is not None]

    def refuse_second_gradient(self, ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(
            f"{self.name}: got a gradient of its gradient, which "
            f"{self.who_has}"
        )

    def refuse_transforms(self, *inputs: Tensor | None) -> None:
        """Raise under torch.func, and where an input has a tangent."""
        duals = [forward_ad.unpack_dual(x) for x in inputs if x is not None]
        tangents = [x for x in duals if x.tangent is not None]
        if tangents or torch_internals.in_torch_func():
            raise NotImplementedError(
                f"{self.name}: got a transform of torch.func, or "
                f"forward-mode autograd, which {self.who_has}; a layer's "
                "gradients per sample are those of torch.autograd.grad, a "
                "sample at a time"
            )


class OperatorFunction(torch.autograd.Function):
    """An Operator's results, with its gradient.

    It has no setup_context: for one PyTorch reads the signature in each call.
    """

    @staticmethod
    def forward(ctx: Any, owner: Operator, function: Callable, *inputs: Any):
        output = function(*inputs)
        owner.save(ctx, inputs, output)
        ctx.owner = owner
        return owner.shown_results(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.owner.differentiate(ctx, *grads)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether a gradient by one of them is asked for."""
    return torch.is_grad_enabled() and any(
        [x is not None and x.requires_grad for x in tensors]
    )


def operator_or_function(
    operator: Callable, function: Callable, tensors: Iterable[Any]
) -> Callable:
    """The function behind an operator, which spares the host 50 us per call.

    It is the operator itself where anything looks at operators: a mode (fake
    tensors, a FLOP counter, selective checkpointing), a transform, a trace,
    the profiler, a tensor of a class of its own or without data, or a negative
    view, which the dispatcher resolves.
    """
    watched = torch_internals.is_watched()
    if watched:
        register_flop_formulas()
    must_dispatch = watched or any(
        [
            x is not None
            and (type(x) not in TENSOR_TYPES or x.is_meta or x.is_neg())
            for x in tensors
        ]
    )
    return operator if must_dispatch else function
