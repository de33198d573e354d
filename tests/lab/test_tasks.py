"""Tasks against readers that go token by token, and their distributions."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import task_readers

from fastweights_lab import tasks
from fastweights_lab.tasks import (
    IGNORE,
    AssociativeRecall,
    Calls,
    Needles,
    OverwritingRecall,
    Reassignment,
    RepeatedRecall,
    Scope,
    Sections,
    StateTracking,
)
from fastweights_lab.tasks.states import elements, products

ALL = [
    AssociativeRecall(4, length=32, vocabulary=21, filler="zero"),
    AssociativeRecall(3, length=24, vocabulary=16, filler="zero", passes=3),
    OverwritingRecall(),
    OverwritingRecall(pairs=3, writes=5, keys=4, values=5),
    RepeatedRecall(),
    RepeatedRecall(pairs=5, writes=1, keys=5, values=2),
    Needles(level=1),
    Needles(level=2, segments=5, pairs=3, questions=3),
    Needles(level=3, segments=3, needles=2, keys=4, values=5),
    Scope(),
    Scope(segments=4, pairs=3, questions=3, keys=7, values=3),
    Sections(),
    Sections(segments=3, writes=3, keys=9, values=3, questions=1),
    StateTracking(),
    StateTracking("Z5", elements=9, parts=3),
    StateTracking("S3", "swaps", 17),
    StateTracking("S4", elements=8, parts=2),
    StateTracking("S5", "swaps", 33),
    Reassignment(variables=4, questions=48),
    Reassignment(variables=2, questions=36),
    Calls(variables=4, questions=36),
    Calls(variables=2, questions=36, calls=2),
]
IDS = [f"{i}-{type(task).__name__}" for i, task in enumerate(ALL)]
EVERY = pytest.mark.parametrize("task", ALL, ids=IDS)


def occur_equally(counts, of):
    """Whether so many kinds came equally often: chi squared, 6 sigma."""
    assert len(counts) == of
    total = sum(counts.values())
    chi = sum((x - total / of) ** 2 for x in counts.values()) * of / total
    return chi < of - 1 + 6 * math.sqrt(2 * of)


def column(tokens, at):
    return Counter(tokens[:, at].tolist())


@EVERY
def test_targets_and_groups_are_what_a_reader_finds_token_by_token(task):
    rows = 64
    batch = task.batch(rows, seed=3)
    assert batch.tokens.shape == (rows, task.length)
    assert all(x.dtype == torch.int64 for x in vars(batch).values())
    assert batch.tokens.min() >= 0 and batch.tokens.max() < task.vocabulary
    for tokens, targets, groups in zip(
        batch.tokens.tolist(),
        batch.targets.tolist(),
        batch.groups.tolist(),
        strict=True,
    ):
        found = task_readers.read(task, tokens)
        assert found.targets == targets
        assert found.groups == groups
    asked = batch.groups[batch.groups != IGNORE].unique().tolist()
    local = not (isinstance(task, Needles) and task.level == 1)
    assert asked == list(range(len(task.kinds) if local else 1))


@EVERY
def test_a_seed_gives_the_same_sequences_and_another_one_others(task):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    a, b, c = (task.batch(16, seed) for seed in (7, 7, 8))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.targets, b.targets)
    assert not torch.equal(a.tokens, c.tokens)
    distinct = {tuple(row) for row in a.tokens.tolist()}
    assert len(distinct) > 8


@pytest.mark.gpu
@EVERY
def test_sequences_drawn_on_a_gpu_are_read_the_same(task):
    batch = task.batch(8, 0, "cuda")
    assert batch.tokens.is_cuda and batch.groups.is_cuda
    for tokens, targets in zip(
        batch.tokens.tolist(), batch.targets.tolist(), strict=True
    ):
        assert task_readers.read(task, tokens).targets == targets


# Chance.


@pytest.mark.parametrize(
    "task",
    [
        AssociativeRecall(2, length=12, vocabulary=8),
        OverwritingRecall(values=4),
        RepeatedRecall(values=4),
        Reassignment(variables=2, questions=3),
        Calls(variables=2, questions=3, calls=2),
        Needles(values=4, segments=2),
        Needles(level=1, values=4, segments=2),
        Scope(values=4, segments=2),
        Sections(values=4, segments=2),
        StateTracking("Z3"),
        StateTracking("S4", elements=6),
        StateTracking("S4", "swaps", elements=6),
    ],
    ids=lambda t: type(t).__name__,
)
def test_chance_is_what_the_best_guess_per_position_gets(task):
    """The commonest answer there in 4,000 sequences, on 4,000 others.

    Where questions stand at random the guess is one for all positions. The
    tolerance is two standard deviations of one question per sequence.
    """
    seen, others = task.batch(4000, 0).targets, task.batch(4000, 1).targets
    if isinstance(task, AssociativeRecall):
        seen = seen[seen != IGNORE].reshape(-1, 1)
        others = others[others != IGNORE].reshape(-1, 1)
    right = []
    for a, b in zip(seen.T, others.T, strict=True):
        b = b[b != IGNORE]
        if len(b):
            right.append(b == a[a != IGNORE].mode().values)
    right = torch.cat(right).double()
    sigma = math.sqrt(task.chance / 4000)
    assert abs(right.mean() - task.chance) < 2 * sigma


# Distributions.


def test_zoologys_slots_are_those_of_draws_without_replacement():
    """numpy's choice, as zoology draws them, for each pair's slot."""
    task = AssociativeRecall(3, length=18, vocabulary=64, filler="zero")
    rows, slots = 4000, 6
    batch = task.batch(rows, 0)
    keys = batch.tokens[:, 0:6:2, None]
    at = (batch.tokens[:, None, 6::2] == keys).int().argmax(-1)
    p = np.arange(1, slots + 1) ** (0.01 - 1)
    p /= p.sum()
    draw = np.random.default_rng(0)
    there = np.stack(
        [draw.choice(slots, 3, replace=False, p=p) for _ in range(rows)]
    )
    for i in range(3):
        ours = np.bincount(at[:, i], minlength=slots) / rows
        theirs = np.bincount(there[:, i], minlength=slots) / rows
        assert abs(ours - theirs).max() < 6 * math.sqrt(0.5 / rows)


def test_random_filler_is_any_token_and_the_rest_stays():
    plain = AssociativeRecall(4, length=64, vocabulary=32, filler="zero")
    task = replace(plain, filler="random")
    a, b = task.batch(400, 5), plain.batch(400, 5)
    asked = a.targets != IGNORE
    assert asked.sum(1).eq(4).all() and not asked[:, :8].any()
    assert not asked[:, 1::2].any()
    for tokens, targets in zip(
        a.tokens.tolist(), a.targets.tolist(), strict=True
    ):
        pairs = dict(zip(tokens[0:8:2], tokens[1:8:2], strict=True))
        found = {
            key: value
            for key, value in zip(tokens, targets, strict=True)
            if value != IGNORE
        }
        assert found == pairs
    filler = a.tokens[:, 8:][~asked[:, 8:]]
    assert occur_equally(Counter(filler.tolist()), 32)
    assert (b.tokens[:, 8:] != 0).sum() == b.targets.ne(IGNORE).sum()


def pattern(keys):
    """Which of a row's keys are the same: AABB as 0011."""
    order = list(dict.fromkeys(keys))
    return "".join(str(order.index(key)) for key in keys)


