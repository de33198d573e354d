"""linear_recurrence: both backends against its equations, and its refusals."""

import functools
import itertools
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.inputs import (
    GATES,
    RULES,
    assert_same,
    explicit,
    member_inputs,
    results,
)
from support.pairwise import parametrize_all, parametrize_pairs
from support.refused import refused
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastweights as fw
from fastweights import ops
from fastweights.arguments import RecurrenceOperands, RecurrenceOptions
from fastweights.checks import relative_error

BACKENDS = ("loop", "torch")
EXACT = 1e-11  # fp64, sums in another order
FORWARD = torch.ops.fastweights.linear_recurrence.default
BACKWARD = torch.ops.fastweights.linear_recurrence_backward.default

MEMBERS = list(itertools.product(GATES, RULES))
members = pytest.mark.parametrize(("gate", "rule"), MEMBERS)
backends = pytest.mark.parametrize("backend", BACKENDS)


def test_the_operator_has_its_groups_in_their_order():
    """PyTorch hands them over one after the other."""
    names = [x.name for x in FORWARD._schema.arguments]
    assert names == [*RecurrenceOperands._fields, *RecurrenceOptions._fields]


# H, HV, K, V
HEADS = {
    "default": (1, 2, 6, 5),
    "equal": (2, 2, 5, 7),
    "double": (2, 4, 12, 3),
    "eightfold": (1, 8, 3, 12),
    "width-one": (3, 3, 1, 1),
}
PACKS = {"batch": None, "pack": (0, 0, 0.02, 0.4, 0.4, 1, 1), "one": (0, 1)}


def scatter(t):
    """The same values behind strides of another order, with gaps."""
    wide = t.repeat_interleave(2, dim=-1).movedim(0, -1).contiguous()
    return wide.movedim(-1, 0)[..., ::2]


def run_separately(cu_seqlens, initial_state, **x):
    """The equations of each packed sequence by itself."""
    outputs, states = [], [*initial_state.split(1)]
    for n, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        part = {k: t if t.dim() == 1 else t[:, a:b] for k, t in x.items()}
        if a < b:
            o, states[n] = explicit(**part, initial_state=states[n])
            outputs.append(o)
    return torch.cat(outputs, 1), torch.cat(states)


@parametrize_pairs(
    kind={f"{g}-{r}": (g, r) for g, r in MEMBERS},
    T=[1, 63, 64, 65, 200],
    heads=HEADS,
    pack=PACKS,
    chunk_size=[16, 32, 64, None],
    use=["both", "o", "state"],
    index=[torch.int32, torch.int64],
    layout={"contiguous": lambda t: t, "scattered": scatter},
)
def test_it_is_its_equations(
    kind, T, heads, pack, chunk_size, use, index, layout
):
    """Outputs, states and gradients, of a batch and of packed sequences."""
    sizes, options = dict(zip(("H", "HV", "K", "V"), heads, strict=True)), {}
    if pack:
        offsets = [round(T * part) for part in pack]
        options = {"cu_seqlens": torch.tensor(offsets, dtype=index)}
        sizes |= {"B": 1, "N": len(pack) - 1}
    x = member_inputs(*kind, **{"B": 2} | sizes, T=T)
    if x["k"].shape[-1] == 1:  # or nothing is left of the initial state
        x |= {
            name: x[name] / 32 for name in ("beta", "erase_key") if name in x
        }
    ref = results(run_separately if pack else explicit, x, use=use, **options)
    views = {name: layout(t) for name, t in x.items()}
    for backend in BACKENDS:
        options |= {"backend": backend, "chunk_size": chunk_size}
        found = results(fw.linear_recurrence, views, use=use, **options)
        assert_same(found, ref, EXACT)


