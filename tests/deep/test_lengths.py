"""Lengths: of pieces that gradients cross, and that one graph has to take."""

import itertools

import pytest
import torch
from support.deep_cases import (
    DEEP_CASES,
    B,
    C,
    H,
    K,
    deep_inputs,
    network_layers,
)
from support.graphs import in_one_graph
from support.layer_cases import LAYER_CASES, contents, hidden, make_layer
from support.pairwise import all_but
from torch.utils.checkpoint import checkpoint

from fastweights import deep
from fastweights.checks import relative_error
from fastweights.layers import lact, titans, ttt
from fastweights.layers.common import unpacked_rows
from fastweights.ops.common import any_length

DOUBLE = {"dtype": torch.float64}
# The chunks, segments and windows of layer_cases have 3 to 7 tokens, or 20.
PIECES = [(4, 3), (6, 6), (5, 2, 20), (20, 1, 21), (1, 1, 12)]


def slopes(layer, outputs, x):
    return torch.autograd.grad(
        torch.cat(outputs, 1).sin().sum(), [x, *layer.parameters()]
    )


@pytest.mark.parametrize("name", LAYER_CASES)
def test_gradients_cross_the_state_between_pieces(name):
    """Truncated backpropagation: of two or three calls as of one."""
    layer = make_layer(name, torch.float64)
    for pieces in PIECES:
        x = hidden(2, sum(pieces), **DOUBLE).requires_grad_()
        want = slopes(layer, [layer(x)[0]], x)
        state, outputs = None, []
        for part in x.split(list(pieces), 1):
            y, state = layer(part, state)
            outputs.append(y)
        found = slopes(layer, outputs, x)
        for a, b in zip(found, want, strict=True):
            assert relative_error(a, b) < 1e-8, pieces


@pytest.mark.parametrize("name", LAYER_CASES)
@pytest.mark.parametrize("offsets", [None, [0, 1, 3, 3]])
def test_every_parameter_has_a_gradient_at_any_length(name, offsets):
    """DistributedDataParallel waits for all of them: 0, not None."""
    for length in (1, 2, 3) if offsets is None else (3,):
        layer = make_layer(name)
        cu_seqlens = offsets and torch.tensor(offsets)
        y, _ = layer(hidden(1, length), cu_seqlens=cu_seqlens)
        y.square().sum().backward()
        missing = [k for k, p in layer.named_parameters() if p.grad is None]
        assert not missing, length


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", LAYER_CASES)
def test_checkpointed(name, reentrant):
    """What a backward saves it may read once."""
    layer = make_layer(name, torch.float64)
    x = hidden(2, 9, **DOUBLE).requires_grad_()
    want = slopes(layer, [layer(x)[0]], x)
    y = checkpoint(lambda x: layer(x)[0], x, use_reentrant=reentrant)
    y.sin().sum().backward()
    found = [x.grad, *(p.grad for p in layer.parameters())]
    torch.testing.assert_close(found, [*want])


# Without a compiler.

OPEN = [name for name in DEEP_CASES if name != "mesa"]


@pytest.mark.parametrize("name", OPEN)
def test_as_one_operator(name, monkeypatch):
    """What a graph for any length calls, with rows of different lengths."""
    case = DEEP_CASES[name]
    _, state = case.chunked(deep_inputs(name, 3, seed=1))
    begun = {
        "initial_state": state.requires_grad_(),
        "position": torch.tensor([3, 3]),
        "lengths": torch.tensor([C + 3, 2]),
    }
    for options in ({}, begun):
        results = []
        for value in (False, True):
            monkeypatch.setattr(any_length, "is_dynamic", lambda _, a=value: a)
            x = {
                k: t.requires_grad_()
                for k, t in deep_inputs(name, C + 3).items()
            }
            o, after = _once(case, x, options, monkeypatch)
            loss = o.sin().sum() + after.sin().sum()
            given = [*x.values(), state] if options else [*x.values()]
            results.append((o, after, *torch.autograd.grad(loss, given)))
        torch.testing.assert_close(*results)


def _once(case, x, options, monkeypatch):
    """The operator's own call of the function is not another operator."""
    call = any_length.call_as_operator

    def closed(*arguments, **options):
        monkeypatch.setattr(any_length, "is_dynamic", lambda _: False)
        return call(*arguments, **options)

    monkeypatch.setattr(any_length, "call_as_operator", closed)
    found = case.chunked(x, **options)
    monkeypatch.setattr(any_length, "call_as_operator", call)
    return found


