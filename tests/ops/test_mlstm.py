"""mLSTM against its definition, without a stabilizer, in fp64."""

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from support.refused import refused

import fastweights as fw
from fastweights.checks import relative_error
from fastweights.ops.mlstm import stabilizers
from fastweights.ops.normaliser import recurrence_with_normaliser
from fastweights.reference import steps

B, T, H, HV, K, V = 2, 37, 1, 2, 5, 4
DOUBLE = {"dtype": torch.float64}


def inputs(strength=1.0, B=B):
    torch.manual_seed(0)
    return {
        "q": torch.randn(B, T, H, K, **DOUBLE),
        "k": torch.randn(B, T, H, K, **DOUBLE),
        "v": torch.randn(B, T, HV, V, **DOUBLE),
        "g": F.logsigmoid(strength * torch.randn(B, T, HV, **DOUBLE)),
        "i": strength * torch.randn(B, T, HV, **DOUBLE),
    }


def definition(q, k, v, g, i, memory=None, eps=0.0):
    """Equations 19 to 27, one token after the other: o and e^m state, m."""
    N, HV, K, V = len(q), v.shape[2], q.shape[3], v.shape[3]
    q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k))
    C, n = v.new_zeros(N, HV, K, V), v.new_zeros(N, HV, K)
    m = v.new_full((N, HV), -torch.inf)
    if memory is not None:
        state, m = memory
        state = m.exp()[..., None, None] * state
        C, n = state[..., :-1], state[..., -1]
    outputs = []
    for t in range(v.shape[1]):
        forget, take = g[:, t, :, None].exp(), i[:, t, :, None].exp()
        C = (
            forget[..., None] * C
            + (take * k[:, t])[..., None] * (v[:, t, :, None])
        )
        n = forget * n + take * k[:, t]
        m = torch.maximum(g[:, t] + m, i[:, t]).detach()
        read = K**-0.5 * torch.einsum("bhk,bhkv->bhv", q[:, t], C)
        total = K**-0.5 * torch.einsum("bhk,bhk->bh", q[:, t], n)
        total = total.abs().clamp(min=1.0) + eps * m.exp()
        outputs.append(read / total[..., None])
    return torch.stack(outputs, 1), (torch.cat([C, n[..., None]], -1), m)


@pytest.mark.parametrize("strength", [0.0, 1.0, 8.0])
def test_definition(strength):
    x = {n: t.requires_grad_() for n, t in inputs(strength).items()}
    o, ref = fw.mlstm(**x, eps=0.0)[0], definition(**x)[0]
    torch.testing.assert_close(o, ref)
    loss = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    found, want = (
        torch.autograd.grad((y * loss).sum(), [*x.values()]) for y in (o, ref)
    )
    torch.testing.assert_close(found, want)