@members
def test_views_are_copied_once_for_forward_and_backward(gate, rule):
    """What is kept for the backward is the copy; results stay the same."""
    x = member_inputs(gate, rule, T=20)
    views = {name: scatter(t) for name, t in x.items()}
    assert_same(
        results(fw.linear_recurrence, views),
        results(fw.linear_recurrence, x),
        0.0,
    )
    kept = []
    for t in views.values():
        t.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        fw.linear_recurrence(**views)
    *kept, g = sorted(kept, key=lambda t: t.is_contiguous(), reverse=True)
    assert len(kept) >= len(x) - 1 and all(t.is_contiguous() for t in kept)
    assert g.is_contiguous() or gate == "fixed"  # of a number per head


@backends
@pytest.mark.parametrize("scale", [None, 2, 0.1, np.float32(0.5), 0.0])
def test_any_scale_is_the_definitions(backend, scale):
    x = member_inputs("head", "delta", T=20)
    ref = explicit(**x, scale=scale and float(scale))
    o = fw.linear_recurrence(**x, scale=scale, backend=backend)
    torch.testing.assert_close(o, ref)


@backends
@members
def test_no_initial_state_is_zeros(gate, rule, backend):
    x = member_inputs(gate, rule, B=2, T=18)
    state = x.pop("initial_state")
    o = fw.linear_recurrence(**x, backend=backend)
    zeros = torch.zeros_like(state)
    ref = fw.linear_recurrence(**x, initial_state=zeros, backend=backend)
    torch.testing.assert_close(o, ref)


@backends
@pytest.mark.parametrize("count", [0, 1, 5])
def test_any_subset_of_inputs_may_require_a_gradient(count, backend):
    x = member_inputs("channel", "delta", T=20)
    ref = results(explicit, x)
    for wanted in itertools.combinations(x, count):
        o = results(fw.linear_recurrence, x, wanted=wanted, backend=backend)
        kept = {"o", "state", *(f"d{name}" for name in wanted)}
        assert_same(o, {name: ref[name] for name in kept}, EXACT)


def test_packed_sequences_start_from_zeros():
    x = member_inputs("channel", "delta", T=30)
    del x["initial_state"]
    cu_seqlens = torch.tensor([0, 12, 12, 30])
    o, state = fw.linear_recurrence(**x, cu_seqlens=cu_seqlens)
    for n, part in ((0, slice(0, 12)), (2, slice(12, 30))):
        alone = fw.linear_recurrence(**{m: t[:, part] for m, t in x.items()})
        torch.testing.assert_close((o[:, part], state[n : n + 1]), alone)
    assert state[1].eq(0).all()


WIDTHS = {
    "dtype": (torch.float64, torch.float32),
    "rule": RULES,
    "gate": ("head", "channel"),
}


@parametrize_all(**WIDTHS, strength=(0.0, -1e-3, -5.0, -10.0, -20.0, "mixed"))
def test_gates_of_every_strength_chunk_by_chunk(strength, gate, rule, dtype):
    """Against the loop in fp64, which other tests hold to the equations."""
    x = member_inputs(gate, rule, T=135, strength=strength, dtype=dtype)
    wide = {name: t.double() for name, t in x.items()}
    ref = results(fw.linear_recurrence, wide, backend="loop")
    tolerance = EXACT if dtype == torch.float64 else 1e-4
    for backend in BACKENDS if dtype == torch.float32 else ("torch",):
        o = results(fw.linear_recurrence, x, backend=backend)
        assert_same(o, ref, tolerance)
        for chunk in (slice(0, 64), slice(64, 128), slice(128, 135)):
            error = relative_error(o["dg"][:, chunk], ref["dg"][:, chunk])
            assert error <= tolerance, f"{backend}, dg in {chunk}: {error:.1e}"


