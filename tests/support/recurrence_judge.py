"""The judge of the recurrence's kernels: results against the fp64 loop's."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fastweights as fw
from fastweights import ops
from fastweights.arguments import RecurrenceOperands, RecurrenceOptions
from fastweights.checks import relative_error
from fastweights.reference import chunkwise
from fastweights.torch_backend import recurrence as torch_recurrence
from support.inputs import GATES, RULES, member_inputs, results
from support.kernel_judge import BUDGET, HALF
from support.pairwise import all_but

MEMBERS = list(itertools.product(GATES, RULES))
EACH_MEMBER = pytest.mark.parametrize("gate, rule", MEMBERS)


def chosen_members(*names):
    """All members; but for those named "gate rule", with the mark full.

    A fixed gate reaches the kernels repeated for every token, as any other.
    """
    chosen = [tuple(name.split()) for name in names]
    return pytest.mark.parametrize("gate, rule", all_but(chosen, MEMBERS))


FP32_INPUTS = ("g", "beta", "initial_state")  # fp32 whatever q is


def cast(x, dtype, device="cpu"):
    """q, k, v in dtype; gates, beta and the state in fp32."""
    return {
        name: t.to(device, torch.float32 if name in FP32_INPUTS else dtype)
        for name, t in x.items()
    }


def kernel_results(x, **options):
    """Results of the kernels, with the assertion that they ran."""
    with ops.record_backends() as ran:
        found = results(fw.linear_recurrence, x, backend="triton", **options)
    assert set(ran) <= {"triton forward", "triton backward"} and ran
    assert found["o"].dtype == x["v"].dtype
    assert found["state"].dtype == torch.float32
    for name in x:
        if f"d{name}" in found:
            assert found[f"d{name}"].dtype == x[name].dtype
    return found


def loop_results(x, **options):
    """Results of the fp64 loop on the same inputs."""
    options.pop("chunk_size", None)
    wide = {name: t.double() for name, t in x.items()}
    return results(fw.linear_recurrence, wide, backend="loop", **options)


def allowed_for(name, budget):
    """A result's own budget, or the one that all share."""
    return budget[name] if isinstance(budget, dict) else budget


def judge(x, budget, record=None, label="", **options):
    """Every result is inside its budget.

    The gradient of a fixed gate is a sum over all tokens, of terms of both
    signs: its error is held against the sum of their sizes.
    """
    options = {"scale": 0.3} | options
    found, ref = kernel_results(x, **options), loop_results(x, **options)
    errors = {name: relative_error(found[name], ref[name]) for name in ref}
    if "dg" in ref and ref["dg"].dim() == 1:
        terms = loop_results(gate_by_tokens(x), **options)["dg"]
        errors["dg"] = error_of_sum(found["dg"], ref["dg"], terms)
    if record is not None:
        record(label or str(x["q"].dtype).removeprefix("torch."), errors)
    for name, error in errors.items():
        allowed = allowed_for(name, budget)
        assert error <= allowed, f"{name}: {error:.1e} of {errors}"
    return found, ref


def gate_by_tokens(x):
    """The same with a fixed gate repeated for every token."""
    return x | {"g": x["g"].expand(x["v"].shape[:3])}


def error_of_sum(found, ref, terms):
    """The error of a sum over tokens, in units of the sizes of its terms."""
    error = (found - ref).double().norm()
    return (error / terms.abs().sum((0, 1)).norm()).item()


def judge_gates(found, ref, budget):
    """dg chunk by chunk: a weak one is not hidden by a strong one."""
    allowed = allowed_for("dg", budget)
    if found["dg"].dim() > 1:
        for t in range(0, found["dg"].shape[1], 64):
            part = slice(t, t + 64)
            error = relative_error(found["dg"][:, part], ref["dg"][:, part])
            assert error <= allowed, f"dg from {t}: {error:.1e}"


def budget_of(dtype):
    return BUDGET[dtype] if dtype == torch.float32 else HALF


def pack_of(lengths, dtype=torch.int64, device="cpu"):
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, dtype)
    return {"cu_seqlens": offsets}


