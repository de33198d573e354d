"""Requests that come and go, side by side in one pool of states."""

import contextlib
import random

import pytest
import torch
from support import model_cases
from support.pairwise import parametrize_all

from fastweights.layers import LayerState
from fastweights.models import LAYERS, StatePool

SIZES = {"vocab_size": 31, "dim": 16, "mlp_multiple": 16}


def make_model(pattern):
    return model_cases.make_model(pattern, **SIZES).double()


@torch.no_grad()
def logits_of(m, pool, rows, lengths, tokens, *offsets):
    """The logits of a call in which rows of the pool read tokens."""
    with pool.states_for(rows, lengths) as states:
        return m(tokens, states, *offsets)[0]


NARROW = [
    x
    for x in model_cases.KINDS
    if getattr(LAYERS[x], "supports_bf16_state", False)
]


@pytest.mark.parametrize("kind", NARROW)
def test_states_in_bf16(kind):
    """Half the bytes, after a prompt, after steps; near to what it was."""
    m, text = make_model((kind,)).float(), torch.arange(27) % 31
    pools = [
        StatePool(m, 2, 40, state_dtype=x) for x in (None, torch.bfloat16)
    ]
    found = []
    for pool in pools:
        row = pool.acquire()
        with torch.no_grad():
            for part in text.split([20, 3, 4]):
                logits = logits_of(m, pool, [row], len(part), part[None])
        found.append(logits)
    wide, narrow = (pool.states[0].S for pool in pools)
    assert narrow.dtype == torch.bfloat16 and 2 * narrow.nbytes == wide.nbytes
    assert 0 < (narrow - wide).norm() < 0.02 * wide.norm()
    assert 0 < (found[1] - found[0]).norm() < 0.02 * found[0].norm()


def test_states_that_bf16_cannot_hold():
    with pytest.raises(ValueError, match="for a model with mamba, mlstm"):
        m = make_model(("mlstm", "mamba", "gla"))
        StatePool(m, 2, 40, state_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"got torch\.float16, need"):
        StatePool(make_model(("gla",)).float(), 2, 40, state_dtype=torch.half)
    with pytest.raises(ValueError, match=r"for a model in torch\.float64"):
        StatePool(make_model(("gla",)), 2, 40, state_dtype=torch.bfloat16)


def logits_alone(m, prompt, new):
    """Logits of the prompt's last token and of each of the new ones."""
    tokens = torch.cat([prompt, new])
    with torch.no_grad():
        logits, _ = m(tokens[None])
    return logits[0, len(prompt) - 1 :]


PATTERNS = [
    ("gated_deltanet", "softmax"),
    *[(kind,) for kind in model_cases.KINDS],
]
EACH_TIME = [PATTERNS[0], ("retention",), ("mamba",), ("mlstm",)]
patterns = pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(
            x, id="-".join(x), marks=[] if x in EACH_TIME else pytest.mark.full
        )
        for x in PATTERNS
    ],
)


