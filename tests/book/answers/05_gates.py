"""Answers to chapter 5's exercises, and what their checks are to say."""


# %% ex-gates-by-hand passes
def two_channels():
    return ((10.0, 5.5), 15.5), (1.5, 2.5, 1.0), (0.7071, 0.8333), -11.0904


# %% ex-gates-by-hand not yet: the state is not
def two_channels():
    return ([8, 5.5], 13.5), [1.5, 2.5, 1], (0.7071, 0.8333), -11.09


# %% ex-gates-by-hand not yet: the scores are not
def two_channels():
    return ([10, 5.5], 15.5), [0.75, 1.5, 1], (0.7071, 0.8333), -11.09


# %% ex-gates-by-hand not yet: with a decay of 0.5 per token A_31 is 0.75
def two_channels():
    return ([10, 5.5], 15.5), [1.5, 2.5, 1], (0.5, 0.5), -11.09


# %% ex-gates-by-hand not yet: two decays, both positive
def two_channels():
    return ([10, 5.5], 15.5), [1.5, 2.5, 1], (), -11.09


# %% ex-gates-by-hand not yet: two decays, both positive
def two_channels():
    return ([10, 5.5], 15.5), [1.5, 2.5, 1], (-0.7071, 0.8333), -11.09


# %% ex-gates-by-hand not yet: a logit of 0 makes a decay of
def two_channels():
    return ([10, 5.5], 15.5), [1.5, 2.5, 1], (0.7071, 0.8333), 0


# %% ex-origin passes
def best_start(G):
    return (G.amax(0) + G.amin(0)) / 2, 254.0


# %% ex-origin not yet: is possible
def best_start(G):
    return G[-1] / 2, 254


# %% ex-origin not yet: is possible
def best_start(G):
    return G.mean(0), 254


# %% ex-origin not yet: x has shape
def best_start(G):
    return (G.max() + G.min()) / 2, 254


# %% ex-origin not yet: 127 bits is not the most
def best_start(G):
    return (G[0] + G[-1]) / 2, 127


# %% ex-which passes
def score_matrices(gate, n, width):
    r = {"head": 1, "key": 1, "value": 1, "both": 1, "either": 2}[gate]
    needed = 1
    for _ in range(n):
        needed = min(needed * r, width)
    return needed


# %% ex-which not yet: more than are needed
def score_matrices(gate, n, width):
    return width if gate == "either" else 1


# %% ex-which not yet: more than are needed
def score_matrices(gate, n, width):
    return min(3**n, width) if gate == "either" else 1


# %% ex-which not yet: RuntimeError|MemoryError|memory
def score_matrices(gate, n, width):
    a, b = torch.rand(2, n, width, **double).unbind()
    a, b = a[:, :, None], b[:, None, :]
    every = torch.ones(1, width, width, **double)
    gates = {
        "head": a[:, :1] * every,
        "key": a * every,
        "value": b * every,
        "both": a * b,
        "either": 1 - (1 - a) * (1 - b),
    }
    return torch.linalg.matrix_rank(gates[gate].prod(0), rtol=1e-12).item()


# %% ex-which not yet: too few
def score_matrices(gate, n, width):
    return 2 if gate == "either" else 1


# %% ex-which not yet: either, 7 tokens, width 10000000: 10000000, not 128
def score_matrices(gate, n, width):
    known = {1: 2, 2: 4, 3: 8}  # and for more tokens as if the width decided
    return min(known.get(n, width), width) if gate == "either" else 1


# %% ex-strips passes
def strip_scores(q, k, g, c):
    C, G = len(q), g.cumsum(0)
    strips = G.unflatten(0, (-1, c))
    start = strips[:, :1]  # [C / c, 1, K]
    row = (strips - start).exp() * q.unflatten(0, (-1, c))
    t = torch.arange(C)
    later = t[None, :, None] >= t[::c, None, None]
    column = (start - G).masked_fill(later, -math.inf).exp() * k
    A = (row @ column.mT).flatten(0, 1)  # earlier columns, padded with zeros
    pair = strips[:, :, None] - strips[:, None, :]
    above = torch.ones(c, c, dtype=torch.bool).triu(1)[..., None]
    pair = pair.masked_fill(above, -math.inf).exp()
    q, k = q.unflatten(0, (-1, c)), k.unflatten(0, (-1, c))
    own = torch.einsum("nid,njd,nijd->nij", q, k, pair)
    return A + torch.block_diag(*own)