def test_mlstm_is_its_step_in_a_loop():
    x = inputs()
    S = torch.zeros(B, HV, K, V + 1, **DOUBLE)
    m = torch.full((B, HV), -torch.inf, **DOUBLE)
    q, k = (x[n].repeat_interleave(HV // H, 2) for n in "qk")
    o, (S, m) = steps.scan(
        steps.mlstm, (S, m), q * K**-0.5, k, x["v"], x["g"], x["i"]
    )
    got, state = fw.mlstm(**x, eps=0.0)
    torch.testing.assert_close((got, state), (o, (S, m)))


@pytest.mark.parametrize("size", [100.0, -100.0])
def test_huge_input_gates(size):
    """e^100 overflows fp32; what is computed does not."""
    x = {name: t.float() for name, t in inputs().items()}
    x["q"], x["k"] = x["q"].abs(), x["k"].abs()  # no n^T q close to zero
    x["i"] = x["i"] + size
    o, (state, m) = fw.mlstm(**x)
    wide = {name: t.double() for name, t in x.items()}
    torch.testing.assert_close(
        o.double(), definition(**wide)[0], rtol=1e-4, atol=1e-5
    )
    assert state.isfinite().all() and m.isfinite().all()
    x["i"].requires_grad_()
    x["g"].requires_grad_()
    o, _ = fw.mlstm(**x)
    grads = torch.autograd.grad(o.sum(), (x["i"], x["g"]))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("size", [-1e4, -1e9])
@pytest.mark.parametrize(
    ("names", "tokens"),
    [("i", slice(8)), ("i", slice(8, 12)), ("g", slice(8, 12)), ("gi", [9])],
    ids=["padding-before", "padding-inside", "forgets", "both"],
)
def test_gates_that_mask_tokens(names, tokens, size):
    x = {name: t.float() for name, t in inputs().items()}
    for name in names:
        x[name][:, tokens] = size
    x = {name: t.requires_grad_() for name, t in x.items()}
    wide = {name: t.detach().double() for name, t in x.items()}
    o, _ = fw.mlstm(**x, eps=0.0)
    grads = torch.autograd.grad(o.square().sum(), [*x.values()])
    wide = {name: t.requires_grad_() for name, t in wide.items()}
    ref, _ = definition(**wide)
    wanted = torch.autograd.grad(ref.square().sum(), [*wide.values()])
    assert relative_error(o, ref) < 1e-5
    for name, grad, want in zip(x, grads, wanted, strict=True):
        assert relative_error(grad, want) < 1e-4, name


NEVER = {
    "i-before": ("i", slice(8)),
    "i-inside": ("i", slice(8, 12)),
    "i-after": ("i", slice(30, T)),
    "i-all": ("i", slice(T)),
    "g-first": ("g", 0),
    "g-inside": ("g", [9, 10, 20]),
    "g-all": ("g", slice(T)),
    "both-first": ("gi", 0),
    "both-inside": ("gi", slice(9, 20)),
    "both-all": ("gi", slice(T)),
}


def memories():
    """None; one; an empty one; one that is empty in one head of two."""
    state = torch.randn(B, HV, K, V + 1, **DOUBLE)
    m = torch.randn(B, HV, **DOUBLE)
    nothing = torch.full_like(m, -torch.inf)
    some = m.clone()
    some[0, 1] = -torch.inf
    return {
        "new": None,
        "old": (state, m),
        "empty": (0 * state, nothing),
        "some": (state, some),
    }


@pytest.mark.parametrize("memory", ["new", "old", "empty", "some"])
@pytest.mark.parametrize(("names", "tokens"), NEVER.values(), ids=NEVER)
def test_gates_of_minus_infinity(names, tokens, memory):
    """In one head of one sequence; the rest of the batch goes on as it was."""
    x = inputs()
    for name in names:
        x[name][0, tokens, 1] = -torch.inf
    old = memories()[memory]
    leaves = [*x.values()] + ([] if old is None else [old[0]])
    leaves = [t.requires_grad_() for t in leaves]
    o, (state, m) = fw.mlstm(**x, initial_state=old, eps=0.0, chunk_size=16)
    ref, (wide, ref_m) = definition(**x, memory=old)
    units = ref_m.masked_fill(ref_m.isneginf(), 0).exp()[..., None, None]
    torch.testing.assert_close((o, m), (ref, ref_m))
    torch.testing.assert_close(units * state, wide)

    def grads(o, wide):
        loss = (o * torch.linspace(-1, 2, o.numel()).view_as(o)).sum()
        return torch.autograd.grad(loss + wide.square().sum(), leaves)

    torch.testing.assert_close(grads(o, units * state), grads(ref, wide))
    if tokens == slice(T) and "i" in names and memory in ("new", "empty"):
        assert (o[0, :, 1] == 0).all() and m[0, 1] == -torch.inf


@pytest.mark.parametrize("initial", [False, True])
def test_gates_of_minus_infinity_in_a_pack(initial):
    """Padding before, inside and behind, resets, a sequence of padding."""
    ends = [0, 6, 6, 17, 30, 37]
    x = inputs(B=1)
    for name, tokens in (("i", (0, 1, 9, 10, 16, *range(30, 37))), ("g", 20)):
        x[name][:, tokens] = -torch.inf
    x["g"][:, 30] = -torch.inf
    memory = [None] * 5
    packed = None
    if initial:
        packed = (
            torch.randn(5, HV, K, V + 1, **DOUBLE),
            torch.randn(5, HV, **DOUBLE),
        )
        packed[1][2] = -torch.inf
        memory = [tuple(t[n : n + 1] for t in packed) for n in range(5)]
    o, (state, m) = fw.mlstm(
        **x, cu_seqlens=torch.tensor(ends), initial_state=packed, eps=0.0
    )
    for n, (a, b) in enumerate(itertools.pairwise(ends)):
        if a == b:
            continue  # as in test_packed_sequences
        part = {name: t[:, a:b] for name, t in x.items()}
        ref, (wide, ref_m) = definition(**part, memory=memory[n])
        torch.testing.assert_close((o[:, a:b], m[n : n + 1]), (ref, ref_m))
        units = ref_m[0].masked_fill(ref_m[0].isneginf(), 0).exp()
        torch.testing.assert_close(units[..., None, None] * state[n], wide[0])


@pytest.mark.parametrize("name", ["g", "i"])
def test_a_nan_stays_in_its_head_and_sequence(name):
    x = inputs(B=1)
    x[name][0, 5, 1] = torch.nan
    offsets = torch.tensor([0, 12, T])
    o, (state, m) = fw.mlstm(**x, cu_seqlens=offsets)
    x[name][0, 5, 1] = -1.0
    want, (states, _) = fw.mlstm(**x, cu_seqlens=offsets)
    assert o[0, 5:12, 1].isnan().all() and state[0, 1].isnan().all()
    o[0, :12, 1] = want[0, :12, 1]
    torch.testing.assert_close((o, state[1]), (want, states[1]))
    assert m.isfinite().all()


@pytest.mark.parametrize("initial", [False, True])
def test_packed_sequences(initial):
    lengths = [0, 10, 0, 26, 1, 0]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    x = inputs(4.0, B=1)
    memory = None
    if initial:
        memory = (
            torch.randn(len(lengths), HV, K, V + 1, **DOUBLE),
            torch.randn(len(lengths), HV, **DOUBLE),
        )
    o, (state, m) = fw.mlstm(**x, cu_seqlens=offsets, initial_state=memory)
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        own = None if memory is None else tuple(t[n : n + 1] for t in memory)
        if a == b:
            kept, kept_m = torch.zeros(1), torch.tensor([-torch.inf])
            if own is not None:
                kept, kept_m = own
            assert state[n].equal(kept[0].expand_as(state[n]).double())
            assert m[n].equal(kept_m[0].expand_as(m[n]).double())
            continue
        part = {name: t[:, a:b] for name, t in x.items()}
        o_n, (state_n, m_n) = fw.mlstm(**part, initial_state=own)
        torch.testing.assert_close(o[:, a:b], o_n)
        torch.testing.assert_close((state[n], m[n]), (state_n[0], m_n[0]))


@pytest.fixture
def handed_on(monkeypatch):
    """The weights and gates that the recurrence gets, of each call."""
    calls = []

    def spy(q, k, v, one, g, **options):
        calls.append((one, g))
        return recurrence_with_normaliser(q, k, v, one, g, **options)

    module = sys.modules["fastweights.ops.mlstm"]  # fw.mlstm is the function
    monkeypatch.setattr(module, "recurrence_with_normaliser", spy)
    return calls


def test_the_recurrence_gets_finite_gates(handed_on):
    """And none that clears an empty state: kernels are slower for those."""
    x = inputs(B=1)
    x["i"][:, :5], x["g"][:, 20] = -torch.inf, -torch.inf
    x["i"][:, 12], x["g"][:, 12] = -torch.inf, -torch.inf
    fw.mlstm(**x)
    ((_, g),) = handed_on
    assert g.isfinite().all()
    assert (g[:, :6] == 0).all() and (g[:, 13] == 0).all()
    assert (g[:, [12, 20]].exp() == 0).all()


def test_stabilizers_never_let_a_gate_exceed_one(handed_on):
    """Not by a rounding either: linear_recurrence needs g <= 0."""
    x = inputs(30.0)
    x["g"] = 30 * torch.randn(B, T, HV, **DOUBLE)  # an exponential gate
    before, after, last = stabilizers(
        x["g"], x["i"], None, None, torch.float64
    )
    m = torch.full((B, HV), -torch.inf, **DOUBLE)
    for t in range(T):
        torch.testing.assert_close(before[:, t], m)
        m = torch.maximum(x["g"][:, t] + m, x["i"][:, t])
        torch.testing.assert_close(after[:, t], m)
    torch.testing.assert_close(last, m)
    for dtype in (torch.float64, torch.float32):
        o, _ = fw.mlstm(**{name: t.to(dtype) for name, t in x.items()})
        assert o.isfinite().all()
    for weights, gates in handed_on:
        assert weights.max() == 1 and gates.max() == 0


def test_a_state_is_handed_over_in_its_own_units():
    """Though m is fp32: near 1000 a token's -0.001013 is -0.001038."""
    tokens = 60
    x = {name: torch.ones(1, tokens, 1, 1) for name in "qkv"}
    x["g"] = torch.full((1, tokens, 1), -1.013e-3)
    x["i"] = torch.full((1, tokens, 1), -torch.inf)
    x["i"][:, 0] = 1000.0
    memory = None
    for t in range(tokens):
        token = {name: y[:, t : t + 1] for name, y in x.items()}
        _, memory = fw.mlstm(**token, initial_state=memory)
    state, m = (y.double() for y in memory)
    assert (m > 999).all()  # not fitted to the state
    total = m + state[..., 0, 0].log()
    assert (total - (1000 - 1.013e-3 * (tokens - 1))).abs().max() < 1e-5


@pytest.mark.parametrize("options", [{}, {"eps": 0.5}], ids=str)
def test_eps_is_added_in_units_of_e_to_the_m(options):
    """Keys and queries at right angles: the denominator is 1 or eps e^m."""
    x = inputs()
    x["q"][..., 2:], x["k"][:, ::2, :, :2] = 0, 0
    x["k"][:, 1::2], x["v"][:, 1::2] = 1e-7 * x["k"][:, 1::2], 1e7
    x["i"] = x["i"] + 30
    want, _ = definition(**x, eps=options.get("eps", 1e-6))
    o, _ = fw.mlstm(**x, **options)
    bare, _ = definition(**x)
    assert relative_error(bare, want) > 0.1
    torch.testing.assert_close(o, want)


@pytest.mark.parametrize(
    ("dtype", "budget", "budget_of_gradients"),
    [
        (torch.float32, 1e-5, 1e-4),
        (torch.float16, 5e-4, 2e-3),
        (torch.bfloat16, 3e-3, 1e-2),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(4))
def test_the_normaliser_is_not_rounded_to_half_precision(
    dtype, budget, budget_of_gradients, seed
):
    """Keys of both signs: n^T q is a sum that cancels, and divides."""
    generator = torch.Generator().manual_seed(seed)
    x = {
        name: torch.randn(1, 80, 2, 16, generator=generator).to(dtype)
        for name in "qkv"
    }
    loss = torch.randn(1, 80, 2, 16, generator=generator)
    x["g"] = F.logsigmoid(3 + torch.randn(1, 80, 2, generator=generator))
    x["i"] = 3 * torch.randn(1, 80, 2, generator=generator)
    x = {name: t.requires_grad_() for name, t in x.items()}
    o, (state, m) = fw.mlstm(**x, eps=0.0)
    assert o.dtype == dtype and state.dtype == m.dtype == torch.float32
    grads = torch.autograd.grad((o * loss).sum(), [*x.values()])
    wide = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    ref, _ = definition(**wide)
    wanted = torch.autograd.grad((ref * loss).sum(), [*wide.values()])
    assert relative_error(o, ref) < budget
    for name, grad, want in zip(x, grads, wanted, strict=True):
        assert grad.dtype == x[name].dtype
        assert relative_error(grad, want) < budget_of_gradients, name


def offsets(*values):
    return {"cu_seqlens": torch.tensor(values)}


def part(tokens, sequences=slice(None)):
    return {name: t[sequences, tokens] for name, t in inputs().items()}


STATE = torch.zeros(B, HV, K, V + 1, **DOUBLE)
M = torch.zeros(B, HV, **DOUBLE)
REFUSED = """
g=torch.zeros(HV)
    ValueError: g: got shape [2], need [B, T, HV]
i=torch.zeros(B, T, 1)
    ValueError: i: got shape [2, 37, 1], need [2, 37, 2]
initial_state=(STATE, M[:1])
    ValueError: initial_state[1]: got shape [1, 2], need [2, 2]
part(slice(None), slice(0))
    ValueError: q: got shape [0, 37, 1, 5], need [B, T, H, K] with B, T, H, K
    >= 1
part(slice(0))
    ValueError: q: got shape [2, 0, 1, 5], need [B, T, H, K] with B, T, H, K
i=torch.zeros(B, T, HV, dtype=torch.float16)
    TypeError: i: got torch.float16, need torch.float32 or torch.float64
initial_state=STATE
    TypeError: initial_state: got Tensor, need a pair of tensors, (state, m)
initial_state=(STATE, M, M)
    TypeError: initial_state: got tuple, need a pair of tensors, (state, m)
initial_state=(STATE, None)
    TypeError: initial_state[1]: got NoneType, need a Tensor
initial_state=(None, M)
    TypeError: initial_state[0]: got NoneType, need a Tensor
initial_state=(STATE, M.half())
    TypeError: initial_state[1]: got torch.float16, need torch.float64
initial_state=(STATE.float(), M)
    TypeError: initial_state[0]: got torch.float32, need torch.float64
initial_state=(STATE[..., :V], M)
    ValueError: initial_state[0]: got shape [2, 2, 5, 4], need [2, 2, 5, 5]
initial_state=(STATE, M.to("meta"))
    ValueError: initial_state[1]: got device meta, need q's, cpu
chunk_size=17
    ValueError: chunk_size: got 17, need one of (16, 32, 64) or None
eps=None
    TypeError: eps: got NoneType, need a real number
eps=-1e-6
    ValueError: eps: got -1e-06, need >= 0
beta=torch.ones(B, T, HV, **DOUBLE)
    TypeError: mlstm() got an unexpected keyword argument 'beta'
"""


@refused(REFUSED)
def test_what_is_refused_and_why(wrong, error):
    with error():
        fw.mlstm(**inputs() | eval(f"dict({wrong})"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_mlstm_on_a_gpu(dtype):
    x = {name: t.to("cuda", dtype) for name, t in inputs(4.0).items()}
    o, (state, m) = fw.mlstm(**x, backend="triton", eps=0.0)
    ref, _ = definition(**{name: t.double().cpu() for name, t in x.items()})
    error = relative_error(o.cpu(), ref)
    assert error < (5e-3 if dtype == torch.bfloat16 else 1e-5)
    assert state.is_cuda and m.is_cuda
