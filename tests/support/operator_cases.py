"""Every operator with inputs, and the check that a pack's tail is nothing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastweights as fw
from fastweights.deep import mesa
from fastweights.ops.convolution import convolve_heads, short_convolution
from support.graphs import in_one_graph
from support.inputs import member_inputs

K, V = 4, 3
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Operator:
    """Its inputs for N sequences in T tokens, and its results."""

    draw: Callable[[int, int], Inputs]
    call: Callable[..., tuple]
    whole: tuple[str, ...] = ("initial_state",)
    """Inputs that have no tokens."""
    narrowed: tuple[str, ...] = ("q", "k", "v")
    """Inputs that autocast narrows."""


def family(gate: str, rule: str) -> Operator:
    def draw(T: int, N: int) -> Inputs:
        return member_inputs(gate, rule, T=T, N=N, H=1, HV=2, K=K, V=V)

    whole = ("initial_state", "g") if gate == "fixed" else ("initial_state",)
    return Operator(draw, fw.linear_recurrence, whole)


def mlstm_inputs(T: int, N: int) -> Inputs:
    x = member_inputs("head", "delta", T=T, K=K, V=V)
    x.pop("initial_state")
    return x | {"i": x.pop("beta")}


def normalised_inputs(T: int, N: int) -> Inputs:
    x = member_inputs("none", "additive", T=T, K=K, V=V)
    return {name: x[name] for name in "qkv"} | {"q": x["q"].abs()}


def short_convolution_inputs(T: int, N: int) -> Inputs:
    torch.manual_seed(0)
    sizes = {"x": (1, T, 8), "weight": (8, 3), "initial_state": (N, 2, 8)}
    return {name: torch.randn(shape) for name, shape in sizes.items()} | {
        "bias": torch.randn(8)
    }


def selective_inputs(T: int, N: int) -> Inputs:
    torch.manual_seed(0)
    per_token = {"x": 4, "dt": 4, "z": 4, "B": 5, "C": 5}
    x = {name: torch.randn(1, T, D) for name, D in per_token.items()}
    whole = {"A": -torch.rand(4, 5), "D": torch.randn(4)}
    states = {"dt_bias": torch.randn(4), "initial_state": torch.randn(N, 4, 5)}
    return x | whole | states


def mesa_inputs(T: int, N: int) -> Inputs:
    x = member_inputs("head", "delta", T=T, H=2, K=K, V=V)
    x.pop("initial_state")
    x["q"] = F.normalize(x["q"], dim=-1)
    return x | {"ridge": torch.rand(2, K) + 0.5}


OPERATORS = {
    "linear": family("none", "additive"),
    "fixed": family("fixed", "additive"),
    "mamba2": family("head", "additive"),
    "gla": family("channel", "additive"),
    "deltanet": family("none", "delta"),
    "gated_deltanet": family("head", "delta"),
    "kda": family("channel", "delta"),
    "mlstm": Operator(mlstm_inputs, fw.mlstm, ()),
    "normalised": Operator(
        normalised_inputs,
        lambda **x: fw.linear_attention(**x, normalize=True, eps=0.0),
        (),
    ),
    "short_convolution": Operator(
        short_convolution_inputs,
        short_convolution,
        ("weight", "bias", "initial_state"),
        narrowed=(),
    ),
    "convolve_heads": Operator(
        short_convolution_inputs,
        lambda **x: convolve_heads(**x, heads=(1, 1), sizes=(3, 2)),
        ("weight", "bias", "initial_state"),
        narrowed=(),
    ),
    "selective_scan": Operator(
        selective_inputs,
        lambda **x: fw.selective_scan(**x, dt_softplus=True),
        ("A", "D", "dt_bias", "initial_state"),
        narrowed=("x", "B", "C"),
    ),
    "mesa": Operator(mesa_inputs, mesa, ("ridge",), narrowed=()),
}

EACH_OPERATOR = pytest.mark.parametrize("name", OPERATORS)


def operator_inputs(
    name: str, T: int, N: int, dtype: torch.dtype, device: str = "cpu"
) -> Inputs:
    """An operator's inputs, whose states are fp32 where tokens are narrower,
    but for a convolution's: those are tokens."""
    wide = torch.promote_types(dtype, torch.float32)
    wide = dtype if "convol" in name else wide
    return {
        key: x.to(device, wide if key == "initial_state" else dtype)
        for key, x in OPERATORS[name].draw(T, N).items()
    }


