"""Requests that are forked and cancelled."""

import pytest
from support.serving_cases import (
    generate_alone,
    make_engine,
    model,
    prompts,
    record_prefills,
    run_engine,
)


@pytest.mark.parametrize("steps", [0, 1, 2, 6, 30])
def test_forks_share_what_was_read(steps):
    """Of a request that waits, that reads, that draws, and that is done."""
    m, e = model(), make_engine(size=2)
    (prompt,), sizes = prompts(19), record_prefills(e)
    request = e.add(prompt, 9, temperature=1.0, seed=3)
    for _ in range(steps):
        e.step()
    forks = request.fork(3, seed=11)
    at = len(request.tokens)
    run_engine(e)
    assert sum(map(sum, sizes)) == 18
    for i, fork in enumerate(forks):
        text = fork.all_tokens[: 19 + at]
        own = generate_alone(m, text, 9 - at, 1.0, seed=11 + i, drawn=at)
        assert fork.tokens == request.tokens[:at] + own
        assert fork.finish_reason == "length"


def test_a_fork_of_what_was_stopped_goes_on_by_itself():
    m, e = model(), make_engine()
    (prompt,) = prompts(6)
    first = generate_alone(m, prompt, 9)
    end = next(x for x in first if x != first[0])
    request = e.add(prompt, 12, stop=end)
    run_engine(e)
    (fork,) = request.fork(1)
    assert not fork.done
    run_engine(e)
    for x in (request, fork):
        assert x.finish_reason == "stop"
        assert x.tokens == first[: first.index(end)]


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_waits_for_a_request_that_may_be_cancelled(goes_on):
    m, e = model(), make_engine()
    (prompt,), sizes = prompts(30), record_prefills(e)
    request = e.add(prompt, 5)
    e.step()
    one, two, three = request.fork(3)
    two.cancel()
    if not goes_on:
        request.cancel()
    run_engine(e)
    assert one.tokens == three.tokens == generate_alone(m, prompt, 5)
    assert request.tokens == (one.tokens if goes_on else [])
    assert sum(map(sum, sizes)) == (29 if goes_on else 8 + 29)
    assert two.num_drawn == 0 and two.tokens == []


@pytest.mark.parametrize("steps", range(7))
def test_a_request_is_cancelled_at_any_time(steps):
    m, e = model(), make_engine(size=2)
    requests = [e.add(prompt, 4) for prompt in prompts(20, 3, 11)]
    for _ in range(steps):
        e.step()
    had = [*requests[0].tokens]
    requests[0].cancel()
    requests[0].cancel()
    run_engine(e)
    assert requests[0].tokens == had
    assert requests[0].finish_reason == (
        "length" if len(had) == 4 else "cancelled"
    )
    others = zip(requests[1:], prompts(20, 3, 11)[1:], strict=True)
    for request, prompt in others:
        assert request.tokens == generate_alone(m, prompt, 4)
