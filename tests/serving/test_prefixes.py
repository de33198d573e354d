"""States that are kept for prompts that begin alike."""

import tracemalloc

import pytest
import torch
from support.serving_cases import (
    generate_alone,
    make_engine,
    make_prompts,
    make_served_model,
    record_prefills,
    run_engine,
    served_model,
)

from fastweights.serving.prefixes import PrefixCache, PrefixHasher


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_prompt_goes_on_from_one_that_began_alike(batch_invariant):
    model = served_model()
    (text,) = make_prompts(40)
    engine = make_engine(
        model, max_prefix_bytes=10**6, batch_invariant=batch_invariant
    )
    sizes = record_prefills(engine)

    def reads(*prompt):
        prompt = torch.tensor([int(t) for t in prompt])
        sizes.clear()
        request = engine.add(prompt, 4)
        run_engine(engine)
        assert request.new_tokens == generate_alone(model, prompt, 4)
        return sum(map(sum, sizes))

    assert reads(*text[:20]) == 19
    assert reads(*text[:20]) == 0
    assert reads(*text[:30]) == (29 - 16 if batch_invariant else 29 - 19)
    assert reads(*text[:10], 0, 0) == 11 - 8
    assert reads(*text[1:20]) == 18
    assert engine.prefix_cache.nbytes <= 10**6


def test_prefixes_are_bounded_and_the_least_used_goes():
    engine, some = make_engine(max_prefix_bytes=1), make_prompts(9, 9, 9)
    engine.add(some[0], 1)
    run_engine(engine)
    assert len(engine.prefix_cache) == engine.prefix_cache.nbytes == 0
    engine = make_engine(max_prefix_bytes=10**6)
    one = engine.pool.snapshot(engine.pool.acquire())
    first, second, third = (PrefixHasher().key([n], 1) for n in range(3))
    size = len(first.digest) + sum(state.nbytes for state in one)
    few = PrefixCache(2 * size)
    few.add(first, one)
    few.add(second, one)
    assert few.longest([0, 5]) is one
    few.add(third, one)
    assert few.nbytes == 2 * size
    assert few.longest([1]) is None and few.longest([0]) is one


def test_a_key_is_the_same_whatever_was_hashed_before():
    text, hasher = list(range(9)), PrefixHasher()
    for n in (2, 7, 7, 3, 9):
        assert hasher.key(text, n) == PrefixHasher().key(text, n)
    assert PrefixHasher().key(text[1:], 2) != PrefixHasher().key(text, 2)


def test_a_long_prompts_keys_take_memory_by_its_length_alone():
    """One of 131,072 tokens, read 2,048 at a time: 64 keys, all counted."""
    engine = make_engine(
        make_served_model(
            ("gated_deltanet",), num_layers=1, dim=8, head_dim=4
        ),
        max_prefill_tokens=2048,
        max_prefix_bytes=10**6,
    )
    (prompt,) = make_prompts(2**17)
    engine.add(prompt, 1)
    tracemalloc.start()
    run_engine(engine)
    host, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(engine.prefix_cache) == 64
    one = engine.prefix_cache.longest(prompt.tolist()[:4096])
    assert engine.prefix_cache.nbytes == 64 * (32 + sum(x.nbytes for x in one))
    assert host < 2**20  # a single copy of the prompt has as many
