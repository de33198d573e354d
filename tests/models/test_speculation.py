"""Drafts: the tokens of plain decoding, in fewer passes."""

import random

import pytest
import torch
from support.layer_cases import contents
from support.model_cases import KINDS, make_config, make_model, token_ids

from fastweights.layers import GatedDeltaNet, attention
from fastweights.models import (
    LAYERS,
    LanguageModel,
    ModelConfig,
    captured_step,
    speculation,
)
from fastweights.models.speculation import MAX_DRAFTS, NgramLookup, Reader
from fastweights.models.streaming import stream

V = 71
PROMPTS = [
    torch.tensor([1, 2, 3, 1, 2, 3, 1]),
    token_ids(4),
    token_ids(1, seed=2),
]
SAMPLED = {"temperature": 0.7, "top_p": 0.9}
HOW = pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])


def make_lively_model(*pattern, **to):
    """A model in fp64 whose tokens do not soon repeat themselves."""
    m = make_model(pattern).double() if pattern else make_model().double()
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(1.5)
    return m.to(**to)


def generate(m, prompts=PROMPTS, tokens=16, **options):
    if "temperature" in options:
        some = torch.Generator().manual_seed(5)
        options = {"generator": some} | options
    return [row.tolist() for row in m.generate(prompts, tokens, **options)]


def record_passes(monkeypatch):
    """The tokens of each pass of a model from here on."""
    found, step = [], Reader._step

    def counted(self, T, states):
        found.append(T)
        return step(self, T, states)

    monkeypatch.setattr(Reader, "_step", counted)
    return found


def draft_answers(answers, prompts=PROMPTS, *, right=lambda: MAX_DRAFTS):
    """Drafts what plain decoding found; after ``right`` tokens others."""

    def draft(text):
        for prompt, answer in zip(prompts, answers, strict=True):
            start = len(prompt)
            if text == prompt.tolist() + answer[: len(text) - start]:
                n, rest = right(), answer[len(text) - start :]
                return rest[:n] + [(t + 1) % V for t in rest[n:]]
        raise AssertionError(f"not a text of plain decoding: {text}")

    return draft


@HOW
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer(kind, how):
    """Each row has another number of right drafts in each pass."""
    m, numbers = make_lively_model(kind), random.Random(0)
    plain = generate(m, **how)
    draft = draft_answers(plain, right=lambda: numbers.randint(0, MAX_DRAFTS))
    assert generate(m, draft=draft, **how) == plain


@HOW
def test_drafts_of_all_sorts(how, monkeypatch):
    m = make_lively_model()
    plain, of = generate(m, **how), record_passes(monkeypatch)
    numbers = random.Random(0)

    def count(draft):
        of.clear()
        assert generate(m, draft=draft, **how) == plain
        return len(of), of.count(1)

    # 16 tokens: one of the prompt, then up to 8 in a pass.
    assert count(draft_answers(plain)) == (2, 0)
    assert count(draft_answers(plain, right=lambda: 0)) == (15, 0)
    assert count(lambda text: []) == (15, 15)
    assert count(lambda text: [numbers.randrange(V)] * 30)[1] == 0
    assert count("lookup")[0] <= 15
    # The model itself is always right: 7 passes for 7 drafts, one for both.
    # What it has read alone is the first token after the prompts.
    assert count(m) == (2 * (MAX_DRAFTS + 1), 1)


def test_a_smaller_model_drafts_what_it_would_draw():
    """With the same noise: models that are alike agree."""
    m, small = make_lively_model(), make_lively_model()
    with torch.no_grad():
        small.norm.weight.mul_(1.01)
    accepted = []

    def counted(reader, drafts):
        draws = call(reader, drafts)
        if reader.model is m:
            accepted.append(max(map(len, drafts)))
        return draws

    call = Reader.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "__call__", counted)
        found = generate(m, draft=small, tokens=32, **SAMPLED)
    assert found == generate(m, tokens=32, **SAMPLED)
    assert len(accepted) < 16


