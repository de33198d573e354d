"""Requests that come and go: each gets the tokens that it gets alone."""

import functools
import gc
import random
import tracemalloc

import pytest
import torch
from support import model_cases

from fastweights.models import StatePool
from fastweights.models.sampling import Sampling
from fastweights.serving import Engine, batch
from fastweights.serving.engine import STEPS_PER_PREFILL
from fastweights.serving.prefixes import PrefixCache, PrefixHasher

SIZES = {"vocab_size": 31, "dim": 16, "head_dim": 8, "mlp_multiple": 16}
HYBRID = ("softmax", "gated_deltanet")


def fresh(pattern=HYBRID, **sizes):
    """A model whose next token depends on what it has read."""
    m = model_cases.model(pattern, **SIZES | sizes).double()
    m.norm.weight.data.fill_(30)
    return m


model = functools.cache(fresh)


def engine(m=None, **options):
    options = {"size": 3, "capacity": 64, "prefill_tokens": 8} | options
    return Engine(model() if m is None else m, **options)


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(31, (n,), generator=generator) for n in lengths]


@torch.no_grad()
def alone(m, prompt, n, temperature=0.0, top_p=1.0, stop=(), seed=0, drawn=0):
    """The answer, one token at a time, on states of its own."""
    draws = Sampling(
        torch.tensor([temperature], dtype=torch.float64),
        torch.tensor([top_p]),
        torch.tensor([seed]),
        torch.tensor([drawn]),
    )
    x, states, new = torch.as_tensor(prompt)[None], None, []
    for _ in range(n):
        logits, states = m(x, states)
        token = draws.draw(logits[:, -1], *logits[:, -1].max(-1))
        if int(token) in stop:
            break
        new.append(int(token))
        x = token[None]
    return new


def run(e, most=500):
    """The tokens that come, by request."""
    found = {}
    while e.busy:
        for request, token in e.step():
            found.setdefault(request, []).append(token)
        most -= 1
        assert most
    assert len(e.pool.free) == e.pool.size
    return found


WAYS = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.8, "seed": 2**63 - 1},
    {"temperature": 1.3, "top_p": 0.5, "seed": 3, "stop": (4, 9)},
    {"stop": tuple(range(0, 31, 3))},
]
LENGTHS = (1, 5, 20, 9, 2, 30, 8)
PATTERNS = [
    HYBRID,
    ("gated_deltanet",),
    ("mamba2",),
    ("ttt_linear",),
    ("mlstm",),
    ("lact",),
]
patterns = pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)


@patterns
@pytest.mark.parametrize("invariant", [False, True])
def test_any_order_of_arrival_gives_the_tokens_of_each_alone(
    pattern, invariant
):
    m, some = model(pattern), prompts(*LENGTHS)
    ways = [WAYS[i % len(WAYS)] for i in range(len(some))]
    ref = [alone(m, x, 9, **to) for x, to in zip(some, ways, strict=True)]
    for order in ([*range(7)], [5, 2, 0, 3, 6, 1, 4]):
        e, made = engine(m, invariant=invariant), {}
        found = {}
        for i in order:
            made[i] = e.add(some[i], 9, **ways[i])
            for request, token in e.step():
                found.setdefault(request, []).append(token)
        for request, tokens in run(e).items():
            found.setdefault(request, []).extend(tokens)
        for i, request in made.items():
            assert request.tokens == ref[i] == found.get(request, [])
            full = len(ref[i]) == 9
            assert request.finish_reason == ("length" if full else "stop")


def state_after(m, drawn, *, company, invariant):
    """Of one request, in bits, that has drawn so many tokens."""
    e = engine(m, size=6, capacity=400, prefill_tokens=96, invariant=invariant)
    first, *others = prompts(221, 300, 1, 5, 9, 3, 12)
    for i, prompt in enumerate(others[:3] if company else []):
        e.add(prompt, 20 + i, **WAYS[i])
        e.step()
    request = e.add(first, 20, temperature=1.0, seed=5)
    for i, prompt in enumerate(others[1:] * 2 if company else []):
        e.add(prompt, 3 + i, **WAYS[i % len(WAYS)])
    while request.num_drawn < drawn:
        e.step()
    return e.pool.keep(request.row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "pattern", [x for x in PATTERNS if x != ("mlstm",)], ids="-".join
)
def test_company_changes_no_bit_of_an_invariant_state(pattern, dtype):
    """Not of mLSTM's on a CPU: of 17 columns, places decide how they add."""
    m = fresh(pattern).to(dtype)
    states = [
        state_after(m, 12, company=company, invariant=True)
        for company in (False, True)
    ]
    for one, other in zip(*states, strict=True):
        for name, x in one.tensors().items():
            assert x.equal(other.tensors()[name])


