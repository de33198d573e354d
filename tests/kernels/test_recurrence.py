"""The family's kernels, every gate and both rules, against the fp64 loop.

Each test runs the operator forward and backward, by the kernels, and
compares outputs, final states and every gradient with the loop's.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from support.crossed import all_but, crossed
from support.graphs import in_one_graph
from support.inputs import GATES, RULES, member_inputs, results
from support.kernel_judge import (
    BUDGET,
    DEVICES,
    HALF,
    PRODUCTS,
    needs_memory,
    on_devices,
)
from torch.utils._python_dispatch import TorchDispatchMode

import fastweights as fw
from fastweights import ops
from fastweights.arguments import Operands, OperatorOptions
from fastweights.checks import relative_error
from fastweights.kernels.gpu import dot_precision
from fastweights.kernels.recurrence import backend as kernels
from fastweights.kernels.recurrence.schedule import TensorSpec
from fastweights.kernels.recurrence.settings import (
    lengths_of,
    settings_of,
)
from fastweights.reference import chunkwise
from fastweights.reference import chunkwise_backward as backward
from fastweights.torch_backend import recurrence as torch_backend

MEMBERS = list(itertools.product(GATES, RULES))
ALL = pytest.mark.parametrize("gate, rule", MEMBERS)


def some(*names):
    """All members; but for those named "gate rule", with the mark full.

    A fixed gate reaches the kernels repeated for every token, as any other.
    """
    chosen = [tuple(name.split()) for name in names]
    return pytest.mark.parametrize("gate, rule", all_but(chosen, MEMBERS))


# T, H, HV, K, V, chunk size, dtype, initial state
CASES = {
    "one-token": (1, 2, 4, 60, 100, 64, torch.float32, True),
    "less-than-a-chunk": (63, 1, 2, 64, 129, 64, torch.float16, False),
    "one-chunk": (64, 1, 2, 100, 64, 64, torch.float32, False),
    "small-chunks": (65, 2, 2, 60, 100, 16, torch.float16, True),
    "half-chunks": (65, 1, 8, 64, 64, 32, torch.float32, True),
    "long": (1000, 1, 1, 64, 64, 64, torch.float32, True),
    "wide-keys": (70, 1, 2, 256, 64, 64, torch.float16, True),
    "wide-values": (33, 1, 2, 64, 512, 16, torch.float32, False),
}
# Weak, and from -5 on too strong to be seen from half: gates.is_factorable.
STRENGTHS = (0.0, -1e-3, -1.0, -5.0, -10.0, -20.0)
WIDE = ("g", "beta", "initial_state")  # fp32 whatever q is
LENGTHS = [0, 37, 0, 0, 1, 16, 35, 0]  # at both ends too, a chunk and more


def cast(x, dtype, device="cpu"):
    """q, k, v in dtype; gates, beta and the state in fp32."""
    return {
        name: t.to(device, torch.float32 if name in WIDE else dtype)
        for name, t in x.items()
    }


def run(x, **options):
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


def loop(x, **options):
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
    o, ref = run(x, **options), loop(x, **options)
    errors = {name: relative_error(o[name], ref[name]) for name in ref}
    if "dg" in ref and ref["dg"].dim() == 1:
        terms = loop(by_tokens(x), **options)["dg"]
        errors["dg"] = error_of_sum(o["dg"], ref["dg"], terms)
    if record is not None:
        record(label or str(x["q"].dtype).removeprefix("torch."), errors)
    for name, error in errors.items():
        allowed = allowed_for(name, budget)
        assert error <= allowed, f"{name}: {error:.1e} of {errors}"
    return o, ref


def by_tokens(x):
    """The same with a fixed gate repeated for every token."""
    return x | {"g": x["g"].expand(x["v"].shape[:3])}


def error_of_sum(found, ref, terms):
    """The error of a sum over tokens, in units of the sizes of its terms."""
    error = (found - ref).double().norm()
    return (error / terms.abs().sum((0, 1)).norm()).item()


def judge_gates(o, ref, budget):
    """dg chunk by chunk: a weak one is not hidden by a strong one."""
    allowed = allowed_for("dg", budget)
    if o["dg"].dim() > 1:
        for t in range(0, o["dg"].shape[1], 64):
            part = slice(t, t + 64)
            error = relative_error(o["dg"][:, part], ref["dg"][:, part])
            assert error <= allowed, f"dg from {t}: {error:.1e}"


def budget_of(dtype):
    return BUDGET[dtype] if dtype == torch.float32 else HALF


def packed(lengths, dtype=torch.int64, device="cpu"):
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
        ctx.inputs = Operands(*inputs)
        patch, dtype = pytest.MonkeyPatch.context, inputs[0].dtype
        with patch() as monkeypatch, RoundedProducts(dtype, monkeypatch):
            found = torch_backend.forward(ctx.inputs, OperatorOptions(0.3))
            o, state, ctx.saved = found
        return o, state

    @staticmethod
    def backward(ctx, do, dstate):
        patch = pytest.MonkeyPatch.context
        with patch() as monkeypatch, RoundedProducts(do.dtype, monkeypatch):
            grads = torch_backend.backward(
                do, dstate, ctx.inputs, ctx.saved, OperatorOptions(0.3)
            )
        found = iter(grads)
        return tuple(x if x is None else next(found) for x in ctx.inputs[:7])


def rounded_chunks(q, k, v, g=None, beta=None, erase=None, initial_state=None):
    if g is not None and g.dim() == 1:
        g = g.expand(v.shape[:3])
    return RoundedChunks.apply(q, k, v, g, beta, erase, initial_state)


def judge_amplified(x):
    """Where the recurrence itself amplifies rounding.

    The budget is twice the error of PyTorch's chunk form when that rounds
    the operands of its products as the kernels do. Of a fixed gate's
    gradient, a number a head, that is no more than one throw of a die: its
    error is held against the sizes of its terms, and the budget is their
    error, a term a token.
    """
    ref, rounded = loop(x, scale=0.3), results(rounded_chunks, x)
    found = run(x, scale=0.3)
    errors = {
        name: [relative_error(y[name], ref[name]) for y in (found, rounded)]
        for name in ref
    }
    if "dg" in ref and ref["dg"].dim() == 1:
        tokens = by_tokens(x)
        terms = loop(tokens, scale=0.3)["dg"]
        estimate = results(rounded_chunks, tokens)["dg"]
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


HARD = {
    "identical-beta-0": {"beta": 0.0, "cosine": 1.0},
    "identical-beta-1": {"beta": 1.0, "cosine": 1.0},
    "identical-beta-2": {"beta": 2.0, "cosine": 1.0},
    "cosine-0.9-beta-1": {"beta": 1.0, "cosine": 0.9},
    "cosine-0.9-beta-2": {"beta": 2.0, "cosine": 0.9},
}


@DEVICES
@crossed(case=CASES, gate=GATES, rule=RULES, seldom=["fixed"])
def test_the_kernels_are_the_loop(gate, rule, case, device, record_property):
    T, H, HV, K, V, chunk_size, dtype, initial = case
    x = member_inputs(gate, rule, T=T, H=H, HV=HV, K=K, V=V)
    if not initial:
        del x["initial_state"]
    dtype = dtype if device == "cpu" else torch.bfloat16
    budget, label = budget_of(dtype), f"sizes, {dtype}"
    x = cast(x, dtype, device)
    judge(x, budget, record_property, label, chunk_size=chunk_size)


@crossed(
    strength=STRENGTHS,
    gate=["fixed", "head", "channel"],
    rule=RULES,
    seldom=["fixed"],
)
@on_devices(cpu=["float32"], cuda=["float32", "bfloat16"])
def test_constant_gates(gate, rule, strength, device, dtype, record_property):
    T, HV = (130, 1) if device == "cpu" else (500, 2)
    x = member_inputs(gate, rule, T=T, K=64, V=64, HV=HV, strength=strength)
    budget, label = budget_of(dtype), f"constant gates, {dtype}"
    x = cast(x, dtype, device)
    judge_gates(*judge(x, budget, record_property, label), budget)


@pytest.mark.parametrize("rule", RULES)
def test_gates_in_blocks_of_eight(rule):
    """A step leaves 2^-14.4: further than blocks of 16 rows may go."""
    x = member_inputs("channel", rule, T=130, HV=1, K=64, V=64, strength=-10.0)
    judge_gates(*judge(cast(x, torch.float16), HALF), HALF)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_gates_that_open_again(gate):
    """What is left after a strong gate is as exact as what comes later."""
    x = member_inputs(gate, "delta", T=128, K=64, V=64, strength=-1e-3)
    x["g"][:, :40] = -20
    judge(cast(x, torch.float32), 1e-4)


@crossed(keys=HARD, gate=GATES, seldom=["none", "fixed"])
@on_devices(cpu=["float16"], cuda=["float32", "bfloat16"])
def test_correlated_keys(gate, keys, device, dtype):
    judge_amplified(cast(correlated_keys(gate, **keys), dtype, device))


@pytest.mark.parametrize("gate", GATES)
@on_devices(cpu=["float32"], cuda=["float16", "bfloat16"])
def test_keys_of_uneven_length(gate, device, dtype, matmul_precision):
    """Steps beta |k|^2 below 1, by keys of length 1 and longest in turns.

    The inverse has products of the long keys in it, which fp16 may not.
    """
    matmul_precision("medium")
    T, D, longest = 150, 64, 300.0 if dtype == torch.float16 else 1000.0
    x = member_inputs(gate, "delta", T=T, K=D, V=D, strength=-0.03)
    length = torch.where(torch.arange(T) % 2 == 0, 1.0, longest)[:, None]
    x["k"] = x["k"] * length[..., None]
    x["beta"] = x["beta"] / length**2
    judge(cast(x, dtype, device), HALF)


@pytest.mark.parametrize("gate", GATES)
def test_identical_keys_and_a_negative_rate(gate, matmul_precision):
    """The rule grows then, beyond what the inverse in fp16 has room for."""
    matmul_precision("medium")
    x = correlated_keys(gate, beta=-0.6, cosine=1.0, T=64)
    judge(cast(x, torch.float32), HALF)


@pytest.mark.parametrize("gate", GATES)
@on_devices(cpu=["float32"], cuda=["float32", "bfloat16"])
def test_keys_that_erase_nothing_or_all(gate, device, dtype):
    """Identical keys, some of which erase nothing, and half of others."""
    x = member_inputs(gate, "erase", T=100, K=64, V=33, strength=-0.03)
    x["k"] = x["k"][:, :1].sign().expand_as(x["k"]) / 8
    strengths = torch.ones(100, 1, 64)
    strengths[::3], strengths[1::3, :, ::2] = 0, 0
    x["erase"] = (strengths * x["k"]).expand_as(x["erase"])
    judge_amplified(cast(x, dtype, device))


@pytest.mark.parametrize("gate", GATES)
def test_keys_with_which_a_state_grows(gate, matmul_precision):
    """By 1.618 per token: beyond what the inverse in fp16 has room for."""
    matmul_precision("medium")
    x = member_inputs(
        gate, "erase", T=64, H=1, HV=1, K=64, V=64, strength=-1e-3
    )
    x |= take_turns(T=64, K=64, length=1.0)
    judge(cast(x, torch.float32), HALF)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strongest", [-1e15, torch.finfo(torch.float32).min])
def test_a_gate_a_head_that_shuts(rule, strongest):
    """However strong, it does not drown those after it."""
    x = member_inputs("head", rule, T=100, K=33, V=20, strength=-0.1)
    x["g"][:, 30:33] = strongest
    judge(cast(x, torch.float32), 1e-4)


def test_a_gate_a_channel_that_shuts():
    """By fp32's least, which is past fp16, in which gates are summed."""
    x = member_inputs("channel", "delta", T=16, HV=1, strength=-0.1)
    x["g"][:, 10:13, :, :3] = torch.finfo(torch.float32).min
    judge(cast(x, torch.float32), 1e-4, chunk_size=16)


