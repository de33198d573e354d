"""A number planted in text: where it stands, and who finds it again."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastweights_lab.experiments.planted_lines import (
    BEFORE,
    measure_recall,
    plant_lines,
)
from fastweights_lab.text import corpus

TEXT = bytes(range(32, 127)) * 8
STREAM = corpus.Stream.of([TEXT], corpus.ByteTokenizer())


@pytest.mark.parametrize("distance", [1, 7, 100])
def test_the_needle_stands_where_it_should(distance):
    with_it, without = plant_lines(STREAM, distance, 6, seed=3)
    assert with_it.shape == without.shape == (6, BEFORE + distance + 26)
    for one, two in zip(with_it.tolist(), without.tolist(), strict=True):
        text, other = bytes(one).decode(), bytes(two).decode()
        told, asked = text[BEFORE : BEFORE + 13], text[-13:]
        assert told == asked and told[0] == "\n" and told[6:9] == " = "
        assert told[1:6].isalpha() and told[1:6].islower()
        assert told[9:].isdigit() and text[BEFORE + 13] == "\n"
        around = text[:BEFORE] + "?" + text[BEFORE + 14 : -13]
        assert len(around) == BEFORE + distance
        part = (TEXT + TEXT).decode()
        start = part.index(around[:BEFORE])
        assert part[start : start + len(around)][:BEFORE] == around[:BEFORE]
        rest = around[BEFORE + 1 :]
        assert part[start + BEFORE + 1 : start + BEFORE + distance] == rest
        assert other[: BEFORE + 9] == text[: BEFORE + 9]
        assert other[BEFORE + 13 :] == text[BEFORE + 13 :]
        pairs = zip(told[9:], other[BEFORE + 9 : BEFORE + 13], strict=True)
        assert all(a != b for a, b in pairs)
    again, _ = plant_lines(STREAM, distance, 6, seed=3)
    assert torch.equal(again, with_it)
    assert not torch.equal(plant_lines(STREAM, distance, 6)[0], with_it)


class Copier(nn.Module):
    """Says what followed the last five bytes before; else any digit."""

    def __init__(self):
        super().__init__()
        self.embedding = SimpleNamespace(weight=torch.zeros(1))

    def hidden(self, tokens, return_states):
        assert not return_states
        said = torch.full((*tokens.shape, 257), -30.0)
        said[..., ord("0") : ord("9") + 1] = 0.0
        for row, out in zip(tokens.tolist(), said, strict=True):
            for t in range(len(row) - 4, len(row)):
                for s in range(5, t):
                    if row[s - 5 : s] == row[t - 4 : t + 1]:
                        out[t, row[s]] = 30.0
        return said, []

    def logits(self, x):
        return x


def test_who_remembers_finds_it_and_who_does_not_guesses():
    found = measure_recall(Copier(), STREAM, 20, 6, at_once=4)
    assert found["distance"] == 20 and found["right"] == 1.0
    assert found["bits"] < 1e-6 < 10 < found["bits without"]
    forgets = Copier()
    forgets.hidden = lambda x, return_states: (
        Copier().hidden(x[:, BEFORE + 13 :], return_states)[0],
        [],
    )
    found = measure_recall(forgets, STREAM, 20, 40)
    assert found["bits"] == pytest.approx(math.log2(10), abs=1e-3)
    assert found["bits without"] == pytest.approx(found["bits"])
    assert found["right"] == 0.0


def test_a_stream_that_is_too_short_is_named():
    with pytest.raises(ValueError, match=r"^distance: got 800, need"):
        plant_lines(STREAM, 800, 2)
