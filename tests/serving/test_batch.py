"""An engine's calls of the model: recorded, filled up, drawn from."""

import pytest
import torch
from support.serving_cases import (
    GPU,
    HYBRID,
    LENGTHS,
    PATTERNS,
    WAYS,
    generate_alone,
    make_engine,
    make_model,
    model,
    prompts,
    run_engine,
)

from fastweights.models import StatePool
from fastweights.serving import batch


@GPU
@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
@pytest.mark.parametrize("recorded", [False, True])
def test_tokens_of_a_gpu(pattern, recorded, monkeypatch):
    """Those of a CPU: recorded, with any mixture of draws, and not."""
    if not recorded:
        monkeypatch.setattr(batch, "is_recordable", lambda *_: False)
    e, made = make_engine(make_model(pattern).cuda()), []
    for i, prompt in enumerate(prompts(*LENGTHS) * 2):
        made.append((prompt, WAYS[i % len(WAYS)]))
        made[-1] += (e.add(prompt, 9, **made[-1][1]),)
        e.step()
    run_engine(e)
    assert bool(e.batch.recordings) == recorded
    for prompt, way, request in made:
        assert request.tokens == generate_alone(
            model(pattern), prompt, 9, **way
        )


class Python:
    """In place of a recording, what would be recorded."""

    def __init__(self, **_):
        pass

    def __call__(self, step, states):
        return step(states)


@pytest.mark.parametrize(
    "pattern, widest, recorded",
    [
        (("gated_deltanet",), 256, True),
        (("gated_deltanet", "mamba2"), 256, True),
        (("gated_deltanet",), 4, False),
        (HYBRID, 256, False),
    ],
)
def test_what_kernels_read_is_recorded(pattern, widest, recorded, monkeypatch):
    """Where the operator would run them: of these K, if they are all."""

    def chosen(backend, q):
        assert backend == "auto"
        return "triton" if q.shape[-1] <= widest else "torch"

    monkeypatch.setattr(batch, "recurrence_backend", chosen)
    m = model(pattern)
    pool = StatePool(m, 1, 16)
    assert batch.can_record_prefills(m, pool) == recorded


@pytest.mark.parametrize("pattern", [("gated_deltanet",), ("mamba2",)])
def test_what_fills_a_read_up_changes_nothing(pattern, monkeypatch):
    """Tokens after all sequences, and rows that read none of them."""
    monkeypatch.setattr(batch, "Recording", Python)
    exact, filled = (
        make_engine(model(pattern), size=4, prefill_tokens=40)
        for _ in range(2)
    )
    filled.batch.records_prefills = True
    for i, prompt in enumerate(prompts(*LENGTHS)):
        for e in (exact, filled):
            e.add(prompt, 9, **WAYS[i % len(WAYS)])
    while exact.busy:
        new, ref = ([x for _, x in e.step()] for e in (filled, exact))
        assert new == ref
        for one, other in zip(
            filled.pool.states, exact.pool.states, strict=True
        ):
            torch.testing.assert_close(one.tensors(), other.tensors())
    assert {T for T, _ in filled.batch.prefills} == {256}


@GPU
@pytest.mark.parametrize(
    "pattern, recorded",
    [
        (("gated_deltanet", "kda"), True),
        (("gated_deltanet", "comba"), True),
        (HYBRID, False),
    ],
)
def test_recorded_reads_are_those_in_python(pattern, recorded, monkeypatch):
    m = make_model(pattern).to("cuda", torch.bfloat16)

    def answers():
        e = make_engine(m, size=6, capacity=400, prefill_tokens=400)
        made = [e.add(x, 9) for x in prompts(*LENGTHS, 300) * 4]
        run_engine(e)
        return [x.tokens for x in made], e.batch.prefills.values()

    tokens, reads = answers()
    assert any(x.recording.graph for x in reads) == recorded
    monkeypatch.setattr(batch, "Recording", Python)
    assert answers()[0] == tokens


def test_a_row_draws_the_same_whichever_others_do():
    """Draws of whole distributions are no others beside top_p < 1."""
    m = model(("gated_deltanet",))
    (prompt,) = prompts(4)
    way = {"temperature": 1.0, "seed": 7}
    found = []
    for others in ([], [{"temperature": 1.0, "top_p": 0.9}], [{}]):
        e = make_engine(m)
        request = e.add(prompt, 20, **way)
        for to in others:
            e.add(prompt, 20, **to)
        run_engine(e)
        found.append(request.tokens)
    assert (
        found[0]
        == found[1]
        == found[2]
        == generate_alone(m, prompt, 20, **way)
    )
