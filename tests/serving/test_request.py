"""Requests that are forked and cancelled."""

import pytest
from support.serving_cases import (
    generate_alone,
    make_engine,
    make_prompts,
    record_prefills,
    run_engine,
    served_model,
)


@pytest.mark.parametrize("steps", [0, 1, 2, 6, 30])
def test_forks_share_what_was_read(steps):
    """Of a request that waits, that reads, that draws, and that is done."""
    model, engine = served_model(), make_engine(num_rows=2)
    (prompt,), sizes = make_prompts(19), record_prefills(engine)
    request = engine.add(prompt, 9, temperature=1.0, seed=3)
    for _ in range(steps):
        engine.step()
    forks = request.fork(3, seed=11)
    at = len(request.new_tokens)
    run_engine(engine)
    assert sum(map(sum, sizes)) == 18
    for i, fork in enumerate(forks):
        text = fork.all_tokens[: 19 + at]
        own = generate_alone(model, text, 9 - at, 1.0, seed=11 + i, drawn=at)
        assert fork.new_tokens == request.new_tokens[:at] + own
        assert fork.finish_reason == "length"


def test_a_fork_of_what_was_stopped_goes_on_by_itself():
    model, engine = served_model(), make_engine()
    (prompt,) = make_prompts(6)
    first = generate_alone(model, prompt, 9)
    end = next(x for x in first if x != first[0])
    request = engine.add(prompt, 12, stop=end)
    run_engine(engine)
    (fork,) = request.fork(1)
    assert not fork.done
    run_engine(engine)
    for x in (request, fork):
        assert x.finish_reason == "stop"
        assert x.new_tokens == first[: first.index(end)]


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_waits_for_a_request_that_may_be_cancelled(goes_on):
    model, engine = served_model(), make_engine()
    (prompt,), sizes = make_prompts(30), record_prefills(engine)
    request = engine.add(prompt, 5)
    engine.step()
    one, two, three = request.fork(3)
    two.cancel()
    if not goes_on:
        request.cancel()
    run_engine(engine)
    assert (
        one.new_tokens == three.new_tokens == generate_alone(model, prompt, 5)
    )
    assert request.new_tokens == (one.new_tokens if goes_on else [])
    assert sum(map(sum, sizes)) == (29 if goes_on else 8 + 29)
    assert two.num_drawn == 0 and two.new_tokens == []


@pytest.mark.parametrize("steps", range(7))
def test_a_request_is_cancelled_at_any_time(steps):
    model, engine = served_model(), make_engine(num_rows=2)
    requests = [engine.add(prompt, 4) for prompt in make_prompts(20, 3, 11)]
    for _ in range(steps):
        engine.step()
    had = [*requests[0].new_tokens]
    requests[0].cancel()
    requests[0].cancel()
    run_engine(engine)
    assert requests[0].new_tokens == had
    assert requests[0].finish_reason == (
        "length" if len(had) == 4 else "cancelled"
    )
    others = zip(requests[1:], make_prompts(20, 3, 11)[1:], strict=True)
    for request, prompt in others:
        assert request.new_tokens == generate_alone(model, prompt, 4)