@pytest.mark.parametrize("rule", RULES)
@on_devices(cpu=["float16", "float32"], cuda=["float32", "bfloat16"])
def test_nothing_passes_a_gate_of_minus_infinity(rule, device, dtype):
    """To the bit, though a step of a block is seen as 2^-29, or 2^-56."""
    x = member_inputs("channel", rule, T=64, HV=1, K=33, V=20, strength=-3.0)
    x["g"][:, 22] = -torch.inf
    x = cast(x, dtype, device)
    o, state = fw.linear_recurrence(**x, backend="triton")
    x["v"][:, :22] *= 1e4 if dtype == torch.float16 else 1e20
    again = fw.linear_recurrence(**x, backend="triton")
    assert torch.equal(again[0][:, 22:], o[:, 22:])
    assert torch.equal(again[1], state)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_chunks_that_decay_too_far_for_fp16(gate):
    """By e^-16, which fp32 could divide by, and still answer in fp16."""
    x = member_inputs(gate, "delta", T=64, HV=1, K=33, V=20, strength=-0.25)
    judge(cast(x, torch.float16), budget_of(torch.float16))


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_what_a_chunk_leaves_in_fp16(gate):
    """A chunk that decays by 2^-9, and writes nothing itself."""
    x = member_inputs(gate, "additive", T=128, HV=1, K=33, V=20, strength=-0.1)
    x["v"][:, 64:] = 0.0
    judge(cast(x, torch.float16), budget_of(torch.float16))


