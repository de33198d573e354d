"""The family's kernels compiled: sizes and ways of calls that need a GPU."""

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from support.inputs import GATES, RULES, member_inputs
from support.kernel_judge import HALF, PRODUCTS, needs_memory
from support.recurrence_judge import (
    EACH_MEMBER,
    budget_of,
    cast,
    correlated_keys,
    judge,
    judge_amplified,
    kernel_results,
)

import fastweights as fw
from fastweights import ops
from fastweights.checks import relative_error


@pytest.mark.gpu
@EACH_MEMBER
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    "dtype, precision, tol", PRODUCTS.values(), ids=PRODUCTS
)
def test_products_on_gpu(
    gate, rule, D, dtype, precision, tol, set_matmul_precision, record_property
):
    set_matmul_precision(precision)
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
def test_segments_of_other_head_sizes_on_gpu(K, V, set_segments):
    set_segments(5)
    x = member_inputs("none", "delta", T=1000, H=1, HV=2, K=K, V=V)
    judge(cast(x, torch.float32, "cuda"), budget_of(torch.float32))


@pytest.mark.gpu
@EACH_MEMBER
@pytest.mark.parametrize("shape", [(1, 40, 1, 1), (16, 500, 4, 16)], ids=str)
def test_runs_are_bitwise_equal(gate, rule, shape):
    """Fifty: a race that rarely shows would hide in two.

    256 heads, so at least as many programs of each kernel: the race of
    triton issue 9871 shows from 160 on.
    """
    B, T, H, HV = shape
    x = member_inputs(gate, rule, B=B, T=T, H=H, HV=HV, K=128, V=128)
    x = cast(x, torch.bfloat16, "cuda")
    first = kernel_results(x)
    for _ in range(50):
        for name, again in kernel_results(x).items():
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
@EACH_MEMBER
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
