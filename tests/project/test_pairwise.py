"""What of a crossed test runs each time, and what only when all of it does."""

import itertools

import pytest
from support.pairwise import all_but, in_turn, pairwise, parametrize_all


@pytest.mark.parametrize("sizes", [(4, 2, 8), (3, 2, 5), (2, 2, 2, 2), (3,)])
def test_every_pair_is_there(sizes):
    chosen = pairwise([range(n) for n in sizes])
    for a, b in itertools.combinations(range(len(sizes)), 2):
        found = {(x[a], x[b]) for x in chosen}
        assert len(found) == sizes[a] * sizes[b]
    largest = sorted(sizes)[-2:]
    assert len(chosen) <= 1.5 * largest[0] * largest[-1]


def test_a_rare_value_is_there_once():
    chosen = pairwise([range(4), range(2), range(8)], {(0, 1)})
    assert 0 < sum(x[0] == 1 for x in chosen) <= 2
    assert {x[::2] for x in chosen} >= {
        (i, j) for i in (0, 2, 3) for j in range(8)
    }


def test_all_combinations_are_there_and_the_rest_is_marked():
    mark = parametrize_all(x=[1, 2], y={"a": 3, "b": 4}, z=[5, 6])
    names, parameters = mark.args
    assert names == "x, y, z"
    every = itertools.product((1, 2), (3, 4), (5, 6))
    assert [p.values for p in parameters] == list(every)
    assert parameters[0].id == "1-a-5"
    assert 4 <= sum(not p.marks for p in parameters) < 8


def test_what_is_not_chosen_is_marked():
    found = all_but([("a", 1)], [("a", 1), ("b", 2)])
    assert [p.values for p in found] == [("a", 1), ("b", 2)]
    assert [bool(p.marks) for p in found] == [False, True]


def test_others_take_turns():
    found = in_turn([90], [80, 86, 89], ["fwd", "bwd"])
    assert found[:2] == [("fwd", 90), ("bwd", 90)]
    assert found[2:] == [("fwd", 80), ("bwd", 86), ("fwd", 89)]
