"""Requests that come and go: each gets the tokens that it gets alone."""

import functools
import gc
import random

import pytest
import torch
from support.serving_cases import (
    GPU,
    OPTIONS,
    PATTERNS,
    PROMPT_LENGTHS,
    generate_alone,
    make_engine,
    make_prompts,
    make_served_model,
    record_prefills,
    run_engine,
    served_model,
)

from fastweights.serving.engine import STEPS_PER_PREFILL

patterns = pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)


@patterns
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_any_order_of_arrival_gives_the_tokens_of_each_alone(
    pattern, batch_invariant
):
    model, prompts = served_model(pattern), make_prompts(*PROMPT_LENGTHS)
    options = [OPTIONS[i % len(OPTIONS)] for i in range(len(prompts))]
    ref = [
        generate_alone(model, x, 9, **option)
        for x, option in zip(prompts, options, strict=True)
    ]
    for order in ([*range(7)], [5, 2, 0, 3, 6, 1, 4]):
        engine, requests = (
            make_engine(model, batch_invariant=batch_invariant),
            {},
        )
        found = {}
        for i in order:
            requests[i] = engine.add(prompts[i], 9, **options[i])
            for request, token in engine.step():
                found.setdefault(request, []).append(token)
        for request, tokens in run_engine(engine).items():
            found.setdefault(request, []).extend(tokens)
        for i, request in requests.items():
            assert request.new_tokens == ref[i] == found.get(request, [])
            full = len(ref[i]) == 9
            assert request.finish_reason == ("length" if full else "stop")


def state_after(model, drawn, *, company, batch_invariant):
    """Of one request, in bits, that has drawn so many tokens."""
    engine = make_engine(
        model,
        num_rows=6,
        tokens_per_row=400,
        max_prefill_tokens=96,
        batch_invariant=batch_invariant,
    )
    first, *others = make_prompts(221, 300, 1, 5, 9, 3, 12)
    for i, prompt in enumerate(others[:3] if company else []):
        engine.add(prompt, 20 + i, **OPTIONS[i])
        engine.step()
    request = engine.add(first, 20, temperature=1.0, seed=5)
    for i, prompt in enumerate(others[1:] * 2 if company else []):
        engine.add(prompt, 3 + i, **OPTIONS[i % len(OPTIONS)])
    while request.num_drawn < drawn:
        engine.step()
    return engine.pool.snapshot(request.row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "pattern", [x for x in PATTERNS if x != ("mlstm",)], ids="-".join
)
def test_company_changes_no_bit_of_a_batch_invariant_state(pattern, dtype):
    """Not of mLSTM's on a CPU: of 17 columns, places decide how they add."""
    model = make_served_model(pattern).to(dtype)
    states = [
        state_after(model, 12, company=company, batch_invariant=True)
        for company in (False, True)
    ]
    for one, other in zip(*states, strict=True):
        for name, x in one.tensors().items():
            assert x.equal(other.tensors()[name])


@GPU
@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
def test_company_changes_no_bit_on_a_gpu(pattern):
    model = make_served_model(pattern).to("cuda", torch.bfloat16)
    one, other = (
        state_after(model, 12, company=company, batch_invariant=True)
        for company in (False, True)
    )
    for x, y in zip(one, other, strict=True):
        for name, tensor in x.tensors().items():
            assert tensor.equal(y.tensors()[name])


def test_prompts_are_read_in_pieces_between_tokens():
    engine = make_engine(num_rows=4)
    short, *rest = make_prompts(4, 30, 12, 3)
    first = engine.add(short, 20)
    engine.step()
    sizes = record_prefills(engine)
    for prompt in rest:
        engine.add(prompt, 5)
    for _ in range(6):
        engine.step()
        assert sum(sizes[-1]) <= 8
    assert sizes == [[8], [8], [8], [5, 3], [5, 2], [3]]
    assert first.num_drawn == 7
    run_engine(engine)