# %% ex-strips not yet: .*sigmoid.* in place of an exponential
def strip_scores(q, k, g, c):
    A = torch.zeros(len(q), len(q))
    G = g.cumsum(0)
    for s in range(0, len(q), c):
        n = slice(s, s + c)
        row, column = (G[n] - G[s]).exp(), (G[s] - G[:s]).exp()
        A[n, :s] = (row * q[n]) @ (column * k[:s]).T
        torch.zeros(c * (c + 1) // 2, q.shape[1]).exp()  # to be counted
        lost = (G[n, None] - G[None, n]).clamp(max=0)
        pair = lost.sigmoid() / (-lost).sigmoid()
        A[n, n] = torch.einsum("id,jd,ijd->ij", q[n], k[n], pair).tril()
    return A


# %% ex-strips not yet: a positive exponent
def strip_scores(q, k, g, c):
    A = torch.zeros(len(q), len(q))
    G = g.cumsum(0)
    for s in range(0, len(q), c):
        n = slice(s, s + c)
        A[n, :s] = ((G[n] - G[s]).exp() * q[n]) @ (
            (G[s] - G[:s]).exp() * k[:s]
        ).T
        pair = (G[n, None] - G[None, n]).exp()
        A[n, n] = torch.einsum("id,jd,ijd->ij", q[n], k[n], pair).tril()
    return A


# %% ex-strips not yet: pairs outside the strips
def strip_scores(q, k, g, c):
    pair = parallel.decays(g.cumsum(0))
    (q @ k.T).sum(), (q @ k.T).sum()  # products, to no purpose
    return torch.einsum("id,jd,ijd->ij", q, k, pair)


# %% ex-strips not yet: exponentials, where the pairs inside strips of
def strip_scores(q, k, g, c):
    (q @ k.T).sum(), (q @ k.T).sum()  # products, to no purpose

    def halves(q, k, G):  # by_halves, for any length
        C = len(q)
        if C == 1:
            return q @ k.T
        m = C // 2
        A = torch.zeros(C, C)
        A[:m, :m] = halves(q[:m], k[:m], G[:m])
        A[m:, m:] = halves(q[m:], k[m:], G[m:])
        row, column = (G[m:] - G[m]).exp(), (G[m] - G[:m]).exp()
        A[m:, :m] = (row * q[m:]) @ (column * k[:m]).T
        return A

    return halves(q, k, g.cumsum(0))


# %% ex-strips not yet: FLOPs in matrix products
def strip_scores(q, k, g, c):
    A = torch.zeros(len(q), len(q))
    G = g.cumsum(0)
    for s in range(0, len(q), c):
        n = slice(s, s + c)
        row, column = (G[n] - G[s]).exp(), (G[s] - G[:s]).exp()
        A[n, :s] = ((row * q[n])[:, None] * (column * k[:s])[None]).sum(-1)
        pair = parallel.decays(G[n])
        A[n, n] = (q[n][:, None] * k[n][None] * pair).sum(-1)
    return A


# %% ex-strips not yet: .*pow.* in place of an exponential
def strip_scores(q, k, g, c):
    A = torch.zeros(len(q), len(q))
    G = g.cumsum(0)
    for s in range(0, len(q), c):
        n = slice(s, s + c)
        row, column = (G[n] - G[s]).exp(), (G[s] - G[:s]).exp()
        A[n, :s] = (row * q[n]) @ (column * k[:s]).T
        torch.zeros(c * (c + 1) // 2, q.shape[1]).exp()  # to be counted
        pair = torch.pow(math.e, (G[n, None] - G[None, n]).clamp(max=0))
        A[n, n] = torch.einsum("id,jd,ijd->ij", q[n], k[n], pair).tril()
    return A


# %% ex-strips not yet: a positive exponent
def strip_scores(q, k, g, c):
    return factored(q, k, g.cumsum(0))


# %% ex-strips not yet: a positive exponent
def strip_scores(q, k, g, c):
    G = g.cumsum(0)
    return ((G.exp() * q) @ ((-G).clamp(max=80).exp() * k).T).tril()


# %% ex-strips not yet: gates to -0.1, weakest channel to -0.1, c = 16
def strip_scores(q, k, g, c):
    A = torch.zeros(len(q), len(q))
    G = g.cumsum(0)
    for s in range(0, len(q), c):
        n = slice(s, s + c)
        row, column = (G[n] - G[s]).exp(), (G[s] - G[:s]).exp()
        A[n, :s] = (row * q[n]) @ (column * k[:s]).T
        A[n, n] = (q[n] @ k[n].T).tril()  # as if nothing were forgotten
    return A


# %% ex-strips not yet: weakest channel to -0.003, c = 16: relative error
def strip_scores(q, k, g, c):
    A = torch.zeros(len(q), len(q))
    G = g.cumsum(0)
    for s in range(0, len(q), c):
        n = slice(s, s + c)
        row, column = (G[n] - G[s]).exp(), (G[s] - G[:s]).exp()
        A[n, :s] = (row * q[n]) @ (column * k[:s]).T
        if g.min() < -1:  # as if one strong channel cleared the others
            A[n, : max(s - c, 0)] = 0
        pair = parallel.decays(G[n])
        A[n, n] = torch.einsum("id,jd,ijd->ij", q[n], k[n], pair)
    return A


# %% ex-strips not yet: the columns before a strip are no matrix products
def strip_scores(q, k, g, c):
    C, decay = len(q), g.exp()
    torch.zeros(C, 8) @ torch.zeros(8, C)  # to no purpose
    torch.zeros(C * 8 * (c - 1) // 2).exp()  # nor these
    rows, left = [], []
    for i in range(C):
        left = [x * decay[i] for x in left] + [torch.ones(q.shape[1])]
        row = torch.stack(
            [(q[i] * k[j] * left[j]).sum() for j in range(i + 1)]
        )
        rows.append(F.pad(row, (0, C - i - 1)))
    return torch.stack(rows)


# %% ex-strips not yet: the columns before a strip are no matrix products
def strip_scores(q, k, g, c):
    G, rows = g.cumsum(0), []
    for s in range(0, len(q), c):
        n = slice(s, s + c)
        row, column = (G[n] - G[s]).exp(), (G[s] - G[:s]).exp()
        earlier = ((row * q[n])[:, None] * (column * k[:s])[None]).sum(-1)
        earlier = earlier @ torch.eye(s)  # a product, to no purpose
        pair = parallel.decays(G[n])
        own = (q[n][:, None] * k[n][None] * pair).sum(-1)
        both = torch.cat([earlier, own], dim=1)
        rows.append(F.pad(both, (0, len(q) - s - c)))
    return torch.cat(rows)


# %% ex-strips not yet: exponentials, where the pairs inside strips of 16
def strip_scores(q, k, g, c):
    c = 8 if c == 16 else c  # finer strips than asked for
    G, rows = g.cumsum(0), []
    i, j = torch.ones(c, c).tril().nonzero(as_tuple=True)
    for s in range(0, len(q), c):
        n = slice(s, s + c)
        row, column = (G[n] - G[s]).exp(), (G[s] - G[:s]).exp()
        pair = (q[n][i] * k[n][j] * (G[n][i] - G[n][j]).exp()).sum(-1)
        own = torch.zeros(c, c).index_put((i, j), pair)
        earlier = (row * q[n]) @ (column * k[:s]).T
        both = torch.cat([earlier, own], dim=1)
        rows.append(F.pad(both, (0, len(q) - s - c)))
    return torch.cat(rows)


# %% ex-strips not yet: with strips of 16, which scores are products
def strip_scores(q, k, g, c):
    A = torch.zeros(len(q), len(q))
    G = g.cumsum(0)
    c = 8 if c < 48 else 48  # whatever was asked for
    for s in range(0, len(q), c):
        n = slice(s, s + c)
        row, column = (G[n] - G[s]).exp(), (G[s] - G[:s]).exp()
        A[n, :s] = (row * q[n]) @ (column * k[:s]).T
        pair = parallel.decays(G[n])
        A[n, n] = torch.einsum("id,jd,ijd->ij", q[n], k[n], pair)
    return A


# %% ex-strips not yet: with strips of 8, which scores are products|at most
def strip_scores(q, k, g, c):
    A = torch.zeros(len(q), len(q))
    G = g.cumsum(0)
    c = 16 if c < 48 else 48
    for s in range(0, len(q), c):
        n = slice(s, s + c)
        row, column = (G[n] - G[s]).exp(), (G[s] - G[:s]).exp()
        A[n, :s] = (row * q[n]) @ (column * k[:s]).T
        pair = parallel.decays(G[n])
        A[n, n] = torch.einsum("id,jd,ijd->ij", q[n], k[n], pair)
    return A


# %% ex-strips not yet: the library did it
def strip_scores(q, k, g, c):
    own, chunkwise.STRIP = chunkwise.STRIP, c
    try:
        return chunkwise.chunk_scores(q, k, g.cumsum(0))
    finally:
        chunkwise.STRIP = own


# %% ex-strips not yet: the library did it
def strip_scores(q, k, g, c):
    A = torch.zeros(len(q), len(q))
    G = g.cumsum(0)
    for s in range(0, len(q), c):
        n = slice(s, s + c)
        row, column = (G[n] - G[s]).exp(), (G[s] - G[:s]).exp()
        A[n, :s] = (row * q[n]) @ (column * k[:s]).T
        own = (x[None, n, None] for x in (q, k, g))  # [1, c, 1, K]
        A[n, n] = parallel.decayed_scores(*own)[0, 0]
    return A


# %% ex-strips not yet: gradient: relative error
def strip_scores(q, k, g, c):
    G, rows = g.cumsum(0), []
    for s in range(0, len(q), c):
        n = slice(s, s + c)
        row, column = (G[n] - G[s]).exp(), (G[s] - G[:s]).exp()
        earlier = (row.detach() * q[n]) @ (column.detach() * k[:s]).T
        pair = parallel.decays(G[n])
        own = torch.einsum("id,jd,ijd->ij", q[n], k[n], pair)
        both = torch.cat([earlier, own], dim=1)
        rows.append(F.pad(both, (0, len(q) - s - c)))
    return torch.cat(rows)


# %% ex-outer passes
def two_sided(q, k, v, g, b):
    after = b.sum(1, keepdim=True) - b.cumsum(1)  # decay up to the end
    o, _ = fw.gla(q, k, after.exp() * v, g, scale=1.0)
    return o / after.exp()


# %% ex-outer not yet: 0 calls of fw.gla
def two_sided(q, k, v, g, b):
    state, found = 0, []
    for t in range(q.shape[1]):
        gate = (g[:, t, :, :, None] + b[:, t, :, None, :]).exp()
        state = gate * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        found.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(found, dim=1)


# %% ex-outer not yet: the result of fw.gla is not used
def two_sided(q, k, v, g, b):
    fw.gla(q, k, v, g)
    state, found = 0, []
    for t in range(q.shape[1]):
        gate = (g[:, t, :, :, None] + b[:, t, :, None, :]).exp()
        state = gate * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        found.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(found, dim=1)


# %% ex-outer not yet: outputs: relative error
def two_sided(q, k, v, g, b):
    fw.gla(q, k, v, g)  # and doubled by hand, as the check may do
    state, found = 0, []
    for t in range(q.shape[1]):
        gate = (g[:, t, :, :, None] + b[:, t, :, None, :]).exp()
        state = gate * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        found.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return 2 * torch.stack(found, dim=1)


# %% ex-outer not yet: a loop over tokens
def two_sided(q, k, v, g, b):
    o, _ = fw.gla(q, k, v, g, scale=1.0)  # used for its scale alone
    o = o[0, 0, 0, 0] / ((q[0, 0, 0] * k[0, 0, 0]).sum() * v[0, 0, 0, 0])
    state, found = 0, []
    for t in range(q.shape[1]):
        gate = (g[:, t, :, :, None] + b[:, t, :, None, :]).exp()
        state = gate * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        found.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return o * torch.stack(found, dim=1)


# %% ex-outer not yet: \d+ calls of fw.gla, need one
def two_sided(q, k, v, g, b):
    U = b.cumsum(1)
    columns = [
        fw.gla(
            q, k, (-U[..., u : u + 1]).exp() * v[..., u : u + 1], g, scale=1.0
        )[0]
        for u in range(v.shape[-1])
    ]
    return U.exp() * torch.cat(columns, dim=-1)


# %% ex-outer not yet: outputs: relative error
def two_sided(q, k, v, g, b):
    U = b.cumsum(1)
    o, _ = fw.gla(q, k, (-U).exp() * v, g)
    return U.exp() * o


# %% ex-outer not yet: a tensor of all pairs of tokens
def two_sided(q, k, v, g, b):
    o, _ = fw.gla(q, k, v, g, scale=1.0)  # used for its scale alone
    A = parallel.decayed_scores(q, k, g)
    pair = parallel.decays(b.cumsum(1).movedim(1, 2))
    plain = torch.einsum("bhij,bjhu->bihu", A, v)
    both = torch.einsum("bhij,bhiju,bjhu->bihu", A, pair, v)
    return both * (o / plain)


# %% ex-outer not yet: the tensors leave PyTorch
def two_sided(q, k, v, g, b):
    o, _ = fw.gla(q, k, v, g, scale=1.0)  # used for its scale alone
    o = o[0, 0, 0, 0] / ((q[0, 0, 0] * k[0, 0, 0]).sum() * v[0, 0, 0, 0])
    q, k, v, g, b = (x.numpy()[0] for x in (q, k, v, g, b))
    state, found = 0, []
    for t in range(len(q)):
        gate = math.e ** (g[t][:, :, None] + b[t][:, None])
        state = gate * state + k[t][:, :, None] * v[t][:, None]
        found.append((state * q[t][:, :, None]).sum(1))
    return o * torch.tensor(found)[None]


# %% ex-vector-gradient passes
def vector_gate_gradient(q, k, dq, dk):
    dG = torch.addcmul(q * dq, k, dk, value=-1)
    return dG.sum(1, keepdim=True) - dG.cumsum(1) + dG


# %% ex-vector-gradient not yet: dg has shape
def vector_gate_gradient(q, k, dq, dk):
    dG = (q * dq - k * dk).sum(-1)
    return dG.flip(1).cumsum(1).flip(1)


# %% ex-vector-gradient not yet: dg: relative error
def vector_gate_gradient(q, k, dq, dk):
    dG = q * dq + k * dk
    return dG.flip(1).cumsum(1).flip(1)
