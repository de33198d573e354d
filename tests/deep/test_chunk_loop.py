"""Many chunks: as a few at a time, with less memory, compiled once."""

import pytest
import torch
from support.deep_cases import DEEP_CASES, WEIGHTS, B, C, H, deep_inputs
from support.graphs import in_one_graph
from torch._dynamo.testing import CompileCounterWithBackend

from fastweights import torch_internals
from fastweights.checks import relative_error
from fastweights.deep import chunk_loop
from fastweights.deep.chunk_loop import GROUP_SIZE, scan_chunks

WITH_CHUNKS = ["ttt-linear", "ttt-mlp", "titans-mlp"]
LONG = (2 * GROUP_SIZE + 3) * C + 2


def inputs(name, T):
    return {k: t.requires_grad_() for k, t in deep_inputs(name, T).items()}


def results(run, x, use="both"):
    """Outputs, the state, and the gradients of both, or of outputs only."""
    o, state = run(x)
    loss = o.sin().sum()
    if use == "both":
        loss = loss + state.cos().sum()
    return [o, state, *torch.autograd.grad(loss, x.values())]


@pytest.mark.parametrize("name", WITH_CHUNKS)
def test_computed_again_for_a_backward(name, monkeypatch):
    """To the digit, with a group that is not full; and from fewer tensors."""
    kept = []

    def pack(t):
        kept[-1] += t.numel()
        return t

    found = []
    for group in (GROUP_SIZE, LONG):
        monkeypatch.setattr(chunk_loop, "GROUP_SIZE", group)
        kept.append(0)
        x = inputs(name, LONG)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            found.append(results(DEEP_CASES[name].chunked, x))
    for again, once in zip(*found, strict=True):
        assert relative_error(again, once) < 1e-12
    assert kept[0] < 0.4 * kept[1]


@pytest.mark.parametrize("name", ["ttt-linear", "titans-linear"])
def test_goes_on_after_whole_chunks(name):
    """A call that ends with a chunk leaves no sum of an unfinished one."""
    case, x = DEEP_CASES[name], deep_inputs(name, 5 * C)
    want, last = case.chunked(x)
    cut, state, outputs = 3 * C, None, []
    for part in (slice(0, cut), slice(cut, 5 * C)):
        given = {k: t if k in WEIGHTS else t[:, part] for k, t in x.items()}
        if state is not None:
            # The sum of a chunk that is complete means nothing.
            state = state.clone()
            if name == "ttt-linear":
                state[:, :, 1] = 3.0
        o, state = case.chunked(given, initial_state=state)
        outputs.append(o)
    assert relative_error(torch.cat(outputs, 1), want) < 1e-12
    assert relative_error(state, last) < 1e-12


scanning = pytest.mark.skipif(
    torch_internals.SCAN is None,
    reason="this PyTorch has no scan that is right",
)


def scans(graph):
    calls = (n for n in graph.graph.nodes if n.op == "call_function")
    return [n for n in calls if n.target is torch.ops.higher_order.scan]


@scanning
@pytest.mark.parametrize(
    "name",
    [
        "ttt-linear",
        *(
            pytest.param(n, marks=pytest.mark.full)
            for n in ("ttt-mlp", "titans-mlp", "titans-norm")
        ),
    ],
)
def test_compiled_once_however_long(name):
    """One graph, with a step and not with steps; the same numbers."""
    sizes = []
    for length, use in ((4 * C, "o"), (9 * C, "both")):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        run = torch.compile(
            DEEP_CASES[name].chunked, fullgraph=True, backend=counter
        )
        found = results(run, inputs(name, length), use)
        want = results(DEEP_CASES[name].chunked, inputs(name, length), use)
        for a, b in zip(found, want, strict=True):
            assert relative_error(a, b) < 1e-11
        assert counter.frame_count == 1
        (graph,) = counter.graphs
        assert len(scans(graph)) == 1
        sizes.append(len(graph.graph.nodes))
    assert sizes[0] == sizes[1]
    torch._dynamo.reset()


@scanning
@pytest.mark.full
def test_one_graph_for_many_lengths():
    """The second is taken for any, as long as it leaves the same rest."""
    case = DEEP_CASES["ttt-linear"]
    with in_one_graph(case.chunked, most=2) as run:
        for chunks in (4, 5, 7, 11):
            x = inputs("ttt-linear", chunks * C + 2)
            found, want = results(run, x), results(case.chunked, x)
            for a, b in zip(found, want, strict=True):
                assert relative_error(a, b) < 1e-11


@scanning
@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_CHUNKS)
def test_compiled_once_on_gpu(name):
    """By Inductor, in fp32: kernels in place of a step's operations."""
    case = DEEP_CASES[name]
    x = {
        k: t.detach().float().cuda().requires_grad_()
        for k, t in deep_inputs(name, 20 * C + 2).items()
    }
    with in_one_graph(case.chunked, "inductor") as run:
        found, want = results(run, x), results(case.chunked, x)
    for a, b in zip(found, want, strict=True):
        assert relative_error(a, b) < 1e-4


def test_few_chunks_and_no_scan(monkeypatch):
    """Without a scan PyTorch writes down every step."""
    monkeypatch.setattr(torch_internals, "SCAN", None)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(
        DEEP_CASES["ttt-linear"].chunked, fullgraph=True, backend=counter
    )
    x = deep_inputs("ttt-linear", 4 * C)
    torch.testing.assert_close(run(x), DEEP_CASES["ttt-linear"].chunked(x))
    assert not scans(counter.graphs[0])
    torch._dynamo.reset()


def test_a_fold_is_a_loop():
    """A running sum over chunks, of two kinds of tokens."""
    x = torch.randn(B, 3 * C, H, 2, dtype=torch.float64)
    y = torch.randn(B, 3 * C, H, dtype=torch.float64)

    def step(state, x, y):
        total = state[0] + x.sum(2) * y.sum(2)[..., None]
        return [total], x + total[:, :, None]

    state, o = scan_chunks(step, [torch.zeros(B, H, 2).double()], [x, y], C)
    parts = x.unflatten(1, (3, C)), y.unflatten(1, (3, C))
    sums = parts[0].sum(2) * parts[1].sum(2)[..., None]
    totals = sums.cumsum(1)
    torch.testing.assert_close(state[0], totals[:, -1])
    want = parts[0] + totals[:, :, None]
    torch.testing.assert_close(o, want.flatten(1, 2))
