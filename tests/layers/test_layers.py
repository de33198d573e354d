"""Layers: pieces, packing, gradients, states, types, starts and errors."""

import copy
import itertools

import pytest
import torch
from support.layer_cases import LAYER_CASES, contents, hidden, make_layer
from support.pairwise import parametrize_all

from fastweights.checks import relative_error
from fastweights.layers import LayerState, SoftmaxAttention

T = 41
PIECES = {
    "odd": [7, 1, 20, 3, 10],
    "more-first": [20, 16, 1, 4],
    "tokens": [1] * T,
}
LENGTHS = [5, 0, 1, 18, 3]
NO_STATE = "softmax"


def assert_agree(found, want, tol=1e-5, label=""):
    assert found.shape == want.shape, label
    if not want.is_floating_point():
        assert torch.equal(found, want), label
        return
    infinite = want.isinf()  # an empty mLSTM's m
    assert torch.equal(found.isinf(), infinite), label
    found, want = (x.masked_fill(infinite, 0) for x in (found, want))
    assert relative_error(found, want) < tol, label


def assert_same_state(found, want, tol=1e-5):
    found, want = contents(found), contents(want)
    assert found.keys() == want.keys()
    for name in want:
        assert_agree(found[name], want[name], tol, name)


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def run_alone(layer, x, lengths, states=None):
    """Each sequence by itself: outputs side by side, states."""
    outputs, after = [], []
    for n, part in enumerate(x.split(lengths, 1)):
        state = None if states is None else states[n]
        if part.shape[1]:
            y, state = layer(part, state)
            outputs.append(y)
        after.append(state)
    return torch.cat(outputs, 1), after


@parametrize_all(
    name=list(LAYER_CASES), pieces=PIECES, gradients=[False, True]
)
def test_in_pieces_as_at_once(name, pieces, gradients):
    layer, x = make_layer(name), hidden(2, T)
    with torch.set_grad_enabled(gradients):
        want, want_state = layer(x)
        state, outputs = None, []
        for part in x.split(pieces, 1):
            y, state = layer(part, state)
            outputs.append(y)
    assert_agree(torch.cat(outputs, 1), want)
    assert_same_state(state, want_state)


@parametrize_all(name=list(LAYER_CASES), gradients=[False, True])
def test_packed_as_alone(name, gradients):
    layer, x = make_layer(name), hidden(1, sum(LENGTHS))
    with torch.set_grad_enabled(gradients):
        want, states = run_alone(layer, x, LENGTHS)
        y, state = layer(x, cu_seqlens=offsets(LENGTHS))
    assert_agree(y, want)
    if name.startswith(NO_STATE) and gradients:
        assert state is None  # as its docstring says
        return
    for n, one in enumerate(states):
        row = state.select(torch.tensor([n]))
        if one is not None:
            assert_same_state(row, one)
            continue
        for key, empty in contents(row).items():
            nothing = -torch.inf if key == "m" else 0
            assert (empty == nothing).all(), key


@parametrize_all(
    name=list(LAYER_CASES), then=["packed", "rows"], gradients=[False, True]
)
def test_packed_and_continued(name, then, gradients):
    """The empty sequence gets tokens now, and another gets none."""
    layer, x = make_layer(name), hidden(1, sum(LENGTHS))
    lengths = [0, 2, 6, 1, 20] if then == "packed" else [4] * len(LENGTHS)
    more = hidden(1, sum(lengths), seed=1)
    with torch.no_grad():
        _, states = run_alone(layer, x, LENGTHS)
        _, state = layer(x, cu_seqlens=offsets(LENGTHS))
    with torch.set_grad_enabled(gradients):
        want, states = run_alone(layer, more, lengths, states)
        if then == "packed":
            y, state = layer(more, state, offsets(lengths))
        else:
            y, state = layer(more.unflatten(1, (-1, 4))[0], state)
            y = y.flatten(0, 1)[None]
    assert_agree(y, want)
    for n, one in enumerate(states):
        assert_same_state(state.select(torch.tensor([n])), one)


@parametrize_all(
    name=list(LAYER_CASES), before=[False, True], where=["input", "gradient"]
)
def test_a_nan_stays_in_its_document(name, before, where):
    """In outputs and gradients, on the way in and on the way back."""
    layer, x = make_layer(name), hidden(1, sum(LENGTHS)).requires_grad_()
    state = layer(hidden(len(LENGTHS), 3))[1].detach() if before else None
    inside = torch.arange(sum(LENGTHS)) // 6 == 1  # of the longest, 18
    found = []
    for bad in (torch.zeros_like(inside), inside):
        z = x.masked_fill(bad[:, None] & (where == "input"), torch.nan)
        y, _ = layer(z, state, offsets(LENGTHS))
        dy = hidden(1, sum(LENGTHS), seed=1)
        dy = dy.masked_fill(bad[:, None] & (where == "gradient"), torch.nan)
        found.append((y, *torch.autograd.grad(y, x, dy)))
    place = torch.arange(sum(LENGTHS))
    others = (place < 6) | (place >= 24)
    for clean, dirty in zip(*found, strict=True):
        assert_agree(dirty[:, others], clean[:, others])
    assert found[1][1].isnan().any()


