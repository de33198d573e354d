"""Text, batches and steps of a training run, and the program around them."""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support.inputs import Largest

from fastweights import models
from fastweights_lab import records
from fastweights_lab.commands import train
from fastweights_lab.experiments import comparison
from fastweights_lab.program import main
from fastweights_lab.records import NEW_NAMES
from fastweights_lab.text import corpus
from fastweights_lab.text.training import Settings, Training, read_checkpoint

SMALL = {
    "pattern": ("gated_deltanet", "softmax"),
    "dim": 16,
    "num_heads": 2,
    "length": 16,
    "tokens": 64,
    "steps": 20,
    "warmup": 4,
    "eval_windows": 4,
    "device": "cpu",
}
WORDS = [
    *("--dim", "16", "--num-heads", "2", "--length", "16", "--tokens", "64"),
    *("--warmup", "4", "--eval-windows", "4", "--log-every", "1"),
    *("--device", "cpu"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty little files of numbers, which are soon learned."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        lines = [f"{i} and {j} are {i + j}\n" for j in range(3 + i)]
        (folder / f"{i:02}.txt").write_text("".join(lines))
    (folder / "empty.txt").touch()
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


@pytest.fixture
def settings(folder):
    return Settings(corpus=(str(folder),), **SMALL)


# Text.


def test_a_folder_is_read_in_order_and_its_end_held_out(folder):
    text = corpus.read([folder], [".txt"])
    assert len(text.train) == 19 and len(text.held_out) == 1
    assert text.train[0].startswith(b"0 and 0 are 0\n")
    assert text.held_out[0].startswith(b"19 and 0 are 19\n")
    whole = b"".join(p.read_bytes() for p in sorted(folder.glob("*.txt")))
    assert text.size == len(whole)
    assert text.sha256 == hashlib.sha256(whole).hexdigest()


def test_of_one_file_the_last_bytes_are_held_out(folder):
    file = folder / "19.txt"
    text = corpus.read([file])
    whole = file.read_bytes()
    assert text.train[0] + text.held_out[0] == whole
    assert len(text.held_out[0]) == round(0.05 * len(whole))


def test_the_standard_library_is_that_of_every_recorded_run(
    monkeypatch, tmp_path
):
    text = corpus.read()
    runs = comparison.load()
    assert len(runs) == 99
    for run in runs:
        assert run["corpus"] == {"bytes": text.size, "sha256": text.sha256}
    assert len(text.train) + len(text.held_out) == 511
    (tmp_path / "one.py").write_bytes(text.train[9])
    both = corpus.read([tmp_path, "stdlib", tmp_path, "stdlib"])
    assert both.size == text.size and both.train[0] == text.train[9]
    monkeypatch.setattr(corpus, "STDLIB", "0" * 64)
    with pytest.raises(ValueError, match=r"stdlib\.tar\.gz with sha256 4257"):
        corpus.read()


def test_no_text_is_both_trained_on_and_held_out(folder, tmp_path):
    """Wherever it comes from twice."""
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    hidden = copied / ".ipynb_checkpoints"
    hidden.mkdir()
    (hidden / "00-checkpoint.txt").write_text("0 and 1 are 1\n")
    (copied / "._00.txt").write_text("of another system")
    (copied / "99.txt").write_bytes((copied / "00.txt").read_bytes())
    once = corpus.read([folder])
    for sources in (
        [copied],
        [copied, copied],
        [copied, f"{copied}/../copied", folder],
        [copied, folder / "00.txt"],
    ):
        assert corpus.read(sources) == once
    twice = corpus.read([folder / "01.txt", folder / "01.txt"])
    assert twice == corpus.read([folder / "01.txt"])


def test_bytes_are_tokens(folder):
    tokenizer = corpus.ByteTokenizer()
    tokens = tokenizer.encode("aé".encode())
    assert tokens.tolist() == [97, 195, 169]
    assert (
        tokenizer.decode(torch.tensor([256, 97, 195, 169, 195])) == "aé\ufffd"
    )
    assert not len(tokenizer.encode(b""))
    stream = corpus.Stream.of([b"ab", b"c"], tokenizer)
    assert stream.tokens.tolist() == [256, 97, 98, 256, 99]
    assert stream.starts.tolist() == [0, 3, 5]
    assert stream.tokens.dtype == torch.int16
    assert stream.tokens_per_byte == 5 / 3


@pytest.fixture(scope="module")
def tokenizer_file(folder, tmp_path_factory):
    from tokenizers import Tokenizer, models, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    trainer = trainers.BpeTrainer(
        vocab_size=40, special_tokens=["?"], show_progress=False
    )
    tokenizer.train([str(p) for p in folder.glob("*.txt")], trainer)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def test_a_tokenizer_of_ones_own(tokenizer_file, settings):
    tokenizer = corpus.FileTokenizer(tokenizer_file)
    assert tokenizer.separator == 40 and tokenizer.vocab_size == 41
    tokens = tokenizer.encode(b"1 and 2 are 3\n")
    assert len(tokens) < 10 and tokens.max() < 40
    run = Training(replace(settings, tokenizer=str(tokenizer_file)))
    assert run.model.config.vocab_size == 41
    assert run.step() == pytest.approx(math.log(41), abs=0.3)
    per_byte = math.log2(41) * run.held_out.tokens_per_byte
    assert run.evaluate()["bits per byte"] == pytest.approx(per_byte, 0.1)
    assert run.sample("1 and", 3).startswith("1 and")


def test_a_tokenizer_of_another_tool_encodes_whole_texts(
    tokenizer_file, tmp_path
):
    """Whatever its file says of truncation, padding and special tokens."""
    from tokenizers import Tokenizer

    inner = Tokenizer.from_file(str(tokenizer_file))
    inner.enable_truncation(8)
    inner.enable_padding(length=1024)
    inner.add_special_tokens(["<|end|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = corpus.FileTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.separator == 41
    text = b"1 and 2 are 3\n" * 20
    whole = corpus.FileTokenizer(tokenizer_file).encode(text)
    assert len(whole) > 8 and tokenizer.encode(text).equal(whole)
    assert tokenizer.encode(b"1 <|end|>").max() < 40
    assert tokenizer.decode(torch.tensor([40, 41])) == "<|end|>"


def test_the_separator_is_no_token_of_the_file(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"a": 0, "b": 1, "c": 5, "d": 9}
    inner = Tokenizer(models.WordLevel(words, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = corpus.FileTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.separator == 10 and tokenizer.vocab_size == 11
    tokens = tokenizer.encode(b"d c b")
    assert tokens.tolist() == [9, 5, 1]
    assert tokenizer.decode(tokens) == "d c b"


def test_a_run_holds_its_tokenizer_and_goes_on_with_it_alone(
    tokenizer_file, folder, tmp_path, capsys
):
    from tokenizers import Tokenizer

    out, other = tmp_path / "run", tmp_path / "other.json"
    more = ["--tokenizer", str(tokenizer_file), "--steps", "1"]
    assert not main("train", *words(folder, out, *more))
    kept = corpus.FileTokenizer(out / "tokenizer.json")
    text = b"1 and 2 are 3\n"
    want = corpus.FileTokenizer(tokenizer_file).encode(text)
    assert kept.encode(text).equal(want)

    inner = json.loads(Tokenizer.from_file(str(tokenizer_file)).to_str())
    of = inner["model"]["vocab"]
    of["1"], of["2"] = of["2"], of["1"]
    other.write_text(json.dumps(inner))
    again = ["--resume", str(out), "--steps", "2", "--tokenizer"]
    assert main("train", *again, str(other)) == 2
    assert "tokenizer: got " in capsys.readouterr().err
    assert not main("train", *again, str(out / "tokenizer.json"))


# Batches.


BYTES = corpus.ByteTokenizer()


def stream(count=30):
    documents = [bytes([65 + i]) * (1 + i % 7) for i in range(count)]
    return corpus.Stream.of(documents, corpus.ByteTokenizer())


def test_windows_are_of_their_step_and_split_among_processes():
    windows = corpus.Windows(stream(), length=10, rows=6, seed=3)
    batch = windows.batch(5)
    assert batch.tokens.shape == (6, 10) and batch.cu_seqlens is None
    assert batch.tokens[:, 1:].equal(batch.targets[:, :-1])
    assert batch.tokens.equal(windows.batch(5).tokens)
    assert not batch.tokens.equal(windows.batch(6).tokens)
    parts = [windows.batch(5, i, 3).tokens for i in range(3)]
    assert torch.cat(parts).equal(batch.tokens)
    assert {len(x) for x in parts} == {2}


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: corpus.read("stdlib"), "sources: got 'stdlib', need a list"),
        (lambda: corpus.read(["x"], ".py"), "suffixes: got '.py', need a li"),
        (lambda: corpus.Windows(stream(), 0, 2), "length: got 0, need"),
        (lambda: corpus.Windows(stream(), 4, 2.5), "rows: got float, need"),
        (lambda: corpus.Stream.of([], BYTES), "documents: got none, need"),
    ],
)
def test_what_is_no_text_or_batch_is_named(call, said):
    with pytest.raises((TypeError, ValueError), match=f"^{said}"):
        call()


@pytest.mark.parametrize("length", [1, 12, 50, 117])
def test_packed_tokens_are_those_of_all_shuffled_documents(length):
    """Joined whole, as no batch does; those of step 40 before step 0's."""
    text = corpus.Stream.of([b"a" * (i * i % 23) for i in range(30)], BYTES)
    text.tokens[:] = torch.arange(len(text.tokens))
    packed = corpus.Packed(text, length, seed=7)
    steps = len(text.tokens) // length
    for step in (40, *range(2 * steps + 1)):
        order = torch.randperm(
            30, generator=corpus.generator(7, step // steps)
        )
        documents = text.tokens.long().split(text.starts.diff().tolist())
        shuffled = [documents[i] for i in order]
        whole = torch.cat([*shuffled, text.tokens[:1].long()])
        offsets = torch.tensor([0, *map(len, shuffled)]).cumsum(0)
        for part in range(parts := 2 if length % 2 == 0 else 1):
            T = length // parts
            first = step % steps * length + part * T
            batch = packed.batch(step, part, parts)
            assert batch.tokens[0].equal(whole[first : first + T])
            assert batch.targets[0].equal(whole[first + 1 : first + T + 1])
            inner = offsets[(offsets > first) & (offsets < first + T)] - first
            assert batch.cu_seqlens.tolist() == [0, *inner.tolist(), T]


@pytest.mark.parametrize("number, size", [(4, 5000), (2000, 10)])
def test_a_packed_batch_costs_its_own_tokens(number, size):
    text = corpus.Stream.of([b"a" * size] * number, BYTES)
    packed = corpus.Packed(text, 256)
    packed.batch(3)  # shuffles, once per pass
    with Largest() as largest:
        packed.batch(1)
    assert largest.elements <= 257 and largest.total <= 12 * 257


def test_files_tokens_are_read_many_documents_at_once(tokenizer_file):
    class Counted:
        calls = 0

        def encode_batch(self, texts, **options):
            self.calls += 1
            return inner.encode_batch(texts, **options)

    tokenizer = corpus.FileTokenizer(tokenizer_file)
    inner, tokenizer._inner = tokenizer._inner, Counted()
    documents = [b"%d and \xff" % i for i in range(130)] + [b""]
    text = corpus.Stream.of(documents, tokenizer)
    assert tokenizer._inner.calls == 3
    assert text.tokens.dtype == torch.int16
    found = text.tokens.long().split(text.starts.diff().tolist())
    for document, tokens in zip(documents, found, strict=True):
        assert tokens[0] == tokenizer.separator
        assert tokens[1:].equal(tokenizer.encode(document))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 30])
@pytest.mark.parametrize("vocabulary", [1, 2, 257, 152_000, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_repeated_is_any_ngram_before(n, vocabulary, dtype):
    """Of few tokens among all there are, so that many are repeated."""
    torch.manual_seed(0)
    few = torch.randint(vocabulary, (3,))
    few[0], few[1] = 0, vocabulary - 1
    rows = few[torch.randint(3, (6, 120))].to(dtype)
    rows[:2, 60:] = rows[:2, :60]
    found = corpus.repeated(corpus.Batch(rows[:, :-1], rows[:, 1:]), n)
    for row, got in zip(rows.tolist(), found.tolist(), strict=True):
        seen = set()
        for end in range(1, 120):
            gram = tuple(row[end + 1 - n : end + 1]) if end + 1 >= n else None
            assert got[end - 1] == (gram in seen)
            seen |= {gram} - {None}


@pytest.mark.parametrize("vocabulary, ranks", [(257, 0), (152_000, 1)])
def test_repeated_costs_a_sort_of_integers(vocabulary, ranks):
    rows = torch.randint(vocabulary, (4, 65))
    rows[0, :2] = torch.tensor([0, vocabulary - 1])
    with Largest() as largest:
        corpus.repeated(corpus.Batch(rows[:, :-1], rows[:, 1:]))
    sorts = {k: v for k, v in largest.calls.items() if "uni" in k or "so" in k}
    assert sorts == {"sort": 1} | ({"_unique2": ranks} if ranks else {})


# Steps.


def test_the_learning_rate_rises_and_falls():
    s = Settings(steps=100, warmup=10, lr=1.0, final_lr=0.1)
    rates = [s.learning_rate(i) for i in range(101)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert s.learning_rate(150) == rates[100]


def test_each_step_is_taken_with_its_own_rate(settings):
    settings = replace(settings, warmup=2, steps=5, weight_decay=0.0)
    run, rates = Training(settings), []
    for _ in range(5):
        before = [p.detach().clone() for p in run.model.parameters()]
        run.step()
        (rate,) = {group["lr"] for group in run.optimizer.param_groups}
        rates.append(rate)
        pairs = zip(before, run.model.parameters(), strict=True)
        moved = max(float((a - b.detach()).abs().max()) for a, b in pairs)
        if len(rates) == 1:  # AdamW's first step is its rate
            assert moved == pytest.approx(rate, rel=0.01)
    assert rates == [settings.learning_rate(i) for i in range(5)]


@pytest.mark.parametrize("packed", [False, True], ids=["windows", "packed"])
def test_a_run_learns_and_goes_on_bit_for_bit(packed, settings, tmp_path):
    settings = replace(settings, packed=packed, length=32)
    once = Training(settings)
    before = once.evaluate()["bits per byte"]
    losses = [once.step() for _ in range(20)]
    after = once.evaluate()
    assert after["bits per byte"] < before - 1
    share = after["share"]
    parts = share * after["repeated"] + (1 - share) * after["new"]
    assert parts == pytest.approx(after["bits per byte"])

    first = Training(settings)
    found = [first.step() for _ in range(10)]
    first.save(tmp_path / "checkpoint.pt")
    torch.manual_seed(123)  # another process has drawn something else
    second = Training(settings, tmp_path / "checkpoint.pt")
    assert second.steps_done == 10
    found += [second.step() for _ in range(10)]
    assert found == losses
    pairs = zip(
        once.model.parameters(), second.model.parameters(), strict=True
    )
    assert all(a.equal(b) for a, b in pairs)
    states = [x.optimizer.state_dict()["state"] for x in (once, second)]
    for key, values in states[0].items():
        assert all(x.equal(states[1][key][n]) for n, x in values.items())


def test_accumulated_passes_make_the_same_step(settings):
    """Its gradient's norm too, to which AdamW would pay no attention."""
    once, often = (Training(replace(settings, accumulate=n)) for n in (1, 4))
    for _ in range(3):
        loss = once.step().item()
        assert often.step().item() == pytest.approx(loss, abs=1e-4)
        assert float(often.norm) == pytest.approx(float(once.norm), rel=1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_changes_nothing(bad, settings):
    """Nor do later steps notice."""
    run, twin = Training(settings), Training(settings)
    run.step(), twin.step()
    hook = run.model.embedding.weight.register_hook(lambda x: x * bad)
    with pytest.raises(FloatingPointError, match=r"^step 2: the norm of the"):
        run.step()
    hook.remove()
    assert run.steps_done == 1
    assert run.step() == twin.step()
    pairs = zip(run.model.parameters(), twin.model.parameters(), strict=True)
    assert all(a.equal(b) for a, b in pairs)


def test_held_out_text_of_more_than_2_to_the_24_tokens(settings):
    """Where fp32 no longer holds every integer."""
    run = Training(replace(settings, eval_windows=3))
    tokens = torch.zeros(2**24 + 3 + 17, dtype=torch.int16)
    tokens[2**24 + 3 :] = 1
    starts = torch.tensor([0, len(tokens)])
    run.held_out = corpus.Stream(tokens, starts, len(tokens))
    seen = []
    run.model.token_losses = lambda x, y: (
        seen.append(y) or torch.zeros(y.shape)
    )
    run.evaluate()
    assert seen[0].sum(1).tolist() == [0, 0, 16]  # to the last token


def test_bf16_is_asked_for(settings):
    losses = [
        Training(replace(settings, precision=name)).step().item()
        for name in ("bf16", "fp32")
    ]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.01)


def test_a_checkpoint_of_another_text_is_refused(settings, tmp_path):
    run = Training(settings)
    run.save(tmp_path / "checkpoint.pt")
    other = replace(settings, suffixes=("9.txt", "0.txt"))
    with pytest.raises(ValueError, match="corpus: got text with sha256"):
        Training(other, tmp_path / "checkpoint.pt")
    (tmp_path / "checkpoint.pt").write_bytes(b"broken")
    with pytest.raises(ValueError, match="no checkpoint of this program"):
        read_checkpoint(tmp_path / "checkpoint.pt")


def test_a_checkpoint_has_options_by_their_names_of_today(settings, tmp_path):
    path, options = tmp_path / "checkpoint.pt", {"softmax": {"theta": 9.0}}
    new = json.dumps({"softmax": {"rope_theta": 9.0}})
    Training(replace(settings, options=new)).save(path)
    saved = torch.load(path)
    for kind, head_dim in (("gated_deltanet", 8), ("gla", None)):
        of = {"pattern": (kind,), "options": json.dumps(options)}
        torch.save(
            saved | {"settings": saved["settings"] | of | {"head_dim": 8}},
            path,
        )
        found = read_checkpoint(path)["settings"]
        assert (found["options"], found["head_dim"]) == (new, head_dim)
        assert Settings(**found)


# The program.


def words(folder, out, *more):
    return ["--corpus", str(folder), "--out", str(out), *WORDS, *more]


def test_the_program_trains_saves_and_goes_on(folder, tmp_path, capsys):
    out = tmp_path / "run"
    assert not main(
        "train", *words(folder, out, "--steps", "3", "--sample", "5")
    )
    said = capsys.readouterr()
    assert said.out.startswith("def ")
    assert "step 3/3  loss " in said.err and "bits per byte" in said.err
    rows = [json.loads(x) for x in (out / "log.jsonl").open()]
    assert rows[0]["settings"]["dim"] == 16
    assert rows[0]["corpus"]["bytes"] == corpus.read([folder]).size
    assert {"fastweights", "python", "torch"} <= set(rows[0])
    assert rows[0]["device"] == records.processor()
    assert [row["step"] for row in rows[1:]] == [1, 2, 3, 3]
    assert rows[-1]["bits per byte"] > 0
    assert rows[-1]["repeated"] is None  # none in so short a window
    assert models.load(out).config.dim == 16
    state = read_checkpoint(out / "checkpoint.pt")
    assert state["step"] == 3

    assert main("train", *words(folder, out)) == 2
    assert f"go on with --resume {out}" in capsys.readouterr().err
    assert main("train", "--resume", str(out), "--dim", "32") == 2
    assert "dim: got 32, need 16 as before" in capsys.readouterr().err
    assert not main("train", "--resume", str(out), "--sample", "2")
    assert "def " in capsys.readouterr().out


def test_a_run_that_is_done_goes_on_with_more_steps(folder, tmp_path, capsys):
    out = tmp_path / "run"
    assert not main("train", *words(folder, out, "--steps", "3"))
    capsys.readouterr()
    assert not main("train", "--resume", str(out))
    assert "all 3 steps are done; --steps 6 would" in capsys.readouterr().err
    assert main("train", "--resume", str(out), "--steps", "2") == 2
    assert "steps: got 2, need the 3 that are" in capsys.readouterr().err
    assert not main("train", "--resume", str(out), "--steps", "6")
    assert "step 6/6  loss " in capsys.readouterr().err
    rows = [json.loads(x) for x in (out / "log.jsonl").open()]
    rates = {row["step"]: row["lr"] for row in rows if "lr" in row}
    for steps, done in ((3, (1, 2, 3)), (6, (4, 5, 6))):
        of = Settings(steps=steps, warmup=4)
        for step in done:
            assert rates[step] == of.learning_rate(step - 1)
    state = read_checkpoint(out / "checkpoint.pt")
    assert state["step"] == state["settings"]["steps"] == 6


def test_a_run_that_diverges_keeps_its_last_checkpoint(
    folder, tmp_path, capsys
):
    out = tmp_path / "run"
    wild = "--lr 1e13 --clip 1e30 --warmup 0 --save-every 1 --steps 99"
    assert main("train", *words(folder, out, *wild.split())) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    found = re.search(
        r": step (\d+): the norm of .*; \S+ is that of step (\d+)$", said
    )
    assert (
        int(found[1])
        == int(found[2]) + 1
        == 1 + read_checkpoint(out / "checkpoint.pt")["step"]
    )
    state = read_checkpoint(out / "checkpoint.pt")["model"]
    assert all(x.isfinite().all() for x in state.values())

    def refuse(constant):
        raise AssertionError(constant)

    for row in (out / "log.jsonl").open():
        json.loads(row, parse_constant=refuse)
    assert not (out / "model.safetensors").exists()


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(
    folder, tmp_path, capsys
):
    resource = pytest.importorskip("resource")
    out = tmp_path / "run"
    assert not main("train", *words(folder, out, "--steps", "1"))
    capsys.readouterr()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        code = main("train", "--resume", str(out), "--steps", "2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "cannot write" in said and "MiB are free" in said
    assert said.endswith("checkpoint.pt is that of step 1")
    assert read_checkpoint(out / "checkpoint.pt")["step"] == 1
    assert not list(out.glob(".*"))


def test_a_folder_that_cannot_be_made_is_one_line(
    folder, tmp_path, monkeypatch, capsys
):
    """Though it looked as if it could."""

    def mkdir(self, **given):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(train.Path, "mkdir", mkdir)
    assert main("train", *words(folder, tmp_path / "run")) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "Permission denied" in said and "MiB are free" in said


def test_too_little_memory_is_one_line(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Training, "step", lambda run: torch.empty(2**50))
    assert main("train", *words(folder, tmp_path / "run")) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "memory: got too little, need fewer tokens" in said
    assert said.endswith("no checkpoint was written")


def test_ctrl_c_before_the_first_step_is_one_line(
    folder, tmp_path, capsys, monkeypatch
):
    def press(*given):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("goes on")

    for of, name in (
        (corpus, "read"),
        (train, "chosen_settings"),
        (train, "save_result"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(of, name, press)
            out = tmp_path / name
            assert main("train", *words(folder, out, "--steps", "1")) == 130
        assert capsys.readouterr().err.endswith("stopped at once\n")


def test_training_without_safetensors_is_refused_at_once(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert main("train", *words(folder, tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert "needs safetensors: pip install safetensors\n" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("slow", [1, 2])
def test_one_thread_is_taken_where_more_are_slow(
    slow, settings, monkeypatch, capsys
):
    run, before = Training(settings), torch.get_num_threads()
    run.model.token_losses = lambda *given: time.sleep(
        0.05 if torch.get_num_threads() == slow else 0.01
    )
    try:
        for given, want in (("2", 2), (None, 1 if slow == 2 else 2)):
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            if given:
                monkeypatch.setenv("OMP_NUM_THREADS", given)
            torch.set_num_threads(2)
            train.choose_threads(run)
            assert torch.get_num_threads() == want
    finally:
        torch.set_num_threads(before)
    assert ("1 thread, " in capsys.readouterr().err) == (slow == 2)


def test_ctrl_c_saves_and_says_how_to_go_on(folder, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "fastweights.train"]
    more = ["--steps", "100000", "--save-every", "100000"]
    program = subprocess.Popen(
        [*command, *words(folder, out, *more)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    log, end = out / "log.jsonl", time.monotonic() + 60
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        assert time.monotonic() < end and program.poll() is None
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    said = program.communicate(timeout=60)[1]
    assert program.returncode == 130
    step = int(re.search(r"stopped after step (\d+); it goes", said)[1])
    assert said.endswith(f": fastweights train --resume {out}\n")
    assert read_checkpoint(out / "checkpoint.pt")["step"] == step


def test_two_processes_take_the_steps_of_one(folder, tmp_path):
    """Under torchrun: the same losses, and one checkpoint of theirs."""
    runs = {}
    for number in (1, 2):
        out = tmp_path / str(number)
        arguments = words(folder, out, "--steps", "3", "--accumulate", "2")
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--standalone", "--nproc-per-node", str(number)]
        if number == 1:
            assert not main("train", *arguments)
        else:
            subprocess.run(
                [*command, "-m", "fastweights.train", *arguments],
                check=True,
                capture_output=True,
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "USE_LIBUV": "0",
                    "OMP_NUM_THREADS": "1",
                },
            )
        rows = [json.loads(x) for x in (out / "log.jsonl").open()]
        runs[number] = [x["loss"] for x in rows if "loss" in x]
        assert rows[0]["processes"] == number
    assert runs[2] == pytest.approx(runs[1], abs=1e-4)
    assert read_checkpoint(tmp_path / "2" / "checkpoint.pt")["step"] == 3


def test_the_model_is_gone_before_the_process_group(
    folder, tmp_path, monkeypatch
):
    """Else gloo and DDP may wait for each other at the end."""
    made, gone = [], []

    class Watched(Training):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(weakref.ref(self))

    @contextmanager
    def group(device):
        yield
        gone.append(made[-1]() is None)

    monkeypatch.setattr(train, "Training", Watched)
    monkeypatch.setattr(train, "process_group", group)
    assert not main("train", *words(folder, tmp_path / "run", "--steps", "1"))
    assert gone == [True]


@pytest.mark.parametrize(
    "more, said",
    [
        ("--corpus nowhere", "corpus: got nowhere, need a file, a folder"),
        ("--suffixes .rs", r"corpus: got \S+, which has no file that ends"),
        ("--corpus EMPTY", r"corpus: got \S+, which holds no text"),
        ("--tokens 40", "tokens: got 40 per step, need a multiple of 16"),
        ("--packed --tokens 999999", "tokens: got 999999 per step, need no"),
        ("--fsdp", "fsdp: got True, need processes of torchrun"),
        (
            "--context-parallel 2",
            "context_parallel: got 2, need a divisor of the 1 processes",
        ),
        (
            "--packed --tokens 7 --accumulate 2",
            r"tokens: got 7 per step, need a multiple of 2 \(processes",
        ),
        ("--length 99999 --tokens 99999", "length: got 99999, need less th"),
        ("--vocab-size 99", "vocab_size: got 99, need the tokenizer's 257"),
        ("--tokenizer nowhere", r".* No such file or directory: 'nowhere'"),
        ("--tokenizer EMPTY", r"tokenizer: got \S+, which tokenizers can"),
        ("--pattern 2*rnn", "pattern: got 'rnn', need one of"),
        ("--options {", "options: got '{', need JSON"),
        (
            '--options {"softmax":{"rope_theta":"x"}} --pattern softmax',
            "rope_theta: got str, need a real number",
        ),
        ("--device nvidia", "device: got 'nvidia', need auto, cpu, cuda, .."),
        ("--resume nowhere", "resume: got nowhere, which has no checkp"),
    ],
)
def test_what_does_not_fit_is_one_line(more, said, folder, tmp_path, capsys):
    """Before a model is made, and nothing is left behind."""
    empty = str(folder / "empty.txt")
    given = [word.replace("EMPTY", empty) for word in more.split()]
    before = sorted(tmp_path.iterdir())
    assert main("train", *words(folder, tmp_path / "run", *given)) == 2
    err = capsys.readouterr().err
    assert re.match(f"fastweights train: {said}", err), err
    assert err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as end:
        main("train", "--help")
    assert end.value.code == 0
    said = capsys.readouterr().out
    for name in Settings.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in said


WRONG = {
    "steps": (True, 2.5, "3", None, 0),
    "lr": ("x", None, math.inf, math.nan, 0),
    "final_lr": (None, 1.5),
    "precision": ("fp16",),
    "corpus": ("stdlib",),
    "pattern": ("softmax", (), ("rnn",)),
    "suffixes": (".py",),
    "mlp_ratio": (-1, math.inf),
    "num_layers": (0, 1.0),
    "num_heads": (3,),
    "options": ("{", "[]", '{"softmax": 1}', '{"softmax": {"x": 1}}'),
    "dim": (-5,),
    "vocab_size": (0, 1.5),
    "seed": (-1, 2**60),
    "tokens": (1, 2**50),
    "clip": (math.nan,),
    "weight_decay": (-1.0,),
}


@pytest.mark.parametrize(
    "name, value", [(k, value) for k, of in WRONG.items() for value in of]
)
def test_a_setting_is_checked_when_it_is_made(name, value):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: got "):
        Settings(**{name: value})


def test_a_checkpoint_with_old_names_is_read(settings, tmp_path):
    run, path = Training(settings), tmp_path / "checkpoint.pt"
    run.step()
    run.save(path)
    state = torch.load(path, weights_only=True)
    for old, new in NEW_NAMES.items():
        state["settings"][old] = state["settings"].pop(new)
    torch.save(state, path)
    assert Settings(**read_checkpoint(path)["settings"]) == settings
    assert Training(settings, path).steps_done == 1


def test_paths_become_strings_which_a_checkpoint_can_hold(
    folder, settings, tmp_path
):
    run = Training(replace(settings, corpus=(folder,), out=tmp_path))
    run.save(tmp_path / "checkpoint.pt")
    read_checkpoint(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize(
    "text, kinds",
    [
        ("kda", ("kda",)),
        ("3*kda,softmax", ("kda", "kda", "kda", "softmax")),
        ("gla, 2 * kda", ("gla", "kda", "kda")),
    ],
)
def test_patterns_are_written_short(text, kinds):
    assert train.as_pattern(text) == kinds


def test_a_pattern_without_a_number_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main("train", "--pattern", "x*kda")
    assert end.value.code == 2
    assert (
        "got 'x*kda', need a type, or NUMBER*TYPE" in capsys.readouterr().err
    )


def test_a_progress_line_changes_on_a_terminal(monkeypatch, capsys):
    progress = train.Progress(4, quiet=False)
    progress.live = True
    progress.show(1, "loss 3")
    assert (
        capsys.readouterr().err
        == "\r[#####" + 15 * "." + "] step 1/4  loss 3\x1b[K"
    )
    progress.say("done")
    assert capsys.readouterr().err == "\r\x1b[Kdone\n"
    train.Progress(4, quiet=True).show(1, "loss 3")
    assert not capsys.readouterr().err