@parametrize_all(**WIDTHS, clear=(-800.0, -1e4, -1e6, -1e9, -3e38, -np.inf))
def test_gates_around_one_that_clears_the_state(clear, gate, rule, dtype):
    """In a running sum that is too narrow they would be lost."""
    x = member_inputs(gate, rule, T=100, strength=-0.1, dtype=dtype)
    x["g"][:, [10, 11, 40, 70]] = clear
    wide = {name: t.double() for name, t in x.items()}
    ref = results(explicit, wide)
    for backend in BACKENDS:
        o = results(fw.linear_recurrence, x, backend=backend)
        assert_same(o, ref, EXACT if dtype == torch.float64 else 1e-5)


@backends
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_identical_keys(beta, backend):
    x = member_inputs("head", "delta", T=80, strength=-0.01)
    x["k"] = x["k"][:, :1].expand_as(x["k"])
    x["beta"] = torch.full_like(x["beta"], beta)
    ref = results(explicit, x)
    assert_same(results(fw.linear_recurrence, x, backend=backend), ref, EXACT)


def test_beta_none_is_not_beta_one():
    x = member_inputs("none", "delta", T=20)
    ones = x | {"beta": torch.ones_like(x["beta"])}
    del x["beta"]
    additive, delta = (fw.linear_recurrence(**y)[0] for y in (x, ones))
    assert relative_error(additive, delta) > 0.1


BUDGETS = {
    torch.float32: dict.fromkeys(["o", "out", "gate"], 1e-4),
    torch.bfloat16: {"o": 5e-3, "out": 8e-3, "gate": 2e-2},
    torch.float16: {"o": 5e-3, "out": 8e-3, "gate": 2e-2},
}


NARROW = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16-fp32-gates": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float16),
}


@backends
@members
@pytest.mark.parametrize("dtypes", NARROW)
def test_narrow_inputs_keep_their_dtype_and_the_budget(
    dtypes, gate, rule, backend
):
    dtype, gates = NARROW[dtypes]
    x = member_inputs(gate, rule, T=70, H=2, HV=4, K=20, V=12, dtype=dtype)
    x |= {name: x[name].to(gates) for name in ("g", "beta") if name in x}
    wide = {name: t.double() for name, t in x.items()}
    ref = results(fw.linear_recurrence, wide, backend="loop")
    o = results(fw.linear_recurrence, x, backend=backend)
    assert o["o"].dtype == dtype
    assert o["state"].dtype == torch.float32
    assert all(o[f"d{name}"].dtype == t.dtype for name, t in x.items())
    budget = BUDGETS[dtype]
    kinds = {"o": "o", "state": "o", "dg": "gate", "dbeta": "gate"}
    assert_same(o, ref, {name: budget[kinds.get(name, "out")] for name in o})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_grouped_gradients_are_summed_before_they_are_rounded(dtype):
    x = member_inputs("fixed", "additive", T=40, H=1, HV=8, dtype=dtype)
    wide = {name: t.float() for name, t in x.items()}
    ref = results(fw.linear_recurrence, wide)
    o = results(fw.linear_recurrence, x)
    for name in ("dq", "dk", "dg"):
        torch.testing.assert_close(
            o[name], ref[name].to(dtype), rtol=0, atol=0
        )


