"""Networks as fast weights: by chunks as token by token, and in pieces."""

import copy

import pytest
import torch
from support.deep_cases import DEEP_CASES, WEIGHTS, B, C, H, K, V, deep_inputs
from support.graphs import in_one_graph
from support.pairwise import all_but

import fastweights as fw
from fastweights.checks import relative_error
from fastweights.deep import mesa
from fastweights.deep.dual_form import gelu_slope
from fastweights.deep.networks import gelu, residual
from fastweights.deep.newton_schulz import LACT, MUON, newton_schulz
from fastweights.deep.optimisers import projected, stale, summed
from fastweights.deep.titans import pairwise_products
from fastweights.fast_weights import (
    decayed_sgd,
    inner_product,
    linear_model,
    online_learner,
    sgd,
    squared_error,
)
from fastweights.layers import LaCT
from fastweights.reference import steps

T = 3 * C + 2
DOUBLE = {"dtype": torch.float64}


def flat(params):
    """All weights of a state that holds what was learned, per head."""
    leaves = torch.utils._pytree.tree_leaves(params)
    return torch.cat([x.flatten(2) for x in leaves], -1)


@pytest.mark.parametrize("name", DEEP_CASES)
@pytest.mark.parametrize("length", [1, C, T])
def test_chunked_as_token_by_token(name, length):
    case, x = DEEP_CASES[name], deep_inputs(name, length)
    found, _ = case.chunked(x)
    want, _ = case.learner(x)
    assert found.shape == want.shape
    assert relative_error(found, want) < 1e-12


@pytest.mark.parametrize("name", DEEP_CASES)
def test_gradients_are_those_of_the_loop(name):
    """Of every input, the weights at the start among them."""
    case, results = DEEP_CASES[name], []
    for run in (case.chunked, case.learner):
        x = {k: t.requires_grad_() for k, t in deep_inputs(name, T).items()}
        o = run(x)[0]
        weight = torch.linspace(1, 2, o.numel(), **DOUBLE).reshape(o.shape)
        results.append(
            torch.autograd.grad((weight * o.sin()).sum(), x.values())
        )
    for key, found, want in zip(x, *results, strict=True):
        assert want.abs().max() > 0, key
        assert relative_error(found, want) < 1e-9, key


def test_the_state_of_a_complete_chunk_is_what_the_weights_have_learned():
    for name in ("ttt-mlp", "titans-mlp", "lact"):
        case, x = DEEP_CASES[name], deep_inputs(name, 2 * C)
        _, state = case.chunked(x)
        _, (params, memory) = case.learner(x)
        first = [x[key] for key in ("W1", "b1", "W2", "b2", "W3") if key in x]
        first = torch.cat([w.flatten(1) for w in first], -1)
        learned = flat(params) - first
        if name == "lact":
            P = learned.shape[-1]
            parts = learned, -flat(memory), 0 * state[..., 2 * P :]
            assert relative_error(state, torch.cat(parts, -1)) < 1e-12
        else:
            rest = [0 * learned]  # the sum of a chunk that begins
            if name == "titans-mlp":
                rest = [-flat(memory), learned]
            want = torch.stack([learned, *rest], 2)
            assert relative_error(state, want) < 1e-12


def cut(x, rows, start, stop):
    """Rows and tokens of the inputs; weights stay whole."""
    return {
        key: t if key in WEIGHTS else t[rows, start:stop]
        for key, t in x.items()
    }


def whole(name):
    return not name.startswith("mesa")


@pytest.mark.parametrize("name", [*filter(whole, DEEP_CASES)])
def test_rows_at_different_places(name):
    """Pieces of other lengths per row: as each row alone, all at once.

    Between pieces rows stand at different places of their chunks, also right
    behind one; one gets no token for a while.
    """
    case, x = DEEP_CASES[name], deep_inputs(name, T)
    want, last = case.chunked(x)
    pieces = [(7, 2), (1, 0), (1, 1), (1, 1), (5, 6), (2, 7)]
    assert [sum(p) for p in zip(*pieces, strict=True)] == [T, T]
    position, state = torch.zeros(B, dtype=torch.int64), None
    outputs = [[], []]
    for piece in pieces:
        lengths = torch.tensor(piece)
        # The row's next tokens; past its length stands what must not count.
        at = position[:, None] + torch.arange(max(piece))
        ends = at >= (position + lengths)[:, None]
        given = {
            key: t
            if key in WEIGHTS
            else t[torch.arange(B)[:, None], at.clamp(max=T - 1)].where(
                ~ends.reshape(*ends.shape, *[1] * (t.dim() - 2)), 3.0
            )
            for key, t in x.items()
        }
        o, state = case.chunked(
            given, initial_state=state, position=position, lengths=lengths
        )
        for row, n in enumerate(piece):
            outputs[row].append(o[row, :n])
        position = position + lengths
    found = torch.stack([torch.cat(row) for row in outputs])
    assert relative_error(found, want) < 1e-11
    assert relative_error(state, last) < 1e-11


