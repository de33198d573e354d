"""States that take in the first of a call's tokens only."""

import pytest
import torch
from support.layer_cases import LAYER_CASES, contents, hidden, make_layer
from support.refused import refused

from fastweights.layers import GatedDeltaNet, LayerState, Mamba
from fastweights.layers.common.layer import Layer

EXACT = {"rtol": 0, "atol": 1e-12}
ACCEPTED = torch.tensor([0, 3, 6])


def take_in_alone(layer, x, state, num_accepted):
    """Each sequence alone: outputs of all tokens, the states after some."""
    outputs, states = [], []
    for i, n in enumerate(num_accepted.tolist()):
        own, one = x[i : i + 1], torch.tensor([i])
        outputs.append(layer(own, state.select(one))[0])
        states.append(state.select(one))
        if n:
            layer(own[:, :n], states[-1])
    return torch.cat(outputs), states


@torch.no_grad()
@pytest.mark.parametrize("first", [1, 5])
@pytest.mark.parametrize("name", LAYER_CASES)
def test_the_state_takes_in_what_is_accepted(name, first):
    layer, x = make_layer(name, torch.float64), hidden(3, first + 6)
    x = x.double()
    state = layer(x[:, :first])[1]
    y_ref, states = take_in_alone(layer, x[:, first:], state, ACCEPTED)
    state.num_accepted = ACCEPTED.int()
    y, after = layer(x[:, first:], state)
    assert after is state and state.num_accepted is None
    torch.testing.assert_close(y, y_ref, **EXACT)
    for i, wanted in enumerate(states):
        mine = contents(state.select(torch.tensor([i])))
        torch.testing.assert_close(mine, contents(wanted), **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("name", LAYER_CASES)
def test_in_rows_of_a_pool(name):
    """The others stay as they are."""
    layer, rows = make_layer(name, torch.float64), torch.tensor([3, 0, 2])
    x = hidden(4, 11).double()
    pool = layer(x[:, :5])[1]
    if pool.keys is not None:  # pools do not grow
        room = layer.preallocate_state(4, 16)
        room.copy_(pool)
        pool = room
    before = pool.clone()
    mine = x[rows, 5:]
    y_ref, states = take_in_alone(layer, mine, before.select(rows), ACCEPTED)
    own = pool.as_pool(rows, 5)
    own.num_accepted = ACCEPTED
    y, _ = layer(mine, own)
    torch.testing.assert_close(y, y_ref, **EXACT)
    for row, wanted in zip(rows, states, strict=True):
        found = contents(pool.select(row[None]))
        torch.testing.assert_close(found, contents(wanted), **EXACT)
    still = torch.tensor([1])
    a, b = contents(pool.select(still)), contents(before.select(still))
    assert all(a[key].equal(t) for key, t in b.items())


class Last(Layer):
    """A layer of somebody's own: the sum of all tokens so far."""

    def __init__(self, device=None, dtype=None):
        super().__init__()
        self.dim = hidden(1, 1).shape[-1]
        self.o_proj = torch.nn.Identity()

    def compute(self, x, state, cu_seqlens):
        y = x.cumsum(1)
        if state is not None:
            y = y + state.batch_field("S")[:, None]
        return y, LayerState(S=y[:, -1])


@torch.no_grad()
def test_a_layer_of_ones_own():
    layer, x = Last(), hidden(3, 6)
    state = LayerState(S=torch.zeros(3, layer.dim), num_accepted=ACCEPTED)
    y, state = layer(x, state)
    torch.testing.assert_close(y, x.cumsum(1))
    torch.testing.assert_close(state.S[0], torch.zeros(layer.dim))
    torch.testing.assert_close(state.S[1:], y[[1, 2], [2, 5]])


REFUSED = """
[1, 2]
    TypeError: state: num_accepted: got list, need a Tensor
ones(2)
    TypeError: state: num_accepted: got torch.float32, need torch.int32 or
    torch.int64
ones(3, dtype=torch.int64)
    ValueError: state: num_accepted: got shape [3], need [2]
torch.tensor([0, 4])
    ValueError: state: num_accepted: got [0, 4], need 0 to 3
torch.tensor([-1, 2])
    ValueError: state: num_accepted: got [-1, 2], need 0 to 3
"""


@torch.no_grad()
@refused(REFUSED)
def test_counts_that_do_not_fit(wrong, error):
    for make in (GatedDeltaNet, Mamba):
        layer = make(32, 2) if make is GatedDeltaNet else make(32)
        _, state = layer(torch.ones(2, 4, 32))
        before, ones = state.clone(), torch.ones
        state.num_accepted = eval(wrong, {"torch": torch, "ones": ones})
        with error():
            layer(torch.ones(2, 3, 32), state)
        assert state.S.equal(before.S)


def test_calls_that_take_all_in():
    layer = GatedDeltaNet(32, 2)
    with torch.no_grad():
        _, state = layer(torch.ones(1, 4, 32))
        state.num_accepted = torch.tensor([1])
        with pytest.raises(ValueError, match=r"need no cu_seqlens"):
            layer(torch.ones(1, 3, 32), state, torch.tensor([0, 3]))
        with pytest.raises(ValueError, match="got 17 tokens, need at most"):
            layer(torch.ones(1, 17, 32), state)
    with pytest.raises(ValueError, match=r"need torch\.no_grad\(\)"):
        layer(torch.ones(1, 3, 32), state)
