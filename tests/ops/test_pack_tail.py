"""Packs with tokens after the last sequence, filled up to a fixed length."""

import pytest
import torch
from support.layer_cases import LAYER_CASES, contents, hidden, make_layer
from support.operator_cases import EACH_OPERATOR, check_tail

from fastweights.checks import relative_error
from fastweights.layers import LayerState
from fastweights.models import next_tokens


@pytest.mark.usefixtures("empty_is_nan")
@pytest.mark.parametrize("offsets", [[0, 5, 5, 12], [0, 0], [0, 1]], ids=str)
@EACH_OPERATOR
def test_operators_leave_it_at_zero(name, offsets):
    check_tail(name, offsets, T=20, dtype=torch.float64)


@pytest.mark.parametrize("name", ["deltanet", "kda", "selective_scan"])
def test_loops_leave_it_at_zero(name):
    offsets = [0, 5, 5, 12]
    check_tail(name, offsets, T=20, dtype=torch.float64, backend="loop")


@pytest.mark.usefixtures("empty_is_nan")
@pytest.mark.parametrize("name", LAYER_CASES)
def test_layers_read_nothing_of_it(name):
    """Its outputs are finite, and change neither states nor gradients."""
    layer = make_layer(name, torch.float64)
    x, offsets = hidden(1, 20, dtype=torch.float64), torch.tensor([0, 5, 12])

    def run(x):
        layer.zero_grad()
        x = x.detach().requires_grad_()
        y, state = layer(x, cu_seqlens=offsets)
        y[:, :12].square().sum().backward()
        state = LayerState() if state is None else state
        grads = {key: p.grad for key, p in layer.named_parameters()}
        return y, contents(state), x.grad, grads

    y, states, dx, grads = run(x)
    assert y.isfinite().all()
    assert (dx[:, 12:] == 0).all()
    want, own_states, own_dx, own_grads = run(x[:, :12])
    assert relative_error(y[:, :12], want) < 1e-12
    assert relative_error(dx[:, :12], own_dx) < 1e-11
    for key in states:
        assert relative_error(states[key], own_states[key]) < 1e-12, key
    for key in {key for key in grads if grads[key] is not None}:
        assert relative_error(grads[key], own_grads[key]) < 1e-11, key


def test_it_has_no_targets():
    text = torch.arange(7)[None]
    found = next_tokens(text, torch.tensor([0, 2, 5]), ignore_index=-1)
    assert found.tolist() == [[1, -1, 3, 4, -1, -1, -1]]