@pytest.mark.parametrize(
    ("task", "patterns"),
    [
        (OverwritingRecall(2, 2, 3, 5), ("0011", "0101", "0110")),
        (RepeatedRecall(2, 2, 3, 5), ("0101", "0110")),
        (Sections(1, 2, 2, 1, 3, 5), ("0011", "0101", "0110")),
    ],
    ids=lambda x: type(x).__name__,
)
def test_every_order_of_writes_is_as_likely(task, patterns):
    tokens = task.batch(2000, 0).tokens
    start = 1 if isinstance(task, Scope) else 0
    keys = tokens[:, start : start + 8 : 2]
    counts = Counter(pattern(row) for row in keys.tolist())
    assert set(counts) == set(patterns)
    assert occur_equally(counts, len(patterns))
    for at in range(4):
        assert occur_equally(column(keys, at), 3)
        assert occur_equally(column(tokens[:, start + 1 :], 2 * at), 5)


@pytest.mark.parametrize(
    "task",
    [OverwritingRecall(3, 2, 3, 4), RepeatedRecall(3, 1, 3, 4)],
    ids=lambda t: type(t).__name__,
)
def test_keys_are_asked_about_in_any_order(task):
    asked = task.batch(3000, 0).tokens[:, -5::2]
    assert occur_equally(Counter(map(tuple, asked.tolist())), 6)


