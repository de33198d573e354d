"""Prefix scans, against the loop they replace."""

import math

import pytest
import torch

from fastweights.reference.prefix import (
    compose,
    prefix_scan,
    scan_by_pairs_,
)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8, 65])
def test_prefix_scan_is_the_loop_in_few_rounds(n):
    calls = 0

    def join(a, b):
        nonlocal calls
        calls += 1
        return a[0] + b[0], max(a[1], b[1]) + 1

    items = [(chr(i), 0) for i in range(n)]
    text = "".join(letter for letter, _ in items)
    result = prefix_scan(join, items)
    assert [word for word, _ in result] == [text[: i + 1] for i in range(n)]
    if n > 1:
        assert calls < 2 * n
        assert max(r for _, r in result) <= 2 * math.ceil(math.log2(n))


def test_prefix_scan_leaves_its_items_alone():
    items = [1, 2, 3, 4]
    assert prefix_scan(lambda a, b: a + b, items) == [1, 3, 6, 10]
    assert items == [1, 2, 3, 4]


def test_composed_maps_act_like_one_after_the_other():
    M, B = torch.randn(2, 3, 4, 4, dtype=torch.float64).unbind()
    S = torch.randn(4, 4, dtype=torch.float64)
    maps = list(zip(M, B, strict=True))
    for n, (M_n, B_n) in enumerate(prefix_scan(compose, maps)):
        want = S
        for step_M, step_B in maps[: n + 1]:
            want = step_M @ want + step_B
        torch.testing.assert_close(M_n @ S + B_n, want)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("L", [1, 2, 3, 4, 5, 6, 7, 8, 13, 64])
def test_a_scan_by_pairs_is_the_loop(L, reverse):
    torch.manual_seed(0)
    a, b = torch.randn(2, 2, L, 3, dtype=torch.float64).unbind()
    a[:, L // 2] = 0.0
    order = range(L - 1, -1, -1) if reverse else range(L)
    want, h = torch.empty_like(b), 0.0
    for t in order:
        h = a[:, t] * h + b[:, t]
        want[:, t] = h
    before = a.clone()
    found = scan_by_pairs_(a, b, reverse=reverse)
    assert found is b and torch.equal(a, before)
    torch.testing.assert_close(found, want)