@pytest.mark.parametrize("n", [1, 2, MAX_DRAFTS + 1, MAX_DRAFTS + 2, 30])
def test_as_many_tokens_as_asked_for(n):
    m = make_lively_model("softmax")
    plain = generate(m, tokens=30)
    draft = draft_answers(plain)
    found = generate(m, tokens=n, draft=draft)
    assert found == [row[:n] for row in plain]
    assert generate(m, tokens=0, draft=draft) == [[], [], []]


@HOW
def test_rows_stop_at_tokens_of_their_own(how):
    m = make_lively_model()
    plain = generate(m, tokens=24, **how)
    stop = [plain[0][3], plain[1][10], plain[2][-1]]
    wanted = generate(m, tokens=24, stop=stop, **how)
    assert len({len(row) for row in wanted}) > 1
    for draft in ("lookup", draft_answers(plain), lambda text: [0]):
        found = generate(m, tokens=24, stop=stop, draft=draft, **how)
        assert found == wanted
    steps = list(stream(m, PROMPTS, 24, stop=stop, draft="lookup"))
    assert len(steps) == len(list(stream(m, PROMPTS, 24, stop=stop)))
    assert all(x.shape == (3,) and x.dtype == torch.int64 for x in steps)


def test_samples_have_the_models_distribution():
    """Chi-square of pairs of tokens; drafts are drawn evenly."""
    torch.manual_seed(0)
    shape = {"vocab_size": 5, "dim": 8, "num_layers": 1, "num_heads": 1}
    m = LanguageModel(ModelConfig(**shape, pattern=("gated_deltanet",)))
    torch.nn.init.normal_(m.head.weight)
    prompt, N, numbers = torch.tensor([1, 2]), 4000, random.Random(0)
    pairs = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    with torch.no_grad():
        texts = torch.cat([prompt.expand(25, 2), pairs], 1)
        p = m(texts)[0].log_softmax(-1)[:, 1:3]
    p = p.gather(-1, pairs[..., None]).sum((1, 2)).exp()
    found = m.generate(
        prompt.expand(N, 2),
        2,
        temperature=1.0,
        generator=torch.Generator().manual_seed(0),
        draft=lambda text: [numbers.randrange(5)],
    )
    first, second = torch.stack(found).T
    counts = (5 * first + second).bincount(minlength=25)
    chi = ((counts - N * p).square() / (N * p)).sum()
    assert chi < 24 + 4 * 48**0.5
    assert ((counts - N / 25).square() / (N / 25)).sum() > 500


def test_what_is_not_finite_where_it_is_reached(monkeypatch):
    """Behind a draft that is wrong it does not matter."""
    m, prompts = make_lively_model(), PROMPTS[:1]
    plain = generate(m, prompts)
    bad, forward = {next(t for t in range(V) if t not in plain[0])}, m.forward

    def not_finite(tokens, *others):
        y, after = forward(tokens, *others)
        there = torch.isin(tokens, torch.tensor([*bad]))
        return y.masked_fill(there[..., None], torch.inf), after

    monkeypatch.setattr(m, "forward", not_finite)
    assert generate(m, prompts, draft=lambda text: [*bad]) == plain
    bad, got = {plain[0][7]}, []
    with pytest.raises(ValueError, match="logits that are not finite"):
        for x in stream(m, prompts, 16, draft=draft_answers(plain, prompts)):
            got += x.tolist()
    assert got == plain[0][: plain[0].index(*bad) + 1]


def test_looked_up():
    found = NgramLookup()
    assert found([5]) == []
    assert found([5, 6]) == []
    assert found([5, 6, 7, 8, 5]) == [6, 7, 8, 5, 6, 7, 8]
    # Of two places the last one, of more tokens rather than fewer.
    assert found([5, 6, 7, 8, 5, 9, 1, 5])[:2] == [9, 1]
    text = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]
    assert NgramLookup()(text)[:4] == [4, 9, 2, 3]
    assert NgramLookup()(text[1:])[:4] == [5, 1, 2, 3]
    assert NgramLookup()([3, 3]) == [3] * MAX_DRAFTS


