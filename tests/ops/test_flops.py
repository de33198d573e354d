"""What FlopCounterMode counts, against the same products made by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fastweights as fw

C, K, V, HV, CHUNKS = 16, 8, 12, 2, 3
INVERSE = C**3 // 3  # of one chunk: no product


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def inputs(rule, *, gradient):
    T = CHUNKS * C
    x = {"q": torch.ones(1, T, 1, K), "k": torch.ones(1, T, 1, K)}
    x["v"] = torch.ones(1, T, HV, V)
    if rule == "delta":
        x["beta"] = torch.zeros(1, T, HV)
    if rule == "erase":
        x["erase_key"] = torch.zeros(1, T, HV, K)
    return {n: t.requires_grad_(gradient) for n, t in x.items()}


def by_hand(rule, *, backward):
    """The products of one chunk and head."""
    q, k, v, y = torch.ones(2, C, K).unbind() + torch.ones(2, C, V).unbind()
    S, A = torch.ones(K, V), torch.ones(C, C)
    pairs = [(q, k.T), (q, S), (A, v), (k.T, v)]
    if rule != "additive":
        pairs += [(k, k.T), (k, S), (A, v)]
    if backward:
        pairs += [(k.T, v), (y, v.T), (A.T, y), (A, k), (A.T, q)]
        pairs += [(k, S), (q.T, y), (y, S.T), (v, S.T)]
    if backward and rule != "additive":
        pairs += [(k, S), (A, v), (A.T, y), (y, v.T), (A, k), (A.T, k)]
        pairs += [(k.T, y), (y, S.T)]
    for a, b in pairs:
        torch.mm(a, b)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("rule", ["additive", "delta", "erase"])
def test_every_product_is_counted(rule, backward):
    def run():
        o, state = fw.linear_recurrence(**x, chunk_size=C)
        if backward:
            (o.sum() + state.sum()).backward()

    x = inputs(rule, gradient=backward)
    one = counted(lambda: by_hand(rule, backward=backward))
    one += INVERSE * (rule != "additive")
    found = counted(run)
    assert abs(found - CHUNKS * HV * one) <= CHUNKS * HV * C  # C^3 / 3


def test_a_counter_made_before_the_first_call_counts(monkeypatch):
    """As one from before the library was imported, which has no formulas."""
    ours = torch.ops.fastweights
    for name in ("linear_recurrence", "linear_recurrence_backward"):
        monkeypatch.delitem(flop_registry, getattr(ours, name))
    x = inputs("additive", gradient=False)
    assert counted(lambda: fw.linear_recurrence(**x)) > 0


def test_a_chunk_has_64_tokens_unless_said():
    x = inputs("delta", gradient=False)
    found = [
        counted(lambda n=n: fw.linear_recurrence(**x, chunk_size=n))
        for n in (None, 64, 32)
    ]
    assert found[0] == found[1] > found[2] > 0
