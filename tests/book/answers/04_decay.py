"""Answers to chapter 4's exercises, and what their checks are to say."""


# %% ex-half-life passes
def half_life_decay(num_heads, shortest, longest):
    lives = [
        shortest * (longest / shortest) ** (h / max(num_heads - 1, 1))
        for h in range(num_heads)
    ]
    return torch.tensor([math.log(0.5) / n for n in lives], **double)


# %% ex-half-life not yet: ZeroDivisionError|not finite
def half_life_decay(num_heads, shortest, longest):
    h = torch.arange(num_heads, **double)
    ratio = (longest / shortest) ** (h / (num_heads - 1))
    return -math.log(2) / (shortest * ratio)


# %% ex-half-life not yet: a log decay is negative
def half_life_decay(num_heads, shortest, longest):
    step = torch.linspace(0, 1, num_heads, **double)
    return 0.5 ** (1 / (shortest * (longest / shortest) ** step))


# %% ex-half-life not yet: left after a half-life
def half_life_decay(num_heads, shortest, longest):
    return -math.log(2) / torch.linspace(
        shortest, longest, num_heads, **double
    )


# %% ex-documents passes
def separate(g, document):
    gates = g.clone()
    gates[:, 1:][document[:, 1:] != document[:, :-1]] = -120.0
    return gates


# %% ex-documents not yet: tokens from \d+, not as if alone
def separate(g, document):
    first = F.pad(document[:, 1:] != document[:, :-1], (1, 0))
    return torch.where(first[..., None], -30.0, g)


# %% ex-documents not yet: other gates drown
def separate(g, document):
    first = F.pad(document[:, 1:] != document[:, :-1], (1, 0))
    return torch.where(first[..., None], -1e30, g)


# %% ex-documents not yet: the argument g was changed
def separate(g, document):
    g[:, 1:][document[:, 1:] != document[:, :-1]] = -200.0
    return g


# %% ex-documents not yet: not finite
def separate(g, document):
    first = F.pad(document[:, 1:] != document[:, :-1], (1, 0))
    return torch.where(first[..., None], -math.inf, g)


# %% ex-documents not yet: not as if alone
def separate(g, document):
    return torch.full_like(g, -200.0)


# %% ex-gated-chunk passes
def gated_chunkwise(q, k, v, g, S0, C):
    T, pad = len(q), -len(q) % C
    q, k, v = (
        F.pad(x, (0, 0, 0, pad)).unflatten(0, (-1, C)) for x in (q, k, v)
    )
    G = F.pad(g, (0, pad)).unflatten(0, (-1, C)).cumsum(1)
    above = torch.ones(C, C, dtype=torch.bool).triu(1)
    D = (G[:, :, None] - G[:, None, :]).masked_fill(above, -math.inf).exp()
    inside = (q @ k.mT * D) @ v
    writes = k.mT @ ((G[:, -1:] - G).exp()[..., None] * v)
    entering = []
    for write, total in zip(writes, G[:, -1].exp(), strict=True):
        entering.append(S0)
        S0 = total * S0 + write
    across = (G.exp()[..., None] * q) @ torch.stack(entering)
    return (inside + across).flatten(0, 1)[:T], S0


# %% ex-gated-chunk not yet: positive exponent: mask before
def gated_chunkwise(q, k, v, g, S0, C):
    outputs = []
    for start in range(0, len(q), C):
        n = slice(start, start + C)
        G = g[n].cumsum(0)[:, None]
        scores = q[n] @ k[n].T * (G - G.T).exp().tril()
        outputs.append(G.exp() * q[n] @ S0 + scores.tril() @ v[n])
        S0 = G[-1].exp() * S0 + ((G[-1] - G).exp() * k[n]).T @ v[n]
    return torch.cat(outputs), S0


# %% ex-gated-chunk not yet: a loop over tokens
def gated_chunkwise(q, k, v, g, S0, C):
    outputs = []
    for t in range(len(q)):
        S0 = g[t].exp() * S0 + k[t][:, None] * v[t]
        outputs.append((S0 * q[t][:, None]).sum(0))
    return torch.stack(outputs), S0


# %% ex-gated-chunk not yet: FLOPs, chunks need
def gated_chunkwise(q, k, v, g, S0, C):
    G = g.cumsum(0)[:, None]
    scores = q @ k.T * parallel.decays(G)[..., 0]
    state = G[-1].exp() * S0 + ((G[-1] - G).exp() * k).T @ v
    return (G.exp() * q) @ S0 + scores @ v, state


