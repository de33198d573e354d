"""Parts of layers written out, a token and a head at a time."""

import torch
import torch.nn.functional as F


def rotated(x, position, theta):
    """Rotary positions [..., K]: channels j and j + K/2 turn as a pair."""
    half = x.shape[-1] // 2
    j = torch.arange(half, dtype=x.dtype)
    angle = position * theta ** (-j / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rms_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


class Memory:
    """The memory of TitansMemory, by autograd: it answers, and it learns."""

    def __init__(self, layer):
        self.w, self.max_rate = layer.state_dict(), layer.max_rate
        self.H, self.K = self.w["start.b2"].shape
        self.M = [
            [self.w[f"start.{n}"][h] for n in ("W1", "b1", "W2", "b2")]
            for h in range(self.H)
        ]
        self.S = [[torch.zeros_like(p) for p in M] for M in self.M]

    def heads(self, x):
        """q, k and v per head, q and k of unit length."""
        parts = F.silu(self.w["qkv_proj.weight"] @ x)
        parts = parts.reshape(3, self.H, self.K)
        size = (parts.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return parts[0] / size[0], parts[1] / size[1], parts[2]

    def answer(self, M, h, z):
        hidden = F.gelu(z @ M[0] + M[1], approximate="tanh")
        norm = (self.w[f"start.norm_{n}"][h] for n in ("weight", "bias"))
        return F.layer_norm(hidden @ M[2] + M[3], (self.K,), *norm, 1e-6)

    def put_out(self, answers, x):
        o = torch.cat([rms_norm(o, self.w["norm.weight"]) for o in answers])
        gate = F.silu(self.w["gate_proj.weight"] @ x)
        return self.w["o_proj.weight"] @ (o * gate)

    def recalled(self, base, x):
        q = self.heads(x)[0]
        return self.put_out(
            [self.answer(base[h], h, q[h]) for h in range(self.H)], x
        )

    def learned(self, base, x):
        """A step by the gradient at ``base``, and the answer after it."""
        q, k, v = self.heads(x)
        rates = self.w["rates_proj.weight"] @ x + self.w["rates_proj.bias"]
        theta, eta, alpha = rates.sigmoid().reshape(3, self.H)
        answers = []
        for h in range(self.H):
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
