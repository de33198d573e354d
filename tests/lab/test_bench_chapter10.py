"""What chapter 10's trained models write, and what is inside them."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fastweights.models import LanguageModel
from fastweights_lab.bench import calls, continued
from fastweights_lab.experiments import EXPERIMENTS, comparison
from fastweights_lab.experiments.learned_gates import recurrence_inputs
from fastweights_lab.program import main
from fastweights_lab.tasks import Calls
from fastweights_lab.text import corpus


def test_models_go_on_from_the_same_places(monkeypatch, tmp_path):
    little = replace(comparison.SMALL, length=64, tokens=64, steps=1)
    monkeypatch.setattr(continued, "BASE", little)
    monkeypatch.setattr(continued, "NEW", 20)
    file = tmp_path / "continued.json"
    main("bench", "continued", "--json", str(file))
    rows = json.loads(file.read_text("utf-8"))["rows"]
    assert [row["variant"] for row in rows] == [*continued.MODELS]
    held_out = corpus.read().held_out
    for row in rows:
        for of, place in zip(row["continued"], continued.PLACES, strict=True):
            whole = held_out[of["file"]].decode()
            assert (of["file"], of["known"][-len(place[1]) :]) == place
            assert of["known"] + of["true"] in whole
            assert whole[of["at"] :].startswith(of["true"])
            assert len(of["bits"]) == 20 and min(of["bits"]) > 0
            assert 0 < len(of["drawn"]) <= 20


def test_the_places_are_held_out_and_there_once():
    held_out = corpus.read().held_out
    for file, line in continued.PLACES:
        assert file < len(held_out) / 2  # of those that the race is scored on
        assert held_out[file].count(line.encode()) == 1


def test_places_of_a_program_of_calls():
    task = Calls(questions=3, calls=2)
    text = bytes(task.batch(1, seed=0).tokens[0].tolist()).decode()
    at, call, end = calls.places(len(text), task)
    assert [text[i - 3 : i + 1] for i in at] == re.findall(r".=.\n", text)
    assert call.tolist() == [text[:i].count("\n\n") for i in at]
    assert end.tolist() == [x.end() - 1 for x in re.finditer("\n\n", text)]


@pytest.mark.parametrize("variant", calls.HINDERED)
def test_rows_of_a_model_of_calls(monkeypatch, variant):
    found = calls.trials(variant)
    assert [trial.seed for trial in found] == [0, 1, 2, 3, 4]
    of_grid = EXPERIMENTS["calls"].trials("calls")
    if variant == calls.LONG:
        assert {task.calls for x in found for task in x.train} == {16}
    else:
        assert all(trial in of_grid for trial in found)
    little = replace(
        found[0],
        steps=1,
        train=(Calls(2, 2, 2),),
        tests={calls.TEST: Calls(questions=36, calls=3)},
    )
    monkeypatch.setattr(calls, "trials", lambda _: [little])
    monkeypatch.setattr(calls, "ROWS", 4)
    assert not [*calls.rows([variant], seeds=[1])]
    every = [*calls.rows([variant], seeds=[0])]
    rows, (as_it_is, *others) = every[:4], every[4:]
    assert as_it_is.items() >= calls.NOT_HINDERED.items()
    assert as_it_is["program"].count("\n\n") == calls.CALLS
    assert len(others) > 1 and not any("program" in row for row in others)
    assert [(row["layer"], row["head"]) for row in rows] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    for row in rows:
        known = [x for x in row["cosine"] if not math.isnan(x)]
        assert len(row["cosine"]) == 26 and known
        assert max(map(abs, known)) <= 1
        if variant == "gated delta":
            kept = [*row["kept"], row["kept elsewhere"]]
            assert len(kept) == 5 and 0 < min(kept) < max(kept) < 1


def test_errors_call_by_call_of_one_who_always_says_nothing(monkeypatch):
    task = Calls(variables=2, questions=3, calls=4)
    texts = []

    def silent(_, batch):
        texts.extend(bytes(x.tolist()).decode() for x in batch.tokens)
        there = batch.targets >= 0
        targets, groups = batch.targets[there], batch.groups[there]
        logits = F.one_hot(0 * targets + ord("?"), 128)
        return logits, targets, groups

    monkeypatch.setattr(calls, "ROWS", 100)  # in two passes
    monkeypatch.setattr(calls, "answers", silent)
    found = calls.by_call(None, task)
    own = [0] * 4
    for text in texts:
        for i, call in enumerate(text.split("\n\n")[:4]):
            known = ""
            for line in call.splitlines():
                known += line[0] if line[1] == "=" else ""
                own[i] += "(" in line and line[6] in known
    assert found["own"] == own == found["own wrong"]
    assert found["unset"] == [300 - x for x in own]
    assert found["unset wrong"] == [0] * 4
    assert found["program"] == texts[0] and found["said"] == "?" * 12


@pytest.mark.parametrize(
    ("what", "inputs"), [("unwritten", "beta"), ("unforgotten", "g")]
)
@pytest.mark.parametrize(("ahead", "left"), [(0, 0), (6, 0), (0, 1)])
def test_an_empty_line_and_what_follows_it_do_nothing(
    what, inputs, ahead, left
):
    (trial, *_) = calls.trials("gated delta")
    task = Calls(questions=2, calls=3)
    torch.manual_seed(0)
    model = LanguageModel(trial.model_config)
    tokens = task.batch(1, seed=0).tokens
    (_, before), *_ = recurrence_inputs(model, tokens)
    with calls.hinder(model, task, **{what: 3}, before=ahead, left=left):
        (_, after), *_ = recurrence_inputs(model, tokens)
    text = bytes(tokens[0].tolist()).decode()
    ends = [x.end() - 1 for x in re.finditer("\n\n", text)]
    assert len(ends) == 3 and ends[-1] == len(text) - 1
    still = {end - ahead + i for end in ends[: 2 - left] for i in range(3)}
    still |= {end - ahead + i for end in ends[2:] for i in range(3) if ahead}
    if ahead:
        assert all(text[end - 6 : end - 3] == "nt(" for end in ends)
    for i in range(len(text)):
        want = 0 * before[inputs][0, i] if i in still else before[inputs][0, i]
        assert (after[inputs][0, i] == want).all()
    other = {"beta": "g", "g": "beta"}[inputs]
    assert (after[other] == before[other]).all()


def test_what_a_head_does_where_names_are_set(monkeypatch):
    task = Calls(variables=2, questions=3, calls=2)
    tokens = task.batch(1, seed=0).tokens
    at, call, end = calls.places(tokens.shape[1], task)
    k = torch.zeros(1, tokens.shape[1], 1, 2)
    k[0, at, 0, call] = 1  # along an axis for each call
    k[0, end, 0, torch.arange(2)] = 1
    monkeypatch.setattr(calls, "recurrence_inputs", lambda *_: [(0, {"k": k})])
    (row,) = calls.heads(None, tokens, task)
    known = [x for x in row["cosine"] if not math.isnan(x)]
    set_letters = {*(tokens[0, at - 3] - ord("a")).tolist()}
    assert known == [1.0] * len(set_letters)
    assert all(row["cosine"][letter] == 1 for letter in set_letters)