def test_attention_needs_no_more_room(monkeypatch):
    """Than for what was asked and one pass: a captured step has no other."""

    def enough(x, capacity):
        assert capacity <= x.shape[1] <= len(PROMPTS[0]) + 40 + 16
        return x

    monkeypatch.setattr(attention, "grow_to", enough)
    m = make_lively_model("softmax")
    assert len(generate(m, tokens=40, draft=lambda text: [0])[0]) == 40


def test_a_draft_may_do_what_it_likes_with_the_text():
    m, plain = make_lively_model(), generate(make_lively_model())

    def draft(text):
        text[-1] = 0
        return [0]

    assert generate(m, draft=draft) == plain


@torch.no_grad()
def test_one_token_that_is_not_taken_in():
    """Not by a layer's own way for one token, which takes it in."""
    m = make_model()
    _, states = m(token_ids(2, 5))
    before = [state.clone() for state in states]
    wanted, _ = m(token_ids(2, 1), [state.clone() for state in states])
    for state in states:
        state.num_accepted = torch.tensor([0, 0])
    logits, _ = m(token_ids(2, 1), states)
    torch.testing.assert_close(logits, wanted)
    for state, old in zip(states, before, strict=True):
        torch.testing.assert_close(contents(state), contents(old))


def test_what_a_draft_may_be():
    m, other = make_model(), LanguageModel(make_config(vocab_size=70))
    bad = {
        'need "lookup"': "look",
        "need .* a function": 3,
        "got a vocabulary of 70": other,
        "draft: got 71, need tokens": lambda text: [71],
        "draft: got -1, need tokens": lambda text: torch.tensor([0, -1]),
        "draft: got device meta": make_model().to("meta"),
    }
    for need, draft in bad.items():
        with pytest.raises(ValueError, match=need):
            m.generate(PROMPTS, 4, draft=draft)


class Past(torch.nn.Module):
    """A layer of somebody's own, which knows nothing of drafts."""

    def __init__(self, dim, num_heads, device=None, dtype=None):
        super().__init__()
        self.own = GatedDeltaNet(dim, num_heads, device=device, dtype=dtype)

    def forward(self, x, state=None, cu_seqlens=None):
        return self.own.compute(x, state, cu_seqlens)


def test_a_layer_that_takes_in_what_it_should_not(monkeypatch):
    monkeypatch.setitem(LAYERS, "past", Past)
    m = make_model(("past",))
    assert generate(m, draft=lambda text: []) == generate(m)
    with pytest.raises(ValueError, match=r"past LayerState\.num_accepted"):
        generate(m, draft=lambda text: [1])


def refuse_recording(monkeypatch):
    monkeypatch.setattr(speculation, "is_capturable", lambda *_: False)


@pytest.mark.gpu
@HOW
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_passes_are_those_of_python_in_bits(kind, how, monkeypatch):
    m = make_lively_model(kind, device="cuda", dtype=torch.bfloat16)
    small = make_lively_model(kind, device="cuda", dtype=torch.bfloat16)

    def found():
        return [
            generate(m, tokens=40, draft=draft, **how)
            for draft in ("lookup", small, lambda text: [])
        ]

    recorded = found()
    refuse_recording(monkeypatch)
    assert recorded == found()


@pytest.mark.gpu
@HOW
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_on_gpu(kind, how):
    m, numbers = make_lively_model(kind, device="cuda"), random.Random(0)
    plain = generate(m, tokens=40, **how)
    draft = draft_answers(plain, right=lambda: numbers.randint(0, MAX_DRAFTS))
    assert generate(m, tokens=40, draft=draft, **how) == plain


@pytest.mark.gpu
def test_keys_of_a_recorded_pass_outgrow_it(monkeypatch):
    m = make_lively_model("softmax", device="cuda")
    plain = generate(m, tokens=100)
    monkeypatch.setattr(captured_step, "SPARE_TOKENS", 8)
    for right in (1, MAX_DRAFTS):
        draft = draft_answers(plain, right=lambda n=right: n)
        assert generate(m, tokens=100, draft=draft) == plain
