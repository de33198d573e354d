"""Layers from outside this project: from scratch, and from one of its own."""

import pytest
import torch
from support.layer_cases import contents, hidden

from fastweights.layers import GatedDeltaNet, Layer, LayerState
from fastweights.models import LAYERS, LanguageModel, ModelConfig


class Sum(Layer):
    """The sum of all tokens so far."""

    def __init__(self, dim, device=None, dtype=None):
        super().__init__()
        self.dim = dim
        made_by.append(type(self))

    def compute(self, x, state, cu_seqlens):
        y = x.cumsum(1)
        if state is not None:
            y = y + state.batch_field("S")[:, None]
        return y, LayerState(S=y[:, -1].clone())


class TwoHeads(GatedDeltaNet):
    def __init__(self, dim):
        super().__init__(dim, 2, 4)
        made_by.append(type(self))


made_by: list[type] = []
"""Whose constructors have run."""


@pytest.fixture(params=[lambda: Sum(8), lambda: TwoHeads(8)])
def layer(request):
    made_by.clear()
    return request.param()


@pytest.mark.parametrize("gradients", [False, True])
def test_it_goes_on_from_its_state(layer, gradients):
    x = hidden(2, 9)
    with torch.set_grad_enabled(gradients):
        y_ref, state_ref = layer(x)
        y, state = layer(x[:, :4])
        z, state = layer(x[:, 4:], state)
    torch.testing.assert_close(torch.cat([y, z], 1), y_ref)
    torch.testing.assert_close(contents(state), contents(state_ref))
    assert made_by == [type(layer)]


def test_it_knows_the_bytes_of_its_state(layer):
    with torch.no_grad():
        _, state = layer(hidden(1, 9))
    assert layer.state_bytes(9) == layer.state_bytes(5000) == state.nbytes
    assert made_by == [type(layer)]


def test_without_a_state_it_has_no_bytes():
    layer = Sum(8)
    layer.compute = lambda x, state, cu_seqlens: (x, None)
    assert layer.state_bytes(9) == 0


def test_in_a_model(monkeypatch):
    monkeypatch.setitem(LAYERS, "sum", Sum)
    config = ModelConfig(16, 8, 2, ("sum", "gated_deltanet"), num_heads=2)
    model = LanguageModel(config)
    text = torch.randint(16, (2, 9))
    with torch.no_grad():
        logits_ref, _ = model(text)
        logits, states = model(text[:, :4])
        more, states = model(text[:, 4:], states)
    torch.testing.assert_close(torch.cat([logits, more], 1), logits_ref)
    assert 2 * model.state_bytes(9) == sum(x.nbytes for x in states)
    assert len(model.generate([text[0]], 3)[0]) == 3


@pytest.mark.parametrize("make", [lambda: Sum(8), lambda: TwoHeads(8)])
def test_a_state_for_two_branches_is_cloned(make):
    """In place without gradients, so that the clone alone is left."""
    layer, x = make(), hidden(2, 20)
    with torch.no_grad():
        _, state = layer(x[:, :10])
        y_ref, _ = layer(x[:, 10:], state.clone())
        y, after = layer(x[:, 10:], state)
        again, _ = layer(x[:, 10:], state)
    assert after is state and y.equal(y_ref) and not again.equal(y)
    _, state = layer(x[:, :10])
    y, _ = layer(x[:, 10:], state)
    assert layer(x[:, 10:], state)[0].equal(y)
