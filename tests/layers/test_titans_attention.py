"""Titans' memory beside attention: each way written out, token by token."""

import pytest
import torch
import torch.nn.functional as F

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


def turned(x, position):
    """Rotary positions of one head, pairs half a head apart."""
    angle = position * THETA ** (-torch.arange(K // 2, **DOUBLE) / (K // 2))
    a, b = x[: K // 2], x[K // 2 :]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin])


def attention(w, query, others):
    """Of one token (x, position) to others, and to the persistent ones."""
    heads = []
    others = [*[(p, 0) for p in w["persistent"]], *others]
    for h in range(H):
        q, k, v = (
            w["qkv_proj.weight"][i * D + h * K : i * D + (h + 1) * K]
            for i in range(3)
        )
        asked = turned(q @ query[0], query[1])
        scores = [asked @ turned(k @ x, at) / K**0.5 for x, at in others]
        share = torch.stack(scores).softmax(0)
        heads.append(share @ torch.stack([v @ x for x, _ in others]))
    return torch.cat(heads)


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


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


class Memory:
    """A layer's memory, by autograd: it answers, and it learns."""

    def __init__(self, layer):
        self.w, self.max_rate = layer.state_dict(), layer.max_rate
        self.M = [
            [self.w[f"start.{n}"][h] for n in ("W1", "b1", "W2", "b2")]
            for h in range(H)
        ]
        self.S = [[torch.zeros_like(p) for p in M] for M in self.M]

    def heads(self, x):
        """q, k and v per head, q and k of unit length."""
        parts = F.silu(self.w["qkv_proj.weight"] @ x).reshape(3, H, K)
        size = (parts.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return parts[0] / size[0], parts[1] / size[1], parts[2]

    def answer(self, M, h, z):
        hidden = F.gelu(z @ M[0] + M[1], approximate="tanh")
        norm = (self.w[f"start.norm_{n}"][h] for n in ("weight", "bias"))
        return F.layer_norm(hidden @ M[2] + M[3], (K,), *norm, 1e-6)

    def put_out(self, answers, x):
        o = torch.cat([normed(o, self.w["norm.weight"]) for o in answers])
        gate = F.silu(self.w["g_proj.weight"] @ x)
        return self.w["o_proj.weight"] @ (o * gate)

    def recalled(self, base, x):
        q = self.heads(x)[0]
        return self.put_out(
            [self.answer(base[h], h, q[h]) for h in range(H)], x
        )

    def learned(self, base, x):
        """A step by the gradient at ``base``, and the answer after it."""
        q, k, v = self.heads(x)
        rates = self.w["rates_proj.weight"] @ x + self.w["rates_proj.bias"]
        theta, eta, alpha = rates.sigmoid().reshape(3, H)
        answers = []
        for h in range(H):
            at = [p.clone().requires_grad_() for p in base[h]]
            loss = (self.answer(at, h, k[h]) - v[h]).square().sum()
            slopes = torch.autograd.grad(loss, at)
            rate = self.max_rate * theta[h]
            self.S[h] = [
                eta[h] * s - rate * d
                for s, d in zip(self.S[h], slopes, strict=True)
            ]
            self.M[h] = [
                (1 - alpha[h]) * p + s
                for p, s in zip(self.M[h], self.S[h], strict=True)
            ]
            answers.append(self.answer(self.M[h], h, q[h]))
        return self.put_out(answers, x)


NAMES = ("weights", "biases")


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