def operator_results(
    call: Callable[..., tuple], x: Inputs, *, end: int | None = None, **options
) -> tuple[list[Tensor], list[Tensor], Inputs]:
    """Outputs, states, and each input's gradient from all of them.

    From token ``end`` on the gradients of outputs are NaN.
    """
    leaves = {k: t.detach().clone().requires_grad_() for k, t in x.items()}
    *outputs, states = call(**leaves, **options)
    states = [*states] if isinstance(states, tuple) else [states]
    torch.manual_seed(1)
    loss = torch.zeros((), device=states[0].device, dtype=torch.float64)
    for o in outputs:
        do = torch.rand_like(o[:, :1]).expand(o.shape).clone()
        if end is not None:
            do[:, end:] = torch.nan
        loss = loss + (o * do).double().sum()
    for state in states:
        loss = loss + state.double().nan_to_num(neginf=0).sin().sum()
    loss.backward()
    return outputs, states, {key: t.grad for key, t in leaves.items()}


class OpChecks(TorchDispatchMode):
    """Checks each operator of ours that is called: its schema, its fake."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastweights":
            checks = ("test_schema", "test_faketensor")
            torch.library.opcheck(func, args, kwargs, test_utils=checks)
        return func(*args, **(kwargs or {}))


def check_one_graph(
    name: str,
    packed: bool,
    cases: Iterable[tuple[int, list[int]]],
    compiler: str = "aot_eager",
    *,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    rtol: float = 1e-11,
    **options,
) -> None:
    """One graph for these numbers of tokens, with so many cuts of a pack."""
    operator = OPERATORS[name]
    with in_one_graph(operator.call, compiler) as compiled:

        def marked(**x):
            for key, t in x.items():
                if key not in (*operator.whole, "cu_seqlens", *options):
                    torch._dynamo.mark_dynamic(t, 1)
                elif packed and key in ("cu_seqlens", "initial_state"):
                    torch._dynamo.mark_dynamic(t, 0)
            return compiled(**x)

        for T, cuts in cases:
            ends = torch.tensor([0, *cuts, T], device=device)
            given = options | ({"cu_seqlens": ends} if packed else {})
            N = len(cuts) + 1 if packed else 1
            x = operator_inputs(name, T, N, dtype, device)
            found = operator_results(marked, x, **given)
            want = operator_results(operator.call, x, **given)
            torch.testing.assert_close(found, want, rtol=rtol, atol=rtol / 10)


def check_tail(
    name: str,
    offsets: list[int],
    *,
    T: int,
    dtype: torch.dtype,
    device: str = "cpu",
    tolerance: float = 1e-12,
    **options,
) -> None:
    """NaN after the last sequence changes nothing, and comes out as 0.

    In inputs and in the gradients of outputs.
    """
    operator, end = OPERATORS[name], offsets[-1]
    options["cu_seqlens"] = torch.tensor(offsets, device=device)
    full = operator_inputs(name, T, len(offsets) - 1, dtype, device)
    for key, x in full.items():
        if key not in operator.whole:
            x[:, end:] = float("nan")
    outputs, _, grads = operator_results(
        operator.call, full, end=end, **options
    )
    for x in (
        *outputs,
        *(grads[k] for k in grads if k not in operator.whole),
    ):
        assert (x[:, end:] == 0).all()
    if not end:
        assert all(x.isfinite().all() for x in grads.values())
        return
    own = {
        key: x if key in operator.whole else x[:, :end]
        for key, x in full.items()
    }
    wanted, _, own_grads = operator_results(operator.call, own, **options)
    pairs = [(x[:, :end], y) for x, y in zip(outputs, wanted, strict=True)]
    for key, y in own_grads.items():
        x = grads[key]
        pairs.append((x if key in operator.whole else x[:, :end], y))
    for x, y in pairs:
        largest = y.abs().max().clamp(min=1.0)
        assert (x - y).abs().max() <= tolerance * largest
