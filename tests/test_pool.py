"""Requests that come and go, side by side in one pool of states."""

import random

import pytest
import torch

from fastweights.models import LAYERS, LanguageModel, ModelConfig, StatePool
from fastweights.models.pool import NARROWED


def model(pattern, **options):
    torch.manual_seed(0)
    return LanguageModel(
        ModelConfig(
            vocabulary=31,
            dim=16,
            num_layers=max(2, len(pattern)),
            pattern=pattern,
            num_heads=2,
            head_dim=8,
            mlp_multiple=16,
            **options,
        )
    ).double()


@pytest.mark.parametrize("kind", sorted(NARROWED))
def test_states_in_bf16(kind):
    """Half the bytes, after a prompt, after steps; near to what it was."""
    m, text = model((kind,)).float(), torch.arange(27) % 31
    pools = [StatePool(m, 2, 40, dtype=x) for x in (None, torch.bfloat16)]
    found = []
    for pool in pools:
        row = pool.take()
        with torch.no_grad():
            for part in text.split([20, 3, 4]):
                logits, _ = m(part[None], pool.at([row], len(part)))
        found.append(logits)
    wide, narrow = (pool.states[0].S for pool in pools)
    assert narrow.dtype == torch.bfloat16 and 2 * narrow.nbytes == wide.nbytes
    assert 0 < (narrow - wide).norm() < 0.02 * wide.norm()
    assert 0 < (found[1] - found[0]).norm() < 0.02 * found[0].norm()


def test_states_that_bf16_cannot_hold():
    with pytest.raises(ValueError, match="for a model with mamba, mlstm"):
        m = model(("mlstm", "mamba", "gla"))
        StatePool(m, 2, 40, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"got torch\.float16, need"):
        StatePool(model(("gla",)), 2, 40, dtype=torch.float16)


def alone(m, prompt, new):
    """Logits of the prompt's last token and of each of the new ones."""
    tokens = torch.cat([prompt, new])
    with torch.no_grad():
        logits, _ = m(tokens[None])
    return logits[0, len(prompt) - 1 :]


KINDS = [("gated_deltanet", "softmax"), *[(kind,) for kind in LAYERS]]
EACH_TIME = [KINDS[0], ("retention",), ("mamba",), ("mlstm",)]
patterns = pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(
            x, id="-".join(x), marks=[] if x in EACH_TIME else pytest.mark.full
        )
        for x in KINDS
    ],
)


@patterns
def test_fifty_requests_through_one_pool(pattern):
    """Of odd lengths, coming and going: each gets its own output.

    Prompts go in alone or two together, packed; steps have one to three
    tokens, batches are filled up with -1, and rows are used again.
    """
    m, draw = model(pattern), random.Random(1)
    pool = StatePool(m, size=5, capacity=40)
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
                rows = [pool.take() for _ in new]
                sizes = [len(prompt) for prompt, _ in new]
                states = pool.at(rows, max(sizes))
                if coming == 1:
                    logits, _ = m(new[0][0][None], states)
                else:
                    packed = torch.cat([prompt for prompt, _ in new])[None]
                    offsets = torch.tensor([0, *sizes]).cumsum(0)
                    logits, _ = m(packed, states, offsets)
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
                logits, _ = m(torch.stack(batch), pool.at(at, n))
                for r, y in zip(at, logits, strict=True):
                    if r >= 0:
                        running[r][2].append(y)
            for r in rows:
                prompt, rest, found = running[r]
                if sum(map(len, found)) == len(rest) + 1:
                    error = torch.cat(found) - alone(m, prompt, rest)
                    assert error.abs().max() < 1e-10
                    del running[r]
                    pool.give(r)
                    done += 1
    assert done == 50 and len(pool.free) == 5
    assert where == [
        t.data_ptr() for s in pool.states for t in s.tensors().values()
    ]


@patterns
def test_a_rejected_draft_rolls_back(pattern):
    m = model(pattern)
    prompt, draft, new = torch.randint(31, (3, 6)).unbind()
    pool = StatePool(m, size=3, capacity=20)
    rows = [pool.take(), pool.take()]
    with torch.no_grad():
        m(torch.stack([prompt, new]), pool.at(rows, 6))
        kept = pool.keep(rows)
        m(torch.stack([draft, draft]), pool.at(rows, 6))
        pool.restore(kept)
        logits, _ = m(new[None], pool.at(rows[:1], 6))
    ref = alone(m, prompt, new)[1:]
    assert (logits[0] - ref).abs().max() < 1e-10


def test_what_a_pool_refuses():
    pool = StatePool(model(("softmax",)), size=2, capacity=8)
    first = pool.take()
    with pytest.raises(ValueError, match="which is not taken"):
        pool.at([1 - first], 1)
    second = pool.take()
    with pytest.raises(RuntimeError, match="more than its 2 rows"):
        pool.take()
    with pytest.raises(ValueError, match="each once"):
        pool.at([first, first], 1)
    with pytest.raises(ValueError, match="row: got 7, need one"):
        pool.give(7)
    pool.give(second)
    with pytest.raises(ValueError, match="row: got"):
        pool.give(second)


def test_a_full_row_is_named_and_gradients_are_refused():
    m = model(("softmax",))
    pool = StatePool(m, size=1, capacity=4)
    row = pool.take()
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with torch.no_grad():
        m(tokens, pool.at([row], 3))
        with pytest.raises(ValueError, match="room for 4 tokens per row, ne"):
            m(tokens, pool.at([row], 3))
    with pytest.raises(ValueError, match=r"need torch\.no_grad"):
        m(tokens, pool.at([row], 3))