GPU = pytest.mark.gpu


@GPU
@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
def test_company_changes_no_bit_on_a_gpu(pattern):
    m = fresh(pattern).to("cuda", torch.bfloat16)
    one, other = (
        state_after(m, 12, company=company, invariant=True)
        for company in (False, True)
    )
    for x, y in zip(one, other, strict=True):
        for name, tensor in x.tensors().items():
            assert tensor.equal(y.tensors()[name])


@GPU
@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
@pytest.mark.parametrize("recorded", [False, True])
def test_tokens_of_a_gpu(pattern, recorded, monkeypatch):
    """Those of a CPU: recorded, with any mixture of draws, and not."""
    if not recorded:
        monkeypatch.setattr(batch, "is_recordable", lambda *_: False)
    e, made = engine(fresh(pattern).cuda()), []
    for i, prompt in enumerate(prompts(*LENGTHS) * 2):
        made.append((prompt, WAYS[i % len(WAYS)]))
        made[-1] += (e.add(prompt, 9, **made[-1][1]),)
        e.step()
    run(e)
    assert bool(e.batch.recordings) == recorded
    for prompt, way, request in made:
        assert request.tokens == alone(model(pattern), prompt, 9, **way)


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
    assert batch.prefills_by_kernels(m, pool) == recorded


