"""The family's kernels, every gate and both rules, against the fp64 loop.

Each test runs the operator forward and backward, by the kernels, and
compares outputs, final states and every gradient with the loop's.
"""

import itertools

import pytest
import torch
from support.graphs import in_one_graph
from support.inputs import GATES, RULES, member_inputs, results
from support.kernel_judge import DEVICES, on_devices
from support.pairwise import parametrize_all
from support.recurrence_judge import budget_of, cast, chosen_members, judge

import fastweights as fw
from fastweights.arguments import RecurrenceOperands, RecurrenceOptions
from fastweights.checks import relative_error
from fastweights.kernels.gpu import dot_precision
from fastweights.kernels.recurrence import backend as triton_recurrence
from fastweights.kernels.recurrence.schedule import TensorSpec
from fastweights.kernels.recurrence.settings import lengths_of, settings_of
from fastweights.reference import chunkwise
from fastweights.reference import chunkwise_backward as backward
from fastweights.torch_backend import recurrence as torch_recurrence

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


@DEVICES
@parametrize_all(case=CASES, gate=GATES, rule=RULES, covered_once=["fixed"])
def test_the_kernels_are_the_loop(gate, rule, case, device, record_property):
    T, H, HV, K, V, chunk_size, dtype, initial = case
    x = member_inputs(gate, rule, T=T, H=H, HV=HV, K=K, V=V)
    if not initial:
        del x["initial_state"]
    dtype = dtype if device == "cpu" else torch.bfloat16
    budget, label = budget_of(dtype), f"sizes, {dtype}"
    x = cast(x, dtype, device)
    judge(x, budget, record_property, label, chunk_size=chunk_size)


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
        inputs = RecurrenceOperands(*(x[n] for n in names))
        kind, _ = triton_recurrence.kind_and_sizes(
            inputs, RecurrenceOptions(scale=1.0)
        )
        found.append(settings_of("scan", kind)[0].PRECISION)
        assert dot_precision(torch.bfloat16, 128) == "tf32"
        assert dot_precision(torch.float32, 129) == "tf32x3"
    assert found == ["tf32", "tf32x3"] * 2


def test_lengths_that_are_symbols(monkeypatch):
    """In one segment and in four: torch.compile allocates for both."""
    monkeypatch.setattr(
        "fastweights.kernels.recurrence.settings.MIN_SEGMENT_CHUNKS", 1
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


@chosen_members("channel additive", "channel delta")
def test_one_channel(gate, rule):
    """Its gate is one per head, and has a gradient of its own shape."""
    x = cast(member_inputs(gate, rule, T=20, K=1, V=5), torch.float32)
    judge(x, 1e-4, chunk_size=16)


@parametrize_all(
    use=["o", "state"], gate=GATES, rule=RULES, covered_once=["fixed"]
)
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
@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_each_stage_is_its_twin(gate, rule, monkeypatch):
    """Each stage of the kernels against the one of its name in PyTorch."""
    C, T, scale = 16, 40, 0.3
    x = cast(member_inputs(gate, rule, T=T, HV=1, K=64, V=33), torch.float32)
    names = ("q", "k", "v", "g", "beta", "erase_key", "initial_state")
    torch.manual_seed(1)
    do, dstate = torch.randn_like(x["v"]), torch.randn(1, 1, 64, 33)

    wide = torch_recurrence.expand_inputs(*(x.get(n) for n in names[:6]))
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

    def assert_agree(found, ref):
        ref = chunkwise.from_chunks(ref, T)
        ref = ref if found.dim() == 4 else ref[..., 0]
        assert relative_error(found, ref) < 1e-5

    # Every tensor of a forward and backward, those between stages too.
    found = {}
    empty = TensorSpec.empty

    def remember(spec, q, lengths):
        found[spec.name] = empty(spec, q, lengths)
        return found[spec.name]

    monkeypatch.setattr(TensorSpec, "empty", remember)
    inputs = RecurrenceOperands(*map(x.get, names))
    options = RecurrenceOptions(scale=scale, chunk_size=C)
    *_, saved = triton_recurrence.forward(inputs, options)
    triton_recurrence.backward(do, dstate, inputs, saved, options)
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
        ("derase_key", de),
    ):
        if name in found:
            assert_agree(found[name], ref)
    for name, ref in (("state", state), ("dinitial_state", dinitial)):
        assert relative_error(found[name], ref) < 1e-5
    for name, ref in (("h", h), ("dh", dh)):
        assert relative_error(found[name][:3, 0], ref[0, :, 0]) < 1e-5
    expected = {"Aqk": gate == "channel", "dg": gate != "none"}
    expected |= dict.fromkeys(("R", "u"), rule != "additive")
    expected |= {"dbeta": rule == "delta", "derase_key": rule == "erase"}
    assert all((name in found) == there for name, there in expected.items())
