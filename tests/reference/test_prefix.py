"""Prefix scans, against the loop they replace."""

import math

import pytest
import torch

from fastweights.reference.prefix import compose, prefix_scan


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
