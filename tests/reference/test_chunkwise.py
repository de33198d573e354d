"""The chunk form against the loop, and the inverse of a chunk's matrix."""

import pytest
import torch
import torch.nn.functional as F
from support.inputs import GATES, RULES, member_inputs

from fastweights.checks import relative_error
from fastweights.reference import chunkwise, steps


@pytest.mark.parametrize("g", [-70.0, -100.0, -740.0, -1e6])
def test_a_decay_is_right_until_it_is_zero(g):
    """fp64's smallest number is e^-744."""
    q, k, v, state = torch.ones(4, 1, 1, 1, 1, dtype=torch.float64)
    gate = torch.full_like(q, g)
    _, last, *_ = chunkwise.chunkwise_forward(
        q, k, 0 * v, gate, None, scale=1.0, initial_state=state, chunk_size=16
    )
    torch.testing.assert_close(last, gate.exp(), rtol=1e-10, atol=0)


INVERSES = pytest.mark.parametrize(
    "inverse", [chunkwise.unit_lower_inverse, chunkwise.inverse_by_blocks]
)


@INVERSES
@pytest.mark.parametrize("size", [1, 2, 5, 16, 31, 64])
def test_unit_lower_inverse_is_the_inverse(size, inverse):
    torch.manual_seed(0)
    M = torch.randn(3, size, size, dtype=torch.float64).tril(-1) / size**0.5
    P = inverse(M)
    eye = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(P, torch.linalg.inv(eye + M))
    assert P.triu(1).eq(0).all()
    assert P.diagonal(dim1=-2, dim2=-1).eq(1).all()


@INVERSES
def test_unit_lower_inverse_bears_keys_that_are_nearly_parallel(inverse):
    torch.manual_seed(0)
    k = F.normalize(torch.randn(64, 32) + 3 * torch.randn(32), dim=-1)
    M = 2 * (k @ k.T).tril(-1)
    assert (k @ k.T).mean() > 0.85
    P = inverse(M)
    ref = torch.linalg.inv(torch.eye(64).double() + M.double())
    assert (P - ref).norm() / ref.norm() < 1e-5


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", GATES[2:])
@pytest.mark.parametrize("chunk_size", [1, 8, 16, 24, 64])
def test_chunkwise_is_the_loop(gate, rule, chunk_size):
    x = member_inputs(gate, rule, B=2, T=37, H=2, HV=2)
    if gate == "head":
        x["g"] = x["g"][..., None]
    state = x.pop("initial_state")
    o, S = chunkwise.chunkwise(
        **x, scale=0.5, initial_state=state, chunk_size=chunk_size
    )

    def step(S, *at_t):
        return steps.recurrence(S, **dict(zip(x, at_t, strict=True)))

    ref_o, ref_S = steps.scan(step, state, *x.values())
    torch.testing.assert_close((o, S), (0.5 * ref_o, ref_S))


@pytest.mark.parametrize("strength", [-10.0, -20.0])
@pytest.mark.parametrize("gate", GATES[2:])
def test_strong_gates_keep_their_gradient_in_fp32(gate, strength):
    x = member_inputs(gate, "delta", T=40, H=2, HV=2, strength=strength)
    if gate == "head":
        x["g"] = x["g"][..., None]
    grads = []
    for dtype in (torch.float32, torch.float64):
        y = {name: t.to(dtype) for name, t in x.items()}
        y["g"].requires_grad_()
        o, S = chunkwise.chunkwise(**y, scale=1.0, chunk_size=16)
        (o.sum() + S.sum()).backward()
        grads.append(y["g"].grad)
    for part in (slice(0, 16), slice(16, 32), slice(32, 40)):
        assert relative_error(grads[0][:, part], grads[1][:, part]) < 1e-4
