"""Tasks read token by token, with a dictionary for a memory.

Written from what the tasks' docstrings say of their sequences, a token at a
time: what is asked where, and the answer. Whatever does not fit raises an
AssertionError.
"""

import contextlib
import io
import re
from collections import Counter
from dataclasses import dataclass, field

NO = -100


@dataclass
class Reading:
    """What a reader found in one sequence."""

    targets: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)

    def nothing(self, count=1):
        self.targets += [NO] * count
        self.groups += [NO] * count

    def answer(self, target, group):
        self.targets.append(target)
        self.groups.append(group)


def pair(task, tokens, first):
    """The next key and value, of keys that begin with the token first."""
    key, value = tokens.pop(0), tokens.pop(0)
    assert first <= key < first + task.keys <= value < task.vocabulary
    return key, value


def associative_recall(task, tokens):
    """With zeros as filler, which no key is taken for."""
    found, memory, half = Reading(), {}, task.vocabulary // 2
    told = 2 * task.pairs
    for i in range(0, told * task.passes, 2):
        key, value = tokens[i : i + 2]
        assert 1 <= key < half <= value < task.vocabulary
        assert (key in memory) == (i >= told)
        assert memory.setdefault(key, value) == value
        found.nothing(2)
    assert len(set(memory.values())) == len(memory) == task.pairs
    asked = set()
    for i in range(told * task.passes, task.length, 2):
        key, filler = tokens[i : i + 2]
        assert filler == 0
        if key:
            assert key in memory and key not in asked
            asked.add(key)
            found.answer(memory[key], 0)
            found.nothing()
        else:
            found.nothing(2)
    assert asked == set(memory)
    return found


def rewriting(task, tokens):
    found, memory, written = Reading(), {}, {}
    tokens = list(tokens)
    for i in range(task.pairs * task.writes):
        key, value = pair(task, tokens, 2)
        values = written.setdefault(key, [])
        if type(task).__name__ == "OverwritingRecall":
            assert value not in values
        else:
            assert set(values) <= {value}
            assert len(values) == i // task.pairs  # once per reading
        values.append(value)
        memory[key] = value
        found.nothing(2)
    assert {len(x) for x in written.values()} == {task.writes}
    assert len(memory) == task.pairs
    asked = set()
    while tokens:
        ask, key = tokens.pop(0), tokens.pop(0)
        assert ask == 1 and key not in asked
        asked.add(key)
        found.nothing()
        found.answer(memory[key], 0)
    assert asked == set(memory)
    return found


def needles(task, tokens):
    found, tokens, marks, local = Reading(), list(tokens), {}, {}
    first, segments, marked, at = 3 + task.needles, 0, 0, None
    while tokens:
        token = tokens.pop(0)
        found.nothing()
        if token == 2:
            segments += 1
            local = {}
            for _ in range(task.pairs):
                key, value = pair(task, tokens, first)
                assert key not in local
                local[key] = value
                found.nothing(2)
            questions, left = task.questions, set(local)
        elif token == 1 and segments == task.segments and not questions:
            mark = tokens.pop(0)
            assert mark in marks
            found.answer(marks[mark], 0)
            assert [*marks][marked] == mark
            marked += 1
        elif token == 1:
            key = tokens.pop(0)
            left.remove(key)
            questions -= 1
            if task.level == 1:
                found.nothing()
            else:
                found.answer(local[key], 1)
        else:
            assert token == 3 + len(marks) and (not segments or not questions)
            assert segments < task.segments
            assert at in (None, segments)  # all in one place
            at = segments
            marks[token] = tokens.pop(0)
            assert first + task.keys <= marks[token] < task.vocabulary
            found.nothing()
    assert segments == task.segments and marked == len(marks)
    assert len(marks) == (task.needles if task.level == 3 else 1)
    return found


def scope(task, tokens):
    found, tokens, before = Reading(), list(tokens), set()
    for _ in range(task.segments):
        assert tokens.pop(0) == 2
        found.nothing()
        memory, written = {}, {}
        for _ in range(task.pairs * task.writes):
            key, value = pair(task, tokens, 4)
            assert value not in written.setdefault(key, [])
            written[key].append(value)
            memory[key] = value
            found.nothing(2)
        assert [len(x) for x in written.values()] == task.pairs * [task.writes]
        asked = set()
        for _ in range(2 * task.questions):
            assert tokens.pop(0) == 1
            found.nothing()
            key = tokens.pop(0)
            assert 4 <= key < 4 + task.keys and key not in asked
            asked.add(key)
            inside = key in memory
            found.answer(memory.get(key, 3), int(not inside))
        assert len(asked & set(memory)) == task.questions
        others = before - set(memory)
        wanted = min(task.questions, len(others))
        assert len(asked & others) == wanted
        before |= set(memory)
    assert not tokens
    return found


