"""An engine's calls of the model: captured, filled up, drawn from."""

import pytest
import torch
from support.serving_cases import (
    GPU,
    HYBRID,
    OPTIONS,
    PATTERNS,
    PROMPT_LENGTHS,
    generate_alone,
    make_engine,
    make_prompts,
    make_served_model,
    run_engine,
    served_model,
)

from fastweights.models import StatePool
from fastweights.serving import model_runner


@GPU
@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
@pytest.mark.parametrize("captured", [False, True])
def test_tokens_of_a_gpu(pattern, captured, monkeypatch):
    """Those of a CPU: captured, with any mixture of draws, and not."""
    if not captured:
        monkeypatch.setattr(model_runner, "is_capturable", lambda *_: False)
    engine, asked = make_engine(make_served_model(pattern).cuda()), []
    for i, prompt in enumerate(make_prompts(*PROMPT_LENGTHS) * 2):
        asked.append((prompt, OPTIONS[i % len(OPTIONS)]))
        asked[-1] += (engine.add(prompt, 9, **asked[-1][1]),)
        engine.step()
    run_engine(engine)
    assert bool(engine.runner.captured_steps) == captured
    for prompt, way, request in asked:
        assert request.new_tokens == generate_alone(
            served_model(pattern), prompt, 9, **way
        )


class Python:
    """In place of a captured step, what would be captured."""

    def __init__(self, **_):
        pass

    def __call__(self, step, states):
        return step(states)


@pytest.mark.parametrize(
    "pattern, widest, captured",
    [
        (("gated_deltanet",), 256, True),
        (("gated_deltanet", "mamba2"), 256, True),
        (("gated_deltanet",), 4, False),
        (HYBRID, 256, False),
    ],
)
def test_what_kernels_read_is_captured(pattern, widest, captured, monkeypatch):
    """Where the operator would run them: of these K, if they are all."""

    def chosen(backend, q):
        assert backend == "auto"
        return "triton" if q.shape[-1] <= widest else "torch"

    monkeypatch.setattr(model_runner, "recurrence_backend", chosen)
    model = served_model(pattern)
    pool = StatePool(model, 1, 16)
    assert model_runner.can_capture_prefills(model, pool) == captured


@pytest.mark.parametrize("pattern", [("gated_deltanet",), ("mamba2",)])
def test_what_fills_a_read_up_changes_nothing(pattern, monkeypatch):
    """Tokens after all sequences, and rows that read none of them."""
    monkeypatch.setattr(model_runner, "CapturedStep", Python)
    exact, filled = (
        make_engine(served_model(pattern), num_rows=4, max_prefill_tokens=40)
        for _ in range(2)
    )
    filled.runner.captures_prefills = True
    for i, prompt in enumerate(make_prompts(*PROMPT_LENGTHS)):
        for engine in (exact, filled):
            engine.add(prompt, 9, **OPTIONS[i % len(OPTIONS)])
    while exact.busy:
        new, ref = (
            [x for _, x in engine.step()] for engine in (filled, exact)
        )
        assert new == ref
        for one, other in zip(
            filled.pool.states, exact.pool.states, strict=True
        ):
            torch.testing.assert_close(one.tensors(), other.tensors())
    assert {T for T, _ in filled.runner.prefills} == {256}


@GPU
@pytest.mark.parametrize(
    "pattern, captured",
    [
        (("gated_deltanet", "kda"), True),
        (("gated_deltanet", "comba"), True),
        (HYBRID, False),
    ],
)
def test_captured_reads_are_those_in_python(pattern, captured, monkeypatch):
    model = make_served_model(pattern).to("cuda", torch.bfloat16)

    def answers():
        engine = make_engine(
            model, num_rows=6, tokens_per_row=400, max_prefill_tokens=400
        )
        requests = [
            engine.add(x, 9) for x in make_prompts(*PROMPT_LENGTHS, 300) * 4
        ]
        run_engine(engine)
        tokens = [x.new_tokens for x in requests]
        return tokens, engine.runner.prefills.values()

    tokens, reads = answers()
    assert any(x.captured_step.graph for x in reads) == captured
    monkeypatch.setattr(model_runner, "CapturedStep", Python)
    assert answers()[0] == tokens


def test_a_row_draws_the_same_whichever_others_do():
    """Draws of whole distributions are no others beside top_p < 1."""
    model = served_model(("gated_deltanet",))
    (prompt,) = make_prompts(4)
    way = {"temperature": 1.0, "seed": 7}
    found = []
    for others in ([], [{"temperature": 1.0, "top_p": 0.9}], [{}]):
        engine = make_engine(model)
        request = engine.add(prompt, 20, **way)
        for to in others:
            engine.add(prompt, 20, **to)
        run_engine(engine)
        found.append(request.new_tokens)
    assert (
        found[0]
        == found[1]
        == found[2]
        == generate_alone(model, prompt, 20, **way)
    )
