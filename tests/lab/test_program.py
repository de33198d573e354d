"""The one program: its commands, their errors, and two of them whole."""

import importlib.metadata
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import fastweights as fw
from fastweights import ops
from fastweights.models import LanguageModel, ModelConfig
from fastweights.ops.common import backends
from fastweights_lab import program
from fastweights_lab.commands import generate, info
from fastweights_lab.program import COMMANDS, main
from fastweights_lab.text import corpus

ROOT = Path(__file__).parents[2]
BENCHES = ("members", "deep", "layer", "trained", "growth", "decode")
PATHS = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, of bytes."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    LanguageModel(ModelConfig(257, 16, 1, num_heads=2)).save(folder)
    return folder


@pytest.fixture
def writes(monkeypatch):
    """Makes the model write bytes, and Ctrl-C after them if asked to."""

    def make(text, pressed=False):
        def stream(*_, **__):
            for byte in text:
                yield torch.tensor([byte])
            if pressed:
                raise KeyboardInterrupt

        monkeypatch.setattr(generate, "stream", stream)

    return make


# All commands.


@pytest.mark.parametrize(
    "words",
    [(), *((name,) for name in COMMANDS), *(("bench", x) for x in BENCHES)],
)
def test_help_says_what_there_is(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(*words, "--help")
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(" ".join(("usage: fastweights", *words)))
    assert ":mod:" not in said and ":func:" not in said
    for name in COMMANDS if not words else ():
        assert re.search(rf"^    {name}\b", said, re.M)


SCRIPT = """
import sys, time
start = time.process_time()
from fastweights_lab.program import main
try:
    main("--help")
finally:
    print(time.process_time() - start, *sys.modules, file=sys.stderr)
"""


def test_help_brings_no_torch():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=PATHS,
    )
    seconds, *modules = run.stderr.split()
    assert not {"torch", "numpy", "fastweights"} & {*modules}
    assert float(seconds) < 0.3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "fastweights: the following arguments are required: COMMAND"),
        ("trainx", "fastweights: argument COMMAND: invalid choice: 'trainx'"),
        ("info --x", "fastweights: unrecognized arguments: --x"),
        ("bench", "fastweights bench: the following arguments are required"),
        ("bench x", "fastweights bench: argument CASE: invalid choice: 'x'"),
        ("train --steps x", "fastweights train: argument --steps: invalid"),
        ("compare", "fastweights compare: the following arguments are req"),
        ("generate", "fastweights generate: the following arguments are r"),
    ],
)
def test_words_that_mean_nothing_are_one_line(
    words, said, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["fastweights", *words.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert err.startswith(said) and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("x: got\n1"), 2, "fastweights info: x: got 1\n"),
        (ImportError("needs y"), 2, "fastweights info: needs y\n"),
        (ChildProcessError("died"), 1, "fastweights info: died\n"),
        (KeyboardInterrupt(), 130, "stopped at once\n"),
    ],
)
def test_an_error_is_one_line_and_a_status(
    error, status, said, capsys, monkeypatch
):
    def run(asked):
        raise error

    monkeypatch.setattr(info, "run", run)
    assert main("info") == status
    assert capsys.readouterr().err == said
    monkeypatch.setenv("RANK", "1")
    assert main("info") == status
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "mistake", [lambda _: {}[0], lambda _: {[]}, lambda _: int("x")]
)
def test_a_mistake_of_ours_shows_where_it_arose(mistake, monkeypatch):
    monkeypatch.setattr(info, "run", mistake)
    with pytest.raises((KeyError, TypeError, ValueError)):
        main("info")


