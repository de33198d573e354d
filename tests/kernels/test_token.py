"""One token through layers and models in few launches."""

import pytest
import torch
from kernel_judge import DEVICES

from fastweights.checks import relative_error
from fastweights.kernels import gemv
from fastweights.layers import token
from fastweights.models import LanguageModel, ModelConfig, StatePool
from fastweights.ops import record_backends

SIZES = {"vocabulary": 20, "dim": 32, "num_layers": 2, "num_heads": 2}
V = SIZES["vocabulary"]
CASES = {
    "gated_deltanet": {},
    "gated_deltanet-wide": {
        "num_v_heads": 4,
        "expand_v": 2.0,
        "allow_neg_eigval": True,
    },
    "kda": {},
    "kda-bounded": {"lower_bound": -5.0, "num_v_heads": 4},
    "recurrence-channel": {"decay": "channel", "conv_size": 2},
    "recurrence-plain": {"decay": None, "rule": "additive", "gate": False},
    "recurrence-any-length": {"normalize": False, "activation": False},
    "softmax": {"num_kv_heads": 1, "gate": True},
    "softmax-norm": {"qk_norm": True, "rotary_fraction": 0.5},
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Kernels on a CPU too, of few programs: the interpreter's time."""
    choose, options = token.choose_backend, gemv.gemv_options
    monkeypatch.setattr(
        gemv, "gemv_options", lambda *sizes: options(*sizes) | {"BN": 128}
    )
    monkeypatch.setattr(
        token, "choose_backend", lambda _, *on: choose("triton", *on)
    )


def made(case, device, dtype=torch.float32, **sizes):
    torch.manual_seed(0)
    kind, options = case.split("-")[0], {case.split("-")[0]: CASES[case]}
    config = ModelConfig(
        pattern=(kind,), options=options, mlp_multiple=32, **SIZES | sizes
    )
    return LanguageModel(config, device=device, dtype=dtype)


def steps(model, tokens, states):
    """Logits of all tokens, read one by one, and which ran as tokens."""
    with torch.no_grad(), record_backends() as ran:
        found = []
        for t in range(tokens.shape[1]):
            logits, states = model(tokens[:, t : t + 1], states)
            found.append(logits)
    return torch.cat(found, 1), [x for x in ran if x == "triton token"]


@DEVICES
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [2, 5])
def test_tokens_are_those_of_one_pass(rows, case, device):
    """Two rows by sums, five by products of tiles."""
    if rows == 5 and "-" in case and device == "cpu":
        pytest.skip("the interpreter has seen its parts")
    m = made(case, device)
    tokens = torch.randint(V, (rows, 6), device=device)
    with torch.no_grad():
        wanted, _ = m(tokens)
        states = m(tokens[:, :4], m.new_states(rows, 8))[1]
    found, ran = steps(m, tokens[:, 4:], states)
    assert relative_error(found, wanted[:, 4:]) <= 5e-6
    recurrent = not case.startswith("softmax")
    assert ran == ["triton token"] * 2 * 2 * recurrent


@DEVICES
@pytest.mark.parametrize("case", ["gated_deltanet-wide", "softmax"])
def test_rows_of_a_pool(case, device):
    """In another order than in memory, and one that is none."""
    m = made(case, device)
    pool = StatePool(m, 4, capacity=8)
    rows = [pool.take() for _ in range(3)][::-1]
    tokens = torch.randint(V, (3, 3), device=device)
    before = [
        {name: x[3].clone() for name, x in state.tensors().items()}
        for state in pool.states
    ]
    with torch.no_grad():
        wanted, _ = m(tokens)
        found = []
        for t in range(3):
            column = torch.cat([tokens[:2, t], tokens[:1, 0], tokens[2:, t]])
            states = pool.at([*rows[:2], -1, rows[2]], 1)
            logits = m(column[:, None], states)[0]
            found.append(logits[[0, 1, 3]])
    assert relative_error(torch.cat(found, 1), wanted) <= 5e-6
    for state, kept in zip(pool.states, before, strict=True):
        for name, x in kept.items():
            assert state.tensors()[name][3].equal(x)


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
    m = made("gated_deltanet", "cpu", num_layers=1)
    touch(m)
    tokens = torch.randint(V, (1, 3))
    with torch.no_grad():
        wanted, _ = m(tokens)
        states = m(tokens[:, :1], m.new_states(1, 4))[1]
    found, ran = steps(m, tokens[:, 1:], states)
    assert "triton token" not in ran
    assert relative_error(found, wanted[:, 1:]) <= 5e-6


def test_a_hook_of_the_mlp_sees_every_token():
    m = made("gated_deltanet", "cpu", num_layers=1)
    seen = []
    m.blocks[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    tokens = torch.randint(V, (1, 3))
    with torch.no_grad():
        states = m(tokens[:, :1], m.new_states(1, 4))[1]
    _, ran = steps(m, tokens[:, 1:], states)
    assert len(seen) == 3 and len(ran) == 2


def test_gradients_graphs_and_autocast_are_the_modules_matter():
    m = made("gated_deltanet", "cpu", num_layers=1)
    x = torch.zeros(1, 1, 32)
    assert not token.is_token(x)
    with torch.no_grad():
        assert token.is_token(x)
        assert not token.is_token(x.expand(1, 2, 32))
        assert not token.is_token(x.expand(2, 1, 32))
        assert not token.is_token(x.expand(token.MAX_ROWS + 1, 1, 32))
        assert not token.is_token(x.double())
        with torch.autocast("cpu", torch.float16):
            assert not token.is_token(x)
    with record_backends() as ran:
        tokens = torch.randint(V, (1, 2))
        states = m(tokens[:, :1], m.new_states(1, 4))[1]
        m(tokens[:, 1:], states)[0].sum().backward()
    assert "triton token" not in ran
