"""Attention in a window: against all pairs, in pieces, rows apart."""

import pytest
import torch

from fastweights.checks import relative_error
from fastweights.layers.common.window_attention import window_attention

N, L, H, K = 2, 13, 2, 4


def tokens():
    torch.manual_seed(0)
    return torch.randn(3, N, L, H, K, dtype=torch.float64)


def all_pairs(q, k, v, window):
    scores = torch.einsum("nihk,njhk->nhij", q, k) / K**0.5
    i, j = torch.arange(L)[:, None], torch.arange(L)
    near = (j <= i) & (j > i - window)
    weights = scores.masked_fill(~near, -torch.inf).softmax(-1)
    return torch.einsum("nhij,njhk->nihk", weights, v)


@pytest.mark.parametrize("window", [1, 2, 5, 13, 20])
def test_a_window_of_all_pairs(window):
    q, k, v = tokens()
    o, past = window_attention(q, k, v, window)
    assert relative_error(o, all_pairs(q, k, v, window)) < 1e-12
    assert past.shape == (N, window - 1, 2 * H * K)


@pytest.mark.parametrize("window", [1, 4, 20])
def test_rows_in_pieces_of_other_lengths(window):
    q, k, v = tokens()
    want = all_pairs(q, k, v, window)
    position, past = torch.zeros(N, dtype=torch.int64), None
    for piece in [(6, 1), (0, 3), (1, 0), (6, 9)]:
        lengths = torch.tensor(piece)
        at = position[:, None] + torch.arange(max(piece))
        row = torch.arange(N)[:, None]
        given = (x[row, at.clamp(max=L - 1)] for x in (q, k, v))
        o, past = window_attention(*given, window, past, position, lengths)
        for n, count in enumerate(piece):
            there = slice(position[n], position[n] + count)
            torch.testing.assert_close(o[n, :count], want[n, there])
        position = position + lengths
    assert position.tolist() == [L, L]
