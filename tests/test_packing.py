"""Sequences of a pack: whose each token is, and which go together."""

import pytest
import torch

from fastweights import packing

OFFSETS = torch.tensor([0, 3, 3, 7, 8])  # the second is empty


def test_whose_each_token_is():
    ids = packing.sequence_ids(OFFSETS, 10)
    assert ids.tolist() == [0, 0, 0, 2, 2, 2, 2, 3, 4, 4]
    tail = packing.tail_mask(OFFSETS, 10)
    assert tail.tolist() == 8 * [False] + 2 * [True]
    assert packing.num_sequences(torch.zeros(1, 10), OFFSETS) == 4
    assert packing.num_sequences(torch.zeros(5, 10), None) == 5


def test_no_sequence_is_filled_up_to_twice_its_own_length():
    lengths = torch.randint(1, 200, (50,)).tolist()
    groups = packing.group_by_length([*lengths, 0])
    assert sorted(n for some in groups for n in some) == [*range(51)]
    for some in groups:
        valid = [lengths[n] for n in some if n < 50]
        assert max(valid) < 2 * min(valid)


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_every_token_is_in_one_piece(rows):
    ends = torch.randint(0, 40, (20,)).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    T = int(ends[-1]) + 5
    x, seen = torch.arange(1.0, T + 1)[None, :, None], torch.zeros(1, T, 1)
    for piece in packing.pack_pieces(offsets, x, 16, lambda length: rows):
        tokens = piece.take(x)
        assert len(tokens) <= rows
        piece.put(seen, piece.take(seen) + tokens)
    assert torch.equal(seen[:, :-5], x[:, :-5])
    assert not seen[:, -5:].any()
