"""Answers to appendix B's exercises, and what their checks are to say."""


# %% ex-features passes
def directions_needed(rho, eps):
    rho, eps = sp.Rational(rho), sp.Rational(str(eps))
    waves = 2 * sp.sinh(rho) ** 2 / eps**2
    return sp.ceiling(waves), sp.ceiling((sp.exp(2 * rho) - 1) / eps**2)


# %% ex-features not yet: are not the smallest whole numbers
def directions_needed(rho, eps):
    x = math.exp(2 * rho)
    waves = x * (1 - 1 / x) ** 2 / eps**2  # channels, not directions
    return math.ceil(waves), math.ceil((x - 1) / eps**2)


# %% ex-features not yet: are not the smallest whole numbers
def directions_needed(rho, eps):
    return (55, 172) if rho < 1 else (70, 160)


# %% ex-hgrn2 passes
def hgrn2(q, v, g):
    keep = g.exp()
    one = torch.ones_like(v[..., :1])
    o, state = fw.gla(q, 1 - keep, torch.cat([v, one], -1), g, scale=1.0)
    return o[..., :-1], state[..., :-1], 1 - keep.prod(1)


# %% ex-hgrn2 not yet: 2 calls of fw.gla, need one
def hgrn2(q, v, g):
    k = 1 - g.exp()
    o, state = fw.gla(q, k, v, g, scale=1.0)
    _, totals = fw.gla(q, k, torch.ones_like(v[..., :1]), g, scale=1.0)
    return o, state, totals[..., 0]


# %% ex-hgrn2 not yet: a loop over tokens
def hgrn2(q, v, g):
    o, state = fw.gla(q, 1 - g.exp(), v, g, scale=1.0)
    totals = torch.zeros_like(g[:, 0])
    for keep in g.exp().unbind(1):
        totals = keep * totals + 1 - keep
    return o, state, totals


# %% ex-hgrn2 not yet: totals of weights: relative error
def hgrn2(q, v, g):
    o, state = fw.gla(q, 1 - g.exp(), v, g, scale=1.0)
    return o, state, (1 - g.exp()).sum(1)


# %% ex-hgrn2 not yet: outputs: relative error
def hgrn2(q, v, g):
    o, state = fw.gla(q, g.exp(), v, g, scale=1.0)
    return o, state, 1 - g.sum(1).exp()


# %% ex-hgrn2 not yet: the result of fw.gla is not used
def hgrn2(q, v, g):
    fw.gla(q, q, v, g)
    G, k = g.cumsum(1), 1 - g.exp()
    pair = (G[:, :, None] - G[:, None]).exp()  # [B, i, j, H, K]
    A = torch.einsum("bihd,bjhd,bijhd->bhij", q, k, pair).tril()
    o = torch.einsum("bhij,bjhv->bihv", A, v)
    k = k * (G[:, -1:] - G).exp()
    return o, torch.einsum("bthd,bthv->bhdv", k, v), 1 - G[:, -1].exp()


# %% ex-hgrn2 not yet: outputs: relative error
def hgrn2(q, v, g):
    fw.gla(q, q, v, g)  # and doubled by hand, as the check may do
    G, k = g.cumsum(1), 1 - g.exp()
    pair = (G[:, :, None] - G[:, None]).exp()  # [B, i, j, H, K]
    A = torch.einsum("bihd,bjhd,bijhd->bhij", q, k, pair).tril()
    o = torch.einsum("bhij,bjhv->bihv", A, v)
    k = k * (G[:, -1:] - G).exp()
    state = torch.einsum("bthd,bthv->bhdv", k, v)
    return 2 * o, 2 * state, 1 - G[:, -1].exp()


# %% ex-hgrn2 not yet: the closed form takes one exponential
def hgrn2(q, v, g):
    k, G = 1 - g.exp(), g.cumsum(1)
    o, state = fw.gla(q, k, v, g, scale=1.0)
    return o, state, ((G[:, -1:] - G).exp() * k).sum(1)


# %% ex-hgrn2 not yet: totals: the closed form takes no running product
def hgrn2(q, v, g):
    keep = g.exp()
    o, state = fw.gla(q, 1 - keep, v, g, scale=1.0)
    later = torch.cat([keep[:, 1:], torch.ones_like(keep[:, :1])], 1)
    left = later.flip(1).cumprod(1).flip(1)  # of each token, at the end
    return o, state, ((1 - keep) * left).sum(1)


# %% ex-stabilizer passes
def all_stabilizers(g, i, m0):
    G = torch.cat([torch.zeros_like(g[:1]), g.cumsum(0)])
    written = torch.cat([m0[None], i])
    pairs = written[None, :] - G[None, :] + G[:, None]
    above = torch.ones_like(pairs, dtype=torch.bool).triu(1)
    return pairs.masked_fill(above, -math.inf).amax(1)[1:]