def test_a_gradients_gradient_of_the_operator_is_refused():
    x = {
        k: t.requires_grad_() for k, t in deep_inputs("ttt-linear", C).items()
    }
    given = [x[n] for n in ("q", "k", "v", "rate")]
    given += [[(x["W1"], x["b1"])], (x["gamma"], x["bias"]), x["step_scale"]]
    shapes = x["v"].shape, [B, H, 2, K * K + K]
    results = [(shape, torch.float64) for shape in shapes]
    o, _ = any_length.call_as_operator(deep.ttt, results, *given)
    message = "ttt: got a gradient of its gradient"
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.grad(o.sum(), x["W1"], create_graph=True)


# By a compiler.


def test_a_chunk_size_that_a_compiler_leaves_open():
    """It is a constant of the operator, and of its graph."""
    torch._dynamo.reset()

    def run(x, size):
        names = ("q", "k", "v", "rate", "momentum", "g")
        tokens = (x[name] for name in names)
        return deep.titans(*tokens, network_layers(x), chunk_size=size)[0]

    compiled = torch.compile(
        run, backend="eager", fullgraph=True, dynamic=True
    )
    for T, size in ((9, 4), (11, 4), (12, 5)):
        x = deep_inputs("titans-linear", T)
        torch.testing.assert_close(compiled(x, size), run(x, size))


KINDS = ["lact", "ttt-linear", "ttt-mlp", "titans", "mesanet", "softmax"]
KINDS += ["gated-deltanet"]
OFTEN = [("lact", None), ("ttt-linear", True)]


@pytest.mark.parametrize(
    "name, dynamic",
    all_but(OFTEN, itertools.product(KINDS, (None, True))),
)
def test_two_graphs_for_all_lengths(name, dynamic):
    """The first is of its length, the second of any; and all numbers."""
    layer = make_layer(name, torch.float64)
    with in_one_graph(layer, most=2, dynamic=dynamic) as run:
        for length in (5, 9, 2, 3, 4, 6, 7, 8, 12, 20, 41):
            results = []
            for call in (layer, run):
                x = hidden(2, length, **DOUBLE).requires_grad_()
                y = call(x)[0]
                results.append((y, *slopes(layer, [y], x)))
            torch.testing.assert_close(*results)


UNEVEN = [0, 1, 1, 40, 43, 44, 45, 46, 47, 49, 50]


@pytest.mark.parametrize(
    "name", [x for x in LAYER_CASES if x.startswith(("lact", "titans", "ttt"))]
)
@pytest.mark.parametrize("how", ["learned", "in place", "pool"])
def test_documents_of_uneven_length(name, how, monkeypatch):
    """Each is itself alone, and none is filled up to the longest."""
    layer = make_layer(name, torch.float64)
    x, cu_seqlens = hidden(1, 52, dtype=torch.float64), torch.tensor(UNEVEN)
    spans = [*itertools.pairwise(UNEVEN)]
    filled = []

    class Counted(unpacked_rows.UnpackedRows):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            if self.cu_seqlens is not None:
                filled.append(len(self.num_tokens) * self.longest)

    for module in (lact, titans, ttt):
        monkeypatch.setattr(module, "UnpackedRows", Counted)
    with torch.set_grad_enabled(how == "learned"):
        _, before = layer(hidden(len(spans), 3, seed=1, dtype=torch.float64))
        each = [before.select(torch.tensor([n])) for n in range(len(spans))]
        state = before.clone()
        if how == "pool":
            state = state.as_pool(torch.arange(len(spans)), 3)
        y, after = layer(x, state, cu_seqlens)
        assert how == "learned" or after is state
        assert sum(filled) <= 4 * UNEVEN[-1]  # some have two kinds of rows
        assert (y[:, UNEVEN[-1] :] == 0).all()
        for n, (a, b) in enumerate(spans):
            if a == b:
                want = contents(each[n])
            else:
                alone, own = layer(x[:, a:b], each[n])
                assert relative_error(y[:, a:b], alone) < 1e-12
                want = contents(own)
            for key, value in contents(after).items():
                assert relative_error(value[n : n + 1], want[key]) < 1e-12
