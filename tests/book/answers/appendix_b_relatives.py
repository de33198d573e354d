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
