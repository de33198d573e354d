"""mLSTM against its definition, without a stabilizer, in fp64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import fastweights as fw
from fastweights.checks import relative_error
from fastweights.mlstm import stabilizers
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


def definition(q, k, v, g, i, scale=K**-0.5):
    """The paper's sums over all earlier tokens, one head at a time."""
    o = torch.zeros_like(v)
    for b in range(len(v)):
        for h in range(HV):
            G = g[b, :, h].cumsum(0)
            for t in range(v.shape[1]):
                weight = (G[t] - G[: t + 1] + i[b, : t + 1, h]).exp()
                score = scale * (k[b, : t + 1, 0] @ q[b, t, 0]) * weight
                least = torch.ones((), **DOUBLE)
                total = torch.maximum(score.sum().abs(), least)
                o[b, t, h] = score @ v[b, : t + 1, h] / total
    return o


@pytest.mark.parametrize("strength", [0.0, 1.0, 8.0])
def test_definition(strength):
    x = inputs(strength)
    o, _ = fw.mlstm(**x, eps=0.0)
    torch.testing.assert_close(o, definition(**x))


def test_step():
    x = inputs()
    S = torch.zeros(B, HV, K, V + 1, **DOUBLE)
    m = torch.full((B, HV), -torch.inf, **DOUBLE)
    q, k = (x[n].repeat_interleave(HV // H, 2) for n in "qk")
    o, (S, m) = steps.scan(
        steps.mlstm, (S, m), q * K**-0.5, k, x["v"], x["g"], x["i"]
    )
    got, state = fw.mlstm(**x, eps=0.0)
    torch.testing.assert_close((got, state), (o, (S, m)))


def test_gradients():
    x = {name: t.requires_grad_() for name, t in inputs().items()}
    o, _ = fw.mlstm(**x, eps=0.0)
    loss = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((o * loss).sum(), [*x.values()])
    want = torch.autograd.grad((definition(**x) * loss).sum(), [*x.values()])
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("size", [100.0, -100.0])
def test_huge_input_gates(size):
    """e^100 overflows fp32; what is computed does not."""
    x = {name: t.float() for name, t in inputs().items()}
    x["q"], x["k"] = x["q"].abs(), x["k"].abs()  # no n^T q close to zero
    x["i"] = x["i"] + size
    o, (state, m) = fw.mlstm(**x)
    wide = {name: t.double() for name, t in x.items()}
    torch.testing.assert_close(
        o.double(), definition(**wide), rtol=1e-4, atol=1e-5
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
    ref = definition(**wide)
    wanted = torch.autograd.grad(ref.square().sum(), [*wide.values()])
    assert relative_error(o, ref) < 1e-5
    for name, grad, want in zip(x, grads, wanted, strict=True):
        assert relative_error(grad, want) < 1e-4, name


def test_continues_from_its_state():
    x = inputs()
    whole, last = fw.mlstm(**x)
    head = {name: t[:, :20] for name, t in x.items()}
    tail = {name: t[:, 20:] for name, t in x.items()}
    _, memory = fw.mlstm(**head)
    o, again = fw.mlstm(**tail, initial_state=memory)
    torch.testing.assert_close(o, whole[:, 20:])
    torch.testing.assert_close(again, last)


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
            kept = state[n].new_zeros(()) if own is None else own[0][0]
            torch.testing.assert_close(state[n], kept.expand_as(state[n]))
            continue
        part = {name: t[:, a:b] for name, t in x.items()}
        o_n, (state_n, m_n) = fw.mlstm(**part, initial_state=own)
        torch.testing.assert_close(o[:, a:b], o_n)
        torch.testing.assert_close((state[n], m[n]), (state_n[0], m_n[0]))


def test_stabilizers_never_let_a_gate_exceed_one():
    x = inputs(30.0)
    x["g"] = 30 * torch.randn(B, T, HV, **DOUBLE)  # an exponential gate
    before, after, last = stabilizers(x["g"], x["i"], None, None)
    m = torch.full((B, HV), -torch.inf, **DOUBLE)
    for t in range(T):
        m = torch.maximum(x["g"][:, t] + m, x["i"][:, t])
        torch.testing.assert_close(after[:, t], m)
    torch.testing.assert_close(last, m)
    assert (x["g"] + before - after <= 1e-9).all()
    o, _ = fw.mlstm(**x)
    assert o.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_keeps_its_dtypes(dtype):
    x = inputs()
    wide = {name: x[name].to(dtype).double() for name in x}
    x = {name: t.to(dtype) for name, t in x.items()}
    o, (state, m) = fw.mlstm(**x)
    assert o.dtype == dtype and state.dtype == m.dtype == torch.float32
    ref = definition(**wide)
    error = (o.double() - ref).norm() / ref.norm()
    assert error < (2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("g", torch.zeros(HV), r"g: got shape \[2\], need \[B, T, HV\]"),
        ("i", None, "i: got NoneType, need a Tensor"),
        (
            "i",
            torch.zeros(B, T, 1),
            r"i: got shape \[2, 37, 1\], need \[2, 37",
        ),
        ("q", [1.0], "q: got list, need a Tensor"),
    ],
)
def test_bad_input(name, bad, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fw.mlstm(**(inputs() | {name: bad}))


def test_a_stabilizer_of_another_shape_is_refused():
    """It would broadcast, and nobody would know."""
    x = inputs()
    _, (state, m) = fw.mlstm(**x)
    message = r"initial_state\[1\]: got shape \[1, 2\], need \[2, 2\]"
    with pytest.raises(ValueError, match=message):
        fw.mlstm(**x, initial_state=(state, m[:1]))


def offsets(*values):
    return {"cu_seqlens": torch.tensor(values)}


def first(**changes):
    """The first sequence, with changes."""
    x = {name: t[:1] for name, t in inputs().items()}
    return x | changes


def part(tokens, sequences=slice(None)):
    return {name: t[sequences, tokens] for name, t in inputs().items()}


STATE = torch.zeros(B, HV, K, V + 1, **DOUBLE)
M = torch.zeros(B, HV, **DOUBLE)
PAIR = "initial_state: got {}, need a pair of tensors, \\(state, m\\)"
REFUSED = {
    "no-batch": (part(slice(None), slice(0)), r"q: got shape \[0, 37, 1, 5\]"),
    "no-tokens": (part(slice(0)), r"q: got shape \[2, 0, 1, 5\], need"),
    "offsets-a-list": (
        first(cu_seqlens=[0, T]),
        "cu_seqlens: got list, need a Tensor",
    ),
    "offsets-below-T": (
        first(**offsets(0, 20)),
        r"cu_seqlens: got \[0, 20\], need values that start at 0",
    ),
    "offsets-beyond-T": (
        first(**offsets(0, 20, T + 5)),
        r"cu_seqlens: got \[0, 20, 42\], need values that start at 0",
    ),
    "offsets-below-0": (
        first(**offsets(-3, 20, T)),
        r"cu_seqlens: got \[-3, 20, 37\], need values that start at 0",
    ),
    "offsets-falling": (
        first(**offsets(0, 20, 9, T)),
        r"cu_seqlens: got \[0, 20, 9, 37\], need values that start at 0",
    ),
    "offsets-two-dimensions": (
        first(**offsets([0, T])),
        r"cu_seqlens: got shape \[1, 2\], need \[N \+ 1\] with N >= 1",
    ),
    "offsets-with-a-batch": (
        offsets(0, T),
        r"q: got shape \[2, 37, 1, 5\], need \[1, T, H, K\] because",
    ),
    "g-elsewhere": (
        {"g": torch.zeros(B, T, HV, device="meta")},
        "g: got device meta, need q's, cpu",
    ),
    "i-elsewhere": (
        {"i": torch.zeros(B, T, HV, device="meta")},
        "i: got device meta, need q's, cpu",
    ),
    "g-integers": (
        {"g": torch.zeros(B, T, HV, dtype=torch.int64)},
        "g: got torch.int64, need torch.float32 or torch.float64",
    ),
    "i-integers": (
        {"i": torch.zeros(B, T, HV, dtype=torch.int64)},
        "i: got torch.int64, need torch.float32 or torch.float64",
    ),
    "i-half": (
        {"i": torch.zeros(B, T, HV, dtype=torch.float16)},
        "i: got torch.float16, need torch.float32 or torch.float64",
    ),
    "state-no-pair": ({"initial_state": STATE}, PAIR.format("Tensor")),
    "state-of-three": ({"initial_state": (STATE, M, M)}, PAIR.format("tuple")),
    "state-without-m": (
        {"initial_state": (STATE, None)},
        r"initial_state\[1\]: got NoneType, need a Tensor",
    ),
    "m-without-state": (
        {"initial_state": (None, M)},
        r"initial_state\[0\]: got NoneType, need a Tensor",
    ),
    "m-half": (
        {"initial_state": (STATE, M.half())},
        r"initial_state\[1\]: got torch.float16, need torch.float64",
    ),
    "state-narrow": (
        {"initial_state": (STATE.float(), M)},
        r"initial_state\[0\]: got torch.float32, need torch.float64",
    ),
    "state-without-n": (
        {"initial_state": (STATE[..., :V], M)},
        r"initial_state\[0\]: got shape \[2, 2, 5, 4\], need \[2, 2, 5, 5\]",
    ),
    "m-elsewhere": (
        {"initial_state": (STATE, M.to("meta"))},
        r"initial_state\[1\]: got device meta, need q's, cpu",
    ),
    "scale-a-string": ({"scale": "1"}, "scale: got str, need a real number"),
    "chunk-size-17": ({"chunk_size": 17}, "chunk_size: got 17, need one of"),
    "beta": (
        {"beta": torch.ones(B, T, HV, **DOUBLE)},
        "unexpected keyword argument 'beta'",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_and_why(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fw.mlstm(**(inputs() | changes))


def test_compiles_to_one_graph():
    torch._dynamo.reset()
    x = {name: t.float() for name, t in inputs().items()}
    step = torch.compile(fw.mlstm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(**x), fw.mlstm(**x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_gpu(dtype):
    x = {name: t.to("cuda", dtype) for name, t in inputs(4.0).items()}
    o, (state, m) = fw.mlstm(**x, backend="triton", eps=0.0)
    ref = definition(**{name: t.double().cpu() for name, t in x.items()})
    error = (o.cpu().double() - ref).norm() / ref.norm()
    assert error < (2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert state.is_cuda and m.is_cuda