def test_needles_stand_before_any_segment_and_say_anything():
    task = Needles(level=1, segments=5, values=6)
    tokens = task.batch(3000, 0).tokens
    row, at = (tokens == 3).nonzero().T
    first = at[row.diff(prepend=torch.tensor([-1])) > 0]
    assert occur_equally(Counter(first.tolist()), 5)
    assert set(first.tolist()) == {13 * i for i in range(5)}
    values = tokens.gather(1, first[:, None] + 1)
    assert occur_equally(column(values, 0), 6)


def test_level_one_says_the_same_line_in_every_sequence():
    tokens = Needles(level=1, segments=3).batch(50, 0).tokens
    lines = set()
    for row in tokens.tolist():
        text = [x for x in row[:-2]]
        at = text.index(3)
        del text[at : at + 2]
        lines |= {tuple(text[i : i + 13]) for i in (0, 13, 26)}
    assert len(lines) == 1


def test_local_questions_are_about_any_pair_and_values_are_even():
    task = Needles(segments=1, pairs=3, questions=1, keys=5, values=4)
    batch = task.batch(3000, 0)
    tokens = batch.tokens[:, 2:]
    keys = tokens[:, 1:7:2]
    place = (keys == tokens[:, 8:9]).int().argmax(1)
    assert occur_equally(Counter(place.tolist()), 3)
    for at in range(3):
        assert occur_equally(column(keys, at), 5)
        assert occur_equally(column(tokens, 2 + 2 * at), 4)


def test_questions_in_and_out_of_scope_come_in_any_order():
    task = Scope(segments=2, pairs=2, questions=1, keys=6, values=3)
    batch = task.batch(3000, 0)
    for at in (6, 8, 15, 17):
        assert occur_equally(column(batch.groups, at), 2)
    out = batch.tokens[:, 9:][batch.groups[:, 9:] == 1]
    assert occur_equally(Counter(out.tolist()), 6)
    inside = batch.groups[:, :9] == 0
    asked = batch.tokens[:, :9][inside]
    first = (batch.tokens[:, 1] == asked).tolist()
    assert occur_equally(Counter(first), 2)


def test_assignments_follow_zipfs_law_and_any_variable_is_printed():
    """Variables in the order of their new assignments, of 3000 each."""
    n, many = 4, 3000
    for row in Reassignment(n, many).batch(3, 0).tokens.tolist():
        lines = bytes(row).decode().splitlines()[n:]
        assigned = Counter(line[0] for line in lines[::2])
        assert occur_equally(Counter(line for line in lines[1::2]), n)
        assert occur_equally(Counter(line[-1] for line in lines[::2]), 10)
        total = sum(1 / i for i in range(1, n + 1))
        for i, (_, count) in enumerate(assigned.most_common(), 1):
            share = 1 / i / total
            sigma = math.sqrt(many * share * (1 - share))
            assert abs(count - many * share) < 5 * sigma


def test_names_and_their_order_are_any():
    tokens = Reassignment(3, 1).batch(4000, 0).tokens
    names = tokens[:, 0:12:4]
    for at in (0, 8, 12):
        assert occur_equally(column(tokens, at), 26)
    often = tokens[:, 12:13] == names  # the first new assignment
    assert occur_equally(Counter(often.nonzero()[:, 1].tolist()), 3)


def test_a_calls_variables_are_any_and_any_letter_is_printed():
    """One of two variables is twice as often set; prints know none of it."""
    task = Calls(variables=2, questions=40, calls=300)
    program = bytes(task.batch(1, 0).tokens[0].tolist()).decode()
    letters = {c for c in set(program) if f"{c}=" in program}
    own, inside, outside, first = Counter(), Counter(), Counter(), 0
    for call in program.split("\n\n")[:-1]:
        lines = call.split("\n")
        counts = Counter(line[0] for line in lines[::2])
        names = sorted(counts, key=counts.get)
        first += counts[names[-1]]
        own.update(names)
        others = sorted(letters - {*names})
        for line in lines[41::2]:  # by now both are set
            name = line[6]
            if name in names:
                inside[names.index(name)] += 1
            else:
                outside[others.index(name)] += 1
    assert (
        occur_equally(own, 4)
        and occur_equally(inside, 2)
        and occur_equally(outside, 2)
    )
    assert occur_equally(Counter(a=inside.total(), b=outside.total()), 2)
    assert abs(first / (300 * 40) - 2 / 3) < 0.03


