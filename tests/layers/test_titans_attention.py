"""Titans' memory beside attention: each way written out, token by token."""

import pytest
import torch
from written_out import Memory, normed, turned

from fastweights.checks import relative_error
from fastweights.layers import MemoryAsContext, MemoryAsGate, MemoryAsLayer

DOUBLE = {"dtype": torch.float64}
D, H, K, T, THETA = 8, 2, 4, 9, 100.0


def made(kind, **options):
    torch.manual_seed(0)
    layer = kind(D, H, persistent=2, theta=THETA, **options, **DOUBLE)
    for name, p in layer.named_parameters():
        if p.dim() == 1 or name == "persistent":
            torch.nn.init.normal_(p)
    return layer, torch.randn(T, D, **DOUBLE)


def attention(w, query, others):
    """Of one token (x, position) to others, and to the persistent ones."""
    heads = []
    others = [*[(p, 0) for p in w["persistent"]], *others]
    for h in range(H):
        q, k, v = (
            w["qkv_proj.weight"][i * D + h * K : i * D + (h + 1) * K]
            for i in range(3)
        )
        asked = turned(q @ query[0], query[1], THETA)
        scores = [
            asked @ turned(k @ x, at, THETA) / K**0.5 for x, at in others
        ]
        share = torch.stack(scores).softmax(0)
        heads.append(share @ torch.stack([v @ x for x, _ in others]))
    return torch.cat(heads)


def gated(w, a, m):
    gate = normed(m, w["memory_norm.weight"]).sigmoid()
    return w["o_proj.weight"] @ (normed(a, w["norm.weight"]) * gate)


def test_memory_as_gate():
    layer, x = made(MemoryAsGate, window=3)
    w, m = layer.state_dict(), layer.memory(x[None])[0][0]
    for t, found in enumerate(layer(x[None])[0][0]):
        near = [(x[s], s) for s in range(max(0, t - 2), t + 1)]
        want = gated(w, attention(w, (x[t], t), near), m[t])
        assert relative_error(found, want) < 1e-10


def test_memory_as_layer():
    layer, x = made(MemoryAsLayer, window=4)
    w, m = layer.state_dict(), layer.memory(x[None])[0][0]
    m = normed(m, w["memory_norm.weight"])
    for t, found in enumerate(layer(x[None])[0][0]):
        near = [(m[s], s) for s in range(max(0, t - 3), t + 1)]
        a = attention(w, (m[t], t), near)
        want = w["o_proj.weight"] @ normed(a, w["norm.weight"])
        assert relative_error(found, want) < 1e-10


def test_memory_as_context():
    """Segments of four: the second begins with what the first has taught."""
    layer, x = made(MemoryAsContext, window=4, expansion=1.5)
    w, memory = layer.state_dict(), Memory(layer.memory)
    for t, found in enumerate(layer(x[None])[0][0]):
        place = t % 4
        if place == 0:
            base, others = [[*M] for M in memory.M], []
        others.append((memory.recalled(base, x[t]), place))
        others.append((x[t], place))
        a = attention(w, (x[t], place), others)
        want = gated(w, a, memory.learned(base, a))
        assert relative_error(found, want) < 1e-10


@pytest.mark.parametrize(
    "kind", [MemoryAsContext, MemoryAsGate, MemoryAsLayer]
)
def test_no_token_sees_what_follows(kind):
    layer, x = made(kind, window=4)
    x = x[None].requires_grad_()
    (dx,) = torch.autograd.grad(layer(x)[0][0, 5].sum(), x)
    assert dx[0, :6].ne(0).any(-1).all() and dx[0, 6:].eq(0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window: got 0, need an integer >= 1"),
        ({"persistent": 0}, "persistent: got 0, need an integer >= 1"),
        ({"num_heads": 8}, "dim / num_heads: got 1, need an even number"),
    ],
)
def test_what_they_refuse(options, message):
    with pytest.raises(ValueError, match=message):
        MemoryAsContext(**{"dim": D, "num_heads": H, **options})


def test_how_they_start():
    torch.manual_seed(0)
    layer = MemoryAsContext(64, 2, persistent=64)
    assert abs(layer.persistent.std() - 0.02) < 2e-3
    assert layer.memory.chunk_size == layer.window == 512