@patterns
def test_fifty_requests_through_one_pool(pattern):
    """Of odd lengths, coming and going: each gets its own output.

    Prompts go in alone or two together, packed; steps have one to three
    tokens, batches are filled up with -1, and rows are used again.
    """
    m, draw = make_model(pattern), random.Random(1)
    pool = StatePool(m, num_rows=5, tokens_per_row=40)
    where = [t.data_ptr() for s in pool.states for t in s.tensors().values()]
    generator = torch.Generator().manual_seed(2)

    def tokens(n):
        return torch.randint(31, (n,), generator=generator)

    waiting = [
        (tokens(draw.choice([1, 2, 7, 17, 23])), tokens(draw.randint(1, 12)))
        for _ in range(50)
    ]
    running, done = {}, 0
    with torch.no_grad():
        while waiting or running:
            coming = min(len(waiting), len(pool.free), draw.randint(1, 2))
            if coming:
                new = [waiting.pop() for _ in range(coming)]
                rows = [pool.acquire() for _ in new]
                sizes = [len(prompt) for prompt, _ in new]
                packed = torch.cat([prompt for prompt, _ in new])[None]
                offsets = torch.tensor([0, *sizes]).cumsum(0)
                offsets = None if coming == 1 else offsets
                logits = logits_of(m, pool, rows, max(sizes), packed, offsets)
                ends = torch.tensor(sizes).cumsum(0) - 1
                for row, (prompt, rest), end in zip(
                    rows, new, ends, strict=True
                ):
                    running[row] = (prompt, rest, [logits[0, end : end + 1]])
            rows = draw.sample([*running], draw.randint(1, len(running)))
            left = [
                len(running[r][1]) - sum(map(len, running[r][2])) + 1
                for r in rows
            ]
            n = min(draw.randint(1, 3), min(left))
            if n:
                batch = []
                for r in rows:
                    read = sum(map(len, running[r][2])) - 1
                    batch.append(running[r][1][read : read + n])
                no_row = draw.randint(0, len(rows))
                batch.insert(no_row, batch[0])
                at = [*rows[:no_row], -1, *rows[no_row:]]
                logits = logits_of(m, pool, at, n, torch.stack(batch))
                for r, y in zip(at, logits, strict=True):
                    if r >= 0:
                        running[r][2].append(y)
            for r in rows:
                prompt, rest, found = running[r]
                if sum(map(len, found)) == len(rest) + 1:
                    error = torch.cat(found) - logits_alone(m, prompt, rest)
                    assert error.abs().max() < 1e-10
                    del running[r]
                    pool.release(r)
                    done += 1
    assert done == 50 and len(pool.free) == 5
    assert where == [
        t.data_ptr() for s in pool.states for t in s.tensors().values()
    ]


HYBRID = ("gated_deltanet", "softmax")