def test_elements_are_drawn_evenly():
    task = StateTracking("S4", "swaps", elements=3)
    tokens = task.batch(3000, 0).tokens
    for at in (1, 2, 3):
        assert occur_equally(column(tokens, at), 6)


# Groups.


@pytest.mark.parametrize(
    ("name", "order"),
    [("Z2", 2), ("Z7", 7), ("S3", 6), ("S5", 120)],
)
def test_products_are_a_groups(name, order):
    table = torch.tensor(products(name))
    assert table.shape == (order, order) and len(elements(name)) == order
    every = torch.arange(order)
    assert torch.equal(table[0], every) and torch.equal(table[:, 0], every)
    for lines in (table, table.T):  # each element once per line
        assert torch.equal(lines.sort(1).values, every.expand(order, -1))
    a, b, c = torch.randint(order, (3, 500))
    assert torch.equal(table[table[a, b], c], table[a, table[b, c]])
    assert torch.equal(table, table.T) == (name[0] == "Z")


# What is refused.


@pytest.mark.parametrize(
    ("task", "sizes", "says"),
    [
        (AssociativeRecall, {"length": 63}, "length: got 63, need 64 or more"),
        (AssociativeRecall, {"length": 65}, "length: got 65, need it even"),
        (AssociativeRecall, {"vocabulary": 33}, "vocabulary: got 33, need 34"),
        (AssociativeRecall, {"filler": "noise"}, "filler: got 'noise'"),
        (AssociativeRecall, {"passes": 0}, "passes: got 0"),
        (OverwritingRecall, {"keys": 7}, "keys: got 7, need 8 or more"),
        (OverwritingRecall, {"values": 2}, "values: got 2, need 3 or more"),
        (RepeatedRecall, {"pairs": 0}, "pairs: got 0"),
        (RepeatedRecall, {"keys": 7}, "keys: got 7, need 8 or more"),
        (Needles, {"level": 4}, "level: got 4"),
        (Needles, {"questions": 5}, "pairs: got 4, need 5 or more"),
        (Needles, {"keys": 3}, "keys: got 3, need 4 or more"),
        (Needles, {"level": 1, "values": 3}, "values: got 3, need 4"),
        (Needles, {"segments": 0}, "segments: got 0"),
        (Scope, {"questions": 5}, "pairs: got 4, need 5 or more"),
        (Scope, {"keys": 5}, "keys: got 5, need 6 or more"),
        (Sections, {"values": 1}, "values: got 1, need 2 or more"),
        (Reassignment, {"variables": 27}, "variables: got 27, need 26 or"),
        (Reassignment, {"questions": 0}, "questions: got 0"),
        (Calls, {"variables": 14}, "variables: got 14, need 13 or fewer"),
        (Calls, {"calls": 0}, "calls: got 0"),
        (StateTracking, {"group": "S6"}, "group: got 'S6', need Z2, Z3"),
        (StateTracking, {"group": "Z1"}, "group: got 'Z1', need Z2, Z3"),
        (
            StateTracking,
            {"group": "Z5", "inputs": "swaps"},
            "inputs: got 'swaps' for Z5, need 'all'",
        ),
        (StateTracking, {"inputs": "cycles"}, "inputs: got 'cycles'"),
        (StateTracking, {"parts": 0}, "parts: got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(task, sizes, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        task(**sizes)


def test_rows_and_seeds_that_do_not_fit_are_named():
    task = OverwritingRecall()
    with pytest.raises(ValueError, match=r"^rows: got 0"):
        task.batch(0, 0)
    for seed in (-1, 2**32, 1.0):
        with pytest.raises(ValueError, match=r"^seed: got .*, need 0 to 2"):
            task.batch(1, seed)
    with pytest.raises(TypeError, match=r"^pairs: got float"):
        OverwritingRecall(pairs=8.0)


@EVERY
def test_settings_make_the_task_again(task):
    sizes = task.settings()
    assert getattr(tasks, sizes.pop("task"))(**sizes) == task
