"""Networks as fast weights against public code, and where that differs.

tests/recorded/deep.py ran the code of TTT's, LaCT's and other authors on
small inputs, with a last chunk that is shorter, and kept outputs and the
gradients of their sum of squares. Titans has no code by its authors: it is
judged by a loop of the paper's equations.
"""

import pytest
import torch
import torch.nn.functional as F
from support.recorded import recorded
from support.reference_parts import Memory, rms_norm
from torch.utils._pytree import tree_map

from fastweights import deep
from fastweights.checks import relative_error
from fastweights.deep.networks import (
    affine,
    linear_model,
    normed,
    residual,
)
from fastweights.deep.optimisers import summed
from fastweights.fast_weights import (
    learn,
    momentum_sgd,
    online_learner,
    sgd,
    squared_error,
)
from fastweights.layers import (
    TTTMLP,
    LaCT,
    MesaNet,
    TitansMemory,
    TTTLinear,
)

DOUBLE = {"dtype": torch.float64}


def theirs(name):
    """Inputs that ask for gradients, outputs, and those gradients."""
    record = recorded(name)
    x = {k: t.double().requires_grad_() for k, t in record["inputs"].items()}
    slopes = {k: t.double() for k, t in record["gradients"].items()}
    return x, record["o"].double(), slopes


def judge(o, want, x, slopes, tol):
    assert relative_error(o, want) < tol
    found = torch.autograd.grad(o.square().sum(), x.values())
    for key, gradient in zip(x, found, strict=True):
        assert relative_error(gradient, slopes[key]) < tol, key


@pytest.mark.parametrize("make", [TTTLinear, TTTMLP])
def test_ttt_of_its_authors(make):
    """A whole layer: outputs, and gradients of x and of every weight."""
    kind = make.__name__.removeprefix("TTT").lower()
    w, want, slopes = theirs(f"ttt_{kind}")
    layer = make(8, 2, mini_batch=4, **DOUBLE)
    ours = {
        "qkv_proj.weight": torch.cat(
            [w[f"{n}_proj.weight"] for n in ("q", "k", "v")]
        ),
        "rate_proj.weight": w["learnable_ttt_lr_weight"][:, 0],
        "rate_proj.bias": w["learnable_ttt_lr_bias"][:, 0],
        "step_offset": w["learnable_token_idx"],
        "model_norm_weight": w["ttt_norm_weight"],
        "model_norm_bias": w["ttt_norm_bias"],
        "post_norm.weight": w["post_norm.weight"],
        "post_norm.bias": w["post_norm.bias"],
        "o_proj.weight": w["o_proj.weight"],
    }
    for n in range(1, layer.depth + 1):
        ours |= {f"W{n}": w[f"W{n}"], f"b{n}": w[f"b{n}"][:, 0]}
    assert ours.keys() == layer.state_dict().keys()
    y, _ = torch.func.functional_call(layer, ours, (w["x"],))
    judge(y, want, w, slopes, 1e-6)


def lact_of(w, **options):
    """One head per sequence: each has first weights of its own."""
    rates = torch.cat([w["lr0"], w["lr1"], w["lr2"]], -1)
    start = [w[name].mT for name in ("w0", "w1", "w2")]
    tokens = (w["q"], w["k"], w["v"], rates)
    q, k, v, rates = (t.transpose(0, 1)[None] for t in tokens)
    momentum = w["momentum"][..., 0].mT[None] if "momentum" in w else None
    o, _ = deep.lact(q, k, v, rates, start, momentum, chunk_size=4, **options)
    return o[0].transpose(0, 1)


@pytest.mark.parametrize("name", ["muon", "plain", "prenorm"])
def test_lact_of_its_authors(name):
    """With Newton-Schulz in fp64, where the code has bf16."""
    w, want, slopes = theirs(f"lact_{name}")
    options = {"muon": name != "plain", "prenorm": name == "prenorm"}
    judge(lact_of(w, **options), want, w, slopes, 1e-6)


