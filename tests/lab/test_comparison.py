"""The comparison of language models: its runs, and what it keeps of them."""

import json
import math
from dataclasses import asdict, replace

import pytest

from fastweights_lab import records
from fastweights_lab.commands import compare
from fastweights_lab.experiments import comparison
from fastweights_lab.program import main
from fastweights_lab.text.training import Training

TRIED = ("linear", "KDA", "KDA, slow")
TINY = replace(
    comparison.SMALL,
    length=32,
    tokens=64,
    steps=3,
    warmup=1,
    num_layers=1,
    dim=16,
    eval_windows=2,
)


@pytest.fixture(autouse=True)
def little_text(tmp_path, monkeypatch):
    (tmp_path / "text.py").write_text("def f(x):\n    return x + 1\n" * 400)
    tiny = replace(TINY, corpus=(str(tmp_path / "text.py"),))
    monkeypatch.setattr(compare, "SMALL", tiny)
    return tiny


def test_each_variant_is_a_model_of_its_own(little_text):
    models = {}
    for name in comparison.VARIANTS:
        run = Training(comparison.settings_of(name, 0, little_text))
        names = frozenset(dict(run.model.named_parameters()))
        models[name] = (names, run.settings.pattern, run.settings.options)
    assert len(set(models.values())) == len(models)
    assert not any("A_log" in x for x in models["delta"][0])
    assert not any("b_proj" in x for x in models["decay"][0])
    compared = {x for n in comparison.KINDS for x in comparison.starts(n)}
    assert set(models) == compared | {"gated delta, constant"}


def test_an_unknown_variant_is_named(capsys):
    with pytest.raises(ValueError, match="variant: got 'rope', need one of"):
        comparison.settings_of("rope", 0, TINY)
    assert main("compare", "rope") == 2
    assert "variant: got 'rope'" in capsys.readouterr().err
    assert main("compare", "delta", "--lr", "nan") == 2
    assert "fastweights compare: lr: got nan, need" in capsys.readouterr().err
    for option in ("seeds", "steps", "workers"):
        assert main("compare", "delta", f"--{option}", "0", "--dry") == 2
        said = f"compare: {option}: got 0, need an integer >= 1"
        assert said in capsys.readouterr().err


def test_a_run_says_what_it_was_and_found(little_text):
    run = comparison.train("delta", 1, little_text, every=2)
    assert (run["variant"], run["seed"]) == ("delta", 1)
    assert run["settings"]["seed"] == 1 and run["settings"]["steps"] == 3
    assert [step for step, _ in run["losses"]] == [0, 2]
    assert run["losses"][0][1] == pytest.approx(math.log(257), abs=0.3)
    assert run["after"].startswith("def ")
    assert [place for place, _ in run["by position"]] == [0, 64]
    assert [x["distance"] for x in run["planted"]] == [16, 64]
    assert all(0 < x["bits"] < 20 for x in run["planted"])
    share = run["share"]
    parts = share * run["repeated"] + (1 - share) * run["new"]
    assert parts == pytest.approx(run["bits per byte"])


def test_no_token_changes_a_constant_gate(little_text):
    run = comparison.train("gated delta, constant", 0, little_text)
    before, after = run["at the start"][0], run["learned"][0]
    for layer in (before, after):
        assert all(min(of) == max(of) > 0 for of in layer["halvings"])
    assert before["halvings"] != after["halvings"]


def test_a_run_that_diverges_finds_nan_and_ends(little_text):
    wild = replace(little_text, lr=1e13, clip=1e30, warmup=0, steps=30)
    run = comparison.train("linear", 0, wild, every=9)
    last, loss = run["losses"][-1]
    assert math.isnan(loss) and last < 29
    for name in ("bits per byte", "repeated", "new"):
        assert math.isnan(run[name])
    assert all(math.isnan(bits) for _, bits in run["by position"])
    assert all(math.isnan(x["bits"]) for x in run["planted"])
    assert run["after"] is None


def test_positions_are_those_of_the_windows(little_text):
    run = Training(comparison.settings_of("linear", 0, little_text))
    run.model.token_losses = lambda tokens, targets: (
        (0 * tokens).float() + (targets[:, :1] * 0 + 1) * math.log(2)
    ).cumsum(1)  # position p costs p + 1 bits
    found = comparison.by_position(run, 256)
    scale = run.held_out.tokens_per_byte
    for (place, bits), end in zip(found, (64, 128, 256), strict=True):
        want = sum(range(place + 1, end + 1)) / (end - place)
        assert bits == pytest.approx(want * scale, rel=1e-5)