def test_where_rows_are_scarce_prompts_are_read_together():
    """Many rows that go on wait for no prompt alone, if it waits not long."""
    engine = make_engine(num_rows=8, max_prefill_tokens=32)
    prompts = make_prompts(*[5] * 12)
    for prompt in prompts[:8]:
        engine.add(prompt, 4)
    sizes = record_prefills(engine)
    engine.step()
    for prompt in prompts[8:]:
        engine.add(prompt, 40)
    run_engine(engine)
    assert sizes == [[4] * 8, [4] * 4]
    for others, steps in ([8], 8 * STEPS_PER_PREFILL), ([], 1):
        engine = make_engine(num_rows=8)
        for prompt in prompts[:7]:
            engine.add(prompt, 40)
        while len(engine.running) < 7:
            engine.step()
        last, late = engine.running[-1], engine.add(prompts[7], 2)
        for i in others:
            engine.add(prompts[i], 2)
        while not late.num_drawn:
            engine.step()
        assert last.num_drawn == 1 + steps


def test_a_full_pool_has_requests_wait_in_turn():
    engine, prompts = make_engine(num_rows=2), make_prompts(*[5] * 7)
    requests = [engine.add(prompt, 3) for prompt in prompts]
    assert [x.done for x in requests] == [False] * 7
    assert [x.unread for x in requests] == [4] * 7
    engine.step()
    assert [x.unread for x in requests] == [0] * 2 + [4] * 5
    ended = []
    while engine.busy:
        assert len(engine.running) + len(engine.prefilling) <= 2
        engine.step()
        ended += [x for x in requests if x.done and x not in ended]
    assert ended == requests and not any(x.unread for x in requests)