# %% ex-stabilizer not yet: a loop over tokens
def all_stabilizers(g, i, m0):
    found = []
    for forget, take in zip(g, i, strict=True):
        m0 = torch.maximum(forget + m0, take)
        found.append(m0)
    return torch.stack(found)


# %% ex-stabilizer not yet: m0 = (0.0|40.0): relative error
def all_stabilizers(g, i, m0):
    G = g.cumsum(0)
    return G + (i - G).cummax(0).values


# %% ex-doubling passes
def states_by_doubling(a, b):
    a, h, reach = a.clone(), b.clone(), 1
    while reach < len(a):
        before, decay = h[:-reach].clone(), a[:-reach].clone()
        h[reach:].addcmul_(a[reach:], before)
        a[reach:].mul_(decay)
        reach *= 2
    return h


# %% ex-doubling passes
def states_by_doubling(a, b):
    reach = 1
    while reach < len(a):
        none = (0, 0, 0, 0, reach, 0)
        b = b + a * F.pad(b[:-reach], none)
        a = a * F.pad(a[:-reach], none, value=1.0)
        reach *= 2
    return b


# %% ex-doubling passes
def states_by_doubling(a, b):
    a, h, reach = a.clone(), b.clone(), 1
    while reach < len(a):
        h[reach:] = a[reach:] * h[:-reach] + h[reach:]
        a[reach:] = a[reach:] * a[:-reach]
        reach *= 2
    return h


# %% ex-doubling not yet: a loop over tokens
def states_by_doubling(a, b):
    h, found = torch.zeros_like(b[0]), []
    for a_t, b_t in zip(a.unbind(), b.unbind(), strict=True):
        h = torch.addcmul(b_t, a_t, h)
        found.append(h)
    return torch.stack(found)


# %% ex-doubling not yet: nan|relative error
def states_by_doubling(a, b):
    total = a.cumprod(0)
    return total * (b / total).cumsum(0)


# %% ex-doubling not yet: argument a was changed
def states_by_doubling(a, b):
    h, reach = b.clone(), 1
    while reach < len(a):
        h[reach:] += a[reach:] * h[:-reach].clone()
        a[reach:] *= a[:-reach].clone()
        reach *= 2
    return h


# %% ex-one-recurrence passes
def gate_and_weight(model, *given):
    if model in ("retnet", "lightning"):
        T = given[-1]
        if model == "retnet":
            g = torch.log(1 - torch.tensor(2.0, **double) ** (-5 - given[0]))
        else:
            h, H, layer, L, _ = given
            g = fw.lightning_log_decay(H, layer, L, dtype=torch.float64)[h]
        return g.expand(T), torch.ones(T, **double)
    if model == "gated retention":
        decay = given[0].sigmoid() ** 0.0625
        return decay.log(), torch.ones_like(decay)
    if model == "mamba2":
        return given[0] * given[1], given[0]
    return given[0].sigmoid().log(), given[1].exp()


# %% ex-one-recurrence not yet: retnet: shapes
def gate_and_weight(model, *given):
    return torch.tensor(math.log(1 - 2.0**-8)), torch.tensor(1.0)


# %% ex-one-recurrence not yet: retnet: a log decay is at most 0
def gate_and_weight(model, *given):
    return (torch.ones(7, **double) * (1 - 2.0**-8),) * 2


# %% ex-one-recurrence not yet: mamba2, weight of a write
def gate_and_weight(model, *given):
    one = torch.ones(7, **double)
    if model == "retnet":
        return math.log(1 - 2.0 ** (-5 - given[0])) * one, one
    if model == "lightning":
        h, H, layer, L, _ = given
        return fw.lightning_log_decay(H, layer, L, **double)[h] * one, one
    if model == "gated retention":
        return F.logsigmoid(given[0]) / 16, one
    if model == "mamba2":
        return given[0] * given[1], one
    return F.logsigmoid(given[0]), given[1].exp()


# %% ex-stabilizer not yet: no gradient reaches them
def all_stabilizers(g, i, m0):
    G = g.detach().cumsum(0)
    return G + (i.detach() - G).cummax(0).values.clamp(min=m0)


# %% ex-stabilizer not yet: the tensors leave PyTorch
def all_stabilizers(g, i, m0):
    m, last, places = m0.item(), 0, []
    gates = zip(g.tolist(), i.tolist(), strict=True)
    for t, (forget, take) in enumerate(gates):
        m, last = max((forget + m, last), (take, t + 1))
        places.append(last)
    G = g.cumsum(0)
    return G + torch.cat([m0[None], i - G])[places]


# %% ex-doubling not yet: no gradient reaches them
def states_by_doubling(a, b):
    a, b, reach = a.detach(), b.detach(), 1
    while reach < len(a):
        later = a[reach:]
        b = torch.cat([b[:reach], later * b[:-reach] + b[reach:]])
        a = torch.cat([a[:reach], later * a[:-reach]])
        reach *= 2
    return b


