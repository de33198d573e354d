"""torch.export: one program for every batch, every length and every step."""

import dataclasses

import pytest
import torch
from support.layer_cases import LAYER_CASES, contents, hidden, make_layer
from support.pairwise import all_but
from torch.export import Dim, export

from fastweights.layers import LayerState
from fastweights.models import LanguageModel, ModelConfig

EACH_TIME = ["gated-deltanet-options", "mamba", "mlstm", "softmax", "lact"]
ANY = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


@torch.no_grad()
@pytest.mark.parametrize("name", all_but(EACH_TIME, LAYER_CASES))
def test_one_program_for_any_batch_and_length(name):
    layer = make_layer(name)
    program = export(
        layer, (hidden(3, 40),), dynamic_shapes={"x": ANY}
    ).module()
    for shape in ((1, 1), (2, 1), (1, 2), (4, 3), (3, 4), (5, 77)):
        y, state = program(hidden(*shape))
        y_ref, ref = layer(hidden(*shape))
        assert isinstance(state, LayerState)
        torch.testing.assert_close(y, y_ref)
        torch.testing.assert_close(contents(state), contents(ref))


def dynamic(state):
    """Every batch, and every number of tokens read, if there is one."""
    there = [getattr(state, f.name) for f in dataclasses.fields(state)]
    return [
        {0: Dim.DYNAMIC} if isinstance(x, torch.Tensor) else Dim.DYNAMIC
        for x in there
        if isinstance(x, torch.Tensor) or x
    ] + [None] * (state.read_at_most == 0)


PATTERNS = [
    "gated_deltanet*softmax",
    "mamba*mlstm",
    "retention*mesanet",
    "ttt_linear*titans",
]


@torch.no_grad()
@pytest.mark.parametrize("pattern", all_but(PATTERNS[:1], PATTERNS))
def test_one_program_for_every_step_of_decoding(pattern):
    """The states go in and come out, by their fields."""
    torch.manual_seed(0)
    config = {"vocab_size": 31, "dim": 16, "num_heads": 2, "head_dim": 8}
    kinds = tuple(pattern.split("*"))
    m = LanguageModel(ModelConfig(**config, num_layers=2, pattern=kinds))
    text = torch.randint(31, (3, 20))
    _, states = m(text[:, :9], m.preallocate_states(3, 40))
    program = export(
        m,
        (text[:, :1], [state.clone() for state in states]),
        dynamic_shapes={
            "tokens": {0: Dim.DYNAMIC},
            "states": [dynamic(state) for state in states],
        },
    ).module()
    for t in range(9, 13):
        logits, states = program(text[:, t : t + 1], states)
    want = m(text[:, :13])[0][:, -1:]
    torch.testing.assert_close(logits, want)
    some = [state.select(torch.tensor([2, 0])) for state in states]
    logits, _ = program(text[[2, 0], 13:14], some)
    torch.testing.assert_close(logits, m(text[:, :14])[0][[2, 0], -1:])