@pytest.mark.parametrize("call", range(1, 16))
def test_a_step_that_raises_loses_no_row_and_no_token(call):
    """Whatever it was doing: those whose states are half new begin anew."""
    model, calls = make_served_model(), 0

    def raises(*_):
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("no memory, say")

    prompts = make_prompts(20, 3, 11, 1)
    ref = [
        generate_alone(model, x, 5, 1.0, seed=i) for i, x in enumerate(prompts)
    ]
    engine, found, raised = make_engine(model), {}, 0
    model.blocks[1].mlp.register_forward_hook(raises)
    requests = [
        engine.add(prompt, 5, temperature=1.0, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    while engine.busy:
        try:
            for request, token in engine.step():
                found.setdefault(request, []).append(token)
        except RuntimeError:
            raised += 1
            held = {x.row for x in (*engine.prefilling, *engine.running)}
            assert not held & engine.pool.free.keys()
            assert len(held) + len(engine.pool.free) == 3
    assert raised == 1 and len(engine.pool.free) == 3
    assert (
        [x.new_tokens for x in requests] == ref == [found[x] for x in requests]
    )


def test_logits_that_are_not_finite_end_their_request_alone():
    model = make_served_model(tie_embeddings=False)
    prompts = make_prompts(9, 14, 5)
    bad = int(prompts[1][3])
    prompts = [
        x if i == 1 else x.where(x != bad, bad - 1)
        for i, x in enumerate(prompts)
    ]
    ref = [generate_alone(model, x, 6) for x in prompts]
    model.embedding.weight.data[bad] = torch.nan
    engine = make_engine(model, num_rows=2)
    requests = [engine.add(x, 6) for x in prompts]
    run_engine(engine)
    assert requests[1].finish_reason == "not finite"
    assert not requests[1].new_tokens
    for i in (0, 2):
        n = ref[i].index(bad) + 1 if bad in ref[i] else 6
        assert requests[i].new_tokens == ref[i][:n]


@pytest.mark.parametrize(
    "refused, kind, message",
    [
        (
            {"prompt": torch.zeros(56, dtype=torch.int64)},
            ValueError,
            "prompt: got 56 tokens and max_n",
        ),
        ({"prompt": [1, 2]}, TypeError, "prompt: got list"),
        ({"prompt": torch.ones(2)}, TypeError, "prompt: got torch.float32"),
        ({"seed": -1}, ValueError, "seed: got -1, need 0 to"),
        ({"seed": 1.0}, TypeError, "seed: got float, need an int"),
        ({"stop": 31}, ValueError, "stop: got 31, need tokens"),
        ({"temperature": -1.0}, ValueError, "temperature: got -1.0, need"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens: got -1"),
    ],
)
def test_what_an_engine_does_not_take(refused, kind, message):
    engine = make_engine()
    options = {"prompt": torch.arange(5), "max_new_tokens": 9} | refused
    with pytest.raises(kind, match=f"^{message}"):
        engine.add(**options)
    assert not engine.busy


def test_a_model_whose_states_stay_takes_any_length():
    engine = make_engine(served_model(("gated_deltanet",)), tokens_per_row=1)
    request = engine.add(torch.arange(20), 12)
    run_engine(engine)
    assert len(request.new_tokens) == 12
    assert engine.add(torch.arange(3), 0).finish_reason == "length"
    assert not engine.busy


def all_tensors():
    gc.collect()
    return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]


def tensor_bytes():
    return sum(x.untyped_storage().nbytes() for x in all_tensors())


def bytes_of_states(prefixes):
    """What prefixes take without their keys, of 32 bytes each."""
    return prefixes.nbytes - 32 * len(prefixes)


@pytest.mark.parametrize(
    "steps", [2_500, pytest.param(10_000, marks=pytest.mark.full)]
)
def test_thousands_of_requests_and_steps_in_any_order(steps):
    """Added, forked, cancelled: each right, nothing lost, memory as before."""
    others = all_tensors()  # of other tests: none of them may go meanwhile
    model = served_model(("gated_deltanet",), num_layers=1, dim=8, head_dim=4)
    engine, draw = make_engine(model, max_prefix_bytes=3000), random.Random(0)
    answer = functools.cache(functools.partial(generate_alone, model))
    texts = [tuple(x.tolist()) for x in make_prompts(1, 2, 9, 17, 30, 8)]
    begun, came, ended = {}, {}, 0
    engine.add(torch.arange(3), 3)
    run_engine(engine)
    before = tensor_bytes() - bytes_of_states(engine.prefix_cache)

    def begin(request):
        begun[request] = len(request.new_tokens)
        came[request] = [*request.new_tokens]

    def step():
        for request, token in engine.step():
            came[request].append(token)
        for request in [x for x in begun if x.done]:
            shared, tokens = begun.pop(request), request.new_tokens
            ref = answer(
                tuple(request.prompt + tokens[:shared]),
                10 - shared,
                request.temperature,
                request.top_p,
                request.stop,
                request.seed,
                shared,
            )
            if request.finish_reason == "cancelled":
                ref = ref[: len(tokens) - shared]
            elif request.finish_reason == "length":
                assert len(tokens) == 10
            assert came.pop(request) == tokens == tokens[:shared] + ref

    for _ in range(steps):
        what, room = draw.random(), len(engine.waiting) < 5
        if what < 0.2 and room:
            way = draw.choice(OPTIONS[:4])
            begin(engine.add(torch.tensor(draw.choice(texts)), 10, **way))
            ended += 1
        elif what < 0.25 and begun:
            draw.choice([*begun]).cancel()
        elif what < 0.3 and begun and room:
            one = draw.choice([*begun])
            for fork in one.fork(draw.randint(1, 2), seed=draw.randrange(3)):
                begin(fork)
        else:
            step()
    while engine.busy:
        step()
    assert not begun and not came and ended > steps // 10
    assert sorted(engine.pool.free) == [0, 1, 2]
    assert 0 < engine.prefix_cache.nbytes <= 3000
    assert tensor_bytes() == before + bytes_of_states(engine.prefix_cache)
    del others  # until here