def test_lact_layer_of_its_authors():
    """Pre-norm, momentum and Muon: outputs, gradients of every weight."""
    w, want, slopes = theirs("lact_layer")
    layer = LaCT(
        8,
        2,
        num_attention_heads=4,
        expansion=1.5,
        chunk_size=4,
        window=5,
        prenorm=True,
        rope_theta=100.0,
        **DOUBLE,
    )
    unchanged = ("o_proj.weight", "q_norm.weight", "k_norm.weight")
    ours = {name: w[name] for name in unchanged}
    ours |= {f"qk_{n}": w[f"qk_{n}"].mT for n in ("scale", "offset")}
    ours |= {f"w{i}": w[f"w{i}"].mT for i in range(3)}
    ours |= {
        "qkv_proj.weight": w["qkv.weight"],
        "norm.weight": w["ttt_norm.weight"],
    }
    for n in ("weight", "bias"):
        ours[f"rates_proj.{n}"] = w[f"lr_proj.{n}"]
        ours[f"momentum_proj.{n}"] = w[f"momentum_proj.0.{n}"]
        ours[f"scale_proj.{n}"] = w[f"ttt_scale_proj.{n}"]
    assert ours.keys() == layer.state_dict().keys()
    y, _ = torch.func.functional_call(layer, ours, (w["x"],))
    judge(y, want, w, slopes, 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("flag", ["muon", "momentum", "prenorm"])
def test_lacts_flags_reach_its_memory(flag, on, monkeypatch):
    """What deep.lact does with them is judged by its authors' code above."""
    calls = []

    def spy(*tokens, **options):
        calls.append({"momentum": tokens[5] is not None} | options)
        return deep.lact(*tokens, **options)

    monkeypatch.setattr("fastweights.layers.lact.lact", spy)
    LaCT(8, 2, **{flag: on}, **DOUBLE)(torch.randn(1, 9, 8, **DOUBLE))
    assert calls[0][flag] == on


def test_lact_in_single_precision():
    """Newton-Schulz in fp32, as it comes for inputs in fp32."""
    w, want, _ = theirs("lact_muon")
    w = {key: t.detach().float() for key, t in w.items()}
    assert relative_error(lact_of(w), want) < 1e-6


def test_mesa_of_flash_linear_attention():
    x, want, slopes = theirs("mesa_exact")
    names = ("q", "k", "v", "g", "beta", "lamb")
    o, state = deep.mesa(*(x[name] for name in names))
    judge(o, want, x, slopes, 1e-6)
    assert state.shape == (2, 2, 4, 8)


def test_mesa_is_ridge_regression_on_the_tokens_so_far():
    """The normal equations of all decayed pairs, written out."""
    torch.manual_seed(0)
    T, K = 7, 3
    q, k, v = torch.randn(3, 1, T, 1, K, **DOUBLE)
    g, beta = -torch.rand(1, T, 1, **DOUBLE), torch.rand(1, T, 1, **DOUBLE)
    ridge = 0.3 + torch.rand(1, K, **DOUBLE)
    o, _ = deep.mesa(q, k, v, g, beta, ridge, solver_steps=6)
    for t in range(T):
        share = beta[0, : t + 1, 0].clone()
        for s in range(t + 1):
            share[s] *= g[0, s + 1 : t + 1, 0].sum().exp()
        root = share.sqrt()[:, None]
        rows = torch.cat([root * k[0, : t + 1, 0], ridge[0].sqrt().diag()])
        values = torch.cat([root * v[0, : t + 1, 0], torch.zeros(K, K)])
        S = torch.linalg.lstsq(rows, values).solution
        assert relative_error(o[0, t, 0], q[0, t, 0] @ S) < 1e-10


def of_lucidrains(w, chunk, base):
    """NeuralMemory: queries, keys, values, rates and first weights."""

    def normed_by(name):
        return F.rms_norm(w["x"], (4,), w[name])

    stored, asked = (
        normed_by("store_norm.weight"),
        normed_by("retrieve_norm.weight"),
    )

    def rate(name, x):
        return (x @ w[f"{name}.0.weight"].mT + w[f"{name}.0.bias"]).sigmoid()

    n = stored.shape[1] // chunk * chunk
    means = stored[:, :n].unflatten(1, (-1, chunk)).mean(2)
    B = len(stored)
    q = asked @ w["to_queries.weight"].mT
    k = stored @ w["to_keys.weight"].mT
    v = stored @ w["to_values.weight"].mT
    theta = rate("to_adaptive_step", stored)
    eta, alpha = (
        rate(name, means).repeat_interleave(chunk, 1)
        for name in ("to_momentum", "to_decay_factor")
    )
    gamma, *layers = (w[f"memory_model_parameters.{i}"] for i in range(3))
    start = tuple(p.expand(B, *p.shape) for p in (gamma, *layers))

    def model(params, x):
        gamma, *layers = params
        for i, W in enumerate(layers):
            x = linear_model(W, F.gelu(x) if i else x)
        return F.layer_norm(x, (4,)) * (1 + gamma)

    def loss(prediction, target):
        return (prediction - target).square().mean(-1)

    def optimiser(params, gradient, memory, momentum, g):
        one = torch.ones_like(momentum)
        return momentum_sgd(params, gradient, memory, one, momentum, g)

    step = online_learner(
        residual(model),
        loss,
        summed(optimiser, chunk, every="chunk", base=start if base else None),
    )
    state = start, tree_map(torch.zeros_like, start)
    tokens = (q[:, :n], k[:, :n], v[:, :n], theta[:, :n], eta)
    o, (params, _) = learn(
        step,
        state,
        *(t[:, :, None] for t in tokens),
        torch.log1p(-alpha)[:, :, None],
    )
    rest = residual(model)(tuple(p[:, None] for p in params), q[:, n:, None])
    return torch.cat([o, rest], 1)[:, :, 0]


def test_titans_pytorch_steps_once_per_chunk():
    """Its differences from the paper, each by name.

    One gradient, one momentum and one decay per chunk, of the mean input;
    all gradients at the sequence's first weights (batch_size=None); a token
    reads what the last complete chunk has left, its own only if it ends one;
    a mean over channels in the loss; a LayerNorm and a residual around the
    memory. With these it is a learner, to the digit.
    """
    w, want, slopes = theirs("titans_lucidrains")
    judge(of_lucidrains(w, 3, base=True), want, w, slopes, 1e-6)
    refreshed = of_lucidrains(w, 3, base=False)
    assert relative_error(refreshed, want) > 1e-3


def test_flash_linear_attentions_ttt_reads_another_residual():
    """Its reference adds LN(o) to o, the authors' layer to q.

    Also its rate is the reading token's, for all gradients before it, and
    not each gradient's own; it starts from zero weights.
    """
    x, want, _ = theirs("ttt_flash_linear_attention")
    gamma, bias = x["w"], x["b"]
    B, T, H, K = x["q"].shape
    start = torch.zeros(B, H, K, K, **DOUBLE), torch.zeros(B, H, K, **DOUBLE)
    one = torch.ones(B, T, H, **DOUBLE)
    given = x["q"], x["k"], x["v"] - x["k"], one, x["eta"][..., 0]

    def judged_by(read):
        learner = online_learner(
            normed(affine, gamma, bias), squared_error, summed(sgd, 4)
        )

        def step(state, q, *rest):
            state, _ = learner(state, q, *rest)
            return state, read(state[0], q)

        return learn(step, (start, None), *given)[0]

    norm = normed(lambda params, o: o, gamma, bias)
    found = judged_by(lambda p, q: affine(p, q) + norm(p, affine(p, q)))
    assert relative_error(found, want) < 1e-6
    authors = judged_by(lambda p, q: q + norm(p, affine(p, q)))
    assert relative_error(authors, want) > 0.1


# The layers written out, a token and a head at a time.


@pytest.mark.parametrize("chunk", [1, 3])
def test_titans_layer_written_out(chunk):
    """The paper's eqs. 11 to 14, a token at a time, by autograd.

    The loss |M(k) - v|^2 has no half, alpha is what is forgotten, and the
    gradient of a chunk's tokens is that of its first weights (section 3.2).
    """
    torch.manual_seed(0)
    layer = TitansMemory(8, 2, 4, chunk_size=chunk, conv_size=None, **DOUBLE)
    assert layer.max_rate == 0.1
    torch.nn.init.normal_(layer.rates_proj.bias)
    torch.nn.init.normal_(layer.start.norm_weight)
    torch.nn.init.normal_(layer.start.norm_bias)
    x, memory = torch.randn(7, 8, **DOUBLE), Memory(layer)
    for t, found in enumerate(layer(x[None])[0][0]):
        if t % chunk == 0:
            base = [[*M] for M in memory.M]
        want = memory.learned(base, x[t])
        assert relative_error(found, want) < 1e-10


def test_mesanet_layer_written_out():
    torch.manual_seed(0)
    layer = MesaNet(8, 2, 4, conv_size=2, **DOUBLE)
    torch.nn.init.normal_(layer.lam)
    x = torch.randn(1, 7, 8, **DOUBLE)
    w = layer.state_dict()
    qk, v = (x[0] @ w["qkv_proj.weight"].mT).split([16, 8], -1)
    taps = w["convolution.weight"]
    before = torch.cat([torch.zeros(1, 16, **DOUBLE), qk[:-1]])
    q, k = F.silu(taps[:, 1] * qk + taps[:, 0] * before).chunk(2, -1)
    ab = (x[0] @ w["ab_proj.weight"].mT + w["ab_proj.bias"]).sigmoid()
    heads = []
    for h in range(2):
        at, outputs = slice(4 * h, 4 * h + 4), []
        ridge = (0.25 + (1 + w["lam"][at].exp()).log()).diag()
        A, G = torch.zeros(2, 4, 4, **DOUBLE)
        for t in range(7):
            key, query = (
                y[t, at] / (y[t, at].square().sum() + 1e-6).sqrt()
                for y in (k, q)
            )
            decay, beta = ab[t, h], ab[t, 2 + h]
            A = decay * A + beta * torch.outer(key, key)
            G = decay * G + beta * torch.outer(key, v[t, at])
            outputs.append(torch.linalg.solve(A + ridge, query) @ G)
        heads.append(rms_norm(torch.stack(outputs), w["norm.weight"]))
    want = torch.cat(heads, -1) @ w["o_proj.weight"].mT
    assert relative_error(layer(x)[0][0], want) < 1e-10


def test_how_layers_start():
    """What the papers and their code start from."""
    torch.manual_seed(0)
    for make, rate in ((TTTLinear, 1.0), (TTTMLP, 0.1)):
        layer = make(64, 2)
        assert layer.max_rate == rate and layer.step_offset.eq(0).all()
        assert layer.rate_proj.bias.eq(0).all()
        for W, b in layer.start:
            assert abs(W.std() - 0.02) < 2e-3 and b.eq(0).all()
    assert [W.shape for W, _ in layer.start] == [(2, 32, 128), (2, 128, 32)]
    mesanet = MesaNet(8, 2, 4)
    ridge = mesanet.min_ridge + F.softplus(mesanet.lam)
    torch.testing.assert_close(ridge, torch.ones(8))
    lact = LaCT(64, 2)
    assert abs(F.softplus(torch.tensor(lact.rate_bias)) - 1e-3) < 1e-8
    assert abs(lact.w1.std() * 32**0.5 - 1) < 0.1
    assert lact.chunk_size == lact.window == 2048
    titans = TitansMemory(64, 2, 32)
    kept = 1 - titans.rates_proj.bias.chunk(3)[2].sigmoid()
    assert (kept - 0.982).abs().max() < 1e-3
    assert abs(titans.start.W2.std() * 128**0.5 - 1) < 0.1
