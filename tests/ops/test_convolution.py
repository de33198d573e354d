"""The short convolution: a literal loop, conv1d, and what it refuses."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support.convolution_inputs import HEADS, convolution_inputs, flat
from support.inputs import assert_same, results
from support.pairwise import parametrize_pairs
from support.refused import refused

from fastweights import ops
from fastweights.ops.convolution import (
    CONVOLUTION,
    convolve_heads,
    short_convolution,
)

PACKED = {
    "empty": [0, 0, 1, 3, 3, 8, 9, 9],
    "state": [0, 2, 4, 9],
    "one": [0, 9],
}


def literal(
    x,
    weight,
    bias=None,
    initial_state=None,
    cu_seqlens=None,
    activation="silu",
):
    """The equation, one channel of one token at a time."""
    (B, T, C), W = x.shape, weight.shape[1]
    spans = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        pairs = itertools.pairwise(cu_seqlens.tolist())
        spans = [(0, first, end) for first, end in pairs]
    y, states = {}, []
    zero = x.new_zeros(())
    for n, (b, first, end) in enumerate(spans):
        for c in range(C):
            before = [zero] * (W - 1)
            if initial_state is not None:
                before = [initial_state[n, i, c] for i in range(W - 1)]
            inputs = before + [x[b, t, c] for t in range(first, end)]
            for t in range(first, end):
                z = zero if bias is None else bias[c]
                for j in range(W):
                    z = (
                        z
                        + weight[c, W - 1 - j] * inputs[t - first + W - 1 - j]
                    )
                if activation == "silu":
                    z = z / (1 + torch.exp(-z))
                y[b, t, c] = z
            states += inputs[len(inputs) - (W - 1) :]
    order = itertools.product(range(B), range(T), range(C))
    y = torch.stack([y[place] for place in order]).view(B, T, C)
    return y, torch.stack(states).view(len(spans), C, W - 1).mT


def normalised(x, eps):
    """x / sqrt(sum of squares + eps), as one would write it."""
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


def cut(y, heads, sizes, eps):
    """q, k, v from the channels, q and k normalised unless eps is None."""
    (H, HV), (K, V) = heads, sizes
    q, k, v = y.split((H * K, H * K, HV * V), dim=-1)
    q, k = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K))
    if eps is not None:
        q, k = normalised(q, eps), normalised(k, eps)
    return q, k, v.unflatten(-1, (HV, V))


def flat_literal(heads, sizes, eps=1e-6, qk_l2norm=True, **inputs):
    y, state = literal(**inputs)
    parts = cut(y, heads, sizes, eps if qk_l2norm else None)
    return torch.cat([t.flatten(2) for t in parts], dim=2), state


FUNCTIONS = {
    "channels": (short_convolution, literal, {}),
    "heads": (flat, flat_literal, {**HEADS, "qk_l2norm": True}),
    "heads-as-they-are": (flat, flat_literal, {**HEADS, "qk_l2norm": False}),
}


@pytest.mark.usefixtures("empty_is_nan")
@parametrize_pairs(
    function=FUNCTIONS,
    W=[2, 3, 4],
    T=[5, 1, 2, 3, 4],
    without=[(), ("bias",), ("initial_state",)],
    activation=["silu", None],
    use=["both", "o", "state"],
    offsets=PACKED | {"batch": None},
)
def test_it_is_the_literal_loop(
    function, W, T, without, activation, use, offsets
):
    """An eps of the size of the norms, so that its place shows."""
    call, reference, given = function
    own = {"activation": activation} if call is short_convolution else {}
    given = {**given, **own, "use": use} | ({} if own else {"eps": 0.5})
    sizes = {"B": 2, "T": T, "C": 2 if own else 18}
    if offsets:
        given["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
        sizes |= {"B": 1, "T": 9, "N": len(offsets) - 1}
    x = convolution_inputs(**sizes, W=W)
    x = {name: t for name, t in x.items() if name not in without}
    found = results(call, x, **given)
    assert_same(found, results(reference, x, **given), 1e-14)


def test_keys_that_are_nothing_stay_so():
    x = convolution_inputs(B=1, T=2, bias=False, state=False)
    x["x"].zero_()
    found = results(flat, x, **HEADS)
    assert not found["o"].any()
    assert all(t.isfinite().all() for t in found.values())


def test_it_is_conv1d():
    x = convolution_inputs(T=50, state=False)
    conv = torch.nn.Conv1d(18, 18, 4, groups=18, padding=3).double()
    conv.weight.data, conv.bias.data = x["weight"][:, None], x["bias"]
    y, state = short_convolution(**x)
    ref = F.silu(conv(x["x"].mT)[..., :50].mT)
    torch.testing.assert_close(y, ref)
    assert torch.equal(state, x["x"][:, -3:])


@pytest.mark.parametrize("W", [2, 4])
def test_pieces_are_all_at_once(W):
    """Of one and two tokens, which a state outlives, and of none."""
    x = convolution_inputs(T=12, W=W)
    y, state = short_convolution(**x)
    pieces, last = [], x.pop("initial_state")
    for piece in x.pop("x").split([1, 0, 2, 1, 3, 5], dim=1):
        found, last = short_convolution(piece, **x, initial_state=last)
        pieces.append(found)
    torch.testing.assert_close(torch.cat(pieces, dim=1), y)
    assert torch.equal(last, state)


@pytest.mark.parametrize("packed", [False, True])
def test_a_call_without_a_token_hands_its_state_on(packed):
    """The state is handed on, and so is its gradient; or it is zeros."""
    offsets = torch.tensor([0, 0, 0]) if packed else None
    x = convolution_inputs(B=1 if packed else 2, T=0, N=2)
    found = results(short_convolution, x, cu_seqlens=offsets)
    assert found["o"].shape == x["x"].shape
    assert torch.equal(found["state"], x["initial_state"])
    assert found["dinitial_state"].all() and not found["dweight"].any()
    y, state = short_convolution(x["x"], x["weight"], cu_seqlens=offsets)
    assert y.shape == x["x"].shape and not state.any()
    assert state.shape == (2, 3, 18)


def test_gradient_of_one_of_the_results_alone():
    """Of k: what autograd has for q and v is None then."""
    x = convolution_inputs(B=1, T=3)
    x["x"].requires_grad_()
    k = convolve_heads(**x, **HEADS)[1]
    ref = cut(literal(**x)[0], eps=1e-6, **HEADS)[1]
    dx, dx_ref = (torch.autograd.grad(t.sin().sum(), x["x"]) for t in (k, ref))
    torch.testing.assert_close(dx, dx_ref)


@pytest.mark.parametrize("single", [None, torch.float32])
def test_half_precision_is_rounded_once(single):
    """Arithmetic is in fp32: the results are those of fp64, rounded."""
    x = convolution_inputs(T=40, dtype=torch.bfloat16, single=single)
    found = results(flat, x, **HEADS)
    exact = {name: t.double() for name, t in x.items()}
    ref = results(flat, exact, **HEADS)
    assert found["o"].dtype == found["state"].dtype == torch.bfloat16
    for name, t in x.items():
        assert found[f"d{name}"].dtype == t.dtype, name
    assert_same(found, ref, 2.5e-3)
    if single:
        filters = ("dweight", "dbias")
        assert_same(*({n: r[n] for n in filters} for r in (found, ref)), 1e-6)


def test_views_that_are_not_contiguous():
    x = convolution_inputs()
    views = {
        name: t.mT.contiguous().mT for name, t in x.items() if t.dim() > 1
    }
    assert not any(t.is_contiguous() for t in views.values())
    assert_same(
        results(flat, x | views, **HEADS), results(flat, x, **HEADS), 0.0
    )


def storage(t):
    return t.untyped_storage().data_ptr()


def test_results_share_no_memory():
    """Nor do gradients: operators may not return views of each other."""
    x = convolution_inputs(B=1, T=1)
    state = x["initial_state"]
    *parts, last = convolve_heads(**x, **HEADS)
    assert len({*map(storage, (*parts, last, state))}) == 5
    call = (*x.values(), None, [2, 3, 3, 2], 1e-6, True, "torch")
    douts = [t.detach() for t in (*parts, last)]
    grads = CONVOLUTION.backward(*douts, *call)
    assert len({*map(storage, (*grads, *douts, *x.values()))}) == 12
    assert not any(t.storage_offset() for t in grads)


def test_offsets_that_are_none_stay_within_the_rows(monkeypatch):
    """On a GPU no host reads them: wrong numbers, but no other memory."""
    target = "fastweights.ops.convolution.check_offsets_on_host"
    monkeypatch.setattr(target, lambda *_: None)
    for offsets in ([5, 7, 3, 0], [-9, 99, 2, 1], [4, 4, 4, 4]):
        x = convolution_inputs(B=1, T=6, C=18, N=3)
        cu_seqlens = torch.tensor(offsets)
        found = results(flat, x, cu_seqlens=cu_seqlens, **HEADS)
        assert all(t.isfinite().all() for t in found.values())
    # what can be mended is: these are [0, 4, 6, 6]
    ref = results(flat, x, cu_seqlens=torch.tensor([0, 4, 6, 6]), **HEADS)
    offsets = torch.tensor([-2, 4, 9, 7])
    assert_same(results(flat, x, cu_seqlens=offsets, **HEADS), ref, 0.0)


def test_what_runs_is_recorded():
    x = convolution_inputs(dtype=torch.float32)
    with ops.record_backends() as ran:
        results(short_convolution, x)
        short_convolution(**x, backend="torch")
    assert ran == ["torch forward", "torch backward", "torch forward"]


X = convolution_inputs(dtype=torch.float32)
OFFSETS = torch.tensor([0, 9])


@refused("""
x=X["x"][0]
    ValueError: x: got shape [9, 18], need [B, T, C] with B, C >= 1