def test_whoever_reads_may_leave(folder):
    command = [sys.executable, "-m", "fastweights", "generate", str(folder)]
    run = subprocess.Popen(
        [*command, "--prompt=a", "--max-new-tokens", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=PATHS,
    )
    assert run.stdout.read(1)
    run.stdout.close()
    err = run.stderr.read()
    assert run.wait() == 1 and not err


def test_the_console_script_is_this_program():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    script = project["project"]["scripts"]["fastweights"]
    assert importlib.metadata.EntryPoint("", script, "").load() is main


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("fastweights", ()),
        ("fastweights.train", ("train",)),
        ("fastweights_lab.bench", ("bench",)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_other_doors_lead_to_the_same_program(module, command, monkeypatch):
    """What torchrun, records and spawned processes call."""
    called = []
    monkeypatch.setattr(program, "main", lambda *x: called.append(x) or 7)
    monkeypatch.setattr(sys, "argv", ["x", "--some", "words"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    given = ("--some", "words") if command else ()
    assert called == [command + given] and end.value.code == 7


TEXTS = [ROOT / "README.md", *sorted((ROOT / "chapters").glob("*.md"))]
NAMED = [
    command
    for file in TEXTS
    for text in [file.read_text("utf-8").replace("\\\n", " ")]
    for command in re.findall(
        rf"(?:`|^)(fastweights (?:{'|'.join(COMMANDS)})\b[^`\n]*)", text, re.M
    )
]


@pytest.mark.parametrize("command", NAMED)
def test_the_commands_of_texts_are_whole(command):
    _, *words = shlex.split(command)
    program.parser(words[0]).parse_args(words)


def test_texts_name_the_program():
    assert {x.split()[1] for x in NAMED} == {*COMMANDS}


# generate.


def test_a_saved_model_writes(folder, capsys):
    words = ["generate", str(folder), "--max-new-tokens", "20"]
    words.append("--prompt=def ")
    assert main(*words) == 0
    first = capsys.readouterr().out
    assert main(*words) == 0 and capsys.readouterr().out == first
    assert main(*words, "--seed", "1") == 0
    assert capsys.readouterr().out != first
    assert main(*words, "--temperature", "0") == 0
    likeliest = capsys.readouterr().out
    model = fw.models.load(folder)
    (new,) = model.generate([torch.tensor([256, *b"def "])], 20, stop=256)
    assert likeliest == corpus.ByteTokenizer().decode(new) + "\n"


def test_a_prompt_comes_from_standard_input_too(folder, capsys, monkeypatch):
    prompt = b"a\xffb\n"
    words = ["generate", str(folder), "--max-new-tokens", "20"]
    assert main(*words, "--prompt", os.fsdecode(prompt)) == 0
    given = capsys.readouterr().out
    piped = io.TextIOWrapper(io.BytesIO(prompt))
    monkeypatch.setattr(sys, "stdin", piped)
    assert main(*words) == 0
    assert capsys.readouterr().out == given
    assert not piped.read()


def test_a_models_tokenizer_is_used(tmp_path, capsys, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"def": 0, "x": 1, "y": 2}
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(words, unk_token="x")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    LanguageModel(ModelConfig(4, 16, 1, num_heads=2)).save(tmp_path)
    prompts = []

    def stream(model, prompt, *_, stop, **__):
        prompts.append((prompt.tolist(), stop))
        return (torch.tensor([token]) for token in (2, 1, 2, 3))

    monkeypatch.setattr(generate, "stream", stream)
    assert main("generate", str(tmp_path), "--prompt=def x") == 0
    assert prompts == [([3, 0, 1], 3)]
    assert capsys.readouterr().out == "y x y\n"
    LanguageModel(ModelConfig(3, 16, 1, num_heads=2)).save(tmp_path)
    assert main("generate", str(tmp_path), "--prompt=def x") == 2
    assert "folder: got a model of 3 tokens, need the 4" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "text", ["a", "aé€𝄞b", b"\xff\xc3", b"\xe2\x82a\xf0", b""]
)
def test_characters_are_written_when_they_are_whole(text):
    tokenizer = corpus.ByteTokenizer()
    raw = text if isinstance(text, bytes) else text.encode()
    pieces = list(generate.pieces(tokenizer, raw))
    assert "".join(pieces) == raw.decode("utf-8", "replace")
    if isinstance(text, str):
        assert [x for x in pieces if x] == list(text)


@pytest.mark.parametrize(
    ("stop", "said"),
    [("\n\n", "one\ntwo"), ("e", "on"), ("x", "one\ntwo\n\nthree"), ("o", "")],
)
def test_it_ends_before_a_text(stop, said, folder, writes, capsys):
    writes(b"one\ntwo\n\nthree")
    assert main("generate", str(folder), "--prompt=", "--stop", stop) == 0
    assert capsys.readouterr().out == said + "\n"


def test_ctrl_c_ends_it_quietly(folder, writes, capsys):
    writes(b"one", pressed=True)
    assert main("generate", str(folder), "--prompt=a") == 130
    assert capsys.readouterr() == ("one\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--device cpu", "folder: nowhere has no config.json"),
        ("--temperature -1", "temperature: got -1.0, need"),
        ("--top-p 2", "top_p: got 2.0, need 0 < top_p <= 1"),
        ("--max-new-tokens -1", "max_new_tokens: got -1, need"),
        ("--stop=", "stop: got '', need some text"),
        ("--device x", "device: got 'x', need auto, cpu, cuda"),
    ],
)
def test_what_does_not_fit_is_one_line(words, said, folder, capsys):
    where = "nowhere" if "nowhere" in said else str(folder)
    assert main("generate", where, "--prompt=a", *words.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"fastweights generate: {said}")
    assert err.count("\n") == 1 and not out


def test_a_model_that_has_diverged_is_one_line(tmp_path, capsys):
    model = LanguageModel(ModelConfig(257, 16, 1, num_heads=2))
    torch.nn.init.constant_(model.embedding.weight, torch.nan)
    model.save(tmp_path)
    assert main("generate", str(tmp_path), "--prompt=a") == 2
    assert "logits that are not finite" in capsys.readouterr().err


def test_a_file_that_is_cut_off_is_one_line(tmp_path, capsys):
    LanguageModel(ModelConfig(257, 16, 1, num_heads=2)).save(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert main("generate", str(tmp_path), "--prompt=a") == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fastweights generate: {file}: ")
    assert err.count("\n") == 1


# info.


def test_info_says_what_is_here(capsys):
    assert main("info", "--device", "cpu") == 0
    said = capsys.readouterr().out
    for name, version in (("torch", torch.__version__), ("fastweights", "0")):
        assert re.search(rf"^{name} +{re.escape(version)}", said, re.M)
    head, *groups = said.split("\n\n")
    assert re.search(r"^commit +[0-9a-f]{40}$|^commit +none$", head, re.M)
    assert len(groups) == 2 and "deep.lact, deep.titans" in groups[1]
    assert "kda, linear_attention, linear_recurrence, mamba2" in groups[0]
    assert "torch in float64: triton needs tensors in float32" in groups[0]


@pytest.mark.parametrize("name", ["linear_attention", "mlstm"])
def test_a_backend_is_the_one_that_runs(name):
    operator = info.operators()[name]
    runs, why = info.backend(operator, torch.device("cpu"), torch.float32)
    assert why
    q, k, v = torch.randn(3, 1, 20, 2, 8).unbind()
    gates = torch.zeros(2, 1, 20, 2) if name == "mlstm" else ()
    with ops.record_backends() as ran:
        operator(q, k, v, *gates)
    assert ran and all(x.startswith(f"{runs} ") for x in ran)


@pytest.mark.parametrize(
    ("capability", "dtype", "name", "runs"),
    [
        ((9, 0), torch.bfloat16, "kda", "triton"),
        ((9, 0), torch.bfloat16, "deep.ttt", "triton"),
        ((9, 0), torch.float32, "deep.ttt", "torch"),
        ((9, 0), torch.float64, "kda", "torch"),
        ((8, 0), torch.float16, "deep.mesa", "torch"),
        ((7, 5), torch.float16, "kda", "torch"),
    ],
)
def test_a_gpus_backends(capability, dtype, name, runs, monkeypatch):
    pytest.importorskip("triton")
    backends._missing_for_triton.cache_clear()
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(fw.torch_internals, "warn_untested", lambda: None)
    device = torch.device("cuda")
    found, why = info.backend(info.operators()[name], device, dtype)
    backends._missing_for_triton.cache_clear()
    assert found == runs and bool(why) == (runs != "triton")