@pytest.mark.parametrize("rule", RULES)
@on_devices(cpu=["float16"], cuda=["bfloat16"])
@pytest.mark.parametrize("strongest", [-5.0, -14.0, -50.0])
def test_one_strong_gate_a_channel(rule, strongest, device, dtype):
    """In a chunk whose decay still has a bound; the rest hardly forget."""
    x = member_inputs("channel", rule, T=100, K=64, V=33, strength=-1e-3)
    x["g"][:, 20] = strongest
    judge(cast(x, dtype, device), HALF)


FOLDS = (-0.7, -1.2, -2.5, -5.0, -10.0, -20.0, -60.0)  # at ever later levels


@pytest.mark.parametrize("rule", all_but(["delta"], RULES))
@on_devices(cpu=["float32"], cuda=["float32", "bfloat16"])
def test_a_gate_a_channel_at_all_levels(rule, device, dtype, record_property):
    """Chunks as strong as FOLDS in turns, and shut where they are -60.

    Of 70 channels the last six, a key tile of their own, hardly decay in the
    even chunks, and the others hardly in the odd ones: each key tile is at
    a level of its own, and what is next to a border as exact as the rest.
    """
    T, budget = 64 * len(FOLDS), budget_of(dtype)
    x = member_inputs("channel", rule, T=T, HV=1, K=70, V=33, strength=-1e-3)
    for i, strength in enumerate(FOLDS):
        own = slice(0, 64) if i % 2 == 0 else slice(64, 70)
        x["g"][:, 64 * i : 64 * (i + 1), :, own] = strength
    x["g"][:, 64 * 6 + 9 : 64 * 6 + 20 : 4, :, ::3] = -torch.inf
    x = cast(x, dtype, device)
    judge_gates(*judge(x, budget, record_property, "all levels"), budget)


