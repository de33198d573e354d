"""The quadratic forms against PyTorch's attention, loops and the steps."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.inputs import assert_same, explicit, member_inputs, results

from fastweights.checks import relative_error
from fastweights.reference import parallel


def qkv(Tq=9, T=9, B=2, H=3, K=4, V=5, seed=0):
    torch.manual_seed(seed)
    draw = torch.randn(B, Tq + T, H, K, dtype=torch.float64)
    v = torch.randn(B, T, H, V, dtype=torch.float64)
    return {"q": draw[:, :Tq], "k": draw[:, Tq:], "v": v}


def torch_attention(q, k, v, *, causal=True, scale=None):
    """PyTorch's own, with the mask written out."""
    Tq, T = q.shape[1], k.shape[1]
    mask = [
        [j - i <= T - Tq or not causal for j in range(T)] for i in range(Tq)
    ]
    heads = (x.movedim(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(
        *heads, attn_mask=torch.tensor(mask), scale=scale
    )
    return o.movedim(1, 2)


def with_state(function):
    """A form without a state, in the shape that ``results`` takes."""
    return lambda **x: (function(**x), torch.zeros(()))


LENGTHS = {"square": (9, 9), "one-query": (1, 9), "few-queries": (4, 9)}


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_softmax_attention_is_pytorchs(lengths, causal, scale):
    x = qkv(*LENGTHS[lengths])
    ref = results(with_state(torch_attention), x, causal=causal, scale=scale)
    o = results(
        with_state(parallel.softmax_attention), x, causal=causal, scale=scale
    )
    assert_same(o, ref, 1e-13)


@pytest.mark.parametrize("block_size", [1, 4, 9, 64])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_online_softmax_is_softmax(lengths, causal, block_size):
    x = qkv(*LENGTHS[lengths])
    ref = results(with_state(parallel.softmax_attention), x, causal=causal)
    o = results(
        with_state(parallel.softmax_attention_online),
        x,
        causal=causal,
        block_size=block_size,
    )
    assert_same(o, ref, 1e-13)


@pytest.mark.parametrize("scale", [0.3, 1e4, -1e4])
def test_online_softmax_survives_extreme_scores(scale):
    x = {name: t.float() for name, t in qkv(12, 20).items()}
    assert torch.einsum("bihk,bjhk", x["q"], x["k"]).mul(
        scale
    ).exp().isinf().any() == (abs(scale) > 1)
    o = parallel.softmax_attention_online(**x, scale=scale, block_size=3)
    wide = {name: t.double() for name, t in x.items()}
    ref = torch_attention(**wide, scale=scale)
    # A score of 1e4 is known to 1e-3 in fp32, and so is its exponential.
    torch.testing.assert_close(o.double(), ref, rtol=0, atol=1e-2)
    assert o.isfinite().all()


def test_queries_beyond_the_keys_are_fine_without_a_mask():
    x = qkv(11, 5)
    for function in (
        parallel.softmax_attention,
        parallel.softmax_attention_online,
    ):
        o = function(**x, causal=False)
        torch.testing.assert_close(o, torch_attention(**x, causal=False))
        with pytest.raises(ValueError, match=r"num_queries: got 11.* 5"):
            function(**x, causal=True)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_bidirectional_linear_attention_sums_over_all_keys(scale):
    q, k, v = qkv(6, 9).values()
    ref = torch.zeros(2, 6, 3, 5, dtype=torch.float64)
    for i in range(6):
        for j in range(9):
            similarity = (q[:, i] * k[:, j]).sum(-1, keepdim=True)
            ref[:, i] += scale * similarity * v[:, j]
    o = parallel.linear_attention_bidirectional(q, k, v, scale=scale)
    torch.testing.assert_close(o, ref)


@pytest.mark.parametrize("strength", ["mixed", 0.0, -1e-3, -5.0, -20.0])
@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_parallel_is_the_recurrence(gate, strength):
    x = member_inputs(
        gate, "additive", B=2, T=33, H=2, HV=2, strength=strength
    )
    del x["initial_state"]

    def form(g=None, **x):
        if g is not None and g.dim() == 3:
            g = g[..., None]
        return parallel.parallel(**x, g=g)

    ref = results(explicit, x, use="o")
    o = results(lambda **x: (form(**x), explicit(**x)[1]), x, use="o")
    assert_same(o, ref, 1e-11)


def test_parallel_takes_a_scale():
    x = qkv()
    torch.testing.assert_close(
        parallel.parallel(**x, scale=0.3),
        explicit(**x, scale=0.3)[0],
    )


@pytest.mark.parametrize("DG", [1, 3])
def test_decays_are_exponentials_of_differences(DG):
    torch.manual_seed(0)
    G = -torch.rand(2, 5, DG, dtype=torch.float64).cumsum(1)
    D = parallel.decays(G)
    for i in range(5):
        for j in range(5):
            for d in range(DG):
                exponent = float(G[1, i, d] - G[1, j, d])
                entry = math.exp(exponent) if j <= i else 0.0
                assert D[1, i, j, d].item() == pytest.approx(entry, rel=1e-14)


def test_decays_take_no_gradient_through_their_diagonal():
    # Within a chunk of -20 a gate moves the others by e^-20 alone: fp32
    # must keep that beside the ones on the diagonal.
    G = (-20.0 * torch.arange(8.0)).requires_grad_()
    parallel.decays(G[:, None]).sum().backward()
    wide = G.detach().double().requires_grad_()
    parallel.decays(wide[:, None]).sum().backward()
    assert relative_error(G.grad, wide.grad) < 1e-5


def test_causal_mask_ends_where_the_last_query_reads_everything():
    mask = parallel.causal_mask(2, 4)
    assert mask.tolist() == [[True, True, True, False], [True] * 4]