@backends
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_autocast_narrows_q_k_v_and_nothing_else(dtype, backend):
    def under_autocast(**x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fw.linear_recurrence(**x)

    def by_hand(q, k, v, **x):
        q, k, v = (t.to(products) for t in (q, k, v))
        return fw.linear_recurrence(q, k, v, **x)

    dtype = getattr(torch, dtype)
    products = dtype if dtype == torch.float64 else torch.bfloat16
    x = member_inputs("channel", "delta", T=70, dtype=torch.float32)
    names = x if dtype == torch.float64 else ("q", "k", "v")
    x |= {name: x[name].to(dtype) for name in names}
    ref = results(by_hand, x, backend=backend)
    o = results(under_autocast, x, backend=backend)
    assert o["o"].dtype == products
    assert all(o[f"d{name}"].dtype == t.dtype for name, t in x.items())
    assert_same(o, ref, 0.0)


def test_a_backward_under_autocast_narrows_nothing():
    x = member_inputs("channel", "delta", T=70, dtype=torch.float32)
    x = {name: t.requires_grad_() for name, t in x.items()}
    o, state = fw.linear_recurrence(**x)
    loss = o.sum() + state.sum()
    ref = torch.autograd.grad(loss, [*x.values()], retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grads = torch.autograd.grad(loss, [*x.values()])
    torch.testing.assert_close(grads, ref, rtol=0, atol=0)


def test_autocast_joins_operands_of_different_dtypes():
    x = member_inputs("head", "delta", T=20, dtype=torch.float32)
    x["k"] = x["k"].bfloat16()
    with pytest.raises(TypeError, match=r"k: got torch\.bfloat16"):
        fw.linear_recurrence(**x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = fw.linear_recurrence(**x)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("gate, rule", [x for x in MEMBERS if x[0] != "fixed"])
def test_operator_passes_opcheck(gate, rule):
    x = member_inputs(gate, rule, T=37, H=2, HV=4, dtype=torch.float32)
    x = {name: t.requires_grad_() for name, t in x.items()}
    names = ("q", "k", "v", "g", "beta", "erase_key", "initial_state")
    arguments = (*map(x.get, names), None, 0.5, 16, "torch", False)
    torch.library.opcheck(FORWARD, arguments)
    arguments = [t.detach() if torch.is_tensor(t) else t for t in arguments]
    o, state, saved = FORWARD(*arguments)
    inputs, options = arguments[:8], arguments[8:]
    torch.library.opcheck(BACKWARD, (o, state, *inputs, saved, *options))
    torch.library.opcheck(BACKWARD, (o, None, *inputs, saved, *options))


class Seen(TorchDispatchMode):
    """The names of this library's operators that a mode gets to see."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastweights":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated
def test_what_looks_at_operators_sees_ours():
    x = member_inputs("channel", "delta", T=20)
    with Seen() as mode:
        expected = results(fw.linear_recurrence, x)
        with torch.no_grad():
            fw.linear_recurrence(**x)
    forward, backward = "linear_recurrence", "linear_recurrence_backward"
    assert mode.names == [forward, backward, forward]
    with torch.profiler.profile() as profile:
        assert_same(results(fw.linear_recurrence, x), expected, 0.0)
    names = [event.key for event in profile.key_averages()]
    assert f"fastweights::{forward}" in names
    assert f"fastweights::{backward}" in names


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("gradient", [False, True])
def test_a_trace_has_the_operator_and_passes_its_own_check(gradient):
    """The check traces once more, without gradients."""
    x = member_inputs("head", "delta", T=20)
    x["q"].requires_grad_(gradient)

    def function(q):
        return fw.linear_recurrence(**x | {"q": q}, scale=0.5)[0]

    traced = torch.jit.trace(function, x["q"])
    assert "fastweights::linear_recurrence" in str(traced.graph)
    if gradient:
        found = [f(x["q"]).square().sum() for f in (traced, function)]
        found = [torch.autograd.grad(loss, x["q"])[0] for loss in found]
        assert relative_error(*found) <= EXACT


def test_fake_tensors_stay_fake():
    with FakeTensorMode() as mode:
        x = {
            name: mode.from_tensor(t).requires_grad_()
            for name, t in member_inputs("head", "delta", T=20).items()
        }
        o, state = fw.linear_recurrence(**x)
        grads = torch.autograd.grad(o.sum() + state.sum(), list(x.values()))
    assert all(isinstance(t, FakeTensor) for t in (o, state, *grads))
    assert [t.shape for t in grads] == [t.shape for t in x.values()]


def test_a_negative_view_is_its_values():
    x = member_inputs("head", "delta", T=20)
    negative = torch.complex(x["v"], -x["v"]).conj().imag
    assert negative.is_neg()
    with torch.no_grad():
        o, _ = fw.linear_recurrence(**{**x, "v": negative})
        expected, _ = fw.linear_recurrence(**x)
    assert torch.equal(o, expected)


def forward_mode(o, q):
    """The derivative along ones, without torch.func."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        return forward_ad.unpack_dual(o(dual)).tangent


TRANSFORMS = {
    "grad": lambda o, q: torch.func.grad(o)(q).sum(),
    "jvp": lambda o, q: torch.func.jvp(o, (q,), (torch.ones_like(q),))[1],
    "vmap": lambda o, q: torch.func.vmap(o)(torch.stack([q, 2 * q]))[0],
    "forward-mode": forward_mode,
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_but_by_the_loop(name, grad):
    x = member_inputs("channel", "delta", T=20)

    def o(q, backend):
        return fw.linear_recurrence(**x | {"q": q}, backend=backend)[0].sum()

    transform = functools.partial(TRANSFORMS[name], q=x["q"])
    message = (
        "linear_recurrence: got a transform of torch.func, or forward-mode "
        'autograd, which only backend="loop" has; a layer'
    )
    with torch.set_grad_enabled(grad):
        with pytest.raises(NotImplementedError, match=f"^{message}"):
            transform(functools.partial(o, backend="auto"))
        found = transform(functools.partial(o, backend="loop"))
    # o is linear in q: its derivative along ones is its value there.
    along = x["q"] if name == "vmap" else torch.ones_like(x["q"])
    torch.testing.assert_close(found, o(along, "loop"))


@pytest.mark.parametrize("grad", [False, True])
def test_it_runs_where_forward_mode_has_nothing_to_do_with_it(grad):
    x = member_inputs("channel", "delta", T=20)
    ref = results(fw.linear_recurrence, x)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        if grad:
            assert_same(results(fw.linear_recurrence, x), ref, 0.0)
        assert fw.linear_recurrence(**x)[0].equal(ref["o"])


def test_tests_can_ask_which_backend_ran():
    x = member_inputs("channel", "delta", T=20)
    with ops.record_backends() as ran:
        results(fw.linear_recurrence, x)
        assert ran == ["torch forward", "torch backward"]
        with ops.record_backends() as inner:
            fw.linear_recurrence(**x, backend="loop")
    fw.linear_recurrence(**x)
    assert inner == ["loop forward"]
    assert ran == ["torch forward", "torch backward", "loop forward"]


def test_records_may_be_closed_in_any_order():
    x = member_inputs("channel", "delta", T=20)
    first, second = ops.record_backends(), ops.record_backends()
    early, late = first.__enter__(), second.__enter__()
    fw.linear_recurrence(**x)
    first.__exit__(None, None, None)
    fw.linear_recurrence(**x, backend="loop")
    second.__exit__(None, None, None)
    fw.linear_recurrence(**x)
    assert early == ["torch forward"]
    assert late == ["torch forward", "loop forward"]


def test_a_record_of_all_threads():
    x = member_inputs("channel", "delta", T=20)
    call = functools.partial(fw.linear_recurrence, **x)
    with ops.record_backends() as ran:
        other = threading.Thread(target=call, kwargs={"backend": "loop"})
        other.start()
        other.join()
        call()
    assert ran == ["loop forward", "torch forward"]


def test_second_derivatives_are_refused_but_by_the_loop():
    x = member_inputs("channel", "delta", T=20)
    q = x.pop("q").requires_grad_()
    for backend in BACKENDS:
        o, _ = fw.linear_recurrence(q, **x, backend=backend)
        loss = o.square().sum()
        (dq,) = torch.autograd.grad(loss, q, create_graph=True)
        if backend == "loop":
            torch.autograd.grad(dq.sum(), q)
            continue
        with pytest.raises(NotImplementedError, match='only backend="loop"'):
            torch.autograd.grad(dq.sum(), q)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    def again(**x):
        return checkpoint(
            lambda *values: fw.linear_recurrence(
                **dict(zip(x, values, strict=True))
            ),
            *x.values(),
            use_reentrant=use_reentrant,
        )

    x = member_inputs("channel", "delta", T=40)
    ref = results(fw.linear_recurrence, x)
    with ops.record_backends() as ran:
        assert_same(results(again, x), ref, 0.0)
    forward, backward = "torch forward", "torch backward"
    assert ran == [forward, forward, backward]


@backends
@pytest.mark.parametrize("rule", RULES)
def test_a_fixed_gate_of_as_many_heads_as_tokens(rule, backend):
    """Its decays go by heads, though [HV] is also [T]."""
    x = member_inputs("fixed", rule, T=5, HV=5)
    assert_same(
        results(fw.linear_recurrence, x, backend=backend),
        results(explicit, x),
        EXACT,
    )


def test_the_loop_reads_offsets():
    """A CPU's in any case, and others where their numbers are."""
    x = member_inputs("channel", "delta", T=20, N=2, dtype=torch.float32)
    x = {n: x[n].to("meta") for n in ("q", "k", "v", "g", "beta")}
    with pytest.raises(ValueError, match=r"^cu_seqlens: got a tensor"):
        fw.linear_recurrence(**x, cu_seqlens=meta(3).long(), backend="loop")


def meta(*shape):
    return torch.zeros(shape, device="meta")


def offsets(*values, dtype=torch.int64):
    return {"cu_seqlens": torch.tensor(values, dtype=dtype)}


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


# What is changed in a call that is right, and its error.
REFUSED = """
q=ones(1, 6, 3)
    ValueError: q: got shape [1, 6, 3], need [B, T, H, K]
k=ones(1, 5, 2, 3)
    ValueError: k: got shape [1, 5, 2, 3], need q's, [1, 6, 2, 3]
k=ones(1, 6, 1, 3)
    ValueError: k: got shape [1, 6, 1, 3], need q's, [1, 6, 2, 3]
q=ones(1, 0, 2, 3), k=ones(1, 0, 2, 3), v=ones(1, 0, 4, 5)
    ValueError: q: got shape [1, 0, 2, 3], need [B, T, H, K] with B, T, H, K
q=ones(0, 6, 2, 3), k=ones(0, 6, 2, 3), v=ones(0, 6, 4, 5)
    ValueError: q: got shape [0, 6, 2, 3], need [B, T, H, K] with B, T, H, K
v=ones(1, 6, 5)
    ValueError: v: got shape [1, 6, 5], need [1, 6, HV, V] with HV, V >= 1
v=ones(1, 7, 4, 5)
    ValueError: v: got shape [1, 7, 4, 5], need [1, 6, HV, V] with HV, V >= 1
v=ones(1, 6, 4, 0)
    ValueError: v: got shape [1, 6, 4, 0], need [1, 6, HV, V] with HV, V >= 1
v=ones(1, 6, 3, 5)
    ValueError: v: got shape [1, 6, 3, 5], need [1, 6, HV, V] with HV a
    multiple of q's 2 heads
v=ones(1, 6, 1, 5)
    ValueError: v: got shape [1, 6, 1, 5], need [1, 6, HV, V] with HV a
    multiple of q's 2 heads
erase_key=ones(1, 6, 4, 3)
    ValueError: erase_key: got a tensor beside beta, need one of the two; beta
    k, and beta v for v, are the delta rule of beta
erase_key=ones(1, 6, 3, 3), beta=None
    ValueError: erase_key: got shape [1, 6, 3, 3], need [1, 6, 4, 3] or [1, 6,
    2, 3]
erase_key=ones(1, 6, 4, 3, dtype=torch.bfloat16), beta=None
    TypeError: erase_key: got torch.bfloat16, need torch.float32
g=ones(1, 6, 4, 2)
    ValueError: g: got shape [1, 6, 4, 2], need [4], [1, 6, 4] or [1, 6, 4, 3]
g=ones(1, 6, 2)
    ValueError: g: got shape [1, 6, 2], need [4], [1, 6, 4] or [1, 6, 4, 3]
g=ones(2)
    ValueError: g: got shape [2], need [4], [1, 6, 4] or [1, 6, 4, 3]
beta=ones(1, 6, 4, 3)
    ValueError: beta: got shape [1, 6, 4, 3], need [1, 6, 4]
initial_state=ones(1, 4, 5, 3)
    ValueError: initial_state: got shape [1, 4, 5, 3], need [1, 4, 3, 5]
offsets(0, 2, 6) | {"initial_state": ones(1, 4, 3, 5)}
    ValueError: initial_state: got shape [1, 4, 3, 5], need [2, 4, 3, 5]
offsets(0, 6) | {n: ones(2, 6, 2, 3) for n in ("q", "k")} | {"v": ones(2, 6, 4,
5), "g": None, "beta": None}
    ValueError: q: got shape [2, 6, 2, 3], need [1, T, H, K] because cu_seqlens
    is given
backend="cuda"
    ValueError: backend: got 'cuda', need one of ('auto', 'triton',
    'torch', 'loop')
backend="triton"
    ValueError: backend: got 'triton', which needs tensors on a CUDA device,
    not cpu, or Triton's interpreter (TRITON_INTERPRET=1 before Triton's first
chunk_size=17
    ValueError: chunk_size: got 17, need one of (16, 32, 64) or None
chunk_size=0
    ValueError: chunk_size: got 0, need one of (16, 32, 64) or None
q=ones(1, 6, 2, 3).to(torch.float8_e4m3fn)
    TypeError: q: got torch.float8_e4m3fn, need one of (torch.float64,
    torch.float32, torch.float16, torch.bfloat16)
q=ones(1, 6, 2, 3, dtype=torch.complex64)
    TypeError: q: got torch.complex64, need one of (torch.float64,
    torch.float32, torch.float16, torch.bfloat16)
k=ones(1, 6, 2, 3, dtype=torch.bfloat16)
    TypeError: k: got torch.bfloat16, need torch.float32
v=ones(1, 6, 4, 5, dtype=torch.float64)
    TypeError: v: got torch.float64, need torch.float32
g=ones(1, 6, 4, dtype=torch.bfloat16)
    TypeError: g: got torch.bfloat16, need torch.float32
q=ones(1, 6, 2, 3, dtype=torch.float16), k=ones(1, 6, 2, 3,
dtype=torch.float16), v=ones(1, 6, 4, 5, dtype=torch.float16), g=ones(1, 6, 4,
dtype=torch.bfloat16)
    TypeError: g: got torch.bfloat16, need torch.float32 or torch.float16
initial_state=ones(1, 4, 3, 5, dtype=torch.float64)
    TypeError: initial_state: got torch.float64, need torch.float32
initial_state=ones(1, 4, 3, 5, dtype=torch.bfloat16)
    TypeError: initial_state: got torch.bfloat16, need torch.float32
scale="1"
    TypeError: scale: got str, need a real number
scale=True
    TypeError: scale: got bool, need a real number
scale=float("nan")
    ValueError: scale: got nan, need a finite number
chunk_size=64.0
    TypeError: chunk_size: got float, need an int or None
"""


@refused(REFUSED)
def test_bad_calls_name_the_argument_and_what_it_needs(wrong, error):
    x = member_inputs(
        "head", "delta", T=6, H=2, HV=4, K=3, dtype=torch.float32
    )
    del x["initial_state"]
    fw.linear_recurrence(**x)
    with error():
        fw.linear_recurrence(**x | eval(f"dict({wrong})"))


def test_the_largest_key_width_runs():
    q, v = torch.randn(1, 3, 1, 256), torch.randn(1, 3, 1, 2)
    o, _ = fw.linear_recurrence(q, F.normalize(q, dim=-1), v)
    assert o.shape == v.shape