def test_ends_in_other_types_of_offsets():
    layer, x = make_layer("gated-deltanet"), hidden(1, 9)
    for dtype in (torch.int32, torch.int64):
        layer(x, cu_seqlens=torch.tensor([0, 4, 9], dtype=dtype))


def derivative(name, fast):
    """Of two calls, by x, every parameter and the state between them."""
    layer = make_layer(name, torch.float64)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    x = hidden(2, 3, dtype=torch.float64)
    more = hidden(2, 2, seed=1, dtype=torch.float64)
    _, state = layer(x)
    fields = [k for k, t in state.tensors().items() if t.is_floating_point()]
    if name == "mlstm":
        # m only scales S: it is a constant to autograd, and S has gradients
        # in the units of a fixed m. What they come to is in z and in w.
        fields.remove("m")
    between = [getattr(state, k).detach() for k in fields]

    def both(x, more, *rest):
        given = dict(zip(names, rest, strict=False))
        call = torch.func.functional_call
        y, after = call(layer, given, (x,))
        z, after = call(layer, given, (more, after))
        changed = dict(zip(fields, rest[len(names) :], strict=True))
        other = LayerState(
            **{**state.tensors(), **changed},
            read_at_most=state.read_at_most,
        )
        w, last = call(layer, given, (more, other))
        if name == "mlstm":
            return y, z, w
        return y, z, w, *(getattr(s, k) for s in (after, last) for k in fields)

    inputs = [x, more, *parameters, *between]
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    return torch.autograd.gradcheck(both, inputs, fast_mode=fast)


@pytest.mark.parametrize("name", LAYER_CASES)
def test_gradients(name):
    assert derivative(name, fast=True)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYER_CASES)
def test_gradients_entry_by_entry(name):
    assert derivative(name, fast=False)


def test_every_parameter_is_used():
    for name in LAYER_CASES:
        layer = make_layer(name)
        layer(hidden(2, T))[0].square().sum().backward()
        for key, p in layer.named_parameters():
            assert p.grad is not None and p.grad.abs().sum() > 0, (name, key)


# Newton-Schulz makes singular values of 1 of those that are small, and so of
# what rounding to half precision leaves in them: 10 % of y at these sizes.
HALF = [name for name in LAYER_CASES if name != "lact-muon"]


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_in_half_precision(name, how):
    """At once, and token by token with a state whose sums are fp32."""
    layer, x = make_layer(name), hidden(2, 30)
    if how == "bfloat16":
        layer, x = layer.bfloat16(), x.bfloat16()
    want, _ = copy.deepcopy(layer).float()(x.float())
    dtypes = {k: p.dtype for k, p in layer.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y, state = layer(x)
        with torch.no_grad():
            first, running = layer(x[:, :20])
            rest = [layer(x[:, t : t + 1], running)[0] for t in range(20, 30)]
    if how == "bfloat16":
        assert y.dtype == first.dtype == rest[0].dtype == torch.bfloat16
    assert relative_error(y, want) < 0.04
    assert relative_error(torch.cat([first, *rest], 1), want) < 0.04
    for summed in (state.S, state.m, running.S, running.m):
        assert summed is None or summed.dtype == torch.float32
    y.float().square().sum().backward()
    for key, p in layer.named_parameters():
        assert p.grad.isfinite().all() and p.grad.dtype == dtypes[key], key
    assert dtypes == {k: p.dtype for k, p in layer.state_dict().items()}


COMPILED = ["gated-deltanet", "mlstm", "softmax-options"]
SELDOM_COMPILED = [
    pytest.param(name, marks=pytest.mark.full)
    for name in LAYER_CASES
    if name not in COMPILED
]


@pytest.mark.parametrize("name", COMPILED + SELDOM_COMPILED)
def test_compiled(name):
    """Training, then steps in place: one graph each, and the same numbers."""
    torch._dynamo.reset()
    layer = make_layer(name, torch.float64)
    x = hidden(2, 24, dtype=torch.float64)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for call in (layer, run):
        y, _ = call(x)
        gradients = torch.autograd.grad(
            y.square().sum(), [*layer.parameters()]
        )
        results.append((y, *gradients))
    torch.testing.assert_close(*results)
    with torch.no_grad():
        if isinstance(layer, SoftmaxAttention):
            state = layer.preallocate_state(2, 32)
            layer(x, state)
        else:
            _, state = layer(x)
        other = state.clone()
        places = {k: t.data_ptr() for k, t in other.tensors().items()}
        for n in range(3):
            new = hidden(2, 1, seed=n, dtype=torch.float64)
            want, _ = layer(new, state)
            y, after = run(new, other)
            assert_agree(y, want)
        assert after is other
        assert_same_state(other, state)
    assert places == {k: t.data_ptr() for k, t in other.tensors().items()}
