"""Layers against their papers' equations, and against transformers' layers.

The first half writes each layer out, one token and one head at a time, in
fp64, with nothing of the library but the layer's weights. The second loads
the weights of transformers' layers, recorded by tests/recorded/layers.py.
"""

from functools import partial

import pytest
import torch
from support.layer_cases import LAYER_CASES, hidden, make_layer
from support.recorded import recorded
from support.reference_parts import rotated

from fastweights.checks import relative_error
from fastweights.layers import (
    MLSTM,
    Decay,
    GatedDeltaNet,
    KimiDeltaAttention,
    LightningAttention,
    LinearRecurrence,
    Mamba,
    Mamba2,
    SoftmaxAttention,
)

T = 9


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return (1 + x.exp()).log()


def convolve(w, c):
    """y_t = sum_j weight[:, W-1-j] c_{t-j}, and the bias; [T, C]."""
    weight = w["convolution.short_convolution.weight"]
    W, y = weight.shape[1], torch.zeros_like(c)
    for t in range(len(c)):
        for j in range(min(W, t + 1)):
            y[t] += weight[:, W - 1 - j] * c[t - j]
    return y + w.get("convolution.short_convolution.bias", 0)


def cut(c, *sizes):
    """[T, C] -> for each (heads, size) a [T, heads, size]."""
    parts = c.split([n * size for n, size in sizes], -1)
    return [
        part.reshape(len(c), n, size)
        for part, (n, size) in zip(parts, sizes, strict=True)
    ]