def apply(permutation, things):
    """What stood at place i goes to place permutation[i]."""
    after = list(things)
    for i, x in enumerate(things):
        after[permutation[i]] = x
    return after


def permutations(n):
    """In lexicographic order, and which of them are swaps, by sorting."""

    def all_of(left):
        if not left:
            return [[]]
        return [
            [x, *rest]
            for x in left
            for rest in all_of([y for y in left if y != x])
        ]

    def swaps(p):
        p, count = list(p), 0
        for i in range(n):
            while p[i] != i:
                j = p[i]
                p[i], p[j] = p[j], p[i]
                count += 1
        return count

    every = all_of(list(range(n)))
    return every, [i for i, p in enumerate(every) if swaps(p) == 1]


def state_tracking(task, tokens):
    found = Reading()
    kind, n = task.group[0], int(task.group[1:])
    if kind == "Z":
        inputs = list(range(n))
    else:
        every, swaps = permutations(n)
        inputs = swaps if task.inputs == "swaps" else list(range(len(every)))
    first = 1 + task.parts * len(inputs)
    assert tokens[0] == 0
    found.nothing()
    total, things = 0, list(range(n))
    for i in range(1, len(tokens), task.parts):
        parts = tokens[i : i + task.parts]
        number = parts[0] - 1
        assert 0 <= number < len(inputs)
        assert parts == [
            1 + number + j * len(inputs) for j in range(len(parts))
        ]
        x = inputs[number]
        if kind == "Z":
            total = (total + x) % n
            state = total
        else:
            things = apply(every[x], things)
            # The product takes i to where thing i has come.
            state = every.index([things.index(i) for i in range(n)])
        found.nothing(task.parts - 1)
        found.answer(first + state, 0)
    return found


def reassignment(task, tokens):
    """Python runs the program; what it prints are the answers."""
    out, written, found = io.StringIO(), Counter(), Reading()
    program = bytes(tokens).decode()
    with contextlib.redirect_stdout(out):
        exec(program)
    printed = out.getvalue().split()
    lines = program.splitlines()
    assert program.endswith("\n") and len(printed) == task.questions
    assert len({line[0] for line in lines[: task.variables]}) == task.variables
    for number, line in enumerate(lines, 1 - task.variables):
        asks = number > 0 and number % 2 == 0
        found.nothing(len(line))
        if asks:
            name = re.fullmatch(r"print\(([a-z])\)", line)[1]
            times = written[name] - 1
            group = sum(times >= least for least in (1, 3, 7, 15))
            found.answer(ord(printed.pop(0)), group)
        else:
            written[re.fullmatch(r"([a-z])=\d", line)[1]] += 1
            found.nothing()
    assert len(written) == task.variables
    return found


def calls(task, tokens):
    """Names in a dictionary of their own per call, until an empty line."""
    found, ever = Reading(), set()
    *programs, rest = bytes(tokens).decode().split("\n\n")
    assert rest == "" and len(programs) == task.calls
    for program in programs:
        held, written, lines = {}, Counter(), program.split("\n")
        assert len(lines) == 2 * task.questions
        for assigned, printed in zip(lines[::2], lines[1::2], strict=True):
            name, digit = re.fullmatch(r"([a-z])=(\d)", assigned).groups()
            held[name] = digit
            written[name] += 1
            found.nothing(len(assigned) + 1 + len(printed))
            name = re.fullmatch(r"print\(([a-z])\)", printed)[1]
            times = written[name] - 1
            group = sum(times >= least for least in (1, 3, 7, 15))
            found.answer(
                ord(held.get(name, "?")),
                2 + group if name in held else int(name in ever),
            )
        assert len(held) <= task.variables
        ever |= held.keys()
        found.nothing()
    assert len(ever) <= task.names
    return found


READERS = {
    "AssociativeRecall": associative_recall,
    "OverwritingRecall": rewriting,
    "Calls": calls,
    "Reassignment": reassignment,
    "RepeatedRecall": rewriting,
    "Needles": needles,
    "Scope": scope,
    "Sections": scope,
    "StateTracking": state_tracking,
}


def read(task, tokens):
    """One sequence, a list of tokens, as its task's reader reads it."""
    return READERS[type(task).__name__](task, list(tokens))
