"""A step of decoding as a CUDA graph."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.model_cases import KINDS

from fastweights.models import (
    LanguageModel,
    ModelConfig,
    captured_step,
    decoding,
)
from fastweights.models.captured_step import CapturedStep, is_capturable
from fastweights.models.streaming import stream
from fastweights.ops import record_backends

GPU = pytest.mark.gpu
SIZES = {"vocab_size": 97, "dim": 64, "num_layers": 2, "num_heads": 2}


def make_model(kind="gated_deltanet", **to):
    torch.manual_seed(0)
    to = {"device": "cuda", "dtype": torch.bfloat16} | to
    return LanguageModel(ModelConfig(pattern=(kind,), **SIZES), **to)


def make_prompts(*lengths):
    return [torch.randint(97, (n,), device="cuda") for n in lengths]


def refuse_recording(monkeypatch):
    monkeypatch.setattr(decoding, "is_capturable", lambda *_: False)


def test_a_cpu_records_nothing():
    m = make_model(device="cpu", dtype=torch.float32)
    assert not is_capturable(m, torch.zeros(1, dtype=torch.int64))


FIRST_CALLS = """
import sys, torch
from fastweights.models import LAYERS, LanguageModel, ModelConfig
for kind in LAYERS:
    m = LanguageModel(ModelConfig(
        pattern=(kind,), vocab_size=97, dim=64, num_layers=1, num_heads=2))
    m.generate(torch.zeros(2, 9, dtype=torch.int64), 2)
    assert not {"sympy", "torch._dynamo"} & {*sys.modules}, kind
"""


def test_a_graphs_step_is_told():
    step = CapturedStep()
    step.warm, step.graph = True, SimpleNamespace(replay=lambda: None)
    with record_backends() as ran:
        step(None, [None])
    assert ran == ["graph step"]


def test_a_first_call_loads_no_compiler():
    """That of PyTorch, which takes seconds: meta tensors ask for it."""
    subprocess.run([sys.executable, "-c", FIRST_CALLS], check=True)


@GPU
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_tokens_are_those_of_python_in_bits(kind, monkeypatch):
    m, some = make_model(kind), make_prompts(5, 17, 40)

    def tokens(**options):
        if options:
            options["generator"] = torch.Generator("cuda").manual_seed(3)
        return torch.stack(m.generate(some, 40, **options))

    sampled = {"temperature": 1.0, "top_p": 0.9}
    found = tokens(), tokens(**sampled)
    refuse_recording(monkeypatch)
    assert found[0].equal(tokens()) and found[1].equal(tokens(**sampled))


@GPU
@pytest.mark.parametrize("kind", ["softmax", "gated_deltanet"])
def test_a_recording_has_room_and_is_made_again(kind, monkeypatch):
    m, some = make_model(kind), make_prompts(3, 30)
    monkeypatch.setattr(captured_step, "SPARE_TOKENS", 8)
    made_for, capture = [], CapturedStep._capture

    def counted(self, step, states, used):
        made_for.append(used)
        capture(self, step, states, used)

    monkeypatch.setattr(CapturedStep, "_capture", counted)
    found = m.generate(some, 40)
    grows = kind == "softmax"
    assert made_for == ([32, 41, 50, 59, 68] if grows else [1])
    refuse_recording(monkeypatch)
    wanted = m.generate(some, 40)
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))


def hook(m):
    m.blocks[0].register_forward_hook(lambda *_: None)


def compiled(m):
    m.blocks[1].mlp.compile()


def other_device(m):
    m.blocks[0].norm.cpu()


class Norm(torch.nn.RMSNorm):
    """Somebody's, which may wait for the GPU: no captured step has that."""


def other_class(m):
    m.blocks[0].norm = Norm(64, device="cuda", dtype=torch.bfloat16)


@GPU
@pytest.mark.parametrize("touch", [hook, compiled, other_device, other_class])
def test_what_is_not_recorded(touch):
    m, token = make_model(), torch.zeros(1, dtype=torch.int64, device="cuda")
    assert is_capturable(m, token)
    with torch.autocast("cuda"):
        assert not is_capturable(m, token)
    touch(m)
    assert not is_capturable(m, token)


@GPU
def test_what_is_not_finite_and_what_stops():
    m, some = make_model(), make_prompts(4, 4)
    with torch.no_grad():
        m.head.weight[3] = float("nan")
    with pytest.raises(ValueError, match="logits that are not finite"):
        m.generate(some, 8)
    m = make_model()
    tokens = torch.stack(list(stream(m, some, 64)), 1)
    stop = int(tokens[0, 5])
    found = m.generate(some, 64, stop=stop)
    for row, all_of_it in zip(found, tokens.tolist(), strict=True):
        n = all_of_it.index(stop) if stop in all_of_it else 64
        assert row.tolist() == all_of_it[:n]


@GPU
def test_memory_does_not_grow():
    m, some = make_model(), make_prompts(9)
    for _ in range(3):
        m.generate(some, 20)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        m.generate(some, 20)
    assert torch.cuda.memory_allocated() == before