def token_ids(*shape):
    return torch.randint(31, shape, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def goes_on(m, pool, row, prompt, new):
    """Whether the row answers to new tokens as its prompt alone does."""
    logits = logits_of(m, pool, [row], len(new), new[None])
    return (logits[0] - logits_alone(m, prompt, new)[1:]).abs().max() < 1e-10


@torch.no_grad()
@pytest.mark.parametrize(
    "pattern",
    [
        HYBRID,
        ("softmax", "gated_deltanet"),
        ("kda", "softmax", "mamba", "softmax", "lact"),
        ("gated_deltanet", "kda"),
    ],
    ids="-".join,
)
def test_a_row_is_restored_whichever_layers_have_keys(pattern):
    """From another pool's snapshot, and from states of the model's own."""
    m, text = make_model(pattern), token_ids(20)
    pool, other = (
        StatePool(m, num_rows=2, tokens_per_row=20) for _ in range(2)
    )
    row = other.acquire()
    logits_of(m, other, [row], 13, text[None, :13])
    _, own = m(text[None, :12])
    _, own = m(text[None, 12:13], own)  # which makes room for 24
    for states in (other.snapshot(row), own):
        row = pool.acquire()
        pool.restore(row, states)
        has_keys = states is not own or "softmax" in pattern
        assert pool.tokens_read[row] == 13 * has_keys
        assert goes_on(m, pool, row, text[:13], text[13:])
    with pytest.raises(ValueError, match="other: got a state with"):
        pool.restore(row, [*own[:-1], LayerState()])
    assert pool.tokens_read[row] == 7 + 13 * has_keys


@torch.no_grad()
def test_a_snapshot_of_another_length_is_refused():
    """Before any layer of the row is overwritten."""
    m, text = make_model(("gated_deltanet", "kda")), token_ids(20)
    pool = StatePool(m, num_rows=2, tokens_per_row=20)
    rows = [pool.acquire(), pool.acquire()]
    logits_of(m, pool, rows[:1], 13, text[None, :13])
    snapshot = pool.snapshot(rows[0])
    for wrong in (snapshot[:1], snapshot + snapshot, []):
        said = f"^snapshot: got {len(wrong)} states, need 2, one per layer"
        with pytest.raises(ValueError, match=said):
            pool.restore(rows[1], wrong)
    assert not any(s.S[rows[1]].any() for s in pool.states)


@torch.no_grad()
@pytest.mark.parametrize(
    "told", [[1, 5], torch.tensor([1, 5]), 5], ids=["each", "tensor", "most"]
)
def test_a_row_that_decodes_beside_prompts(told):
    """Each row has room up to its own last token; a refusal counts nothing."""
    m, text = make_model(HYBRID), token_ids(40)
    pool = StatePool(m, num_rows=2, tokens_per_row=10)
    a = pool.acquire()
    logits_of(m, pool, [a], 5, text[None, :5])
    offsets = torch.tensor([0, 1, 6])
    for n in range(5, 10):
        b, packed = pool.acquire(), torch.cat([text[n : n + 1], text[:5]])
        if isinstance(told, int) and n > 6:
            # Of a row with 7 tokens, 5 more than there is room for.
            with pytest.raises(ValueError, match=f"got 5 for row {a}, which"):
                pool.states_for([a, b], told)
            assert pool.tokens_read[a] == n and pool.tokens_read[b] == 0
        each = [1, 5] if isinstance(told, int) else told
        logits = logits_of(m, pool, [a, b], each, packed[None], offsets)
        ref = m(text[None, : n + 1])[0]
        assert (logits[0, 0] - ref[0, n]).abs().max() < 1e-10
        assert (logits[0, 1:] - ref[0, :5]).abs().max() < 1e-10
        pool.release(b)
    with pytest.raises(ValueError, match="which has read 10, need at most 10"):
        pool.states_for([a], 1)


@torch.no_grad()
def test_the_most_of_a_call_is_taken_for_each_row_until_there_is_no_room():
    m, text = make_model(HYBRID), token_ids(40)
    pool = StatePool(m, num_rows=2, tokens_per_row=10)
    a, offsets = pool.acquire(), torch.tensor([0, 1, 5])
    for n in range(7):
        b, packed = pool.acquire(), torch.cat([text[n : n + 1], text[:4]])
        logits = logits_of(m, pool, [a, b], 4, packed[None], offsets)
        ref = m(text[None, : n + 1])[0][0, n]
        assert (logits[0, 0] - ref).abs().max() < 1e-10
        pool.release(b)
    with pool.states_for([a], 3) as states:
        _, states = m(text[None, 7:9], states)
        assert m(text[None, 9:10], states)[0].shape == (1, 1, 31)


@torch.no_grad()
def test_calls_with_more_tokens_than_was_said():
    """And states that go on: what a row has read is asked of the device."""
    m, (text, new) = make_model(HYBRID), token_ids(2, 9)
    pool = StatePool(m, num_rows=1, tokens_per_row=20)
    row = pool.acquire()
    logits_of(m, pool, [row], 2, text[None, :6])
    assert goes_on(m, pool, row, text[:6], text[6:])
    with pool.states_for([row], 1) as states:
        for token in new[:3]:
            m(token[None, None], states)
    prompt = torch.cat([text, new[:3]])
    assert goes_on(m, pool, row, prompt, new[3:])


@torch.no_grad()
def test_a_call_without_any_row_beside_a_full_one():
    m, text = make_model(HYBRID), token_ids(8)
    pool = StatePool(m, num_rows=1, tokens_per_row=8)
    row = pool.acquire()
    logits_of(m, pool, [row], 8, text[None])
    before = [state.clone() for state in pool.states]
    logits_of(m, pool, [-1], 2, text[None, :2])
    logits_of(m, pool, [-1, -1], 2, text[None, :3], torch.tensor([0, 2, 3]))
    for state, was in zip(pool.states, before, strict=True):
        for name, x in was.tensors().items():
            assert torch.equal(state.tensors()[name], x)


MODES = {
    "plain": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
}
SEVERAL = ("gated_deltanet", "softmax", "mamba", "lact", "titans")


@torch.no_grad()
@parametrize_all(made=MODES, used=MODES)
def test_made_in_one_mode_and_used_in_another(made, used):
    """The same tensors whatever made them, and the same dtypes after."""
    m, text = make_model(SEVERAL).float(), token_ids(20)
    plain = [s.tensors() for s in StatePool(m, 1, 20).states]
    with made():
        pool = StatePool(m, num_rows=2, tokens_per_row=20)
        row = pool.acquire()
    kinds = [
        {name: x.dtype for name, x in state.tensors().items()}
        for state in pool.states
    ]
    assert kinds == [{k: x.dtype for k, x in of.items()} for of in plain]
    with used():
        logits_of(m, pool, [row], 9, text[None, :9])
        logits_of(m, pool, [row], 3, text[None, 9:12])
    logits = logits_of(m, pool, [row], 3, text[None, 12:15])
    ref = m(text[None, :15])[0][:, 12:]
    assert (logits - ref).norm() < 0.05 * ref.norm()
    assert kinds == [
        {name: x.dtype for name, x in state.tensors().items()}
        for state in pool.states
    ]


def test_what_a_pool_refuses():
    pool = StatePool(make_model(("softmax",)), num_rows=2, tokens_per_row=8)
    first = pool.acquire()
    for rows in ([1 - first], torch.tensor([1 - first])):
        with pytest.raises(ValueError, match="need one that is taken"):
            pool.states_for(rows, 1)
    second = pool.acquire()
    with pytest.raises(RuntimeError, match="more than its 2 rows"):
        pool.acquire()
    for rows in ([first, first], torch.tensor([first, first])):
        with pytest.raises(ValueError, match="each row once"):
            pool.states_for(rows, 1)
    with pytest.raises(ValueError, match=r"row: got \[7\], need rows of"):
        pool.release(7)
    pool.release(second)
    with pytest.raises(ValueError, match="row: got"):
        pool.release(second)


@pytest.mark.parametrize(
    "rows, tokens, kind, message",
    [
        (None, 1, TypeError, "rows: got NoneType, need a l"),
        (torch.tensor(0), 1, TypeError, "rows: got Tensor"),
        ([0], None, TypeError, "num_tokens: got NoneType, need"),
        ([], 1, ValueError, r"rows: got \[\], need rows"),
        ([0, 2], 1, ValueError, r"rows: got \[0, 2\], need"),
        ([0, -2], 1, ValueError, r"rows: got \[0, -2\]"),
        ([0.0], 1, TypeError, "rows: got float, need an int"),
        ([True], 1, TypeError, "rows: got bool, need an int"),
        ([0], 0, ValueError, "num_tokens: got 0, need an integ"),
        ([0], -1, ValueError, "num_tokens: got -1, need an int"),
        ([0], 1.5, TypeError, "num_tokens: got float, need an"),
        ([0], [1, 2], ValueError, r"num_tokens: got \[1, 2\], n"),
        ([0], [-1], ValueError, r"num_tokens: got \[-1\], need"),
        ([5], 1, ValueError, r"rows: got \[5\], need rows"),
    ],
)
def test_rows_and_tokens_that_cannot_be_meant(rows, tokens, kind, message):
    pool = StatePool(
        make_model(("gated_deltanet",)), num_rows=2, tokens_per_row=8
    )
    pool.free = {}
    with pytest.raises(kind, match=f"^{message}"):
        pool.states_for(rows, tokens)


@pytest.mark.parametrize(
    "num_rows, tokens_per_row", [(0, 8), (2.0, 8), (2, -7)]
)
def test_a_pool_of_no_size(num_rows, tokens_per_row):
    with pytest.raises(
        (TypeError, ValueError), match=r": got .*, need an int"
    ):
        StatePool(make_model(("gated_deltanet",)), num_rows, tokens_per_row)


def test_a_full_row_is_named_and_gradients_are_refused():
    m = make_model(("softmax",))
    pool = StatePool(m, num_rows=1, tokens_per_row=4)
    row = pool.acquire()
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with torch.no_grad():
        logits_of(m, pool, [row], 2, tokens)
        for _ in range(2):
            with pytest.raises(ValueError, match="got 3 for row 0, which ha"):
                pool.states_for([row], 3)
        with pytest.raises(ValueError, match="room for 4 tokens per row, ne"):
            logits_of(m, pool, [row], 2, tokens[:, :1].expand(1, 3))
        assert pool.tokens_read == [2]
        with pool.states_for([row], 2) as states:
            m(tokens, states)
    with pytest.raises(ValueError, match=r"need torch\.no_grad"):
        m(tokens, states)


def test_a_rows_ways_cost_the_same_in_any_pool():
    """Taking, calling and giving back look at their own rows only."""

    def steps(size):
        pool = StatePool(
            make_model(("gated_deltanet",)), num_rows=size, tokens_per_row=8
        )
        seen = 0

        class Counted(dict):
            def __iter__(self):
                nonlocal seen
                seen += len(self)
                return super().__iter__()

        pool.free = Counted(pool.free)
        row = pool.acquire()
        with pool.states_for([row], 1):
            pass
        pool.release(row)
        return seen

    assert steps(4) == steps(64) == 0