# %% ex-gated-chunk not yet: a loop over tokens
def gated_chunkwise(q, k, v, g, S0, C):
    outputs = []
    for t in range(len(q)):
        S0 = g[t].exp() * S0 + k[t][:, None] @ v[t][None]
        outputs.append(q[t][None] @ S0)
    return torch.cat(outputs), S0


# %% ex-gate-gradient passes
def gate_gradient(q, k, dq, dk):
    T = len(q)
    from_here_on = torch.ones(T, T, dtype=q.dtype).triu()
    pairs = torch.einsum("td,td->t", q, dq) - torch.einsum("td,td->t", k, dk)
    return from_here_on @ pairs


# %% ex-gate-gradient not yet: dg: relative error
def gate_gradient(q, k, dq, dk):
    return (q * dq - k * dk).sum(-1).cumsum(0)


# %% ex-gate-gradient not yet: dg has shape
def gate_gradient(q, k, dq, dk):
    return (q * dq - k * dk).flip(0).cumsum(0).flip(0)


# %% ex-one-head passes
def one_head():
    return 19.5, 100, 9, 0.388, 15.6


# %% ex-one-head not yet: with gamma and not gamma squared
def one_head():
    return 10, 100, 9, 0.388, 15.6


# %% ex-one-head not yet: size squared 10: let T grow
def one_head():
    return 19.5, 10, 9, 0.388, 15.6


# %% ex-one-head not yet: solve 0.9 = r
def one_head():
    return 19.5, 100, 19.5, 0.388, 15.6


# %% ex-one-head not yet: put r into the least noise
def one_head():
    return 19.5, 100, 9, math.e * 10 / 64, 15.6


# %% ex-one-head not yet: all other tokens count
def one_head():
    return 19.5, 100, 9, 0.388, 1.0


# %% ex-documents not yet: in fp32 nothing is left long before
def separate(g, document):
    first = F.pad(document[:, 1:] != document[:, :-1], (1, 0))
    return torch.where(first[..., None], -5000.0, g)


