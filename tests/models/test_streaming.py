"""Generating: where rows end, what is drawn, and what is refused."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastweights.models import LanguageModel, ModelConfig
from fastweights.models.streaming import stream

V = 16


def make_model(kind="gla", **to):
    torch.manual_seed(0)
    shape = {"vocab_size": V, "dim": 8, "num_layers": 1, "num_heads": 1}
    m = LanguageModel(ModelConfig(pattern=(kind,), **shape), **to)
    torch.nn.init.normal_(m.embedding.weight)
    return m


PROMPT = torch.tensor([1, 2])


def script_tokens(monkeypatch, *steps):
    """Generating takes these tokens, one list per step."""
    left = [torch.tensor(step) for step in steps]

    def logits(model, x):
        token = left.pop(0)
        return F.one_hot(token, V).float().view(*x.shape[:-1], V)

    monkeypatch.setattr(LanguageModel, "logits", logits)


STOPS = {
    "int": 7,
    "zero": [0, 7],
    "tensor": torch.tensor(7),
    "tensors": torch.tensor([7, 0]),
    "int32": torch.tensor([7], dtype=torch.int32),
    "numpy-number": np.int64(7),
    "numpy-array": np.array([7, 9]),
    "set": {7},
    "tensors-in-a-list": [np.int32(7)],
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_a_stop_of_any_type_of_integer(stop, monkeypatch):
    """Each row ends at its own, and all of them when the last one does."""
    script = [[3, 4], [3, 7], [3, 4], [7, 4], [4, 4]]
    script_tokens(monkeypatch, *script)
    m, prompts = make_model(), PROMPT.expand(2, 2)
    found = m.generate(prompts, 5, stop=stop)
    assert [row.tolist() for row in found] == [[3, 3, 3], [4]]
    script_tokens(monkeypatch, *script)
    assert len(list(stream(m, prompts, 5, stop=stop))) == 4


@pytest.mark.parametrize("stop", [None, [], torch.tensor([]).long()])
def test_no_stop(stop, monkeypatch):
    script_tokens(monkeypatch, [0], [1])
    assert make_model().generate(PROMPT, 2, stop=stop)[0].tolist() == [0, 1]


@pytest.mark.parametrize("stop", [0, [0], torch.tensor([0]), range(V)])
def test_a_first_token_that_stops(stop, monkeypatch):
    script_tokens(monkeypatch, [0], [1])
    assert make_model().generate(PROMPT, 2, stop=stop)[0].tolist() == []
    script_tokens(monkeypatch, [0], [1])
    assert len(list(stream(make_model(), PROMPT, 2, stop=stop))) == 1
    assert make_model().generate(PROMPT, 0)[0].tolist() == []


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"stop": True}, TypeError, "stop: got bool, need an int"),
        ({"stop": 0.0}, TypeError, "stop: got float, need an int"),
        ({"stop": torch.tensor([0.0])}, TypeError, "stop: got float, need"),
        ({"stop": "0"}, TypeError, "stop: got str, need an int"),
        ({"stop": [None]}, TypeError, "stop: got NoneType, need an int"),
        ({"stop": -1}, ValueError, "stop: got -1, need tokens of the voca"),
        ({"stop": V}, ValueError, f"stop: got {V}, need .* 0 to {V - 1}"),
        ({"temperature": math.inf}, ValueError, "temperature: got inf, need"),
        ({"temperature": math.nan}, ValueError, "temperature: got nan, need"),
        ({"temperature": "hot"}, TypeError, "temperature: got str, need a r"),
        ({"top_p": 1.5}, ValueError, "top_p: got 1.5, need 0 < top_p <= 1"),
        ({"top_p": None}, TypeError, "top_p: got NoneType, need a real"),
        ({"generator": 3}, TypeError, "generator: got int, need a torch.Gen"),
        ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens: got float, ne"),
        ({"max_new_tokens": None}, TypeError, "max_new_tokens: got NoneType"),
        ({"prompts": None}, TypeError, "prompts: got NoneType, need a tens"),
        ({"prompts": torch.tensor(3)}, ValueError, r"prompts: got shape \[\]"),
        ({"prompts": []}, ValueError, "prompts: got none"),
        ({"prompts": PROMPT[:0]}, ValueError, r"prompts: got shape \[0\]"),
        ({"prompts": [[1, 2]]}, TypeError, "prompts: got list"),
        ({"prompts": PROMPT / 2}, TypeError, "prompts: got torch.float32"),
        ({"temperature": -1}, ValueError, "temperature: got -1"),
        ({"top_p": 0}, ValueError, "top_p: got 0"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens: got -1"),
        ({"prompts": PROMPT - 2}, ValueError, "prompts: got -1, need tokens"),
        ({"prompts": PROMPT + 14}, ValueError, "prompts: got 16, need token"),
    ],
)
def test_what_cannot_be_meant(options, kind, said):
    given = {"prompts": PROMPT, "max_new_tokens": 3}
    with pytest.raises(kind, match=f"^{said}"):
        make_model().generate(**given | options)


def with_logits(m, *steps):
    """The model, putting out these logits at its steps, the last for ever."""
    left = [*steps]

    def logits(x):
        row = left.pop(0) if len(left) > 1 else left[0]
        return row.expand(*x.shape[:-1], V)

    m.logits = logits
    return m


def banned(*tokens, value=-math.inf):
    logits = torch.arange(V) / 4.0
    logits[[*tokens]] = value
    return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("step", [0, 2])
def test_logits_that_are_not_finite_are_told_at_their_step(
    temperature, value, step
):
    steps = [*[banned()] * step, banned(3, value=value)]
    tokens = stream(
        with_logits(make_model(), *steps), PROMPT, 5, temperature=temperature
    )
    for _ in range(step):
        next(tokens)
    with pytest.raises(ValueError, match="logits that are not finite"):
        next(tokens)


def test_a_model_that_has_diverged_for_new_tokens_only():
    m = make_model()
    torch.nn.init.constant_(m.embedding.weight[4:], math.nan)
    with pytest.raises(ValueError, match="logits that are not finite"):
        m.generate(PROMPT, 8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_may_be_banned_by_minus_infinity(temperature):
    m = with_logits(make_model(), banned(*range(4, V)))
    found = m.generate(PROMPT, 20, temperature=temperature)[0]
    assert found.max() == 3
    m = with_logits(make_model(), banned(*range(V)))
    with pytest.raises(ValueError, match="logits that are not finite"):
        m.generate(PROMPT, 20, temperature=temperature)


def test_whoever_gets_a_token_may_change_it():
    m = make_model()
    want, found = m.generate(PROMPT, 8)[0].tolist(), []
    for token in stream(m, PROMPT, 8):
        found.append(int(token))
        token.add_(1).remainder_(V)
    assert found == want


@pytest.mark.parametrize("kind", ["gla", "softmax"])
def test_bytes_of_a_state_far_on(kind):
    """Keys and values of one head of size 8 and a position, or S."""
    m = make_model(kind)
    for T in (1, 1000, 1025, 5000):
        many = T * 2 * 8 * 4 + 8 if kind == "softmax" else m.state_bytes(1)
        assert m.state_bytes(T) == many
    for T in (0, -4, 2.5):
        with pytest.raises((TypeError, ValueError), match=r"^T: got"):
            m.state_bytes(T)