def test_mesa_in_pieces_and_packed():
    case, x = DEEP_CASES["mesa"], deep_inputs("mesa", T)
    want, last = case.chunked(x)
    state, outputs = None, []
    for start, stop in ((0, 7), (7, 8), (8, T)):
        part = cut(x, slice(None), start, stop)
        o, state = case.chunked(part, initial_state=state)
        outputs.append(o)
    assert relative_error(torch.cat(outputs, 1), want) < 1e-12
    assert relative_error(state, last) < 1e-12
    packed = {
        key: t if key in WEIGHTS else t.flatten(0, 1)[None]
        for key, t in x.items()
    }
    o, state = case.chunked(packed, cu_seqlens=torch.tensor([0, T, 2 * T]))
    assert relative_error(o[0].unflatten(0, (B, T)), want) < 1e-12
    assert relative_error(state, last) < 1e-12


COMPILED = ["ttt-linear"]


@pytest.mark.parametrize(
    "name",
    [
        n if n in COMPILED else pytest.param(n, marks=pytest.mark.full)
        for n in DEEP_CASES
    ],
)
def test_compiled_in_one_graph(name):
    """Forward and backward, with a last chunk that is shorter."""
    case, results = DEEP_CASES[name], []
    with in_one_graph(case.chunked) as run:
        for call in (case.chunked, run):
            x = {
                k: t.requires_grad_()
                for k, t in deep_inputs(name, C + 2).items()
            }
            o, state = call(x)
            slopes = torch.autograd.grad(o.square().sum(), x.values())
            results.append((o, state, *slopes))
    torch.testing.assert_close(*results)


# The parts.


def test_a_momentum_of_zero_and_a_decay_of_everything():
    a = torch.tensor([0.5, 0.0, 2.0, 3.0], **DOUBLE).requires_grad_()
    found = pairwise_products(a)
    want = torch.zeros(4, 4, **DOUBLE)
    for t in range(4):
        for s in range(t + 1):
            want[t, s] = a[s + 1 : t + 1].detach().prod()
    assert found.equal(want)
    assert torch.autograd.gradcheck(pairwise_products, a)
    case, x = DEEP_CASES["titans-mlp"], deep_inputs("titans-mlp", T)
    x["momentum"][:, 3], x["g"][:, 6] = 0.0, -torch.inf
    assert relative_error(case.chunked(x)[0], case.learner(x)[0]) < 1e-12


@pytest.mark.parametrize(
    ("coefficients", "low", "high"), [(LACT, 0.96, 1.05), (MUON, 0.65, 1.25)]
)
@pytest.mark.parametrize("shape", [(16, 24), (24, 16)])
def test_singular_values_land_near_one(coefficients, low, high, shape):
    torch.manual_seed(0)
    G = torch.randn(3, *shape, **DOUBLE)
    found = newton_schulz(G, coefficients)
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    between = U.mT @ found @ Vh.mT
    values = between.diagonal(dim1=-2, dim2=-1)
    assert low < values.min() and values.max() < high
    rest = between - torch.diag_embed(values)
    assert rest.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 1e-30),
        (torch.float32, 1e-12),
        (torch.float32, 1e18),
        (torch.float32, 1e30),
        (torch.bfloat16, 1e-30),
        (torch.bfloat16, 1e30),
        (torch.float16, 1e-5),
        (torch.float16, 10.0),
        (torch.float16, 3e4),
    ],
    ids=str,
)
def test_matrices_of_any_size_are_orthogonalised(dtype, size):
    """The norm is not taken in their dtype: of 64 x 2048 signs it is 131072,
    squared, where fp16 ends at 65504."""
    torch.manual_seed(0)
    wide = torch.randn(64, 2048).sign() * min(size, 1.0)
    for G in (torch.randn(64, 128).clamp(-2, 2) * size, wide):
        found = newton_schulz(G.to(dtype))
        values = torch.linalg.svdvals(found.double())
        assert found.dtype == dtype
        assert values.min() > 0.93 and values.max() < 1.07