@pytest.mark.parametrize("pattern", [("gated_deltanet",), ("mamba2",)])
def test_what_fills_a_read_up_changes_nothing(pattern, monkeypatch):
    """Tokens after all sequences, and rows that read none of them."""
    monkeypatch.setattr(batch, "Recording", Python)
    exact, filled = (
        engine(model(pattern), size=4, prefill_tokens=40) for _ in range(2)
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
    m = fresh(pattern).to("cuda", torch.bfloat16)

    def answers():
        e = engine(m, size=6, capacity=400, prefill_tokens=400)
        made = [e.add(x, 9) for x in prompts(*LENGTHS, 300) * 4]
        run(e)
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
        e = engine(m)
        request = e.add(prompt, 20, **way)
        for to in others:
            e.add(prompt, 20, **to)
        run(e)
        found.append(request.tokens)
    assert found[0] == found[1] == found[2] == alone(m, prompt, 20, **way)


def counted(e):
    """How many tokens each piece of each call has that reads prompts."""
    sizes, read = [], e.batch.prefill

    def counts(pieces):
        sizes.append([n for _, n in pieces])
        read(pieces)

    e.batch.prefill = counts
    return sizes


@pytest.mark.parametrize("steps", [0, 1, 2, 6, 30])
def test_forks_share_what_was_read(steps):
    """Of a request that waits, that reads, that draws, and that is done."""
    m, e = model(), engine(size=2)
    (prompt,), sizes = prompts(19), counted(e)
    request = e.add(prompt, 9, temperature=1.0, seed=3)
    for _ in range(steps):
        e.step()
    forks = request.fork(3, seed=11)
    at = len(request.tokens)
    run(e)
    assert sum(map(sum, sizes)) == 18
    for i, fork in enumerate(forks):
        text = fork.all_tokens[: 19 + at]
        own = alone(m, text, 9 - at, 1.0, seed=11 + i, drawn=at)
        assert fork.tokens == request.tokens[:at] + own
        assert fork.finish_reason == "length"


def test_a_fork_of_what_was_stopped_goes_on_by_itself():
    m, e = model(), engine()
    (prompt,) = prompts(6)
    first = alone(m, prompt, 9)
    end = next(x for x in first if x != first[0])
    request = e.add(prompt, 12, stop=end)
    run(e)
    (fork,) = request.fork(1)
    assert not fork.done
    run(e)
    for x in (request, fork):
        assert x.finish_reason == "stop"
        assert x.tokens == first[: first.index(end)]


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_waits_for_a_request_that_may_be_cancelled(goes_on):
    m, e = model(), engine()
    (prompt,), sizes = prompts(30), counted(e)
    request = e.add(prompt, 5)
    e.step()
    one, two, three = request.fork(3)
    two.cancel()
    if not goes_on:
        request.cancel()
    run(e)
    assert one.tokens == three.tokens == alone(m, prompt, 5)
    assert request.tokens == (one.tokens if goes_on else [])
    assert sum(map(sum, sizes)) == (29 if goes_on else 8 + 29)
    assert two.num_drawn == 0 and two.tokens == []


def test_prompts_are_read_in_pieces_between_tokens():
    e = engine(size=4)
    short, *rest = prompts(4, 30, 12, 3)
    first = e.add(short, 20)
    e.step()
    sizes = counted(e)
    for prompt in rest:
        e.add(prompt, 5)
    for _ in range(6):
        e.step()
        assert sum(sizes[-1]) <= 8
    assert sizes == [[8], [8], [8], [5, 3], [5, 2], [3]]
    assert first.num_drawn == 7
    run(e)


def test_where_rows_are_scarce_prompts_are_read_together():
    """Many rows that go on wait for no prompt alone, if it waits not long."""
    e, some = engine(size=8, prefill_tokens=32), prompts(*[5] * 12)
    for prompt in some[:8]:
        e.add(prompt, 4)
    sizes = counted(e)
    e.step()
    for prompt in some[8:]:
        e.add(prompt, 40)
    run(e)
    assert sizes == [[4] * 8, [4] * 4]
    for others, steps in ([8], 8 * STEPS_PER_PREFILL), ([], 1):
        e = engine(size=8)
        for prompt in some[:7]:
            e.add(prompt, 40)
        while len(e.running) < 7:
            e.step()
        last, late = e.running[-1], e.add(some[7], 2)
        for i in others:
            e.add(some[i], 2)
        while not late.num_drawn:
            e.step()
        assert last.num_drawn == 1 + steps


@pytest.mark.parametrize("invariant", [False, True])
def test_a_prompt_goes_on_from_one_that_began_alike(invariant):
    m = model()
    (text,) = prompts(40)
    e = engine(m, prefix_bytes=10**6, invariant=invariant)
    sizes = counted(e)

    def reads(*prompt):
        prompt = torch.tensor([int(t) for t in prompt])
        sizes.clear()
        request = e.add(prompt, 4)
        run(e)
        assert request.tokens == alone(m, prompt, 4)
        return sum(map(sum, sizes))

    assert reads(*text[:20]) == 19
    assert reads(*text[:20]) == 0
    assert reads(*text[:30]) == (29 - 16 if invariant else 29 - 19)
    assert reads(*text[:10], 0, 0) == 11 - 8
    assert reads(*text[1:20]) == 18
    assert e.prefix_cache.nbytes <= 10**6


def test_prefixes_are_bounded_and_the_least_used_goes():
    e, some = engine(prefix_bytes=1), prompts(9, 9, 9)
    e.add(some[0], 1)
    run(e)
    assert len(e.prefix_cache) == e.prefix_cache.nbytes == 0
    e = engine(prefix_bytes=10**6)
    one = e.pool.keep(e.pool.acquire())
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
    e = engine(
        fresh(("gated_deltanet",), num_layers=1, dim=8, head_dim=4),
        prefill_tokens=2048,
        prefix_bytes=10**6,
    )
    (prompt,) = prompts(2**17)
    e.add(prompt, 1)
    tracemalloc.start()
    run(e)
    host, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(e.prefix_cache) == 64
    one = e.prefix_cache.longest(prompt.tolist()[:4096])
    assert e.prefix_cache.nbytes == 64 * (32 + sum(x.nbytes for x in one))
    assert host < 2**20  # a single copy of the prompt has as many


def test_a_full_pool_has_requests_wait_in_turn():
    e, some = engine(size=2), prompts(*[5] * 7)
    requests = [e.add(prompt, 3) for prompt in some]
    assert [x.done for x in requests] == [False] * 7
    assert [x.unread for x in requests] == [4] * 7
    e.step()
    assert [x.unread for x in requests] == [0] * 2 + [4] * 5
    ended = []
    while e.busy:
        assert len(e.running) + len(e.reading) <= 2
        e.step()
        ended += [x for x in requests if x.done and x not in ended]
    assert ended == requests and not any(x.unread for x in requests)


@pytest.mark.parametrize("steps", range(7))
def test_a_request_is_cancelled_at_any_time(steps):
    m, e = model(), engine(size=2)
    requests = [e.add(prompt, 4) for prompt in prompts(20, 3, 11)]
    for _ in range(steps):
        e.step()
    had = [*requests[0].tokens]
    requests[0].cancel()
    requests[0].cancel()
    run(e)
    assert requests[0].tokens == had
    assert requests[0].finish_reason == (
        "length" if len(had) == 4 else "cancelled"
    )
    others = zip(requests[1:], prompts(20, 3, 11)[1:], strict=True)
    for request, prompt in others:
        assert request.tokens == alone(m, prompt, 4)


@pytest.mark.parametrize("call", range(1, 16))
def test_a_step_that_raises_loses_no_row_and_no_token(call):
    """Whatever it was doing: those whose states are half new begin anew."""
    m, calls = fresh(), 0

    def raises(*_):
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("no memory, say")

    some = prompts(20, 3, 11, 1)
    ref = [alone(m, x, 5, 1.0, seed=i) for i, x in enumerate(some)]
    e, found, raised = engine(m), {}, 0
    m.blocks[1].mlp.register_forward_hook(raises)
    requests = [
        e.add(prompt, 5, temperature=1.0, seed=i)
        for i, prompt in enumerate(some)
    ]
    while e.busy:
        try:
            for request, token in e.step():
                found.setdefault(request, []).append(token)
        except RuntimeError:
            raised += 1
            held = {x.row for x in (*e.reading, *e.running)}
            assert not held & e.pool.free.keys()
            assert len(held) + len(e.pool.free) == 3
    assert raised == 1 and len(e.pool.free) == 3
    assert [x.tokens for x in requests] == ref == [found[x] for x in requests]


def test_logits_that_are_not_finite_end_their_request_alone():
    m = fresh(tie_embeddings=False)
    some = prompts(9, 14, 5)
    bad = int(some[1][3])
    some = [
        x if i == 1 else x.where(x != bad, bad - 1) for i, x in enumerate(some)
    ]
    ref = [alone(m, x, 6) for x in some]
    m.embedding.weight.data[bad] = torch.nan
    e = engine(m, size=2)
    requests = [e.add(x, 6) for x in some]
    run(e)
    assert requests[1].finish_reason == "not finite" and not requests[1].tokens
    for i in (0, 2):
        n = ref[i].index(bad) + 1 if bad in ref[i] else 6
        assert requests[i].tokens == ref[i][:n]


@pytest.mark.parametrize(
    "refused, kind, message",
    [
        (
            {"prompt": torch.zeros(56, dtype=torch.int64)},
            ValueError,
            "prompt: got 56 tokens and max_n",
        ),
        ({"prompt": [1, 2]}, ValueError, "prompts: got list"),
        ({"seed": -1}, ValueError, "seed: got -1, need 0 to"),
        ({"seed": 1.0}, TypeError, "seed: got float, need an int"),
        ({"stop": 31}, ValueError, "stop: got 31, need tokens"),
        ({"temperature": -1.0}, ValueError, "temperature: got -1.0, need"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens: got -1"),
    ],
)
def test_what_an_engine_does_not_take(refused, kind, message):
    e = engine()
    options = {"prompt": torch.arange(5), "max_new_tokens": 9} | refused
    with pytest.raises(kind, match=f"^{message}"):
        e.add(**options)
    assert not e.busy


def test_a_model_whose_states_stay_takes_any_length():
    e = engine(model(("gated_deltanet",)), capacity=1)
    request = e.add(torch.arange(20), 12)
    run(e)
    assert len(request.tokens) == 12
    assert e.add(torch.arange(3), 0).finish_reason == "length" and not e.busy


def tensor_bytes():
    gc.collect()
    some = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return sum(x.untyped_storage().nbytes() for x in some)


def bytes_of_states(prefixes):
    """What prefixes take without their keys, of 32 bytes each."""
    return prefixes.nbytes - 32 * len(prefixes)


@pytest.mark.parametrize(
    "steps", [2_500, pytest.param(10_000, marks=pytest.mark.full)]
)
def test_thousands_of_requests_and_steps_in_any_order(steps):
    """Added, forked, cancelled: each right, nothing lost, memory as before."""
    m = model(("gated_deltanet",), num_layers=1, dim=8, head_dim=4)
    e, draw = engine(m, prefix_bytes=3000), random.Random(0)
    answer = functools.cache(functools.partial(alone, m))
    texts = [tuple(x.tolist()) for x in prompts(1, 2, 9, 17, 30, 8)]
    begun, came, ended = {}, {}, 0
    e.add(torch.arange(3), 3)
    run(e)
    before = tensor_bytes() - bytes_of_states(e.prefix_cache)

    def begin(request):
        begun[request] = len(request.tokens)
        came[request] = [*request.tokens]

    def step():
        for request, token in e.step():
            came[request].append(token)
        for request in [x for x in begun if x.done]:
            shared, tokens = begun.pop(request), request.tokens
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
        what, room = draw.random(), len(e.waiting) < 5
        if what < 0.2 and room:
            way = draw.choice(WAYS[:4])
            begin(e.add(torch.tensor(draw.choice(texts)), 10, **way))
            ended += 1
        elif what < 0.25 and begun:
            draw.choice([*begun]).cancel()
        elif what < 0.3 and begun and room:
            one = draw.choice([*begun])
            for fork in one.fork(draw.randint(1, 2), seed=draw.randrange(3)):
                begin(fork)
        else:
            step()
    while e.busy:
        step()
    assert not begun and not came and ended > steps // 10
    assert sorted(e.pool.free) == [0, 1, 2]
    assert 0 < e.prefix_cache.nbytes <= 3000
    assert tensor_bytes() == before + bytes_of_states(e.prefix_cache)
