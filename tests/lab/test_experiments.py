"""Experiments: one run, grids, files, processes, tables, the program."""

import json
import math
import multiprocessing
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastweights.models import LAYERS, LanguageModel
from fastweights_lab import experiments
from fastweights_lab.commands import experiments as command
from fastweights_lab.commands.experiments import match_records
from fastweights_lab.experiments import (
    EXPERIMENTS,
    Grid,
    TrainingStep,
    Trial,
    Variant,
    accuracy,
    at_edge,
    best,
    recall_record,
    recorded,
    run,
    summary,
    workers,
)
from fastweights_lab.experiments.grid import STEPS
from fastweights_lab.experiments.recall_record import pack, unpack, write
from fastweights_lab.experiments.trial import (
    TESTS,
    VALIDATION,
    answers,
    stages,
)
from fastweights_lab.program import main
from fastweights_lab.records import append, load, matching, processor, read
from fastweights_lab.tasks import IGNORE, Needles, RepeatedRecall, Scope

TASK = RepeatedRecall(pairs=2, writes=1, keys=4, values=4)
TINY = {
    "dim": 32,
    "head_dim": 8,
    "rows": 32,
    "steps": 3,
    "test_rows": 8,
    "warmup": 1,
}
TRIAL = Trial("tiny", "delta", (TASK,), {"pairs": TASK}, **TINY)
GRID = Grid(
    "Does it run?",
    train=(TASK,),
    tests={"pairs": TASK},
    variants={
        "delta": Variant(("recurrence",), {"recurrence": {"decay": None}}),
        "softmax": Variant(("softmax",), settings={"num_heads": 2}),
    },
    settings=TINY,
    lrs=(1e-3, 1e-2),
    seeds=(0, 1),
    quick={"only": ("delta",), "seeds": (5,), "settings": {"steps": 2}},
)


def are_same_run(a, b):
    """Two records, but for the time they took."""
    return {**a, "seconds": 0} == {**b, "seconds": 0}


# One run.


def test_a_run_learns_what_its_state_can_hold():
    learn = {"steps": 100, "lr": 2e-2, "warmup": 10, "rows": 64}
    trial = replace(TRIAL, **learn, test_rows=64)
    shown = []
    record = run(trial, "cpu", every=30, progress=lambda *x: shown.append(x))
    assert record["accuracy"]["pairs"]["recall"] > 0.95
    assert record["validation"] > 0.95
    assert record["chance"] == {"pairs": 0.25}
    assert [x[0] for x in shown] == [30, 60, 90, 100]
    assert shown[-1][1] < 0.5 and shown[-1][2] > 0.9
    assert record["state bytes"] == 4 * (8 * 8 + 3 * 24)
    assert record["device"] == processor() and record["seconds"] > 0
    assert record["torch"] == torch.__version__
    assert json.loads(json.dumps(record))["settings"] == trial.settings()


def test_a_run_comes_out_the_same_twice_and_another_seed_does_not():
    told = []

    def tell(*figures):
        told.append(figures)

    a, b = (run(TRIAL, "cpu", progress=tell) for _ in "ab")
    assert are_same_run(a, b)
    run(replace(TRIAL, seed=1), "cpu", progress=tell)
    assert told[0] == told[1] != told[2]


class Watched(RepeatedRecall):
    """Says which seeds were drawn, and for how many rows."""

    drawn = ()

    def batch(self, rows, seed, device="cpu"):
        Watched.drawn += ((self.pairs, rows, seed),)
        return super().batch(rows, seed, device)


def test_trained_validated_and_tested_sequences_have_seeds_of_their_own():
    one, two = (Watched(pairs=n, keys=4, values=4) for n in (1, 2))
    Watched.drawn = ()
    run(
        replace(TRIAL, train=(one, two), tests={"a": two, "b": one}, seed=2),
        "cpu",
    )
    start = 2 * STEPS
    assert Watched.drawn == (
        (1, 32, start),
        (2, 32, start + 1),
        (1, 32, start + 2),
        (1, 8, VALIDATION),
        (2, 8, VALIDATION + 1),
        (2, 8, TESTS),
        (1, 8, TESTS + 1),
    )
    assert 4095 * STEPS + STEPS - 1 < VALIDATION < TESTS < 2**32