class RoundedProducts(TorchDispatchMode):
    """Operands of matrix products are rounded as the kernels round theirs.

    To ``dtype``; to tf32 where the inverse is computed. fp32 is not.
    """

    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)

    def __init__(self, dtype, monkeypatch):
        super().__init__()
        self.dtype = dtype
        if dtype != torch.float32:
            monkeypatch.setattr(chunkwise, "unit_lower_inverse", self.in_tf32)

    def in_tf32(self, M):
        dtype, self.dtype = self.dtype, None
        P = chunkwise.inverse_by_blocks(M)
        self.dtype = dtype
        return P

    def round(self, x):
        if self.dtype is not None:
            return x.to(self.dtype).to(x.dtype)
        return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in self.PRODUCTS:
            args = tuple(self.round(x) for x in args)
        return function(*args, **(kwargs or {}))


class RoundedChunks(torch.autograd.Function):
    """PyTorch's chunk form, its products' operands rounded to q's dtype."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.inputs = RecurrenceOperands(*inputs)
        ctx.options = RecurrenceOptions(scale=0.3)
        patch, dtype = pytest.MonkeyPatch.context, inputs[0].dtype
        with patch() as monkeypatch, RoundedProducts(dtype, monkeypatch):
            found = torch_recurrence.forward(ctx.inputs, ctx.options)
            o, state, ctx.saved = found
        return o, state

    @staticmethod
    def backward(ctx, do, dstate):
        patch = pytest.MonkeyPatch.context
        with patch() as monkeypatch, RoundedProducts(do.dtype, monkeypatch):
            grads = torch_recurrence.backward(
                do, dstate, ctx.inputs, ctx.saved, ctx.options
            )
        found = iter(grads)
        return tuple(x if x is None else next(found) for x in ctx.inputs[:7])


def rounded_chunks(
    q, k, v, g=None, beta=None, erase_key=None, initial_state=None
):
    if g is not None and g.dim() == 1:
        g = g.expand(v.shape[:3])
    return RoundedChunks.apply(q, k, v, g, beta, erase_key, initial_state)


def judge_amplified(x):
    """Where the recurrence itself amplifies rounding.

    The budget is twice the error of PyTorch's chunk form when that rounds
    the operands of its products as the kernels do. Of a fixed gate's
    gradient, a number a head, that is no more than one throw of a die: its
    error is held against the sizes of its terms, and the budget is their
    error, a term a token.
    """
    ref, rounded = loop_results(x, scale=0.3), results(rounded_chunks, x)
    found = kernel_results(x, scale=0.3)
    errors = {
        name: [relative_error(y[name], ref[name]) for y in (found, rounded)]
        for name in ref
    }
    if "dg" in ref and ref["dg"].dim() == 1:
        per_token = gate_by_tokens(x)
        terms = loop_results(per_token, scale=0.3)["dg"]
        estimate = results(rounded_chunks, per_token)["dg"]
        errors["dg"] = [
            error_of_sum(found["dg"], ref["dg"], terms),
            relative_error(estimate, terms),
        ]
    budget = budget_of(x["q"].dtype)
    for name, (error, emulated) in errors.items():
        allowed = max(allowed_for(name, budget), 2 * emulated)
        assert error <= allowed, f"{name} of {errors}"


def correlated_keys(gate, *, beta, cosine, B=1, T=150, D=64):
    """Unit keys with the same cosine between any two, one beta for all.

    What they share has entries of the size 1/8, so that identical keys have
    length 1 in every dtype: with beta = 2 a longer one diverges, and how
    k k^T rounds, the same everywhere, would be all that a test sees.
    """
    assert D == 64
    x = member_inputs(gate, "delta", B=B, T=T, K=D, V=D, strength=-0.03)
    common = x["k"][:, :1].sign() / 8
    own = x["k"] - (x["k"] * common).sum(-1, keepdim=True) * common
    own = F.normalize(own, dim=-1)
    x["k"] = cosine**0.5 * common + (1 - cosine) ** 0.5 * own
    x["beta"].fill_(beta)
    return x


def take_turns(*, T, K, length):
    """Two orthogonal keys, each of which erases what the other writes."""
    turns = torch.eye(K, dtype=torch.float64)[torch.arange(T) % 2]
    turns = turns[None, :, None]
    return {"k": length * turns, "erase_key": turns.roll(1, 1)}
