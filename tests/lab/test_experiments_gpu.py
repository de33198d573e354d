"""Experiments on a GPU: a recorded step is the step, beside others too."""

import gc
from dataclasses import replace

import pytest
import torch

from fastweights.models import LanguageModel
from fastweights_lab.experiments import EXPERIMENTS, Trial, run, workers
from fastweights_lab.experiments.captured_step import EAGER, TrainingStep
from fastweights_lab.experiments.trial import a_stream, stages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

STEPS = 12


def trial(name: str, variant: str, **changed) -> Trial:
    grid = EXPERIMENTS[name].only((variant,))
    first = grid.trials(name)[0]
    return replace(first, steps=STEPS, warmup=2, lr=1e-2, **changed)


def losses(of: Trial, eager: int, monkeypatch) -> list[float]:
    monkeypatch.setattr(
        "fastweights_lab.experiments.captured_step.EAGER", eager
    )
    torch.manual_seed(0)
    with a_stream("cuda"):
        step = TrainingStep(of, LanguageModel(of.model_config, device="cuda"))
        return [step(i)[0].item() for i in range(STEPS)]


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("needles", "gated delta"),
        ("recall", "softmax, rotary"),
        ("parity", "beta up to 2"),
        ("recall", "KDA"),
        ("reassigned", "hybrid"),
        ("overwriting-deep", "TTT-Linear, 16"),
        ("overwriting-deep", "TTT-MLP, 4"),
        ("overwriting-deep", "Titans, 16"),
        ("overwriting-deep", "LaCT, 16"),
        ("overwriting-deep", "MesaNet"),
    ],
)
def test_recorded_steps_are_the_steps(name, variant, monkeypatch):
    of = trial(name, variant)
    want = losses(of, STEPS, monkeypatch)
    got = losses(of, EAGER, monkeypatch)
    assert len(set(want)) == STEPS
    assert got == pytest.approx(want, rel=2e-3)


def test_runs_beside_each_other_are_those_alone():
    of = trial("recall", "delta", test_rows=32)
    trials = [replace(of, seed=seed) for seed in range(4)]
    alone = [last_loss(one) for one in trials]
    told = {}

    def tell(i, _step, loss, _right):
        told[i] = loss

    list(workers.run_jobs(stages, trials, "cuda", 1, tell, streams=4))
    found = [told[i] for i in range(4)]
    assert found == pytest.approx(alone, rel=2e-3, abs=0.02)
    assert len(set(alone)) == 4


def last_loss(of: Trial) -> float:
    told = []
    run(of, "cuda", progress=lambda *x: told.append(x))
    return told[-1][1]


def test_what_a_run_leaves_behind_does_not_spoil_a_recording(monkeypatch):
    """Its graph is in a cycle: a collection destroys it, at any time."""
    of = trial("recall", "delta", test_rows=32)
    begin = torch.cuda.CUDAGraph.capture_begin

    def collecting(graph, **options):
        begin(graph, **options)
        gc.set_threshold(1, 1, 1)

    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(0)
        alone = last_loss(of)
        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", collecting)
        again = last_loss(of)
    finally:
        gc.set_threshold(*thresholds)
    assert again == pytest.approx(alone, rel=2e-3)
