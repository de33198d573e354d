"""The bits of a sequence whatever is computed beside it, by PyTorch."""

import itertools

import pytest
import torch
from support.batch_invariance_cases import EDGES, check_invariance
from support.graphs import in_one_graph
from support.inputs import GATES, RULES, member_inputs

import fastweights as fw
from fastweights.torch_backend import recurrence as torch_recurrence

MEMBERS = [x for x in itertools.product(GATES, RULES) if x[0] != "fixed"]


@pytest.mark.parametrize(
    "T, others", [(1, [1, 1]), (5, [4, 7]), (150, [140, 9])], ids=str
)
@pytest.mark.parametrize("gate, rule", MEMBERS)
def test_chunks_of_a_sequence_alone(gate, rule, T, others):
    sizes = {"H": 1, "HV": 2, "K": 33, "V": 17}
    sizes |= {"dtype": torch.float32, "device": "cpu"}
    others, options = [(1, n) for n in others], {"backend": "torch"}
    check_invariance(gate, rule, EDGES, T, others, None, sizes, **options)


@pytest.mark.parametrize("inside", [False, True])
def test_a_graph_knows_it(inside, monkeypatch):
    """Of a context around the call, or around the compiled function."""
    seen, forward = [], torch_recurrence.forward

    def noted(*arguments):
        seen.append(arguments[-1].batch_invariant)
        return forward(*arguments)

    def call(**x):
        if not inside:
            return fw.linear_recurrence(**x)
        with fw.batch_invariant():
            return fw.linear_recurrence(**x)

    monkeypatch.setattr(torch_recurrence, "forward", noted)
    x = member_inputs("head", "delta", T=9)
    with in_one_graph(call, most=3 - inside) as compiled:
        compiled(**x)
        with fw.batch_invariant():
            compiled(**x)
        compiled(**x)
    assert seen == [inside, True, inside]