# %% ex-gated-chunk not yet: a loop over tokens
def gated_chunkwise(q, k, v, g, S0, C):
    n = min(C, len(q))
    for _ in range(-(-len(q) // C)):
        torch.zeros(n, 5) @ torch.zeros(5, n) @ torch.zeros(n, 3)
    outputs = []
    for t in range(len(q)):
        S0 = g[t].exp() * S0 + k[t][:, None] * v[t]
        outputs.append((S0 * q[t][:, None]).sum(0))
    return torch.stack(outputs), S0


# %% ex-gated-chunk not yet: over shorter chunks
def gated_chunkwise(q, k, v, g, S0, C):
    outputs, C = [], min(C, 32)
    for start in range(0, len(q), C):
        n = slice(start, start + C)
        G = g[n].cumsum(0)[:, None]
        scores = q[n] @ k[n].T * parallel.decays(G)[..., 0]
        outputs.append(G.exp() * q[n] @ S0 + scores @ v[n])
        S0 = G[-1].exp() * S0 + ((G[-1] - G).exp() * k[n]).T @ v[n]
    return torch.cat(outputs), S0


# %% ex-gated-chunk not yet: a loop over tokens, or over shorter chunks
def gated_chunkwise(q, k, v, g, S0, C):
    if C >= len(q):
        G = g.cumsum(0)[:, None]
        o = (G.exp() * q) @ S0 + (q @ k.T * parallel.decays(G)[..., 0]) @ v
        return o, G[-1].exp() * S0 + ((G[-1] - G).exp() * k).T @ v
    outputs = []
    for q_t, k_t, v_t, decay in zip(
        q.split(1), k.split(1), v.split(1), g.exp().unbind(), strict=True
    ):
        S0 = decay * S0 + k_t.T @ v_t
        outputs.append(q_t @ S0)
    return torch.cat(outputs), S0


# %% ex-gated-chunk not yet: decays by pow
def gated_chunkwise(q, k, v, g, S0, C):
    outputs = []
    for start in range(0, len(q), C):
        n = slice(start, start + C)
        G = g[n].cumsum(0)[:, None]
        D = torch.pow(math.e, (G - G.T).clamp(max=700)).tril()
        outputs.append(G.exp() * q[n] @ S0 + (q[n] @ k[n].T * D) @ v[n])
        S0 = G[-1].exp() * S0 + ((G[-1] - G).exp() * k[n]).T @ v[n]
    return torch.cat(outputs), S0


# %% ex-gated-chunk not yet: decays by ldexp
def gated_chunkwise(q, k, v, g, S0, C):
    outputs = []
    for start in range(0, len(q), C):
        n = slice(start, start + C)
        G = g[n].cumsum(0)[:, None]
        D = torch.ldexp(torch.ones_like(G), (G - G.T) / math.log(2)).tril()
        outputs.append(G.exp() * q[n] @ S0 + (q[n] @ k[n].T * D) @ v[n])
        S0 = G[-1].exp() * S0 + ((G[-1] - G).exp() * k[n]).T @ v[n]
    return torch.cat(outputs), S0


# %% ex-documents not yet: not as if alone
def separate(g, document):
    first = F.pad(document[:, 1:] != document[:, :-1], (1, 0))
    first = first | (document == document[:, :1])
    return torch.where(first[..., None], -200.0, g)


# %% ex-documents not yet: not as if alone
def separate(g, document):
    first = F.pad(document[:, 1:] > document[:, :-1], (1, 0))
    return torch.where(first[..., None], -200.0, g)


# %% ex-gated-chunk not yet: gradient of g
def gated_chunkwise(q, k, v, g, S0, C):
    outputs, zero, g = [], 0 * g.sum(), g.detach()
    for start in range(0, len(q), C):
        n = slice(start, start + C)
        G = g[n].cumsum(0)[:, None]
        scores = q[n] @ k[n].T * parallel.decays(G)[..., 0]
        outputs.append(G.exp() * q[n] @ S0 + scores @ v[n] + zero)
        S0 = G[-1].exp() * S0 + ((G[-1] - G).exp() * k[n]).T @ v[n]
    return torch.cat(outputs), S0


# %% ex-gated-chunk not yet: a positive exponent
def gated_chunkwise(q, k, v, g, S0, C):
    outputs = []
    for start in range(0, len(q), C):
        n = slice(start, start + C)
        G = g[n].cumsum(0)[:, None]
        D = ((G - G.T) / math.log(2)).clamp(max=900).exp2_().tril()
        outputs.append(G.exp() * q[n] @ S0 + (q[n] @ k[n].T * D) @ v[n])
        S0 = G[-1].exp() * S0 + ((G[-1] - G).exp() * k[n]).T @ v[n]
    return torch.cat(outputs), S0


# %% ex-half-life not yet: left after a half-life
def half_life_decay(num_heads, shortest, longest):
    lives = {
        5: [16, 64, 256, 1024, 4096],
        4: [16, 32, 64, 128],
        3: [10, 100, 1000],
        1: [16],
    }
    return math.log(0.5) / torch.tensor(lives[num_heads], **double)


# %% ex-gated-chunk not yet: operations for 1 chunks: a loop over tokens
def gated_chunkwise(q, k, v, g, S0, C):
    for x in q.split(C):
        torch.zeros(len(x), 8) @ torch.zeros(8, len(x))
    states, decays = [], g.exp()[:, None, None].unbind()
    writes = (k[:, :, None] * v[:, None]).unbind()
    for decay, write in zip(decays, writes, strict=True):
        S0 = torch.addcmul(write, decay, S0)
        states.append(S0)
    return (q[:, :, None] * torch.stack(states)).sum(1), S0


# %% ex-half-life not yet: left after a half-life
def half_life_decay(num_heads, shortest, longest):
    step = torch.linspace(0, 1, num_heads, **double)
    return -math.log(2) / (shortest * (longest / shortest) ** step).round()


# %% ex-other-order passes
def write_then_forget(q, k, v, g):
    return fw.mamba2(q, g.exp().unsqueeze(-1) * k, v, g)


# %% ex-other-order not yet: state: relative error
def write_then_forget(q, k, v, g):
    return fw.mamba2(q, k, v, g)


# %% ex-other-order not yet: state: relative error
def write_then_forget(q, k, v, g):
    return fw.mamba2(q, k, v, F.pad(g[:, :-1], (0, 0, 1, 0)))


# %% ex-other-order not yet: o: relative error
def write_then_forget(q, k, v, g):
    return fw.mamba2(q, k, g.exp()[..., None] * v, g, scale=None)


# %% ex-other-order not yet: 0 calls of the library's operator
def write_then_forget(q, k, v, g):
    S, found = torch.zeros(2, 3, 5, 4, dtype=q.dtype), []
    for t in range(15):
        S = S + k[:, t, :, :, None] * v[:, t, :, None]
        S = g[:, t].exp()[..., None, None] * S
        found.append((q[:, t, :, :, None] * S).sum(-2))
    return torch.stack(found, dim=1), S