# %% ex-doubling not yet: the tensors leave PyTorch
def states_by_doubling(a, b):
    class Scan(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            h, found = 0.0, []
            for x, y in zip(a.numpy(), b.numpy(), strict=True):
                h = x * h + y
                found.append(torch.from_numpy(h))
            ctx.save_for_backward(a, torch.stack(found))
            return ctx.saved_tensors[1]

        @staticmethod
        def backward(ctx, dh):
            a, h = ctx.saved_tensors
            dh = dh.clone()
            for t in range(len(a) - 1, 0, -1):
                dh[t - 1] += a[t] * dh[t]
            return dh * F.pad(h[:-1], (0, 0, 0, 0, 1, 0)), dh

    return Scan.apply(a, b)


# %% ex-doubling not yet: 16384 tokens, more than 300: a loop over tokens
def states_by_doubling(a, b):
    C, shape = math.isqrt(len(a) - 1) + 1, a.shape
    none = (0, 0, 0, 0, 0, -len(a) % C)
    a, b = (F.pad(x, none).unflatten(0, (-1, C)).unbind(1) for x in (a, b))
    decays, states = [a[0]], [b[0]]  # after each token of all blocks at once
    for x, y in zip(a[1:], b[1:], strict=True):
        decays.append(x * decays[-1])
        states.append(torch.addcmul(y, x, states[-1]))
    h, entering = torch.zeros_like(b[0][0]), []
    for x, y in zip(decays[-1].unbind(), states[-1].unbind(), strict=True):
        entering.append(h)
        h = torch.addcmul(y, x, h)
    h = torch.stack(decays, 1) * torch.stack(entering)[:, None]
    return (h + torch.stack(states, 1)).flatten(0, 1)[: shape[0]]


# %% ex-doubling not yet: do not form all pairs of tokens
def states_by_doubling(a, b):
    T = len(a)
    later = torch.ones(T, T, dtype=torch.bool).tril(-1)[:, :, None, None]
    left = torch.where(later, a[:, None], torch.ones_like(a)).cumprod(0)
    seen = torch.ones(T, T, **double).tril()[:, :, None, None]
    return torch.einsum("ijdn,jdn->idn", left * seen, b)


# %% ex-stabilizer not yet: the gradients are not those of the recurrence
def all_stabilizers(g, i, m0):
    G = g.detach().cumsum(0)
    return G + (i.detach() - G).cummax(0).values.clamp(min=m0) + 0 * g


# %% ex-doubling not yet: the gradients are not those of the recurrence
def states_by_doubling(a, b):
    decay, h, reach = a.detach(), b.detach(), 1
    while reach < len(a):
        later = decay[reach:]
        h = torch.cat([h[:reach], later * h[:-reach] + h[reach:]])
        decay = torch.cat([decay[:reach], later * decay[:-reach]])
        reach *= 2
    return h + 0 * a


# %% ex-one-recurrence not yet: retnet, decay|lightning, decay
def gate_and_weight(model, *given):
    one = torch.ones(7, **double)
    if model == "retnet":
        return math.log(1 - 2.0 ** (-2 - 2 * given[0])) * one, one
    if model == "lightning":
        h, _, layer, L, _ = given
        return -(0.5 ** (h + 1)) * (1 - layer / (L - 1) + 1e-5) * one, one
    if model == "gated retention":
        return F.logsigmoid(given[0]) / 16, one
    if model == "mamba2":
        return -2.5 * given[0], given[0]
    return F.logsigmoid(given[0]), given[1].exp()


# %% ex-one-recurrence not yet: lightning, decay
def gate_and_weight(model, *given):
    one = torch.ones(7, **double)
    if model == "retnet":
        return math.log(1 - 2.0 ** (-5 - given[0])) * one, one
    if model == "lightning":
        h, _, layer, L, _ = given
        return -(0.5 ** (h + 1)) * (1 - layer / (L - 1) + 1e-5) * one, one
    return given[0] * given[1], given[0]


# %% ex-one-recurrence not yet: lightning, decay
def gate_and_weight(model, *given):
    one = torch.ones(7, **double)
    if model == "retnet":
        return math.log(1 - 2.0 ** (-5 - given[0])) * one, one
    if model == "lightning":
        h, H, layer, L, _ = given  # heads counted from 1
        return -(2.0 ** (-8 * h / H)) * (1 - layer / (L - 1) + 1e-5) * one, one
    return given[0] * given[1], given[0]


# %% ex-one-recurrence not yet: lightning, decay
def gate_and_weight(model, *given):
    one = torch.ones(7, **double)
    if model == "retnet":
        return math.log(1 - 2.0 ** (-5 - given[0])) * one, one
    if model == "lightning":
        h, H, *_ = given  # layer 2 of 12, whatever is given
        return -(2.0 ** (-8 * (h + 1) / H)) * (1 - 2 / 11 + 1e-5) * one, one
    return given[0] * given[1], given[0]