@pytest.mark.parametrize(
    ("G", "options", "message"),
    [
        (torch.ones(3, 4, dtype=torch.int64), {}, "G: got torch.int64, need"),
        (3, {}, "G: got int, need a Tensor"),
        (torch.ones(4), {}, r"G: got shape \[4\], need \[..., K, N\]"),
        (
            torch.ones(3, 4),
            {"coefficients": ((1, 2),)},
            r"coefficients: got \(\(1, 2\),\), need \(a, b, c\)",
        ),
        (torch.ones(3, 4), {"eps": -1.0}, "eps: got -1.0, need >= 0"),
    ],
)
def test_what_newton_schulz_refuses(G, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        newton_schulz(G, **options)


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float16, 5e-3), (torch.bfloat16, 3.3e-2)],
    ids=str,
)
@pytest.mark.parametrize("width", all_but([64, 256], [64, 128, 256, 512]))
def test_lact_in_half_precision(width, dtype, most):
    """After a step by rates of 1e-3, whose errors are below fp16's least."""
    torch.manual_seed(0)
    layer, x = LaCT(width, 1, chunk_size=256), torch.randn(1, 260, width)
    exact = copy.deepcopy(layer).double()
    with torch.no_grad():
        want = exact(x.double())[0][:, 256:]
        with torch.autocast("cpu", dtype):
            found = layer(x)[0][:, 256:]
        half = layer.to(dtype)(x.to(dtype))[0][:, 256:]
    assert relative_error(found, want) < most
    assert relative_error(half, want) < most


def test_nothing_to_orthogonalise():
    """A chunk without a gradient: no step, and no gradients that are NaN."""
    G = torch.zeros(2, 3, 4, **DOUBLE).requires_grad_()
    newton_schulz(G).sum().backward()
    assert newton_schulz(G).eq(0).all() and G.grad.isfinite().all()


def test_gelu_slope_is_its_derivative():
    z = torch.linspace(-4, 4, 33, **DOUBLE).requires_grad_()
    (want,) = torch.autograd.grad(gelu(z).sum(), z)
    torch.testing.assert_close(gelu_slope(z), want, rtol=1e-12, atol=1e-13)


def test_mesa_keeps_rows_that_are_solved():
    """Far more steps than the equations have unknowns, also in fp32."""
    x = {k: t.float() for k, t in deep_inputs("mesa", T).items()}
    few, _ = mesa(*x.values(), solver_steps=10)
    many, _ = mesa(*x.values(), solver_steps=60)
    assert relative_error(many, few) < 1e-5
    x["q"][:, 3] = 0
    o, _ = mesa(*x.values(), solver_steps=10)
    assert o[:, 3].eq(0).all() and o.isfinite().all()


# Chunks and the family: chunk 1 is what it was, an inner product needs none.


def family(loss, optimiser, *rates):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, T, H, K, **DOUBLE)
    k = k / k.norm(dim=-1, keepdim=True)
    rate, g = torch.rand(B, T, H, **DOUBLE), -torch.rand(B, T, H, **DOUBLE)
    given = {"rate": rate, "g": g}
    S0 = torch.randn(B, H, K, K, **DOUBLE)
    step = online_learner(linear_model, loss, optimiser)
    rates = [given[name] for name in rates]
    o, (S, memory) = steps.scan(step, (S0, None), q, k, v, *rates)
    x = {"q": q, "k": k, "v": v, "initial_state": S0, **given}
    return o, S, memory, x


@pytest.mark.parametrize("wrap", [stale, summed])
def test_a_chunk_of_one_is_the_delta_rule(wrap):
    if wrap is summed:
        one = torch.ones((), **DOUBLE)

        def optimiser(params, gradient, memory):
            return sgd(params, gradient, memory, one)
    else:
        optimiser = sgd
    o, S, memory, x = family(squared_error, wrap(optimiser, 1), "rate")
    want = fw.deltanet(
        x["q"],
        x["k"],
        x["v"],
        x["rate"],
        scale=1.0,
        initial_state=x["initial_state"],
    )
    torch.testing.assert_close((o, S), want)
    assert memory is None
    other, *_ = family(squared_error, wrap(optimiser, 2), "rate")
    assert relative_error(other, want[0]) > 0.01