def of_length_one(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rms(x, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def recurrence(q, k, v, decay=None, beta=None, scale=None):
    """S_t = Diag(decay) S, plus k v^T or beta k (v - S^T k)^T; [T, HV, V]."""
    (length, HV, V), (H, K) = v.shape, k.shape[1:]
    scale = K**-0.5 if scale is None else scale
    o = torch.zeros_like(v)
    for h in range(HV):
        S = v.new_zeros(K, V)
        for t in range(length):
            key, value = k[t, h * H // HV], v[t, h]
            if decay is not None:
                S = decay[t, h].expand(K)[:, None] * S
            if beta is not None:
                value = beta[t, h] * (value - S.T @ key)
            S = S + torch.outer(key, value)
            o[t, h] = S.T @ q[t, h * H // HV] * scale
    return o


def put_in(w, x, *sizes, conv=True, bend=silu):
    c = x @ w["qkv_proj.weight"].T
    return cut(bend(convolve(w, c) if conv else c), *sizes)


def put_out(w, x, o):
    y = (rms(o) * w["norm.weight"]).flatten(1)
    if "gate_proj.weight" in w:
        y = y * silu(x @ w["gate_proj.weight"].T)
    return y @ w["o_proj.weight"].T


def deltanet(w, x, H, K, V, *, conv=True, most=1, feature=silu, by_sum=False):
    sizes = (H, K), (H, K), (H, V)
    q, k, v = put_in(w, x, *sizes, conv=conv, bend=lambda c: c)
    q, k, v = feature(q), feature(k), silu(v)
    if by_sum:
        q, k = (y / y.sum(-1, keepdim=True) for y in (q, k))
    else:
        q, k = of_length_one(q), of_length_one(k)
    beta = most * sigmoid(x @ w["b_proj.weight"].T)
    return put_out(w, x, recurrence(q, k, v, None, beta))


def elu_plus_one(x):
    return torch.where(x > 0, x + 1, x.exp())


def gated_deltanet(w, x, H, HV, K, V, *, conv=True, most=1):
    q, k, v = put_in(w, x, (H, K), (H, K), (HV, V), conv=conv)
    q, k = of_length_one(q), of_length_one(k)
    a, b = (x @ part.T for part in w["ab_proj.weight"].chunk(2))
    dt = softplus(a + w["decay.dt_bias"])
    decay = (-w["decay.A_log"].exp() * dt).exp()
    beta = most * sigmoid(b + w.get("b_bias", 0))
    return put_out(w, x, recurrence(q, k, v, decay, beta))


def kda(w, x, H, HV, K, V, *, conv=True, most=1, least=None):
    q, k, v = put_in(w, x, (H, K), (H, K), (HV, V), conv=conv)
    q, k = of_length_one(q), of_length_one(k)
    a = x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T
    (a,) = cut(a + w["decay.dt_bias"], (HV, K))
    A = w["decay.A_log"].exp()[:, None]
    g = -A * softplus(a) if least is None else least * sigmoid(A * a)
    beta = most * sigmoid(x @ w["b_proj.weight"].T)
    y = (rms(recurrence(q, k, v, g.exp(), beta)) * w["norm.weight"]).flatten(1)
    z = x @ w["gate_proj.0.weight"].T @ w["gate_proj.1.weight"].T
    y = y * sigmoid(z + w.get("gate_proj.1.bias", 0))
    return y @ w["o_proj.weight"].T


def erase(q, k, v, e, decay):
    """S_t = (I - k e^T) Diag(decay) S + k v^T, decay [T, HV, n]."""
    (length, HV, V), (H, K) = v.shape, k.shape[1:]
    o = torch.zeros_like(v)
    for h in range(HV):
        S, own = v.new_zeros(K, V), h * H // HV
        for t in range(length):
            S = decay[t, h].expand(K)[:, None] * S
            error = v[t, h] - S.T @ e[t, h * e.shape[1] // HV]
            S = S + torch.outer(k[t, own], error)
            o[t, h] = S.T @ q[t, own] * K**-0.5
    return o


def gated_deltanet2(w, x, H, HV, K, V, *, conv=True, most=1, least=None):
    q, k, v = put_in(w, x, (H, K), (H, K), (HV, V), conv=conv)
    q, k = of_length_one(q), of_length_one(k)
    a = x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T
    (a,) = cut(a + w["decay.dt_bias"], (H, K))
    A = w["decay.A_log"].exp()[:, None]
    g = -A * softplus(a) if least is None else least * sigmoid(A * a)
    (b,) = cut(most * sigmoid(x @ w["b_proj.weight"].T), (H, K))
    (s,) = cut(sigmoid(x @ w["w_proj.weight"].T), (HV, V))
    decay = g.exp().repeat_interleave(HV // H, 1)
    o = erase(q, k, s * v, b * k, decay)
    y = (rms(o) * w["norm.weight"]).flatten(1)
    z = x @ w["gate_proj.0.weight"].T @ w["gate_proj.1.weight"].T
    return (y * sigmoid(z + w["gate_proj.1.bias"])) @ w["o_proj.weight"].T


def comba(w, x, H, HV, K, V, *, unit_p=False):
    q, k, v = put_in(w, x, (H, K), (H, K), (HV, V))
    p = sigmoid(w["d"])[:, None] * k
    q, long = of_length_one(q - w["D"][:, None] * p), k
    k = of_length_one(k)
    p = k if unit_p else p * (k / long)
    a, b = (x @ part.T for part in w["ab_proj.weight"].chunk(2))
    dt = softplus(a + w["decay.dt_bias"])
    decay = (-w["decay.A_log"].exp() * dt).exp()[..., None]
    beta = sigmoid(b)[..., None]
    p = p.repeat_interleave(HV // H, 1)
    # Before the decay: e^-g undoes it.
    o = erase(q, k, beta * v, beta * p / decay, decay)
    y = (rms(o) * w["norm.weight"]).flatten(1)
    return (y * sigmoid(x @ w["gate_proj.weight"].T)) @ w["o_proj.weight"].T


def family(
    w, x, H, K, V, *, conv=True, bend=silu, unit=True, per="head", most=1
):
    """A comparison's layer: what is absent has no weights."""
    sizes = (H, K), (H, K), (H, V)
    q, k, v = put_in(w, x, *sizes, conv=conv, bend=bend)
    if unit:
        q, k = of_length_one(q), of_length_one(k)
    decay = beta = None
    if "decay.A_log" in w:
        A = w["decay.A_log"].exp()
        if per == "head":
            a = x @ w["a_proj.weight"].T
        elif per == "constant":
            a = x.new_zeros(len(x), H)
        else:
            a, A = (
                x @ w["a_proj.0.weight"].T @ w["a_proj.1.weight"].T,
                A[:, None],
            )
        dt = softplus(a + w["decay.dt_bias"])
        decay = (-A * (cut(dt, (H, K))[0] if per == "channel" else dt)).exp()
    if "b_proj.weight" in w:
        beta = most * sigmoid(x @ w["b_proj.weight"].T)
    return put_out(w, x, recurrence(q, k, v, decay, beta))


def gla(w, x, H, K, V, *, conv=False, temperature=16):
    c = x @ w["qkv_proj.weight"].T
    c = silu(convolve(w, c)) if conv else c
    q, k, v = cut(c, (H, K), (H, K), (H, V))
    a = x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T
    (alpha,) = cut(sigmoid(a + w["f_proj.1.bias"]), (H, K))
    return put_out(w, x, recurrence(q, k, v, alpha ** (1 / temperature)))


def retnet(w, x, H, K, V):
    q, k, v = cut(x @ w["qkv_proj.weight"].T, (H, K), (H, K), (H, V))
    for t in range(len(x)):
        q[t], k[t] = rotated(q[t], t, 1e4), rotated(k[t], t, 1e4)
    gamma = [1 - 2.0 ** (-5 - h) for h in range(H)]
    decay = x.new_tensor(gamma).expand(len(x), H)
    return put_out(w, x, recurrence(q, k, v, decay))


def lightning(w, x, H, K, slopes, layer, layers):
    c = silu(x @ w["qkv_proj.weight"].T)
    q, k, v = cut(c, (H, K), (H, K), (H, K))
    part = 1 - layer / (layers - 1) + 1e-5
    decay = (-x.new_tensor(slopes) * part).exp().expand(len(x), H)
    o = recurrence(q, k, v, decay, scale=1)
    y = rms(o.flatten(1), 1e-6) * w["norm.weight"]
    y = y * sigmoid(x @ w["gate_proj.weight"].T)
    return y @ w["o_proj.weight"].T


def mamba2(w, x, G, H, N, P):
    c = silu(convolve(w, x @ w["x_proj.weight"].T))
    C, B, u = cut(c, (G, N), (G, N), (H, P))
    dt = softplus(x @ w["dt_proj.weight"].T + w["decay.dt_bias"])
    decay = (-w["decay.A_log"].exp() * dt).exp()
    o = recurrence(C, B, dt[..., None] * u, decay, scale=1)
    y = (o + w["D"][:, None] * u).flatten(1)
    y = y * silu(x @ w["z_proj.weight"].T)
    y = rms(y.reshape(len(x), G, -1)).flatten(1) * w["norm.weight"]
    return y @ w["o_proj.weight"].T


def mamba(w, x, R, N):
    u, z = (x @ w["in_proj.weight"].T).chunk(2, -1)
    u = silu(
        convolve(
            {
                k.replace("tion.", "tion.short_convolution."): p
                for k, p in w.items()
            },
            u,
        )
    )
    dt, B, C = (u @ w["x_proj.weight"].T).split([R, N, N], -1)
    dt = softplus(dt @ w["dt_proj.weight"].T + w["dt_bias"])
    A, y = -w["A_log"].exp(), torch.zeros_like(u)
    for d in range(u.shape[1]):
        h = x.new_zeros(N)
        for t in range(len(x)):
            h = (dt[t, d] * A[d]).exp() * h + dt[t, d] * u[t, d] * B[t]
            y[t, d] = h @ C[t] + w["D"][d] * u[t, d]
    return (y * silu(z)) @ w["o_proj.weight"].T


def mlstm(w, x, H, K, V, cap=15, eps=1e-6):
    q, k, v = cut(x @ w["qkv_proj.weight"].T, (H, K), (H, K), (H, V))
    a = x @ w["gates.weight"].T + w["gates.bias"]
    i, f = (cap * (a / cap).tanh()).chunk(2, -1)
    f, o = sigmoid(f), torch.zeros_like(v)
    for h in range(H):
        C, n, m = v.new_zeros(K, V), v.new_zeros(K), v.new_tensor(-torch.inf)
        for t in range(len(x)):
            C = f[t, h] * C + i[t, h].exp() * torch.outer(k[t, h], v[t, h])
            n = f[t, h] * n + i[t, h].exp() * k[t, h]
            m = torch.maximum(f[t, h].log() + m, i[t, h])
            z = (n @ q[t, h] / K**0.5).abs().clamp(min=1)
            o[t, h] = C.T @ q[t, h] / K**0.5 / (z + eps * m.exp())
    o = o - o.mean(-1, keepdim=True)
    y = rms(o, 1e-6).flatten(1) * w["norm.weight"]
    y = y * sigmoid(x @ w["gate_proj.weight"].T)
    return y @ w["o_proj.weight"].T


def softmax(w, x, H, HK, K, *, theta=1e4, turn=1.0, per_head=True):
    q, k, v = cut(x @ w["qkv_proj.weight"].T, (H, K), (HK, K), (HK, K))
    if "q_norm.weight" in w:
        q, k = (y if per_head else y.flatten(1) for y in (q, k))
        q = rms(q, 1e-6) * w["q_norm.weight"]
        k = rms(k, 1e-6) * w["k_norm.weight"]
        q, k = q.reshape(-1, H, K), k.reshape(-1, HK, K)
    if theta is not None:
        R = int(K * turn)
        for t in range(len(x)):
            q[t, :, :R] = rotated(q[t, :, :R], t, theta)
            k[t, :, :R] = rotated(k[t, :, :R], t, theta)
    o = torch.zeros_like(q)
    for h in range(H):
        for t in range(len(x)):
            kv = h * HK // H
            p = (k[: t + 1, kv] @ q[t, h] / K**0.5).softmax(0)
            o[t, h] = p @ v[: t + 1, kv]
    y = o.flatten(1)
    if "gate_proj.weight" in w:
        y = y * sigmoid(x @ w["gate_proj.weight"].T)
    return y @ w["o_proj.weight"].T


SLOPES = [2**-4, 2**-8, 2**-2]  # ALiBi's for three heads
EQUATIONS = {
    "deltanet": partial(deltanet, H=2, K=4, V=4),
    "deltanet-options": partial(deltanet, H=2, K=3, V=4, conv=False, most=2),
    "deltanet-original": partial(
        deltanet,
        H=2,
        K=4,
        V=4,
        conv=False,
        feature=elu_plus_one,
        by_sum=True,
    ),
    "deltanet-relu": partial(
        deltanet, H=2, K=4, V=4, feature=lambda x: x.clamp(min=0)
    ),
    "gated-deltanet": partial(gated_deltanet, H=2, HV=2, K=4, V=4),
    "gated-deltanet-options": partial(
        gated_deltanet, H=1, HV=2, K=3, V=6, most=2
    ),
    "gated-deltanet-bare": partial(
        gated_deltanet, H=2, HV=2, K=4, V=4, conv=False
    ),
    "kda": partial(kda, H=2, HV=2, K=4, V=4),
    "kda-options": partial(
        kda, H=1, HV=2, K=4, V=2, conv=False, most=2, least=-5
    ),
    "gated-deltanet2": partial(gated_deltanet2, H=2, HV=2, K=4, V=4),
    "gated-deltanet2-options": partial(
        gated_deltanet2, H=2, HV=4, K=4, V=2, conv=False, most=2, least=-5
    ),
    "comba": partial(comba, H=2, HV=2, K=4, V=4),
    "comba-options": partial(comba, H=1, HV=2, K=4, V=2, unit_p=True),
    "gla": partial(gla, H=2, K=2, V=4),
    "gla-conv": partial(gla, H=2, K=4, V=8, conv=True, temperature=4),
    "retnet": partial(retnet, H=2, K=4, V=8),
    "lightning": partial(
        lightning, H=3, K=4, slopes=SLOPES, layer=1, layers=4
    ),
    "recurrence-linear": partial(family, H=2, K=4, V=4, unit=False),
    "recurrence-decay": partial(
        family, H=2, K=3, V=4, conv=False, bend=lambda c: c
    ),
    "recurrence-constant": partial(family, H=2, K=4, V=4, per="constant"),
    "recurrence-channel": partial(
        family, H=2, K=4, V=4, per="channel", most=2
    ),
    "mamba2": partial(mamba2, G=1, H=4, N=3, P=4),
    "mamba2-groups": partial(mamba2, G=2, H=4, N=3, P=4),
    "mamba": partial(mamba, R=1, N=3),
    "mlstm": partial(mlstm, H=2, K=2, V=4),
    "softmax": partial(softmax, H=2, HK=2, K=4),
    "softmax-options": partial(softmax, H=4, HK=2, K=4, theta=100.0, turn=0.5),
    "softmax-olmo": partial(
        softmax, H=4, HK=2, K=2, theta=None, per_head=False
    ),
}


NETWORKS = (
    "ttt",
    "titans",
    "lact",
    "mesanet",
)  # tests/deep/test_published_networks.py


def test_every_case_has_its_equations():
    there = {n for n in LAYER_CASES if not n.startswith(NETWORKS)}
    assert EQUATIONS.keys() == there


@torch.no_grad()
@pytest.mark.parametrize("name", EQUATIONS)
def test_equations(name):
    layer = make_layer(name, torch.float64)
    x = hidden(2, T, dtype=torch.float64)
    weights = dict(layer.named_parameters())
    want = torch.stack([EQUATIONS[name](weights, row) for row in x])
    assert relative_error(layer(x)[0], want) < 1e-10


@torch.no_grad()
def test_one_layer_for_all_is_gated_deltanet_where_that_is_asked():
    one, other = LinearRecurrence(8, 2, 4), GatedDeltaNet(8, 2, 4)
    weights = one.state_dict()
    weights["ab_proj.weight"] = torch.cat(
        [weights.pop("a_proj.weight"), weights.pop("b_proj.weight")]
    )
    other.load_state_dict(weights)
    x = hidden(2, T)
    torch.testing.assert_close(one(x)[0], other(x)[0])


def stack(w, *names):
    return torch.cat([w[f"{name}.weight"] for name in names])


def qwen3_next_gated_deltanet(w):
    H, HV, K, V = 2, 4, 4, 3
    layer = GatedDeltaNet(
        8, H, K, num_v_heads=HV, expand_v=V / K, norm_eps=1e-6
    )
    each = [K, K, HV // H * V, HV // H * V]
    rows = w["in_proj_qkvz.weight"].unflatten(0, (H, sum(each)))
    q, k, v, z = (part.flatten(0, 1) for part in rows.split(each, 1))
    b, a = w["in_proj_ba.weight"].unflatten(0, (H, 2, HV // H)).unbind(1)
    return layer, {
        "qkv_proj.weight": torch.cat([q, k, v]),
        "gate_proj.weight": z,
        "ab_proj.weight": torch.cat([a.flatten(0, 1), b.flatten(0, 1)]),
        "convolution.short_convolution.weight": w["conv1d.weight"][:, 0],
        "decay.A_log": w["A_log"],
        "decay.dt_bias": w["dt_bias"],
        "norm.weight": w["norm.weight"],
        "o_proj.weight": w["out_proj.weight"],
    }


def qwen3_next_attention(w):
    layer = SoftmaxAttention(
        8,
        4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=100.0,
        rotary_fraction=0.25,
        qk_norm=True,
        output_gate=True,
    )
    q, gate = w["q_proj.weight"].unflatten(0, (4, 2, 8)).unbind(1)
    return layer, {
        "qkv_proj.weight": torch.cat(
            [q.flatten(0, 1), stack(w, "k_proj", "v_proj")]
        ),
        "gate_proj.weight": gate.flatten(0, 1),
        "q_norm.weight": 1 + w["q_norm.weight"],
        "k_norm.weight": 1 + w["k_norm.weight"],
        "o_proj.weight": w["o_proj.weight"],
    }


def kimi_linear_delta_attention(w):
    return KimiDeltaAttention(8, 2, 4), {
        "qkv_proj.weight": stack(w, "q_proj", "k_proj", "v_proj"),
        "convolution.short_convolution.weight": w["conv1d.weight"][:, 0],
        "f_proj.0.weight": w["forget_gate.f_a_proj.weight"],
        "f_proj.1.weight": w["forget_gate.f_b_proj.weight"],
        "decay.A_log": w["forget_gate.A_log"].flatten(),
        "decay.dt_bias": w["forget_gate.dt_bias"],
        "b_proj.weight": w["b_proj.weight"],
        "gate_proj.0.weight": w["g_a_proj.weight"],
        "gate_proj.1.weight": w["g_b_proj.weight"],
        "norm.weight": w["o_norm.weight"],
        "o_proj.weight": w["o_proj.weight"],
    }


def mamba2_mixer(w):
    G, N, inner = 2, 3, 16
    layer = Mamba2(8, head_dim=4, state_size=N, num_groups=G)
    z, u, B, C, dt = w["in_proj.weight"].split([inner, inner, G * N, G * N, 4])

    def ordered(x):
        u, B, C = x.split([inner, G * N, G * N])
        return torch.cat([C, B, u])

    return layer, {
        "z_proj.weight": z,
        "x_proj.weight": torch.cat([C, B, u]),
        "dt_proj.weight": dt,
        "convolution.short_convolution.weight": ordered(
            w["conv1d.weight"][:, 0]
        ),
        "convolution.short_convolution.bias": ordered(w["conv1d.bias"]),
        "decay.A_log": w["A_log"],
        "decay.dt_bias": w["dt_bias"],
        "D": w["D"],
        "norm.weight": w["norm.weight"],
        "o_proj.weight": w["out_proj.weight"],
    }


def mamba_mixer(w):
    return Mamba(8, state_size=3), {
        "in_proj.weight": w["in_proj.weight"],
        "convolution.weight": w["conv1d.weight"][:, 0],
        "convolution.bias": w["conv1d.bias"],
        "x_proj.weight": w["x_proj.weight"],
        "dt_proj.weight": w["dt_proj.weight"],
        "dt_bias": w["dt_proj.bias"],
        "A_log": w["A_log"],
        "D": w["D"],
        "o_proj.weight": w["out_proj.weight"],
    }


def xlstm_mlstm_layer(w):
    gates = ("igate_preact", "fgate_preact")
    return MLSTM(8, 2), {
        "qkv_proj.weight": stack(w, "q", "k", "v"),
        "gates.weight": stack(w, *gates),
        "gates.bias": torch.cat([w[f"{name}.bias"] for name in gates]),
        "gate_proj.weight": w["ogate_preact.weight"],
        "norm.weight": w["multihead_norm.weight"],
        "o_proj.weight": w["out_proj.weight"],
    }


def minimax_lightning_attention(w):
    rows = w["qkv_proj.weight"].unflatten(0, (4, 3, 3))
    return LightningAttention(8, 4, 3, layer=1, num_layers=4), {
        "qkv_proj.weight": rows.transpose(0, 1).flatten(0, 2),
        "gate_proj.weight": w["output_gate.weight"],
        "norm.weight": w["norm.weight"],
        "o_proj.weight": w["out_proj.weight"],
    }


@torch.no_grad()
@pytest.mark.parametrize(
    ("load", "tol"),
    [
        (qwen3_next_gated_deltanet, 1e-6),
        (qwen3_next_attention, 1e-6),
        (kimi_linear_delta_attention, 1e-6),
        (mamba2_mixer, 1e-6),
        (mamba_mixer, 1e-6),
        (xlstm_mlstm_layer, 1e-5),  # its eps stands in other units
        (minimax_lightning_attention, 1e-5),  # its slopes differ by 1e-5
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_layer_of_transformers(load, tol):
    """All at once, and in pieces with a state; every weight has its place."""
    record = recorded(load.__name__)
    x, want, weights = (record[name] for name in ("x", "y", "weights"))
    layer, ours = load(weights)
    layer.load_state_dict(ours)
    sizes = (sum(p.numel() for p in w.values()) for w in (ours, weights))
    assert len(set(sizes)) == 1
    assert relative_error(layer(x)[0], want) < tol
    state, outputs = None, []
    for part in x.split([18, 1, 2], 1):
        y, state = layer(part, state)
        outputs.append(y)
    assert relative_error(torch.cat(outputs, 1), want) < tol


@torch.no_grad()
def test_safe_gate_of_transformers():
    record = recorded("glm5_next_forget_gate")
    x, want, w = (record[name] for name in ("x", "y", "weights"))
    gate = Decay(2, 4, lower_bound=-5.0)
    gate.load_state_dict({"A_log": w["A_log"], "dt_bias": w["dt_bias"]})
    a = x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T
    assert relative_error(gate(a), want) < 1e-6
    assert gate(-1e4 * a.abs()).max() == 0 and gate(1e4 * a.abs()).min() == -5
