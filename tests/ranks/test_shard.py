"""Who has which tokens, and whose map goes where."""

import itertools
import random

import torch

from fastweights.ranks.shard import shard_of_pack

PACKINGS = 2000


def random_packing(seed):
    """Tokens of 1 to 5 ranks, and offsets of 1 to 6 sequences; some empty."""
    draw = random.Random(seed)
    tokens = [draw.choice((0, 1, 2, 5, 9)) for _ in range(draw.randint(1, 5))]
    T = sum(tokens)
    last = draw.choice((T, T, draw.randint(0, T)))
    inner = sorted(draw.randint(0, last) for _ in range(draw.randint(0, 5)))
    return tokens, [0, *inner, last]


def test_what_enters_a_rank_is_what_its_sequence_had_before():
    """The states are lists of tokens, and a map adds a rank's to them."""
    for seed in range(PACKINGS):
        tokens, offsets = random_packing(seed)
        borders = [0, *itertools.accumulate(tokens)]
        owner = [n for n, _ in enumerate(offsets[1:])]
        N, cu = len(owner), torch.tensor(offsets, dtype=torch.int32)
        where = {"begins": [0] * N, "ends": [0] * N}
        state = None  # of the sequence that passes a border
        for rank, (start, end) in enumerate(itertools.pairwise(borders)):
            last = rank == len(tokens) - 1
            s = shard_of_pack(None, cu, start, end, last)
            own = s.cu_seqlens.tolist()
            found = [
                list(range(start + a, start + b))
                for a, b in itertools.pairwise(own)
            ]
            here = range(start, end)
            assert found == [
                [t for t in range(a, b) if t in here]
                for a, b in itertools.pairwise(offsets)
            ]
            begins, ends = s.begins.tolist(), s.ends.tolist()
            for n in owner:
                where["begins"][n] += begins[n]
                where["ends"][n] += ends[n]
                if found[n]:
                    assert begins[n] == (found[n][0] == offsets[n])
                    assert ends[n] == (found[n][-1] == offsets[n + 1] - 1)
                else:
                    assert begins[n] == ends[n]  # if at all, an empty one
            # What enters is the same sequence that left the rank before.
            n, enters = s.incoming.item(), s.receives.item()
            assert enters == (state is not None)
            if enters:
                assert state == list(range(offsets[n], start))
            # The map: all before the sequence that leaves, then its tokens.
            zero, a, b = s.offsets_for_map().tolist()
            n, leaves = s.outgoing.item(), s.sends.item()
            assert zero == 0 and a <= b <= end - start
            added = list(range(start + a, start + b))
            through = s.where_passing(torch.ones(1)).item() == 1
            if not leaves:
                assert not added and not through
                state = None
                continue
            assert added == found[n] and offsets[n] < end < offsets[n + 1]
            assert through == (offsets[n] < start)
            assert through or begins[n]
            state = (state if through else []) + added
        assert state is None
        assert where["begins"] == where["ends"] == [1] * N