@pytest.mark.parametrize("size", [1, 4])
def test_chunks_do_not_matter_to_an_inner_product(size):
    o, S, _, x = family(inner_product, stale(decayed_sgd, size), "rate", "g")
    beta = x["rate"][..., None]
    want = fw.linear_recurrence(
        x["q"],
        x["k"],
        beta * x["v"],
        x["g"],
        scale=1.0,
        initial_state=x["initial_state"],
    )
    torch.testing.assert_close((o, S), want)


def test_a_base_is_where_all_gradients_are_taken():
    """At zero weights, the delta rule is linear attention."""
    zero = torch.zeros(B, H, K, K, **DOUBLE)
    o, S, _, x = family(squared_error, stale(sgd, 3, base=zero), "rate")
    beta = x["rate"][..., None]
    want = fw.linear_attention(
        x["q"],
        x["k"],
        beta * x["v"],
        scale=1.0,
        initial_state=x["initial_state"],
    )
    torch.testing.assert_close((o, S), want)


def test_read_before_is_the_output_of_the_token_before():
    torch.manual_seed(0)
    q = torch.randn(1, 1, 1, K, **DOUBLE).expand(B, T, H, K)
    k, v = torch.randn(2, B, T, H, K, **DOUBLE)
    rate = torch.rand(B, T, H, **DOUBLE)
    start = torch.zeros(B, H, K, K, **DOUBLE), None
    found = {}
    for read in ("before", "after"):
        step = online_learner(
            residual(linear_model), squared_error, sgd, read=read
        )
        found[read], _ = steps.scan(step, start, q, k, v, rate)
    assert found["before"][:, 1:].equal(found["after"][:, :-1])
    assert found["before"][:, 0].equal(q[:, 0])
    with pytest.raises(ValueError, match="read: got 'now', need 'after'"):
        online_learner(linear_model, squared_error, sgd, read="now")


def test_weights_are_projected_after_every_step():
    def unit(S):
        return S / S.norm()

    _, S, _, _ = family(squared_error, projected(sgd, unit), "rate")
    torch.testing.assert_close(S.norm(), torch.ones((), **DOUBLE))
    with pytest.raises(ValueError, match="every: got 'row', need 'token'"):
        summed(sgd, 2, every="row")


def test_mlstm_and_mamba_are_learners_too():
    """Rates are e^i and the step size; the normaliser is one more value."""
    torch.manual_seed(0)
    q, k = torch.randn(2, B, T, H, K, **DOUBLE)
    v = torch.randn(B, T, H, V, **DOUBLE)
    i, f = torch.randn(2, B, T, H, **DOUBLE)
    g = torch.nn.functional.logsigmoid(f)
    ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    step = online_learner(linear_model, inner_product, decayed_sgd)
    start = torch.zeros(B, H, K, V + 1, **DOUBLE), None
    o, _ = steps.scan(step, start, q, k, ones, i.exp(), g)
    o = o[..., :V] / o[..., V:].abs().clamp_min(1.0)
    m = torch.full((B, H), -torch.inf, **DOUBLE)
    want, _ = steps.scan(steps.mlstm, (start[0], m), q, k, v, g, i)
    torch.testing.assert_close(o, want)

    D, N = 3, 4
    x, dt = torch.randn(B, T, D, **DOUBLE), torch.rand(B, T, D, **DOUBLE)
    A = -torch.rand(D, N, **DOUBLE)
    b, c = torch.randn(2, B, T, 1, N, **DOUBLE).expand(2, B, T, D, N)
    start = torch.zeros(B, D, N, 1, **DOUBLE), None
    o, _ = steps.scan(step, start, c, b, x[..., None], dt, dt[..., None] * A)
    want, _ = steps.scan(
        lambda h, x, dt, b, c: steps.selective(h, x, dt, A, b[:, 0], c[:, 0]),
        torch.zeros(B, D, N, **DOUBLE),
        x,
        dt,
        b,
        c,
    )
    torch.testing.assert_close(o[..., 0], want)