@pytest.mark.parametrize("rule", RULES)
@on_devices(cpu=["float32"], cuda=["bfloat16"])
def test_one_value_head_forgets(rule, device, dtype):
    """Of six value heads one decays by e^-300 in a chunk, the rest hardly."""
    x = member_inputs(
        "channel", rule, T=100, H=3, HV=6, K=64, V=33, strength=-1e-3
    )
    x["g"][:, :, 4] = -5
    judge(cast(x, dtype, device), budget_of(dtype))


@some("none additive", "channel delta")
@on_devices(cpu=["float32"], cuda=["float32", "bfloat16"])
def test_packed_sequences(gate, rule, device, dtype, cut, record_property):
    lengths, V, sizes = LENGTHS, 33, (16, 32)
    if device == "cuda":
        lengths, V, sizes = [0, 137, 0, 0, 1, 64, 350, 0], 64, (64, 64)
    x = member_inputs(gate, rule, T=sum(lengths), N=len(lengths), K=64, V=V)
    x, label = cast(x, dtype, device), f"packed, {dtype}"
    given = record_property, label
    options = packed(lengths, torch.int32, device)
    judge(x, budget_of(dtype), *given, **options, chunk_size=sizes[0])
    if device == "cuda":
        cut(3)
        judge(x, budget_of(dtype), **options)
    del x["initial_state"]
    options = packed(lengths, torch.int64, device)
    judge(x, budget_of(dtype), *given, **options, chunk_size=sizes[1])


class Guarded:
    """Tensors with NaN on both sides of their memory, as wide as they are."""

    def __init__(self):
        self.buffers = []

    def like(self, x):
        """A copy of x between its guards."""
        wide = 2 * x.numel() + -2 * x.numel() % 16  # keeps it aligned
        buffer = x.new_full((2 * wide + x.numel(),), WORST[x.dtype])
        within = buffer[wide : wide + x.numel()]
        within.copy_(x.flatten())
        self.buffers.append((buffer, wide, x.numel()))
        return within.view(x.shape)

    def hold(self):
        """Nothing was written next to a tensor."""
        for buffer, wide, size in self.buffers:
            for side in (buffer[:wide], buffer[wide + size :]):
                worst = torch.full_like(side, WORST[side.dtype])
                assert side.equal(worst) or side.isnan().all()


WORST = dict.fromkeys((torch.float32, torch.float64), float("nan"))
WORST |= {torch.int32: 7, torch.int64: 99}