def test_a_step_has_its_own_learning_rate_and_gradients_of_its_own():
    trial = replace(TRIAL, steps=40, warmup=4)
    torch.manual_seed(0)
    model = LanguageModel(trial.model_config)
    step = TrainingStep(trial, model)
    for i in range(3):
        before = torch.cat([x.flatten() for x in model.parameters()])
        batch = TASK.batch(trial.rows, i)
        logits, targets, _ = answers(model, batch)
        wanted = F.cross_entropy(logits, targets)
        grads = torch.autograd.grad(wanted, [*model.parameters()])
        loss, right = step(i)
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
        hits = (logits.argmax(-1) == targets).float().mean()
        assert right.item() == pytest.approx(hits.item())
        norm = nn.utils.get_total_norm(grads)
        part = min(1.0, trial.clip / norm.item())
        for x, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(x.grad, part * grad)
        after = torch.cat([x.flatten() for x in model.parameters()])
        assert not torch.equal(after, before)
        (rate,) = {group["lr"] for group in step.optimizer.param_groups}
        assert rate == trial.learning_rate(i)


def test_accuracy_is_the_share_of_right_answers_per_kind():
    task = Scope(segments=2, pairs=2, questions=1, keys=4, values=2)
    torch.manual_seed(0)
    trial = replace(TRIAL, train=(task,), tests={"a": task})
    untied = replace(trial.model_config, tie_embeddings=False)
    model = LanguageModel(untied)  # it says many things
    hits = {kind: [] for kind in task.kinds}
    for rows, seed in ((64, 9), (36, 9 + 1024)):
        batch = task.batch(rows, seed)
        said = model(batch.tokens)[0].argmax(-1)
        for b, t in (batch.targets != IGNORE).nonzero().tolist():
            kind = task.kinds[batch.groups[b, t]]
            hits[kind].append(bool(said[b, t] == batch.targets[b, t]))
    found = accuracy(model, task, 100, 9)
    assert found == {
        kind: pytest.approx(sum(x) / len(x)) for kind, x in hits.items()
    }
    assert len({*found.values()}) == 2
    plain = Needles(level=1, segments=1)
    model = LanguageModel(replace(trial.model_config, vocab_size=103))
    assert [*accuracy(model, plain, 4, 0)] == ["needle"]


def test_a_model_that_has_diverged_answers_nothing(tmp_path):
    """Where argmax would say token 0, or a larger one."""
    model = LanguageModel(TRIAL.model_config)
    targets = TASK.batch(64, 0).targets
    token = int(targets[targets != IGNORE][0])
    for i in (0, token):  # the first that is no number is the largest
        model.logits = lambda x, i=i: torch.full(
            (len(x), 128), math.nan
        ).index_fill(1, torch.arange(i), 0.0)
        assert set(accuracy(model, TASK, 64, 0).values()) == {0.0}
    append(tmp_path / "a", {"settings": TRIAL.settings(), "x": (math.nan, 1)})
    (found,) = read(tmp_path / "a")
    assert found["x"] == [None, 1]


