"""What chapter 10's trained models write, and what is inside them."""

import json
import math
from dataclasses import replace

import pytest
import torch

from fastweights.models import LanguageModel
from fastweights_lab.bench import continuations, inside_calls
from fastweights_lab.bench.inside_calls import Places
from fastweights_lab.experiments import EXPERIMENTS, comparison
from fastweights_lab.experiments.trial import answers
from fastweights_lab.program import main
from fastweights_lab.tasks import Calls
from fastweights_lab.text import corpus


def test_models_go_on_from_the_same_places(monkeypatch, tmp_path):
    little = replace(comparison.SMALL, length=64, tokens=64, steps=1)
    monkeypatch.setattr(continuations, "BASE", little)
    monkeypatch.setattr(continuations, "NEW", 20)
    file = tmp_path / "continued.json"
    main("bench", "continued", "--json", str(file))
    rows = json.loads(file.read_text("utf-8"))["rows"]
    assert [row["variant"] for row in rows] == [*continuations.MODELS]
    held_out = corpus.read().held_out
    for row in rows:
        for of, place in zip(
            row["continued"], continuations.PLACES, strict=True
        ):
            whole = held_out[of["file"]].decode()
            assert (of["file"], of["known"][-len(place[1]) :]) == place
            assert of["known"] + of["true"] in whole
            assert whole[of["at"] :].startswith(of["true"])
            assert len(of["bits"]) == 20 and min(of["bits"]) > 0
            assert 0 < len(of["drawn"]) <= 20


def test_the_places_are_held_out_and_there_once():
    held_out = corpus.read().held_out
    for file, line in continuations.PLACES:
        assert file < len(held_out) / 2  # of those that the race is scored on
        assert held_out[file].count(line.encode()) == 1


def test_places_of_a_program_of_calls():
    task = Calls(questions=3, calls=2)
    batch = task.batch(4, seed=0)
    at = Places(batch.tokens, task)
    text = [bytes(row.tolist()).decode() for row in batch.tokens]
    for row, program in enumerate(text):
        lines = program.replace("\n\n", "\n").splitlines()
        assigned = [line for line in lines if "=" in line]
        printed = [line for line in lines if "(" in line]
        for name, found in (
            ("digit", [line[0] for line in assigned]),
            ("newline", [line[0] for line in assigned]),
            ("answer", [line[6] for line in printed]),
        ):
            letters = at.letter[name][row][getattr(at, name)] + ord("a")
            assert bytes(letters.tolist()).decode() == "".join(found)
        assert [
            i
            for i in range(1, len(program))
            if program[i - 1 : i + 1] == "\n\n"
        ] == at.end.nonzero()[:, 0].tolist()
    assert (batch.targets[0] > 0).equal(at.answer)
    assert at.call.max() == 1


@pytest.mark.parametrize("variant", inside_calls.VARIANTS)
def test_rows_of_a_model_of_calls(variant, monkeypatch):
    found = [
        trial for trial in inside_calls.trials() if trial.variant == variant
    ]
    assert [trial.seed for trial in found] == [0, 1, 2, 3, 4]
    of_grid = EXPERIMENTS["calls"].trials("calls")
    assert all(trial in of_grid for trial in found)
    little = replace(
        found[0],
        steps=1,
        train=(Calls(2, 2, 2),),
        tests={inside_calls.TEST: Calls(questions=36, calls=3)},
    )
    monkeypatch.setattr(inside_calls, "trials", lambda: [little])
    monkeypatch.setattr(inside_calls, "ROWS", 4)
    model, *heads = inside_calls.rows()
    assert {*model["accuracy"]} <= {*Calls.kinds}
    assert [*model["left out"]][-1] == "all heads, 4 tokens"
    assert [(row["layer"], row["head"]) for row in heads] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    for row in heads:
        assert ("halvings" in row) == (variant == "gated delta")
        for of in row["cosine"].values():
            known = [x for x in of if not math.isnan(x)]
            assert len(of) == 26 and known and max(map(abs, known)) <= 1
        assert min(row["strength"].values()) > 0


def test_writes_that_are_left_out(monkeypatch):
    (trial, *_) = inside_calls.trials()
    model = LanguageModel(trial.model_config)
    batch = Calls(questions=4, calls=2).batch(2, seed=0)
    logits = []

    def noted(model, batch):
        for block in model.blocks:
            block.layer.b_proj.register_forward_hook(
                lambda _, __, out: logits.append(out)
            )
        return answers(model, batch)

    monkeypatch.setattr(inside_calls, "answers", noted)
    end = torch.zeros(batch.tokens.shape[1], dtype=torch.bool)
    end[5] = True
    inside_calls.accuracy(model, batch, end, [(1, 0)], tokens=2)
    first, second = (x < -100 for x in logits)
    assert not first.any()
    assert second[:, 5:7, 0].all() and second.sum() == 2 * len(batch.tokens)