def test_development_text_chooses_and_other_files_judge(tmp_path):
    text = [f"x = {i}\n" * 40 for i in range(60)]
    (tmp_path / "sixty").mkdir()
    for i, lines in enumerate(text):
        (tmp_path / "sixty" / f"{i:02}.py").write_text(lines)
    tiny = replace(TINY, corpus=(str(tmp_path / "sixty"),))
    read = []
    evaluate = Training.evaluate

    def told(self, stream=None):
        tokens = (self.held_out if stream is None else stream).tokens
        read.append(self.tokenizer.decode(tokens))
        return evaluate(self, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "evaluate", told)
        run = comparison.train("linear", 0, tiny)
    assert read == ["".join(text[57:59]), text[59]]
    assert run["development"] != run["bits per byte"]


def test_the_first_seed_chooses_and_it_goes_on_where_it_stopped(
    tmp_path, monkeypatch, capsys
):
    began = []

    def run(variant, seed, base):
        began.append((variant, seed, base.lr))
        if len(began) == stop:
            raise KeyboardInterrupt
        score = {1e-3: 2.0, 2e-3: 1.0, 4e-3: math.nan}[base.lr]
        score -= 0.5 * (variant == "KDA, slow" and base.lr == 1e-3)
        score -= 1.5 * (variant == "KDA" and base.lr == 1e-3)
        settings = asdict(comparison.settings_of(variant, seed, base))
        return {
            "variant": variant,
            "seed": seed,
            "settings": settings,
            "bits per byte": 9 - score,  # must not choose
            "development": score,
            "repeated": score,
            "new": score,
            "seconds": 1.0,
            "first step": 1.0,
        }

    monkeypatch.setattr(
        compare,
        "run_jobs",
        lambda _, jobs, *__: ((0, run(*job)) for job in jobs),
    )
    file = tmp_path / "text.jsonl"
    words = ["linear", "KDA", "--small", "--seeds", "2", "--json", str(file)]
    words += ["--lr", "1e-3", "2e-3", "4e-3"]
    stop = 4
    assert main("compare", *words) == 130
    assert len(records.read(file)) == 3
    stop = 0
    assert main("compare", *words) == 0
    assert main("compare", *words) == 0  # nothing is left to do
    tried = [(x, 0, lr) for lr in (1e-3, 2e-3, 4e-3) for x in TRIED]
    tried.remove(("KDA", 0, 4e-3))  # for 2e-3 was worse than 1e-3
    assert began[:3] + began[4:9] == tried
    assert began[9:] == [("linear", 1, 2e-3), ("KDA", 1, 1e-3)]
    runs = records.read(file)
    assert runs[6]["development"] is None  # no NaN in JSON
    assert comparison.choose_start(runs, "KDA") == ("KDA", 1e-3)
    assert comparison.choose_start(runs, "delta") is None
    seeds = [
        run["seed"] for run in comparison.chosen_runs(reversed(runs), "KDA")
    ]
    assert seeds == [0, 1]
    assert main("compare", *words, "--dry", "--steps", "9") == 0
    assert "to run: linear, seed 0, lr 0.001" in capsys.readouterr().out


def test_the_recorded_runs_are_complete():
    runs = comparison.load()
    for name in comparison.KINDS:
        seeds = [run["seed"] for run in comparison.chosen_runs(runs, name)]
        assert seeds == [0, 1, 2, 3, 4]
        variant, rate = comparison.choose_start(runs, name)
        tried = {r["settings"]["lr"] for r in runs if r["variant"] == variant}
        assert min(tried) < rate < max(tried)
    for run in runs:
        base = replace(comparison.LARGE, lr=run["settings"]["lr"])
        want = comparison.settings_of(run["variant"], run["seed"], base)
        assert run["settings"] == json.loads(json.dumps(asdict(want)))
        assert run["device"] == "NVIDIA H200"


def test_records_with_old_names_are_read(tmp_path):
    """Those of anybody's own file, so that no run is made again."""
    settings = asdict(TINY)
    old = {old: settings[new] for old, new in records.NEW_NAMES.items()} | {
        k: x
        for k, x in settings.items()
        if k not in records.NEW_NAMES.values()
    }
    records.append(tmp_path / "runs.jsonl", {"settings": old})
    (run,) = records.read(tmp_path / "runs.jsonl")
    assert records.matching([settings], [run]) == [run]
