"""One token past its modules, by PyTorch's operators."""

import pytest
import torch
from support.token_cases import (
    TOKEN_CASES,
    VOCAB_SIZE,
    check_rows_of_a_pool,
    make_model_of,
    read_by_tokens,
)

from fastweights.checks import relative_error
from fastweights.layers.common import fused_step
from fastweights.ops import record_backends

BUDGET = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("case", TOKEN_CASES)
@pytest.mark.parametrize("dtype", BUDGET)
def test_tokens_are_those_of_one_pass(dtype, case):
    m = make_model_of(case, "cpu", dtype)
    tokens = torch.randint(VOCAB_SIZE, (3, 6))
    with torch.no_grad():
        wanted, _ = m(tokens)
        states = m(tokens[:, :4], m.preallocate_states(3, 8))[1]
    found, ran = read_by_tokens(m, tokens[:, 4:], states)
    assert relative_error(found, wanted[:, 4:]) <= BUDGET[dtype]
    recurrent = not case.startswith("softmax")
    assert ran == ["torch fused_step"] * 2 * 2 * recurrent


@pytest.mark.parametrize("case", TOKEN_CASES)
def test_rows_of_a_pool(case):
    """In another order than in memory, and one that is none."""
    check_rows_of_a_pool(case, "cpu", 2e-6)


def hook(m):
    m.blocks[0].layer.o_proj.register_forward_hook(lambda *_: None)


def bias(m):
    o = m.blocks[0].layer.o_proj
    o.bias = torch.nn.Parameter(torch.ones(len(o.weight)))


def subclass(m):
    layer = m.blocks[0].layer
    layer.__class__ = type("Other", (type(layer),), {})


def other_dtype(m):
    m.blocks[0].norm.double()


def transposed(m):
    weight = m.blocks[0].layer.o_proj.weight
    weight.data = weight.data.mT.contiguous().mT


def forward(m):
    layer = m.blocks[0].layer
    own = layer.forward
    layer.forward = lambda *arguments: own(*arguments)


TOUCHED = [hook, bias, subclass, other_dtype, transposed, forward]


@pytest.mark.parametrize("touch", TOUCHED)
def test_what_somebody_has_touched_is_called(touch):
    """By a model that computes what it computes in one pass."""
    m = make_model_of("gated_deltanet", "cpu", num_layers=1)
    touch(m)
    tokens = torch.randint(VOCAB_SIZE, (1, 3))
    with torch.no_grad():
        wanted, _ = m(tokens)
        states = m(tokens[:, :1], m.preallocate_states(1, 4))[1]
    found, ran = read_by_tokens(m, tokens[:, 1:], states)
    assert not ran
    assert relative_error(found, wanted[:, 1:]) <= 5e-6


def test_a_hook_of_the_mlp_sees_every_token():
    m = make_model_of("gated_deltanet", "cpu", num_layers=1)
    seen = []
    m.blocks[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    tokens = torch.randint(VOCAB_SIZE, (1, 3))
    with torch.no_grad():
        states = m(tokens[:, :1], m.preallocate_states(1, 4))[1]
    _, ran = read_by_tokens(m, tokens[:, 1:], states)
    assert len(seen) == 3 and len(ran) == 2


def test_norms_behind_a_layer_are_the_modules_matter():
    m = make_model_of(
        "gated_deltanet", "cpu", post_norm_types=("gated_deltanet",)
    )
    tokens = torch.randint(VOCAB_SIZE, (2, 3))
    with torch.no_grad():
        wanted, _ = m(tokens)
        states = m(tokens[:, :1], m.preallocate_states(2, 4))[1]
    found, ran = read_by_tokens(m, tokens[:, 1:], states)
    assert not ran
    assert relative_error(found, wanted[:, 1:]) <= 5e-6


def test_gradients_graphs_and_autocast_are_the_modules_matter():
    m = make_model_of("gated_deltanet", "cpu", num_layers=1)
    x = torch.zeros(1, 1, 32)
    assert not fused_step.fits_fused_step(x)
    with torch.no_grad():
        assert fused_step.fits_fused_step(x)
        assert not fused_step.fits_fused_step(x.expand(1, 2, 32))
        assert not fused_step.fits_fused_step(x.expand(2, 1, 32))
        assert not fused_step.fits_fused_step(
            x.expand(fused_step.MAX_FUSED_SEQUENCES + 1, 1, 32)
        )
        with torch.autocast("cpu", torch.float16):
            assert not fused_step.fits_fused_step(x)
    with record_backends() as ran:
        tokens = torch.randint(VOCAB_SIZE, (1, 2))
        states = m(tokens[:, :1], m.preallocate_states(1, 4))[1]
        m(tokens[:, 1:], states)[0].sum().backward()
    assert "torch fused_step" not in ran