weight=X["weight"].double()
    TypeError: weight: got torch.float64, need torch.float32
weight=X["weight"][:, None]
    ValueError: weight: got shape [18, 1, 4], need [18, W] with W one of (2, 3,
    4)
weight=torch.zeros(18, 5)
    ValueError: weight: got shape [18, 5], need [18, W] with W one of (2, 3, 4)
weight=torch.zeros(18, 1)
    ValueError: weight: got shape [18, 1], need [18, W] with W one of (2, 3, 4)
bias=torch.zeros(17)
    ValueError: bias: got shape [17], need [18]
bias=X["bias"].half()
    TypeError: bias: got torch.float16, need torch.float32
initial_state=torch.zeros(2, 4, 18)
    ValueError: initial_state: got shape [2, 4, 18], need [2, 3, 18]
initial_state=X["initial_state"].double()
    TypeError: initial_state: got torch.float64, need torch.float32
cu_seqlens=OFFSETS
    ValueError: x: got shape [2, 9, 18], need [1, T, C] because cu_seqlens is
    given
activation="relu"
    ValueError: activation: got 'relu', need one of ('silu', None)
backend="loop"
    ValueError: backend: got 'loop', need one of ('auto', 'triton',
    'torch')
""")
@pytest.mark.parametrize("function", [short_convolution, flat])
def test_what_does_not_fit_is_named(function, wrong, error):
    options = HEADS if function is flat else {}
    with error():
        function(**X | eval(f"dict({wrong})"), **options)


@refused("""
heads=2
    TypeError: heads: got 2, need two ints, H and HV
sizes=(2,)
    TypeError: sizes: got (2,), need two ints, K and V
sizes=(3, 2.0)
    TypeError: sizes[1]: got float, need an int
heads=(0, 9)
    ValueError: heads: got (0, 9), need both >= 1
heads=(2, 4)
    ValueError: x: got shape [2, 9, 18], need [B, T, 20], 2 H K + HV V of heads
    and sizes
qk_l2norm=1
    TypeError: qk_l2norm: got 1, need True or False
eps=0.0
    ValueError: eps: got 0.0, need > 0
eps="1"
    TypeError: eps: got str, need a real number
eps=float("nan")
    ValueError: eps: got nan, need > 0
""")
def test_errors_of_heads(wrong, error):
    with error():
        convolve_heads(**X, **HEADS | eval(f"dict({wrong})"))


def test_triton_needs_a_narrower_dtype():
    with pytest.raises(ValueError, match=r"^backend: got 'triton', which nee"):
        short_convolution(**convolution_inputs(), backend="triton")