@pytest.mark.parametrize(
    ("gate", "rule", "S"),
    [
        ("none", "additive", 1),
        ("head", "additive", 3),
        ("head", "delta", 3),
        ("channel", "delta", 1),
    ],
)
def test_offsets_that_lie_reach_no_other_memory(
    gate, rule, S, cut, monkeypatch
):
    """Negative, decreasing and past the end; read and written is our own.

    Each tensor lies between NaNs: they stay, and no result has one.
    """
    guarded = Guarded()

    def zeros(make):
        return lambda *arguments, **options: guarded.like(
            make(*arguments, **options).zero_()
        )

    for owner, name in ((torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, zeros(getattr(owner, name)))
    cut(S)
    offsets = torch.tensor([-30, 29, 5, 70])
    sizes = {"T": 40, "N": 3, "HV": 1, "K": 8, "V": 5}
    x = member_inputs(gate, rule, **sizes, dtype=torch.float32)
    x = {name: guarded.like(t) for name, t in x.items()}
    names = ("q", "k", "v", "g", "beta", "erase", "initial_state")
    inputs = Operands(*map(x.get, names), guarded.like(offsets))
    monkeypatch.setattr(kernels, "check_offsets_on_host", lambda *_: None)
    options = OperatorOptions(1.0, 16)
    o, state, saved = kernels.forward(inputs, options)
    do, dstate = guarded.like(torch.ones_like(o)), guarded.like(state)
    grads = kernels.backward(do, dstate, inputs, saved, options)
    assert all(t.isfinite().all() for t in (o, state, *grads))
    guarded.hold()


def test_offsets_that_are_not_contiguous():
    x = member_inputs(
        "head", "delta", T=sum(LENGTHS), N=len(LENGTHS), K=33, V=20
    )
    offsets = packed(LENGTHS)["cu_seqlens"].repeat_interleave(2)[::2]
    assert not offsets.is_contiguous()
    judge(cast(x, torch.float32), 1e-4, cu_seqlens=offsets)


@pytest.fixture
def tf32_switches():
    """PyTorch's switches for fp32 products, as they were when it ends."""
    matmul = torch.backends.cuda.matmul
    before = torch.backends.fp32_precision, matmul.fp32_precision
    torch.backends.fp32_precision = matmul.fp32_precision = "none"
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision, matmul.fp32_precision = before


def switch(where, value):
    if where == "old":
        torch.set_float32_matmul_precision(value)
    elif where == "all":
        torch.backends.fp32_precision = value
    else:
        torch.backends.cuda.matmul.fp32_precision = value


@pytest.mark.usefixtures("tf32_switches")
@pytest.mark.parametrize(
    ("where", "values"),
    [
        ("old", ("medium", "highest", "high", "highest")),
        ("matmul", ("tf32", "ieee", "tf32", "none")),
        ("all", ("tf32", "ieee", "tf32", "none")),
    ],
    ids=["old", "matmul", "all"],
)
def test_the_precision_of_products_is_the_one_of_the_call(where, values):
    """Whichever of PyTorch's switches was used, and however often."""
    x = cast(member_inputs("head", "delta"), torch.float32)
    names = ("q", "k", "v", "g", "beta")
    found = []
    for value in values:
        switch(where, value)
        inputs = Operands(*(x[n] for n in names))
        kind, _ = kernels.kind_of(inputs, 16)
        found.append(settings_of("scan", kind)[0].PRECISION)
        assert dot_precision(torch.bfloat16, 128) == "tf32"
        assert dot_precision(torch.float32, 129) == "tf32x3"
    assert found == ["tf32", "tf32x3"] * 2


@crossed(S=[2, 3, 7], gate=GATES, rule=RULES, seldom=["fixed"])
@on_devices(cpu=["float32"], cuda=["float32", "bfloat16"])
def test_segments_are_one_sequence(
    gate, rule, S, device, dtype, cut, record_property
):
    """Fewer chunks than segments, a last one that is shorter, and none."""
    cut(S)
    sizes, chunks = {"T": 85, "H": 1, "HV": 2, "K": 33, "V": 33}, (16, 32)
    sizes["strength"] = -0.01
    if device == "cuda":
        sizes = {"B": 2, "T": 1000, "H": 2, "HV": 4, "K": 128, "V": 128}
        chunks = 64, 64
    x = cast(member_inputs(gate, rule, **sizes), dtype, device)
    given = record_property, f"{S} segments, {dtype}"
    judge(x, budget_of(dtype), *given, chunk_size=chunks[0])
    del x["initial_state"]
    judge(x, budget_of(dtype), chunk_size=chunks[1], use="o")


@crossed(gate=["fixed", "head"], rule=RULES, strength=[-0.2, -0.8, -5.0])
def test_segments_that_forget(gate, rule, strength, cut):
    """Seven chunks to a segment: some of them, one, and none reach its end.

    A map of nothing, and states that know nothing of what entered.
    """
    cut(3)
    x = member_inputs(gate, rule, T=330, HV=1, K=24, V=24, strength=strength)
    judge(cast(x, torch.float32), 1e-4, chunk_size=16)


@pytest.mark.parametrize("gate", ["fixed", "head"])
def test_keys_that_do_not_forget(gate, cut):
    """A step beta |k|^2 above 2 makes up for a gate: see intra's bound.

    All keys are the same one, of length 1.8, so that e^g |1 - |k|^2| = 0.977
    of the state is left per token, and 7 % after a segment, though the gates
    alone would leave less than 2^-100.
    """
    cut(3)
    x = member_inputs(
        gate, "delta", T=330, H=1, HV=1, K=16, V=16, strength=-0.83
    )
    x["k"] = 1.8 * x["k"][:, :1].expand_as(x["k"])
    x["beta"] = torch.ones_like(x["beta"])
    judge(cast(x, torch.float32), 1e-4, chunk_size=16)


def take_turns(*, T, K, length):
    """Two orthogonal keys, each of which erases what the other writes."""
    turns = torch.eye(K, dtype=torch.float64)[torch.arange(T) % 2]
    turns = turns[None, :, None]
    return {"k": length * turns, "erase": turns.roll(1, 1)}


@pytest.mark.parametrize("gate", ["fixed", "head"])
def test_keys_that_take_turns_and_do_not_forget(gate, cut):
    """Each writes what the other erases by: 2.25 times as much per token.

    Their steps have the eigenvalue 1, but so large a singular value. The
    gates alone would leave less than 2^-100 of a segment, and leave 1.01^112.
    """
    cut(3)
    x = member_inputs(
        gate, "erase", T=330, H=1, HV=1, K=16, V=16, strength=-0.8
    )
    x |= take_turns(T=330, K=16, length=1.8)
    judge(cast(x, torch.float32), 1e-4, chunk_size=16)


@some("head delta", "channel delta", "none additive")
def test_segments_of_one_long_sequence_among_short_ones(gate, rule, cut):
    """Borders lie where the long one has them, wherever it starts."""
    cut(6)
    several = [[181, 0, 33, 70], [3, 5, 270, 6], [20, 20, 20, 224]]
    # All of them where a program looks for the most: the others cost time.
    for sizes in several if gate == "head" else several[1:2]:
        x = member_inputs(gate, rule, T=284, N=4, HV=1, K=33, V=33)
        judge(cast(x, torch.float32), 1e-4, **packed(sizes), chunk_size=16)


@some("none delta", "channel additive")
def test_tiles_by_descriptors(gate, rule, cut):
    """Of packed sequences in segments: none reads another, or a next head."""
    cut(3)
    lengths = [0, 150, 0, 40]
    x = member_inputs(gate, rule, T=190, N=4, H=1, HV=2, K=64, V=64)
    x = cast(x, torch.float16)
    options = {"scale": 0.3, **packed(lengths)}
    before, _ = judge(x, HALF, **options)
    for name in "qkv":
        x[name][:, :150] = float("nan")
    after = run(x, **options)
    assert after["o"][:, :150].isnan().all()
    assert torch.equal(after["o"][:, 150:], before["o"][:, 150:])
    assert torch.equal(after["state"][2:], before["state"][2:])
    assert torch.equal(after["dk"][:, 150:], before["dk"][:, 150:])


def test_lengths_that_are_symbols(monkeypatch):
    """In one segment and in four: torch.compile allocates for both."""
    monkeypatch.setattr(
        "fastweights.kernels.recurrence.settings.SEGMENT_CHUNKS", 1
    )
    lengths_of.cache_clear()
    with in_one_graph(fw.linear_recurrence, most=2) as compiled:

        def marked(**x):
            for name in ("q", "k", "v", "beta"):
                torch._dynamo.mark_dynamic(x[name], 1)
            return compiled(**x)

        for T in (16, 70):
            x = member_inputs("none", "delta", T=T, H=1, HV=1, K=32, V=32)
            x = cast(x, torch.float32)
            options = {"backend": "triton", "chunk_size": 16}
            found = results(marked, x, **options)
            expected = results(fw.linear_recurrence, x, **options)
            assert all(torch.equal(found[n], expected[n]) for n in expected)
    assert lengths_of.cache_info().currsize == 2
    lengths_of.cache_clear()


@some("channel additive", "channel delta")
def test_one_channel(gate, rule):
    """Its gate is one per head, and has a gradient of its own shape."""
    x = cast(member_inputs(gate, rule, T=20, K=1, V=5), torch.float32)
    judge(x, 1e-4, chunk_size=16)


@crossed(use=["o", "state"], gate=GATES, rule=RULES, seldom=["fixed"])
@on_devices(cpu=["float32"], cuda=["bfloat16"])
def test_gradients_from_one_result(gate, rule, use, device, dtype):
    T, V, size = (40, 33, 16) if device == "cpu" else (140, 64, 64)
    x = member_inputs(gate, rule, T=T, K=64, V=V, strength=-0.01)
    x = cast(x, dtype, device)
    judge(x, budget_of(dtype), chunk_size=size, use=use)


def test_any_subset_of_inputs_may_require_a_gradient():
    sizes = {"T": 17, "HV": 1, "K": 33, "V": 20}
    x = cast(member_inputs("channel", "delta", **sizes), torch.float32)
    for count in (0, 1, 5):
        for wanted in itertools.combinations(x, count):
            judge(x, 1e-4, chunk_size=16, wanted=wanted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", ["head", "channel"])
@on_devices(cpu=["float32"], cuda=["float32", "bfloat16"])
def test_gradients_far_below_one_keep_their_digits(gate, rule, device, dtype):
    """The backward is linear: a gradient 2^40 times smaller loses no bits.

    Nor after a strong gate, in chunks of bounded decay and in others.
    """
    for strong in (-42.0, -66.0):
        x = member_inputs(gate, rule, T=64, K=33, V=33, strength=-0.02)
        x["g"][:, 8] = strong
        x = cast(x, dtype, device)
        leaves = [t.requires_grad_() for t in x.values()]
        o, state = fw.linear_recurrence(**x, backend="triton")
        do = [torch.randn_like(t) for t in (o, state)]
        found, small = (
            torch.autograd.grad(
                (o, state),
                leaves,
                [factor * t for t in do],
                retain_graph=True,
            )
            for factor in (1, 2.0**-40)
        )
        for dx, tiny in zip(found, small, strict=True):
            assert relative_error(2.0**40 * tiny.double(), dx) < 1e-6


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", ["head", "channel"])
@on_devices(cpu=["float32"], cuda=["bfloat16"])
def test_gates_that_are_nan(gate, rule, device, dtype):
    """A gate that is NaN is seen from its token on, in the state too."""
    x = member_inputs(gate, rule, T=150, K=33, V=33, strength=-0.02)
    x["g"][:, 100] = float("nan")
    o, state = fw.linear_recurrence(**cast(x, dtype, device), backend="triton")
    assert not o[:, :64].isnan().any()
    assert o[:, 100:].isnan().all() and state.isnan().all()


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_gate_above_zero_is_no_other(gate):
    """The documented range ends at 0; what is a little above is right."""
    x = member_inputs(gate, "delta", T=64, K=33, V=33, strength=-0.02)
    x["g"][:, 60] = 0.5
    judge(cast(x, torch.float32), 1e-4)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_each_stage_is_its_twin(gate, rule, monkeypatch):
    """Each stage of the kernels against the one of its name in PyTorch."""
    C, T, scale = 16, 40, 0.3
    x = cast(member_inputs(gate, rule, T=T, HV=1, K=64, V=33), torch.float32)
    names = ("q", "k", "v", "g", "beta", "erase", "initial_state")
    torch.manual_seed(1)
    do, dstate = torch.randn_like(x["v"]), torch.randn(1, 1, 64, 33)

    wide = torch_backend.widen(*(x.get(n) for n in names[:6]))
    wide = [None if t is None else t.double() for t in wide]
    q, k, v, g, e = chunkwise.erasing_chunks(*wide, C)
    S = x["initial_state"].double()
    do_n, dS = chunkwise.to_chunks(scale * do.double(), C), dstate.double()
    G, Aqk, P = chunkwise.intra(q, k, g, e)
    o, state = chunkwise.scan(q, k, v, g, e, G, Aqk, P, S, scale=scale)
    h, v_new = backward.chunk_states(k, v, g, e, G, P, S)
    dv, dh, dinitial = backward.scan_backward(q, k, g, e, G, Aqk, P, do_n, dS)
    dq, dk, dg, de = backward.intra_backward(
        q, k, g, e, G, do_n, v_new, dv, h, dh
    )
    u = R = dbeta = None
    if e is not None:
        u, R = v_new, P - torch.eye(C)
    if rule == "delta":
        # The kernels carry the errors u, with v_new = beta u; and what P has
        # in common with the inverse on the other side of beta.
        beta = chunkwise.to_chunks(x["beta"].double()[..., None], C)
        u, R = u / beta, R / beta
        dbeta = (k * de).sum(-1) + (v / beta * dv).sum(-1)
        dk, dv, dbeta = dk + beta * de, beta * dv, dbeta[..., None]

    def agree(found, ref):
        ref = chunkwise.from_chunks(ref, T)
        ref = ref if found.dim() == 4 else ref[..., 0]
        assert relative_error(found, ref) < 1e-5

    # Every tensor of a forward and backward, those between stages too.
    found = {}
    empty = TensorSpec.empty

    def remembered(room, q, lengths):
        found[room.name] = empty(room, q, lengths)
        return found[room.name]

    monkeypatch.setattr(TensorSpec, "empty", remembered)
    inputs = Operands(*map(x.get, names))
    options = OperatorOptions(scale, C)
    *_, saved = kernels.forward(inputs, options)
    kernels.backward(do, dstate, inputs, saved, options)
    for name, ref in (
        ("Aqk", Aqk),
        ("R", R),
        ("o", o),
        ("u", u),
        ("dq", dq),
        ("dk", dk),
        ("dv", dv),
        ("dg", dg),
        ("dbeta", dbeta),
        ("derase", de),
    ):
        if name in found:
            agree(found[name], ref)
    for name, ref in (("state", state), ("dinitial_state", dinitial)):
        assert relative_error(found[name], ref) < 1e-5
    for name, ref in (("h", h), ("dh", dh)):
        assert relative_error(found[name][:3, 0], ref[0, :, 0]) < 1e-5
    expected = {"Aqk": gate == "channel", "dg": gate != "none"}
    expected |= dict.fromkeys(("R", "u"), rule != "additive")
    expected |= {"dbeta": rule == "delta", "derase": rule == "erase"}
    assert all((name in found) == there for name, there in expected.items())


@pytest.mark.gpu
@ALL
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    "dtype, precision, tol", PRODUCTS.values(), ids=PRODUCTS
)
def test_products_on_gpu(
    gate, rule, D, dtype, precision, tol, matmul_precision, record_property
):
    matmul_precision(precision)
    x = member_inputs(gate, rule, B=2, T=1000, H=2, HV=4, K=D, V=D)
    label = f"{dtype} {precision} D{D}, {gate} {rule}"
    budget = HALF if dtype != torch.float32 or precision == "high" else tol
    judge(cast(x, dtype, "cuda"), budget, record_property, label)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
def test_identical_keys_and_a_negative_rate_on_gpu(gate):
    """Sixteen sequences: each token's error grows in all that follow it, so
    that of one sequence is one throw of a die, for the budget as well."""
    x = correlated_keys(gate, beta=-0.6, cosine=1.0, B=16, T=64)
    if gate in ("head", "channel"):  # else all have the same, and one throw
        x["g"] *= 2 * torch.rand_like(x["g"])
    judge_amplified(cast(x, torch.bfloat16, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("K, V", [(20, 12), (100, 33), (256, 40)])
def test_segments_of_other_head_sizes_on_gpu(K, V, cut):
    cut(5)
    x = member_inputs("none", "delta", T=1000, H=1, HV=2, K=K, V=V)
    judge(cast(x, torch.float32, "cuda"), budget_of(torch.float32))


@pytest.mark.gpu
@ALL
@pytest.mark.parametrize("shape", [(1, 40, 1, 1), (16, 500, 4, 16)], ids=str)
def test_runs_are_bitwise_equal(gate, rule, shape):
    """Fifty: a race that rarely shows would hide in two.

    256 heads, so at least as many programs of each kernel: the race of
    triton issue 9871 shows from 160 on.
    """
    B, T, H, HV = shape
    x = member_inputs(gate, rule, B=B, T=T, H=H, HV=HV, K=128, V=128)
    x = cast(x, torch.bfloat16, "cuda")
    first = run(x)
    for _ in range(50):
        for name, again in run(x).items():
            assert torch.equal(first[name], again), name


CONFIGURATIONS = {
    "gate": st.sampled_from(GATES),
    "rule": st.sampled_from(RULES),
    "B": st.integers(1, 3),
    "T": st.integers(1, 300),
    "H": st.integers(1, 3),
    "group": st.sampled_from([1, 2, 8]),
    "widths": st.sampled_from(
        [(60, 64), (64, 129), (100, 60), (128, 128), (256, 100)]
    ),
    "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    "chunk_size": st.sampled_from([16, 32, 64, None]),
    "use": st.sampled_from(["o", "both"]),
    "cuts": st.lists(st.integers(0, 300), max_size=4),
    "seed": st.integers(0, 2**16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(20))
def test_random_configurations_on_gpu(part):
    """Ten each, 200 in all, drawn from the part's own seed."""

    @seed(part)
    @settings(max_examples=10, deadline=None, database=None)
    @given(st.fixed_dictionaries(CONFIGURATIONS))
    def check(x):
        options = {name: x.pop(name) for name in ("use", "chunk_size")}
        x["HV"], (x["K"], x["V"]) = x["H"] * x.pop("group"), x.pop("widths")
        dtype, cuts = x.pop("dtype"), x.pop("cuts")
        if cuts:
            x |= {"B": 1, "N": len(cuts) + 1}
            ends = [0, *sorted(min(c, x["T"]) for c in cuts), x["T"]]
            options["cu_seqlens"] = torch.tensor(ends).cuda()
        judge(
            cast(member_inputs(**x), dtype, "cuda"),
            budget_of(dtype),
            **options,
        )

    check()


def last_sequence(x, tokens):
    """The inputs of a pack's last sequence, which has so many tokens."""
    return {
        name: t[-1:] if name == "initial_state" else t[:, -tokens:]
        for name, t in x.items()
    }


def judge_last(x, grads, o, state, tokens, do):
    """The last sequence of a large pack is that sequence alone."""
    alone = {
        name: t.detach().double().requires_grad_()
        for name, t in last_sequence(x, tokens).items()
    }
    o_ref, state_ref = fw.linear_recurrence(**alone, backend="loop")
    loss = (o_ref * do[:, -tokens:].double()).sum() + state_ref.sum()
    loss.backward()
    found = last_sequence(grads, tokens)
    assert relative_error(o[:, -tokens:], o_ref) <= HALF["o"]
    assert relative_error(state[-1:], state_ref) <= HALF["state"]
    for name, t in alone.items():
        error = relative_error(found[name], t.grad)
        assert error <= HALF[f"d{name}"], f"d{name}: {error:.1e}"


def large(gate, rule, *, T, N, H, K, V):
    """Inputs made on the GPU, in bf16, with room for their gradients."""
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = {
        "q": torch.randn(1, T, H, K, **options),
        "k": torch.randn(1, T, H, K, **options).mul_(K**-0.5),
        "v": torch.randn(1, T, H, V, **options),
        "initial_state": torch.randn(N, H, K, V, device="cuda"),
    }
    shape = {"head": (1, T, H), "channel": (1, T, H, K)}.get(gate)
    if shape:
        x["g"] = -torch.rand(shape, **options)
    if rule == "delta":
        x["beta"] = torch.rand(1, T, H, **options)
    return {name: t.requires_grad_() for name, t in x.items()}


LARGE = {
    "tokens": {"T": 2**17 + 100, "N": 2, "H": 130, "K": 128, "V": 16},
    "states": {"T": 2**14 + 100, "N": 2**14, "H": 9, "K": 128, "V": 128},
}


@pytest.mark.gpu
@needs_memory(110)
@pytest.mark.parametrize("size", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize(
    "gate, rule",
    [("none", "additive"), ("head", "delta"), ("channel", "delta")],
)
def test_offsets_past_31_bits(gate, rule, size):
    """Of q and its like, of the states, and of the states of the chunks."""
    x = large(gate, rule, **size)
    N, T = size["N"], size["T"]
    starts = torch.arange(N, device="cuda", dtype=torch.int32)
    if N == 2:
        starts *= T - 100
    cu_seqlens = torch.cat([starts, starts.new_tensor([T])])
    largest = "q" if N == 2 else "initial_state"
    assert x[largest].numel() > 2**31
    with ops.record_backends() as ran:
        o, state = fw.linear_recurrence(**x, cu_seqlens=cu_seqlens)
        do = torch.randn_like(o)
        grads = torch.autograd.grad(
            [o, state], [*x.values()], [do, torch.ones_like(state)]
        )
    assert ran == ["triton forward", "triton backward"]
    grads = dict(zip(x, grads, strict=True))
    tokens = T - int(cu_seqlens[-2])
    judge_last(x, grads, o, state, tokens, do)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_host_sync(dtype):
    """Not even for packed sequences: their offsets stay on the device."""
    x = member_inputs("channel", "delta", T=300, N=3, K=64, V=64)
    x = {n: t.requires_grad_() for n, t in cast(x, dtype, "cuda").items()}
    cu_seqlens = torch.tensor([0, 0, 100, 100, 300], device="cuda")[1:]

    def step():
        o, state = fw.linear_recurrence(**x, cu_seqlens=cu_seqlens)
        return torch.autograd.grad(o.sum() + state.sum(), [*x.values()])

    step()  # compiles, which may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_captured_call_runs_again(gate, rule, dtype):
    """Forward and backward, captured once, replayed on new values."""
    x = member_inputs(gate, rule, B=2, T=200, K=64, V=64)
    x = {n: t.requires_grad_() for n, t in cast(x, dtype, "cuda").items()}

    def step():
        o, state = fw.linear_recurrence(**x)
        loss = o.square().sum() + state.square().sum()
        return o, *torch.autograd.grad(loss, [*x.values()])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in x.values():
            t.mul_(0.5)
    graph.replay()
    for found, ref in zip(captured, step(), strict=True):
        assert torch.equal(found, ref)