def test_the_model_has_an_mlp_if_one_is_asked_for():
    two = replace(TRIAL, num_layers=2, mlp_ratio=2.0)
    model = LanguageModel(two.model_config)
    assert [block.mlp is None for block in model.blocks] == [False, False]
    assert two.model_config.mlp_width == 64
    assert LanguageModel(TRIAL.model_config).blocks[0].mlp is None
    assert TRIAL.model_config.vocab_size == TASK.vocabulary


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"steps": 0}, "steps: got 0"),
        ({"lr": 0.0}, "lr: got 0.0, need > 0"),
        ({"steps": STEPS + 1}, "steps: got 524289, need <= 524288"),
        ({"seed": 4096}, "seed: got 4096, need 0 to 4095"),
        ({"tests": {}}, "train, tests: got none"),
        ({"pattern": ("lstm",)}, "pattern: got 'lstm'"),
        ({"options": {"kda": {"x": 1}}}, "options: got 'x' for kda"),
    ],
)
def test_settings_that_do_not_fit_are_named(wrong, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        replace(TRIAL, **wrong)


# Softmax among the recurrences.


@pytest.mark.parametrize("rope_theta", [None, 100.0])
def test_softmax_is_the_sum_over_tokens_in_the_same_surroundings(rope_theta):
    torch.manual_seed(0)
    layer = experiments.ConvolvedSoftmax(
        6, 2, 4, rope_theta=rope_theta
    ).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    y, after = layer(x)
    q, k, v, _ = layer.convolution(layer.qkv_proj(x))
    if rope_theta is not None:
        at = torch.arange(5.0, dtype=torch.float64)[:, None, None]
        turn = torch.polar(
            torch.ones_like(at), at * rope_theta ** (-torch.arange(2) / 2)
        )
        q, k = (
            torch.view_as_real(turn * torch.complex(*z.chunk(2, -1)))
            .transpose(-1, -2)
            .flatten(-2)
            for z in (q, k)
        )
    o = torch.zeros_like(v)
    for t in range(5):
        scores = (q[:, t, None] * k[:, : t + 1]).sum(-1) / 2
        o[:, t] = (scores.softmax(1)[..., None] * v[:, : t + 1]).sum(1)
    wanted = layer.o_proj(layer.norm(o, layer.gate_proj(x)))
    torch.testing.assert_close(y, wanted)
    assert torch.equal(after.values, v)
    with pytest.raises(ValueError, match=r"^state, cu_seqlens: got one"):
        layer(x, after)


# Grids.


def test_a_grid_has_every_combination_seed_by_seed():
    trials = GRID.trials("tiny")
    assert [(t.seed, t.lr, t.variant) for t in trials] == [
        (seed, lr, name)
        for seed in (0, 1)
        for lr in (1e-3, 1e-2)
        for name in ("delta", "softmax")
    ]
    assert {t.num_heads for t in trials if t.variant == "softmax"} == {2}
    assert trials[0] == replace(
        TRIAL, lr=1e-3, options={"recurrence": {"decay": None}}
    )
    sized = replace(GRID, sizes=((1, 4), (2, 8))).only(("delta",))
    assert len(sized.trials("tiny")) == 8
    quick = GRID.quickly().trials("tiny")
    assert [(t.seed, t.steps, t.rows, t.lr) for t in quick] == [
        (5, 2, 32, 1e-3),
        (5, 2, 32, 1e-2),
    ]
    with pytest.raises(ValueError, match=r"^only: got 'rnn', need one of del"):
        GRID.only(("rnn",))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_compare_rates_and_seeds_and_their_models_fit(name):
    grid = EXPERIMENTS[name]
    trials = grid.trials(name)
    assert len(grid.lrs) >= 3 and len(grid.seeds) >= 3
    each = {(t.variant, t.num_heads, t.head_dim, t.lr, t.seed) for t in trials}
    assert len(each) == len(trials)
    assert {*grid.train} & {*grid.tests.values()}
    assert len(grid.quickly().trials(name)) <= 8
    for trial in trials:
        if (trial.seed, trial.lr) == (grid.seeds[0], grid.lrs[0]):
            LanguageModel(trial.model_config, device=torch.device("meta"))


# Files.


def test_what_was_being_written_when_the_program_died_is_written_again(
    tmp_path,
):
    file = tmp_path / "new" / "runs.jsonl"
    one, two = ({"settings": TRIAL.settings(), "n": n} for n in (1, 2))
    assert read(file) == []
    append(file, one)
    with file.open("a") as broken:
        broken.write('{"settings": {"exp')
    assert read(file) == [one]
    append(file, two)
    assert read(file) == [one, two]
    wanted = [of.settings() for of in (replace(TRIAL, seed=3), TRIAL)]
    assert matching(wanted, read(file)) == [None, two]
    file.write_text('{"other": 1}\n')
    with pytest.raises(ValueError, match=r"line 1 of which is no run"):
        read(file)


# Tables.


def record(lr, seed, validation, shares, variant="delta", size=8):
    of = replace(TRIAL, variant=variant, head_dim=size, lr=lr, seed=seed)
    return {
        "settings": of.settings(),
        "validation": validation,
        "accuracy": {"pairs": {"recall": shares}},
        "chance": {"pairs": 0.25},
    }


def test_the_best_rate_is_that_of_the_validation_over_all_seeds():
    runs = [
        record(1e-3, 1, 0.8, 0.10),
        record(1e-3, 0, 0.8, 0.20),
        record(1e-2, 0, 0.9, 0.99),
        record(1e-2, 1, 0.6, 0.99),
        record(1e-1, 0, 1.0, 1.00),  # one seed
        record(1e-2, 0, 0.5, 0.40, "linear"),
    ]
    chosen = best(runs)
    assert {k: len(v) for k, v in chosen.items()} == {
        ("delta", 1, 8): 2,
        ("linear", 1, 8): 1,
    }
    assert [r["settings"]["seed"] for r in chosen["delta", 1, 8]] == [0, 1]
    assert summary(runs).split("\n") == [
        "pairs: RepeatedRecall, chance 0.250",
        "  delta   lr 0.001   recall 0.150 (0.200 0.100)",
        "  linear  lr 0.01    recall 0.400 (0.400)",
    ]
    text = summary([*runs, record(1e-2, 0, 0.5, 0.3, "linear", 16)])
    assert "  linear  1 x 16  lr 0.01    recall 0.300 (0.300)" in text
    assert summary([]) == "no runs yet"


def test_a_best_rate_at_the_end_of_the_rates_is_named():
    def rates(variant, *validations):
        return [
            record(lr, seed, x, 0.5, variant)
            for lr, x in zip((1e-3, 1e-2, 1e-1), validations, strict=False)
            for seed in (0, 1)
        ]

    runs = [
        *rates("rises", 0.1, 0.2, 0.3),
        *rates("falls", 0.3, 0.2, 0.1),
        *rates("within", 0.1, 0.3, 0.2),
        *rates("tied", 0.1, 0.3, 0.3),
        *rates("alone", 0.1),
    ]
    assert at_edge(runs) == {("rises", 1, 8): 1e-1, ("falls", 1, 8): 1e-3}


# Recorded runs.


def test_runs_are_packed_and_come_back_shorter(tmp_path, monkeypatch):
    runs = [
        {
            **record(lr, 0, 0.123456, 0.98765432),
            "device": "cpu",
            "parameters": n,
            "seconds": 12.3456,
        }
        for lr, n in ((1e-3, 50), (1e-2, 51), (1e-1, 3))
    ]
    file = tmp_path / "recall.json"
    write(file, {"tiny": runs, "other": runs[:1]})
    text = json.loads(file.read_text())
    assert text["tiny"]["all"] == {
        "accuracy": {"pairs": {"recall": 0.9877}},
        "chance": {"pairs": 0.25},
        "device": "cpu",
        "seconds": 12.3,
        "validation": 0.1235,
    }
    assert [set(run) for run in text["tiny"]["runs"]] == 3 * [
        {"settings", "parameters"}
    ]
    assert [run["settings"] for run in text["tiny"]["runs"]] == [
        {"lr": 1e-3},
        {"lr": 1e-2},
        {"lr": 1e-1},
    ]
    monkeypatch.setattr(recall_record, "load", {"recall": text}.__getitem__)
    found = recorded("tiny")
    assert [run["settings"] for run in found] == [
        run["settings"] for run in runs
    ]
    assert [run["parameters"] for run in found] == [50, 51, 3]
    assert recorded("other")[0]["settings"] == runs[0]["settings"]
    assert unpack(pack(found)) == found
    with pytest.raises(ValueError, match=r"^experiment: got 'x', need one of"):
        recorded("x")


@pytest.mark.parametrize("name", load("recall"))
def test_what_is_recorded_is_the_whole_grid_and_matches_it(name):
    trials, runs = EXPERIMENTS[name].trials(name), recorded(name)
    assert len(runs) == len(trials) and None not in match_records(trials, runs)
    assert all(run["torch"] and run["device"] for run in runs)


# Processes, and the program.


@pytest.mark.parametrize(
    ("processes", "streams"),
    [(1, 2), pytest.param(2, 1, marks=pytest.mark.full)],
)
def test_runs_in_processes_come_out_as_one_after_another(processes, streams):
    trials = [replace(TRIAL, seed=seed, steps=45) for seed in range(3)]
    told = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = dict(workers.run_jobs(stages, trials, "cpu", 1, lambda *x: None))
    torch.set_num_threads(threads)
    runs = workers.run_jobs(
        stages,
        trials,
        "cpu",
        processes,
        lambda *x: told.append(x[:2]),
        streams,
    )
    found = dict(runs)
    assert sorted(found) == [0, 1, 2]
    assert sorted(told) == [(i, n) for i in range(3) for n in (20, 40, 45)]
    assert all(are_same_run(found[i], alone[i]) for i in range(3))
    if streams == 2:  # they take turns
        assert told[:4] == [(0, 20), (1, 20), (0, 40), (1, 40)]


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """The program, on the small grid alone."""
    monkeypatch.setattr(command, "EXPERIMENTS", {"tiny": GRID})

    def go(*words):
        options = ("--out", str(tmp_path), "--device", "cpu")
        return main("experiments", *words, *options, "--workers", "1")

    go.file = tmp_path / "tiny.jsonl"
    return go


def test_the_program_goes_on_where_it_was_stopped(tiny, monkeypatch, capsys):
    stopped = []

    def runs_two(trial, device, progress):
        if len(stopped) == 2:
            raise KeyboardInterrupt
        stopped.append(trial)
        return stages(trial, device, progress=progress)

    with monkeypatch.context() as patch:
        patch.setattr(command, "stages", runs_two)
        assert tiny("tiny") == 130
    assert stopped == GRID.trials("tiny")[:2]
    assert len(read(tiny.file)) == 2
    assert "the same command goes on" in capsys.readouterr().err
    before = tiny.file.read_text()
    assert tiny("tiny") == 0
    out, err = capsys.readouterr()
    assert "2 runs, 6 to go" in err
    said = [
        f"{t.variant}, {t.num_heads} x 8, lr {t.lr:g}, seed {t.seed}: " in err
        for t in GRID.trials("tiny")
    ]
    assert said == 2 * [False] + 6 * [True]
    assert tiny.file.read_text().startswith(before)
    assert None not in match_records(GRID.trials("tiny"), read(tiny.file))
    assert out.startswith("tiny: Does it run?\n8 of 8 runs\npairs: ")
    after = tiny.file.read_text()
    assert tiny("tiny") == 0 and tiny.file.read_text() == after


def test_options_of_the_program_change_the_grid(tiny, capsys):
    words = ("tiny", "--only", "delta", "--seeds", "7", "--steps", "1")
    assert tiny(*words, "--lrs", "0.5", "--dry") == 0
    assert "0 of 1 runs\nno runs yet" in capsys.readouterr().out
    assert not tiny.file.exists()
    assert tiny(*words, "--lrs", "0.5") == 0
    (found,) = read(tiny.file)
    of = found["settings"]
    assert (of["variant"], of["seed"], of["lr"], of["steps"]) == (
        "delta",
        7,
        0.5,
        1,
    )
    assert tiny("tiny", "--quick", "--dry", "--only", "softmax") == 0
    assert "0 of 2 runs" in capsys.readouterr().out
    assert tiny() == 0
    assert "tiny                   8 runs  Does it run?" in (
        capsys.readouterr().out
    )


def test_the_program_records_whole_grids_alone(tiny, monkeypatch, capsys):
    both = {"tiny": GRID, "half": replace(GRID, seeds=(0, 1, 2))}
    monkeypatch.setattr(command, "EXPERIMENTS", both)
    for name in both:
        for t in GRID.trials(name):
            for one in (t, replace(t, steps=7)):  # the second is no part
                found = {
                    **record(t.lr, t.seed, t.lr, 0.5),
                    "settings": one.settings(),
                    "seconds": 1.0,
                }
                append(tiny.file.with_name(f"{name}.jsonl"), found)
    file = tiny.file.with_name("recall.json")
    assert tiny("--record", str(file)) == 0
    assert capsys.readouterr().out.split("\n") == [
        "tiny: 8 runs",
        "  delta, 1 x 8: best at the end of the rates, 0.01",
        "  softmax, 2 x 8: best at the end of the rates, 0.01",
        "half: 8 runs, 4 to go: left out",
        "",
    ]
    text = json.loads(file.read_text())
    assert list(text) == ["tiny"]
    assert None not in match_records(GRID.trials("tiny"), unpack(text["tiny"]))
    assert len(text["tiny"]["runs"]) == 8
    file.unlink()
    assert tiny("half", "--record", str(file)) == 2
    assert "in which no grid is done" in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rnn", "--record", "x"], "name: got 'rnn', need one of tiny"),
        (["rnn"], "name: got 'rnn', need one of tiny"),
        (["tiny", "--only", "rnn"], "only: got 'rnn'"),
        (["tiny", "--steps", "0"], "steps: got 0"),
        (["tiny", "--seeds", "-1"], "seed: got -1"),
    ],
)
def test_the_program_refuses_in_one_line(tiny, capsys, words, says):
    assert tiny(*words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fastweights experiments: {says}")
    assert err.count("\n") == 1 and not tiny.file.exists()


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_it_leaves_no_process_behind_and_loses_no_run(tmp_path):
    words = ["-m", "fastweights", "experiments", "parity", "--device", "cpu"]
    words += ["--out", str(tmp_path), "--workers", "2", "--seeds", "0"]
    command = [sys.executable, *words]
    file = tmp_path / "parity.jsonl"
    program = subprocess.Popen([*command, "--steps", "40"])
    try:
        deadline = time.monotonic() + 300
        while not read(file) and time.monotonic() < deadline:
            time.sleep(0.1)
        listed = f"/proc/{program.pid}/task/{program.pid}/children"
        children = Path(listed).read_text().split()
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait()
    done = len(read(file))
    assert 0 < done < 12
    deadline = time.monotonic() + 60
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, children))
    ran = subprocess.run(
        [*command, "--steps", "40"], capture_output=True, text=True
    )
    assert f"{done} runs, {12 - done} to go" in ran.stderr
    assert "12 of 12 runs" in ran.stdout


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.full
def test_a_worker_that_dies_is_an_error_that_says_so():
    dead = {"recurrence": {"A_range": (2.0, 1.0)}}
    trials = [replace(TRIAL, options=dead), replace(TRIAL, steps=10**5)]
    found = workers.run_jobs(stages, trials, "cpu", 2, lambda *x: None)
    with pytest.raises(workers.WorkerDied, match=r"^workers: one died"):
        next(found)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "kind", ["ttt_linear", "ttt_mlp", "lact", "recurrence"]
)
def test_a_convolution_stands_in_front_of_layers_without_one(kind):
    torch.manual_seed(0)
    plain, layer = LAYERS[kind], LAYERS[f"convolved_{kind}"]
    found = layer(16, num_heads=2)
    alone = plain(16, num_heads=2)
    own = {k: x for k, x in found.state_dict().items() if "before" not in k}
    alone.load_state_dict(own)
    x = torch.randn(2, 20, 16)
    taps = found.before.weight
    padded = F.pad(x, (0, 0, taps.shape[1] - 1, 0))
    mixed = x + torch.stack(
        [(padded[:, t : t + 4].mT * taps).sum(-1) for t in range(20)], 1
    )
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found(x)[0], alone(mixed)[0], **close)
    with pytest.raises(ValueError, match="cu_seqlens: got one"):
        found(x, cu_seqlens=torch.tensor([0, 20]))
