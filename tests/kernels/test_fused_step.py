"""One token through layers and models in few launches."""

import pytest
import torch
from support.kernel_judge import DEVICES
from support.token_cases import (
    TOKEN_CASES,
    VOCAB_SIZE,
    check_rows_of_a_pool,
    make_model_of,
    read_by_tokens,
)

from fastweights.checks import relative_error
from fastweights.kernels import gemv
from fastweights.layers.common import fused_step
from fastweights.ops import record_backends


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Kernels on a CPU too, of few programs: the interpreter's time."""
    choose, options = fused_step.resolve_backend, gemv.gemv_options

    def wider(*sizes):
        tile, settings = options(*sizes)
        return tile | {"BN": 128}, settings

    monkeypatch.setattr(gemv, "gemv_options", wider)
    monkeypatch.setattr(
        fused_step, "resolve_backend", lambda _, *on: choose("triton", *on)
    )


@DEVICES
@pytest.mark.parametrize("case", TOKEN_CASES)
@pytest.mark.parametrize("rows", [2, 5])
def test_tokens_are_those_of_one_pass(rows, case, device):
    """Two rows by sums, five by products of tiles."""
    if rows == 5 and "-" in case and device == "cpu":
        pytest.skip("the interpreter has seen its parts")
    m = make_model_of(case, device)
    tokens = torch.randint(VOCAB_SIZE, (rows, 6), device=device)
    with torch.no_grad():
        wanted, _ = m(tokens)
        states = m(tokens[:, :4], m.preallocate_states(rows, 8))[1]
    found, ran = read_by_tokens(m, tokens[:, 4:], states)
    assert relative_error(found, wanted[:, 4:]) <= 5e-6
    recurrent = not case.startswith("softmax")
    assert ran == ["triton fused_step"] * 2 * 2 * recurrent


@DEVICES
@pytest.mark.parametrize("case", ["gated_deltanet-wide", "kda", "softmax"])
@pytest.mark.parametrize("rows, T", [(1, 3), (2, 8)])
def test_some_tokens_at_once(rows, T, case, device):
    """Logits of all; then a second pass goes on from what is accepted."""
    m = make_model_of(case, device, num_layers=1)
    tokens = torch.randint(VOCAB_SIZE, (rows, 4 + 2 * T), device=device)
    n = torch.tensor([2, 5], device=device)[:rows]
    with torch.no_grad(), record_backends() as ran:
        states = m(tokens[:, :4], m.preallocate_states(rows, 40))[1]
        first = tokens[:, 4 : 4 + T]
        states[0].num_accepted = n
        found, states = m(first, states)
        more = torch.stack(
            [tokens[b, 4 + n[b] : 4 + n[b] + T] for b in range(rows)]
        )
        after, _ = m(more, states)
        for b in range(rows):
            kept = tokens[b : b + 1, : 4 + T]
            wanted = m(kept)[0][0, 4:]
            assert relative_error(found[b], wanted) <= 5e-6
            kept = torch.cat([kept[:, : 4 + n[b]], more[b : b + 1]], 1)
            wanted = m(kept)[0][0, 4 + n[b] :]
            assert relative_error(after[b], wanted) <= 5e-6
    calls = 0 if case == "softmax" else 2
    assert ran.count("triton fused_step") == calls


@DEVICES
@pytest.mark.parametrize("case", ["gated_deltanet-wide", "softmax"])
def test_rows_of_a_pool(case, device):
    """In another order than in memory, and one that is none."""
    check_rows_of_a_pool(case, device, 5e-6)
